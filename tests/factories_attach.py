"""A worker's server with a handler that a test plays, its clients, and a wire that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from cluster.request import Beat, Leg, LegKey, LegKind, Peer, SamplingParams
from cluster.rpc.client import WorkerClient
from cluster.rpc.server import WorkerServer

KEY = LegKey("req-1", 2, 3)


def make_leg(**fields) -> Leg:
    params = {"max_tokens": 8, **fields.pop("params", {})}
    defaults = {
        "key": KEY,
        "kind": LegKind.PREFILL,
        "prompt_ids": (1, 2, 3),
        "params": SamplingParams(**params),
        "remaining_s": 5.0,
        "grant_id": "grant",
        "handoff_id": "handoff",
        "peer": Peer(worker_id="d", incarnation="d1", address="127.0.0.1:2"),
    }
    return Leg(**{**defaults, **fields})


class Handler:
    """A worker that keeps what it is told, and answers when the test says so."""

    def __init__(self) -> None:
        self.legs: asyncio.Queue = asyncio.Queue()
        self.aborts: asyncio.Queue = asyncio.Queue()
        self.redirects: asyncio.Queue = asyncio.Queue()
        self.lost: asyncio.Queue = asyncio.Queue()
        self.aborted: list[tuple] = []
        self.beat = Beat(3, 0.0)

    def start_leg(self, leg, sink) -> None:
        self.legs.put_nowait((leg, sink))

    def abort_leg(self, key, cause, grant_id, sink) -> None:
        self.aborts.put_nowait((key, cause))
        self.aborted.append((grant_id, sink))

    def redirect_leg(self, redirect) -> None:
        self.redirects.put_nowait(redirect)

    def router_lost(self, sink) -> None:
        self.lost.put_nowait(sink)


class Events:
    """What a router hears."""

    def __init__(self) -> None:
        self.batches: asyncio.Queue = asyncio.Queue()
        self.waiting: asyncio.Queue = asyncio.Queue()
        self.prompts: asyncio.Queue = asyncio.Queue()
        self.beats: asyncio.Queue = asyncio.Queue()
        self.lost: asyncio.Queue = asyncio.Queue()
        self.is_alive = False
        """What was told of the worker that was lost."""

    def on_beat(self, beat) -> None:
        self.beats.put_nowait(beat)

    def on_tokens(self, tokens, ends, waiting=(), prompts=()) -> None:
        if tokens or ends:
            self.batches.put_nowait((list(tokens), list(ends)))
        for notice in waiting:
            self.waiting.put_nowait(notice)
        for run in prompts:
            self.prompts.put_nowait(run)

    def on_worker_lost(self, peer, reason, *, is_alive=False) -> None:
        self.is_alive = is_alive
        self.lost.put_nowait((peer, reason))


@dataclass
class Wire:
    """A TCP proxy before a worker: it can cut what goes through it, and refuse what comes."""

    target: str
    address: str = ""
    num_connections: int = 0
    is_refusing: bool = False
    is_deaf: bool = False
    """Passes nothing on to the router, as if it were lost on the way."""
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Reset every connection, both ways."""
        for writer in list(self._open):
            writer.transport.abort()

    async def stop(self) -> None:
        self.cut()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader, writer) -> None:
        if self.is_refusing:
            writer.transport.abort()
            return
        self.num_connections += 1
        host, _, port = self.target.rpartition(":")
        back_reader, back_writer = await asyncio.open_connection(host, int(port))
        self._open |= {writer, back_writer}
        for source, sink, is_down in ((reader, back_writer, False), (back_reader, writer, True)):
            task = asyncio.ensure_future(self._pump(source, sink, is_down=is_down))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source, sink, *, is_down: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if not (is_down and self.is_deaf):
                    sink.write(data)
        self._open.discard(sink)
        sink.transport.abort()


@dataclass
class Attached:
    """One worker's server, and the routers that a test attaches to it."""

    server: WorkerServer
    address: str
    handler: Handler
    clients: list[WorkerClient] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)

    def client(self, incarnation="w1", *, router="r1", wire: Wire | None = None):
        """Return a router's client, and what it hears."""
        events = Events()
        address = wire.address if wire else self.address
        peer = Peer(worker_id="w", incarnation=incarnation, address=address)
        client = WorkerClient(peer, router_id="router", incarnation=router, events=events)
        self.clients.append(client)
        return client, events

    async def wire(self) -> Wire:
        """Return a wire to the worker."""
        wire = Wire(self.address)
        await wire.start()
        self.wires.append(wire)
        return wire


async def soon(queue):
    return await asyncio.wait_for(queue.get(), 5)
