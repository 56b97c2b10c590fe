"""Who may wait: bounds of the queue, a caller's share, deadlines, and when to come back."""

import pytest

from cluster.config import Policy, Preemption
from cluster.control.overload import Newcomer, QueueBounds, QueueLoad, expected_wait_s, refusal
from cluster.errors import ClusterFull, QueueFull
from tests.cluster.control.factory import grants, make_pool, rejects, two_pools
from tests.cluster.control.story import Story

BOUNDS = QueueBounds(max_requests=10, max_tokens=1000, tenant_share=0.5)


def load(num_requests=4, num_tokens=400, **changes):
    values = {"request_s": 0.5, "standings": {0: num_requests}}
    return QueueLoad(num_requests=num_requests, num_tokens=num_tokens, **{**values, **changes})


def newcomer(**changes):
    values = {"tenant": "", "standing": 0, "num_tokens": 100, "remaining_s": 60.0}
    return Newcomer(**{**values, **changes})


@pytest.mark.parametrize(
    ("what", "who", "kind", "retry_s"),
    [
        (load(9), newcomer(), None, 0),
        (load(10), newcomer(), ClusterFull, 2.5),
        (load(10, room=1), newcomer(), None, 0),
        (load(8), newcomer(num_requests=3), ClusterFull, 2.0),
        (load(9, 950), newcomer(), ClusterFull, 2.25),
        (load(0, 0), newcomer(num_tokens=5000), None, 0),
        (load(4), newcomer(remaining_s=2.0), None, 0),
        (load(8), newcomer(remaining_s=1.0), ClusterFull, 3.0),
        (load(8, request_s=0.0), newcomer(remaining_s=1.0), None, 0),
    ],
    ids=[
        "room", "full", "full, and one slot free", "several choices", "tokens", "one giant alone",
        "in time", "too late", "nothing known",
    ],
)  # fmt: skip
def test_what_the_queue_holds_and_what_it_can_serve_in_time(what, who, kind, retry_s):
    error = refusal(what, who, BOUNDS)
    assert (type(error) if error else None) is kind
    assert error is None or error.retry_after_s == retry_s


def test_a_caller_with_its_share_gets_429_and_who_comes_to_a_full_cluster_503():
    shared = load(10, tenants={"many": 8, "few": 2})
    assert type(refusal(shared, newcomer(tenant="few"), BOUNDS)) is ClusterFull
    assert type(refusal(load(6, tenants={"many": 5, "few": 1}), newcomer(tenant="many"), BOUNDS)) \
        is QueueFull  # fmt: skip
    late = newcomer(tenant="few", remaining_s=0.1)
    assert refusal(load(6, tenants={"many": 5, "few": 1}), late, BOUNDS).http_status == 503
    assert refusal(load(10, tenants={"": 10}), newcomer(), BOUNDS).http_status == 503


def test_only_those_ahead_are_waited_for():
    """Of a higher tier, or in another tenant's turn."""
    tiers = load(10, standings={0: 2, 1: 3, 2: 5})
    assert [expected_wait_s(tiers, newcomer(standing=n)) for n in range(3)] == [1.0, 2.5, 5.0]
    fair = load(10, is_fair=True, tenants={"many": 9, "few": 1})
    assert expected_wait_s(fair, newcomer(tenant="few")) == 1.0
    assert expected_wait_s(fair, newcomer(tenant="new")) == 0.0
    assert expected_wait_s(fair, newcomer(tenant="many")) == 5.0


# ---- the control plane asks it of its own queue


def busy(**scheduling):
    """One slot, taken; each request that waits is placed a second after the one before."""
    story = Story(*two_pools(slots=1), **scheduling)
    (running,) = grants(story.want("r0"))
    for index in range(1, 12):
        assert rejects(story.want(f"r{index}")) == []
    for _ in range(9):
        story.now += 1.0
        story.report("decode-0", running.grant_id)
        story.report("prefill-0")
        story.done(running)
        (running,) = grants(story.report("decode-0"))
    return story


def test_a_want_that_would_wait_past_its_deadline_is_refused_with_a_time_to_come_back():
    """Two wait, a second each: three seconds are enough, one is not."""
    story = busy()
    assert story.view().num_waiting == 2
    assert story.view().request_s == pytest.approx(1.0)
    (reject,) = rejects(story.want("late", remaining_s=1.0))
    assert isinstance(reject.error, ClusterFull)
    assert reject.error.retry_after_s == pytest.approx(1.0)
    assert rejects(story.want("early", remaining_s=3.0)) == []
    for changes in ({"is_resent": True}, {"attempt": 1}):
        assert rejects(story.want("again", remaining_s=0.5, **changes)) == [], "it was let in"


def test_a_quiet_time_says_nothing_of_the_pace():
    story = busy()
    story.now += 0.001
    before = story.view().request_s
    while story.view().num_waiting:
        story.planner.cancel_want(f"r{12 - story.view().num_waiting}", 0, story.now)
    story.now += 30.0
    assert story.view().request_s == pytest.approx(before, rel=0.01)


def test_without_any_grants_the_workers_speeds_tell():
    """64 tokens at 10 + 2 x 1 ms a step with two slots: 0.384 s; a prompt of 900 at 1 ms: 0.9 s."""
    story = Story(*two_pools(slots=2))
    assert story.view().request_s == pytest.approx(0.384)
    for index in range(3):
        story.want(f"r{index}", num_prompt_tokens=900, max_tokens=64)
    assert story.view().num_waiting == 2
    assert story.view().request_s == pytest.approx(0.9)


