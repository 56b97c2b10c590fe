"""``dispatch``: how fast the control plane places requests, and how well.

The planner runs in this process, told what routers and workers would tell it. *Rate*: a thousand
workers, half of each role, all slots taken, and ten thousand requests waiting, of many tenants, all
tiers, and with prompts that begin as others do; again and again a request ends, its workers report,
and another one comes. Only the planner's own time counts. Each order of the queue has its row.
Higher tiers take the slots of lower ones, who wait on their workers without blocks until they may
run again; it is those who run that end.
*Choice*: workers of each role with random loads, speeds and links; the cost of the chosen pair
against the least of all pairs that have room, by the same cost model. Of eight workers of a role
all are looked at, so the means are compared; of 32 a few are, so the worst of the draws is shown.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cluster.config import (
    DeployConfig,
    LocalPrefill,
    ModelConfig,
    Policy,
    PoolConfig,
    Role,
    SchedulingConfig,
)
from cluster.control.costs import Choice, CostModel, Route
from cluster.control.decisions import Decision, SendGrant
from cluster.control.facts import (
    BlockCounts,
    Health,
    Registration,
    TransferSample,
    Want,
    WorkerReport,
)
from cluster.control.ledger import Ledger
from cluster.control.links import LinkTable
from cluster.control.placement import Placement
from cluster.control.planner import Planner
from cluster.control.settings import ControlSettings
from cluster.kv.layout import KVLayout
from cluster.request import PromptPrefix
from deploy.bench.report import Bar, Row, Run, row_of

if TYPE_CHECKING:
    from deploy.bench.site import Site

NAME = "dispatch"
_BAR_RATE = Bar(subject="value", relation=">=", limit=2000.0)
_BAR_COST = Bar(subject="ratio", relation="<=", limit=1.05)
_ROUTER = ("bench", "bench-1")
_MAX_PROMPT, _MAX_OUTPUT = 1900, 128
_NUM_TENANTS, _NUM_BEGINNINGS, _STRIDE = 20, 200, 64
_ORDERS = {
    "fcfs": SchedulingConfig(),
    "sjf": SchedulingConfig(policy=Policy.SJF),
    "tiers": SchedulingConfig(policy=Policy.PRIORITY),
    "tiers, fair to tenants": SchedulingConfig(policy=Policy.PRIORITY, fair_tenants=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSize:
    """How much is measured; the default is what the bars speak of."""

    num_workers: int = 1000
    num_waiting: int = 10_000
    num_placements: int = 1000
    num_choices: int = 200
    num_wide_choices: int = 50
    num_runs: int = 3


def measure(site: Site, size: DispatchSize | None = None) -> list[Row]:
    """Return the rows of rate and choice."""
    size = size or DispatchSize()
    rates: dict[str, list[Run]] = {order: [] for order in _ORDERS}
    costs, worst = [], []
    with closing(site.progress(NAME, size.num_runs * len(rates), "run")) as bar:
        for number in range(size.num_runs):
            for order, runs in rates.items():
                world = _World(size, random.Random(number), _ORDERS[order])
                world.fill()
                runs.append(Run(world.rate(), _BAR_RATE.limit))
                bar.update()
            draws = _chosen_against_least(8, size.num_choices, random.Random(number))
            costs.append(
                Run(
                    statistics.mean(draw.value for draw in draws),
                    statistics.mean(draw.reference for draw in draws),
                )
            )
            wide = _chosen_against_least(32, size.num_wide_choices, random.Random(number))
            worst.append(max(wide, key=lambda draw: draw.value / draw.reference))
    shape = f"{size.num_workers} workers, {size.num_waiting} waiting, reference: the bar"
    return [
        *(
            row_of(NAME, f"placements, {order}, {shape}", "1/s", runs, _BAR_RATE)
            for order, runs in rates.items()
        ),
        row_of(NAME, "cost of the pair at 8 x 8, vs the least of all", "s", costs, _BAR_COST),
        row_of(
            NAME, f"at 32 x 32, the worst of {size.num_wide_choices} draws", "s", worst, _BAR_COST
        ),
    ]


def _config(num_each: int, scheduling: SchedulingConfig) -> DeployConfig:
    return DeployConfig(
        pools=tuple(
            PoolConfig(
                name=role.value, role=role, count=num_each, kv_tokens=1 << 15, max_num_seqs=8
            )
            for role in (Role.PREFILL, Role.DECODE)
        ),
        model=ModelConfig(max_model_len=2048),
        scheduling=replace(
            scheduling,
            max_queue_requests=1 << 20,
            max_queue_tokens=1 << 40,
            tenant_queue_share=1.0,
            run_ahead_tokens=1 << 13,
        ),
    )


def _registrations(config: DeployConfig) -> list[Registration]:
    layout = KVLayout(
        num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bf16",
        model_fingerprint="bench",
    ).describe()  # fmt: skip
    return [
        Registration(
            worker_id=f"{pool.name}-{index}",
            incarnation=f"{pool.name}-{index}-1",
            pool=pool.name,
            role=pool.role,
            address="127.0.0.1:1",
            num_slots=pool.max_num_seqs,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            max_model_len=config.model.max_model_len,
            layout=layout,
            step_base_s=0.02,
            step_per_seq_s=0.001,
            prefill_per_token_s=1e-4,
            pid=1,
            transport=config.transport.value,
        )
        for pool in config.pools
        for index in range(pool.count)
    ]


@dataclass(slots=True)
class _Worker:
    registration: Registration
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By grant: how high its tier is, and its blocks while it runs; 0 where it only prefilled."""

    def running(self) -> list[str]:
        """Return the grants that decode: of the highest tiers, and the earliest of each."""
        decoding = [grant for grant, (_, num_blocks) in self.held.items() if num_blocks]
        decoding.sort(key=lambda grant: -self.held[grant][0])
        return decoding[: self.registration.num_slots]

    def report(self, num_tiers: int) -> WorkerReport:
        running = self.running()
        blocks = [0] * num_tiers
        for grant in running:
            tier, num_blocks = self.held[grant]
            blocks[tier] += num_blocks
        preempted = self.held.keys() - running if running else ()
        used = sum(blocks)
        return WorkerReport(
            blocks=BlockCounts(free=self.registration.num_blocks - used, held=used),
            num_running=len(running),
            num_waiting=len(preempted),
            held_grants=tuple(self.held),
            unreserved_grants=tuple(preempted),
            takable_blocks=tuple(blocks),
        )


