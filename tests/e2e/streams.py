"""Greedy requests over gRPC, each on a thread of its own, for tests that disturb them."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from cluster.errors import PdserveError
from deploy.client import Client
from tests.e2e.reference import NEAR_TIE, Reference, greedy
from tests.e2e.stalls import Stalls

if TYPE_CHECKING:
    from cluster.wire import public_v1_pb2 as pb

ANSWER_S = 20.0
"""No request may take longer; its deadline is shorter."""
DEADLINE_S = 15.0
LATE_S, MIN_SHARE = 1.0, 0.95
"""Of a steady load: so much was sent, and no later than that and than this machine stood still."""


class Stream(threading.Thread):
    """One request; keeps its tokens, its error, and when what happened."""

    def __init__(
        self,
        address: str,
        prompt: list[int],
        num_tokens: int,
        *,
        deadline_s: float = DEADLINE_S,
        priority: str = "",
    ) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._prompt = prompt
        self._num_tokens = num_tokens
        self._deadline_s = deadline_s
        self._priority = priority
        self._client: Client | None = None
        self._has_come = threading.Condition()
        self.tokens: list[int] = []
        self.text = ""
        self.times: list[float] = []
        """When each message with tokens came."""
        self.error = ""
        self.error_text = ""
        """All that the client was told with it."""
        self.finish_reason = ""
        self.timeline: pb.Timeline | None = None
        """Of the whole, told with its end."""
        self.started_at = self.ended_at = 0.0

    def run(self) -> None:
        self.started_at = time.monotonic()
        try:
            with Client(self._address) as client:
                with self._has_come:
                    self._client = client
                    self._has_come.notify_all()
                for piece in client.generate(
                    prompt_ids={"ids": self._prompt},
                    max_tokens=self._num_tokens,
                    temperature=0.0,
                    ignore_eos=True,
                    timeout_s=self._deadline_s,
                    priority=self._priority,
                    timeline=True,
                ):
                    self._take(piece)
        except PdserveError as error:
            self.error, self.error_text = error.code, str(vars(error))
        finally:
            with self._has_come:
                self.ended_at = time.monotonic()
                self._has_come.notify_all()

    def _take(self, piece) -> None:
        with self._has_come:
            if piece.token_ids:
                self.times.append(time.monotonic())
            self.tokens.extend(piece.token_ids)
            self.text += piece.text
            self.finish_reason = piece.finish_reason or self.finish_reason
            if piece.HasField("timeline"):
                self.timeline = piece.timeline
            self._has_come.notify_all()

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    @property
    def longest_gap_s(self) -> float:
        """Between two messages with tokens, and from the call to the first one."""
        instants = [self.started_at, *self.times]
        return max(b - a for a, b in itertools.pairwise(instants))

    def leave(self) -> None:
        """Close its connection, as soon as it has one."""
        with self._has_come:
            assert self._has_come.wait_for(lambda: self._client is not None, ANSWER_S)
        self._client.close()

    def wait_tokens(self, num_tokens: int, timeout_s: float = ANSWER_S) -> None:
        """Wait until it has so many, or has ended."""
        with self._has_come:
            is_there = self._has_come.wait_for(
                lambda: len(self.tokens) >= num_tokens or self.ended_at, timeout_s
            )
        assert is_there, f"{len(self.tokens)} tokens came, not {num_tokens}"

    def wait_end(self, timeout_s: float = ANSWER_S) -> None:
        self.join(timeout_s)
        assert not self.is_alive(), "the request hangs"


class Prompts:
    """Prompts unlike one another from the first block on, with what transformers says to each."""

    def __init__(
        self, model, count: int, *, num_prompt: int, num_tokens: int, first: int = 0
    ) -> None:
        """``first``: below 500, where sets shall have no prompt, and no first block, in common."""
        self.num_tokens = num_tokens
        self._model = model
        self.prompts = [
            [5 + (number * 7 + i * (number + 3)) % 500 for i in range(num_prompt)]
            for number in range(first, first + count)
        ]
        self.reference: Reference = greedy(model, self.prompts, num_tokens)

    def stream(self, address: str, number: int, **options) -> Stream:
        """Start one of them."""
        stream = self.ask(address, number, **options)
        stream.start()
        return stream

    def ask(self, address: str, number: int = 0, **options) -> Stream:
        """One of them, not started."""
        return Stream(address, self.prompts[number], self.num_tokens, **options)

    def check(
        self, number: int, stream: Stream, *, is_whole: bool = True, near_tie: float = NEAR_TIE
    ) -> None:
        """CASES §0 W and N: what came is right as far as it goes."""
        if is_whole:
            outcome = (stream.error, len(stream.tokens))
            assert outcome == ("", self.num_tokens), f"{number}: {outcome} {stream.error_text}"
        at = self.reference.wrong_at(number, stream.tokens, near_tie)
        assert at is None, f"token {at} is wrong: {stream.tokens}"

    def check_text(self, stream: Stream) -> None:
        """CASES §0 C: byte for byte what its tokens say."""
        tokenizer = Tokenizer.from_file(str(self._model / "tokenizer.json"))
        assert stream.text.encode() == tokenizer.decode(stream.tokens).encode()


class SteadyLoad:
    """So many requests a second, each a stream, for the time of a ``with``; none waits for another.

    ``prompts`` come in turn, as long as it lasts. The times at which they are due are fixed
    beforehand: where this process has no time for one, it is sent late, and not left out, nor are
    those that were due before its end.
    """

    def __init__(self, address: str, prompts: Prompts, *, per_s: float = 10.0) -> None:
        self._address, self._prompts, self._gap_s = address, prompts, 1.0 / per_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="steady-load", daemon=True)
        self._began = self._ended = 0.0
        self._stalls = Stalls()
        self.streams: list[tuple[int, Stream]] = []

    def __enter__(self) -> SteadyLoad:
        self._stalls.start()
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended = time.monotonic()
        self._is_over.set()
        self._thread.join(10)
        self._stalls.stop()

    @property
    def rate(self) -> float:
        """Requests a second that were sent, over the whole time."""
        return len(self.streams) / (self._ended - self._began)

    @property
    def num_late(self) -> int:
        """How many were sent too late after they were due."""
        late_s = LATE_S + self._stalls.longest_s
        return sum(
            stream.started_at - (self._began + order * self._gap_s) > late_s
            for order, (_, stream) in enumerate(self.streams)
        )

    def wait_started(self, num_more: int, timeout_s: float = 60) -> None:
        """Wait until so many more have been sent."""
        wanted, deadline = len(self.streams) + num_more, time.monotonic() + timeout_s
        while len(self.streams) < wanted:
            assert time.monotonic() < deadline, "the load stands still"
            self._is_over.wait(self._gap_s)

    def check(self) -> None:
        """It was the load that it claims to be, none has failed, and each got its tokens."""
        for number, stream in self.streams:
            stream.wait_end(60)
            self._prompts.check(number, stream)
        assert self.rate * self._gap_s > MIN_SHARE, f"{self.rate:.1f} requests a second were sent"
        assert self.num_late < (1.0 - MIN_SHARE) * len(self.streams), f"{self.num_late} were late"

    def _run(self) -> None:
        prompts = itertools.cycle(range(len(self._prompts.prompts)))
        for order, number in enumerate(prompts):
            due = self._began + order * self._gap_s
            if self._is_over.wait(max(0.0, due - time.monotonic())) and due > self._ended:
                return
            self.streams.append((number, self._prompts.stream(self._address, number)))
