"""Many gRPC calls at once, in frames made beforehand: a client that costs next to nothing.

grpc's own client takes about as long for a call as the router for its refusal, and tells the
deadline only roughly. RFC 9113 has HTTP/2's frames, RFC 7541 its headers. An answer is read as far
as its call's end: what became of the call is the door's to tell.
"""

from __future__ import annotations

import asyncio
import struct
import time

PATH = "/pdserve.v1.Inference/Generate"
CALLS_PER_CONNECTION = 25
"""Their messages fit into what a connection may send before it hears anything (65,535 bytes)."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4


class Burst:
    """Calls at once; leaving the ``with`` hangs up on those that have not ended."""

    def __init__(self, port: int, message: bytes, *, num_calls: int, timeout_s: int) -> None:
        """``timeout_s`` is each call's deadline, exactly as the router is told."""
        self._port = port
        self._ended: asyncio.Queue[float] = asyncio.Queue()
        sizes = [CALLS_PER_CONNECTION] * (num_calls // CALLS_PER_CONNECTION)
        sizes += [num_calls % CALLS_PER_CONNECTION] * (num_calls % CALLS_PER_CONNECTION > 0)
        self._calls = [_calls(size, message, timeout_s) for size in sizes]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Burst:
        """Connect and call."""
        self._tasks = [asyncio.create_task(self._connect(calls)) for calls in self._calls]
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Hang up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next_end(self, patience_s: float) -> float | None:
        """Return how long the next call took from its connecting; None where none ends so soon."""
        try:
            async with asyncio.timeout(patience_s):
                return await self._ended.get()
        except TimeoutError:
            return None

    async def _connect(self, calls: bytes) -> None:
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(_PREFACE + _frame(_SETTINGS) + calls)
            while True:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3]))
                kind, flags = head[3], head[4]
                if kind == _SETTINGS and not flags & _ACK:
                    writer.write(_frame(_SETTINGS, flags=_ACK))
                is_end = kind in (_DATA, _HEADERS) and flags & _END_STREAM
                if is_end or kind == _RESET:
                    self._ended.put_nowait(time.perf_counter() - began)
        finally:
            writer.close()


def _calls(count: int, message: bytes, timeout_s: int) -> bytes:
    headers = b"".join(
        _header(name, value)
        for name, value in (
            (":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "bench"),
            ("te", "trailers"), ("content-type", "application/grpc"),
            ("grpc-timeout", f"{timeout_s}S"),
        )
    )  # fmt: skip
    body = struct.pack(">BI", 0, len(message)) + message
    return b"".join(
        _frame(_HEADERS, headers, flags=_END_HEADERS, stream=stream)
        + _frame(_DATA, body, flags=_END_STREAM, stream=stream)
        for stream in range(1, 2 * count, 2)
    )


def _frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """Return a header as it is, which nobody has to remember; lengths below 127 are one byte."""
    parts = (len(name).to_bytes(), name.encode(), len(value).to_bytes(), value.encode())
    return b"\x00" + b"".join(parts)
