"""Imports stand at the door of a short pool all the time: who was preempted is not passed by them.

What an import takes, while somebody preempted waits, is left beside all that this one needs.
"""

from __future__ import annotations

from collections import deque

from hypothesis import example, given
from hypothesis import strategies as st

from cluster.engine.sequence import Sequence, SequenceState
from tests.factories import BLOCK_SIZE, Engine, expected_tokens, make_key

MAX_STEPS = 3000

imports = st.lists(
    st.fixed_dictionaries(
        {
            "num_prompt_tokens": st.sampled_from([4, 8, 12]) | st.integers(3, 16),
            "max_tokens": st.integers(4, 24),
        }
    ),
    min_size=10,
    max_size=30,
)
sizes = st.fixed_dictionaries(
    {"num_blocks": st.integers(12, 30), "max_num_seqs": st.integers(2, 8)}
)


class Door:
    """An engine all of whose sequences are imported, each as soon as there are blocks for it."""

    def __init__(self, its_sizes, its_imports, lands_after: int) -> None:
        self.engine = Engine(**its_sizes)
        self.num_slots = its_sizes["max_num_seqs"]
        self.lands_after = lands_after
        self.outside = deque((f"r{i}", fields) for i, fields in enumerate(its_imports))
        self.landing: deque[tuple[int, str, dict]] = deque()
        self.sequences: list[Sequence] = []
        self.passed: Sequence | None = None
        """Beside whom an import has just taken blocks."""
        self.num_beside = 0

    @property
    def has_work(self) -> bool:
        scheduler = self.engine.scheduler
        return bool(self.outside or self.landing or scheduler.num_running or scheduler.num_waiting)

    def step(self) -> None:
        while self.landing and self.landing[0][0] <= 0:
            _, name, fields = self.landing.popleft()
            # Its first token, which comes with it, counts.
            fields = {**fields, "max_tokens": fields["max_tokens"] + 1}
            self.sequences.append(self.engine.add_imported(name, **fields))
        self.landing = deque((left - 1, *others) for left, *others in self.landing)
        if self.engine.step(before_commit=self.look) is None:
            self.look()
        self.reserve()
        self.engine.pool.check()

    def look(self) -> None:
        """After the scheduler chose a step, and while that is computed."""
        passed, self.passed = self.passed, None
        if passed is not None and self.engine.scheduler.num_running < self.num_slots:
            assert passed.state is not SequenceState.WAITING, f"{passed.key} was passed"
        self.reserve()

    def reserve(self) -> None:
        """As the decode half does: in their order, while there are blocks."""
        preempted = [
            s for s in self.sequences if s.num_preemptions and s.state is SequenceState.WAITING
        ]
        while self.outside:
            name, fields = self.outside[0]
            num_blocks = -(-fields["num_prompt_tokens"] // BLOCK_SIZE)
            if self.engine.pool.reserve(num_blocks, f"h-{name}", make_key(name)) is None:
                return
            self.outside.popleft()
            self.landing.append((self.lands_after, name, fields))
            if preempted:
                self.passed = min(preempted, key=lambda s: (s.arrived, s.order))
                self.num_beside += 1


def run(its_sizes, its_imports, lands_after: int) -> Door:
    """Play all of it to the end; every answer is that of an undisturbed run."""
    door = Door(its_sizes, its_imports, lands_after)
    for _ in range(MAX_STEPS):
        if not door.has_work:
            break
        door.step()
    assert not door.has_work, "it stands still"
    for sequence in door.sequences:
        expected = expected_tokens(sequence.key.request_id, sequence.params.max_tokens)
        assert door.engine.tokens(sequence) == expected[1:]
    door.engine.assert_idle()
    return door


BURST = [{"num_prompt_tokens": 4 + 4 * (i % 3), "max_tokens": 4 + 7 * i % 21} for i in range(60)]


@given(sizes, imports, st.integers(0, 3))
@example({"num_blocks": 24, "max_num_seqs": 6}, BURST, 1)
def test_whoever_was_preempted_has_room_in_the_next_step_where_an_import_took_some(
    its_sizes, its_imports, lands_after
):
    """P-16: a burst does not pass one whose client waits in mid-stream."""
    run(its_sizes, its_imports, lands_after)


def test_what_is_left_beside_the_preempted_is_not_idle():
    """P-16: imports go on where there is more than it needs: blocks are not kept from them all."""
    door = run({"num_blocks": 24, "max_num_seqs": 6}, BURST, 1)

    assert door.engine.scheduler.num_preemptions > 5
    assert door.num_beside > 0
