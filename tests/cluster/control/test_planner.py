"""The planner as stories: what is placed where, who waits, who is told what."""

import dataclasses

import pytest

from cluster.config import LocalPrefill, Role
from cluster.control.decisions import AbortLegs
from cluster.control.facts import BlockCounts, Health, TransferSample
from cluster.control.membership import LEFT_FOR_FAULT
from cluster.control.planner import Planner
from cluster.errors import DeadlineExceeded, InvalidRequest, NoWorker, QueueFull, StartupError
from tests.cluster.control.factory import (
    deaths,
    grants,
    make_config,
    make_pool,
    make_report,
    make_want,
    rejects,
    two_pools,
)
from tests.cluster.control.story import SETTINGS, Story


def test_a_want_gets_a_pair_with_a_handoff():
    story = Story()
    (grant,) = grants(story.want())
    assert grant.term == 7
    assert grant.prefill.worker_id == "prefill-0"
    assert grant.decode.worker_id == "decode-0"
    assert grant.handoff_id
    assert grant.predicted_s == pytest.approx(0.032)
    assert story.planner.view(story.now).num_granted == 1


def test_one_output_token_needs_no_decode_worker():
    (grant,) = grants(Story().want(max_tokens=1))
    assert (grant.prefill.worker_id, grant.decode, grant.handoff_id) == ("prefill-0", None, "")


@pytest.mark.parametrize("max_tokens", [1, 16])
def test_a_mixed_worker_serves_alone(max_tokens):
    (grant,) = grants(Story(make_pool("both", Role.MIXED)).want(max_tokens=max_tokens))
    assert (grant.prefill, grant.decode.worker_id, grant.handoff_id) == (None, "both-0", "")


def test_cost_decides_between_a_pair_and_a_mixed_worker():
    pools = (*two_pools(), make_pool("both", Role.MIXED))
    story = Story(*pools)
    (first,) = grants(story.want("r1"))
    assert first.prefill is None, "no transfer is cheaper than any"
    story.report("both-0", first.grant_id, num_running=1, queued_tokens=1000)
    (second,) = grants(story.want("r2"))
    assert second.prefill is not None, "its queue costs more than a transfer"


def test_a_mixed_worker_stands_in_for_a_role_without_a_pool():
    story = Story(make_pool("decode", Role.DECODE), make_pool("both", Role.MIXED))
    story.report("both-0", num_running=2)
    (grant,) = grants(story.want())
    assert (grant.prefill.worker_id, grant.decode.worker_id) == ("both-0", "decode-0")


def test_slots_bound_what_is_granted_and_an_ended_leg_frees_one():
    story = Story()
    first, second = grants(story.want("r1")) + grants(story.want("r2"))
    assert grants(story.want("r3")) == []
    story.report("decode-0", first.grant_id, second.grant_id)
    assert grants(story.planner.done(first.grant_id, 16, story.now)) == [], "still reported"
    (third,) = grants(story.report("decode-0", second.grant_id))
    assert third.request_id == "r3"


def test_blocks_count_what_is_promised_and_what_is_used():
    story = Story(*two_pools(kv_tokens=256, slots=8))
    first, second = grants(story.want("r1", num_prompt_tokens=80)) + grants(
        story.want("r2", num_prompt_tokens=80)
    )
    assert grants(story.want("r3", num_prompt_tokens=80)) == [], "6 + 6 of 16 blocks are promised"
    held = (first.grant_id, second.grant_id)
    story.report("prefill-0")
    assert grants(story.report("decode-0", *held, blocks=BlockCounts(free=16))) == []
    story.report("decode-0", second.grant_id, blocks=BlockCounts(free=5, held=11))
    assert story.planner.view(story.now).num_waiting == 1, "the survivor has grown"
    story.report("decode-0", second.grant_id, blocks=BlockCounts(free=10, held=6))
    assert story.planner.view(story.now).num_waiting == 0


def test_the_last_token_needs_no_kv():
    story = Story(*two_pools(kv_tokens=64))
    (grant,) = grants(story.want("r1", num_prompt_tokens=32, max_tokens=33))
    story.planner.done(grant.grant_id, 33, story.now)
    (reject,) = rejects(story.want("r2", num_prompt_tokens=32, max_tokens=34))
    assert "room for 33" in reject.error.message