class _World:
    """Routers and workers in a nutshell."""

    def __init__(
        self, size: DispatchSize, draw: random.Random, scheduling: SchedulingConfig
    ) -> None:
        self._size = size
        self._draw = draw
        config = _config(size.num_workers // 2, scheduling)
        self._now = 0.0
        self._planner = Planner(
            config, term=1, settings=ControlSettings(reconcile_s=0.0), now=self._now
        )
        self._planner.router_joined(*_ROUTER, self._now)
        self._workers = {r.worker_id: _Worker(r) for r in _registrations(config)}
        self._wants: dict[str, Want] = {}
        self._granted: set[str] = set()
        """Workers that have not reported since."""
        self._live: deque[tuple[str, str, str]] = deque()
        self._tiers = scheduling.tiers
        self._num_wants = self._num_granted = 0
        self._spent_s = 0.0
        for worker in self._workers.values():
            self._planner.register(worker.registration, self._now)
            self._say(worker.registration.worker_id)

    def fill(self) -> None:
        """Take all slots, and let the rest wait."""
        while len(self._wants) < self._size.num_waiting:
            self._come()
            if self._num_wants % 64 == 0:
                self._start_granted()
        self._start_granted()
        # One pass over all that came at once: a control plane that runs has long made it.
        gc.collect()

    def rate(self) -> float:
        """Return placements by second of the planner's time."""
        before, self._spent_s = self._num_granted, 0.0
        while self._num_granted - before < self._size.num_placements:
            grant_id, prefill_id, decode_id = self._one_that_runs()
            for worker_id in (prefill_id, decode_id):
                self._workers[worker_id].held.pop(grant_id, None)
            self._take(*self._timed_done(grant_id))
            self._say(decode_id)
            self._say(prefill_id)
            self._come()
        return (self._num_granted - before) / self._spent_s

    def _one_that_runs(self) -> tuple[str, str, str]:
        while True:
            self._live.rotate(self._draw.randrange(len(self._live)))
            grant_id, prefill_id, decode_id = self._live.popleft()
            if grant_id in self._workers[decode_id].running():
                return grant_id, prefill_id, decode_id
            self._live.append((grant_id, prefill_id, decode_id))

    def _timed_done(self, grant_id: str) -> tuple[list[Decision], float]:
        began = time.thread_time()
        return self._planner.done(grant_id, 32, self._now, whole_output_tokens=32), began

    def _come(self) -> None:
        self._now += 1e-4
        self._num_wants += 1
        num_prompt_tokens = self._draw.randint(1, _MAX_PROMPT)
        want = Want(
            request_id=f"r{self._num_wants}",
            attempt=0,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=self._draw.randint(2, _MAX_OUTPUT),
            waited_s=0.0,
            remaining_s=1e6,
            priority=self._draw.choice(self._tiers),
            tenant=f"tenant-{self._draw.randrange(_NUM_TENANTS)}",
            prefix=self._prefix(num_prompt_tokens),
        )
        self._wants[want.request_id] = want
        began = time.thread_time()
        self._take(self._planner.want(_ROUTER[0], want, self._now), began)

    def _prefix(self, num_tokens: int) -> PromptPrefix:
        """Half of a prompt is the beginning of others too, the rest is its own."""
        num_names, beginning = num_tokens // _STRIDE, self._draw.randrange(_NUM_BEGINNINGS)
        names = [
            beginning << 32 | number if 2 * number < num_names else self._num_wants << 42 | number
            for number in range(num_names)
        ]
        return PromptPrefix(stride_tokens=_STRIDE, names=tuple(names))

    def _start_granted(self) -> None:
        while self._granted:
            self._say(self._granted.pop())

    def _say(self, worker_id: str) -> None:
        worker = self._workers[worker_id]
        report, incarnation = worker.report(len(self._tiers)), worker.registration.incarnation
        began = time.thread_time()
        self._take(self._planner.report(worker_id, incarnation, report, self._now), began)

    def _take(self, decisions: list[Decision], began: float) -> None:
        self._spent_s += time.thread_time() - began
        for decision in decisions:
            if not isinstance(decision, SendGrant):
                continue
            grant = decision.grant
            assert grant.decode is not None, "nobody asks for one token"
            prefill = grant.prefill or grant.decode
            want = self._wants.pop(grant.request_id)
            # The prompt is computed by the next report, and its blocks are the decode worker's.
            num_blocks = -(-want.num_prompt_tokens // 16)
            tier = self._tiers.index(want.priority)
            self._workers[prefill.worker_id].held[grant.grant_id] = (tier, 0)
            self._workers[grant.decode.worker_id].held[grant.grant_id] = (tier, num_blocks)
            self._live.append((grant.grant_id, prefill.worker_id, grant.decode.worker_id))
            self._granted |= {prefill.worker_id, grant.decode.worker_id}
            self._num_granted += 1


def _chosen_against_least(num_each: int, num_choices: int, draw: random.Random) -> list[Run]:
    """Return the cost of each chosen pair, and of the cheapest one."""
    runs = []
    for _ in range(num_choices):
        ledger = Ledger(LinkTable(60.0))
        costs = CostModel(ledger, 64.0)
        config = _config(num_each, SchedulingConfig(local_prefill=LocalPrefill.NEVER))
        placement = Placement(config, ledger, costs, ControlSettings())
        _load(ledger, config, draw)
        want = Want(
            request_id="r", attempt=0, num_prompt_tokens=draw.randint(1, _MAX_PROMPT),
            max_tokens=draw.randint(2, _MAX_OUTPUT), waited_s=0.0, remaining_s=1e6,
        )  # fmt: skip
        needs = placement.rule.needs(want)
        choice = placement.choose(want, needs, (), 0.0, may_fall_back=True)
        if not isinstance(choice, Choice):
            continue
        prefills = list(ledger.of_role(Role.PREFILL))
        decodes = list(ledger.of_role(Role.DECODE))
        pairs = [
            Route(prefill=p, decode=d)
            for p in prefills
            for d in decodes
            if p.run_ahead_tokens + needs.prefill_tokens <= config.scheduling.run_ahead_tokens
            and d.num_slots_used < d.registration.num_slots
            and d.blocks_for(needs.decode_tokens) <= d.num_blocks_free
        ]
        least_s = min(costs.cheapest([pair], want, 0.0).cost_s for pair in pairs)
        runs.append(Run(choice.cost_s, least_s))
    return runs


def _load(ledger: Ledger, config: DeployConfig, draw: random.Random) -> None:
    """Enter workers with loads, speeds and links of their own."""
    registrations = _registrations(config)
    for registration in registrations:
        entry = ledger.add_worker(registration, 0.0)
        entry.judge(Health.ALIVE)
        num_running = draw.randint(0, 7)
        report = WorkerReport(
            blocks=BlockCounts(free=registration.num_blocks - 100 * num_running, held=100),
            num_running=num_running,
            queued_tokens=draw.randint(0, 4000),
            step_base_s=draw.uniform(0.01, 0.05),
            step_per_seq_s=draw.uniform(5e-4, 4e-3),
            prefill_per_token_s=draw.uniform(5e-5, 4e-4),
            transfers=tuple(
                TransferSample(
                    peer_worker_id=f"decode-{draw.randrange(config.pools[1].count)}",
                    num_bytes=num_bytes,
                    seconds=num_bytes / draw.uniform(2e7, 2e9),
                )
                for num_bytes in draw.choices(range(10**5, 10**7), k=6)
                if registration.role is Role.PREFILL
            ),
        )
        ledger.take_report(entry, report, 0.0)
    for registration in registrations:
        # Once more: a transfer counts only where its peer is known.
        entry = ledger.workers[registration.worker_id]
        ledger.take_report(entry, entry.report, 0.0)
