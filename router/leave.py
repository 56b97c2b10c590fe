"""How a router takes its leave: it says so first, and nobody who comes finds a closed door.

    serves ──▶ not ready, serves ──LAST_CALLS_S──┬─ another has the same doors ──▶ newcomers are
                                                 │    turned away ──_LAST_WORDS_S──▶ nobody is let
                                                 │    in any more, if the other is there still
                                                 │    ──clients have gone──▶ doors closed
                                                 └─ nobody has ──▶ 503 to whoever comes ──▶ the
                                   same, once another has them; or closed with the last call's end

Calls that run are not disturbed by any of it. Where several routers share their doors, those that
are closed are no loss: the kernel gives new connections to the others, and nobody is connected to
these who has not been heard. Whoever keeps a connection is served on it until it has ended: HTTP's
with the next answer or after some idle seconds, gRPC's when it is as old as they get.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from router.ports import is_shared, let_in, turn, turn_away

if TYPE_CHECKING:
    from router.grpc_api import GrpcDoor
    from router.http_door import HttpDoor
    from router.service import Service

logger = logging.getLogger(__name__)

LAST_CALLS_S = 1.0
"""For whoever sends calls here to hear that this router is not ready; they are served."""
_LAST_WORDS_S = 0.7
"""For whoever is connected by then to be accepted and to shake hands: gRPC cuts those who have not.
With ``_TURNS_S`` shorter than the second after which TCP asks again for those who are turned away.
"""
_TURNS_S = 0.15
"""Those who leave together close their doors in turns over it: the last one sees that it is alone.
"""
_LOOK_S = 0.25


class Leave:
    """Prepares one router's doors for being closed."""

    def __init__(self, service: Service, http: HttpDoor, grpc: GrpcDoor) -> None:
        self._service = service
        self._http = http
        self._grpc = grpc

    async def take(self, grace_s: float) -> None:
        """Return when the doors can be closed, and after ``grace_s`` in any case."""
        self._service.leave()
        self._http.let_go()
        await self._grpc.tell_health()
        logger.info("router drains, calls=%d", self._service.num_calls)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.sleep(LAST_CALLS_S)
                while not await self._has_handed_over():
                    self._service.shut()
                    await self._until_over()
                    if not self._has_heirs():
                        break
                else:
                    await self._until_left()
        logger.info("router drained, calls=%d left", self._service.num_calls)

    async def _until_over(self) -> None:
        # Who has come to a port is no event of ours.
        while self._service.num_calls and not self._has_heirs():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)

    async def _until_left(self) -> None:
        """Serve those who are connected until they have gone to the others."""
        self._service.reopen()
        for door in (self._http, self._grpc):
            door.listen_no_more()
        logger.info("router lets nobody in, calls=%d", self._service.num_calls)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grpc.going_s):
                while self._http.has_clients or self._grpc.has_clients:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)

    async def _has_handed_over(self) -> bool:
        """Leave newcomers to others; False, and nobody is turned away, where there are none.

        Those may be about to leave too, and be gone before us.
        """
        if not self._has_heirs():
            return False
        num_sockets = sum(turn_away(door.port) for door in (self._http, self._grpc))
        logger.info("router turns newcomers away, sockets=%d", num_sockets)
        await asyncio.sleep(_LAST_WORDS_S + _TURNS_S * turn(self._http.port))
        if self._has_heirs():
            return True
        logger.info("router is left alone, and lets newcomers in")
        for door in (self._http, self._grpc):
            let_in(door.port)
        return False

    def _has_heirs(self) -> bool:
        return all(is_shared(door.port) for door in (self._http, self._grpc))
