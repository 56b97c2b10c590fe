"""Links between two processes over gloo: every byte arrives, and a peer's death is found fast."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from cluster.handoff import Commit
from cluster.request import Peer
from cluster.transport.base import TransportError
from cluster.transport.staging import TransferLimits
from tests.integration.link_peer import (
    Receiver,
    digest,
    listen,
    make_dialer,
    make_export,
    make_manifest,
)

if TYPE_CHECKING:
    from cluster.rpc.link import Link
    from cluster.rpc.link_dialer import LinkDialer

ROOT = Path(__file__).parents[2]
LONG_S = 30.0


class Process:
    """A peer in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(LONG_S):
            line = (await self.process.stdout.readline()).decode().strip()
        assert line, "the peer ended"
        return line

    def freeze(self) -> None:
        """Stop it, and prove that it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    async def kill(self) -> None:
        """Kill it, and prove that it is gone."""
        self.process.kill()
        assert await self.process.wait() == -signal.SIGKILL
        assert not psutil.pid_exists(self.process.pid)


StartPeer = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start_peer() -> AsyncIterator[StartPeer]:
    started = []

    async def start(*args: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.integration.link_peer",
            *args,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return Process(process)

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


StartListening = Callable[..., Awaitable[Peer]]


@pytest.fixture
async def start_listening() -> AsyncIterator[StartListening]:
    servers = []

    async def start(half: Half) -> Peer:
        server, me = await listen(half, TransferLimits())
        servers.append(server)
        return me

    yield start
    for server in servers:
        await server.stop(None)


class Half:
    """The test's own end."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.lost: list[str] = []
        self._changed = asyncio.Event()

    def on_signal(self, link: Link, message: object) -> None:
        self.messages.append(message)
        self._changed.set()

    def on_link_lost(self, link: Link, reason: str) -> None:
        self.lost.append(reason)
        self._changed.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = LONG_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def gather_from(export):
    def gather(start: int, num_blocks: int, out_B) -> None:
        out_B.copy_(export[start : start + num_blocks].view(-1))

    return gather


async def link_to_process(
    peer: Process, half: Half, limits: TransferLimits
) -> tuple[Link, LinkDialer]:
    address = await peer.line()
    dialer = make_dialer(half, limits)
    link = await dialer.link_to(Peer(worker_id="d", incarnation="d-1", address=address), LONG_S)
    return link, dialer


async def test_blocks_cross_processes_byte_by_byte(start_peer: StartPeer):
    peer, half = await start_peer("receive"), Half()
    link, dialer = await link_to_process(peer, half, TransferLimits())
    for index, num_blocks in enumerate((1, 32, 45, 100)):
        export = make_export(num_blocks, seed=index)
        await link.send_export(make_manifest(num_blocks, f"h{index}"), gather_from(export))
        assert await peer.line() == f"imported h{index} {digest(export)}"
    await half.until(lambda: len(half.messages) == 4)
    assert half.messages == [Commit(handoff_id=f"h{index}") for index in range(4)]
    await dialer.close()
    assert (await peer.line()).startswith("lost ")


async def test_nothing_of_a_link_listens_beyond_loopback(start_peer: StartPeer):
    """S-03: neither gloo nor a store opens a port to the network."""
    peer, half = await start_peer("receive"), Half()
    _, dialer = await link_to_process(peer, half, TransferLimits())
    for pid in (os.getpid(), peer.process.pid):
        listeners = [
            one.laddr.ip.removeprefix("::ffff:")
            for one in psutil.Process(pid).net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        ]
        assert listeners
        assert set(listeners) == {"127.0.0.1"}
    await dialer.close()


async def test_a_receiver_killed_in_mid_transfer_is_found_at_once(start_peer: StartPeer):
    peer, half = await start_peer("receive"), Half()
    link, dialer = await link_to_process(peer, half, TransferLimits())
    export = make_export(200, seed=1)
    sending = asyncio.create_task(
        link.send_export(make_manifest(200, "stuck"), gather_from(export))
    )
    assert await peer.line() == "stuck"
    assert not sending.done()
    await peer.kill()
    before = time.monotonic()
    with pytest.raises(TransportError):
        await sending
    assert time.monotonic() - before < 5
    await half.until(lambda: len(half.lost) == 1)
    assert not link.is_open
    await dialer.close()


async def test_a_sender_killed_in_mid_transfer_is_found_at_once(
    start_peer: StartPeer, start_listening: StartListening
):
    class Waiting(Half):
        def on_signal(self, link: Link, message: object) -> None:
            self.receiving = asyncio.create_task(receiver.receive(link, make_cut()))
            super().on_signal(link, message)

    def make_cut():
        manifest = make_manifest(64, "h")
        return manifest.cut(32 * manifest.block_bytes, turn=1)

    receiver, half = Receiver(), Waiting()
    me = await start_listening(half)
    peer = await start_peer("send", me.address)
    assert await peer.line() == "stuck"
    await half.until(lambda: len(half.messages) == 1)
    assert not half.receiving.done()
    await peer.kill()
    before = time.monotonic()
    with pytest.raises(TransportError):
        await half.receiving
    assert time.monotonic() - before < 5
    await half.until(lambda: len(half.lost) == 1)


async def test_a_blocked_transfer_does_not_keep_a_process_from_ending(
    start_peer: StartPeer, start_listening: StartListening
):
    half = Half()
    me = await start_listening(half)
    peer = await start_peer("leave", me.address)
    await half.until(lambda: len(half.messages) == 1)  # its manifest: nobody will receive it
    assert peer.process.stdin is not None
    peer.process.stdin.write(b"\n")
    assert {await peer.line(), await peer.line()} == {"lost leaving", "failed PeerLost"}
    async with asyncio.timeout(10):
        assert await peer.process.wait() == 0
    await half.until(lambda: len(half.lost) == 1)


async def test_a_receiver_that_stops_answering_is_found_in_mid_transfer(start_peer: StartPeer):
    peer, half = await start_peer("receive"), Half()
    link, dialer = await link_to_process(peer, half, TransferLimits(floor_s=1.0))
    peer.freeze()
    before = time.monotonic()
    with pytest.raises(TransportError):  # the transfer's timeout, or the ping's if it is first
        await link.send_export(make_manifest(40, "h"), gather_from(make_export(40, seed=1)))
    assert time.monotonic() - before < 5
    await half.until(lambda: len(half.lost) == 1)
    await dialer.close()


async def test_an_idle_peer_that_stops_answering_is_found_by_pings(start_peer: StartPeer):
    peer, half = await start_peer("receive"), Half()
    _, dialer = await link_to_process(peer, half, TransferLimits())
    peer.freeze()
    await half.until(lambda: len(half.lost) == 1, timeout_s=15)
    await dialer.close()