def test_a_grown_leg_does_not_hide_one_that_holds_nothing_yet():
    """Two legs of 6 blocks are held; one has grown to 10, the other waits for its offer."""
    story = Story(*two_pools(kv_tokens=320, slots=8))
    first, second = grants(story.want("r1", num_prompt_tokens=80)) + grants(
        story.want("r2", num_prompt_tokens=80)
    )
    story.report("prefill-0")
    story.report(
        "decode-0",
        first.grant_id,
        second.grant_id,
        blocks=BlockCounts(free=10, held=10),
        unreserved_grants=(second.grant_id,),
    )
    assert grants(story.want("r3", num_prompt_tokens=80)) == [], "10 + 6 of 20 blocks are taken"
    (third,) = grants(
        story.report("decode-0", first.grant_id, blocks=BlockCounts(free=10, held=10))
    )
    assert third.request_id == "r3"


def test_run_ahead_is_bounded_but_one_prompt_always_goes():
    never = LocalPrefill.NEVER
    story = Story(*two_pools(slots=8), run_ahead_tokens=100, local_prefill=never)
    (first,) = grants(story.want("r1", num_prompt_tokens=400))
    assert grants(story.want("r2", num_prompt_tokens=40)) == []
    assert grants(story.report("prefill-0", first.grant_id, queued_tokens=80)) == []
    (second,) = grants(story.report("prefill-0", first.grant_id, queued_tokens=10))
    assert second.request_id == "r2"


def test_first_come_first_served_by_all_the_time_waited():
    story = Story(*two_pools(slots=1))
    (first,) = grants(story.want("r1"))
    story.want("young")
    story.want("old", waited_s=5.0)
    (second,) = grants(story.planner.done(first.grant_id, 1, story.now))
    assert second.request_id == "old"
    (third,) = grants(story.planner.done(second.grant_id, 1, story.now))
    assert third.request_id == "young"


def test_a_small_want_passes_one_without_room_within_the_aging_bound():
    """P-16: nothing that has room waits, and nobody is passed for ever."""
    story = Story(*two_pools(slots=8, kv_tokens=256), aging_s=0.4)
    (first,) = grants(story.want("r1", num_prompt_tokens=120))
    assert grants(story.want("big", num_prompt_tokens=200)) == []
    (small,) = grants(story.want("small", num_prompt_tokens=16))
    assert small.request_id == "small"
    story.now += 0.5
    for worker_id in ("prefill-0", "decode-0"):
        story.report(worker_id, first.grant_id, small.grant_id)
    story.report("prefill-0")
    story.report("decode-0", first.grant_id)
    assert grants(story.want("young", num_prompt_tokens=16)) == [], "the room is held for big"
    freed = grants(story.report("decode-0"))
    assert [grant.request_id for grant in freed] == ["big", "young"], "the one with room follows"


def test_what_an_aged_want_lacks_is_held_and_no_other_worker():
    story = Story(*two_pools(slots=8, kv_tokens=256), aging_s=0.001)
    (first,) = grants(story.want("r1", num_prompt_tokens=120))
    assert grants(story.want("big", num_prompt_tokens=200)) == []
    story.now += 0.01
    assert grants(story.want("small", num_prompt_tokens=16)) == []
    story.report("prefill-0", first.grant_id)
    story.report("prefill-0")
    (single,) = grants(story.want("single", num_prompt_tokens=16, max_tokens=1))
    assert single.request_id == "single", "the prefill worker is not what the others lack"


def test_a_want_that_only_the_big_pool_holds_does_not_stop_the_others():
    big = make_pool("big", Role.DECODE, kv_tokens=2048, slots=1)
    story = Story(*two_pools(slots=1), big)
    (first,) = grants(story.want("r1", num_prompt_tokens=1000, max_tokens=500))
    assert first.decode.pool == "big"
    assert grants(story.want("r2", num_prompt_tokens=1000, max_tokens=500)) == []
    story.report("prefill-0", first.grant_id)
    story.report("prefill-0")
    (small,) = grants(story.want("small"))
    assert small.decode.pool == "decode"
    assert grants(story.want("small2")) == [], "the big worker is held for r2"


