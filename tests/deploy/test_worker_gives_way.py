"""Whole workers in one process, fake model: what they report that lower tiers would give up."""

import dataclasses

import pytest

from cluster.config import Policy
from cluster.engine.snapshot import EngineSnapshot
from cluster.engine.victims import Holdings
from cluster.kv.outside import Outsider
from cluster.request import (
    LegKind,
)
from tests.deploy.world import (
    Sink,
    make_leg,
)
from tests.factories import (
    make_key,
)


async def test_legs_that_have_aged_are_reported_as_firm_before_the_engine_has_them(world):
    """P-16: the control plane grants nobody what they wait for."""
    scheduling = dataclasses.replace(world.config.scheduling, policy=Policy.PRIORITY)
    world.config = dataclasses.replace(world.config, scheduling=scheduling)
    decode = await world.start("d", "d-0")
    for name, waited_s in (("young", 0.0), ("aged", scheduling.aging_s)):
        decode.legs.start_leg(make_leg(LegKind.DECODE, name, waited_s=waited_s), Sink())
    report = decode._reporter.report()
    assert report.held_grants == report.unreserved_grants == ("grant-aged", "grant-young")
    assert report.firm_grants == ("grant-aged",)


async def test_an_import_that_gave_way_too_often_is_firm_once_it_has_its_blocks(world):
    """P-15: the control plane grants nobody what it keeps."""
    scheduling = dataclasses.replace(world.config.scheduling, policy=Policy.PRIORITY)
    world.config = dataclasses.replace(world.config, scheduling=scheduling)
    decode = await world.start("d", "d-0")
    for name, num_before in (("young", 0), ("spared", scheduling.max_preemptions)):
        leg = make_leg(LegKind.DECODE, name, num_preemptions=num_before)
        decode.legs.start_leg(leg, Sink())
    assert decode._reporter.report().firm_grants == ()
    for name in ("young", "spared"):
        decode._pool.reserve(5, f"handoff-{name}", make_key(name))
    assert decode._reporter.report().firm_grants == ("grant-spared",)
    for name in ("young", "spared"):
        decode._pool.cancel(f"handoff-{name}")


@pytest.mark.parametrize("resume", [True, False])
async def test_imports_give_way_only_where_streams_that_have_begun_go_on(world, resume):
    scheduling = dataclasses.replace(world.config.scheduling, policy=Policy.PRIORITY)
    router = dataclasses.replace(world.config.router, resume=resume)
    world.config = dataclasses.replace(world.config, scheduling=scheduling, router=router)
    decode = await world.start("d", "d-0")
    assert decode.legs.decode.inbox.gives == resume


async def test_what_lower_tiers_would_give_up_is_reported_but_not_of_those_that_have_aged(
    world, monkeypatch
):
    """What low ones share among themselves is free when both give way, what others have is not."""
    scheduling = dataclasses.replace(world.config.scheduling, policy=Policy.PRIORITY)
    world.config = dataclasses.replace(world.config, scheduling=scheduling)
    decode = await world.start("d", "d-0")
    pool, keys = decode._pool, [make_key(name) for name in ("l1", "l2", "n", "aged")]
    l1, l2, normal, aged = keys
    mine, lows, everybodys, exported = pool.allocate(4, l1)
    pool.share(l1, [lows, everybodys], l2)
    pool.share(l1, [everybodys], normal)
    pool.share(l1, [exported], ("export", "h"))
    pool.allocate(2, normal)
    pool.allocate(5, aged)
    waited_s = scheduling.aging_s
    decode.legs.start_leg(make_leg(LegKind.DECODE, "aged", waited_s=waited_s), Sink())
    # The engine's last word of it is from when it was young.
    holdings = Holdings(giving=((1, normal), (0, l1), (0, aged), (0, l2)))
    snapshot = EngineSnapshot(holdings=holdings)
    monkeypatch.setattr(decode._engine, "snapshot", lambda: snapshot)
    report = decode._reporter.report()
    assert report.takable_blocks == (2, 3), f"{mine} and {lows}; {everybodys} and two more"
    assert report.firm_grants == ("grant-aged",)
    for holder in (*keys, ("export", "h")):
        pool.release(holder)


async def test_what_exports_and_imports_would_give_up_is_reported_too(world):
    """P-15: the control plane grants higher tiers what lower ones hold outside an engine."""
    scheduling = dataclasses.replace(world.config.scheduling, policy=Policy.PRIORITY)
    world.config = dataclasses.replace(world.config, scheduling=scheduling)
    worker, decode = await world.start("m", "m-0"), await world.start("d", "d-0")
    # STEP 1: Exports that wait for their decode legs.
    sinks = {name: Sink() for name in ("low", "normal")}
    for name, sink in sinks.items():
        leg = make_leg(LegKind.PREFILL, name, decode.me, priority=name)
        worker.legs.start_leg(leg, sink)
        await sink.until(lambda sink: sink.tokens)
    await world.reports(lambda reports: reports["m-0"].takable_blocks == (5, 5))
    # STEP 2: A reservation beside them, and one that has given way often enough.
    now, pool = worker._clock.now(), worker._pool
    for name, num_before in (("young", 0), ("spared", scheduling.max_preemptions)):
        pool.reserve(3, name, make_key(name))
        pool.outside.enter(
            Outsider(
                holder=("import", name), tier=0, arrived=now, num_preemptions=num_before,
                num_importing=3,
            )
        )  # fmt: skip
    assert worker._reporter.report().takable_blocks == (8, 5)
    for name in ("young", "spared"):
        pool.outside.leave(("import", name))
        pool.cancel(name)
    # STEP 3: One is fetched.
    decode.legs.start_leg(make_leg(LegKind.DECODE, "low", priority="low"), Sink())
    await sinks["low"].end_of(make_key("low"))
    assert worker._reporter.report().takable_blocks == (0, 5)
