"""The planner against thousands of random events, with workers that keep their own books."""

import random
from dataclasses import dataclass, field, replace

import pytest

from cluster.config import Policy, Preemption, Role, SchedulingConfig
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
from tests.cluster.control.idle_room import IdleRoom

SETTINGS = ControlSettings(reconcile_s=0.0, unseen_grant_s=1e9)


AGING_S = 0.5

TIERS = SchedulingConfig().tiers


def needs_less(want, other):
    """Whether there may be room for one and not for the other."""
    return (
        want.num_prompt_tokens < other.num_prompt_tokens
        or want.num_prompt_tokens + want.max_tokens < other.num_prompt_tokens + other.max_tokens
    )


def equal_to(want):
    """What decides on a want besides its arrival."""
    return (want.priority or "normal", want.num_prompt_tokens, want.max_tokens)


@dataclass
class SimWorker:
    """Holds legs until told to end them; proves that it was never promised too much."""

    registration: Registration
    promised: dict = field(default_factory=dict)
    """By grant: slots, blocks and tier."""
    held: set = field(default_factory=set)
    firm: set = field(default_factory=set)
    """Of those held: they give way to nobody."""

    def check(self, tier):
        """What is promised to a tier and to those above it is there; lower ones give way."""
        staying = [c for g, c in self.promised.items() if c[2] >= tier or g in self.firm]
        assert sum(charge[0] for charge in staying) <= self.registration.num_slots, self.promised
        assert sum(charge[1] for charge in staying) <= self.registration.num_blocks, self.promised

    def report(self, rng, takes):
        """What it holds has taken some of its blocks, as prompts arrive and outputs grow."""
        left = self.registration.num_blocks
        takable = [0, 0, 0]
        # Whoever stays comes first, then the higher tiers.
        for grant in sorted(self.held, key=lambda g: (g not in self.firm, -self.promised[g][2], g)):
            used = min(left, rng.randint(0, self.promised[grant][1]))
            left -= used
            if grant not in self.firm:
                takable[self.promised[grant][2]] += used
        told = {"takable_blocks": tuple(takable), "firm_grants": tuple(self.firm)} if takes else {}
        counts = BlockCounts(free=left, held=self.registration.num_blocks - left)
        return make_report(self.registration, *self.held, blocks=counts, **told)


class World:
    def __init__(self, seed, pools, **scheduling):
        self.is_fcfs = scheduling.get("policy", Policy.FCFS) is Policy.FCFS
        self.is_by_tier = scheduling.get("policy") is Policy.PRIORITY
        self.is_fair = scheduling.get("fair_tenants", False)
        self.takes = scheduling.get("policy") is Policy.PRIORITY
        self.takes &= scheduling.get("preemption") is not Preemption.OFF
        self.num_taken = 0
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
                registration.worker_id,
                registration.incarnation,
                worker.report(self.rng, self.takes),
                self.now,
            )
        )

    def tier_of(self, want):
        """How high it is, where tiers take from one another."""
        return TIERS.index(want.priority or "normal") if self.takes else 0

    def has_aged(self, key):
        return self.now - self.since[key] >= AGING_S

    def take(self, decisions):
        exports = [w for w in self.planner._queue if w.want.export is not None]
        sent = [d.grant for d in decisions if isinstance(d, SendGrant)]
        for grant in sent if exports else ():
            key = (grant.request_id, grant.attempt)
            if grant.handoff_id and not grant.reason.startswith("export"):
                tier = self.tier_of(self.waiting[key])
                goes_first = [
                    e for e in exports
                    if self.tier_of(e.want) >= tier
                    and (self.has_aged(e.key) or not self.has_aged(key) or not self.takes)
                ]  # fmt: skip
                assert not goes_first, "a fresh request has taken a decode worker from an export"
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

    def are_of_one_line(self, one, other):
        is_same_tier = one.priority == other.priority or not self.is_by_tier
        return one.tenant == other.tenant and is_same_tier

    def granted(self, grant):
        key = (grant.request_id, grant.attempt)
        want = self.waiting[key]
        older = [
            other
            for other in self.waiting.values()
            if other.request_id < want.request_id and want.export is None is other.export
        ]
        # Between tenants with fair shares, and their tiers, it is only a matter of turns.
        same = [
            other
            for other in older
            if (other.max_tokens == 1) == (want.max_tokens == 1)
            and (not self.is_fair or self.are_of_one_line(other, want))
        ]
        equals = [other for other in same if equal_to(other) == equal_to(want)]
        assert not (self.is_by_tier and equals), f"{key} has overtaken its equals: {equals}"
        for other in same:
            # It has no room where the younger one, which needs less, has; and that for a while.
            if self.is_fcfs:
                assert needs_less(want, other), f"{key} has overtaken {other}"
            waited_more_s = self.since[key] - self.since[other.request_id, other.attempt]
            assert waited_more_s <= AGING_S, f"{key} has overtaken {other}"
        self.answered(grant, "grant")
        self.num_granted += 1
        prompt, output = want.num_prompt_tokens, min(want.max_tokens - 1, SETTINGS.growth_tokens)
        if self.planner._config.scheduling.preemption is Preemption.OFF:
            output = want.max_tokens - 1
        tier = self.tier_of(want)
        legs = {}
        if want.export is not None:
            self.num_redirected += 1
            assert grant.prefill.incarnation == want.export.incarnation
        elif grant.prefill is not None:
            legs[grant.prefill.worker_id] = (0, -(-prompt // 16), tier)
        if grant.decode is not None:
            legs[grant.decode.worker_id] = (1, -(-(prompt + output) // 16), tier)
        for worker_id, charge in legs.items():
            assert self.workers[worker_id].registration.incarnation in {
                placed.incarnation for placed in (grant.prefill, grant.decode) if placed
            }
            self.workers[worker_id].promised[grant.grant_id] = charge
            self.workers[worker_id].check(tier)
            charges = self.workers[worker_id].promised.values()
            slots = sum(c[0] for c in charges)
            self.num_taken += slots > self.workers[worker_id].registration.num_slots
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
            grant_id = self.rng.choice(unheld)
            worker.held.add(grant_id)
            if self.takes and self.rng.random() < 0.1:
                worker.firm.add(grant_id)
            self.say(worker)

    def end_leg(self):
        worker = self.rng.choice(list(self.workers.values()))
        if worker.held:
            grant_id = self.rng.choice(sorted(worker.held))
            worker.held.discard(grant_id)
            worker.firm.discard(grant_id)
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
        decode.firm.discard(grant_id)
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
        IdleRoom(self.planner, takes=self.takes, aging_s=AGING_S).check()

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
    "kept": {"policy": Policy.PRIORITY, "preemption": Preemption.OFF},
}


@pytest.mark.parametrize(
    ("seed", "order"),
    [*((seed, "fcfs") for seed in range(4)), (4, "sjf"), (5, "tiers"), (6, "fair"), (7, "kept")],
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
    assert (world.num_taken > 0) is (order in ("tiers", "fair")), "higher tiers take slots"
    assert world.num_deaths > 0
    assert pools == "mixed" or world.num_redirected > 10
