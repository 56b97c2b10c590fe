"""When a role has no worker: decode workers prefill, and who was served waits for another."""

import pytest

from cluster.config import Role
from cluster.control.facts import ExportRef, Health
from cluster.control.planner import Planner
from cluster.errors import HandoffFailed, InvalidRequest, NoWorker
from tests.cluster.control.factory import (
    grants,
    make_config,
    make_pool,
    make_registration,
    make_report,
    make_want,
    rejects,
    two_pools,
)
from tests.cluster.control.story import SETTINGS, Story


@pytest.mark.parametrize("max_tokens", [1, 16])
def test_a_decode_worker_prefills_when_no_prefill_worker_lives(max_tokens):
    """P-19: the reason says so, and a counter counts it."""
    story = Story()
    story.leave("prefill-0")
    (grant,) = grants(story.want(max_tokens=max_tokens))
    assert (grant.prefill, grant.decode.worker_id, grant.handoff_id) == (None, "decode-0", "")
    assert grant.reason.startswith("no prefill worker: local: ")
    assert grant.predicted_s == pytest.approx(0.032), "it prefills there"
    assert story.view().counters["grants_local_fallback"] == 1


def test_of_several_decode_workers_the_cheapest_prefills():
    story = Story(*two_pools(slots=8), counts={"decode": 2})
    story.leave("prefill-0")
    story.report("decode-0", num_running=3, queued_tokens=500)
    picks = {grants(story.want(f"r{i}"))[0].decode.worker_id for i in range(2)}
    assert picks == {"decode-1"}


def test_a_fallback_waits_for_room_like_any_want():
    story = Story(*two_pools(slots=1))
    story.leave("prefill-0")
    (first,) = grants(story.want("r1"))
    assert story.want("r2") == []
    story.report("decode-0", first.grant_id)
    story.done(first)
    (second,) = grants(story.report("decode-0"))
    assert second.request_id == "r2"


def test_normal_placement_returns_with_the_role():
    story = Story(*two_pools(slots=8))
    prefill = story.workers["prefill-0"]
    story.leave("prefill-0")
    assert grants(story.want("r1"))[0].prefill is None
    story.join(prefill)
    (grant,) = grants(story.want("r2"))
    assert grant.prefill.worker_id == "prefill-0"
    assert story.view().counters["grants_local_fallback"] == 1


def test_a_suspected_prefill_worker_is_waited_for():
    """It is back or dead within 3 s; a prompt on a decode worker slows everybody there."""
    story = Story()
    incarnation = story.workers["prefill-0"].incarnation
    story.planner.worker_stream_lost("prefill-0", incarnation, story.now)
    assert story.want() == []
    (grant,) = grants(story.advance(1.5, reporting=("decode-0",)))
    assert grant.reason.startswith("no prefill worker: ")


def test_nobody_falls_back_while_prefill_workers_may_be_coming_back():
    config = make_config()
    planner = Planner(config, term=1, settings=SETTINGS, now=0.0)
    decode, prefill = (make_registration(config.pool(name)) for name in ("decode", "prefill"))
    planner.register(decode, 0.1)
    planner.report("decode-0", decode.incarnation, make_report(decode), 0.1)
    assert planner.want("a", make_want(), 0.2) == []
    planner.register(prefill, 0.3)
    (grant,) = grants(planner.report("prefill-0", prefill.incarnation, make_report(prefill), 0.3))
    assert grant.prefill is not None


def test_mixed_workers_serve_before_decode_workers_fall_back():
    story = Story(*two_pools(), make_pool("both", Role.MIXED))
    story.leave("prefill-0")
    (grant,) = grants(story.want("r1"))
    assert (grant.decode.pool, grant.reason.startswith("local")) == ("both", True)


def test_a_resumed_request_longer_than_any_prefill_worker_holds_is_prefilled_at_a_decode_worker():
    prefill = make_pool("prefill", Role.PREFILL, kv_tokens=256)
    story = Story(prefill, make_pool("decode", Role.DECODE, kv_tokens=1024))
    (reject,) = rejects(story.want("fresh", num_prompt_tokens=300))
    assert isinstance(reject.error, InvalidRequest)
    (grant,) = grants(story.want("resumed", num_prompt_tokens=300, attempt=1))
    assert grant.prefill is None
    assert grant.reason.startswith("no prefill worker that this request may use: local")


def test_a_fresh_request_without_a_decode_worker_is_refused_at_once():
    story = Story()
    story.leave("decode-0")
    (reject,) = rejects(story.want())
    assert isinstance(reject.error, NoWorker)
    assert reject.error.message == "no decode worker"


def test_who_was_served_waits_for_a_replacement():
    """P-20: the new decode worker takes what the dead one had."""
    story = Story()
    decode = story.workers["decode-0"]
    story.leave("decode-0", "fault")
    resumed = {"attempt": 1, "avoid": (decode.incarnation,)}
    assert story.want(**resumed) == []
    assert story.advance(15, reporting=("prefill-0",)) == []
    new = make_registration(story.config.pool("decode"), incarnation="second")
    (grant,) = grants(story.join(new))
    assert grant.decode.incarnation == "second"


def test_the_wait_for_a_replacement_ends():
    story = Story()
    story.leave("decode-0", "fault")
    assert story.want(attempt=1) == []
    assert story.advance(19.5, reporting=("prefill-0",)) == []
    (reject,) = rejects(story.advance(1.0, reporting=("prefill-0",)))
    assert isinstance(reject.error, NoWorker)


def test_a_replacement_that_comes_and_goes_starts_the_wait_again():
    story = Story(*two_pools(slots=1))
    decode = story.workers["decode-0"]
    story.leave("decode-0", "fault")
    assert story.want("r1", attempt=1) == []
    story.advance(15, reporting=("prefill-0",))
    story.workers["decode-0"] = decode
    story.planner.register(decode, story.now)
    story.report("decode-0", num_running=1)
    story.leave("decode-0", "fault")
    assert story.advance(15, reporting=("prefill-0",)) == []


def test_an_export_waits_for_a_replacement_and_hears_if_its_own_worker_goes():
    story = Story()
    (first,) = grants(story.want())
    story.report("prefill-0", first.grant_id)
    story.leave("decode-0", "fault")
    export = ExportRef(
        grant_id=first.grant_id,
        worker_id="prefill-0",
        incarnation=first.prefill.incarnation,
    )
    assert story.want(attempt=1, export=export) == []
    assert story.advance(5, reporting=("prefill-0",)) == []
    (reject,) = rejects(story.leave("prefill-0"))
    assert isinstance(reject.error, HandoffFailed)


def test_an_avoided_worker_that_lives_on_is_taken_when_nobody_else_comes():
    """Its link or stream broke, not it: by now it would be known to be dead."""
    story = Story()
    avoid = (story.workers["decode-0"].incarnation,)
    assert story.want(attempt=1, avoid=avoid) == []
    assert grants(story.advance(3.5, reporting=tuple(story.workers))) == []
    (grant,) = grants(story.advance(1.0, reporting=tuple(story.workers)))
    assert grant.decode.worker_id == "decode-0"
    assert not story.planner._placement._ways._known, "it was one of a kind"


def test_a_request_without_its_only_prefill_worker_goes_to_a_decode_worker():
    story = Story()
    avoid = (story.workers["prefill-0"].incarnation,)
    (grant,) = grants(story.want(attempt=1, avoid=avoid))
    assert grant.prefill is None
    assert {v.health for v in story.view().workers} == {Health.ALIVE}
