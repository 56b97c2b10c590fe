"""Exports where higher tiers take from lower ones: they are the first of their tiers."""

import pytest

from cluster.config import LocalPrefill, Policy, Preemption
from cluster.control.facts import BlockCounts, ExportRef
from tests.cluster.control.factory import grants, two_pools
from tests.cluster.control.story import Story

NUM_BLOCKS = 1024 // 16
AGING_S = 5.0


def granted(decisions):
    return [grant.request_id for grant in grants(decisions)]


class Scene:
    """Two of a tier run in both slots of the decode worker; others were refused there."""

    def __init__(self, running="low", takable=(6,), **scheduling):
        rules = {"policy": Policy.PRIORITY, "aging_s": AGING_S, **scheduling}
        rules["local_prefill"] = LocalPrefill.NEVER
        self.story = Story(*two_pools(slots=2), **rules)
        self.takable = takable
        self.running = [g for n in "ab" for g in grants(self.story.want(n, priority=running))]
        self.exports = {}
        self.say()

    def say(self):
        """What both workers report: the prompts of the exports are computed, and are kept."""
        held = [grant.grant_id for grant in self.exports.values()]
        said = self.story.report("prefill-0", *held)
        blocks = BlockCounts(free=NUM_BLOCKS - 6, held=6)
        ids = [grant.grant_id for grant in self.running]
        told = {"blocks": blocks, "takable_blocks": self.takable, "num_running": len(ids)}
        return said + self.story.report("decode-0", *ids, **told)

    def grant_export(self, name, priority):
        """It is granted while there is room; others take that before its KV is computed."""
        running, self.running = self.running, []
        self.say()
        (self.exports[name],) = grants(self.story.want(name, priority=priority))
        self.running = running
        self.say()

    def refuse(self, name, priority):
        """The decode worker had no blocks for it after all; it asks again."""
        first = self.exports[name]
        export = ExportRef(
            grant_id=first.grant_id,
            worker_id=first.prefill.worker_id,
            incarnation=first.prefill.incarnation,
        )
        return self.story.want(name, priority=priority, attempt=1, export=export)

    def wait_export(self, name, priority):
        """An export waits for a decode worker."""
        self.grant_export(name, priority)
        assert granted(self.refuse(name, priority)) == []

    def end_one(self):
        """One of those that run ends; who gets its place runs there."""
        self.running.pop(0)
        new = grants(self.say())
        self.running += new
        return [grant.request_id for grant in new]


def test_a_low_export_without_room_keeps_no_high_request_from_taking_some():
    scene = Scene()
    scene.wait_export("export", "low")
    assert granted(scene.story.want("low", priority="low")) == []
    assert granted(scene.story.want("high", priority="high")) == ["high"]


def test_a_high_export_takes_what_low_ones_have_before_high_ones_that_are_fresh():
    scene = Scene()
    scene.wait_export("low export", "low")
    scene.grant_export("high export", "high")
    assert granted(scene.refuse("high export", "high")) == ["high export"]
    assert granted(scene.story.want("h1", priority="high")) == ["h1"]
    assert granted(scene.story.want("h2", priority="high")) == []


def test_exports_go_first_in_their_tier_and_hold_what_they_lack_from_it_and_from_those_below():
    scene = Scene(running="high", takable=(0, 0, 6))
    scene.grant_export("export", "normal")
    scene.story.want("below", priority="low", waited_s=2.0)
    scene.story.want("fresh", priority="normal", waited_s=1.0)
    scene.story.want("above", priority="high")
    assert granted(scene.refuse("export", "normal")) == []
    order = [scene.end_one() for _ in range(4)]
    assert order == [["above"], ["export"], ["fresh"], ["below"]]


def test_a_low_export_that_has_aged_goes_before_high_requests_and_holds_what_it_lacks():
    """Against those that are younger by more than the aging bound; the others may pass it."""
    scene = Scene(running="high", takable=(0, 0, 6))
    scene.wait_export("export", "low")
    scene.story.want("high", priority="high")
    scene.story.now += AGING_S
    assert scene.end_one()[0] == "export"
    scene = Scene()
    scene.wait_export("export", "low")
    scene.story.now += 0.9 * AGING_S
    assert granted(scene.story.want("within", priority="high")) == ["within"]
    scene.story.now += 0.2 * AGING_S
    assert granted(scene.story.want("beyond", priority="high")) == []


@pytest.mark.parametrize(
    "rules",
    [{"policy": Policy.FCFS}, {"policy": Policy.SJF}, {"preemption": Preemption.OFF}],
    ids=["fcfs", "sjf", "off"],
)
def test_where_no_tier_takes_exports_go_before_all(rules):
    scene = Scene(**rules)
    scene.grant_export("export", "low")
    scene.story.want("high", priority="high", waited_s=1.0)
    assert granted(scene.refuse("export", "low")) == []
    assert [scene.end_one() for _ in range(2)] == [["export"], ["high"]]
