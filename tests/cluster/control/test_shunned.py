"""CASES P-26: a link that is broken costs a try now and then, not every request."""

from __future__ import annotations

import dataclasses

import pytest

from cluster.config import Policy
from cluster.control.facts import ExportRef
from cluster.control.shunned import RETRY_S
from cluster.errors import HandoffFailed
from tests.cluster.control.factory import grants, rejects, two_pools
from tests.cluster.control.story import Story

BROKEN = {"broken_links": ("decode-0-i",)}


def ends(decisions) -> tuple[str, str]:
    """The one grant's prefill and decode worker."""
    (grant,) = grants(decisions)
    return tuple(placed.worker_id if placed else "" for placed in (grant.prefill, grant.decode))


def test_another_pair_is_taken():
    story = Story(counts={"decode": 2}, local_prefill="never")
    story.report("prefill-0", **BROKEN)
    for number in range(2):
        assert ends(story.want(f"r{number}")) == ("prefill-0", "decode-1")


def test_without_another_pair_decode_workers_prefill():
    story = Story(local_prefill="never")
    story.report("prefill-0", **BROKEN)
    decisions = story.want()
    assert ends(decisions) == ("", "decode-0")
    assert grants(decisions)[0].reason.startswith("no link that works: ")
    story.report("prefill-0")
    assert ends(story.want("later")) == ("prefill-0", "decode-0")


def test_a_higher_tier_takes_a_place_over_a_link_that_works_before_a_decode_worker_prefills():
    story = Story(
        *two_pools(slots=1), counts={"decode": 2}, local_prefill="never", policy=Policy.PRIORITY
    )
    lows = [*grants(story.want("l0", priority="low")), *grants(story.want("l1", priority="low"))]
    held = {grant.decode.worker_id: grant.grant_id for grant in lows}
    story.done(next(grant for grant in lows if grant.decode.worker_id == "decode-0"))
    story.report("prefill-0", **BROKEN)
    story.report("decode-0")
    story.report("decode-1", held["decode-1"], num_running=1, takable_blocks=(2,))
    assert ends(story.want("high", priority="high")) == ("prefill-0", "decode-1")
    assert ends(story.want("low", priority="low")) == ("", "decode-0")


def test_it_is_tried_again_now_and_then_by_one_request():
    story = Story(local_prefill="never")
    pair, alone = ("prefill-0", "decode-0"), ("", "decode-0")
    story.report("prefill-0", **BROKEN)
    for round_number in range(2):
        story.now += RETRY_S
        story.report("prefill-0", **BROKEN)
        story.report("decode-0")
        for number, expected in enumerate((pair, alone)):
            decisions = story.want(f"r{round_number}-{number}")
            assert ends(decisions) == expected
            story.done(grants(decisions)[0])


def test_an_export_that_reaches_nobody_is_computed_again():
    """Its worker would try the broken link again and again, until the deadline."""
    story = Story(local_prefill="never")
    (grant,) = grants(story.want())
    story.report("prefill-0", grant.grant_id, **BROKEN)
    export = ExportRef(grant_id=grant.grant_id, worker_id="prefill-0", incarnation="prefill-0-i")
    (reject,) = rejects(story.want(attempt=1, export=export))
    assert isinstance(reject.error, HandoffFailed)


def test_a_restarted_worker_is_another_one():
    story = Story(local_prefill="never")
    story.report("prefill-0", **BROKEN)
    old = story.workers["decode-0"]
    story.leave("decode-0")
    story.join(dataclasses.replace(old, incarnation="new"))
    assert ends(story.want()) == ("prefill-0", "decode-0")


@pytest.mark.parametrize("who", ["prefill-0", "decode-0"])
def test_nothing_is_kept_of_those_who_left(who):
    story = Story(local_prefill="never")
    story.report("prefill-0", **BROKEN)
    story.leave(who)
    story.beat()
    assert story.planner._ledger.shunned._retry_at == {}
