"""The prefill worker's side of opening links: dials a decode worker when there is something for it.

One live link per incarnation of a peer; whoever needs it while it is being opened waits for the
same dial. A link that is lost is forgotten, and the next caller dials anew: a new epoch, a new
connection, nothing shared with the old one.

This side also closes links on which nothing was under way for a while: only this side begins
anything, so nothing can be on its way over a link that it closes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from cluster.errors import HandoffFailed, PdserveError, WorkerLost
from cluster.rpc.link import Link, LinkEvents
from cluster.rpc.link_convert import hello_to_wire
from cluster.rpc.link_settings import LinkSettings, LinkState
from cluster.rpc.link_thread import LinkThreads
from cluster.rpc.options import CHANNEL_OPTIONS, INCARNATION_METADATA
from cluster.transport.base import SENDER
from cluster.trust import ClusterToken
from cluster.wire import worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.kv.layout import KVLayout
    from cluster.request import Peer
    from cluster.transport.base import Transport
    from cluster.transport.staging import TransferLimits
    from cluster.wire import worker_pb2 as pb

    LinkCall = grpc.aio.StreamStreamCall[pb.LinkMessage, pb.LinkMessage]


_IDLE_LOOK_S = 0.01


class LinkDialer:
    """Opens links to decode workers on demand; used on one event loop."""

    def __init__(  # noqa: PLR0913 (what it moves how, and what it shows)
        self,
        *,
        me: Peer,
        layout: KVLayout,
        transport: Transport,
        events: LinkEvents,
        limits: TransferLimits | None = None,
        open_timeout_s: float = 5.0,
        token: ClusterToken | None = None,
    ) -> None:
        self._me = me
        self._events = events
        self._token = token or ClusterToken()
        self._settings = LinkSettings.of(layout, transport, limits, open_timeout_s)
        self._links: dict[str, Link] = {}
        self._dials: dict[str, asyncio.Task[Link]] = {}
        self._runs: set[asyncio.Task[None]] = set()
        self._looks: dict[Link, asyncio.TimerHandle] = {}
        """The next look of each link at whether it is idle."""
        self._threads = LinkThreads()
        self._is_closed = False

    async def link_to(self, peer: Peer, timeout_s: float) -> Link:
        """Return the open link to ``peer``, dialling if there is none.

        Raises WorkerLost where this incarnation is not reached in time, and HandoffFailed where
        it refuses the link or its channel does not open.
        """
        if self._is_closed:
            raise HandoffFailed("this worker is stopping", stage="link")
        link = self._links.get(peer.incarnation)
        if link is not None and link.is_open:
            link.touch()
            return link
        dial = self._dials.get(peer.incarnation)
        if dial is None:
            dial = asyncio.create_task(self._dial(peer))
            self._dials[peer.incarnation] = dial
            dial.add_done_callback(lambda done: self._dial_over(peer, done))
        done, _ = await asyncio.wait({dial}, timeout=timeout_s)
        if not done:
            raise _lost(peer, f"no link within {timeout_s:.1f} s")
        if dial.cancelled():
            raise HandoffFailed("this worker is stopping", stage="link")
        return dial.result()

    @property
    def states(self) -> tuple[LinkState, ...]:
        """What is told of the links that are open."""
        return tuple(link.state for link in self._links.values() if link.is_open)

    @property
    def is_moving(self) -> bool:
        """Whether bytes are under way over one of its links."""
        return any(link.num_moves for link in self._links.values())

    async def close(self) -> None:
        """Drop every link, and wait until their streams are gone; idempotent."""
        self._is_closed = True
        for dial in self._dials.values():
            dial.cancel()
        for link in self._links.values():
            link.close("this worker is stopping")
        for run in self._runs:
            run.cancel()
        tasks = [*self._dials.values(), *self._runs]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._threads.wait()

    def _dial_over(self, peer: Peer, dial: asyncio.Task[Link]) -> None:
        del self._dials[peer.incarnation]
        if not dial.cancelled():
            dial.exception()  # the callers may all have given up

    async def _dial(self, peer: Peer) -> Link:
        channel = self._token.channel(peer.address, CHANNEL_OPTIONS)
        link: Link | None = None
        try:
            async with asyncio.timeout(self._settings.open_timeout_s):
                # The stubs know no call that is written to later.
                call: LinkCall = worker_pb2_grpc.WorkerStub(channel).Link(  # type: ignore[call-arg]
                    metadata=self._token.metadata
                )
                incoming = aiter(call)
                epoch = await self._greet(call, incoming, peer)
            link_id = f"{self._me.worker_id}>{peer.worker_id}/{epoch}"
            link = Link(peer=peer, link_id=link_id, epoch=epoch, settings=self._settings)
            self._threads.add(link)
            run = asyncio.create_task(self._run(link, channel, call, incoming))
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)
            await link.open_channel(SENDER)
        except TimeoutError as error:
            raise _lost(peer, "it does not answer") from error
        except grpc.aio.AioRpcError as error:
            raise _refusal(peer, error) from error
        except StopAsyncIteration as error:
            raise _lost(peer, "it ended the stream at once") from error
        finally:
            if link is None:
                await channel.close(None)
            elif not link.is_open:
                link.close("the dial failed")
        self._links[peer.incarnation] = link
        self._close_when_idle(link)
        return link

    def _close_when_idle(self, link: Link) -> None:
        """Look again each time it could have become idle."""
        self._looks.pop(link, None)
        if not link.is_open:
            return
        patience_s = self._settings.limits.idle_s
        if link.idle_s >= patience_s:
            link.close("idle")
            return
        self._looks[link] = asyncio.get_running_loop().call_later(
            max(patience_s - link.idle_s, _IDLE_LOOK_S), self._close_when_idle, link
        )

    async def _greet(
        self, call: LinkCall, incoming: AsyncIterator[pb.LinkMessage], peer: Peer
    ) -> int:
        await call.write(hello_to_wire(self._me, peer.incarnation, self._settings.layout))
        message = await anext(incoming)
        if message.WhichOneof("kind") != "welcome":
            raise HandoffFailed("the peer's first message is no welcome", stage="link")
        return message.welcome.link_epoch

    async def _run(
        self,
        link: Link,
        channel: grpc.aio.Channel,
        call: LinkCall,
        incoming: AsyncIterator[pb.LinkMessage],
    ) -> None:
        try:
            await link.run(incoming, call.write, self._events)
        finally:
            if self._links.get(link.peer.incarnation) is link:
                del self._links[link.peer.incarnation]
            if (look := self._looks.pop(link, None)) is not None:
                look.cancel()
            call.cancel()
            await channel.close(None)


def _refusal(peer: Peer, error: grpc.aio.AioRpcError) -> PdserveError:
    metadata: Any = error.trailing_metadata()
    trailing = {name for name, _ in metadata or ()}
    is_precondition = error.code() is grpc.StatusCode.FAILED_PRECONDITION
    if is_precondition and INCARNATION_METADATA not in trailing:
        return HandoffFailed(
            f"link refused: {error.details()}", stage="link", worker_id=peer.worker_id
        )
    return _lost(peer, error.details() or error.code().name)


def _lost(peer: Peer, why: str) -> WorkerLost:
    return WorkerLost(f"worker {peer.worker_id}: {why}", stage="link", worker_id=peer.worker_id)
