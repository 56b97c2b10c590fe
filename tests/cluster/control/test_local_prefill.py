"""Prompts that a decode worker prefills by itself: by price, by configuration, and told as such."""

import pytest

from cluster.config import LocalPrefill, Role
from cluster.control.facts import TransferSample
from tests.cluster.control.factory import grants, make_pool, two_pools
from tests.cluster.control.story import Story

SHORT, LONG = 32, 65
ROOMY = two_pools(kv_tokens=16384, slots=8)
"""Speeds of all: 1 ms for a prompt token, 10 ms a step and 1 ms for each sequence in it."""


def story_of(**scheduling):
    return Story(*ROOMY, **scheduling)


def placed(story, request_id="r", **changes):
    (grant,) = grants(story.want(request_id, **{"num_prompt_tokens": SHORT, **changes}))
    return grant


def test_an_idle_cluster_keeps_its_pairs_even_for_one_token():
    """Nothing waits, and a transfer costs less than what it would take from others."""
    story = story_of()
    for num_tokens in (1, SHORT, LONG, 900):
        grant = placed(story, f"r{num_tokens}", num_prompt_tokens=num_tokens)
        assert grant.prefill is not None
        assert grant.reason.startswith("pair: ")


def test_a_short_prompt_does_not_wait_behind_long_ones():
    """32 ms, twice, beside at least one stream, against 500 ms of prompts before it."""
    story = story_of()
    story.report("prefill-0", queued_tokens=500)
    grant = placed(story)
    assert (grant.prefill, grant.decode.worker_id, grant.handoff_id) == (None, "decode-0", "")
    assert grant.reason.startswith("local, short: ")
    assert grant.reason.endswith("by the best pair")
    assert grant.predicted_s == pytest.approx(0.032)
    assert story.view().counters["grants_local_short"] == 1
    assert placed(story, "long", num_prompt_tokens=LONG).prefill is not None


def test_streams_that_would_stand_still_count():
    """Beside 7 streams 32 tokens cost 32 ms to each: more than 200 ms of waiting."""
    story = story_of()
    story.report("prefill-0", queued_tokens=200)
    story.report("decode-0", num_running=7)
    seventh = placed(story, "beside seven")
    assert seventh.prefill is not None
    story.done(seventh)
    story.report("decode-0", num_running=2)
    assert placed(story, "beside two").prefill is None


def test_a_slow_link_is_spared_a_short_prompt():
    story = story_of()
    slow = TransferSample(peer_worker_id="decode-0", num_bytes=4096, seconds=0.3)
    story.report("prefill-0", transfers=(slow,) * 5)
    assert placed(story).reason.startswith("local, short: ")


def test_who_has_no_room_with_a_prefill_worker_may_have_it_on_a_decode_worker():
    """Its run-ahead is used up, 4,096 tokens: that is how long it would wait at least."""
    story = story_of()
    story.report("prefill-0", queued_tokens=4096)
    grant = placed(story)
    assert grant.reason.endswith("by any pair, whose prefill is full")
    assert grants(story.want("long", num_prompt_tokens=LONG)) == []


def test_the_decision_has_no_memory():
    """The same loads give the same answer, whatever was decided before."""
    story, answers = story_of(), []
    for index in range(6):
        story.report("prefill-0", queued_tokens=500 * (index % 2))
        grant = placed(story, f"r{index}")
        answers.append(grant.prefill is None)
        story.done(grant)
        story.beat()
    assert answers == [False, True] * 3


def test_one_token_is_made_where_it_is_prefilled():
    story = story_of()
    story.report("prefill-0", queued_tokens=500)
    assert placed(story, max_tokens=1).decode is None


@pytest.mark.parametrize("num_tokens", [SHORT, 900])
def test_forced_on_decode_workers_prefill_all_they_can_hold(num_tokens):
    story = story_of(local_prefill=LocalPrefill.ALWAYS)
    for max_tokens in (1, 16):
        grant = placed(story, f"r{max_tokens}", num_prompt_tokens=num_tokens, max_tokens=max_tokens)
        assert grant.prefill is None
        assert grant.reason.startswith("local prefill is set: local: ")
    assert story.view().counters["grants_local_forced"] == 2


def test_forced_off_nothing_but_the_lack_of_prefill_workers_makes_it_local():
    story = story_of(local_prefill=LocalPrefill.NEVER)
    story.report("prefill-0", queued_tokens=2000)
    assert placed(story, "waits").prefill is not None
    story.leave("prefill-0")
    assert placed(story, "no other way").prefill is None
    assert story.view().counters["grants_local_fallback"] == 1


def test_a_prompt_too_long_for_decode_workers_goes_to_a_pair_though_local_is_forced():
    prefill = make_pool("prefill", Role.PREFILL, kv_tokens=2048)
    decode = make_pool("decode", Role.DECODE, kv_tokens=64)
    story = Story(prefill, decode, local_prefill=LocalPrefill.ALWAYS)
    grant = placed(story, num_prompt_tokens=100, max_tokens=1)
    assert (grant.prefill.worker_id, grant.decode) == ("prefill-0", None)


def test_a_short_one_takes_nothing_that_a_long_one_has_waited_for_too_long():
    """The aging bound holds between those that only pairs serve and those that others may."""
    story = Story(*two_pools(kv_tokens=16384, slots=1), aging_s=1.0)
    (running,) = grants(story.want("running", num_prompt_tokens=LONG))
    story.report("decode-0", running.grant_id)
    story.report("prefill-0", queued_tokens=4096)
    assert story.want("long", num_prompt_tokens=LONG) == []
    story.now += 1.5
    assert story.want("short", num_prompt_tokens=SHORT) == []
    story.done(running)
    assert grants(story.report("decode-0")) == [], "it would overtake by more than the bound"
    (next_one,) = grants(story.report("prefill-0"))
    assert next_one.request_id == "long"
