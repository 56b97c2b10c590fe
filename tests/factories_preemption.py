"""A real engine of one slot in which higher tiers preempt a request, and the same left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config import Policy
from cluster.engine.plan import Outcome
from cluster.engine.rules import Rules
from cluster.engine.runner import ModelRunner
from cluster.engine.scheduler import StepScheduler
from cluster.engine.sequence import Sequence
from cluster.kv.block_pool import BlockPool
from cluster.kv.cache import PagedCache
from cluster.kv.swap_buffer import SwapBuffer
from cluster.kv.swap_memory import SwapMemory
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from cluster.request import LegKey, SamplingParams
from tests.factories_runner import make_prompts

if TYPE_CHECKING:
    from cluster.model.loader import LoadedModel

BLOCK = 16
NUM_BLOCKS = 64
TIERS = Tiers(names=("low", "high"), default="low")
RULES = Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=2), tiers=TIERS)
URGENT = SamplingParams(max_tokens=3, temperature=0.0)


class RealEngine:
    """Scheduler, model and swap memory, on the model's device; of a loop it needs nothing."""

    def __init__(self, loaded: LoadedModel, *, swaps: bool = False) -> None:
        self.pool = BlockPool(NUM_BLOCKS, swap=SwapBuffer(NUM_BLOCKS) if swaps else None)
        self.scheduler = StepScheduler(self.pool, BLOCK, 1, 256, 16, 512, RULES)
        cache = PagedCache(loaded.layout(BLOCK), NUM_BLOCKS, loaded.device)
        self.runner = ModelRunner(loaded, cache)
        self.memory = SwapMemory(cache, NUM_BLOCKS)
        self.now = 0.0

    def add(
        self, name: str, prompt: list[int], params: SamplingParams, priority: str = ""
    ) -> Sequence:
        sequence = Sequence(
            key=LegKey(name, 0, 0), prompt_ids=tuple(prompt), params=params,
            deadline=float("inf"), arrived=self.now, priority=priority,
        )  # fmt: skip
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        plan = self.scheduler.schedule(self.now)
        while plan is not None and plan.swaps is not None:
            self.memory.copy_out(plan.swaps.out)
            self.memory.copy_back(plan.swaps.back)
            self.scheduler.commit(plan, Outcome({}), self.now)
            plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self.scheduler.commit(plan, self.runner.run(plan), self.now)
        self.now += 0.01
        return plan is not None

    def run(self) -> None:
        while self.step():
            pass
        self.pool.check()
        assert self.pool.counts().held == 0


def assert_undisturbed(loaded: LoadedModel, params: SamplingParams, *, swaps: bool) -> RealEngine:
    """Preempt one in mid-prompt once and in mid-output twice: it draws what it draws alone.

    Each time it is computed again in chunks, or swapped, and then no token is computed twice.
    Returns the engine in which that was.
    """
    prompt, *others = make_prompts([50, 20, 33, 17], seed=4)
    calm = RealEngine(loaded)
    expected = calm.add("r", prompt, params)
    calm.run()
    assert not expected.num_preemptions

    engine = RealEngine(loaded, swaps=swaps)
    low = engine.add("r", prompt, params)
    for number, (other, wait) in enumerate(zip(others, (2, 18, 9), strict=True)):
        for _ in range(wait):
            engine.step()
        high = engine.add(f"h{number}", other, URGENT, priority="high")
        while high.num_output_tokens < URGENT.max_tokens:
            engine.step()
    engine.run()
    assert low.num_preemptions == 3
    assert low.output_ids == expected.output_ids, f"{low.output_ids}, not {expected.output_ids}"
    assert (low.num_worked_tokens == expected.num_worked_tokens) == swaps
    assert engine.scheduler.swapping.num_swapped == (3 if swaps else 0)
    return engine