def test_the_queue_holds_so_many_tokens():
    story = Story(*two_pools(slots=1), max_queue_tokens=100)
    story.want("r0")
    assert rejects(story.want("r1", num_prompt_tokens=90)) == []
    (reject,) = rejects(story.want("r2", num_prompt_tokens=11))
    assert isinstance(reject.error, ClusterFull)
    assert rejects(story.want("r3", num_prompt_tokens=10)) == []


def test_one_tenant_does_not_take_the_whole_queue():
    story = Story(*two_pools(slots=1), max_queue_requests=4, tenant_queue_share=0.5)
    story.want("r0", tenant="many")
    assert rejects(story.want("r1", tenant="many") + story.want("r2", tenant="many")) == []
    (reject,) = rejects(story.want("r3", tenant="many"))
    assert type(reject.error) is QueueFull
    assert rejects(story.want("r4", tenant="few")) == []


@pytest.mark.parametrize(
    ("waiting", "who", "is_let_in"),
    [
        (load(10, standings={2: 10}), newcomer(standing=1), True),
        (load(10, standings={2: 10}), newcomer(standing=1, num_requests=2), False),
        (load(11, standings={2: 11}), newcomer(standing=1), False),
        (load(10, standings={2: 10}), newcomer(standing=2), False),
        (load(11, standings={1: 1, 2: 10}), newcomer(standing=1), False),
        (load(11, standings={1: 1, 2: 10}), newcomer(standing=0), False),
        (load(9, 990, standings={2: 9}), newcomer(standing=1), True),
        (load(9, 990, standings={1: 1, 2: 8}), newcomer(standing=1), False),
        (load(10, standings={}), newcomer(standing=1), False),
    ],
    ids=[
        "first", "two of them", "over the surplus", "an equal", "second", "no surplus left",
        "tokens", "tokens, second", "unknown",
    ],
)  # fmt: skip
def test_a_queue_full_of_lower_tiers_has_a_place_for_the_first_of_a_higher_one(
    waiting, who, is_let_in
):
    assert (refusal(waiting, who, BOUNDS) is None) is is_let_in


def test_a_high_request_is_placed_at_once_though_low_ones_fill_the_queue():
    story = Story(*two_pools(slots=1), policy=Policy.PRIORITY, max_queue_requests=2)
    (running,) = grants(story.want("r0", priority="low"))
    for name in ("r1", "r2"):
        assert rejects(story.want(name, priority="low")) == []
    story.report("prefill-0")
    story.report("decode-0", running.grant_id, num_running=1, takable_blocks=(2,))
    assert [type(r.error) for r in rejects(story.want("r3", priority="low"))] == [ClusterFull]
    for number in range(4, 6):
        (high,) = grants(story.want(f"r{number}", priority="high"))
        assert story.view().num_waiting == 2
        story.done(high)
        story.report("prefill-0")


def test_nobody_goes_over_the_bound_behind_low_ones_that_have_aged():
    """P-16: they go before it, so it would fill a queue that is full already."""
    story = Story(
        *two_pools(slots=1), policy=Policy.PRIORITY, preemption=Preemption.OFF, aging_s=2.0,
        max_queue_requests=2,
    )  # fmt: skip
    for name in ("r0", "r1", "r2"):
        assert rejects(story.want(name, priority="low")) == []
    story.now += 1.9
    assert story.view().waiting_standings == {2: 2}
    assert rejects(story.want("h1", priority="high")) == []
    story.planner.cancel_want("h1", 0, story.now)
    story.now += 0.2
    assert story.view().waiting_standings == {0: 2}
    (reject,) = rejects(story.want("h2", priority="high"))
    assert isinstance(reject.error, ClusterFull)
    for name in ("r1", "r2"):
        story.planner.cancel_want(name, 0, story.now)
    assert story.view().waiting_standings == {}


def test_a_higher_tier_is_let_in_where_a_lower_one_would_be_late():
    story = busy(policy=Policy.PRIORITY, aging_s=60.0)
    (reject,) = rejects(story.want("low", priority="low", remaining_s=1.0))
    assert isinstance(reject.error, ClusterFull)
    assert rejects(story.want("high", priority="high", remaining_s=1.0)) == []
    aged = busy(policy=Policy.PRIORITY, aging_s=5.0)
    (reject,) = rejects(aged.want("high", priority="high", remaining_s=1.0))
    assert isinstance(reject.error, ClusterFull), "two that have aged go first"


def test_a_view_tells_routers_what_they_ask_by():
    story = Story(
        make_pool("both", two_pools()[0].role.MIXED, slots=1),
        policy=Policy.PRIORITY, fair_tenants=True, max_queue_tokens=77, tenant_queue_share=0.25,
        preemption=Preemption.OFF,
    )  # fmt: skip
    story.want("r0")
    story.want("r1", tenant="a", priority="high")
    story.want("r2", tenant="a", priority="low")
    view = story.view()
    assert (view.waiting_tenants, view.waiting_standings) == ({"a": 2}, {0: 1, 2: 1})
    assert (view.max_queue_tokens, view.tenant_queue_share) == (77, 0.25)
    assert view.are_tenants_fair
