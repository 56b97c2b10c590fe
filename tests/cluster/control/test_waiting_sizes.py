"""What the queue knows of its sizes, so that a look at the smallest spares a walk over all."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import Policy
from tests.cluster.control.factory import make_want, two_pools
from tests.cluster.control.story import Story

SIZES = (1, 16, 17, 40, 100)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from("ln")),
            st.integers(0, 30),
        ),
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_the_smallest_is_known_whoever_comes_and_goes(events):
    """A tuple comes; a number is one of those that came, and goes."""
    story = Story(*two_pools(), counts={"prefill": 0, "decode": 0}, policy=Policy.PRIORITY)
    queue, num_come = story.planner._queue, 0
    for event in events:
        if isinstance(event, int):
            queue.remove((f"r{event}", 0))
        else:
            prompt, output, tier = event
            want = make_want(
                f"r{num_come}", num_prompt_tokens=prompt, max_tokens=output + 1,
                priority={"l": "low", "n": "normal"}[tier],
            )  # fmt: skip
            queue.add(want, "a", 0.0)
            num_come += 1
        for kind in queue.samples:
            sizes = [w.needs for w in queue if w.needs.kind == kind]
            least_prefill = min(needs.prefill_tokens for needs in sizes)
            least_decode = min(needs.decode_tokens for needs in sizes)
            assert queue.smallest(kind) == (least_prefill, least_decode)
        assert set(queue.samples) == {w.needs.kind for w in queue}
