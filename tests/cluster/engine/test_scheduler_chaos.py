"""Thousands of random steps: everything ends once, with the tokens of an undisturbed run.

The fake runner checks every share's history against what it wrote to which block, so that a block
given to two sequences, or a position skipped, fails at the step in which it happens.
"""

import random

import pytest

from cluster.errors import Cancelled, DeadlineExceeded, InvalidRequest
from cluster.request import FinishReason
from tests.factories import BLOCK_SIZE, Engine, expected_tokens, make_prompt

_SETTINGS = [
    # blocks, slots, budget, chunk
    (12, 4, 64, 0),
    (12, 4, 8, 5),
    (10, 8, 8, 1),
    (30, 3, 16, 16),
    (40, 8, 200, 7),
    (9, 2, 300, 0),
]


class World:
    """Random clients, a decode worker that imports, and exports that hold blocks for a while."""

    def __init__(
        self, seed: int, settings: tuple[int, ...], *, has_prefix_cache: bool, swap_slots: int
    ) -> None:
        num_blocks, slots, budget, chunk = settings
        self.rng = random.Random(seed)
        self.has_prefix_cache = has_prefix_cache
        self.slots, self.token_budget = slots, budget
        self.engine = Engine(
            num_blocks=num_blocks, max_num_seqs=slots, token_budget=budget, chunk_tokens=chunk,
            has_prefix_cache=has_prefix_cache, swap_slots=swap_slots,
        )  # fmt: skip
        self.sequences = []
        self.may_disturb = True
        self.outside = []

    def add(self) -> None:
        rng, engine = self.rng, self.engine
        name = f"r{len(self.sequences)}"
        capacity = engine.pool.num_blocks * BLOCK_SIZE
        num_prompt = rng.choice(
            [1, 3, 4, 5, rng.randint(1, capacity // 2), rng.randint(1, capacity)]
        )
        fields = {"num_prompt_tokens": num_prompt, "max_tokens": rng.randint(1, 30)}
        if self.has_prefix_cache:
            # A few prompts that begin alike; what each goes on with is its own.
            fields["prompt_ids"] = make_prompt(num_prompt, rng.choice(("alike", "alike too", name)))
            fields["tenant"] = rng.choice(("", "t"))
        # Arrivals are stamped on other threads: their order isn't quite that of the queue.
        fields["arrived"] = engine.clock.now() - rng.random() * 0.1
        if rng.random() < 0.1:
            fields["deadline"] = engine.clock.now() + rng.random()
        kind = rng.random()
        num_blocks = -(-num_prompt // BLOCK_SIZE)
        if kind < 0.25:
            # As the decode half does it: only what can be reserved is imported.
            probe = engine.pool.reserve(num_blocks, "probe", (name,))
            if probe is None:
                return
            engine.pool.cancel("probe")
            fields["max_tokens"] += 1
            self.sequences.append(engine.add_imported(name, **fields))
        elif kind < 0.45:
            self.sequences.append(engine.add(name, hands_over_at=1, **fields))
        elif kind < 0.55:
            output_ids = expected_tokens(name, rng.randint(1, fields["max_tokens"]))
            self.sequences.append(engine.add(name, output_ids=output_ids, **fields))
        else:
            self.sequences.append(engine.add(name, **fields))

    def abort_one(self) -> None:
        alive = [s for s in self.sequences if s.key not in self.engine.log.ends]
        if alive:
            self.engine.abort(self.rng.choice(alive))

    def take_handovers(self) -> None:
        """Rename what left with its blocks, and give exports back when their time comes."""
        engine, rng = self.engine, self.rng
        for key, end in engine.log.ends.items():
            if end.finish_reason is None and end.error is None and engine.pool.blocks_of(key):
                engine.pool.rename(key, ("export", str(key)))
                self.outside.append(("export", str(key)))
        if self.outside and (not self.may_disturb or rng.random() < 0.3):
            engine.pool.release(self.outside.pop(rng.randrange(len(self.outside))))

    def step(self) -> bool:
        rng = self.rng
        disturbs = self.may_disturb and rng.random() < 0.05
        plan = self.engine.step(before_commit=self.abort_one if disturbs else None)
        if plan is None:
            self.engine.clock.advance(0.01)
        else:
            assert plan.num_tokens <= self.token_budget
            assert len(plan.shares) <= self.slots
            lengths = [len(share.token_ids) for share in plan.shares]
            assert lengths == sorted(lengths, key=lambda n: n > 1)
        self.engine.pool.check()
        self.take_handovers()
        return plan is not None

    def check_copies(self) -> None:
        """The scheduler plans with its own copy of the blocks: it must be the pool's."""
        for sequence in self.engine.scheduler._live.values():
            assert self.engine.pool.blocks_of(sequence.key) == tuple(sequence.block_ids)

    def check_ends(self) -> None:
        for sequence in self.sequences:
            name, end = sequence.key.request_id, self.engine.end(sequence)
            got = self.engine.tokens(sequence)
            first = self.engine.log.first_index.get(sequence.key, 0)
            assert got == expected_tokens(name, first + len(got))[first:]
            if end.finish_reason is FinishReason.LENGTH:
                assert sequence.num_output_tokens == sequence.params.max_tokens
            elif end.error is None:
                assert (end.finish_reason, len(got)) == (None, 1)
            else:
                assert isinstance(end.error, Cancelled | DeadlineExceeded | InvalidRequest)


@pytest.mark.parametrize("settings", _SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("seed", "has_prefix_cache", "swap_slots"),
    [(0, False, 0), (1, False, 8), (2, True, 0), (3, True, 40)],
)
def test_chaos(seed, has_prefix_cache, swap_slots, settings):
    """P-15, P-16: undisturbed tokens, each end once, no leak, and always some progress."""
    world = World(seed, settings, has_prefix_cache=has_prefix_cache, swap_slots=swap_slots)
    idle_steps = 0
    for _ in range(1500):
        if world.rng.random() < 0.2 and world.engine.scheduler.num_waiting < 12:
            world.add()
        if world.rng.random() < 0.02:
            world.abort_one()
        has_work = world.engine.scheduler.num_running + world.engine.scheduler.num_waiting > 0
        # Only exports can hold work up here, and they go within some steps.
        idle_steps = 0 if world.step() or not has_work else idle_steps + 1
        assert idle_steps < 100, "work, and nothing is computed"
        world.check_copies()
    world.may_disturb = False
    for _ in range(20_000):
        if not world.step() and not world.outside and not world.engine.next_instant:
            break
    world.check_ends()
    world.engine.assert_idle()
    assert len(world.sequences) > 50
    assert settings[0] > 20 or world.engine.scheduler.num_preemptions > 0
    swapping = world.engine.scheduler.swapping
    assert settings[0] > 20 or (swapping.num_swapped > 0) == (swap_slots > 0)
    assert has_prefix_cache == (world.engine.scheduler.num_cached_tokens > 20)


@pytest.mark.parametrize("seed", range(5))
def test_a_sequence_that_is_always_passed_still_starts(seed):
    """P-16: an endless stream of small requests must not starve a big one."""
    rng = random.Random(seed)
    engine = Engine(num_blocks=10, max_num_seqs=4)
    for i in range(4):
        engine.add(f"s{i}", num_prompt_tokens=5, max_tokens=rng.randint(2, 9))
    engine.step()
    big = engine.add("big", num_prompt_tokens=36, max_tokens=4)
    for i in range(4, 2000):
        if engine.scheduler.num_waiting < 3:
            engine.add(f"s{i}", num_prompt_tokens=5, max_tokens=rng.randint(2, 9))
        engine.step()
        engine.clock.advance(0.04)
        if big.key in engine.log.ends:
            break
    assert engine.tokens(big) == expected_tokens("big", 4)
    engine.run_to_end()
    engine.assert_idle()
