"""A transport whose channels ask the fault switch before they move a message; see ``faults``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cluster.transport.base import Channel, PeerLost, Rendezvous, TransferTimeout, Transport
from cluster.transport.faults import FaultSwitch, Firing, Point, Verb

if TYPE_CHECKING:
    from torch import Tensor


class FaultyTransport(Transport):
    """Opens the channels of another transport, with the switch in their way."""

    def __init__(self, inner: Transport, switch: FaultSwitch) -> None:
        self.kind = inner.kind
        self.device = inner.device
        self._inner = inner
        self._switch = switch

    def open(self, *, link_id: str, rank: int, rendezvous: Rendezvous, timeout_s: float) -> Channel:
        """Open one end; its peer is read off the link's name, SENDER>RECEIVER/EPOCH."""
        channel = self._inner.open(
            link_id=link_id, rank=rank, rendezvous=rendezvous, timeout_s=timeout_s
        )
        peer = link_id.rpartition("/")[0].split(">")[1 - rank]
        return _FaultyChannel(channel, self._switch, peer)


class _FaultyChannel(Channel):
    def __init__(self, inner: Channel, switch: FaultSwitch, peer: str) -> None:
        super().__init__()
        self.kind = inner.kind
        self._inner = inner
        self._switch = switch
        self._peer = peer
        self._is_gone = threading.Event()
        self.kind, self.transfer_lock = inner.kind, inner.transfer_lock
        self.piece_bytes = inner.piece_bytes

    def _send(self, data_B: Tensor, timeout_s: float) -> None:
        firing = self._switch.at(Point.SEND, self._peer)
        verb = firing.fault.verb if firing is not None else None
        if firing is None or verb in (Verb.DELAY, Verb.HOLD, Verb.FAIL):
            self._pause(firing, timeout_s, num_bytes=data_B.numel())
            self._inner.send(data_B, timeout_s)
        elif verb is Verb.CORRUPT:
            self._inner.send(_corrupted(data_B.clone(), firing.fault.offset), timeout_s)
        elif verb is Verb.TRUNCATE:
            self._inner.send(data_B[: data_B.numel() // 2], timeout_s)
        elif verb is Verb.DUPLICATE:
            self._inner.send(data_B, timeout_s)
            self._inner.send(data_B, timeout_s)

    def _recv(self, into_B: Tensor, timeout_s: float) -> None:
        firing = self._switch.at(Point.RECV, self._peer)
        verb = firing.fault.verb if firing is not None else None
        if firing is None or verb in (Verb.DELAY, Verb.HOLD, Verb.FAIL):
            self._pause(firing, timeout_s)
            self._inner.recv(into_B, timeout_s)
        elif verb is not Verb.EARLY:
            arrived_B = into_B.clone()
            self._inner.recv(arrived_B, timeout_s)
            if verb is Verb.CORRUPT:
                into_B.copy_(_corrupted(arrived_B, firing.fault.offset))
            elif verb is Verb.TRUNCATE:
                half = into_B.numel() // 2
                into_B[:half].copy_(arrived_B[:half])
        self._pause(self._switch.at(Point.RECEIVED, self._peer), timeout_s)

    def _pause(self, firing: Firing | None, timeout_s: float, *, num_bytes: int = 0) -> None:
        """Stand still for as long as the fault says, or break."""
        if firing is None:
            return
        if firing.fault.verb is Verb.FAIL:
            raise PeerLost("broken on purpose", stage="transfer")
        is_delay = firing.fault.verb is Verb.DELAY
        delay_s = firing.fault.seconds + firing.fault.seconds_per_byte * num_bytes
        patience_s = delay_s if is_delay else timeout_s
        is_over = self._switch.wait_over(firing, patience_s, self._is_gone)
        if self._is_gone.is_set():
            raise PeerLost("closed while it was held", stage="transfer")
        if not (is_over or is_delay):
            raise TransferTimeout("held on purpose", stage="transfer")

    def _interrupt(self) -> None:
        self._is_gone.set()
        self._switch.nudge()
        self._inner.close()

    def _release(self) -> None:
        self._inner.close()


def _corrupted(data_B: Tensor, offset: int) -> Tensor:
    data_B[offset] = ~data_B[offset]
    return data_B