def test_one_that_gives_way_no_more_is_counted_with_all_that_may_come():
    """P-15: its worker gives it all its blocks at once, and may not be sent more than it holds."""
    sizes = {"num_prompt_tokens": 32, "max_tokens": 800}
    story = Story(*two_pools(slots=8), max_preemptions=2)
    assert len(grants(story.want("once", **sizes, num_preemptions=1))) == 1
    assert len(grants(story.want("spared", **sizes, num_preemptions=2))) == 1
    assert grants(story.want("late", num_prompt_tokens=128)) == [], "96 + 832 of 1024"
    assert len(grants(story.want("small", num_prompt_tokens=32))) == 1


def test_one_token_of_a_prompt_that_only_a_mixed_worker_holds():
    story = Story(*two_pools(), make_pool("both", Role.MIXED, kv_tokens=2048))
    (grant,) = grants(story.want(num_prompt_tokens=1500, max_tokens=1))
    assert (grant.prefill, grant.decode.pool) == (None, "both")


def test_equal_workers_take_turns_as_pairs():
    story = Story(*two_pools(slots=8), counts={"prefill": 2, "decode": 2})
    seen = []
    for index in range(8):
        (grant,) = grants(story.want(f"r{index}"))
        seen.append((grant.prefill.worker_id, grant.decode.worker_id))
        story.planner.done(grant.grant_id, 0, story.now)
    assert len(set(seen[:4])) == 4, "every pair is used, so every link is measured"
    assert seen[:4] == seen[4:]


def test_a_slow_link_is_avoided_until_its_estimate_has_aged():
    story = Story(*two_pools(slots=8), counts={"decode": 2})
    slow = TransferSample(peer_worker_id="decode-0", num_bytes=4096, seconds=0.5)
    fast = TransferSample(peer_worker_id="decode-1", num_bytes=4096, seconds=0.001)
    story.report("prefill-0", transfers=(slow,) * 3 + (fast,) * 30)

    def chosen():
        picks = []
        for index in range(4):
            (grant,) = grants(story.want(f"r{index}-{story.now}"))
            picks.append(grant.decode.worker_id)
            story.planner.done(grant.grant_id, 0, story.now)
        return set(picks)

    assert chosen() == {"decode-1"}
    (link,) = [v for v in story.planner.view(story.now).links if v.decode_worker_id == "decode-0"]
    assert (link.num_transfers, link.num_bytes, link.last_s) == (3, 3 * 4096, 0.5)
    story.advance(61, reporting=tuple(story.workers))
    assert chosen() == {"decode-0", "decode-1"}


def test_a_faster_worker_is_preferred_and_noise_is_not():
    story = Story(*two_pools(slots=8), counts={"decode": 2})
    for worker_id, step_s in (("decode-0", 0.0103), ("decode-1", 0.0101)):
        story.report(worker_id, step_base_s=step_s, step_per_seq_s=0.001)
    first, second = grants(story.want("r1")) + grants(story.want("r2"))
    assert {first.decode.worker_id, second.decode.worker_id} == {"decode-0", "decode-1"}
    story.planner.done(first.grant_id, 0, story.now)
    story.planner.done(second.grant_id, 0, story.now)
    story.report("decode-0", step_base_s=0.03, step_per_seq_s=0.001)
    assert {grants(story.want(f"s{i}"))[0].decode.worker_id for i in range(2)} == {"decode-1"}


def test_the_same_want_gets_the_same_grant_while_it_lives():
    story = Story()
    (first,) = grants(story.want())
    assert grants(story.want()) == [first]
    story.planner.done(first.grant_id, 3, story.now)
    (second,) = grants(story.want(attempt=1))
    assert second.grant_id != first.grant_id


def test_a_grant_that_nobody_reports_is_taken_back():
    story = Story(*two_pools(slots=1))
    (lost,) = grants(story.want("r1"))
    story.want("r2")
    decisions = story.advance(3, reporting=tuple(story.workers))
    assert [grant.request_id for grant in grants(decisions)] == ["r2"]
    story.advance(3, reporting=tuple(story.workers))
    (again,) = grants(story.want("r1"))
    assert again.grant_id != lost.grant_id


def test_a_leg_that_shows_up_late_counts_again():
    story = Story(*two_pools(slots=1))
    (late,) = grants(story.want("r1"))
    story.advance(2.5, reporting=tuple(story.workers))
    story.report("decode-0", late.grant_id)
    assert grants(story.want("r2")) == []


