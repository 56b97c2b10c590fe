"""The decode worker's side of opening links: serves the Link call of prefill workers.

A link is refused where the dialer means another incarnation (this worker restarted at the same
address), or where its blocks mean something else. Each link gets an epoch, which no link of this
worker ever had: epochs count up from a random start, so not even a restart repeats one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, NoReturn

import grpc

from cluster.errors import HandoffFailed, PdserveError
from cluster.rpc.link import Link, LinkEvents
from cluster.rpc.link_convert import layout_from_wire, peer_from_wire
from cluster.rpc.link_settings import LinkSettings, LinkState
from cluster.rpc.link_thread import LinkThreads
from cluster.rpc.options import INCARNATION_METADATA
from cluster.transport.base import RECEIVER
from cluster.wire import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cluster.kv.layout import KVLayout
    from cluster.request import Peer
    from cluster.transport.base import Transport
    from cluster.transport.staging import TransferLimits

    Context = grpc.aio.ServicerContext[pb.LinkMessage, pb.LinkMessage]

logger = logging.getLogger(__name__)

MAX_LINKS = 64
"""Each holds a staging buffer and a thread."""


class LinkAcceptor:
    """Accepts links from prefill workers; used on one event loop."""

    def __init__(
        self,
        *,
        me: Peer,
        layout: KVLayout,
        transport: Transport,
        events: LinkEvents,
        limits: TransferLimits | None = None,
        open_timeout_s: float = 5.0,
    ) -> None:
        self._me = me
        self._events = events
        self._settings = LinkSettings.of(layout, transport, limits, open_timeout_s)
        self._epoch = secrets.randbits(48)
        self._links: dict[str, Link] = {}
        self._threads = LinkThreads()
        self._is_closed = False
        self.num_refused = 0
        """Calls that got no link."""

    async def serve(
        self, request_iterator: AsyncIterator[pb.LinkMessage], context: Context
    ) -> None:
        """Serve one Link call until the link is lost; to be awaited by the Worker servicer."""
        incoming = aiter(request_iterator)
        sender = await self._admit(incoming, context)
        self._epoch += 1
        epoch = self._epoch
        link_id = f"{sender.worker_id}>{self._me.worker_id}/{epoch}"
        link = Link(peer=sender, link_id=link_id, epoch=epoch, settings=self._settings)
        self._threads.add(link)
        self._replace(link)
        opening: asyncio.Task[None] | None = None
        try:
            await context.write(pb.LinkMessage(welcome=pb.LinkWelcome(link_epoch=epoch)))
            opening = asyncio.create_task(self._open(link))
            reason = await link.run(incoming, context.write, self._events)
        finally:
            link.close("the call was cancelled")
            if self._links.get(sender.incarnation) is link:
                del self._links[sender.incarnation]
            if opening is not None:
                await opening
        await context.abort(grpc.StatusCode.ABORTED, reason)

    @property
    def states(self) -> tuple[LinkState, ...]:
        """What is told of the links that are open."""
        return tuple(link.state for link in self._links.values() if link.is_open)

    @property
    def is_moving(self) -> bool:
        """Whether bytes are under way over one of its links."""
        return any(link.num_moves for link in self._links.values())

    async def close(self) -> None:
        """Drop every link and accept no more; idempotent. The calls end by themselves."""
        self._is_closed = True
        for link in list(self._links.values()):
            link.close("this worker is stopping")
        await self._threads.wait()

    async def _admit(self, incoming: AsyncIterator[pb.LinkMessage], context: Context) -> Peer:
        try:
            async with asyncio.timeout(self._settings.open_timeout_s):
                message = await anext(incoming)
        except (TimeoutError, StopAsyncIteration):
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "no hello came")
        if message.WhichOneof("kind") != "hello":
            await self._refuse(
                context, grpc.StatusCode.INVALID_ARGUMENT, "a link begins with its hello"
            )
        hello = message.hello
        if hello.receiver_incarnation != self._me.incarnation:
            # Which one is here goes back, so that the dialer can tell a restart from a refusal.
            context.set_trailing_metadata(((INCARNATION_METADATA, self._me.incarnation),))
            await self._refuse(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"incarnation {self._me.incarnation} is here",
            )
        try:
            sender = peer_from_wire(hello.sender)
            theirs = layout_from_wire(hello.layout)
        except PdserveError as error:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, error.message)
        obstacle = self._settings.obstacle(theirs)
        if obstacle is not None:
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, obstacle)
        if self._is_closed:
            await self._refuse(context, grpc.StatusCode.UNAVAILABLE, "stopping")
        if len(self._links) >= MAX_LINKS and sender.incarnation not in self._links:
            await self._refuse(
                context, grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_LINKS} links are open"
            )
        return sender

    async def _refuse(self, context: Context, code: grpc.StatusCode, why: str) -> NoReturn:
        self.num_refused += 1
        logger.warning("link refused: %s", why)
        await context.abort(code, why)
        raise AssertionError("abort raises")

    def _replace(self, link: Link) -> None:
        # The sender keeps one link to us: if it dials again, it has lost the one we still hold.
        old = self._links.get(link.peer.incarnation)
        self._links[link.peer.incarnation] = link
        if old is not None:
            old.close(f"replaced by epoch {link.epoch}")

    async def _open(self, link: Link) -> None:
        try:
            await link.open_channel(RECEIVER)
        except HandoffFailed:
            return  # the link is closed with the reason
