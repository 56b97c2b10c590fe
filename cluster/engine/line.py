"""The sequences that wait for a slot, in the order of the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config import Policy
from cluster.engine.sequence import Sequence, SequenceState
from cluster.policy.order import Ahead, Ordering, Ticket
from cluster.policy.queue import PolicyQueue
from cluster.policy.work import OutputEstimates

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from cluster.policy.walk import Walk
    from cluster.request import FinishReason


class WaitingLine:
    """A ``PolicyQueue`` of sequences; those that were preempted go first in their tier."""

    def __init__(self, ordering: Ordering) -> None:
        self._queue: PolicyQueue[Sequence] = PolicyQueue(ordering)
        self._outputs = OutputEstimates()
        self._preempted: dict[Hashable, Sequence] = {}

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._queue)

    def walk(self, now: float) -> Walk[Sequence]:
        """Begin a walk in order; only what it returned last may be taken out meanwhile."""
        return self._queue.walk(now)

    def add(self, sequence: Sequence, num_cached_tokens: int = 0) -> None:
        """Let it wait; cached tokens are no work."""
        params = sequence.params
        expected = self._outputs.expected(
            sequence.tenant, max_tokens=params.max_tokens, hint=sequence.expected_tokens
        )
        if sequence.hands_over_at is not None:
            expected = min(expected, float(sequence.hands_over_at))
        num_left = max(0.0, expected - sequence.num_output_tokens)
        if sequence.num_preemptions:
            self._preempted[sequence.key] = sequence
        ticket = Ticket(
            arrived=sequence.arrived,
            order=sequence.order,
            tier=sequence.tier,
            tenant=sequence.tenant,
            work=sequence.num_tokens_left - num_cached_tokens + num_left,
            ahead=Ahead.IN_TIER if sequence.num_preemptions else Ahead.NO,
        )
        self._queue.add(sequence.key, sequence, ticket)

    def remove(self, sequence: Sequence) -> None:
        """Take it out."""
        self._queue.remove(sequence.key)
        self._preempted.pop(sequence.key, None)

    def passable_until(self, sequence: Sequence) -> float:
        """Return up to which arrival others may take what it waits for, while it has no room."""
        return self._queue.ordering.passable_until(self._queue.ticket(sequence.key))

    def first_preempted(self) -> Sequence | None:
        """Return the most senior of those that had started, and wait for blocks again."""
        return min(self._preempted.values(), key=seniority, default=None)

    def served(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens as its tenant's."""
        if self._queue.ordering.is_fair:
            self._queue.tenants(sequence.tier).charge(sequence.tenant, num_tokens)

    def ended(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Learn how long the outputs of its tenant are, from those that end well.

        Of one that is given up, take back what was counted of its prompt and not computed.
        """
        if reason is not None:
            self._outputs.note(sequence.tenant, sequence.num_output_tokens)
        elif sequence.num_preemptions or sequence.state is SequenceState.RUNNING:
            self.served(sequence, sequence.num_prefilled_tokens - sequence.num_prompt_tokens)


def seniority(sequence: Sequence) -> tuple[int, float, int]:
    """Return whose turn it is among those that started: the lowest first.

    Higher tiers go first, in a tier whoever came first.
    """
    return (-sequence.tier, sequence.arrived, sequence.order)


def in_turn(running: Iterable[Sequence], ordering: Ordering, now: float) -> list[Sequence]:
    """Return in which order those that run get tokens of a step for their prompts.

    They are given most senior first. Whoever has aged goes before all who have not, so that no run
    of higher tiers or shorter prompts keeps it from its chunks. By work, the one with the least
    left goes first of the others: a long prompt holds short ones up for a chunk, not for all of it.
    """
    if ordering.policy is Policy.FCFS:
        return list(running)

    def turn(sequence: Sequence) -> tuple[int, float]:
        if ordering.has_aged(sequence.arrived, now):
            return 0, sequence.arrived
        return 1, sequence.num_tokens_left if ordering.policy is Policy.SJF else -sequence.tier

    return sorted(running, key=turn)
