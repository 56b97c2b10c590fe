"""Plays traffic on a running cluster, through its gRPC door, and notes when each token came.

Each request has a thread of its own, and each has a time limit: a play ends by itself, whatever the
cluster does. What fails is noted and stays in the figures as a miss.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.errors import DeadlineExceeded, PdserveError
from cluster.wire import public_v1_pb2 as pb
from deploy.client import Client
from deploy.cores import pin_process
from deploy.lab.workload import Arrival, Ask, prompt

if TYPE_CHECKING:
    from deploy.bench.site import Doors
    from deploy.lab.workload import Loop, Traffic

CALL_TIMEOUT_S = 180.0
"""Of one request, waiting included."""
_UNLOADED_TOKENS = 16
_GRACE_S = 5.0
"""How long after its time a silent stream is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one request met; instants are seconds since the play began, on this process's clock."""

    ask: Ask
    sent_s: float
    arrivals: tuple[float, ...]
    """Of each token, at the client."""
    ended_s: float
    due_s: float
    """When it was to be sent."""
    waiting_s: float | None = None
    """In the cluster's queues until it was first computed; None where nobody said."""
    has_left: bool = False
    """Whether its client left, as planned."""
    error: str = ""
    """The error's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The control plane's view at one instant."""

    at_s: float
    num_used: int
    """Slots of workers that decode."""
    num_slots: int
    num_waiting: int
    """In the cluster's queue, and in the workers'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """All that was noted in one play."""

    records: tuple[Record, ...]
    samples: tuple[Sample, ...]
    seconds: float


@dataclass(slots=True)
class _Notes:
    began: float
    on_end: Callable[[], object]
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: threading.Event = field(default_factory=threading.Event)
    records: list[Record] = field(default_factory=list)

    def now(self) -> float:
        return time.monotonic() - self.began

    def add(self, record: Record) -> None:
        with self.lock:
            self.records.append(record)
            self.on_end()


def play(
    doors: Doors,
    traffic: Traffic,
    *,
    seed: int,
    run: int,
    on_end: Callable[[], object] = lambda: None,
) -> Play:
    """Send all that is asked, wait for its end and return the notes.

    ``on_end`` is told of each request that ended, one at a time. Where the deploy file has cores
    for all that is no worker, the clients run there too: they are no part of what is measured.
    """
    with _beside_workers(doors), Client(doors.grpc) as client, _Watcher(doors) as watcher:
        notes = _Notes(began=time.monotonic(), on_end=on_end)
        threads = _callers(client, traffic, notes, seed, run)
        watcher.begin(notes)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            notes.is_over.set()
        seconds = notes.now()
    records = sorted(notes.records, key=lambda record: (record.sent_s, record.ended_s))
    return Play(records=tuple(records), samples=tuple(watcher.samples), seconds=seconds)


@contextlib.contextmanager
def _beside_workers(doors: Doors) -> Iterator[None]:
    own = os.sched_getaffinity(0)
    pin_process(doors.config.service_cores)
    try:
        yield
    finally:
        pin_process(tuple(own))


def unloaded(doors: Doors, ask: Ask, *, seed: int, call: str) -> Record:
    """Return what such a request meets on an idle cluster; raises PdserveError where it fails.

    It takes a few tokens only. ``call`` names its prompt.
    """
    ids = prompt(ask.num_prompt_tokens, seed=seed, run=-1, call=f"{call}-{ask.group}")
    with Client(doors.grpc) as client:
        notes = _Notes(began=time.monotonic(), on_end=lambda: None)
        num_tokens = min(ask.max_tokens, _UNLOADED_TOKENS)
        record = _Call(client, notes, Arrival(at_s=0.0, ask=ask), ids, num_tokens).make()
    if record.error:
        raise PdserveError(f"an idle cluster answered {record.error}", stage="lab")
    return record


def _callers(
    client: Client, traffic: Traffic, notes: _Notes, seed: int, run: int
) -> list[threading.Thread]:
    def single(index: int, arrival: Arrival) -> None:
        ids = prompt(arrival.ask.num_prompt_tokens, seed=seed, run=run, call=f"open-{index}")
        if not notes.is_over.wait(max(0.0, arrival.at_s - notes.now())):
            notes.add(_Call(client, notes, arrival, ids, arrival.ask.max_tokens).make())

    def repeat(name: str, loop: Loop) -> None:
        number = 0
        notes.is_over.wait(max(0.0, loop.from_s - notes.now()))
        while notes.now() < loop.until_s and not notes.is_over.is_set():
            ids = prompt(loop.ask.num_prompt_tokens, seed=seed, run=run, call=f"{name}-{number}")
            arrival = Arrival(at_s=notes.now(), ask=loop.ask)
            record = _Call(client, notes, arrival, ids, loop.ask.max_tokens).make()
            notes.add(record)
            number += 1
            if record.error:
                notes.is_over.wait(0.1)  # refused at once, it would only burn the cores

    threads = [
        threading.Thread(target=single, args=(index, arrival), daemon=True)
        for index, arrival in enumerate(traffic.arrivals)
    ]
    for index, loop in enumerate(traffic.loops):
        threads += [
            threading.Thread(target=repeat, args=(f"loop-{index}-{number}", loop), daemon=True)
            for number in range(loop.num_clients)
        ]
    return threads


class _Call:
    """One request, from its sending to its end."""

    def __init__(
        self, client: Client, notes: _Notes, arrival: Arrival, ids: list[int], max_tokens: int
    ) -> None:
        self._client, self._notes, self._arrival = client, notes, arrival
        self._ids, self._max_tokens = ids, max_tokens
        self._arrivals: list[float] = []
        self._waiting_s: float | None = None
        self._has_left = False

    def make(self) -> Record:
        """Make it; whatever becomes of it is in the record."""
        sent_s, error = self._notes.now(), ""
        try:
            self._read(sent_s)
        except DeadlineExceeded as failure:
            # A stream that is silent when its client leaves has no message to leave at.
            self._has_left = self._is_time()
            error = "" if self._has_left else failure.code
        except PdserveError as failure:
            error = failure.code
        except Exception as failure:
            error = type(failure).__name__
        if not error and not self._has_left and len(self._arrivals) != self._max_tokens:
            error = f"{len(self._arrivals)} tokens of {self._max_tokens}"
        return Record(
            ask=self._arrival.ask,
            sent_s=sent_s,
            arrivals=tuple(self._arrivals),
            ended_s=self._notes.now(),
            due_s=self._arrival.at_s,
            waiting_s=self._waiting_s,
            has_left=self._has_left,
            error=error,
        )

    def _is_time(self) -> bool:
        until_s = self._arrival.until_s
        return until_s is not None and self._notes.now() >= until_s

    def _read(self, sent_s: float) -> None:
        until_s, ask = self._arrival.until_s, self._arrival.ask
        limit_s = CALL_TIMEOUT_S if until_s is None else max(0.0, until_s - sent_s) + _GRACE_S
        pieces = self._client.generate(
            prompt_ids=pb.TokenIds(ids=self._ids),
            max_tokens=self._max_tokens,
            temperature=0.0,
            ignore_eos=True,
            priority=ask.tier,
            timeline=True,
            timeout_s=CALL_TIMEOUT_S,
            deadline_s=limit_s,
        )
        for piece in pieces:
            now = self._notes.now()
            self._arrivals += [now] * len(piece.token_ids)
            if piece.HasField("timeline"):
                self._waiting_s = _waiting_s(piece.timeline)
            if self._is_time() or self._notes.is_over.is_set():
                self._has_left = True
                return  # leaving the stream cancels it


def _waiting_s(timeline: pb.Timeline) -> float:
    """Return how long a request waited until it was first computed."""
    is_local = timeline.prefill_worker == timeline.decode_worker
    first = timeline.decode if is_local else timeline.prefill
    return timeline.queue_s + first.queue_s


class _Watcher:
    """Keeps what the control plane says while a play runs; it says so at most twice a second."""

    def __init__(self, doors: Doors) -> None:
        self.samples: list[Sample] = []
        self._client = Client(doors.grpc)
        self._slots = {
            pool.name: pool.num_batch_slots
            for pool in doors.config.pools
            if pool.role.value != "prefill"
        }
        self._thread: threading.Thread | None = None

    def __enter__(self) -> _Watcher:
        return self

    def begin(self, notes: _Notes) -> None:
        self._thread = threading.Thread(target=self._watch, args=(notes,), daemon=True)
        self._thread.start()

    def __exit__(self, *_error: object) -> None:
        self._client.close()
        if self._thread is not None:
            self._thread.join(_GRACE_S)

    def _watch(self, notes: _Notes) -> None:
        try:
            for view in self._client.watch_cluster():
                self.samples.append(self._sample(view, notes.now()))
        except (PdserveError, ValueError):
            return  # closed, or the cluster is gone: the requests tell which

    def _sample(self, view: pb.Cluster, now: float) -> Sample:
        decoding = [worker for worker in view.workers if worker.pool in self._slots]
        return Sample(
            at_s=now,
            num_used=sum(worker.num_running for worker in decoding),
            num_slots=sum(self._slots[worker.pool] for worker in decoding),
            num_waiting=view.queue.num_waiting + sum(w.num_waiting for w in view.workers),
        )
