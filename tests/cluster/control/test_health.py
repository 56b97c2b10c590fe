"""Who can serve: judged by steps, not by what a worker says of itself (CASES P-26)."""

from __future__ import annotations

import pytest

from cluster.config import LocalPrefill, Role
from cluster.control.facts import Health
from cluster.control.readiness import can_serve, may_wait, missing_roles
from tests.cluster.control.factory import deaths, grants, make_pool, two_pools
from tests.cluster.control.story import SETTINGS, Story

PATIENCE_S = 5.0
HANGS = {"num_steps": 7, "num_running": 1, "step_patience_s": PATIENCE_S}
"""What is reported in the midst of a step."""


def hang(story: Story, worker_id: str, seconds: float) -> list:
    """Let time pass while a worker reports, each second, that it is still in the same step."""
    decisions = []
    for _ in range(round(seconds)):
        story.now += 1.0
        for each in story.workers:
            decisions += story.report(each, **(HANGS if each == worker_id else {}))
        decisions += story.planner.tick(story.now)
        story.planner.check()
    return decisions


def health_of(story: Story, worker_id: str) -> Health:
    return next(w.health for w in story.view().workers if w.worker.worker_id == worker_id)


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_a_worker_that_makes_no_step_is_not_there_for_its_role(role):
    """P-26: within its patience and two reports; nothing is taken from it, it may come back."""
    story = Story()
    worker_id = f"{role.value}-0"
    assert hang(story, worker_id, PATIENCE_S) == []
    assert health_of(story, worker_id) is Health.ALIVE
    assert hang(story, worker_id, 2) == [], "its requests were taken away"
    assert health_of(story, worker_id) is Health.STALLED
    view = story.view()
    assert missing_roles(view) == (role,)
    # Decode workers prefill where nobody else does.
    assert can_serve(view) is (role is Role.PREFILL)
    assert may_wait(view), "it may be back before it is given up"
    story.report(worker_id, num_steps=8, num_running=1, step_patience_s=PATIENCE_S)
    assert health_of(story, worker_id) is Health.ALIVE
    assert missing_roles(story.view()) == ()


def test_a_stalled_worker_gets_no_grants():
    story = Story(counts={"decode": 2})
    hang(story, "decode-0", PATIENCE_S + 2)
    (grant,) = grants(story.want())
    assert grant.decode.worker_id == "decode-1"


def test_fresh_work_goes_by_a_prefill_worker_that_hangs():
    """P-26: the decode worker prefills until it moves again; its heir is not waited for."""
    story = Story(*two_pools(slots=8))
    hang(story, "prefill-0", PATIENCE_S + 2)
    for number, max_tokens in enumerate((1, 16)):
        (grant,) = grants(story.want(f"r{number}", max_tokens=max_tokens))
        assert (grant.prefill, grant.decode.worker_id) == (None, "decode-0")
        assert grant.reason.startswith("no prefill worker that this request may use: ")
    story.report("prefill-0", num_steps=8, num_running=1, step_patience_s=PATIENCE_S)
    (grant,) = grants(story.want("later"))
    assert grant.prefill.worker_id == "prefill-0"


def test_who_waited_for_it_goes_on_once_it_hangs():
    """It had no room for the request; that it hangs is news, and no tick is waited for."""
    story = Story(*two_pools(slots=8), local_prefill=LocalPrefill.NEVER)
    full = {**HANGS, "queued_tokens": 1 << 20}
    story.report("prefill-0", **full)
    assert story.want() == []
    story.now += PATIENCE_S + 1
    (grant,) = grants(story.report("prefill-0", **full))
    assert (grant.prefill, grant.decode.worker_id) == (None, "decode-0")


def test_a_mixed_worker_does_what_the_one_that_hangs_would():
    pools = (*two_pools(slots=8), make_pool("mixed", Role.MIXED, slots=8))
    story = Story(*pools)
    hang(story, "decode-0", PATIENCE_S + 2)
    (grant,) = grants(story.want())
    assert (grant.prefill, grant.decode.worker_id) == (None, "mixed-0")


def test_with_nobody_else_it_is_waited_for():
    """It may go on, and is dead or replaced in seconds otherwise."""
    story = Story()
    hang(story, "decode-0", PATIENCE_S + 2)
    assert story.want() == []
    (grant,) = grants(story.report("decode-0", num_steps=8))
    assert grant.prefill.worker_id == "prefill-0"


def test_a_stalled_worker_that_falls_silent_dies_like_any_other():
    story = Story()
    hang(story, "decode-0", PATIENCE_S + 2)
    decisions = story.advance(SETTINGS.dead_after_s + 1, reporting=["prefill-0"])
    assert deaths(decisions) == ["decode-0"]


def test_whoever_is_declared_dead_is_counted_also_when_it_comes_back():
    """Under its old incarnation: nothing else in the view shows that it was thought dead."""
    story = Story(counts={"decode": 2})
    assert story.view().counters["workers_died"] == 0
    story.advance(SETTINGS.dead_after_s + 1, reporting=["prefill-0", "decode-0"])
    before = {w.worker.incarnation for w in story.view().workers}
    story.join(story.workers["decode-1"])
    assert before < {w.worker.incarnation for w in story.view().workers}
    assert story.view().counters["workers_died"] == 1
    story.leave("decode-1")
    assert story.view().counters["workers_died"] == 1, "it left in peace"
    story.leave("decode-0", "fault")
    assert story.view().counters["workers_died"] == 2


def test_busy_is_not_stalled():
    """P-26: each report is in the midst of a step, of another one each time."""
    story = Story()
    for number in range(120):
        story.now += 1.0
        for worker_id in story.workers:
            full = {"num_running": 2, "num_waiting": 50, "step_patience_s": PATIENCE_S}
            story.report(worker_id, num_steps=number, **full)
        assert story.planner.tick(story.now) == []
        assert missing_roles(story.view()) == ()


def test_a_long_step_has_as_long_as_it_says():
    """A worker predicts its steps: a giant prompt's may take a minute."""
    story = Story()
    long = {**HANGS, "step_patience_s": 60.0}
    for _ in range(60):
        story.now += 1.0
        story.report("prefill-0", **long)
        story.report("decode-0")
        story.planner.tick(story.now)
    assert missing_roles(story.view()) == ()


def test_idle_for_ten_minutes_is_still_ready():
    """P-26: no step is made, and none runs."""
    story = Story()
    assert story.advance(600.0, reporting=["prefill-0", "decode-0"]) == []
    view = story.view()
    assert missing_roles(view) == ()
    assert can_serve(view)
    assert {worker.health for worker in view.workers} == {Health.ALIVE}


def test_a_step_that_ran_while_we_were_away_is_judged_anew():
    """The control plane itself was stopped: what it has not seen is nobody's fault."""
    story = Story()
    hang(story, "decode-0", 1)
    story.now += 30.0
    story.planner.tick(story.now)
    story.report("decode-0", **HANGS)
    assert health_of(story, "decode-0") is Health.ALIVE
