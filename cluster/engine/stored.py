"""KV that a running step has stored, so that it can leave before the step is over.

A step goes through the layers one after the other, and what it has stored of the first ones stays
as it is. Whoever passes a sequence's KV on gives it ``StoredLayers``, reads there how far its
running step is, and hears of it by ``StepEvents.stored``. For other sequences nothing is done.

Parts by layers, not smaller chunks: computing 512 tokens of the trial model on one core takes 8 %
longer in four chunks than in one, for each chunk reads all weights from memory again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster.engine.plan import Outcome, Plan, Scheduled, StepEvents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.engine.loop import Runner
    from cluster.kv.layout import KVLayout

OnStored = Callable[[tuple[Scheduled, ...], int], None]
"""(shares, number of layers of them that are in their blocks)."""

PART_BYTES = 8 << 20
"""Told of at a time, at least: each message more costs the step beside it a millisecond or two."""
_MIN_BYTES = 1 << 20
"""Less than this is not worth a message of its own."""
_REST = 16
"""One layer in so many, and one at least, is the last part of a step that draws a token."""


def run(runner: Runner, plan: Plan, on_events: Callable[[StepEvents], None]) -> Outcome:
    """Have a step computed, and tell meanwhile of layers that it has stored."""
    if all(share.stored is None for share in plan.shares):
        return runner.run(plan)

    def tell(shares: tuple[Scheduled, ...], num_layers: int) -> None:
        for share in shares:
            assert share.stored is not None, "only such are told of"
            share.stored.so_far = (share.start + len(share.token_ids), num_layers)
        on_events(StepEvents(stored=tuple(share.key for share in shares)))

    return runner.run(plan, tell)


def shares_by_layers(plan: Plan, layout: KVLayout) -> Mapping[int, tuple[Scheduled, ...]]:
    """Return what is to be told after how many layers: the shares with a part worth sending."""
    shares: dict[int, list[Scheduled]] = defaultdict(list)
    for share in plan.shares:
        if share.stored is not None:
            for num_layers in _told_at(share, layout):
                shares[num_layers].append(share)
    return {num_layers: tuple(of_part) for num_layers, of_part in shares.items()}


def _told_at(share: Scheduled, layout: KVLayout) -> set[int]:
    """Return the numbers of layers that end a part.

    Where a token is drawn, which its client waits for, nothing shall be left to send when that is
    done, and the last part is small: there is little time for it::

        layers  0 [ part ) [ part ) [ part ) num_layers - rest [ rest ) num_layers

    Otherwise what is stored last goes when the step is over.
    """
    num_bytes = len(share.token_ids) * layout.token_bytes
    if num_bytes < _MIN_BYTES:
        return set()
    num_parts = max(1, num_bytes // PART_BYTES)
    end = layout.num_layers
    if not share.is_sampled:
        return {end * part // num_parts for part in range(1, num_parts)} - {0}
    end -= max(1, end // _REST)
    return {end * part // num_parts for part in range(1, num_parts + 1)} - {0} | {layout.num_layers}
