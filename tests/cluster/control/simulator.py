"""A small cluster in fake time: what placements cost, without workers, wires or waiting.

Prefill workers compute prompts one by one; a link moves the KV of one request at a time; decode
workers run steps whose time grows with the sequences in them. Whoever places is a ``Placer``.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.config import Role, SchedulingConfig
from cluster.control.facts import BlockCounts, TransferSample
from cluster.control.planner import Planner
from cluster.control.settings import ControlSettings
from cluster.engine.step_model import StepModel
from tests.cluster.control.factory import (
    grants,
    make_config,
    make_pool,
    make_registration,
    make_report,
    make_want,
)

SLOTS = 8
BLOCK_BYTES = 1024
STEP_BASE_S, STEP_PER_SEQ_S, PREFILL_PER_TOKEN_S = 0.010, 0.001, 0.0002
RUN_AHEAD_TOKENS = SchedulingConfig().run_ahead_tokens


@dataclass
class Job:
    name: str
    arrived: float
    prompt: int
    output: int
    grant_id: str = ""
    prefill: str = ""
    decode: str = ""
    first_token_s: float = 0.0
    total_s: float = 0.0
    decoding_s: float = 0.0
    """From its first token to its last."""

    @property
    def pair(self):
        return (self.prefill, self.decode)

    @property
    def num_bytes(self):
        return -(-self.prompt // 16) * BLOCK_BYTES


@dataclass
class Prefill:
    name: str
    queue: deque = field(default_factory=deque)
    held: set = field(default_factory=set)
    samples: list = field(default_factory=list)
    queued_tokens: int = 0


@dataclass
class Decode:
    name: str
    held: set = field(default_factory=set)
    running: dict = field(default_factory=dict)
    arrived: list = field(default_factory=list)
    is_stepping: bool = False
    delay_s: float = 0.0
    """Added to each step."""
    speed: StepModel = field(default_factory=lambda: StepModel(STEP_BASE_S, STEP_PER_SEQ_S))
    """What it has measured of itself."""


class Placer(Protocol):
    """Places jobs, and is told what changes; each method returns the jobs that may start."""

    def want(self, job, now): ...
    def changed(self, worker, now): ...
    def done(self, job, now): ...
    def tick(self, now): ...


class PlannerPlacer:
    """The product's planner, told what real workers would report; ``num_slow`` of a pool ``s``."""

    def __init__(self, num_prefill, num_decode, num_slow=0, slots=SLOTS):
        counts = {
            make_pool("p", Role.PREFILL, 1 << 20, 64): num_prefill,
            make_pool("d", Role.DECODE, 1 << 20, slots): num_decode,
            make_pool("s", Role.DECODE, 1 << 20, slots): num_slow,
        }
        pools = tuple(pool for pool, count in counts.items() if count)
        config = make_config(*pools, max_queue_requests=100_000)
        settings = ControlSettings(reconcile_s=0.0)
        self.planner = Planner(config, term=1, settings=settings, now=0.0)
        self.planner.router_joined("a", "a-1", 0.0)
        self._jobs = {}
        self._registrations = {}
        speeds = {
            "step_base_s": STEP_BASE_S,
            "step_per_seq_s": STEP_PER_SEQ_S,
            "prefill_per_token_s": PREFILL_PER_TOKEN_S,
        }
        for pool in pools:
            for index in range(counts[pool]):
                registration = make_registration(pool, index, **speeds)
                self._registrations[registration.worker_id] = registration
                self.planner.register(registration, 0.0)
                self._report(registration.worker_id, 0.0)

    def want(self, job, now):
        self._jobs[job.name] = job
        want = make_want(
            job.name, num_prompt_tokens=job.prompt, max_tokens=job.output, remaining_s=1e5
        )
        return self._granted(self.planner.want("a", want, now))

    def changed(self, worker, now):
        if isinstance(worker, Decode):
            base_s, per_seq_s = worker.speed.base_s, worker.speed.per_seq_s
            facts = {"step_base_s": base_s, "step_per_seq_s": per_seq_s}
            facts["num_running"] = len(worker.held)
        else:
            facts = {"queued_tokens": worker.queued_tokens, "transfers": tuple(worker.samples)}
            worker.samples.clear()
        return self._granted(self._report(worker.name, now, *worker.held, **facts))

    def done(self, job, now):
        decisions = self.planner.done(job.grant_id, job.output, now, whole_output_tokens=job.output)
        return self._granted(decisions)

    def tick(self, now):
        for worker_id, registration in self._registrations.items():
            entry = self.planner._ledger.workers[worker_id]
            self.planner.report(worker_id, registration.incarnation, _again(entry.report), now)
        return self._granted(self.planner.tick(now))

    def _report(self, worker_id, now, *held, **facts):
        registration = self._registrations[worker_id]
        blocks = BlockCounts(free=registration.num_blocks)
        report = make_report(registration, *held, blocks=blocks, **facts)
        return self.planner.report(worker_id, registration.incarnation, report, now)

    def _granted(self, decisions):
        jobs = []
        for grant in grants(decisions):
            job = self._jobs.pop(grant.request_id)
            job.grant_id = grant.grant_id
            job.prefill, job.decode = grant.prefill.worker_id, grant.decode.worker_id
            jobs.append(job)
        return jobs


