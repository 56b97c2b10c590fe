"""What the next step computes: pure bookkeeping, no tensors, no clock, no logs.

One rule serves prefill, chunks, decode, recompute and resumed work: a sequence is owed
``num_tokens - num_computed_tokens``. ``schedule`` goes through these, in this order:

1. Sequences past their deadline end, wherever they are.
2. Running sequences get the blocks that their next token needs, oldest first. If the pool is
   short, the youngest sequence that holds blocks gives up all of them and is computed again
   later (recompute preemption); it goes to the front of the queue and keeps its output. Nobody
   takes from an older one: the youngest waits where it is until blocks become free.
3. Waiting sequences are admitted, first come first served, while there are slots, and blocks for
   all their tokens and for the growth of everybody's next token. One that does not fit now is
   passed by those behind it that do, but by none that arrived more than ``AGING_S`` after it,
   and by none at all once it was preempted, for its client waits in mid-stream. So it is
   overtaken by a bounded number. Sequences that bring their blocks (imported KV) need a slot
   only and are never held up by one that waits for blocks.
4. The step's tokens are shared out (``shares``): decodes first, then prompts, oldest first.

So some sequence always moves: the oldest one that runs can take blocks from all others, and
waits only for blocks held outside the engine (exports, imports under way), whose holders have
deadlines of their own. Age is the order of ``add``, which is the order of the queue: so nobody
who waits with imported KV is older than one that took a slot before it. Blocks that started
sequences wait for are set aside in the pool, so that new imports cannot take them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cluster.engine import finish
from cluster.engine.plan import Outcome, Plan, Scheduled, SequenceEnd, StepEvents
from cluster.engine.sequence import Sequence, SequenceState
from cluster.engine.shares import StepShares
from cluster.errors import DeadlineExceeded, PdserveError
from cluster.request import FinishReason, LegKey, Token

if TYPE_CHECKING:
    from cluster.kv.block_pool import BlockPool

AGING_S = 5.0
"""A sequence that waits for blocks is overtaken only by those that arrived within this time."""


class StepScheduler:
    """The queue and the running batch of one engine.

    Every sequence added ends exactly once, and but for a handover its blocks are free then.
    Methods are called from one thread at a time.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        token_budget: int,
        chunk_tokens: int,
        max_model_len: int,
    ) -> None:
        if token_budget < max_num_seqs:
            raise ValueError(f"token_budget {token_budget} < max_num_seqs {max_num_seqs}")
        self.pool = pool
        self.num_preemptions = 0
        self.num_generated_tokens = 0
        self.num_prefilled_tokens = 0
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._shares = StepShares(
            token_budget=token_budget, chunk_tokens=chunk_tokens, block_size=block_size
        )
        self._limits = finish.Limits(
            max_model_len=max_model_len, capacity_tokens=pool.num_blocks * block_size
        )
        self._num_added = 0
        self._live: dict[LegKey, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self._planned: dict[LegKey, Sequence] = {}
        self._num_set_aside = 0
        self._started: list[LegKey] = []
        self._tokens: list[Token] = []
        self._ends: list[SequenceEnd] = []

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts, waiting or begun, that are still to compute."""
        lefts = (sequence.num_tokens_left for sequence in self._live.values())
        return sum(left for left in lefts if left > 1)

    @property
    def next_deadline(self) -> float | None:
        """The earliest instant at which a sequence expires; None without sequences."""
        return min((sequence.deadline for sequence in self._live.values()), default=None)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that can never be computed ends at once.

        Raises ValueError where its key is in the engine already.
        """
        if sequence.key in self._live:
            raise ValueError(f"{sequence.key} is in the engine already")
        self._num_added += 1
        sequence.order = self._num_added
        sequence.block_ids = list(self.pool.blocks_of(sequence.key))
        sequence.num_prefilled_tokens = min(
            sequence.num_computed_tokens, sequence.num_prompt_tokens
        )
        self._live[sequence.key] = sequence
        self._waiting.append(sequence)
        error = self._limits.refusal(sequence) or finish.import_fault(sequence, self._block_size)
        reason = self._limits.finish_reason(sequence) if error is None else None
        if error is not None or reason is not None:
            self._end(sequence, sequence.arrived, reason=reason, error=error)
        elif sequence.num_tokens_left < 1:
            # A draw needs the logits of the last token: compute that one again.
            sequence.num_computed_tokens = sequence.num_tokens - 1

    def abort(self, key: LegKey, error: PdserveError, now: float) -> None:
        """End a sequence with ``error``; nothing happens where the key is not here any more.

        Between ``schedule`` and ``commit`` it may be called once the step has been computed: the
        token of the running step is dropped then.
        """
        sequence = self._live.get(key)
        if sequence is not None:
            self._end(sequence, now, error=error)

    def abort_all(
        self, error: PdserveError, now: float, *, unstarted: PdserveError | None = None
    ) -> None:
        """End every sequence with ``error``; with ``unstarted`` those that no step computed."""
        for sequence in list(self._live.values()):
            is_unstarted = sequence.started_at is None
            self._end(sequence, now, error=unstarted if unstarted and is_unstarted else error)
        self._set_aside()

    def schedule(self, now: float) -> Plan | None:
        """Choose the next step; None when nothing can be computed now."""
        for sequence in [s for s in self._live.values() if now >= s.deadline]:
            stage = finish.stage_of(sequence)
            error = DeadlineExceeded(f"deadline passed in {stage}", stage=stage)
            self._end(sequence, now, error=error)
        for sequence in list(self._running):
            if sequence.state is SequenceState.RUNNING:
                self._grow(sequence)
        self._admit()
        self._set_aside()
        ready = [sequence for sequence in self._running if self._blocks_short(sequence) <= 0]
        shares = self._shares.share_out(ready)
        if not shares:
            return None
        self._planned = {share.key: self._live[share.key] for share in shares}
        for sequence in self._planned.values():
            if sequence.started_at is None:
                sequence.started_at = now
                self._started.append(sequence.key)
        return Plan(shares)

    def commit(self, plan: Plan, outcome: Outcome, now: float) -> StepEvents:
        """Take in what the step computed and return all events since the last ones taken.

        Raises KeyError where the outcome lacks a token.
        """
        planned, self._planned = self._planned, {}
        for share in plan.shares:
            sequence = planned[share.key]
            if sequence.state is SequenceState.RUNNING:
                self._commit_share(sequence, share, outcome, now)
        return self.take_events()

    def take_events(self) -> StepEvents:
        """Return what happened since the last call of this or ``commit``."""
        events = StepEvents(
            started=tuple(self._started), tokens=tuple(self._tokens), ends=tuple(self._ends)
        )
        self._started, self._tokens, self._ends = [], [], []
        return events

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _blocks_short(self, sequence: Sequence) -> int:
        return self._blocks_for(sequence.num_tokens) - len(sequence.block_ids)

    def _next_growth(self, sequence: Sequence) -> int:
        """Blocks that its next token will need on top of those for its present ones."""
        num_next = min(sequence.num_tokens + 1, self._limits.max_kv_tokens(sequence))
        covered = max(len(sequence.block_ids), self._blocks_for(sequence.num_tokens))
        return max(0, self._blocks_for(num_next) - covered)

    def _grow(self, sequence: Sequence) -> None:
        num_short = self._blocks_short(sequence)
        if num_short <= 0:
            return
        block_ids = self.pool.allocate(num_short, sequence.key)
        while block_ids is None:
            holders = (other for other in self._live.values() if other.block_ids)
            youngest = max(holders, key=lambda other: other.order, default=sequence)
            if youngest.order <= sequence.order:
                return
            self._preempt(youngest)
            block_ids = self.pool.take_over(youngest.key, num_short, sequence.key)
        sequence.block_ids.extend(block_ids)

    def _preempt(self, sequence: Sequence) -> None:
        """Send it back to the queue without KV; the caller frees its blocks."""
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            sequence.advance(SequenceState.WAITING)
            self._waiting.appendleft(sequence)
        sequence.block_ids = []
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _admit(self) -> None:
        blocked: Sequence | None = None
        num_growing = sum(
            self._next_growth(sequence) + max(0, self._blocks_short(sequence))
            for sequence in self._running
        )
        for sequence in list(self._waiting):
            if len(self._running) >= self._max_num_seqs:
                break
            brings_blocks = bool(sequence.block_ids)
            if not (brings_blocks or blocked is None or _may_pass(sequence, blocked)):
                continue
            growth = self._next_growth(sequence)
            has_blocks = self._cover(sequence, 0 if brings_blocks else num_growing + growth)
            if not (brings_blocks or has_blocks):
                blocked = blocked or sequence
                continue
            num_growing += growth
            self._waiting.remove(sequence)
            sequence.advance(SequenceState.RUNNING)
            self._running.append(sequence)
        self._running.sort(key=lambda sequence: sequence.order)

    def _cover(self, sequence: Sequence, num_spare: int) -> bool:
        """Give it blocks for all its tokens, if ``num_spare`` are left free after that."""
        num_short = self._blocks_short(sequence)
        if num_short <= 0:
            return True
        if self.pool.num_free < num_short + num_spare:
            return False
        block_ids = self.pool.allocate(num_short, sequence.key)
        sequence.block_ids.extend(block_ids or ())
        return block_ids is not None

    def _set_aside(self) -> None:
        num_blocks = sum(max(0, self._blocks_short(sequence)) for sequence in self._running)
        for sequence in self._waiting:
            if sequence.num_preemptions:
                num_blocks += self._blocks_short(sequence) + self._next_growth(sequence)
                break
        if num_blocks != self._num_set_aside:
            self._num_set_aside = num_blocks
            self.pool.set_aside(num_blocks)

    def _commit_share(
        self, sequence: Sequence, share: Scheduled, outcome: Outcome, now: float
    ) -> None:
        end = share.start + len(share.token_ids)
        sequence.num_computed_tokens = end
        sequence.num_steps += 1
        sequence.num_worked_tokens += len(share.token_ids)
        # Prompt tokens count as prefilled once, however often they are computed again.
        num_prefilled = min(end, sequence.num_prompt_tokens)
        if num_prefilled > sequence.num_prefilled_tokens:
            self.num_prefilled_tokens += num_prefilled - sequence.num_prefilled_tokens
            sequence.num_prefilled_tokens = num_prefilled
        if not share.is_sampled:
            return
        token_id = outcome.sampled[share.key]
        sequence.output_ids.append(token_id)
        self.num_generated_tokens += 1
        self._tokens.append(Token(share.key, share.output_index, token_id))
        reason = self._limits.finish_reason(sequence)
        is_leaving = (
            sequence.hands_over_at is not None
            and sequence.num_output_tokens >= sequence.hands_over_at
        )
        if reason is not None or is_leaving:
            self._end(sequence, now, reason=reason)

    def _end(
        self,
        sequence: Sequence,
        now: float,
        *,
        reason: FinishReason | None = None,
        error: PdserveError | None = None,
    ) -> None:
        """End it; with neither reason nor error its blocks stay held under its key."""
        (self._running if sequence.state is SequenceState.RUNNING else self._waiting).remove(
            sequence
        )
        sequence.advance(SequenceState.ENDED)
        del self._live[sequence.key]
        if reason is not None or error is not None:
            self.pool.release(sequence.key)
        sequence.block_ids = []
        started_at = sequence.started_at
        self._ends.append(
            SequenceEnd(
                key=sequence.key,
                finish_reason=reason,
                error=error,
                queue_s=max(0.0, (now if started_at is None else started_at) - sequence.arrived),
                compute_s=0.0 if started_at is None else now - started_at,
                num_steps=sequence.num_steps,
                num_computed_tokens=sequence.num_worked_tokens,
                num_preemptions=sequence.num_preemptions,
            )
        )


def _may_pass(sequence: Sequence, blocked: Sequence) -> bool:
    """Whether a sequence may take blocks though one before it waits for some."""
    return not blocked.num_preemptions and sequence.arrived <= blocked.arrived + AGING_S
