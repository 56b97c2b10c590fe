"""A runner driven by hand-made plans, and transformers' own answer to compare with."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from cluster.config import Dtype
from cluster.engine.plan import Plan, Scheduled
from cluster.engine.runner import ModelRunner
from cluster.kv.cache import PagedCache
from cluster.request import LegKey, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from cluster.model.loader import LoadedModel

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
NEAR_TIE = 1e-4


@dataclass
class Line:
    """One sequence as the driver sees it."""

    key: LegKey
    prompt_ids: list[int]
    block_ids: list[int]
    params: SamplingParams = GREEDY
    num_computed: int = 0
    output_ids: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids


class Driver:
    """Makes plans without a scheduler: every line each step, prompts in chunks."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 128,
        block_size: int = 16,
        kv_dtype: Dtype = Dtype.AUTO,
    ) -> None:
        self.cache = PagedCache(loaded.layout(block_size, kv_dtype), num_blocks, loaded.device)
        self.runner = ModelRunner(loaded, self.cache)
        self.lines: list[Line] = []
        self._free = list(range(num_blocks))
        # Neighbours in a sequence must not be neighbours in the pool.
        random.Random(7).shuffle(self._free)

    def add(self, prompt_ids: Sequence[int], params: SamplingParams = GREEDY) -> Line:
        line = Line(LegKey("r", 0, len(self.lines)), list(prompt_ids), [], params)
        self.lines.append(line)
        return line

    def step(self, lines: Sequence[Line] | None = None, *, chunk: int = 0) -> None:
        moved = list(self.lines if lines is None else lines)
        plan = self.plan(moved, chunk=chunk)
        outcome = self.runner.run(plan)
        for line, share in zip(moved, plan_order(plan, moved), strict=True):
            line.num_computed += len(share.token_ids)
            if share.is_sampled:
                line.output_ids.append(outcome.sampled[line.key])
        assert set(outcome.sampled) == {share.key for share in plan.shares if share.is_sampled}

    def plan(self, lines: Sequence[Line], *, chunk: int = 0) -> Plan:
        shares = [self._share(line, chunk) for line in lines]
        shares.sort(key=lambda share: len(share.token_ids) > 1)
        return Plan(tuple(shares))

    def run(self, num_outputs: int, *, chunk: int = 0) -> list[list[int]]:
        """Step all lines until each has ``num_outputs`` tokens."""
        while waiting := [line for line in self.lines if len(line.output_ids) < num_outputs]:
            self.step(waiting, chunk=chunk)
        return [line.output_ids for line in self.lines]

    def grow(self, line: Line, num_tokens: int) -> None:
        while len(line.block_ids) * self.cache.layout.block_size < num_tokens:
            line.block_ids.append(self._free.pop())

    def _share(self, line: Line, chunk: int) -> Scheduled:
        start = line.num_computed
        ids = line.token_ids[start : start + chunk if chunk else None]
        end = start + len(ids)
        self.grow(line, end)
        return Scheduled(
            key=line.key, token_ids=tuple(ids), start=start, block_ids=tuple(line.block_ids),
            is_sampled=end == len(line.token_ids), output_index=len(line.output_ids),
            params=line.params,
        )  # fmt: skip


def plan_order(plan: Plan, lines: Sequence[Line]) -> list[Scheduled]:
    """Return the plan's shares in the order of ``lines``."""
    by_key = {share.key: share for share in plan.shares}
    return [by_key[line.key] for line in lines]


def make_prompts(
    lengths: Sequence[int], *, vocab_size: int = 512, seed: int = 0
) -> list[list[int]]:
    """Return random prompts of the given lengths, without the lowest (special) ids."""
    dice = random.Random(seed)
    return [[dice.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def assert_matches(
    reference: PreTrainedModel, prompt_ids: list[int], output_ids: list[int]
) -> None:
    """Compare with transformers' greedy generate, up to its first near-tie (rule N)."""
    ids = torch.tensor([prompt_ids])
    generated = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(output_ids),
        min_new_tokens=len(output_ids), do_sample=False, eos_token_id=-1, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    expected = generated.sequences[0, len(prompt_ids) :].tolist()
    for index, (ours, theirs) in enumerate(zip(output_ids, expected, strict=True)):
        if ours != theirs:
            best = generated.logits[index][0].log_softmax(-1).topk(2).values
            gap = float(best[0] - best[1])
            assert gap < NEAR_TIE, f"index {index}: {ours}, not {theirs}; gap {gap:.3g}"
            return
