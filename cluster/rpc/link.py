"""A live link between a prefill and a decode worker: one signalling stream, one channel, one fate.

                 event loop                                 link thread
    half ──signal──▶ outbox ──▶ stream ──▶ peer
    peer ──▶ stream ──▶ on_signal ──▶ half
    send_export ──▶ outbox (manifest) and ──────────▶ gather ─▶ channel.send   (per piece)
    recv_import ────────────────────────────────────▶ channel.recv ─▶ scatter  (per piece)

Manifests and transfers take their turns in the same order on both sides, so a message on the
channel needs no tag. When the stream or the channel breaks, both are dropped: the link is lost,
once and for ever, and whoever wants to go on dials anew. The prefill worker dials
(``link_dialer``), the decode worker accepts (``link_acceptor``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cluster.errors import PdserveError
from cluster.handoff import AbortHandoff, Commit, ManifestBytes, Offer
from cluster.rpc.link_convert import signal_from_wire, signal_to_wire
from cluster.rpc.link_settings import LinkSettings, LinkState
from cluster.rpc.link_thread import LinkThread
from cluster.rpc.link_turns import LinkTurns
from cluster.rpc.rendezvous import StreamRendezvous
from cluster.transport.base import SENDER, Channel, ChannelClosed, PeerLost, TransportError
from cluster.transport.staging import StagedChannel
from cluster.wire import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from torch import Tensor

    from cluster.handoff import LinkSignal
    from cluster.request import Peer
    from cluster.transport.manifest import Manifest

    MoveBlocks = Callable[[int, int, Tensor], None]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LinkEvents(Protocol):
    """What a half hears of its links; called on the event loop, and must not raise."""

    def on_signal(self, link: Link, message: LinkSignal) -> None:
        """One message of the peer's, in order."""

    def on_link_lost(self, link: Link, reason: str) -> None:
        """The link is gone, whoever ended it; once for each link that was open."""


