"""What the next step computes: pure bookkeeping, no tensors, no clock, no logs.

One rule serves prefill, chunks, decode, recompute and resumed work: a sequence is owed
``num_tokens - num_computed_tokens``. ``schedule`` goes through these, in this order:

1. Sequences past their deadline end, wherever they are.
2. Running sequences get the blocks that their next token needs, the most senior first: higher
   tiers, and in a tier the oldest. If the pool is short, the most junior that holds blocks (those
   who have aged after all others) gives up all of them and is computed again later, or its KV waits
   in the swap buffer (``swapping``); it goes to the front of its tier's queue and keeps its output.
   Nobody takes from a more senior one that runs, nor imported KV of a higher tier unless that finds
   no slot in 3: the most junior waits where it is until blocks become free.
3. Waiting sequences are admitted in the policy's order while the batch takes new members
   (``policy.batching``), and there are blocks for all their tokens and for the growth of
   everybody's next token. One that does not fit now is passed by those behind it that do, but by
   none that arrived more than ``aging_s`` after it, and by none at all once it was preempted, for
   its client waits in mid-stream. Sequences that bring their blocks (imported KV) need a slot
   only and are never held up by one that waits for blocks. A sequence that finds no slot or no
   blocks takes them from lower tiers that haven't aged (``victims``), the youngest first, also
   outside the engine. So does an import that waits for blocks (``BlockPool.ask``), before all
   this; they leave them to it.
4. Where KV is to be swapped, the copies are a plan of their own, and all begins anew after it.
5. The step's tokens are shared out (``shares``): decodes first, then prompts: those that have aged,
   then the most senior, or by work the one with the least left. So the prompt of a higher tier goes
   before a lower one's at the next chunk, but not for ever. Of long prompts a chunk of one is in a
   step, and short ones are ended beside.

So some sequence always moves: the most senior one that runs can take blocks from all others but
those preempted so often that they hold all they will ever need; and it waits only for these, which
move themselves or give way, and for blocks held outside the engine by holders with deadlines.
Blocks that started sequences wait for are set aside, so that new imports cannot take them. Without
preemption every sequence starts with blocks for all that may come, so nobody waits for more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config import Policy
from cluster.engine import finish
from cluster.engine.line import WaitingLine, in_turn, seniority
from cluster.engine.plan import Outcome, Plan, Scheduled, StepEvents, StepNews
from cluster.engine.prefix_reuse import PrefixReuse
from cluster.engine.room import Room
from cluster.engine.rules import Rules
from cluster.engine.sequence import Sequence, SequenceState
from cluster.engine.shares import StepShares
from cluster.engine.swapping import Swapping
from cluster.engine.victims import Holdings, Victims
from cluster.request import FinishReason, LegKey, Preempted, Token

if TYPE_CHECKING:
    from cluster.engine.victims import Giver
    from cluster.errors import PdserveError
    from cluster.kv.block_pool import BlockPool
    from cluster.kv.outside import Demand

_NO_BOUND = float("inf")


class StepScheduler:
    """The queue and the running batch of one engine.

    Every sequence added ends exactly once, and but for a handover its blocks are free then.
    Methods are called from one thread at a time.
    """

    def __init__(  # noqa: PLR0913 (the worker's sizes)
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        token_budget: int,
        chunk_tokens: int,
        max_model_len: int,
        rules: Rules | None = None,
    ) -> None:
        """``rules``: how it orders, batches and preempts; the usual ones where it is None."""
        if token_budget < max_num_seqs:
            raise ValueError(f"token_budget {token_budget} < max_num_seqs {max_num_seqs}")
        self.pool = pool
        self.num_preemptions = 0
        self.num_generated_tokens = 0
        self.num_prefilled_tokens = 0
        self._rules = rules or Rules()
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._shares = StepShares(
            token_budget=token_budget,
            chunk_tokens=chunk_tokens,
            block_size=block_size,
            yields=self._rules.ordering.policy is Policy.FCFS,
        )
        self._limits = finish.Limits(
            max_model_len=max_model_len, capacity_tokens=pool.num_blocks * block_size
        )
        self._prefix = PrefixReuse(pool)
        self._swapping = Swapping(pool, self._prefix, block_size)
        self._room = Room(pool, self._prefix, block_size, self._limits, self._rules)
        self._gate = self._rules.gate(max_num_seqs)
        self._victims = Victims.of(pool, self._rules)
        self._num_added = 0
        self._live: dict[LegKey, Sequence] = {}
        self._waiting = WaitingLine(self._rules.ordering)
        self._running: list[Sequence] = []  # most senior first
        self._planned: dict[LegKey, Sequence] = {}
        self._news = StepNews()

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the cache."""
        return self._room.num_cached_tokens

    @property
    def swapping(self) -> Swapping:
        """What was swapped, for those who count it."""
        return self._swapping

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts, waiting or begun, that are still to compute."""
        lefts = (sequence.num_tokens_left for sequence in self._live.values())
        return sum(left for left in lefts if left > 1)

    def next_instant(self, now: float) -> float | None:
        """Return the earliest instant at which time alone changes something; None without
        sequences."""
        instants = [sequence.deadline for sequence in self._live.values()]
        instants += self._room.promises_end(self._live.values(), now)
        if self._gate.opens_at is not None:
            instants.append(self._gate.opens_at)
        return min(instants, default=None)

    def holdings(self, now: float) -> Holdings:
        """Return who would give way to higher tiers now."""
        return self._victims.holdings(self._live.values(), now)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that can never be computed ends at once.

        Raises ValueError where its key is in the engine already.
        """
        if sequence.key in self._live:
            raise ValueError(f"{sequence.key} is in the engine already")
        self._num_added += 1
        sequence.order = self._num_added
        sequence.tier = self._rules.tier(sequence.priority)
        sequence.block_ids = list(self.pool.blocks_of(sequence.key))
        sequence.num_prefilled_tokens = min(
            sequence.num_computed_tokens, sequence.num_prompt_tokens
        )
        sequence.num_scored_tokens = sequence.num_prefilled_tokens
        self._live[sequence.key] = sequence
        # Only the order by work asks what is cached: finding that out takes time.
        is_by_work = self._rules.ordering.policy is Policy.SJF
        num_known = self._prefix.num_known_tokens(sequence) if is_by_work else 0
        self._waiting.add(sequence, num_known)
        error = self._limits.refusal(sequence) or finish.import_fault(sequence, self._block_size)
        reason = self._limits.finish_reason(sequence) if error is None else None
        if error is not None or reason is not None:
            self._end(sequence, sequence.entered, reason=reason, error=error)
        elif sequence.num_tokens_left < 1:
            # A draw needs the logits of the last token: compute that one again.
            sequence.num_computed_tokens = sequence.num_tokens - 1
        if sequence.state is SequenceState.WAITING and sequence.block_ids:
            self._prefix.register(sequence)

    def abort(self, key: LegKey, error: PdserveError, now: float) -> None:
        """End a sequence with ``error``; nothing happens where the key is not here any more.

        Between ``schedule`` and ``commit`` it may be called once the step has been computed: the
        token of the running step is dropped then.
        """
        sequence = self._live.get(key)
        if sequence is not None:
            self._end(sequence, now, error=error)

    def abort_all(
        self, error: PdserveError, now: float, *, others: PdserveError | None = None
    ) -> None:
        """End every sequence with ``error``; with ``others`` those that are not in the step.

        Between two steps nobody knows, and all that any step has computed count as in it.
        """
        planned, self._planned = self._planned, {}
        for sequence in list(self._live.values()):
            is_in_it = sequence.key in planned if planned else sequence.started_at is not None
            self._end(sequence, now, error=error if is_in_it or others is None else others)
        self._room.set_aside((), self._waiting.first_preempted(), now)

    def schedule(self, now: float) -> Plan | None:
        """Choose the next step; None when nothing can be computed now."""
        for sequence in [s for s in self._live.values() if now >= s.deadline]:
            self._end(sequence, now, error=finish.deadline_error(sequence))
        short = self._room.short_for_import(self._running, self._waiting.first_preempted(), now)
        if short is not None:
            self._preempt_below(short, now, needs_slot=False)
        self._grow_all(self._victims.junior_to, now)
        if not self._swapping.is_leaving:
            self._admit(now)
            self._grow_all(self._victims.without_slot, now)
            if not (self._room.ready(self._running) or self._victims.outsiders.are_coming):
                self._grow_all(self._victims.last_without_slot, now)
        self._room.set_aside(self._running, self._waiting.first_preempted(), now)
        self._victims.outsiders.ask()
        swaps = self._swapping.take()
        if swaps is not None:
            return Plan((), swaps)
        ready = self._room.ready(self._running)
        shares = self._shares.share_out(in_turn(ready, self._rules.ordering, now))
        if not shares:
            return None
        self._planned = {share.key: self._live[share.key] for share in shares}
        for sequence in self._planned.values():
            if sequence.started_at is None:
                sequence.started_at = now
                self._news.started.append(sequence.key)
        return Plan(shares)

    def commit(self, plan: Plan, outcome: Outcome, now: float) -> StepEvents:
        """Take in what the step computed and return all events since the last ones taken.

        Raises KeyError where the outcome lacks a token.
        """
        if plan.swaps is not None:
            self._swapping.settle(plan.swaps)
        for share in plan.shares:
            if (sequence := self._planned[share.key]).state is SequenceState.RUNNING:
                self._commit_share(sequence, share, outcome, now)
        self._planned = {}
        return self.take_events()

    def take_events(self) -> StepEvents:
        """Return what happened since the last call of this or ``commit``."""
        return self._news.take()

    def _grow_all(self, giver: Giver, now: float) -> None:
        for sequence in list(self._running):
            if sequence.state is SequenceState.RUNNING and not self._swapping.is_leaving:
                self._grow(sequence, giver, now)

    def _grow(self, sequence: Sequence, giver: Giver, now: float) -> None:
        num_short = self._room.short(sequence)
        if num_short <= 0:
            return
        promised = self._room.promised(sequence, now)
        block_ids = self.pool.allocate(num_short, sequence.key, num_spare=promised)
        while block_ids is None:
            if self.pool.num_free >= num_short:
                return  # they are promised to an import, which has them soon or asks no more
            other = giver(sequence, self._live.values(), now)
            if self._victims.gives_outside(sequence, other, num_short, now):
                return  # and has them with one of the next plans
            if other is None or self._preempt(other):
                return  # with the next plan it may have the blocks that are copied out by this one
            block_ids = self.pool.take_over(other.key, num_short, sequence.key)
        sequence.block_ids.extend(block_ids)

    def _preempt(self, sequence: Sequence) -> bool:
        """Send it back to the queue; whether its KV is being kept, else the caller frees its
        blocks."""
        is_kept = self._swapping.put_out(sequence)
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            sequence.advance(SequenceState.WAITING)
        else:
            self._waiting.remove(sequence)
        sequence.block_ids = []
        sequence.num_computed_tokens = sequence.num_named = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._news.preempted.append(Preempted(sequence.key, sequence.num_preemptions_in_all))
        self._waiting.add(sequence)
        return is_kept

    def _admit(self, now: float) -> None:
        num_open = self._gate.num_open(
            num_running=len(self._running), num_waiting=len(self._waiting), now=now
        )
        num_growing = self._room.growing(self._running)
        slots_until = blocks_until = _NO_BOUND
        for sequence in self._waiting.walk(now):
            if self._swapping.is_leaving:
                break  # room is on its way, for the one before
            brings_blocks = self._room.brings_blocks(sequence)
            if sequence.arrived > (
                slots_until if brings_blocks else min(slots_until, blocks_until)
            ):
                continue
            growth = self._room.next_growth(sequence)
            promised = self._room.promised(sequence, now)
            num_spare = promised if brings_blocks else num_growing + growth + promised
            if num_open < 1:
                lack = self._room.lack(sequence, 0 if brings_blocks else num_spare)
                num_waits = self._victims.outsiders.num_waits
                if not self._preempt_below(lack, now, needs_slot=True):
                    if not self._rules.takes_from_below:
                        break
                    # One behind it may be of a higher tier, and take a slot, but not what comes.
                    is_coming = self._victims.outsiders.num_waits > num_waits
                    until = self._waiting.passable_until(sequence)
                    slots_until = min(slots_until, -_NO_BOUND if is_coming else until)
                    continue
                num_open += 1
            has_blocks = self._room.cover(sequence, num_spare) or (
                not brings_blocks
                and self._preempt_below(self._room.lack(sequence, num_spare), now, needs_slot=False)
                and self._room.cover(sequence, num_spare)
            )
            if not (brings_blocks or has_blocks):
                until = self._waiting.passable_until(sequence)
                is_coming = self._victims.outsiders.are_coming
                blocks_until = min(blocks_until, -_NO_BOUND if is_coming else until)
                continue
            num_open -= 1
            num_growing += growth
            self._start(sequence)
        self._running.sort(key=seniority)

    def _start(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        sequence.advance(SequenceState.RUNNING)
        self._running.append(sequence)
        self._swapping.bring_back(sequence)
        if not sequence.num_preemptions:
            self._waiting.served(sequence, sequence.num_tokens_left)

    def _preempt_below(self, demand: Demand, now: float, *, needs_slot: bool) -> bool:
        """Preempt lower tiers for what it lacks; False, and nothing done, where they have less."""
        if self._swapping.is_leaving:
            return False
        victims = self._victims.below(demand, self._live.values(), now, needs_slot=needs_slot)
        for victim in victims:
            if not self._preempt(victim):
                self.pool.release(victim.key)
        return bool(victims)

    def _commit_share(
        self, sequence: Sequence, share: Scheduled, outcome: Outcome, now: float
    ) -> None:
        end = share.start + len(share.token_ids)
        sequence.num_computed_tokens = end
        if sequence.stored is not None:
            sequence.stored.clear()
        if sequence.hands_over_at is not None:
            self._news.computed.append((share.key, end))
        self._prefix.register(sequence, share.start)
        sequence.num_steps += 1
        sequence.num_worked_tokens += len(share.token_ids)
        self.num_prefilled_tokens += sequence.prefilled_to(end)
        if share.needs is not None and share.needs.scored_ids:
            self._news.prompt_logprobs.extend(outcome.prompt_logprobs[share.key])
            sequence.num_scored_tokens = share.needs.scored_from + len(share.needs.scored_ids)
        if share.is_sampled:
            token_id = outcome.sampled[share.key]
            sequence.output_ids.append(token_id)
            self.num_generated_tokens += 1
            self._waiting.served(sequence, 1)
            logprobs = outcome.logprobs.get(share.key)
            self._news.tokens.append(Token(share.key, share.output_index, token_id, logprobs))
        elif sequence.params.max_tokens:
            return
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
        self._waiting.ended(sequence, reason)
        sequence.advance(SequenceState.ENDED)
        del self._live[sequence.key]
        self._swapping.drop(sequence)
        if reason is not None or error is not None:
            self.pool.release(sequence.key)
        sequence.block_ids = []
        self._news.ends.append(finish.end_of(sequence, now, reason, error))
