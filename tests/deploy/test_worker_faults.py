"""The fault seam of a worker: absent unless the deploy file asks for it."""

import dataclasses
import threading
import time
from types import SimpleNamespace

import grpc
import pytest

from cluster import config as deploy_config
from cluster.config import DeployConfig, FaultsConfig, PoolConfig, Role
from cluster.engine.plan import Outcome, Plan
from cluster.errors import ConfigError, EngineFault
from cluster.rpc.server import WorkerServer
from cluster.transport.faults import Fault, Point, Verb
from cluster.wire import faults_pb2 as wire
from cluster.wire import faults_pb2_grpc as wire_grpc
from deploy.worker_faults import FaultyRunner, WorkerFaults

POOLS = (PoolConfig(name="mixed", role=Role.MIXED),)


def faults_of(*, enabled: bool) -> WorkerFaults:
    return WorkerFaults(DeployConfig(pools=POOLS, faults=FaultsConfig(enabled=enabled)))


@pytest.mark.parametrize("enabled", [False, True])
async def test_without_the_flag_the_service_is_not_there(enabled):
    """CASES S-07: the seam is compiled in, and cannot be reached unless it was asked for."""
    server = WorkerServer(
        None, None, incarnation="1", host="127.0.0.1",
        services=faults_of(enabled=enabled).services(),
    )  # fmt: skip
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            call = wire_grpc.FaultsStub(channel).Fired(wire.GetFired())
            if enabled:
                assert (await call).fired == []
            else:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)


def test_without_the_flag_every_part_stays_what_it_was():
    faults, part = faults_of(enabled=False), object()
    assert faults.parts(part) is faults.legs(part) is faults.link_events(part) is part


def test_the_flag_is_for_loopback_only():
    config = DeployConfig(pools=POOLS, faults=FaultsConfig(enabled=True))
    assert deploy_config.from_tree(deploy_config.to_tree(config)) == config
    wide = dataclasses.replace(
        config, endpoints=dataclasses.replace(config.endpoints, host="192.0.2.1")
    )
    with pytest.raises(ConfigError, match="loopback") as refused:
        deploy_config.from_tree(deploy_config.to_tree(wide))
    assert refused.value.field == "faults.enabled"


class Steps:
    num_steps = 0

    def run(self, plan: Plan, on_stored=None) -> Outcome:
        for num_layers in (1, 2) if on_stored is not None else ():
            on_stored((), num_layers)
        self.num_steps += 1
        return Outcome(())


def test_a_step_can_be_slow_and_can_fail():
    switch, steps = faults_of(enabled=True).switch, Steps()
    runner = FaultyRunner(steps, switch)
    switch.set(
        [
            Fault(verb=Verb.DELAY, point=Point.STEP, seconds=0.05),
            Fault(verb=Verb.FAIL, point=Point.STEP, nth=2),
        ]
    )
    started = time.monotonic()
    runner.run(Plan(()))
    assert time.monotonic() - started >= 0.05
    with pytest.raises(EngineFault):
        runner.run(Plan(()))
    assert (steps.num_steps, switch.fired()) == (1, (1, 1))


def test_a_slow_worker_takes_as_long_as_its_tokens():
    switch = faults_of(enabled=True).switch
    switch.set([Fault(verb=Verb.DELAY, point=Point.STEP, times=0, seconds_per_token=0.02)])
    began = time.monotonic()
    FaultyRunner(Steps(), switch).run(Plan((SimpleNamespace(token_ids=(1, 2, 3)),)))
    assert time.monotonic() - began >= 3 * 0.02


def test_a_step_can_stand_still_with_its_layers_stored():
    """They were told of before, so that they travel meanwhile."""
    switch, steps, told = faults_of(enabled=True).switch, Steps(), []
    runner = FaultyRunner(steps, switch)
    has_all = threading.Event()

    def on_stored(shares, num_layers):
        told.append(num_layers)
        if num_layers == 2:
            has_all.set()

    switch.set([Fault(verb=Verb.HOLD, point=Point.STORED, nth=2)])
    thread = threading.Thread(target=runner.run, args=(Plan(()), on_stored))
    thread.start()
    assert has_all.wait(5)
    thread.join(0.05)
    assert thread.is_alive()
    assert (told, steps.num_steps) == ([1, 2], 0)
    switch.set(())
    thread.join(5)
    assert steps.num_steps == 1
