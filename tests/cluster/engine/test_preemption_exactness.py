"""A request that higher tiers have preempted draws what it draws undisturbed, in fp32."""

import pytest

from cluster.config import Dtype, Policy
from cluster.engine.plan import Outcome
from cluster.engine.rules import Rules
from cluster.engine.runner import ModelRunner
from cluster.engine.scheduler import StepScheduler
from cluster.engine.sequence import Sequence
from cluster.kv.block_pool import BlockPool
from cluster.kv.cache import PagedCache
from cluster.kv.swap_buffer import SwapBuffer
from cluster.kv.swap_memory import SwapMemory
from cluster.model.loader import load_model
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from cluster.request import LegKey, SamplingParams
from tests.factories import FAR
from tests.factories_model import write_tiny_llama
from tests.factories_runner import make_prompts

BLOCK = 16
NUM_TOKENS = 40
TIERS = Tiers(names=("low", "high"), default="low")
RULES = Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=2), tiers=TIERS)
PARAMS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    "seeded": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=7),
    "penalties": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.8, seed=11, presence_penalty=0.5,
        frequency_penalty=0.5, repetition_penalty=1.2,
    ),
    "minimum": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, seed=3, min_tokens=20, stop_token_ids=(5, 9, 40)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = write_tiny_llama(tmp_path_factory.mktemp("llama"))
    return load_model(folder, dtype=Dtype.FP32, device="cpu")


class RealEngine:
    def __init__(self, loaded, *, num_slots, swaps=False):
        num_blocks = 64
        self.pool = BlockPool(num_blocks, swap=SwapBuffer(num_blocks) if swaps else None)
        self.scheduler = StepScheduler(self.pool, BLOCK, num_slots, 256, 16, 512, RULES)
        cache = PagedCache(loaded.layout(BLOCK), num_blocks, loaded.device)
        self.runner = ModelRunner(loaded, cache)
        self.memory = SwapMemory(cache, num_blocks)
        self.now = 0.0

    def add(self, name, prompt, params, priority=""):
        sequence = Sequence(
            key=LegKey(name, 0, 0), prompt_ids=tuple(prompt), params=params, deadline=FAR,
            arrived=self.now, priority=priority,
        )  # fmt: skip
        self.scheduler.add(sequence)
        return sequence

    def step(self):
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

    def run(self):
        while self.step():
            pass
        self.pool.check()
        assert self.pool.counts().held == 0


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("kind", PARAMS)
def test_preempted_is_undisturbed(loaded, kind, swaps):
    """P-15: in mid-prompt once, in mid-output twice; each time computed again in chunks, or
    swapped, and then no token is computed twice."""
    params = PARAMS[kind]
    prompt, *others = make_prompts([50, 20, 33, 17], seed=4)
    calm = RealEngine(loaded, num_slots=1)
    expected = calm.add("r", prompt, params)
    calm.run()
    assert not expected.num_preemptions

    engine = RealEngine(loaded, num_slots=1, swaps=swaps)
    low = engine.add("r", prompt, params)
    urgent = SamplingParams(max_tokens=3, temperature=0.0)
    for number, (other, wait) in enumerate(zip(others, (2, 18, 9), strict=True)):
        for _ in range(wait):
            engine.step()
        high = engine.add(f"h{number}", other, urgent, priority="high")
        while high.num_output_tokens < urgent.max_tokens:
            engine.step()
    engine.run()
    assert low.num_preemptions == 3
    assert low.output_ids == expected.output_ids
    assert (low.num_worked_tokens == expected.num_worked_tokens) == swaps
    assert engine.scheduler.swapping.num_swapped == (3 if swaps else 0)
