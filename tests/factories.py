"""Helpers that tests of the engine and of the workers' halves share."""

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping

from cluster.engine.loop import KVCopier
from cluster.engine.plan import Outcome, Plan, Scheduled, SequenceEnd, StepEvents, Swaps
from cluster.engine.rules import Rules
from cluster.engine.scheduler import StepScheduler
from cluster.engine.sequence import Sequence
from cluster.engine.stored import OnStored
from cluster.errors import Cancelled, PdserveError
from cluster.kv.block_pool import BlockPool
from cluster.kv.prefix_index import PrefixIndex
from cluster.kv.swap_buffer import SwapBuffer
from cluster.request import LegKey, PromptLogprobs, SamplingParams, TokenLogprobs

EOS_ID = 0
"""The end token of the fake model; drawn only where a script says so."""
BLOCK_SIZE = 4
FAR = 1e9
"""A deadline that never comes."""


class FakeClock:
    """A clock that stands still until it is told; whoever sleeps until an instant can listen."""

    def __init__(self, now: float = 100.0) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
        for listener in list(self._listeners):
            listener()

    def on_advance(self, listener: Callable[[], None]) -> None:
        """E.g. ``clock.on_advance(loop.wake)``: a loop's timed wait cannot see this clock move."""
        self._listeners.append(listener)


def make_key(request_id: str = "r", attempt: int = 0, choice: int = 0) -> LegKey:
    return LegKey(request_id, attempt, choice)


def make_params(max_tokens: int = 8, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **fields)


def make_prefix_index(model_fingerprint: str = "tiny", block_size: int = BLOCK_SIZE) -> PrefixIndex:
    return PrefixIndex(
        key=b"a key for tests.", model_fingerprint=model_fingerprint, block_size=block_size
    )


def make_prompt(num_tokens: int, request_id: str = "r") -> tuple[int, ...]:
    """Tokens that tell one request from another, and one position from the next."""
    return tuple(_number("prompt", request_id, i) for i in range(num_tokens))


def make_sequence(
    request_id: str = "r",
    *,
    num_prompt_tokens: int = 40,
    max_tokens: int = 8,
    arrived: float = 100.0,
    deadline: float = FAR,
    params: SamplingParams | None = None,
    **fields,
) -> Sequence:
    """A sequence of a fresh request; ``fields`` are any others of ``Sequence``."""
    fields.setdefault("key", make_key(request_id))
    fields.setdefault("prompt_ids", make_prompt(num_prompt_tokens, request_id))
    fields.setdefault("eos_ids", frozenset({EOS_ID}))
    return Sequence(
        params=params or make_params(max_tokens), arrived=arrived, deadline=deadline, **fields
    )


def expected_tokens(request_id: str, num_tokens: int, choice: int = 0) -> list[int]:
    """What the fake model draws for a request that nobody disturbs."""
    return [_number("draw", request_id, choice, i) for i in range(num_tokens)]


def _number(*parts: object) -> int:
    digest = hashlib.blake2s(repr(parts).encode(), digest_size=4).digest()
    return 1 + int.from_bytes(digest, "little") % 30_000


_NOTHING = (0, 0)
"""What stands before a sequence's first token."""


