"""Legs that their workers have never reported: taken back, and their routers told."""

import pytest

from cluster.config import Role
from cluster.control.facts import ExportRef
from cluster.errors import WorkerLost
from tests.cluster.control.conftest import until
from tests.cluster.control.factory import grants, make_pool, make_want, rejects
from tests.cluster.control.story import SETTINGS, Story

LATE_S = SETTINGS.unseen_grant_s + 0.5


def after_a_while(story, **held):
    """What is said while workers report what they hold; those not named are silent."""
    decisions = []
    for _ in range(round(LATE_S / 0.5)):
        story.now += 0.5
        for worker_id, grant_ids in held.items():
            decisions += story.report(worker_id.replace("_", "-"), *grant_ids)
        decisions += story.planner.tick(story.now)
        story.planner.check()
    return decisions


def test_the_router_hears_of_a_prefill_leg_that_a_living_worker_never_had():
    story = Story()
    (grant,) = grants(story.want())
    (reject,) = rejects(after_a_while(story, prefill_0=(), decode_0=(grant.grant_id,)))
    assert (reject.request_id, reject.attempt) == (grant.request_id, grant.attempt)
    assert isinstance(reject.error, WorkerLost)
    assert reject.error.is_retryable
    assert rejects(after_a_while(story, prefill_0=(), decode_0=(grant.grant_id,))) == [], "twice"


def test_a_leg_that_its_worker_has_is_not_missed():
    story = Story()
    (grant,) = grants(story.want())
    held = (grant.grant_id,)
    assert rejects(after_a_while(story, prefill_0=held, decode_0=held)) == []


def test_a_silent_worker_may_have_it():
    """Until it is dead, which routers are told anyway."""
    story = Story()
    (grant,) = grants(story.want())
    assert rejects(after_a_while(story, decode_0=(grant.grant_id,))) == []
    assert story.view().counters["grants_taken_back"] == 1


def export_of(grant):
    return ExportRef(
        grant_id=grant.grant_id,
        worker_id=grant.prefill.worker_id,
        incarnation=grant.prefill.incarnation,
    )


def test_the_router_hears_of_a_decode_leg_too_each_time_by_the_number_of_its_want():
    """Its KV is offered in vain, and can go elsewhere without a new prefill."""
    story = Story()
    (grant,) = grants(story.want())
    held = (grant.grant_id,)
    (reject,) = rejects(after_a_while(story, prefill_0=held, decode_0=()))
    assert (reject.attempt, reject.error.worker_id) == (0, "decode-0")
    (second,) = grants(story.want(attempt=1, export=export_of(grant)))
    assert second.decode.worker_id == "decode-0"
    (reject,) = rejects(after_a_while(story, prefill_0=held, decode_0=()))
    assert (reject.attempt, reject.error.worker_id) == (1, "decode-0")


def test_of_two_legs_that_are_missing_the_router_hears_of_the_one_that_computes():
    """The grant was lost, or one start and then the other: the prompt is computed nowhere."""
    story = Story()
    grants(story.want())
    (reject,) = rejects(after_a_while(story, prefill_0=(), decode_0=()))
    assert reject.error.worker_id == "prefill-0"


def test_a_grant_that_was_lost_is_over_when_its_want_is_withdrawn():
    """CASES P-20: nobody else would ever say that nothing runs there."""
    story = Story()
    (grant,) = grants(story.want())
    assert story.entry("decode-0").unseen
    story.planner.cancel_want("r", 0, story.now)
    story.planner.check()
    assert story.view().num_granted == 0
    assert [story.entry(name).charges for name in ("prefill-0", "decode-0")] == [{}, {}]
    assert story.done(grant) == [], "it has crossed, and is given back twice"


def test_a_grant_of_an_export_that_was_lost_is_over_when_its_want_is_withdrawn():
    """CASES P-20: its lease was over first. What the prefill leg holds counts until it is gone."""
    story = Story()
    (grant,) = grants(story.want())
    story.report("prefill-0", grant.grant_id)
    grants(story.want(attempt=1, export=export_of(grant)))
    assert story.entry("decode-0").unseen
    story.planner.cancel_want("r", 1, story.now)
    story.planner.check()
    assert story.view().num_granted == 1
    assert (list(story.entry("prefill-0").charges), story.entry("decode-0").charges) == (
        [grant.grant_id],
        {},
    )
    assert story.done(grant) == []
    assert story.view().num_granted == 0


def test_a_want_of_an_export_that_still_waits_leaves_the_first_grant_alone():
    story = Story()
    (grant,) = grants(story.want())
    story.report("prefill-0", grant.grant_id)
    story.report("decode-0", is_draining=True)
    assert grants(story.want(attempt=1, export=export_of(grant))) == []
    story.planner.cancel_want("r", 1, story.now)
    assert (story.view().num_waiting, story.view().num_granted) == (0, 1)


def test_a_grant_that_is_sent_again_gives_its_workers_their_time_anew():
    """Its router's stream broke when it was on its way: only now do the legs start."""
    story = Story()
    (grant,) = grants(story.want())
    silent = {"reporting": ("prefill-0", "decode-0")}
    story.advance(SETTINGS.unseen_grant_s - 0.5, **silent)
    story.planner.router_left("a", "a-1", story.now)
    story.planner.router_joined("a", "a-1", story.now)
    assert grants(story.want(is_resent=True)) == [grant]
    assert rejects(story.advance(SETTINGS.unseen_grant_s - 0.5, **silent)) == []
    assert story.view().counters["grants_taken_back"] == 0
    held = (grant.grant_id,)
    assert rejects(after_a_while(story, prefill_0=held, decode_0=held)) == []
    assert story.view().counters["grants_taken_back"] == 0


def test_a_grant_that_is_sent_again_does_not_wait_for_legs_that_are_there():
    story = Story()
    (grant,) = grants(story.want())
    story.report("decode-0", grant.grant_id)
    assert grants(story.want(is_resent=True)) == [grant]
    story.planner.check()
    assert [len(story.entry(name).unseen) for name in ("prefill-0", "decode-0")] == [1, 0]


def test_a_local_leg_is_missed_where_it_should_be_computed():
    story = Story(make_pool("mixed", Role.MIXED))
    (grant,) = grants(story.want())
    assert grant.prefill is None
    (reject,) = rejects(after_a_while(story, mixed_0=()))
    assert isinstance(reject.error, WorkerLost)


@pytest.mark.parametrize("is_held", [False, True])
async def test_a_router_is_told_over_its_stream(is_held, cluster):
    await cluster.start()
    prefill, decode = await cluster.workers()
    router = await cluster.router()
    grant = await router.client.want(make_want())
    decode.hold(grant.grant_id)
    prefill.hold(*([grant.grant_id] if is_held else []))
    other = await router.client.want(make_want("other"))
    decode.hold(grant.grant_id, other.grant_id)
    await until(lambda: ("other", 0) in [missed[:2] for missed in router.missed])
    assert (("r", 0) in [missed[:2] for missed in router.missed]) is not is_held
    assert all(isinstance(missed[2], WorkerLost) for missed in router.missed)
    for each in (grant, other):
        router.client.done(each.grant_id, 1)
