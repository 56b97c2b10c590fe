"""What holds whatever comes: every policy, random arrivals, sizes, tiers, aborts and capacities."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import Batching, Policy
from cluster.engine.rules import Rules
from cluster.engine.sequence import SequenceState
from cluster.errors import Cancelled, DeadlineExceeded
from cluster.kv.outside import Demand
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import BLOCK_SIZE, FAR, Engine, expected_tokens, make_key

TIERS = Tiers(names=("low", "normal", "high"), default="normal")


@st.composite
def rules(draw):
    batching = draw(
        st.sampled_from([Batching.CONTINUOUS] * 4 + [Batching.STATIC, Batching.DYNAMIC])
    )
    return Rules(
        ordering=Ordering(
            policy=draw(st.sampled_from(Policy)),
            num_tiers=3,
            aging_s=draw(st.sampled_from([0.05, 0.05, 5.0])),
            is_fair=draw(st.booleans()),
        ),
        tiers=TIERS,
        batching=batching,
        batch_size=2,
        batch_window_s=0.02,
        preempts=batching is Batching.CONTINUOUS and draw(st.integers(0, 3)) > 0,
        max_preemptions=draw(st.integers(1, 3)),
    )


arrivals = st.fixed_dictionaries(
    {
        "num_prompt_tokens": st.sampled_from([3, 9, 16, 16]) | st.integers(1, 40),
        "max_tokens": st.just(8) | st.integers(1, 20),
        "priority": st.sampled_from(["", *TIERS.names]),
        "tenant": st.sampled_from("ab"),
        "is_imported": st.sampled_from([False, False, False, True]),
        "lands_after": st.sampled_from([0, 0, 1, 4]),
        "gap": st.sampled_from([0, 0, 1, 1, 2, 6]),
        "aborted_after": st.sampled_from([None] * 5 + [0, 2, 7]),
        "deadline_s": st.sampled_from([FAR] * 6 + [0.03, 0.2]),
        "leaves_in_copy": st.sampled_from([False] * 5 + [True]),
    }
)
sizes = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(16, 24),
        "max_num_seqs": st.integers(1, 4),
        "chunk_tokens": st.sampled_from([0, 5, 16]),
        "swap_slots": st.sampled_from([0, 3, 12, 100]),
    }
)


def equal_to(sequence):
    """What decides on a sequence besides its arrival."""
    return (sequence.tier, sequence.tenant, sequence.num_prompt_tokens, sequence.params.max_tokens)


def blocks_for(num_tokens):
    return -(-num_tokens // BLOCK_SIZE)


class Run:
    """One engine under test, with what it looked like before each step."""

    def __init__(self, the_rules, the_sizes):
        self.rules = the_rules
        self.engine = Engine(rules=the_rules, token_budget=64, **the_sizes)
        self.slots = the_sizes["max_num_seqs"]
        self.sequences = []
        self.aborts = []
        self.leave_in_copy = []
        self.admitted = set()
        self.imports = []
        self.landing = []

    def add(self, name, *, is_imported, lands_after, gap, deadline_s, **fields):
        for _ in range(gap):
            self.step()
        now = self.engine.clock.now()
        fields = {"arrived": now, "deadline": now + deadline_s, **fields}
        if is_imported and self.rules.preempts:
            self.imports.append((name, lands_after, fields))
            self.reserve()
        else:
            self.enter(self.engine.add, name, **fields)

    def enter(self, add, name, *, aborted_after, leaves_in_copy, **fields):
        sequence = add(name, **fields)
        self.sequences.append(sequence)
        if aborted_after is not None:
            self.aborts.append([aborted_after, sequence])
        if leaves_in_copy:
            self.leave_in_copy.append(sequence)

    def reserve(self):
        """As the decode half does: the highest tier's first one gets blocks, or asks for them."""
        pool, now = self.engine.pool, self.engine.clock.now()

        def tier_of(entry):
            return self.rules.taking_tier(entry[2]["priority"], entry[2]["arrived"], now)

        while self.imports:
            entry = max(self.imports, key=tier_of)
            name, lands_after, fields = entry
            num_blocks = -(-fields["num_prompt_tokens"] // BLOCK_SIZE)
            if pool.reserve(num_blocks, f"h-{name}", make_key(name)) is None:
                pool.ask(Demand(num_blocks=num_blocks, tier=tier_of(entry)))
                return
            self.imports.remove(entry)
            self.landing.append([lands_after, name, fields])
        pool.ask(None)

    def land(self):
        """Imports whose KV is there become sequences."""
        for entry in self.landing:
            entry[0] -= 1
        for entry in [entry for entry in self.landing if entry[0] < 0]:
            self.landing.remove(entry)
            _, name, fields = entry
            fields["max_tokens"] += 1
            self.enter(self.engine.add_imported, name, **fields)

    def step(self):
        engine = self.engine
        self.land()
        self.reserve()
        for entry in self.aborts:
            entry[0] -= 1
            if entry[0] == 0:
                engine.abort(entry[1])
        plan = self.plan()
        while plan is not None and plan.swaps is not None:
            self.swap(plan)
            plan = self.plan()
        if plan is not None:
            outcome = engine.runner.run(plan)
            engine.clock.advance(0.01)
            engine.log.take(engine.scheduler.commit(plan, outcome, engine.clock.now()))
        else:
            engine.clock.advance(0.01)
            engine.log.take(engine.scheduler.take_events())
        engine.pool.check()
        return plan is not None

    def plan(self):
        was_running = self.in_state(SequenceState.RUNNING)
        waiting = self.in_state(SequenceState.WAITING)
        num_preemptions = self.engine.scheduler.num_preemptions
        plan = self.engine.plan()
        now_running = self.in_state(SequenceState.RUNNING)
        self.check_admission(was_running, waiting, now_running)
        left = [s for s in waiting if s.state is SequenceState.WAITING]
        # What was given up in the midst of it is shared out by the next one.
        is_whole = num_preemptions == self.engine.scheduler.num_preemptions
        is_whole &= not (plan and plan.swaps)
        if self.rules.batching is Batching.CONTINUOUS and is_whole:
            self.check_idle(now_running, left)
        return plan

    def swap(self, plan):
        """Make the copies; some leave meanwhile. Nothing that is copied has another owner."""
        engine = self.engine
        assert not plan.shares
        blocks = [block for block, _ in plan.swaps.out] + [block for _, block in plan.swaps.back]
        assert len(blocks) == len(set(blocks))
        leaving = {block for block, _ in plan.swaps.out}
        assert leaving.isdisjoint(block for s in self.sequences for block in s.block_ids)
        engine.copy(plan.swaps)
        for sequence in self.leave_in_copy:
            if sequence.num_swapped_tokens:
                engine.abort(sequence)
        engine.log.take(engine.scheduler.commit(plan, None, engine.clock.now()))
        engine.pool.check()

    def in_state(self, state):
        return [s for s in self.sequences if s.state is state]

    def check_admission(self, was_running, waiting, now_running):
        assert len(now_running) <= self.slots
        held = [block for s in self.sequences for block in s.block_ids]
        assert len(held) == len(set(held)) <= self.engine.pool.num_blocks
        if not self.rules.preempts:
            assert not any(s.num_preemptions for s in self.sequences)
        assert all(s.num_preemptions <= self.rules.max_preemptions for s in self.sequences)
        came = [s for s in now_running if s not in was_running]
        left = [s for s in waiting + was_running if s.state is SequenceState.WAITING]
        if self.rules.batching is not Batching.CONTINUOUS:
            in_batch = [s for s in was_running if s.state is not SequenceState.ENDED]
            assert not (came and in_batch), "nobody joins a batch that runs"
            assert len(now_running) <= 2
            return
        fresh = [s for s in came if not s.num_preemptions and s.key not in self.admitted]
        self.admitted |= {s.key for s in came}
        for sequence in fresh:
            self.check_passed(sequence, left)
            self.check_equals(sequence, left)

    def check_passed(self, sequence, left):
        """Whoever it left behind, or took the place of, was not older by more than the bound."""
        for other in left:
            if sequence.block_ids and sequence.num_computed_tokens:
                continue  # its KV came with it: it took a slot, and no blocks
            ordering = self.rules.ordering
            is_too_young = sequence.arrived > other.arrived + ordering.aging_s
            if is_too_young and ordering.is_fair:
                is_same_tier = ordering.level_of(sequence.tier) == ordering.level_of(other.tier)
                is_too_young = sequence.tenant == other.tenant and is_same_tier
            assert not is_too_young, f"{sequence.key} has passed {other.key}"

    def check_equals(self, sequence, left):
        """Those that need the same and may ask for the same are served as they came."""
        if self.rules.ordering.policy is Policy.SJF:
            return  # what a tenant's outputs were like changes while they wait
        for other in left:
            if other.num_preemptions or bool(other.block_ids) != bool(sequence.num_computed_tokens):
                continue
            if equal_to(sequence) == equal_to(other):
                came = (sequence.arrived, sequence.order), (other.arrived, other.order)
                assert came[0] < came[1], f"{sequence.key} was served before {other.key}"

    def check_idle(self, now_running, left):
        """A slot stays empty only where nobody has room beside what is kept for those before."""
        if len(now_running) >= self.slots:
            return
        short = [s for s in left if not self.has_room(s, now_running)]
        keys = {sequence.key for sequence in short}
        for sequence in left:
            if sequence.key not in keys:
                is_kept = any(self.is_kept_from(sequence, other) for other in short)
                assert is_kept, f"{sequence.key} could run"

    def has_room(self, sequence, running):
        """Whether there are blocks for it, and for everybody's next token; those of lower tiers
        who give way are its own."""
        if self.brings_blocks(sequence):
            return True
        now, demand = self.engine.clock.now(), self.engine.pool.demand
        has_aged = self.rules.ordering.has_aged(sequence.arrived, now)
        is_promised = demand is not None and demand.tier > sequence.tier and not has_aged
        need = self.to_start(sequence) - len(sequence.block_ids)
        need += max(0, blocks_for(self.next_tokens(sequence)) - self.to_start(sequence))
        need += demand.num_blocks if is_promised else 0
        need += sum(
            max(0, blocks_for(self.next_tokens(other)) - len(other.block_ids)) for other in running
        )
        takable = sum(
            len(other.block_ids)
            for other in self.sequences
            if self.rules.takes_from_below
            and other.tier < sequence.tier
            and other.num_preemptions < self.rules.max_preemptions
            and not self.rules.ordering.has_aged(other.arrived, now)
        )
        return need <= self.engine.pool.num_free + takable

    def starts_with_all(self, sequence):
        return not self.rules.preempts or sequence.num_preemptions >= self.rules.max_preemptions

    def brings_blocks(self, sequence):
        return bool(sequence.block_ids) and not self.starts_with_all(sequence)

    def to_start(self, sequence):
        """With how many blocks it starts; the last token is never computed."""
        most = sequence.num_prompt_tokens + sequence.params.max_tokens - 1
        return blocks_for(most if self.starts_with_all(sequence) else sequence.num_tokens)

    def next_tokens(self, sequence):
        most = sequence.num_prompt_tokens + sequence.params.max_tokens - 1
        return min(sequence.num_tokens + 1, max(most, sequence.num_tokens))

    def is_kept_from(self, sequence, other):
        """Whether what the other lacks is kept for it: it started before, or waits for too long.

        Whatever is left is less than it lacks, so that nothing is left beside it.
        """
        if self.brings_blocks(sequence):
            return False
        aging_s = self.rules.ordering.aging_s
        if not other.num_preemptions and sequence.arrived <= other.arrived + aging_s:
            return False
        # Between tenants it may be either's turn.
        return self.rules.ordering.is_fair or self.place(other) < self.place(sequence)

    def place(self, sequence):
        """Who is looked at first, where shares are not fair."""
        ordering = self.rules.ordering
        has_aged = ordering.has_aging and ordering.has_aged(
            sequence.arrived, self.engine.clock.now()
        )
        num_above = 2 - sequence.tier if ordering.policy is Policy.PRIORITY else 0
        has_started = sequence.num_preemptions > 0
        is_early = has_aged or (has_started and num_above == 0)
        return -1 if is_early else num_above, not has_started, sequence.arrived, sequence.order

    def finish(self):
        for _ in range(3000):
            is_over = len(self.engine.log.ends) == len(self.sequences)
            if is_over and not (self.imports or self.landing):
                break
            self.step()
        assert not self.imports, "an import waits for ever"
        assert len(self.engine.log.ends) == len(self.sequences), "somebody waits for ever"
        for sequence in self.sequences:
            name, end = sequence.key.request_id, self.engine.end(sequence)
            got = self.engine.tokens(sequence)
            first = self.engine.log.first_index.get(sequence.key, 0)
            assert got == expected_tokens(name, first + len(got))[first:]
            if end.finish_reason is not None:
                assert sequence.num_output_tokens == sequence.params.max_tokens
                self.check_computed(sequence, end, first)
            else:
                assert isinstance(end.error, Cancelled | DeadlineExceeded)
                assert isinstance(end.error, Cancelled) or sequence.deadline < FAR
        self.engine.assert_idle()

    def check_computed(self, sequence, end, first):
        """With room in the buffer nobody computes a token twice."""
        swapping = self.engine.scheduler.swapping
        if self.engine.pool.swap is None or swapping.num_refused:
            return
        once = sequence.num_tokens - 1 - (sequence.num_prompt_tokens if first else 0)
        assert end.num_computed_tokens == once


@given(rules(), sizes, st.lists(arrivals, min_size=1, max_size=40))
@settings(max_examples=150, deadline=None)
def test_whatever_comes(the_rules, the_sizes, the_arrivals):
    """P-15, P-16: nothing is over-committed, overtaken too far or left, and each ends once."""
    run = Run(the_rules, the_sizes)
    for number, fields in enumerate(the_arrivals):
        run.add(f"r{number}", **fields)
    run.finish()


@given(
    st.builds(
        Rules,
        ordering=st.builds(
            Ordering,
            policy=st.just(Policy.PRIORITY),
            num_tiers=st.just(3),
            aging_s=st.sampled_from([0.05, 0.2, 5.0]),
        ),
        tiers=st.just(TIERS),
        max_preemptions=st.integers(1, 3),
    ),
    sizes,
    st.lists(arrivals, min_size=8, max_size=30),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_imports_of_higher_tiers_take_blocks_and_nobody_waits_for_ever(
    by_tier, the_sizes, the_arrivals, dice
):
    """P-15, P-16: whoever else takes, ages or ends meanwhile."""
    run = Run(by_tier, the_sizes)
    for number, fields in enumerate(the_arrivals):
        is_imported, size = dice.random() < 0.6, dice.randint(12, 40)
        fields = {**fields, "is_imported": is_imported, "num_prompt_tokens": size}
        run.add(f"r{number}", **fields)
    run.finish()
