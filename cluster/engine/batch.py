"""Turn a plan into the flat batch that a model runs: ids, positions, and where KV lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cluster.engine.plan import Plan, Scheduled
from cluster.model.attention import DecodeGroup, PagedStep, PromptShare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.kv.cache import PagedCache

_MAX_PADDING_BLOCKS = 32
"""Padding that a group of decodes may carry; about what the kernels of one more group cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step's input; ``sampled`` names the share of each row of ``rows_s``."""

    input_ids_n: Tensor
    positions_n: Tensor
    rows_s: Tensor
    """Rows whose logits are wanted."""
    sampled: tuple[Scheduled, ...]
    scored: tuple[tuple[Scheduled, int], ...]
    """Shares whose prompt's own log-probabilities are asked for, with their first rows."""
    attention: PagedStep
    opened_blocks: tuple[int, ...]
    """Blocks that this step starts and does not fill."""


def build_batch(plan: Plan, cache: PagedCache) -> StepBatch:
    """Lay a plan's shares out in one row: decodes by falling length, then the longer shares."""
    decodes = [share for share in plan.shares if len(share.token_ids) == 1]
    decodes.sort(key=lambda share: share.start, reverse=True)
    prompts = [share for share in plan.shares if len(share.token_ids) > 1]
    shares = [*decodes, *prompts]
    token_ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    scored: list[tuple[Scheduled, int]] = []
    for share in shares:
        if share.needs is not None and share.needs.scored_ids:
            scored.append((share, len(token_ids)))
        token_ids.extend(share.token_ids)
        positions.extend(range(share.start, share.start + len(share.token_ids)))
        if share.is_sampled:
            rows.append(len(token_ids) - 1)
    block_size = cache.layout.block_size
    positions_n = torch.tensor(positions)
    return StepBatch(
        input_ids_n=torch.tensor(token_ids, device=cache.device),
        positions_n=positions_n.to(cache.device),
        rows_s=torch.tensor(rows, dtype=torch.long, device=cache.device),
        sampled=tuple(share for share in shares if share.is_sampled),
        scored=tuple(scored),
        attention=PagedStep(
            cache=cache,
            slots=cache.slot_index(_blocks_of(shares, block_size), positions_n % block_size),
            decodes=tuple(_group_decodes(decodes, cache)),
            prompts=tuple(_prompt_shares(prompts, len(decodes), cache)),
        ),
        opened_blocks=tuple(
            block for share in shares if (block := _opened_block(share, block_size)) is not None
        ),
    )


def _blocks_of(shares: Sequence[Scheduled], block_size: int) -> Tensor:
    """Return the block id of every token of the flat batch."""
    block_ids: list[int] = []
    for share in shares:
        end = share.start + len(share.token_ids)
        block_ids.extend(
            share.block_ids[position // block_size] for position in range(share.start, end)
        )
    return torch.tensor(block_ids)


def _opened_block(share: Scheduled, block_size: int) -> int | None:
    end = share.start + len(share.token_ids)
    begin_of_last = end // block_size * block_size
    is_opened = share.start <= begin_of_last < end
    return share.block_ids[begin_of_last // block_size] if is_opened else None


def _group_decodes(decodes: Sequence[Scheduled], cache: PagedCache) -> list[DecodeGroup]:
    """Cut decodes, longest first, into groups that carry little padding."""
    groups: list[DecodeGroup] = []
    first, padding = 0, 0
    num_blocks = [cache.layout.num_blocks_for(share.start + 1) for share in decodes]
    for index in range(len(decodes)):
        padding += num_blocks[first] - num_blocks[index]
        if padding > _MAX_PADDING_BLOCKS:
            groups.append(_group(decodes, first, index, cache))
            first, padding = index, 0
    if decodes:
        groups.append(_group(decodes, first, len(decodes), cache))
    return groups


def _group(decodes: Sequence[Scheduled], first: int, end: int, cache: PagedCache) -> DecodeGroup:
    width = cache.layout.num_blocks_for(decodes[first].start + 1)
    tables: list[list[int]] = []
    for share in decodes[first:end]:
        table = list(share.block_ids[: cache.layout.num_blocks_for(share.start + 1)])
        # Padding repeats the sequence's own first block: nobody else's values, even masked.
        tables.append(table + table[:1] * (width - len(table)))
    return DecodeGroup(
        first=first,
        rows=cache.row_index(torch.tensor(tables)),
        lengths_b=torch.tensor([s.start + 1 for s in decodes[first:end]], device=cache.device),
        num_padded=width * cache.layout.block_size,
    )


def _prompt_shares(
    prompts: Sequence[Scheduled], first: int, cache: PagedCache
) -> list[PromptShare]:
    shares: list[PromptShare] = []
    for share in prompts:
        length = len(share.token_ids)
        table = share.block_ids[: cache.layout.num_blocks_for(share.start + length)]
        rows = cache.row_index(torch.tensor([table])) if share.start else None
        shares.append(PromptShare(first=first, length=length, start=share.start, rows=rows))
        first += length
    return shares
