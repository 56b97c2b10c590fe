"""One worker's mutable record of a choice, from its arrival to its one end.

    WAITING ──admit──▶ RUNNING ──finish, hand over, abort, deadline──▶ ENDED
       │  ◀──preempt──    │
       └──abort, deadline, refusal──▶ ENDED

Work is never a phase: what is left is ``num_tokens - num_computed_tokens``. That is a whole
prompt for a newcomer, one token for a sequence that decodes or whose KV was imported, and prompt
plus output for one that was preempted or resumed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from cluster.handoff import IllegalTransition
from cluster.request import NO_PREFIX, LegKey, PromptPrefix, SamplingParams


class SequenceState(enum.Enum):
    """Where a sequence stands in its engine."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


LEGAL_MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.ENDED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.ENDED}),
    SequenceState.ENDED: frozenset(),
}


@dataclass(slots=True)
class StoredLayers:
    """How far the running step is with one sequence.

    The step thread alone writes it. Whoever holds the pool's lock may read it on any thread, for
    it is cleared before the sequence's blocks are given up.
    """

    so_far: tuple[int, int] = (0, 0)
    """(tokens, layers): of all tokens up to there, these first layers are in their blocks."""

    def clear(self) -> None:
        """The step is over: computed tokens say the rest."""
        self.so_far = (0, 0)


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A choice as this worker computes it; after ``add`` only the step thread touches it."""

    key: LegKey
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    deadline: float
    """Instant on this worker's clock."""
    arrived: float
    """Instant on this worker's clock, less what it had waited elsewhere; it ages from then on."""
    waited_s: float = 0.0
    """Seconds from then until it came to this engine."""
    output_ids: list[int] = field(default_factory=list)
    """Tokens drawn so far, also those that came with a leg or a handoff."""
    eos_ids: frozenset[int] = frozenset()
    """The model's end tokens; empty when the client ignores them."""
    tenant: str = ""
    """Whose it is: KV is found again by sequences of the same tenant only."""
    priority: str = ""
    """Name of its tier; empty: the default one."""
    expected_tokens: int | None = None
    """The client's guess at its output's length."""
    hands_over_at: int | None = None
    """Number of output tokens at which it leaves with its blocks still held under its key."""
    stored: StoredLayers | None = None
    """How far its running step is, where its KV is passed on meanwhile."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in its blocks: lowered before blocks are given up, raised after they were
    written, so that whoever holds the pool's lock may read it on any thread. An imported sequence
    starts with its prompt computed and blocks already held under its key."""
    num_swapped_tokens: int = 0
    """Tokens whose KV is in the swap buffer, or on its way there or back; 0 where none is."""
    state: SequenceState = SequenceState.WAITING
    block_ids: list[int] = field(default_factory=list)
    """The scheduler's copy of what the pool holds under ``key``: plans don't take its lock."""
    block_digests: list[bytes] = field(default_factory=list)
    """Names of its first full blocks, as far as the prefix index was asked for them."""
    prefix: PromptPrefix = NO_PREFIX
    """The control plane's names of its prompt's beginnings."""
    num_named: int = 0
    """How many of these the prefix index was told."""
    order: int = 0
    """Its number in the scheduler, for ties of ``arrived``."""
    tier: int = 0
    """How high its tier is, where tiers have a say here."""
    started_at: float | None = None
    """When its first share was planned; kept over preemptions."""
    num_steps: int = 0
    num_worked_tokens: int = 0
    """Tokens computed here, those computed again after a preemption included."""
    num_prefilled_tokens: int = 0
    """Prompt tokens computed here or elsewhere at least once; a preemption doesn't lower it."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in this worker's cache before it was computed or came."""
    num_scored_tokens: int = 0
    """Prompt tokens whose log-probabilities were told, or are another worker's to tell; computing
    them again after a preemption doesn't tell them again."""
    num_preemptions: int = 0
    """Here."""
    num_preemptions_before: int = 0
    """Of its choice on other workers, and in other attempts."""

    @property
    def entered(self) -> float:
        """Instant at which it came to this engine."""
        return self.arrived + self.waited_s

    @property
    def num_preemptions_in_all(self) -> int:
        """How often its choice was preempted on all its ways, which is bounded."""
        return self.num_preemptions_before + self.num_preemptions

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far."""
        return len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens_left(self) -> int:
        """Work: tokens to compute before the next one can be drawn; bringing KV back is none."""
        return self.num_tokens - max(self.num_computed_tokens, self.num_swapped_tokens)

    def prefilled_to(self, end: int) -> int:
        """Note that tokens up to ``end`` were computed; returns how many prompt tokens were for
        the first time, for each counts once, however often a preemption has it computed again."""
        num_prefilled = min(end, self.num_prompt_tokens)
        num_new = max(0, num_prefilled - self.num_prefilled_tokens)
        self.num_prefilled_tokens += num_new
        return num_new

    def advance(self, new: SequenceState) -> None:
        """Move to ``new``; raises IllegalTransition where the table has no such move."""
        if new not in LEGAL_MOVES[self.state]:
            raise IllegalTransition(f"{self.key}: {self.state} -> {new}")
        self.state = new

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens at positions ``start .. end``, over prompt and output alike."""
        # positions: 0 [ prompt_ids ) n [ output_ids ) num_tokens
        n = len(self.prompt_ids)
        if start >= n:
            return tuple(self.output_ids[start - n : end - n])
        if end <= n:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:] + tuple(self.output_ids[: end - n])
