"""A tenant's share counts what it was served: a request that ends before it has begun is not."""

import pytest

from cluster.policy.fairness import TenantCounters
from tests.cluster.control.factory import grants, two_pools
from tests.cluster.control.story import SETTINGS, Story

LONG = 800
"""Tokens of a prompt that would cost its tenant many turns."""


def two_tenants(**scheduling) -> Story:
    story = Story(*two_pools(slots=1), fair_tenants=True, tenant_queue_share=1.0, **scheduling)
    assert len(grants(story.want("opener", tenant="opener"))) == 1
    return story


def ask_long(story: Story, attempt: int = 0):
    """The first tenant's long request is granted; the other one has been served a little."""
    opener = next(iter(story.planner._ledger.grants.values())).grant
    story.want("long", tenant="a", num_prompt_tokens=LONG, attempt=attempt)
    (granted,) = grants(story.done(opener))
    assert granted.request_id == "long"
    return granted


def counter(story: Story, tenant: str) -> float:
    return tenants(story).counter(tenant)


def tenants(story: Story) -> TenantCounters:
    return story.planner._queue._queue.tenants(0)


@pytest.mark.parametrize("is_reported", [False, True], ids=["unseen", "queued"])
def test_a_request_that_is_cancelled_before_its_prompt_begins_costs_nothing(is_reported):
    story = two_tenants()
    before = counter(story, "a")
    grant = ask_long(story)
    assert counter(story, "a") >= before + LONG
    if is_reported:
        story.report("prefill-0", grant.grant_id, unreserved_grants=(grant.grant_id,))
    story.done(grant, 0)
    assert counter(story, "a") == before


def test_one_whose_prompt_has_begun_is_counted_with_its_prompt():
    """Else whoever cancels before the first token would be served for nothing."""
    story = two_tenants()
    before = counter(story, "a")
    grant = ask_long(story)
    story.report("prefill-0", grant.grant_id, num_running=1)
    story.done(grant, 0)
    assert counter(story, "a") == before + LONG


def test_one_that_was_preempted_before_its_first_token_has_begun():
    """Its blocks are gone, but they were computed."""
    story = two_tenants()
    before = counter(story, "a")
    grant = ask_long(story)
    story.report("prefill-0", grant.grant_id, num_running=1)
    bare = {"num_waiting": 1, "unreserved_grants": (grant.grant_id,)}
    story.report("prefill-0", grant.grant_id, **bare)
    story.done(grant, 0)
    assert counter(story, "a") == before + LONG


def test_what_came_of_a_stream_that_is_cancelled_counts_and_teaches_nothing():
    """Else whoever cancels just before the end has its output for nothing."""
    story = two_tenants()
    before = counter(story, "a")
    story.done(ask_long(story), 15, is_whole=False)
    assert counter(story, "a") == before + LONG + 15
    story.report("prefill-0")
    story.report("decode-0")
    assert len(grants(story.want("next", tenant="a", num_prompt_tokens=32, max_tokens=900))) == 1
    assert counter(story, "a") == before + LONG + 15 + 32 + 900, "it may be as long as it can"


def lose_router(story: Story, grant) -> None:
    story.planner.router_left("a", "a-1", story.now)
    story.advance(SETTINGS.router_grace_s + 1, reporting=tuple(story.workers))


def replace_router(story: Story, grant) -> None:
    story.planner.router_joined("a", "a-2", story.now)


def never_give_back(story: Story, grant) -> None:
    for worker_id in story.workers:
        story.report(worker_id)
    story.advance(10 * SETTINGS.orphan_s + 1, reporting=tuple(story.workers))


@pytest.mark.parametrize("vanish", [lose_router, replace_router, never_give_back])
def test_a_grant_that_nobody_gives_back_leaves_what_was_computed_of_it(vanish):
    """Its tenant would owe the whole of its output, which nobody has seen, for ever."""
    story = two_tenants()
    before = counter(story, "a")
    grant = ask_long(story)
    story.report("prefill-0", grant.grant_id, num_running=1)
    story.report("decode-0", grant.grant_id)
    vanish(story, grant)
    assert grant.grant_id not in story.planner._ledger.grants
    assert counter(story, "a") == before + LONG
    assert tenants(story).settled("a") == counter(story, "a")


def test_one_that_asks_again_since_its_worker_never_had_it_is_counted_once():
    story = two_tenants()
    before = counter(story, "a")
    ask_long(story)
    counted = counter(story, "a")
    story.advance(3, reporting=tuple(story.workers))
    (again,) = grants(story.want("long", tenant="a", num_prompt_tokens=LONG))
    assert counter(story, "a") == counted
    story.done(again, 4)
    assert counter(story, "a") == before + LONG + 4


def test_a_newcomer_waits_for_no_tokens_that_were_only_expected():
    """After a start nobody knows how long outputs are: each counts as the longest, and is not."""
    story = Story(
        *two_pools(kv_tokens=1 << 14, slots=16), fair_tenants=True, tenant_queue_share=1.0
    )
    asked = (story.want(f"a{i}", tenant="a", max_tokens=999) for i in range(16))
    running = [grant for decisions in asked for grant in grants(decisions)]
    assert len(running) == 16
    for name in ("a", "b"):
        for index in range(8):
            assert not grants(story.want(f"next-{name}{index}", tenant=name, max_tokens=999))
    served = []
    while running:
        story.now += 0.01
        held = [grant.grant_id for grant in running[1:]]
        decisions = story.done(running.pop(0), 10)
        for worker_id in story.workers:
            decisions += story.report(worker_id, *held)
        served += [grant.request_id[5] for grant in grants(decisions)]
    assert len(served) == 16
    assert served[:8].count("b") >= 4, served


def test_who_left_last_is_the_measure_with_what_its_last_one_came_to():
    tenants = TenantCounters()
    tenants.enters("a")
    tenants.expect("a", 1000.0)
    tenants.leaves("a")
    tenants.enters("b")
    assert tenants.counter("b") == 0.0, "nothing has come of it yet"
    tenants.settle("a", 1000.0, 300.0)
    tenants.enters("c")
    tenants.leaves("b")
    tenants.leaves("c")
    assert (tenants.counter("a"), tenants.settled("a")) == (300.0, 300.0)
    tenants.enters("a")
    tenants.leaves("a")
    tenants.enters("late")
    assert tenants.counter("late") == 300.0


def test_what_was_taken_back_counts_again_with_the_next_attempt():
    """Its first worker died before it began; it is one request, and counts once."""
    story = two_tenants()
    before = counter(story, "a")
    story.done(ask_long(story), 0)
    for attempt, num_output_tokens in ((1, 0), (2, 10)):
        (grant,) = grants(story.want("long", tenant="a", num_prompt_tokens=LONG, attempt=attempt))
        if attempt == 1:
            story.report("prefill-0", grant.grant_id, num_running=1)
        story.done(grant, num_output_tokens)
        story.report("prefill-0")
        story.report("decode-0")
    assert counter(story, "a") == before + LONG + 10
