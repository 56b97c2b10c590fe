"""Takes HTTPS connections, and counts each from before it has shaken hands.

    accept ──too many? closed──▶ handshake (handshake_timeout_s) ──▶ ``GuardedConnection``

An event loop's own server makes a connection of a peer once the handshake is over, so peers who
never finish one would be counted by nobody. Nothing can be said to one too many, for it would have
to shake hands to hear it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING

from router.shares import TakenPlace

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from router.shares import Shares

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
"""After a connection could not be accepted, for want of descriptors for example."""


class HttpsListener:
    """Accepts on one socket, which it closes at its end; event loop only."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        *,
        make: Callable[[TakenPlace], asyncio.Protocol],
        places: Shares,
        handshake_timeout_s: float,
    ) -> None:
        """``make`` returns the protocol of a connection that has shaken hands.

        It gives the place back when the connection is lost.
        """
        listener.setblocking(False)
        self._listener = listener
        self._tls = tls
        self._make = make
        self._places = places
        self._handshake_timeout_s = handshake_timeout_s
        self._shaking: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accept nobody more; those who have not shaken hands by the second call are dropped."""
        if self._is_closed:
            for task in self._shaking:
                task.cancel()
        self._is_closed = True
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Return once all that was under way is over."""
        await asyncio.wait((self._accepting, *self._shaking))

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    peer, (address, *_) = await loop.sock_accept(self._listener)
                except OSError as error:
                    logger.warning("HTTPS: a connection cannot be accepted: %s", error.strerror)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if not self._places.take(address):
                    peer.close()
                    continue
                task = loop.create_task(self._shake(peer, TakenPlace(self._places, address)))
                self._shaking.add(task)
                task.add_done_callback(self._shaking.discard)
        finally:
            # Not in ``close``: the loop may not have let go of it there.
            self._listener.close()

    async def _shake(self, peer: socket.socket, place: TakenPlace) -> None:
        has_shaken = False
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                functools.partial(self._make, place),
                peer,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
            has_shaken = True
        except OSError as error:
            logger.debug("HTTPS: no handshake: %r", error)
        finally:
            if not has_shaken:
                place.give_back()
