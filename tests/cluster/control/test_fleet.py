"""What is kept from event to event is what somebody who looks only now would find."""

import random
from dataclasses import replace

import pytest

from cluster.config import Policy
from cluster.control.costs import CostModel
from cluster.control.fleet import Fleet
from cluster.control.placement import Placement
from tests.cluster.control.factory import grants, make_want, two_pools
from tests.cluster.control.story import Story
from tests.cluster.control.test_planner_random import ORDERS, POOLS, SETTINGS, World

SIZES = [(1, 1), (17, 40), (100, 200), (480, 2)]
"""Of prompts, and of outputs at most."""


def lists_of(fleet):
    """All lists that are not empty, in order, and the most room of each."""
    num_tiers = fleet._num_tiers
    return {
        (where, tier): ([*opened._by_tier[tier]._by_cost], opened.most(tier))
        for where, opened in fleet._open.items()
        for tier in range(num_tiers)
        if len(opened._by_tier[tier])
    }


def anew(planner):
    """The same, of a fleet that has only now heard of the workers."""
    placement, ledger = planner._placement, planner._ledger
    costs = CostModel(ledger, planner._costs.expected_output_tokens)
    fleet = Fleet(planner._config, ledger, costs, placement.rule.most_tokens)
    ledger.changed.update(ledger.workers)
    fleet.refresh()
    return lists_of(fleet)


@pytest.mark.parametrize("order", ["fcfs", "tiers"])
@pytest.mark.parametrize("pools", POOLS)
def test_the_lists_are_those_of_a_fleet_that_is_filled_now(pools, order):
    world = World(3, POOLS[pools], **ORDERS[order])
    num_listed = 0
    for _ in range(400):
        world.step()
        world.planner._placement.refresh()
        known = lists_of(world.planner._placement._fleet)
        assert known == anew(world.planner)
        for (_, tier), (_, most) in known.items():
            num_listed += tier > 0 or most.prefill > 0
    assert num_listed > 100


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.PRIORITY])
def test_a_placement_knows_of_who_came_and_went(policy):
    """Ways and openings are found once for a kind, until workers come or go."""
    draw = random.Random(7)
    world = World(5, POOLS["all"], policy=policy)
    found = set()
    for _ in range(600):
        world.step()
        placement = world.planner._placement
        fresh = Placement(
            world.planner._config, world.planner._ledger, world.planner._costs, SETTINGS
        )
        placement.refresh()
        world.planner._ledger.changed.update(world.planner._ledger.workers)
        fresh.refresh()
        for sizes in SIZES:
            want = make_want(num_prompt_tokens=sizes[0], max_tokens=sizes[1], priority="low")
            needs = placement.rule.needs(want)
            known, now = (
                p.openings(want, needs.kind, may_fall_back=True) for p in (placement, fresh)
            )
            assert (known is None) is (now is None)
            if known is not None and now is not None:
                room = (needs.tier, needs.prefill_tokens, needs.decode_tokens)
                assert known.admit(*room) == now.admit(*room)
                found.add(known.admit(*room))
        if draw.random() < 0.02:
            gone = draw.choice(sorted(world.workers))
            worker = world.workers[gone].registration
            world.take(world.planner.worker_left(gone, worker.incarnation, "drained", world.now))
            world.say(world.workers[gone])
            world.join(replace(worker, incarnation=f"{gone}-again-{world.now}"))
    assert found == {False, True}


def test_a_worker_that_registers_from_another_address_is_named_by_that():
    story = Story(*two_pools())
    moved = replace(story.workers["decode-0"], address="127.0.0.1:7")
    story.join(moved)
    (grant,) = grants(story.want())
    assert grant.decode.address == "127.0.0.1:7"


def test_who_may_serve_a_kind_is_asked_again_when_workers_come_and_go():
    story = Story(*two_pools())
    placement, want = story.planner._placement, make_want()
    kind = placement.rule.needs(want).kind

    def has_openings():
        return placement.openings(want, kind, may_fall_back=False) is not None

    assert has_openings()
    prefill = story.workers["prefill-0"]
    story.leave("prefill-0")
    assert not has_openings()
    story.join(prefill)
    assert has_openings()