def test_a_full_queue_refuses_with_a_time_to_come_back():
    story = Story(*two_pools(slots=1), max_queue_requests=1)
    story.want("r1")
    story.want("r2")
    (reject,) = rejects(story.want("r3"))
    assert isinstance(reject.error, QueueFull)
    assert reject.error.retry_after_s >= 1.0
    assert rejects(story.want("r2")) == [], "a want that is sent again is in the queue already"


@pytest.mark.parametrize(
    "changes", [{"is_resent": True}, {"attempt": 1}, {"cached_on": "prefill-0-i"}]
)
def test_who_was_let_in_before_is_not_refused_by_a_full_queue(changes):
    story = Story(*two_pools(slots=1), max_queue_requests=1)
    story.want("r1")
    story.want("r2")
    assert rejects(story.want("r3", waited_s=0.2)) != [], "a first want has waited at its router"
    assert rejects(story.want("r4", waited_s=0.2, **changes)) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_prompt_tokens": 1020, "max_tokens": 16}, "max_tokens"),
        ({"num_prompt_tokens": 1025, "max_tokens": 1}, "prompt"),
        ({"num_prompt_tokens": 1024, "max_tokens": 2}, "max_tokens"),
        ({"num_prompt_tokens": 4000}, "prompt"),
    ],
)
def test_what_can_never_fit_is_refused_by_name(changes, field):
    (reject,) = rejects(Story().want(**changes))
    assert isinstance(reject.error, InvalidRequest)
    assert reject.error.field == field


def test_the_largest_pool_decides_what_fits_and_who_serves_it():
    big = make_pool("big", Role.DECODE, kv_tokens=2048)
    story = Story(*two_pools(), big)
    (grant,) = grants(story.want(num_prompt_tokens=1000, max_tokens=500))
    assert grant.decode.pool == "big"


def test_a_lacking_decode_worker_is_told_at_once_after_the_reconcile_window():
    story = Story()
    assert deaths(story.leave("decode-0")) == [], "its legs run on; nothing more is placed there"
    (reject,) = rejects(story.want())
    assert isinstance(reject.error, NoWorker)
    assert reject.error.retry_after_s is not None
    assert "decode" in reject.error.message


def test_nobody_is_rejected_within_the_reconcile_window():
    config = make_config(max_queue_requests=1)
    planner = Planner(config, term=1, settings=SETTINGS, now=0.0)
    assert planner.want("a", make_want("r1"), 0.1) == []
    assert planner.want("a", make_want("r2"), 0.1) == []
    decisions = [d for tenth in range(1, 29) for d in planner.tick(tenth / 10)]
    assert decisions == []
    assert len(rejects(planner.tick(3.01))) == 2


def test_a_deadline_ends_a_want_in_the_queue():
    story = Story(*two_pools(slots=1))
    story.want("r1")
    story.want("r2", remaining_s=1.0)
    (reject,) = rejects(story.advance(1.5, reporting=tuple(story.workers)))
    assert isinstance(reject.error, DeadlineExceeded)


def test_a_silent_worker_is_suspected_then_dead():
    story = Story(counts={"decode": 2})
    talking = ("prefill-0", "decode-1")
    assert deaths(story.advance(2, reporting=talking)) == []
    health = {v.worker.worker_id: v.health for v in story.planner.view(story.now).workers}
    assert health["decode-0"] is Health.SUSPECTED
    assert {grants(story.want(f"r{i}"))[0].decode.worker_id for i in range(2)} == {"decode-1"}
    assert deaths(story.advance(1.5, reporting=talking)) == ["decode-0"]


def test_a_broken_stream_suspects_at_once_and_kills_unless_it_is_back():
    story = Story(*two_pools(slots=1))
    registration = story.workers["decode-0"]
    (grant,) = grants(story.want("r1"))
    story.planner.worker_stream_lost("decode-0", registration.incarnation, story.now)
    assert grants(story.want("r2")) == []
    story.now += 0.8
    story.planner.register(registration, story.now)
    story.report("decode-0", grant.grant_id)
    assert deaths(story.advance(1.5, reporting=("prefill-0",))) == []
    story.planner.worker_stream_lost("decode-0", registration.incarnation, story.now)
    decisions = story.advance(1.5, reporting=("prefill-0",))
    assert deaths(decisions) == ["decode-0"]
    (error,) = (reject.error for reject in rejects(decisions) if reject.request_id == "r2")
    assert isinstance(error, NoWorker)


