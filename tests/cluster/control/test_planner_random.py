"""The planner against thousands of random events, with workers that keep their own books."""

import random
from dataclasses import dataclass, field, replace

import pytest

from cluster.config import Policy, Role, SchedulingConfig
from cluster.control.decisions import SendGrant, SendReject, WorkerDied
from cluster.control.facts import BlockCounts, ExportRef, Registration
from cluster.control.planner import Planner
from cluster.control.settings import ControlSettings
from tests.cluster.control.factory import (
    make_config,
    make_pool,
    make_registration,
    make_report,
    make_want,
    two_pools,
)

SETTINGS = ControlSettings(reconcile_s=0.0, unseen_grant_s=1e9)


AGING_S = 0.5


GROWTH = SETTINGS.growth_tokens


def can_compute(entry, num_tokens):
    limit = SchedulingConfig().run_ahead_tokens
    ahead = entry.run_ahead_tokens
    has_blocks = -(-num_tokens // 16) <= entry.num_blocks_free
    return has_blocks and (ahead == 0 or ahead + -(-num_tokens // 16) * 16 <= limit)


def can_decode(entry, num_tokens):
    has_slot = entry.num_slots_used < entry.registration.num_slots
    return has_slot and -(-num_tokens // 16) <= entry.num_blocks_free


def needs_less(want, other):
    """Whether there may be room for one and not for the other."""
    return (
        want.num_prompt_tokens < other.num_prompt_tokens
        or want.num_prompt_tokens + want.max_tokens < other.num_prompt_tokens + other.max_tokens
    )


@dataclass
class SimWorker:
    """Holds legs until told to end them; proves that it was never promised too much."""

    registration: Registration
    promised: dict = field(default_factory=dict)
    held: set = field(default_factory=set)

    def check(self):
        slots = sum(charge[0] for charge in self.promised.values())
        blocks = sum(charge[1] for charge in self.promised.values())
        assert slots <= self.registration.num_slots, self.promised
        assert blocks <= self.registration.num_blocks, self.promised

    def report(self, rng):
        """What it holds has taken some of its blocks, as prompts arrive and outputs grow."""
        used = sum(rng.randint(0, self.promised[g][1]) for g in self.held)
        free = self.registration.num_blocks - used
        return make_report(self.registration, *self.held, blocks=BlockCounts(free=free, held=used))


class World:
    def __init__(self, seed, pools, **scheduling):
        self.is_fcfs = scheduling.get("policy", Policy.FCFS) is Policy.FCFS
        self.is_fair = scheduling.get("fair_tenants", False)
        self.rng = random.Random(seed)
        self.now = 0.0
        self.planner = Planner(
            make_config(*pools, max_queue_requests=40, aging_s=AGING_S, **scheduling),
            term=1,
            settings=SETTINGS,
            now=0.0,
        )
        self.workers = {}
        self.waiting = {}
        self.since = {}
        self.live = {}
        self.grants = {}
        self.answers = {}
        self.incarnations = 0
        self.num_granted = self.num_deaths = self.num_exports = self.num_redirected = 0
        for router_id in ("a", "b"):
            self.planner.router_joined(router_id, f"{router_id}-1", 0.0)
        for pool in pools:
            for index in range(2):
                self.join(make_registration(pool, index))

    def join(self, registration):
        worker = SimWorker(registration)
        self.take(self.planner.register(registration, self.now))
        self.workers[registration.worker_id] = worker
        self.say(worker)

    def say(self, worker):
        registration = worker.registration
        self.take(
            self.planner.report(
                registration.worker_id, registration.incarnation, worker.report(self.rng), self.now
            )
        )

    def take(self, decisions):
        if any(w.want.export is not None for w in self.planner._queue):
            sent = [d.grant for d in decisions if isinstance(d, SendGrant)]
            pairs = [g for g in sent if g.handoff_id and not g.reason.startswith("export")]
            assert not pairs, "a fresh request has taken a decode worker from an export"
        for decision in decisions:
            if isinstance(decision, SendGrant):
                self.granted(decision.grant)
            elif isinstance(decision, SendReject):
                self.answered(decision.reject, "reject")
            elif isinstance(decision, WorkerDied):
                self.num_deaths += 1

    def answered(self, answer, kind):
        key = (answer.request_id, answer.attempt)
        assert key not in self.answers, f"{key} was answered twice"
        assert key in self.waiting or kind == "reject"
        self.answers[key] = kind
        self.waiting.pop(key, None)

    def granted(self, grant):
        key = (grant.request_id, grant.attempt)
        want = self.waiting[key]
        older = [
            other
            for other in self.waiting.values()
            if other.request_id < want.request_id and want.export is None is other.export
        ]
        # Between tenants with fair shares it is only a matter of their turns.
        same = [
            other
            for other in older
            if (other.max_tokens == 1) == (want.max_tokens == 1)
            and (other.tenant == want.tenant or not self.is_fair)
        ]
        for other in same:
            # It has no room where the younger one, which needs less, has; and that for a while.
            if self.is_fcfs:
                assert needs_less(want, other), f"{key} has overtaken {other}"
            waited_more_s = self.since[key] - self.since[other.request_id, other.attempt]
            assert waited_more_s <= AGING_S, f"{key} has overtaken {other}"
        self.answered(grant, "grant")
        self.num_granted += 1
        prompt, output = want.num_prompt_tokens, min(want.max_tokens - 1, SETTINGS.growth_tokens)
        legs = {}
        if want.export is not None:
            self.num_redirected += 1
            assert grant.prefill.incarnation == want.export.incarnation
        elif grant.prefill is not None:
            legs[grant.prefill.worker_id] = (0, -(-prompt // 16))
        if grant.decode is not None:
            legs[grant.decode.worker_id] = (1, -(-(prompt + output) // 16))
        for worker_id, charge in legs.items():
            assert self.workers[worker_id].registration.incarnation in {
                placed.incarnation for placed in (grant.prefill, grant.decode) if placed
            }
            self.workers[worker_id].promised[grant.grant_id] = charge
            self.workers[worker_id].check()
        self.live[grant.grant_id] = list(legs)
        self.grants[grant.grant_id] = (grant, want)

    # ---- events

    def want(self):
        request_id = f"r{len(self.answers) + len(self.waiting):06d}"
        want = make_want(
            request_id,
            num_prompt_tokens=self.rng.choice([1, 16, 17, 100, 300]),
            max_tokens=self.rng.choice([1, 2, 40, 200]),
            priority=self.rng.choice(["", "low", "high"]),
            tenant=self.rng.choice("tu"),
            remaining_s=self.rng.choice([0.5, 1e4]),
        )
        self.waiting[request_id, 0] = want
        self.since[request_id, 0] = self.now
        self.take(self.planner.want(self.rng.choice("ab"), want, self.now))

    def cancel(self):
        if self.waiting:
            key = self.rng.choice(sorted(self.waiting))
            del self.waiting[key]
            self.answers[key] = "cancelled"
            self.take(self.planner.cancel_want(*key, self.now))

    def start_leg(self):
        worker = self.rng.choice(list(self.workers.values()))
        unheld = sorted(worker.promised.keys() - worker.held)
        if unheld:
            worker.held.add(self.rng.choice(unheld))
            self.say(worker)

    def end_leg(self):
        worker = self.rng.choice(list(self.workers.values()))
        if worker.held:
            grant_id = self.rng.choice(sorted(worker.held))
            worker.held.discard(grant_id)
            del worker.promised[grant_id]
            self.say(worker)

    def done(self):
        """A router is through when both legs have ended, or before they began."""
        over = [g for g, ids in self.live.items() if not any(self.holds(w, g) for w in ids)]
        if over:
            grant_id = self.rng.choice(over)
            for worker_id in self.live.pop(grant_id):
                if worker_id in self.workers:
                    self.workers[worker_id].promised.pop(grant_id, None)
            self.take(self.planner.done(grant_id, self.rng.randint(0, 40), self.now))

    def refuse(self):
        """A decode worker refuses a handoff: the prefill worker keeps the export."""
        pairs = [g for g, ids in self.live.items() if len(ids) == 2 and self.holds(ids[0], g)]
        if not pairs:
            return
        grant_id = self.rng.choice(pairs)
        prefill_id, decode_id = self.live[grant_id]
        self.live[grant_id] = [prefill_id]
        decode = self.workers[decode_id]
        if decode.promised.pop(grant_id, None) is None:
            return  # it died meanwhile
        decode.held.discard(grant_id)
        self.say(decode)
        grant, want = self.grants[grant_id]
        export = ExportRef(
            grant_id=grant_id,
            worker_id=prefill_id,
            incarnation=grant.prefill.incarnation,
        )
        again = replace(want, attempt=want.attempt + 1, export=export, remaining_s=1e4)
        self.num_exports += 1
        self.waiting[again.request_id, again.attempt] = again
        self.since[again.request_id, again.attempt] = self.now
        self.take(self.planner.want(self.rng.choice("ab"), again, self.now))

    def holds(self, worker_id, grant_id):
        return worker_id in self.workers and grant_id in self.workers[worker_id].held

    def restart_worker(self):
        worker_id = self.rng.choice(list(self.workers))
        old = self.workers[worker_id].registration
        self.incarnations += 1
        values = {"worker_id": worker_id, "incarnation": f"{worker_id}-{self.incarnations}"}
        pool = next(p for p in self.planner._config.pools if p.name == old.pool)
        self.workers[worker_id] = SimWorker(make_registration(pool, **values))
        self.join(self.workers[worker_id].registration)

    def step(self):
        self.now += 0.01
        events = [self.want, self.start_leg, self.end_leg, self.done, self.refuse]
        weights = [4, 8, 5, 5, 2]
        if self.rng.random() < 0.02:
            self.rng.choice([self.cancel, self.restart_worker])()
            self.check_nobody_fits()
        self.rng.choices(events, weights)[0]()
        self.check_nobody_fits()
        if self.rng.random() < 0.2:
            for worker in self.workers.values():
                self.say(worker)
            self.take(self.planner.tick(self.now))
            self.check_nobody_fits()
        self.planner.check()

    def check_nobody_fits(self):
        """Room is left only where it is held for an export, or for one who has waited too long."""
        queue, entries = self.planner._queue, list(self.planner._ledger.workers.values())
        if queue.num_special or not len(queue):
            return
        oldest = min(w.ticket.arrived for w in queue)
        for waiting in queue:
            if waiting.ticket.arrived > oldest + AGING_S:
                continue
            prompt, output = waiting.want.num_prompt_tokens, waiting.want.max_tokens - 1
            computes = [e for e in entries if can_compute(e, prompt)]
            decodes = [e for e in entries if can_decode(e, prompt + min(output, GROWTH))]
            prefills = [e for e in computes if e.registration.role is Role.PREFILL]
            is_single = waiting.want.max_tokens == 1 and bool(
                [p for p in self.planner._config.pools if p.role is Role.PREFILL]
            )
            assert not (is_single and prefills), waiting.want
            if is_single:
                continue
            local = [e for e in computes if e in decodes and e.registration.role is Role.MIXED]
            pairs = [e for e in decodes if e.registration.role is Role.DECODE and prefills]
            assert not local + pairs, f"{waiting.want} could be placed"

    def drain(self):
        for _ in range(20_000):
            if not (self.waiting or self.live):
                return
            self.now += 0.01
            for event in (self.start_leg, self.end_leg, self.done):
                event()
            for worker in self.workers.values():
                self.say(worker)
            self.take(self.planner.tick(self.now))
        raise AssertionError(f"never drained: {self.waiting} {self.live}")


POOLS = {
    "pairs": two_pools(kv_tokens=512, slots=3),
    "mixed": (make_pool("both", Role.MIXED, 512, 3),),
    "all": (*two_pools(kv_tokens=512, slots=3), make_pool("both", Role.MIXED, 512, 2)),
}


ORDERS = {
    "fcfs": {},
    "sjf": {"policy": Policy.SJF},
    "tiers": {"policy": Policy.PRIORITY},
    "fair": {"policy": Policy.PRIORITY, "fair_tenants": True},
}


@pytest.mark.parametrize(
    ("seed", "order"),
    [*((seed, "fcfs") for seed in range(4)), (4, "sjf"), (5, "tiers"), (6, "fair")],
)
@pytest.mark.parametrize("pools", POOLS)
def test_nothing_is_over_committed_lost_left_or_idle(seed, order, pools):
    world = World(seed, POOLS[pools], **ORDERS[order])
    for _ in range(2500):
        world.step()
    world.drain()
    view = world.planner.view(world.now)
    assert (view.num_waiting, view.waiting_tokens, view.num_granted) == (0, 0, 0)
    assert all(worker.num_granted == 0 for worker in view.workers)
    assert all(not entry.charges for entry in world.planner._ledger.workers.values())
    assert all(link.in_flight_bytes == 0 for link in world.planner._ledger.links._links.values())
    assert world.num_granted > 200
    assert world.num_deaths > 0
    assert pools == "mixed" or world.num_redirected > 10
