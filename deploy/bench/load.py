"""Clients that call one after another, and what became of each call."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.errors import DeadlineExceeded, PdserveError
from cluster.wire import public_v1_pb2 as pb
from deploy.bench.site import prompt_ids
from deploy.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from deploy.bench.site import Doors

_CALL_TIMEOUT_S = 60.0
_LOOK_S = 0.05
_STAGE = "(stage: "
"""In the text of an error that says where it happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What each call asks for."""

    num_prompt_tokens: int = 64
    max_tokens: int = 32
    timeout_s: float = _CALL_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call; instants are this process's monotonic clock."""

    started: float
    ended: float
    error: str = ""
    """The error's code; empty where all tokens came."""
    reason: str = ""
    """What the error says."""
    is_typed: bool = True
    """False where the failure does not say that one may try again, or that the deadline passed, or
    at which stage of the request it happened."""
    num_attempts: int = 1
    """How often it was placed, as its end says; of failed calls nothing is known."""
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.started


class Load:
    """``num_clients`` threads with a connection each; runs for the time of a ``with``."""

    def __init__(
        self,
        doors: Doors,
        *,
        num_clients: int,
        ask: Ask,
        on_call: Callable[[], object] = lambda: None,
    ) -> None:
        """``on_call`` is told of each call that ended, one at a time."""
        self._doors = doors
        self._ask = ask
        self._on_call = on_call
        self._is_over = threading.Event()
        self._calls: list[Call] = []
        self._ended = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(seed,), name=f"client-{seed}", daemon=True)
            for seed in range(num_clients)
        ]

    def __enter__(self) -> Load:
        """Start calling."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let every client end its call, and stop."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(_CALL_TIMEOUT_S + 5.0)

    @property
    def calls(self) -> list[Call]:
        """Those that have ended, in that order."""
        with self._ended:
            return list(self._calls)

    def wait_calls(self, num_calls: int, timeout_s: float) -> None:
        """Return when so many calls have ended since the start; raises PdserveError if not."""
        with self._ended:
            if not self._ended.wait_for(lambda: len(self._calls) >= num_calls, timeout_s):
                raise PdserveError(
                    f"{len(self._calls)} calls ended in {timeout_s:.0f} s, {num_calls} should have",
                    stage="bench",
                )

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        with Client(self._doors.grpc) as client:
            while not self._is_over.is_set():
                call = one_call(client, self._ask, draw)
                with self._ended:
                    self._calls.append(call)
                    self._on_call()
                    self._ended.notify_all()
                if call.error:
                    self._is_over.wait(_LOOK_S)  # refused at once, it would only burn the cores


def one_call(client: Client, ask: Ask, draw: random.Random) -> Call:
    """Make one call and tell what became of it; never raises."""
    started, error, reason, is_typed = time.monotonic(), "", "", True
    asked, num_attempts = prompt_ids(ask.num_prompt_tokens, draw), 1
    output_ids: list[int] = []
    try:
        pieces = client.generate(
            prompt_ids=pb.TokenIds(ids=asked),
            max_tokens=ask.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            timeout_s=ask.timeout_s,
            timeline=True,
        )
        for piece in pieces:
            output_ids.extend(piece.token_ids)
            num_attempts = max(num_attempts, piece.timeline.num_attempts)
        if len(output_ids) != ask.max_tokens:
            error, is_typed = f"{len(output_ids)} tokens of {ask.max_tokens}", False
    except PdserveError as failure:
        error, reason = failure.code, failure.message
        is_told = failure.is_retryable or isinstance(failure, DeadlineExceeded)
        is_typed = is_told and _STAGE in failure.message
    except Exception as failure:
        error, reason, is_typed = type(failure).__name__, str(failure), False
    return Call(
        started=started,
        ended=time.monotonic(),
        error=error,
        reason=reason,
        is_typed=is_typed,
        num_attempts=num_attempts,
        prompt_ids=tuple(asked),
        output_ids=tuple(output_ids),
    )


def p50_s(calls: list[Call], since: float, until: float) -> float | None:
    """Return the median of the good calls that lie between two instants; None without any."""
    seconds = [
        call.seconds
        for call in calls
        if not call.error and call.started >= since and call.ended <= until
    ]
    return statistics.median(seconds) if seconds else None


def failures(calls: list[Call]) -> dict[str, int]:
    """Count the failed calls by their error."""
    codes = sorted(call.error for call in calls if call.error)
    return {code: len(list(group)) for code, group in itertools.groupby(codes)}
