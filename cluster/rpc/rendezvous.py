"""The rendezvous of a link's channel, carried by the link's own signalling stream."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cluster.transport.base import PeerLost, Rendezvous, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_ENTRIES = 64
_MAX_KEY_CHARS = 512
_MAX_VALUE_BYTES = 64 << 10


class StreamRendezvous(Rendezvous):
    """Entries set here are published by ``publish``; the peer's come in through ``deliver``.

    ``publish`` is called on whatever thread sets, and takes it from there to the stream.
    """

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        self._publish = publish
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._failure: str | None = None

    def set(self, key: str, value: bytes) -> None:
        """Publish one entry."""
        self._publish(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for the peer's entry."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._entries or self._failure, timeout_s)
            if key in self._entries:
                return self._entries[key]
            if self._failure is not None:
                raise PeerLost(self._failure, stage="link")
        raise TransferTimeout("the peer did not open its end of the channel", stage="link")

    def deliver(self, key: str, value: bytes) -> None:
        """Take one entry of the peer's; raises PeerLost where it sends more than it may."""
        if len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_BYTES:
            raise PeerLost("a rendezvous entry is too big", stage="link")
        with self._changed:
            if len(self._entries) >= _MAX_ENTRIES or key in self._entries:
                raise PeerLost("a rendezvous entry too many", stage="link")
            self._entries[key] = value
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """The stream is gone: nobody waits any longer."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()
