"""The real model's tokens are the same behind a cached prefix as from cold, in fp32."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config import Dtype
from cluster.engine.runner import ModelRunner
from cluster.engine.scheduler import StepScheduler
from cluster.engine.sequence import Sequence
from cluster.kv.block_pool import BlockPool
from cluster.kv.cache import PagedCache
from cluster.model.loader import load_model
from cluster.request import LegKey, SamplingParams
from tests.factories import FAR, make_prefix_index
from tests.factories_model import write_tiny_llama
from tests.factories_runner import GREEDY, assert_matches, make_prompts

BLOCK = 16
NUM_TOKENS = 12
SEEDED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=42)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder, dtype=Dtype.FP32, device="cpu")


class RealEngine:
    """A scheduler and the model, stepped until everything has ended."""

    def __init__(self, loaded, *, has_prefix_cache: bool = True, num_blocks: int = 64) -> None:
        prefix = make_prefix_index(block_size=BLOCK) if has_prefix_cache else None
        self.pool = BlockPool(num_blocks, prefix)
        self.scheduler = StepScheduler(self.pool, BLOCK, 8, 256, 24, 512)
        self.runner = ModelRunner(
            loaded, PagedCache(loaded.layout(BLOCK), num_blocks, loaded.device)
        )
        self.num_added = 0

    def generate(self, *prompts, params: SamplingParams = GREEDY) -> list[Sequence]:
        sequences = [self._add(prompt, params) for prompt in prompts]
        while plan := self.scheduler.schedule(0.0):
            self.scheduler.commit(plan, self.runner.run(plan), 0.0)
        self.pool.check()
        assert self.pool.counts().held == 0
        return sequences

    def _add(self, prompt, params) -> Sequence:
        self.num_added += 1
        sequence = Sequence(
            key=LegKey(f"r{self.num_added}", 0, 0), prompt_ids=tuple(prompt), params=params,
            deadline=FAR, arrived=0.0,
        )  # fmt: skip
        self.scheduler.add(sequence)
        return sequence


@pytest.mark.parametrize("length", [BLOCK, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 130])
def test_a_hit_draws_what_a_miss_draws(loaded, reference, length):
    """P-17: ids = cold ids at block edges, three times, greedy."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    engine = RealEngine(loaded)
    [prompt] = make_prompts([length])
    for expected in (0, (length - 1) // BLOCK * BLOCK, (length - 1) // BLOCK * BLOCK):
        [sequence] = engine.generate(prompt, params=params)
        assert sequence.num_cached_tokens == expected
        assert_matches(reference, prompt, sequence.output_ids)


def test_a_seed_draws_the_same_behind_a_cached_prefix(loaded):
    """P-04: prefix-cache hit against cold, seeded."""
    [prompt] = make_prompts([70])
    engine, cold = RealEngine(loaded), RealEngine(loaded, has_prefix_cache=False)
    [expected] = cold.generate(prompt, params=SEEDED)
    outputs = [engine.generate(prompt, params=SEEDED)[0] for _ in range(2)]
    assert [sequence.num_cached_tokens for sequence in outputs] == [0, 64]
    assert [sequence.output_ids for sequence in outputs] == [expected.output_ids] * 2


def test_many_behind_one_prefix_at_a_time_go_on_each_its_own_way(loaded, reference):
    """P-14, P-17: shared blocks in one ragged batch, beside one that shares nothing."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    engine = RealEngine(loaded)
    base, *tails, stranger = make_prompts([100, 1, 5, 17, 40, 33], seed=3)
    engine.generate(base, params=params)
    prompts = [*([*base, *tail] for tail in tails), stranger]
    sequences = engine.generate(*prompts, params=params)
    assert [sequence.num_cached_tokens for sequence in sequences] == [96, 96, 96, 96, 0]
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert_matches(reference, prompt, sequence.output_ids)


def test_eviction_and_preemption_change_no_token(loaded, reference):
    """P-15: a pool for two, six that share beginnings, over and over."""
    params = SamplingParams(max_tokens=NUM_TOKENS + 20, temperature=0.0)
    engine = RealEngine(loaded, num_blocks=12)
    base = make_prompts([40], seed=5)[0]
    prompts = [[*base[: 8 + 8 * i], *tail] for i, tail in enumerate(make_prompts([20] * 4, seed=6))]
    for _ in range(2):
        for prompt, sequence in zip(prompts, engine.generate(*prompts, params=params), strict=True):
            assert_matches(reference, prompt, sequence.output_ids)
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.num_cached_tokens > 0
