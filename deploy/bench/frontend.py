"""``frontend``: what the router itself takes of a chat request, and of each token it streams.

No cluster: the router's HTTP door is real, sockets included, and what stands behind it places at
once and speaks at once (``deploy.bench.stand_in``).

The first row is a chat of 500 prompt tokens with an answer of one token, from the client's first
byte to the last: parsing, validating, rendering, tokenising, the life of the request, framing. Its
reference is rendering and tokenising the same chats alone. The second is the CPU time of the
router's loop for each token of streams that run side by side; its reference is writing the JSON of
one such chunk.
"""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from cluster.errors import EngineFault
from deploy.bench import stand_in
from deploy.bench.report import Bar, Row, Run, row_of
from router.messages import Chat, ChatMessage
from router.openai_shapes import ChatChunk, ChatChunkChoice, ChatDelta

if TYPE_CHECKING:
    from collections.abc import Callable

    from deploy.bench.site import Site
    from deploy.bench.stand_in import StandInRouter
    from router.text import TextCodec

NAME = "frontend"
_REQUEST_BAR = Bar(subject="value", relation="<=", limit=3.0)
_TOKEN_BAR = Bar(subject="value", relation="<=", limit=0.2)
_TIMEOUT_S = 60.0
_OK = 200
_WORDS = (
    "Every morning the harbour master walks along the quiet pier and counts the boats that came "
    "home during the night; some carry fish, others carry stones for the new bridge. "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSize:
    """How much is measured; the default is what the bars speak of."""

    num_prompt_tokens: int = 500
    num_requests: int = 200
    """In a run."""
    num_streams: int = 8
    num_tokens: int = 256
    """Of each stream."""
    num_runs: int = 3


def measure(site: Site, size: FrontendSize | None = None) -> list[Row]:
    """Return the row of a request and that of a token."""
    size = size or FrontendSize()
    requests, tokens = [], []
    with (
        closing(site.progress(NAME, 2 * size.num_runs, "run")) as bar,
        stand_in.serving(site.folder, _WORDS) as router,
    ):
        texts = _texts(router.codec, size)
        _ask(router, texts[:10])
        for _ in range(size.num_runs):
            requests.append(Run(_ask(router, texts) * 1e3, _tokenise(router.codec, texts) * 1e3))
            bar.update()
            tokens.append(Run(_stream(router, texts[0], size) * 1e3, _frame() * 1e3))
            bar.update()
    what = f"a chat of {size.num_prompt_tokens} tokens in, one out, p50, vs tokenising it"
    per_token = f"CPU for a token of {size.num_streams} streams, vs the JSON of a chunk"
    return [
        row_of(NAME, what, "ms", requests, _REQUEST_BAR),
        row_of(NAME, per_token, "ms", tokens, _TOKEN_BAR),
    ]


def _texts(codec: TextCodec, size: FrontendSize) -> list[str]:
    """Return contents of chats with the wanted number of tokens, each unlike the others."""
    words = (_WORDS * (1 + size.num_prompt_tokens // 20)).split()
    texts = []
    for number in range(size.num_requests):
        low, high = 1, len(words)
        while low < high:  # the longest that isn't longer
            middle = (low + high + 1) // 2
            text = " ".join([str(number), *words[:middle]])
            is_fitting = len(_encode(codec, text)) <= size.num_prompt_tokens
            low, high = (middle, high) if is_fitting else (low, middle - 1)
        texts.append(" ".join([str(number), *words[:low]]))
    return texts


def _encode(codec: TextCodec, text: str) -> tuple[int, ...]:
    chat = Chat(messages=(ChatMessage(role="user", content=text),))
    return codec.encode_chat(chat, max_chars=1 << 20)


def _tokenise(codec: TextCodec, texts: list[str]) -> float:
    return _p50(lambda text: _encode(codec, text), texts)


def _frame() -> float:
    choice = ChatChunkChoice(delta=ChatDelta(content=" boats"))
    chunk = ChatChunk(id="chatcmpl-bench", created=0, model="bench", choices=[choice])
    num_times = 1000
    began = time.thread_time()
    for _ in range(num_times):
        chunk.model_dump_json()
    return (time.thread_time() - began) / num_times


def _ask(router: StandInRouter, texts: list[str]) -> float:
    """Return the median time of a request, one at a time on one connection."""
    with closing(_connect(router)) as connection, connection.makefile("rb") as answers:

        def ask(text: str) -> None:
            connection.sendall(_request(text, max_tokens=1, is_stream=False))
            _read(answers)

        return _p50(ask, texts)


def _p50(do: Callable[[str], object], texts: list[str]) -> float:
    seconds = []
    for text in texts:
        began = time.perf_counter()
        do(text)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _stream(router: StandInRouter, text: str, size: FrontendSize) -> float:
    """Return the loop's CPU time for each token; beginning and end of the streams count as well."""
    found: list[int] = []

    def read() -> None:
        with closing(_connect(router)) as connection, connection.makefile("rb") as answers:
            connection.sendall(_request(text, max_tokens=size.num_tokens, is_stream=True))
            found.append(_read(answers).count(b'"content":'))

    began = router.cpu_s()
    threads = [threading.Thread(target=read) for _ in range(size.num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT_S)
    taken = router.cpu_s() - began
    if len(found) != size.num_streams or not all(found):
        raise EngineFault("a stream did not end", stage="bench")
    return taken / (size.num_streams * size.num_tokens)


def _connect(router: StandInRouter) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", router.port), _TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _request(text: str, *, max_tokens: int, is_stream: bool) -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": is_stream,
        }
    ).encode()  # fmt: skip
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _read(answers: BinaryIO) -> bytes:
    """Read one answer, of a known length or in chunks; raises EngineFault for an error's."""
    status = int(answers.readline().split()[1])
    head = dict(line.lower().strip().split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
    if length := head.get(b"content-length"):
        body = answers.read(int(length))
    else:
        chunks = []
        while num_bytes := int(answers.readline(), 16):
            chunks.append(answers.read(num_bytes))
            answers.readline()
        answers.readline()
        body = b"".join(chunks)
    if status != _OK:
        raise EngineFault(f"HTTP {status}: {body[:200].decode(errors='replace')}", stage="bench")
    return body