def _again(report):
    """The beat of a worker on which nothing has changed."""
    return replace(report, transfers=())


class LeastLoaded:
    """The reference: fewest queued tokens, fewest sequences, longest idle; knows no links."""

    def __init__(self, num_prefill, num_decode):
        self._tokens = Counter({f"p-{index}": 0 for index in range(num_prefill)})
        self._sequences = Counter({f"d-{index}": 0 for index in range(num_decode)})
        self._queue = deque()
        self._last = Counter()
        self._orders = itertools.count(1)
        self._computing = {}

    def want(self, job, now):
        self._queue.append(job)
        return self._place()

    def changed(self, worker, now):
        if isinstance(worker, Prefill):
            self._tokens[worker.name] = worker.queued_tokens
        return self._place()

    def done(self, job, now):
        self._sequences[job.decode] -= 1
        return self._place()

    def tick(self, now):
        return []

    def _place(self):
        jobs = []
        while self._queue:
            job = self._queue[0]
            prefill = min(self._tokens, key=lambda w: (self._tokens[w], self._last[w]))
            decode = min(self._sequences, key=lambda w: (self._sequences[w], self._last[w]))
            ahead = self._tokens[prefill]
            is_far = ahead > 0 and ahead + job.prompt > RUN_AHEAD_TOKENS
            if is_far or self._sequences[decode] >= SLOTS:
                break
            self._queue.popleft()
            self._tokens[prefill] += job.prompt
            self._sequences[decode] += 1
            self._last[prefill] = self._last[decode] = next(self._orders)
            job.prefill, job.decode = prefill, decode
            job.grant_id = job.name
            jobs.append(job)
        return jobs


