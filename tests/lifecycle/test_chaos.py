"""Many requests, two decode workers, and everything that can befall them, in random order.

The router is a simple one: it redirects exports that wait, to either worker, and aborts what is
left of a request when a leg of it failed. Each request must end, and one that ends well must have
exactly its tokens; then both pools are as they were. In half of the runs requests have tiers, and
those of higher ones take blocks of lower ones: of sequences, of exports and of imports.
"""

import random

import pytest

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.handoff import AbortCause, Commit, Credit, ManifestBytes, Offer
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from cluster.request import LegKind
from tests.factories import expected_tokens, make_key, make_sequence
from tests.lifecycle.fakes import LAYERS
from tests.lifecycle.pair import MAX_TOKENS, Pair

NUM_REQUESTS = 12
NUM_TURNS = 160
TIERS = Tiers(names=("low", "normal", "high"), default="normal")
BY_TIER = Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=3), tiers=TIERS)


class Chaos:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.has_tiers = seed % 2 == 1
        self.pair = Pair(
            p_blocks=28,
            d_blocks=14 if self.has_tiers else 18,
            streams=self.dice.random() < 0.8,
            rules=BY_TIER if self.has_tiers else None,
            p_rules=BY_TIER if self.has_tiers else None,
        )
        self.pair.add_decode("e", 12 if self.has_tiers else 14)
        self.tiers: dict[str, str] = {}
        self.num_started = self.num_local = self.num_taken_for_imports = 0
        self.moves = (
            [self.start, self.step_prefill, self.settle, self.step_decode] * 6
            + [self.start_local, self.redirect, self.hold] * 4
            + [self.begin_prefill, self.store_layers] * 2
            + [self.abort_moving, self.let_go, self.start_beside] * 2
            + [self.cut, self.abort_prefill, self.abort_decode, self.lose_router, self.pass_time]
        )

    async def run(self) -> None:
        for _ in range(NUM_TURNS):
            move = self.dice.choice(self.moves)
            await move()
            self.pair.check()
        await self.come_to_rest()

    async def come_to_rest(self) -> None:
        for _ in range(8):
            await self.pair.run_dry()
            await self.redirect()
        for side in self.pair.sides.values():
            waiting = side.half.inbox.num_waiting, side.engine.scheduler.num_waiting
            assert waiting == (0, 0), "somebody waits, and nobody has anything to compute"
            assert side.pool.demand is None
        for half in self.halves():
            for opened in half.book:
                half.abort_leg(opened.key, AbortCause.CANCELLED)
        await self.pair.run_dry()

    def halves(self):
        return [self.pair.prefill, *(side.half for side in self.pair.sides.values())]

    def request_ids(self) -> list[str]:
        return [f"r{i}" for i in range(self.num_started)]

    def side(self):
        return self.dice.choice(list(self.pair.sides.values()))

    async def start(self) -> None:
        if self.num_started < NUM_REQUESTS:
            name, num_tokens = f"r{self.num_started}", self.dice.randint(1, 30)
            self.pair.start(name, num_prompt_tokens=num_tokens, priority=self.tier(name))
            self.num_started += 1

    def tier(self, name: str) -> str:
        """The same whenever it is asked for."""
        if not self.has_tiers:
            return ""
        return self.tiers.setdefault(name, self.dice.choice(TIERS.names))

    async def start_local(self) -> None:
        """A request that is computed on a decode worker alone, in blocks that others had."""
        side = self.side()
        name = f"local{self.num_local}"
        leg = self.pair.leg(LegKind.LOCAL, name, max_tokens=12, priority=self.tier(name))
        side.start(leg)
        self.num_local += 1

    async def start_beside(self) -> None:
        """Another half's sequence on the prefill worker, which grows and preempts prompts."""
        self.num_local += 1
        beside = f"beside{self.num_local}"
        now = self.pair.clock.now()
        self.pair.p_engine.add(
            make_sequence(beside, num_prompt_tokens=4, max_tokens=24, arrived=now)
        )

    async def step_prefill(self) -> None:
        self.pair.p_engine.step()

    async def begin_prefill(self) -> None:
        """A step that is still running while other things happen; the next one ends it."""
        if self.pair.p_engine.running is None:
            self.pair.p_engine.begin()
            await self.settle()
            await self.store_layers()

    async def store_layers(self) -> None:
        engine = self.pair.p_engine
        if engine.running is not None:
            stored = max(engine.cache.num_stored.values(), default=LAYERS)
            if stored < LAYERS - 1:
                engine.store(self.dice.randint(stored + 1, LAYERS - 1))

    async def step_decode(self) -> None:
        side = self.side()
        demand, before = side.pool.demand, side.engine.scheduler.num_preemptions
        side.engine.step()
        if demand is not None:
            self.num_taken_for_imports += side.engine.scheduler.num_preemptions - before

    async def settle(self) -> None:
        await self.pair.settle()

    async def redirect(self) -> None:
        waiting, self.pair.p_sink.waiting = self.pair.p_sink.waiting, []
        for told in waiting:
            key = told.key
            if key not in self.pair.prefill.book or self.is_streaming(key):
                continue
            for side in self.pair.sides.values():
                side.half.abort_leg(key, AbortCause.FAULT)
                side.sink.ends.pop(key, None)
            num_tokens = len(self.pair.prefill.book.get(key).leg.prompt_ids)
            self.pair.redirect(
                self.side().worker_id, key.request_id, num_prompt_tokens=num_tokens,
                priority=self.tier(key.request_id), num_preemptions=self.num_preemptions(key),
            )  # fmt: skip

    def num_preemptions(self, key) -> int:
        """What the router has been told."""
        sinks = [self.pair.p_sink, *(side.sink for side in self.pair.sides.values())]
        return max(sink.num_preemptions.get(key, 0) for sink in sinks)

    def is_streaming(self, key) -> bool:
        return any(side.sink.output(key) for side in self.pair.sides.values())

    async def hold(self) -> None:
        wire = self.side().wire
        wire.hold = {self.dice.choice([Offer, Credit, ManifestBytes, Commit])}
        wire.released.clear()
        wire.holds_bytes = self.dice.random() < 0.5
        wire.holds_landing = self.dice.random() < 0.5

    async def let_go(self) -> None:
        for wire in self.pair.wires:
            wire.let_go()

    async def cut(self) -> None:
        side = self.side()
        side.wire.cut()
        side.new_wire()

    async def abort_prefill(self) -> None:
        self.abort(self.pair.prefill)

    async def abort_decode(self) -> None:
        self.abort(self.side().half)

    def abort(self, half) -> None:
        if self.num_started:
            key = make_key(self.dice.choice(self.request_ids()))
            cause = self.dice.choice([AbortCause.CANCELLED, AbortCause.STOPPED, AbortCause.FAULT])
            half.abort_leg(key, cause)

    async def abort_moving(self) -> None:
        """Give up one whose bytes are on their way; its blocks go to whoever comes next."""
        side = self.side()
        for opened in side.half.book:
            reserved = side.pool.importing(opened.leg.handoff_id)
            if reserved and side.wire.holds_landing:
                side.half.abort_leg(opened.key, AbortCause.FAULT)
                await self.start_local()
                break

    async def lose_router(self) -> None:
        side = self.side()
        side.half.router_lost(side.sink, AbortCause.CANCELLED)

    async def pass_time(self) -> None:
        self.pair.pass_time(self.dice.choice([0.3, 1.1, 5.0]))


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_happens_all_is_given_back(seed):
    """CASES P-11, P-12, P-15, P-16, P-19, P-20, P-21: and no token is wrong.

    Nobody waits for ever, though both pools are full.
    """
    chaos = Chaos(seed)
    await chaos.run()
    pair = chaos.pair
    for request_id in chaos.request_ids():
        assert make_key(request_id) in pair.p_sink.ends
    for side in pair.sides.values():
        for key, end in side.sink.ends.items():
            output = side.sink.output(key)
            assert output == expected_tokens(key.request_id, len(output))
            if end.finish_reason is not None:
                assert len(output) == (MAX_TOKENS if key.request_id.startswith("r") else 12)
    pair.assert_idle()


