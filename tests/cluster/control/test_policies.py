"""Orders, tiers, batching and reservations of the whole cluster's queue, as stories."""

from dataclasses import replace

import pytest

from cluster.config import Batching, Policy, Preemption, Role
from cluster.errors import InvalidRequest
from tests.cluster.control.factory import grants, make_pool, rejects, two_pools
from tests.cluster.control.story import Story


def granted_in_order(story, first, names):
    """End the one grant there is, again and again; the order in which the others follow."""
    seen, grant = [], first
    while len(seen) < len(names):
        (grant,) = grants(story.done(grant))
        seen.append(grant.request_id)
    return seen


def test_the_least_expected_work_goes_first():
    story = Story(*two_pools(slots=1), policy=Policy.SJF)
    (first,) = grants(story.want("r"))
    story.want("long", num_prompt_tokens=100, max_tokens=100)
    story.want("short", num_prompt_tokens=20, max_tokens=10)
    story.want("hinted", num_prompt_tokens=20, max_tokens=100, expected_tokens=2)
    names = ["hinted", "short", "long"]
    assert granted_in_order(story, first, names) == names


def test_what_a_tenants_outputs_were_like_tells_what_its_next_ones_will_be():
    """It goes before a smaller ``max_tokens`` of one whose outputs nobody has seen."""
    story = Story(*two_pools(slots=1), policy=Policy.SJF)
    (first,) = grants(story.want("r", tenant="brief", max_tokens=100))
    (second,) = [*grants(story.want("s", tenant="brief")), *grants(story.done(first, 2))]
    for name, fields in {
        "unknown": {"tenant": "new", "max_tokens": 50},
        "brief": {"tenant": "brief", "max_tokens": 100},
        "hinted": {"tenant": "brief", "max_tokens": 100, "expected_tokens": 70},
    }.items():
        story.want(name, **fields)
    names = ["brief", "unknown", "hinted"]
    assert granted_in_order(story, second, names) == names


def test_higher_tiers_go_first_until_somebody_has_aged():
    story = Story(
        *two_pools(slots=1), policy=Policy.PRIORITY, aging_s=5.0, preemption=Preemption.OFF
    )
    (first,) = grants(story.want("r"))
    for name, fields in {
        "low": {"priority": "low"},
        "aged": {"priority": "low", "waited_s": 6.0},
        "plain": {},
        "high": {"priority": "high"},
        "higher": {"priority": "high"},
    }.items():
        story.want(name, **fields)
    names = ["aged", "high", "higher", "plain", "low"]
    assert granted_in_order(story, first, names) == names


@pytest.mark.parametrize(
    ("rule", "older", "younger"),
    [
        ({"policy": Policy.PRIORITY}, {"priority": "low"}, {"priority": "high"}),
        ({"fair_tenants": True}, {"tenant": "served"}, {"tenant": "new"}),
    ],
    ids=["tiers", "tenants"],
)
def test_a_younger_one_that_goes_first_does_not_stand_in_the_way_of_older_ones(
    rule, older, younger
):
    """A large want has aged: who came later may not pass it, who came within its bound may.

    The younger one is looked at first, and may not pass; the older one of its size still may.
    """
    story = Story(*two_pools(slots=2), aging_s=5.0, **rule)
    (ends,) = grants(story.want("ends", tenant="served"))
    assert grants(story.want("stays", tenant="served", num_prompt_tokens=200))
    assert story.want("large", waited_s=6.0, num_prompt_tokens=900, max_tokens=64) == []
    assert story.want("older", waited_s=2.0, **older) == []
    assert story.want("younger", **younger) == []
    (grant,) = grants(story.done(ends))
    assert grant.request_id == "older"


def test_a_tier_that_there_is_not_is_refused():
    (reject,) = rejects(Story().want("r", priority="gold"))
    assert isinstance(reject.error, InvalidRequest)
    assert reject.error.field == "priority"


def test_tenants_get_equal_shares_of_tokens():
    """One tenant's flood of long requests beside another's few short ones."""
    story = Story(*two_pools(slots=1), fair_tenants=True, aging_s=1.0)
    (grant,) = grants(story.want("r"))
    served = {"flood": 0, "few": 0}
    sizes = {"flood": (200, 50), "few": (20, 5)}
    for i in range(60):
        story.want(f"flood-{i}", tenant="flood", num_prompt_tokens=200, max_tokens=50)
    for i in range(300):
        story.now += 0.05
        story.want(f"few-{i}", tenant="few", num_prompt_tokens=20, max_tokens=5)
        (grant,) = grants(story.done(grant, 5))
        tenant = grant.request_id.split("-")[0]
        served[tenant] += sum(sizes[tenant])
        if served["flood"] == 60 * 250:
            break
    assert max(served.values()) <= 2 * min(served.values()), served


def test_what_an_output_had_less_than_expected_is_given_back_in_its_tier():
    """Its tenant's next one is counted with what there was, not with what might have been."""
    rule = {"policy": Policy.PRIORITY, "fair_tenants": True, "preemption": Preemption.OFF}
    story = Story(*two_pools(slots=1), **rule)
    (first,) = grants(story.want("r", tenant="o", priority="high"))
    story.want("long", tenant="b", priority="high", num_prompt_tokens=150)
    story.want("may be long", tenant="z", priority="high", max_tokens=200)
    story.want("own", tenant="z", priority="high")
    story.want("other", tenant="b", priority="high")
    names = ["long", "may be long", "own", "other"]
    assert granted_in_order(story, first, names) == names


@pytest.mark.parametrize("batching", [Batching.STATIC, Batching.DYNAMIC])
def test_nothing_is_granted_to_a_batch_that_runs(batching):
    decode = replace(make_pool("decode", Role.DECODE, slots=4), batching=batching, batch_size=2)
    story = Story(
        make_pool("prefill", Role.PREFILL), decode, preemption=Preemption.OFF, aging_s=100.0
    )
    first, second = grants(story.want("r1")) + grants(story.want("r2"))
    assert grants(story.want("r3")) == [], "two is its size"
    for worker_id in ("prefill-0", "decode-0"):
        story.report(worker_id, first.grant_id, second.grant_id, num_running=2)
    story.report("prefill-0")
    assert grants(story.report("decode-0", second.grant_id, num_running=1)) == []
    (third,) = grants(story.report("decode-0"))
    assert third.request_id == "r3"


def test_without_preemption_the_whole_output_is_counted():
    pools = (make_pool("prefill", Role.PREFILL), make_pool("decode", Role.DECODE, 512, 8))
    story = Story(*pools, preemption=Preemption.OFF)
    assert grants(story.want("r1", num_prompt_tokens=16, max_tokens=300))
    assert grants(story.want("r2", num_prompt_tokens=16, max_tokens=300)) == []
    story = Story(*pools)
    assert grants(story.want("r1", num_prompt_tokens=16, max_tokens=300))
    assert grants(story.want("r2", num_prompt_tokens=16, max_tokens=300)), "it may grow"


def test_few_of_many_are_looked_at_and_the_pair_is_as_good():
    """The shortlists find the same pair as all pairs would."""
    story = Story(*two_pools(slots=8), counts={"prefill": 30, "decode": 30})
    story.report("prefill-17", prefill_per_token_s=0.0001)
    story.report("decode-23", step_base_s=0.001)
    (grant,) = grants(story.want("r"))
    assert (grant.prefill.worker_id, grant.decode.worker_id) == ("prefill-17", "decode-23")
    assert "of 64" in grant.reason