class FakeRunner:
    """A model that draws by (request, choice, output index) and distrusts its scheduler.

    It remembers for each slot of each block the token written there and all that came before it,
    and fails when a share's history isn't exactly there, when a position is computed again with
    another token than before, or when a drawn token isn't the next one it is given. Who wrote a
    history doesn't matter: blocks may be shared. With ``kv_of_others=True`` it takes blocks it
    has never written (imported by a real cache) on trust.
    """

    def __init__(
        self,
        *,
        block_size: int = BLOCK_SIZE,
        clock: FakeClock | None = None,
        step_s: float = 0.0,
        script: Mapping[tuple[str, int], int] | None = None,
        on_run: Callable[[Plan], None] | None = None,
        kv_of_others: bool = False,
    ) -> None:
        self.block_size = block_size
        self.clock = clock
        self.step_s = step_s
        self.script = dict(script or {})
        """(request id, output index) -> token, where it isn't the usual draw."""
        self.on_run = on_run
        """Called inside every run, before the outcome: blocks, aborts or raises as a test likes."""
        self.kv_of_others = kv_of_others
        self.plans: list[Plan] = []
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        """(block, offset) -> (token, digest of it and all before it)."""
        self._token_at: dict[tuple[str, int, int], int] = {}
        self._swapped: dict[tuple[int, int], tuple[int, int]] = {}
        """(swap slot, offset) -> what was there in the block."""

    def copy_out(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks to swap slots, with whatever was written there."""
        self._copy(self._slots, self._swapped, pairs)

    def copy_back(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy swap slots to blocks."""
        self._copy(self._swapped, self._slots, pairs)

    def _copy(self, source: dict, target: dict, pairs: Iterable[tuple[int, int]]) -> None:
        for here, there in pairs:
            for offset in range(self.block_size):
                target.pop((there, offset), None)
                if (here, offset) in source:
                    target[there, offset] = source[here, offset]

    def run(self, plan: Plan, on_stored: OnStored | None = None) -> Outcome:
        self.plans.append(plan)
        for share in plan.shares:
            self._check_history(share)
            self._write(share)
        if self.on_run is not None:
            self.on_run(plan)
        if self.clock is not None and self.step_s:
            self.clock.advance(self.step_s)
        sampled = {share.key: self.draw(share) for share in plan.shares if share.is_sampled}
        for share in plan.shares:
            if share.is_sampled:
                end = share.start + len(share.token_ids)
                self._token_at[self._place(share.key, end)] = sampled[share.key]
        scored = (s for s in plan.shares if s.needs is not None and s.needs.scored_ids)
        scores = {share.key: (self.score(share),) for share in scored}
        return Outcome(sampled, prompt_logprobs=scores)

    def score(self, share: Scheduled) -> PromptLogprobs:
        """The fake log-probability of a prompt token is minus its position."""
        start, ids = share.needs.scored_from, share.needs.scored_ids
        entries = (TokenLogprobs(-float(start + i)) for i in range(len(ids)))
        return PromptLogprobs(share.key, start, tuple(entries))

    def draw(self, share: Scheduled) -> int:
        key, index = share.key, share.output_index
        usual = _number("draw", key.request_id, key.choice, index)
        return self.script.get((key.request_id, index), usual)

    def expect(self, sequence: Sequence) -> None:
        """Know a sequence's tokens, so that KV which it found is compared with them too."""
        for position, token_id in enumerate(sequence.token_ids(0, sequence.num_tokens)):
            self._token_at.setdefault(self._place(sequence.key, position), token_id)

    def imported(self, sequence: Sequence, block_ids: Iterable[int]) -> None:
        """Write the KV of a sequence's computed tokens, as a handoff would have."""
        ids = sequence.token_ids(0, sequence.num_computed_tokens)
        for position, token_id in enumerate(ids):
            self._put(tuple(block_ids), sequence.key, position, token_id)

    def _slot(self, block_ids: tuple[int, ...], position: int) -> tuple[int, int]:
        return block_ids[position // self.block_size], position % self.block_size

    def _put(self, block_ids: tuple[int, ...], key: LegKey, position: int, token_id: int) -> None:
        place = self._place(key, position)
        known = self._token_at.setdefault(place, token_id)
        assert known == token_id, f"{key}: token {token_id} at {position} was {known} before"
        before = self._slots.get(self._slot(block_ids, position - 1)) if position else _NOTHING
        self._slots[self._slot(block_ids, position)] = (token_id, hash((before, token_id)))

    def _place(self, key: LegKey, position: int) -> tuple[str, int, int]:
        return key.request_id, key.choice, position

    def _write(self, share: Scheduled) -> None:
        for position, token_id in enumerate(share.token_ids, start=share.start):
            self._put(share.block_ids, share.key, position, token_id)

    def _check_history(self, share: Scheduled) -> None:
        assert share.token_ids, f"{share.key}: an empty share"
        end = share.start + len(share.token_ids)
        assert len(share.block_ids) == -(-end // self.block_size), f"{share.key}: wrong blocks"
        before: tuple[int, int] | None = _NOTHING
        for position in range(share.start):
            found = self._slots.get(self._slot(share.block_ids, position))
            assert found is not None or self.kv_of_others, (
                f"{share.key}: position {position} was never computed"
            )
            if before is not None and found is not None:
                token_id = self._token_at.get(self._place(share.key, position), found[0])
                is_ours = found == (token_id, hash((before, token_id)))
                assert is_ours, f"{share.key}: position {position} is another's"
            before = found


class EventLog:
    """What an engine told, by sequence; fails when one ends twice or a token is out of order."""

    def __init__(self) -> None:
        self.started: list[LegKey] = []
        self.tokens: dict[LegKey, list[int]] = {}
        self.first_index: dict[LegKey, int] = {}
        self.logprobs: dict[LegKey, list[TokenLogprobs | None]] = {}
        self.prompt_logprobs: dict[LegKey, list[TokenLogprobs]] = {}
        self.ends: dict[LegKey, SequenceEnd] = {}
        self.preempted: dict[LegKey, int] = {}
        """How often in all, as it was told last."""
        self.batches: list[StepEvents] = []

    def take(self, events: StepEvents) -> None:
        self.batches.append(events)
        self.started.extend(events.started)
        for token in events.tokens:
            assert token.key not in self.ends, f"{token.key}: a token after its end"
            got = self.tokens.setdefault(token.key, [])
            first = self.first_index.setdefault(token.key, token.output_index)
            assert token.output_index == first + len(got), f"{token.key}: a token out of order"
            got.append(token.token_id)
            self.logprobs.setdefault(token.key, []).append(token.logprobs)
        for notice in events.preempted:
            assert notice.num_preemptions > self.preempted.get(notice.key, 0)
            self.preempted[notice.key] = notice.num_preemptions
        for run in events.prompt_logprobs:
            scores = self.prompt_logprobs.setdefault(run.key, [])
            assert run.start == 1 + len(scores), f"{run.key}: prompt scores out of order"
            scores.extend(run.entries)
        for end in events.ends:
            assert end.key not in self.ends, f"{end.key}: ended twice"
            self.ends[end.key] = end


class Engine:
    """A scheduler with its pool, stepped by hand with a fake runner and a fake clock."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        max_num_seqs: int = 8,
        token_budget: int = 1000,
        chunk_tokens: int = 0,
        max_model_len: int = 1000,
        runner: FakeRunner | None = None,
        has_prefix_cache: bool = False,
        rules: Rules | None = None,
        swap_slots: int = 0,
        copier: KVCopier | None = None,
    ) -> None:
        """``copier``: what copies beside a real runner; a fake one does it itself."""
        self.clock = FakeClock()
        self.pool = BlockPool(
            num_blocks,
            make_prefix_index() if has_prefix_cache else None,
            SwapBuffer(swap_slots) if swap_slots else None,
        )
        self.scheduler = StepScheduler(
            self.pool, BLOCK_SIZE, max_num_seqs, token_budget, chunk_tokens, max_model_len, rules
        )
        self.runner = runner or FakeRunner()
        self.copier = copier or self.runner
        self.swaps: list[Swaps] = []
        self.log = EventLog()

    def add(self, request_id: str = "r", **fields) -> Sequence:
        """Queue a fresh sequence, arriving now."""
        fields.setdefault("arrived", self.clock.now())
        sequence = make_sequence(request_id, **fields)
        self.runner.expect(sequence)
        self.scheduler.add(sequence)
        return sequence

    def add_imported(self, request_id: str = "r", **fields) -> Sequence:
        """Queue a sequence as a committed handoff leaves it: prompt computed, first token known.

        Its blocks may have been reserved before, by the id of its handoff.
        """
        fields.setdefault("arrived", self.clock.now())
        sequence = make_sequence(request_id, output_ids=expected_tokens(request_id, 1), **fields)
        sequence.num_computed_tokens = sequence.num_prompt_tokens
        num_blocks, handoff_id = -(-sequence.num_prompt_tokens // BLOCK_SIZE), f"h-{request_id}"
        if self.pool.importing(handoff_id) is None:
            assert self.pool.reserve(num_blocks, handoff_id, sequence.key) is not None
        self.runner.imported(sequence, self.pool.adopt(handoff_id))
        self.scheduler.add(sequence)
        return sequence

    def abort(self, sequence: Sequence, error: PdserveError | None = None) -> None:
        self.scheduler.abort(sequence.key, error or Cancelled("left"), self.clock.now())

    @property
    def next_instant(self) -> float | None:
        return self.scheduler.next_instant(self.clock.now())

    def plan(self) -> Plan | None:
        return self.scheduler.schedule(self.clock.now())

    def step(self, before_commit: Callable[[], None] | None = None) -> Plan | None:
        """One step of ten milliseconds, and the copies before it; None when there was nothing to
        compute."""
        plan = self.plan()
        while plan is not None and plan.swaps is not None:
            self.swap(plan)
            plan = self.plan()
        if plan is None:
            self.log.take(self.scheduler.take_events())
            return None
        outcome = self.runner.run(plan)
        self.clock.advance(0.01)
        if before_commit is not None:
            before_commit()
        self.log.take(self.scheduler.commit(plan, outcome, self.clock.now()))
        return plan

    def swap(self, plan: Plan) -> None:
        """Make the copies that a plan asks for."""
        self.copy(plan.swaps)
        self.log.take(self.scheduler.commit(plan, Outcome({}), self.clock.now()))

    def copy(self, swaps: Swaps) -> None:
        self.swaps.append(swaps)
        self.copier.copy_out(swaps.out)
        self.copier.copy_back(swaps.back)

    def run_to_end(self, max_steps: int = 1000) -> int:
        """Step until nothing is left to compute; returns the number of steps."""
        for num_steps in range(max_steps):
            if self.step() is None:
                return num_steps
        raise AssertionError(f"still at work after {max_steps} steps")

    def tokens(self, sequence: Sequence) -> list[int]:
        return self.log.tokens.get(sequence.key, [])

    def end(self, sequence: Sequence) -> SequenceEnd:
        return self.log.ends[sequence.key]

    def assert_idle(self) -> None:
        """Nothing waits or runs, and every block is free or cached."""
        self.pool.check()
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert self.pool.num_free == self.pool.num_blocks
        swap = self.pool.swap
        assert swap is None or swap.num_free == swap.num_slots