async def test_the_chaos_is_one():
    """What it is made of does happen, and most of what is asked is served."""
    counts, num_served, num_started, num_preempted, num_parts, num_taken = {}, 0, 0, 0, 0, 0
    num_gave_way = [0, 0]
    for seed in range(20):
        chaos = Chaos(seed)
        await chaos.run()
        pair = chaos.pair
        for source in (pair.prefill.outbox, *(s.half.inbox for s in pair.sides.values())):
            for name, number in source.counts.items():
                counts[name] = counts.get(name, 0) + number
        inboxes = [side.half.inbox for side in pair.sides.values()]
        num_gave_way[0] += pair.prefill.outbox.counts["gave_way"]
        num_gave_way[1] += sum(inbox.counts["gave_way"] for inbox in inboxes)
        num_started += chaos.num_started
        num_preempted += pair.p_engine.scheduler.num_preemptions
        num_taken += chaos.num_taken_for_imports
        parts = [layers for wire in pair.wires for _, layers in wire.parts]
        num_parts += sum(len(layers) < LAYERS for layers in parts)
        ends = [end for side in pair.sides.values() for end in side.sink.ends.values()]
        num_served += sum(end.finish_reason is not None for end in ends)
        errors = [end.error for end in pair.p_sink.ends.values()]
        assert all(error is None or error.message for error in errors)
        assert pair.faults == []
    for name in ("waited", "redirected", "refused", "dropped_segments", "failed", "committed"):
        assert counts[name] > 10, (name, counts)
    assert num_served > num_started / 4
    assert num_preempted > 10
    assert num_taken > 5
    assert min(num_gave_way) > 2, num_gave_way
    assert num_parts > 20
