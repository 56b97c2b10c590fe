"""A tenant's share counts what it was served: a request that ends before it has begun is not."""

import pytest

from tests.cluster.control.factory import grants, two_pools
from tests.cluster.control.story import Story

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
    return story.planner._queue._queue.tenants(0).counter(tenant)


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