class Simulation:
    """Runs jobs through a cluster; ``link(pair, now)`` gives (alpha in s, bytes per s).

    ``slow_s``: what each step of the workers of a pool ``s`` takes longer, one by one.
    """

    def __init__(self, placer, *, num_prefill=2, num_decode=2, slow_s=(), link, noise=0.0, seed=0):
        self.now = 0.0
        self.ended = []
        self._placer = placer
        self._link = link
        self._noise = noise
        self._rng = random.Random(seed)
        self._noise_rng = random.Random(seed + 1)
        self._events = []
        self._orders = itertools.count()
        self._prefills = {f"p-{i}": Prefill(f"p-{i}") for i in range(num_prefill)}
        self._decodes = {f"d-{i}": Decode(f"d-{i}") for i in range(num_decode)}
        self._decodes |= {f"s-{i}": Decode(f"s-{i}", delay_s=s) for i, s in enumerate(slow_s)}
        self._link_free_at = Counter()

    def run(self, *, rate, seconds):
        """Offer Poisson arrivals for so long, then let all of them end."""
        at, index = 0.0, 0
        while at < seconds:
            job = Job(f"r{index}", at, self._rng.randint(100, 500), self._rng.randint(8, 56))
            self._at(at, lambda job=job: self._start(self._placer.want(job, self.now)))
            at += self._rng.expovariate(rate)
            index += 1
        for beat in range(int(2 * seconds) + 60):
            self._at(beat / 2, lambda: self._start(self._placer.tick(self.now)))
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        assert len(self.ended) == index, "some never ended"
        return self

    def pairs(self, since=0.0, until=1e9):
        """The share of each pair, of jobs that arrived in that time."""
        counts = Counter(job.pair for job in self.ended if since <= job.arrived < until)
        total = sum(counts.values())
        return {(p, d): counts[(p, d)] / total for p in self._prefills for d in self._decodes}

    def mean(self, read, since=0.0):
        values = [read(job) for job in self.ended if job.arrived >= since]
        return sum(values) / len(values)

    def quantile(self, q, read, since=0.0):
        values = sorted(read(job) for job in self.ended if job.arrived >= since)
        return values[int(q * (len(values) - 1))]

    # ---- the parts

    def _at(self, at, act):
        heapq.heappush(self._events, (at, next(self._orders), act))

    def _changed(self, worker):
        self._start(self._placer.changed(worker, self.now))

    def _start(self, jobs):
        for job in jobs:
            prefill, decode = self._prefills[job.prefill], self._decodes[job.decode]
            prefill.held.add(job.grant_id)
            decode.held.add(job.grant_id)
            prefill.queued_tokens += job.prompt
            prefill.queue.append(job)
            if len(prefill.queue) == 1:
                self._compute(prefill)
        for job in jobs:
            self._changed(self._prefills[job.prefill])
            self._changed(self._decodes[job.decode])

    def _compute(self, prefill):
        job = prefill.queue[0]
        self._at(self.now + job.prompt * PREFILL_PER_TOKEN_S, lambda: self._computed(prefill, job))

    def _computed(self, prefill, job):
        job.first_token_s = self.now - job.arrived
        prefill.queue.popleft()
        prefill.queued_tokens -= job.prompt
        if prefill.queue:
            self._compute(prefill)
        start = max(self.now, self._link_free_at[job.pair])
        alpha_s, bytes_per_s = self._link(job.pair, start)
        seconds = alpha_s + job.num_bytes / bytes_per_s
        seconds *= self._noise_rng.lognormvariate(0.0, self._noise) if self._noise else 1.0
        self._link_free_at[job.pair] = start + seconds
        self._at(start + seconds, lambda: self._moved(prefill, job, seconds))
        self._changed(prefill)

    def _moved(self, prefill, job, seconds):
        prefill.held.discard(job.grant_id)
        prefill.samples.append(
            TransferSample(peer_worker_id=job.decode, num_bytes=job.num_bytes, seconds=seconds)
        )
        decode = self._decodes[job.decode]
        decode.arrived.append(job)
        if not decode.is_stepping:
            self._step(decode)
        self._changed(prefill)

    def _step(self, decode):
        decode.running.update({job.name: [job, job.output - 1] for job in decode.arrived})
        decode.arrived.clear()
        decode.is_stepping = bool(decode.running)
        if decode.running:
            step_s = decode.delay_s + STEP_BASE_S + STEP_PER_SEQ_S * len(decode.running)
            self._at(self.now + step_s, lambda: self._stepped(decode, step_s))

    def _stepped(self, decode, step_s):
        decode.speed.observe(len(decode.running), 0, step_s)
        ended = []
        for name, sequence in list(decode.running.items()):
            sequence[1] -= 1
            if sequence[1] <= 0:
                ended.append(decode.running.pop(name)[0])
        self._step(decode)
        for job in ended:
            job.total_s = self.now - job.arrived
            job.decoding_s = job.total_s - job.first_token_s
            decode.held.discard(job.grant_id)
            self.ended.append(job)
            self._changed(decode)
            self._start(self._placer.done(job, self.now))
