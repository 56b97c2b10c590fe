"""Who gives up its blocks, and perhaps its slot, when another may take them.

Sequences that wait with imported KV give way before those that run, low tiers before high ones,
and in a tier the youngest first. One that has been preempted ``max_preemptions`` times holds all
the blocks it may ever need when it runs again, and is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.engine.line import seniority
from cluster.engine.sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """Chooses among the live sequences of an engine."""

    max_preemptions: int

    def junior_to(self, sequence: Sequence, live: Iterable[Sequence]) -> Sequence | None:
        """Return who gives its blocks to ``sequence``, which runs and must grow; None: nobody."""
        junior = max(self._holders(sequence, live), key=_giving, default=None)
        return None if junior is None or _giving(junior) <= _giving(sequence) else junior

    def below(
        self, sequence: Sequence, live: Iterable[Sequence], *, num_blocks: int, needs_slot: bool
    ) -> list[Sequence]:
        """Return whose blocks, and at least one slot if it ``needs_slot``, make room for a
        ``sequence`` of a higher tier; nobody where all of theirs would not be enough."""
        lower = [other for other in self._holders(sequence, live) if other.tier < sequence.tier]
        lower.sort(key=lambda other: (other.tier, -other.order))
        chosen = []
        if needs_slot:
            runs = (other for other in lower if other.state is SequenceState.RUNNING)
            first = next(runs, None)
            if first is None:
                return []
            chosen.append(first)
            lower.remove(first)
        num_short = num_blocks - sum(len(other.block_ids) for other in chosen)
        for other in lower:
            if num_short <= 0:
                break
            chosen.append(other)
            num_short -= len(other.block_ids)
        return chosen if num_short <= 0 else []

    def _holders(self, sequence: Sequence, live: Iterable[Sequence]) -> list[Sequence]:
        return [
            other
            for other in live
            if other is not sequence
            and other.block_ids
            and other.num_preemptions < self.max_preemptions
        ]


def _giving(sequence: Sequence) -> tuple[bool, tuple[int, int]]:
    return (sequence.state is SequenceState.WAITING, seniority(sequence))
