"""The order of those that wait, against a model that sorts them all each time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import Policy
from cluster.policy.order import Ahead, Ordering, Ticket
from cluster.policy.queue import PolicyQueue

AGING_S = 5.0


def make_queue(policy=Policy.FCFS, **fields):
    return PolicyQueue(Ordering(policy=policy, num_tiers=3, aging_s=AGING_S, **fields))


def fill(queue, *tickets):
    for order, fields in enumerate(tickets):
        name = f"r{order}"
        queue.add(name, name, Ticket(**{"arrived": float(order), "order": order, **fields}))
    return queue


def test_first_come_first_served_is_by_arrival_not_by_when_it_was_queued():
    queue = fill(make_queue(), {"arrived": 2.0}, {"arrived": 1.0}, {"arrived": 1.0})
    assert queue.in_order(9.0) == ["r1", "r2", "r0"]


def test_the_least_work_goes_first_until_somebody_has_aged():
    queue = fill(make_queue(Policy.SJF), {"work": 900.0}, {"work": 10.0}, {"work": 5.0})
    assert queue.in_order(4.9) == ["r2", "r1", "r0"]
    assert queue.in_order(5.0) == ["r0", "r2", "r1"]
    assert queue.in_order(6.0) == ["r0", "r1", "r2"]


def test_tiers_and_first_come_first_served_within_one():
    queue = fill(make_queue(Policy.PRIORITY), {"tier": 0}, {"tier": 2}, {"tier": 1}, {"tier": 2})
    assert queue.in_order(4.9) == ["r1", "r3", "r2", "r0"]
    assert queue.in_order(5.0) == ["r0", "r1", "r3", "r2"], "the low one has aged"


def test_who_was_preempted_goes_first_in_its_tier_and_an_export_before_all():
    queue = fill(
        make_queue(Policy.PRIORITY),
        {"tier": 1},
        {"tier": 1, "ahead": Ahead.IN_TIER},
        {"tier": 2},
        {"tier": 0, "ahead": Ahead.OF_ALL},
    )
    assert queue.in_order(0.0) == ["r3", "r2", "r1", "r0"]


@pytest.mark.parametrize("is_fair", [False, True])
def test_an_export_goes_first_in_its_tier_where_tiers_take_and_before_all_when_it_has_aged(is_fair):
    queue = fill(
        make_queue(Policy.PRIORITY, is_fair=is_fair),
        {"tier": 0, "ahead": Ahead.OF_TIER, "tenant": "a"},
        {"tier": 0, "ahead": Ahead.IN_TIER},
        {"tier": 2},
        {"tier": 1, "ahead": Ahead.OF_TIER, "tenant": "a"},
        {"tier": 1},
        {"tier": 2, "ahead": Ahead.OF_TIER, "tenant": "a"},
    )
    queue.tenants(0).charge("a", 100.0)
    assert queue.in_order(4.0) == ["r5", "r2", "r3", "r4", "r0", "r1"]
    assert queue.in_order(5.0)[:2] == ["r0", "r5"]


def test_a_turn_that_goes_before_an_aged_request_goes_after_the_exports_of_its_tier():
    queue = fill(
        make_queue(Policy.PRIORITY, is_fair=True),
        {"tenant": "flood", "arrived": 0.0},
        {"tenant": "modest", "arrived": 4.0},
        {"tenant": "flood", "arrived": 4.0, "ahead": Ahead.OF_TIER},
    )
    queue.tenants(0).charge("flood", 100.0)
    assert queue.in_order(5.0) == ["r2", "r1", "r0"]


def test_the_tenant_that_was_served_least_is_next():
    queue = fill(make_queue(is_fair=True), *({"tenant": t} for t in ("a", "a", "a", "b", "b")))
    seen = []
    for item in queue.walk(9.0):
        tenant = queue.ticket(item).tenant
        seen.append(item)
        queue.remove(item)
        queue.tenants(0).charge(tenant, 10.0)
    assert seen == ["r0", "r3", "r1", "r4", "r2"]


def test_who_is_given_back_what_was_counted_has_its_turn_again():
    queue = fill(make_queue(is_fair=True), {"tenant": "a"}, {"tenant": "b"})
    queue.tenants(0).charge("a", 5.0)
    assert queue.in_order(1.0) == ["r1", "r0"]
    queue.tenants(0).charge("a", -6.0)
    assert queue.in_order(1.0) == ["r0", "r1"]


def test_who_was_away_has_saved_no_credit():
    queue = make_queue(is_fair=True)
    fill(queue, {"tenant": "a"})
    queue.tenants(0).charge("a", 1000.0)
    queue.add("late", "late", Ticket(arrived=9.0, order=9, tenant="b"))
    assert queue.tenants(0).counter("b") == 1000.0


def test_what_a_tenant_is_served_in_one_tier_takes_no_turn_from_it_in_another():
    queue = fill(
        make_queue(Policy.PRIORITY, is_fair=True),
        *({"tenant": tenant, "tier": tier} for tenant in "ab" for tier in (1, 1, 2)),
    )
    queue.tenants(2).charge("a", 1000.0)
    seen = []
    for item in queue.walk(0.0):
        ticket = queue.ticket(item)
        seen.append(item)
        queue.remove(item)
        queue.tenants(ticket.tier).charge(ticket.tenant, 10.0)
    assert seen == ["r5", "r2", "r0", "r3", "r1", "r4"]


def test_age_takes_no_turn_of_a_tenant_that_was_served_less():
    """Where a flood waits for long, what is served soon would be passed by it for ever."""
    queue = fill(
        make_queue(Policy.PRIORITY, is_fair=True),
        *({"tenant": "flood", "tier": 1, "arrived": 0.0} for _ in range(2)),
        {"tenant": "modest", "tier": 1, "arrived": 5.0},
        {"tenant": "modest", "tier": 0, "arrived": 5.0},
        {"tenant": "urgent", "tier": 2, "arrived": 5.0},
    )
    queue.tenants(1).charge("flood", 100.0)
    assert queue.in_order(4.0) == ["r4", "r2", "r0", "r1", "r3"]
    assert queue.in_order(6.0) == ["r2", "r0", "r1", "r4", "r3"], "its tier's turn came"
    queue.tenants(1).charge("modest", 101.0)
    assert queue.in_order(6.0) == ["r0", "r1", "r4", "r2", "r3"]


def test_the_oldest_of_those_who_aged_brings_the_next_turn_of_its_tier():
    """One that finds no room brings none, and a tenant's high ones wait for nobody else's."""
    queue = fill(
        make_queue(Policy.PRIORITY, is_fair=True),
        {"tenant": "a", "tier": 0, "arrived": 0.0, "group": "large"},
        {"tenant": "a", "tier": 1, "arrived": 1.0},
        {"tenant": "b", "tier": 0, "arrived": 2.0},
        {"tenant": "b", "tier": 1, "arrived": 3.0},
        {"tenant": "a", "tier": 2, "arrived": 6.0},
        {"tenant": "b", "tier": 0, "arrived": 6.0},
    )
    queue.tenants(0).charge("a", 100.0)
    assert queue.in_order(6.5) == ["r1", "r2", "r5", "r0", "r4", "r3"], "r1 is older than r2"
    walk = queue.walk(6.5)
    walk.close_if("large", is_over=True)
    assert list(walk) == ["r1", "r4", "r3", "r2", "r5"]


def test_who_has_aged_in_a_high_tier_does_not_wait_for_younger_ones_whose_turn_a_low_flood_brings():
    """P-16: a flood of a low tier brings turns that others of its tier take, and they are many."""
    queue = fill(
        make_queue(Policy.PRIORITY, is_fair=True),
        *({"tenant": "flood", "tier": 0, "arrived": 0.0} for _ in range(3)),
    )
    modest = 0

    def comes(now):
        nonlocal modest
        for tenant in "abcdef":
            name = f"{tenant}{modest}"
            modest += 1
            queue.add(name, name, Ticket(arrived=now, order=100 + modest, tenant=tenant))

    def serve(now):
        name = next(queue.walk(now))
        ticket = queue.ticket(name)
        queue.remove(name)
        queue.tenants(ticket.tier).charge(ticket.tenant, 10.0)
        return name

    comes(4.0)
    queue.tenants(0).charge("flood", 1000.0)
    assert serve(6.0) == "a0", "the flood has aged, and has been served more"
    queue.add("high", "high", Ticket(arrived=6.0, order=9, tier=2, tenant="high"))
    comes(6.5)
    assert [serve(11.0 + i / 10) for i in range(7)] == [
        "b1", "c2", "d3", "e4", "f5", "high", "a6",
    ], "those that came before it go before it"  # fmt: skip


def test_a_closed_group_is_left_out_of_the_rest_of_the_walk():
    queue = fill(make_queue(), *({"group": g} for g in "ababab"))
    walk, seen = queue.walk(0.0), []
    for item in walk:
        seen.append(item)
        walk.close_if(queue.ticket(item).group, item == "r2")
    assert seen == ["r0", "r1", "r2", "r3", "r5"]


def test_a_name_waits_once():
    queue = fill(make_queue(), {})
    with pytest.raises(ValueError, match="waits already"):
        fill(queue, {})


tickets = st.fixed_dictionaries(
    {
        "arrived": st.floats(0.0, 20.0),
        "tier": st.integers(0, 2),
        "tenant": st.sampled_from("ab"),
        "work": st.integers(1, 5).map(float),
        "group": st.sampled_from("xyz"),
        "ahead": st.sampled_from([Ahead.NO] * 6 + [Ahead.IN_TIER, Ahead.OF_TIER]),
    }
)


@given(st.sampled_from(Policy), st.lists(tickets, max_size=30), st.data())
@settings(max_examples=150, deadline=None)
def test_any_coming_and_going_keeps_the_order(policy, given_tickets, data):
    """FCFS among equals, and nobody who is younger by more than the bound is before another."""
    queue = make_queue(policy)
    waiting = {}
    now = 0.0
    for order, fields in enumerate(sorted(given_tickets, key=lambda t: t["arrived"])):
        now = max(now, fields["arrived"])
        ticket = Ticket(order=order, **fields)
        queue.add(order, order, ticket)
        waiting[order] = ticket
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(waiting)))
            assert queue.remove(gone) == gone
            del waiting[gone]
        seen = queue.in_order(now)
        assert sorted(seen) == sorted(waiting)
        assert len(queue) == len(waiting)
        for place, later in enumerate(seen):
            for earlier in seen[:place]:
                check_pair(policy, waiting[earlier], waiting[later], now)


counters = st.dictionaries(st.sampled_from("ab"), st.floats(0.0, 99.0))


def charge(queue, given_counters):
    for tenant, counter in given_counters.items():
        for tier in range(3):
            queue.tenants(tier).charge(tenant, counter * (tier + 1) % 50)


@given(st.lists(tickets, max_size=30), counters)
@settings(max_examples=100, deadline=None)
def test_nobody_of_a_lower_tier_who_is_younger_goes_before_one_who_has_aged(
    given_tickets, given_counters
):
    """P-16: whatever the shares are; and nobody goes twice, or not at all."""
    queue = fill(make_queue(Policy.PRIORITY, is_fair=True), *given_tickets)
    charge(queue, given_counters)
    seen = queue.in_order(20.0)
    assert sorted(seen) == sorted(f"r{order}" for order in range(len(given_tickets)))
    for place, later in enumerate(map(queue.ticket, seen)):
        if later.arrived + AGING_S <= 20.0 and later.ahead is Ahead.NO:
            lower = [t for t in map(queue.ticket, seen[:place]) if t.tier < later.tier]
            assert all(t.arrived <= later.arrived for t in lower if t.ahead is Ahead.NO)


@given(st.sampled_from(Policy), st.booleans(), st.lists(tickets, max_size=30), st.data())
@settings(max_examples=100, deadline=None)
def test_what_has_come_gone_and_aged_before_leaves_no_trace(policy, is_fair, given_tickets, data):
    """What is kept sorted from walk to walk is what a queue that is filled now would have."""
    queue, left, now = make_queue(policy, is_fair=is_fair), {}, 0.0
    for order, fields in enumerate(given_tickets):
        left[order] = Ticket(order=order, **fields)
        queue.add(order, order, left[order])
        for gone in data.draw(st.lists(st.sampled_from(sorted(left)), max_size=2, unique=True)):
            queue.remove(gone)
            del left[gone]
        now += data.draw(st.sampled_from([0.0, 0.0, 1.0]))
        for tier in range(3):
            tenant, num_tokens = data.draw(st.sampled_from("ab")), data.draw(st.integers(-9, 9))
            queue.tenants(tier).charge(tenant, num_tokens)
        queue.in_order(now)
    new = make_queue(policy, is_fair=is_fair)
    for order, ticket in left.items():
        new.add(order, order, ticket)
    for tier in range(3):
        for tenant in "ab":
            behind = queue.tenants(tier).counter(tenant) - new.tenants(tier).counter(tenant)
            new.tenants(tier).charge(tenant, behind)
    assert queue.in_order(now) == new.in_order(now)


groups = st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 9)), max_size=30)


@given(groups, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_walk_that_copies_a_few_groups_sees_what_one_does_that_copies_all(
    given_groups, few, draw
):
    """Whoever is served leaves the queue meanwhile, and groups without room are left out."""
    fates = [(draw.random() < 0.5, draw.random() < 0.3) for _ in given_groups]

    def walked(num_copied):
        queue, seen = make_queue(), []
        for order, (arrived, group) in enumerate(given_groups):
            queue.add(order, order, Ticket(arrived=arrived, order=order, group=group))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cluster.policy.walk._FEW", num_copied)
            walk = queue.walk(0.0)
            for order in walk:
                seen.append(order)
                is_served, is_over = fates[order]
                if is_served:
                    queue.remove(order)
                else:
                    walk.close_if(given_groups[order][1], is_over)
        return seen

    assert walked(few) == walked(1000)


def check_pair(policy, first, second, now):
    if first.ahead is not Ahead.NO or second.ahead is not Ahead.NO:
        return
    assert first.arrived <= second.arrived + AGING_S, "overtaken by one that is too young"
    is_equal = (first.tier, first.work) == (second.tier, second.work)
    are_fresh = max(now - first.arrived, now - second.arrived) < AGING_S
    if policy is Policy.FCFS or is_equal:
        assert (first.arrived, first.order) < (second.arrived, second.order)
    elif are_fresh and policy is Policy.SJF:
        assert first.work <= second.work
    elif are_fresh:
        assert first.tier >= second.tier