class Link:
    """One end of a link; made by a dialer or an acceptor, used on its event loop."""

    def __init__(self, *, peer: Peer, link_id: str, epoch: int, settings: LinkSettings) -> None:
        self.peer = peer
        self.epoch = epoch
        self.link_id = link_id
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[pb.LinkMessage] = asyncio.Queue()
        self._rendezvous = StreamRendezvous(self._publish)
        self._thread = LinkThread(f"link-{peer.worker_id}")
        self._staged: StagedChannel | None = None
        self._turns: LinkTurns | None = None
        self.num_moves = 0  # transfers that were announced and are not over
        self._under_way: set[str] = set()
        """Handoffs that were offered and are not over, as far as the signals say."""
        self._used_at = self._loop.time()
        self._events: LinkEvents | None = None
        self._opened = asyncio.Event()
        self._num_manifests = 0
        """Sent, or received: a link moves bytes one way."""
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._callbacks = threading.Lock()

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the link is lost and its thread has let go of the channel."""
        return self._thread.ended

    @property
    def is_open(self) -> bool:
        """Whether signals and bytes can go."""
        return self._opened.is_set() and not self._lost.done()

    @property
    def lost_reason(self) -> str | None:
        """Why the link is gone; None while it is not."""
        return self._lost.result() if self._lost.done() else None

    @property
    def state(self) -> LinkState:
        """What is told of an open link."""
        return LinkState(
            peer_worker_id=self.peer.worker_id,
            epoch=self.epoch,
            transport=self._check_alive().channel.kind or self._settings.transport.kind,
        )

    @property
    def idle_s(self) -> float:
        """Seconds since anything was under way; 0 while something is."""
        is_used = self.num_moves > 0 or bool(self._under_way)
        return 0.0 if is_used else self._loop.time() - self._used_at

    def touch(self) -> None:
        """Count as used now: somebody was given this link and is about to use it."""
        self._used_at = self._loop.time()

    def signal(self, message: LinkSignal) -> None:
        """Send one message behind those before it; raises PeerLost on a lost link."""
        self._check_alive()
        self._note(message)
        self._outbox.put_nowait(signal_to_wire(message))

    def send_export(
        self, manifest: Manifest, export: MoveBlocks, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, None]:
        """Send a manifest and its bytes; what to await ends when they left, before the commit.

        The manifest is under way at once, ahead of what its caller says next. ``export(first_block,
        num_blocks, out_B)`` fills ``out_B`` with that part of the export; it runs on the link's
        thread, and never after the end. ``timeout_s`` bounds each piece, by default by its size. A
        caller that is cancelled waits nevertheless: the manifest is out, so the bytes follow.
        Raises TransportError; the link is lost then.
        """
        staged = self._check_alive()
        manifest.check_layout(self._settings.layout)
        self._num_manifests += 1
        manifest = staged.cut(manifest, self._num_manifests)
        self._outbox.put_nowait(signal_to_wire(ManifestBytes(payload=manifest.pack())))
        if not manifest.num_bytes:
            return _nothing_follows()
        guarded = self._guard(export)
        return self._move(lambda: staged.send(manifest, guarded, timeout_s))

    async def recv_import(
        self, manifest: Manifest, scatter: MoveBlocks, timeout_s: float | None = None
    ) -> None:
        """Receive the bytes of a manifest; to be called for every one, in their order.

        ``scatter(first_block, num_blocks, staged_B)`` takes that part out of the staging buffer;
        it runs on the link's thread, and never after this returned or raised. An error of its
        own is raised here when all bytes have come, and leaves the link whole. A manifest that
        does not fit this worker loses the link: its bytes have no place.
        """
        staged = self._check_alive()
        try:
            manifest.check_layout(self._settings.layout)
            staged.check_fits(manifest)
            self._check_turn(manifest)
        except PdserveError as error:
            self.close(error.message)
            raise
        if not manifest.num_bytes:
            return
        guarded = self._guard(scatter)
        await self._move(lambda: staged.recv(manifest, guarded, timeout_s))

    def _check_turn(self, manifest: Manifest) -> None:
        """Refuse a manifest that is lost, repeated or out of order: other bytes would follow it.

        A message that is longer than its buffer ends this process on some transports.
        """
        self._num_manifests += 1
        if manifest.turn != self._num_manifests:
            raise TransportError(
                f"manifest {manifest.turn} came where {self._num_manifests} was due",
                stage="transfer",
            )

    def close(self, reason: str) -> None:
        """Drop the stream and the channel; idempotent. ``on_link_lost`` follows if it was open."""
        if self._lost.done():
            return
        self._lost.set_result(reason)
        logger.info("link=%s lost: %s", self.link_id, reason)
        self._rendezvous.fail(reason)
        if self._turns is not None:
            self._turns.fail(reason)
        if self._staged is not None:
            self._staged.channel.condemn()  # others of its GPU may wait for what it is at
        self._thread.stop_after(self._close_channel)
        if self._opened.is_set() and self._events is not None:
            # Not from within: whoever closes a link may hold state that the handler changes.
            self._loop.call_soon(self._events.on_link_lost, self, reason)

    # ---- for the dialer and the acceptor

    async def run(
        self,
        incoming: AsyncIterator[pb.LinkMessage],
        write: Callable[[pb.LinkMessage], Awaitable[object]],
        events: LinkEvents,
    ) -> str:
        """Carry the stream until the link is lost; returns why."""
        self._events = events
        tasks: list[asyncio.Future[Any]] = [
            asyncio.create_task(self._read_all(incoming)),
            asyncio.create_task(self._write_all(write)),
        ]
        try:
            await asyncio.wait([*tasks, self._lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.close("the signalling stream was cut")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._lost.result()

    async def open_channel(self, rank: int) -> None:
        """Open this end's channel on the link's thread; needs ``run`` beside it."""
        settings = self._settings

        def open_staged() -> Channel:
            channel = settings.transport.open(
                link_id=self.link_id,
                rank=rank,
                rendezvous=self._rendezvous,
                timeout_s=settings.open_timeout_s,
            )
            try:
                self._staged = StagedChannel(channel, settings.limits, settings.transport.device)
            except BaseException:
                channel.close()
                raise
            return channel

        try:
            channel = await self._finish(self._thread.submit(open_staged))
        except Exception as error:
            self.close(f"the channel did not open: {error}")
            if isinstance(error, PdserveError):
                raise
            # Descriptors or memory ran out: that is this link's end, and not its worker's.
            why = f"the channel did not open: {type(error).__name__}"
            raise TransportError(why, stage="link") from error
        if channel.transfer_lock is not None:
            self._turns = LinkTurns(
                rank=rank,
                lock=channel.transfer_lock,
                write=self._outbox.put_nowait,
                patience_s=settings.limits.turn_s,
            )
        self._opened.set()
        logger.info(
            "link=%s open as %s through %s",
            self.link_id,
            "sender" if rank == SENDER else "receiver",
            (channel.kind or settings.transport.kind).value,
        )

    # ---- inside

    def _check_alive(self) -> StagedChannel:
        if self._lost.done():
            raise PeerLost(
                f"link lost: {self._lost.result()}", stage="link", worker_id=self.peer.worker_id
            )
        assert self._staged is not None, "used before it was open"
        return self._staged

    def _publish(self, key: str, value: bytes) -> None:
        message = pb.LinkMessage(store=pb.StoreEntry(key=key, value=value))
        with suppress(RuntimeError):  # the loop is closed, and so is the stream
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)

    def _guard(self, callback: MoveBlocks) -> MoveBlocks:
        def guarded(start: int, num_blocks: int, data_B: Tensor) -> None:
            with self._callbacks:
                if self._lost.done():
                    raise ChannelClosed("link lost", stage="transfer")
                callback(start, num_blocks, data_B)

        return guarded

    def _move(self, job: Callable[[], None]) -> Coroutine[Any, Any, None]:
        """Run a transfer on the link's thread, in its turn; returns what to await."""
        self.num_moves += 1
        moving = self._thread.submit(lambda: self._in_turn(job))
        moving.add_done_callback(self._moved)
        return self._finish(moving)

    def _moved(self, _: asyncio.Future[None]) -> None:
        self.num_moves -= 1
        self.touch()

    def _in_turn(self, job: Callable[[], None]) -> None:
        # On the link's thread.
        if self._turns is None:
            job()
            return
        try:
            with self._turns:
                job()
        except TransportError:
            # A turn that did not come leaves the peer waiting for bytes.
            self._close_channel()
            raise

    def _note(self, message: LinkSignal) -> None:
        """Keep count of what is under way; a link is idle only when nothing is."""
        if isinstance(message, Offer):
            self._under_way.add(message.handoff_id)
        elif isinstance(message, Commit | AbortHandoff):
            self._under_way.discard(message.handoff_id)
        self.touch()

    async def _finish(self, job: asyncio.Future[T]) -> T:
        """Wait for a job of the link's thread, or for the link's end; cancelling only delays."""
        cancelled = await _wait_out(job, self._lost)
        if not job.done():
            # It may be inside a callback, which must be over before the caller is told.
            passed = asyncio.ensure_future(asyncio.to_thread(self._pass_callbacks))
            cancelled |= await _wait_out(passed)
        if self._staged is not None and self._staged.channel.is_dead:
            self.close(_reason(job))
        if cancelled:
            raise asyncio.CancelledError
        if not job.done():
            self._check_alive()
            raise PeerLost(f"link lost: {self.lost_reason}", stage="link")
        return job.result()

    def _pass_callbacks(self) -> None:
        with self._callbacks:
            return

    def _close_channel(self) -> None:
        if self._staged is not None:
            self._staged.close()

    async def _read_all(self, incoming: AsyncIterator[pb.LinkMessage]) -> None:
        try:
            async for message in incoming:
                if message.WhichOneof("kind") == "store":
                    self._rendezvous.deliver(message.store.key, message.store.value)
                    continue
                await self._opened.wait()  # the peer may be through with opening a little earlier
                if self._turns is not None and message.WhichOneof("kind") == "lock":
                    self._turns.hear(message.lock)
                    continue
                signal = signal_from_wire(message)
                self._note(signal)
                self._dispatch(signal)
            self.close("the peer ended the stream")
        except PdserveError as error:
            self.close(error.message)
        except Exception as error:
            self.close(f"the stream broke: {_describe(error)}")

    def _dispatch(self, signal: LinkSignal) -> None:
        if self._lost.done() or self._events is None:
            return
        try:
            self._events.on_signal(self, signal)
        except Exception:
            logger.exception("link=%s handler failed", self.link_id)
            self.close(f"a handler failed on {type(signal).__name__}")

    async def _write_all(self, write: Callable[[pb.LinkMessage], Awaitable[object]]) -> None:
        try:
            while True:
                await write(await self._outbox.get())
        except Exception as error:
            self.close(f"the stream broke: {_describe(error)}")


async def _wait_out(*futures: asyncio.Future[Any]) -> bool:
    """Wait for the first of ``futures``, through cancellation; whether there was one."""
    cancelled = False
    while not any(future.done() for future in futures):
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def _nothing_follows() -> None:
    """End at once: a manifest without bytes was all."""


def _reason(job: asyncio.Future[Any]) -> str:
    error = job.exception() if job.done() and not job.cancelled() else None
    return str(error) if error is not None else "the channel died"


def _describe(error: Exception) -> str:
    details = getattr(error, "details", None)
    return str(details() if callable(details) else error) or type(error).__name__
