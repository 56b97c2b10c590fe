"""Which speeds are believed: what a worker shows while it serves, and for how long."""

import dataclasses

import pytest

from cluster.config import Role
from tests.cluster.control.factory import grants, make_registration, two_pools
from tests.cluster.control.story import Story

FAST, SLOW = 0.010, 0.080


def serving(role: Role, seconds: float) -> dict[str, float]:
    """What a worker of a role reports that makes its steps in so long."""
    name = "step_base_s" if role is Role.DECODE else "prefill_per_token_s"
    return {name: seconds}


def two_of_each() -> Story:
    return Story(*two_pools(slots=8), counts={"prefill": 2, "decode": 2})


def chosen(story: Story, role: Role, count: int = 4) -> list[str]:
    """Who gets the next requests, which end at once."""
    names = []
    for index in range(count):
        # Too long for a decode worker to prefill by itself.
        name = f"{role.value}-{index}-{story.now}"
        (grant,) = grants(story.want(name, num_prompt_tokens=128))
        names.append(getattr(grant, role.value).worker_id)
        story.done(grant)
    return names


def beat(story: Story, speeds: dict[str, dict[str, float]], seconds: float) -> None:
    """Let time pass in which every worker reports each second; what moves is what steps."""
    for _ in range(round(seconds)):
        story.now += 1.0
        for worker_id in story.workers:
            story.report(worker_id, **speeds.get(worker_id, {}))
        story.planner.tick(story.now)


def moving(story: Story, role: Role, seconds: float, *, at: float = FAST) -> None:
    """The first worker of a role serves for so long, the second one stands idle."""
    first, second = f"{role.value}-0", f"{role.value}-1"
    idle = story.entry(second).report
    kept = {name: getattr(idle, name) for name in serving(role, 0.0)}
    for index in range(round(seconds)):
        speeds = {first: serving(role, at + 1e-6 * (index % 2 + 1)), second: kept}
        beat(story, speeds, 1)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_replacement_that_started_on_a_busy_machine_gets_its_share(role):
    """CASES P-19, P-20: it measured itself beside its rivals' work, eight times too slow."""
    story = two_of_each()
    moving(story, role, 10)
    dead = story.workers[f"{role.value}-1"]
    story.leave(dead.worker_id, "fault")
    heir = dataclasses.replace(dead, incarnation="heir", **serving(role, SLOW))
    story.join(heir)
    story.report(heir.worker_id, **serving(role, SLOW))
    assert set(chosen(story, role)) == {f"{role.value}-0", f"{role.value}-1"}


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_before_anybody_has_served_all_of_a_pool_are_equal(role):
    story = Story(*two_pools(slots=8))
    pool = story.config.pool(role.value)
    story.join(make_registration(pool, 1, **serving(role, SLOW)))
    assert set(chosen(story, role)) == {f"{role.value}-0", f"{role.value}-1"}


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_worker_that_shows_that_it_is_slow_is_avoided_and_tried_again(role):
    """It was slow when it last served; a minute without work later it may be well."""
    story = two_of_each()
    moving(story, role, 5)
    story.report(f"{role.value}-1", **serving(role, SLOW))
    assert set(chosen(story, role)) == {f"{role.value}-0"}
    moving(story, role, 30)
    assert set(chosen(story, role)) == {f"{role.value}-0"}
    moving(story, role, 30)
    assert set(chosen(story, role)) == {f"{role.value}-0", f"{role.value}-1"}
    story.report(f"{role.value}-1", **serving(role, SLOW + 1e-3))
    assert set(chosen(story, role)) == {f"{role.value}-0"}, "it has shown it once more"


def test_a_worker_that_served_before_the_control_plane_started_is_believed():
    """What it reports is not what it measured at its start: it has stepped since."""
    story = Story(*two_pools(slots=8), counts={"decode": 2})
    story.report("decode-0", step_base_s=FAST + 1e-6)
    story.report("decode-1", step_base_s=SLOW)
    assert set(chosen(story, Role.DECODE)) == {"decode-0"}