def test_a_suspected_worker_makes_requests_wait():
    story = Story()
    story.planner.worker_stream_lost("decode-0", story.workers["decode-0"].incarnation, story.now)
    assert story.want() == []


def test_our_own_absence_kills_nobody():
    story = Story()
    story.now += 30.0
    assert story.planner.tick(story.now) == []
    assert len(story.planner.view(story.now).workers) == 2


@pytest.mark.parametrize("reason", [LEFT_FOR_FAULT, "stopping"])
def test_a_leave_takes_its_grants_back_and_done_frees_the_other_leg(reason):
    story = Story(*two_pools(slots=1), counts={"prefill": 2})
    (grant,) = grants(story.want("r1"))
    assert grants(story.want("r2")) == []
    dead = grant.prefill.worker_id
    incarnation = story.workers.pop(dead).incarnation
    decisions = story.planner.worker_left(dead, incarnation, reason, story.now)
    assert deaths(decisions) == ([dead] if reason == LEFT_FOR_FAULT else [])
    assert grants(decisions) == [], "the decode leg may be starting"
    (second,) = grants(story.planner.done(grant.grant_id, 0, story.now))
    assert second.request_id == "r2"


def test_a_new_incarnation_buries_the_old_one_for_good():
    story = Story()
    old = story.workers["decode-0"]
    new = dataclasses.replace(old, incarnation="second")
    assert deaths(story.join(new)) == ["decode-0"]
    (grant,) = grants(story.want())
    assert grant.decode.incarnation == "second"
    with pytest.raises(StartupError, match="replaced"):
        story.planner.register(old, story.now)
    assert story.planner.report("decode-0", old.incarnation, make_report(old), story.now) == []


def test_avoided_incarnations_are_avoided():
    story = Story(counts={"decode": 2})
    avoided = story.workers["decode-0"].incarnation
    picks = {grants(story.want(f"r{i}", avoid=(avoided,)))[0].decode.worker_id for i in range(2)}
    assert picks == {"decode-1"}


def test_a_cancelled_want_is_never_granted():
    story = Story(*two_pools(slots=1))
    (first,) = grants(story.want("r1"))
    story.want("r2")
    story.planner.cancel_want("r2", 0, story.now)
    assert story.planner.done(first.grant_id, 0, story.now) == []


def test_a_lost_router_leaves_nothing_behind():
    story = Story(*two_pools(slots=1))
    story.planner.router_joined("b", "b-1", story.now)
    story.want("r1")
    story.want("r2")
    story.want("r3", router_id="b")
    story.planner.router_left("a", "a-1", story.now)
    assert story.planner.view(story.now).num_waiting == 1
    decisions = story.advance(3, reporting=tuple(story.workers))
    assert [grant.request_id for grant in grants(decisions)] == ["r3"]
    assert story.planner.view(story.now).num_granted == 1


def test_a_router_that_comes_back_in_time_keeps_its_grants():
    story = Story()
    (grant,) = grants(story.want())
    story.planner.router_left("a", "a-1", story.now)
    story.planner.router_joined("a", "a-1", story.now + 1.0)
    assert grants(story.want()) == [grant]


def test_legs_of_a_replaced_router_are_aborted():
    story = Story()
    (grant,) = grants(story.want())
    story.report("decode-0", grant.grant_id)
    story.planner.router_joined("a", "a-2", story.now)
    decisions = []
    for _ in range(6):
        story.now += 0.5
        story.report("prefill-0")
        story.report("decode-0", grant.grant_id)
        decisions += story.planner.tick(story.now)
    assert AbortLegs(worker_id="decode-0", grant_id=grant.grant_id) in decisions
    assert story.planner.view(story.now).num_granted == 0


def test_a_worker_gets_nothing_before_its_first_report():
    story = Story()
    new = dataclasses.replace(story.workers["decode-0"], incarnation="second")
    story.planner.register(new, story.now)
    assert grants(story.want()) == []
    assert len(grants(story.planner.report("decode-0", "second", make_report(new), story.now))) == 1
