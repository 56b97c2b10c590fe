"""P-25 on a real Ray: a burst that kills nobody, and a router that dies in the midst of a load."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import itertools
import json
import threading
from collections import Counter

import httpx
import psutil
import pytest

from cluster.config import FaultsConfig, LocalPrefill, Role, SchedulingConfig
from cluster.errors import StartupError
from deploy.bench import victims
from deploy.bench.victims import Footprint, Victims
from tests.e2e.plain_cluster import (
    is_quiet,
    make_config,
    view_of,
    wait_until,
    with_router_replicas,
)
from tests.e2e.ray_cluster import ray_cluster
from tests.e2e.slow_steps import slow_steps
from tests.e2e.test_overload import PROMPT, address_of, call, client, is_refusal, text_of

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(300)]
NUM_CALLS, QUEUE_LIMIT, NUM_SLOTS = 1000, 64, 4
STEP_S = 0.05
"""What decode steps take longer: what the queue holds lasts longer than its clients wait."""
NUM_CALLERS = 3 * NUM_SLOTS
"""Of the routers one of which dies: those that run have all slots, the others wait for them."""
NUM_TOKENS = 120
PATIENCE_S, MOMENT_S = 60.0, 10.0
"""For what a machine has to start or to serve, and for news of a death."""
MORE_BYTES = 64 << 20


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    """One prefill and one decode worker, and two routers."""
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    config = make_config(tiny_llama, pools, max_num_seqs=NUM_SLOTS, prefix_cache=False)
    config = dataclasses.replace(
        with_router_replicas(config, 2),
        scheduling=SchedulingConfig(
            max_queue_requests=QUEUE_LIMIT, local_prefill=LocalPrefill.NEVER
        ),
        # All of these clients have one address.
        limits=dataclasses.replace(config.limits, max_connections_per_address=2 * NUM_CALLS),
        faults=FaultsConfig(enabled=True),
    )
    with ray_cluster(config, tmp_path_factory.mktemp("overload-on-ray")) as cluster:
        yield cluster


def everybody(cluster) -> dict[str, list[int]]:
    """Each process of the cluster that a burst might end."""
    hunt, view = Victims(cluster), view_of(cluster)
    return {
        "control": [hunt.control_pid()],
        "routers": hunt.router_pids(),
        "workers": sorted(w.worker.pid for w in view.workers),
    }


def test_a_burst_is_refused_and_nobody_is_restarted_for_it(cluster):
    """P-25: Ray's health checks find alive whoever is busy refusing; then all is as before."""
    address = address_of(cluster)
    expected = text_of(asyncio.run(call(address, patience_s=PATIENCE_S)))
    before = everybody(cluster)
    base = {pid: Footprint.of(pid).memory_bytes for pid in before["routers"]}

    async def burst():
        return await asyncio.gather(*(client(address) for _ in range(NUM_CALLS)))

    with slow_steps(cluster, "decode", STEP_S):
        answers = list(itertools.chain(*asyncio.run(burst())))
    statuses = Counter(answer.status if answer else None for answer in answers)
    refused = [answer for answer in answers if is_refusal(answer)]
    served = [answer for answer in answers if answer and answer.status == 200]
    assert set(statuses) <= {200, 429, 503, None}, statuses
    assert len(refused) > NUM_CALLS / 2, statuses
    assert len(served) >= NUM_SLOTS, statuses
    assert all(int(answer.retry_after) >= 1 for answer in refused)
    assert {text_of(answer) for answer in served} == {expected}

    wait_until(lambda: is_quiet(cluster), PATIENCE_S, "work goes on for clients that have left")

    async def normal():
        return [await call(address, patience_s=PATIENCE_S) for _ in range(20)]

    assert {text_of(answer) for answer in asyncio.run(normal())} == {expected}
    assert everybody(cluster) == before
    for pid in before["routers"]:
        assert Footprint.of(pid).memory_bytes - base[pid] < MORE_BYTES


class Caller(threading.Thread):
    """One stream over a connection of its own, so that it is known whose client it is."""

    def __init__(self, cluster) -> None:
        super().__init__(daemon=True)
        self._http = http.client.HTTPConnection(*address_of(cluster), timeout=PATIENCE_S)
        self._http.connect()
        self.port = self._http.sock.getsockname()[1]
        self.text, self.num_events = "", 0
        self.is_whole = False
        self.start()

    def run(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        headers = {"content-type": "application/json"}
        is_cut_off = contextlib.suppress(OSError, http.client.HTTPException)
        with is_cut_off, contextlib.closing(self._http):
            self._http.request(
                "POST", "/v1/completions", json.dumps({**body, "stream": True}), headers
            )
            for line in self._http.getresponse():
                self._take(line.decode().removeprefix("data: ").strip())

    def _take(self, told: str) -> None:
        if told == "[DONE]":
            self.is_whole = True
        elif told:
            self.num_events += 1
            self.text += json.loads(told)["choices"][0]["text"]


def clients_of(cluster, pid: int) -> set[int]:
    """The ports of those that are connected to a router's HTTP door."""
    own = cluster.config.endpoints.http_port
    connections = psutil.Process(pid).net_connections("tcp")
    at_it = [c for c in connections if c.status == psutil.CONN_ESTABLISHED and c.laddr.port == own]
    return {each.raddr.port for each in at_it}


def num_aborted(cluster) -> float:
    return sum(w.report.counters["legs_aborted"] for w in view_of(cluster).workers)


def num_known(cluster) -> int:
    """Requests that the control plane holds something for, or a place in its queue."""
    view = view_of(cluster)
    return view.num_waiting + view.num_granted


def are_legs_settled(cluster) -> bool:
    """Whether each leg that a worker was sent has ended in exactly one way."""
    for worker in view_of(cluster).workers:
        legs = {k: v for k, v in worker.report.counters.items() if k.startswith("legs_")}
        if legs.pop("legs_received") != sum(legs.values()):
            return False
    return True


def new_routers(cluster, old: list[int]) -> list[int]:
    with contextlib.suppress(StartupError):
        return sorted(set(Victims(cluster).router_pids()) - set(old))
    return []


def serves(cluster, pid: int) -> bool:
    """Whether a new connection is this router's, and a call over it is answered."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
    with httpx.Client(base_url=cluster.http, timeout=PATIENCE_S) as client:
        client.get("/health/live")
        is_its = bool(clients_of(cluster, pid))
        return is_its and client.post("/v1/completions", json=body).status_code == 200


def test_a_killed_router_costs_its_own_clients_alone_and_is_replaced(cluster):
    """P-25, P-16: kill -9 with four streams that run and others that wait, at both routers.

    Its clients hear of it at once. What was held for them goes to the other router's.
    """
    wait_until(lambda: is_quiet(cluster), PATIENCE_S, "the cluster is not whole to begin with")
    routers = Victims(cluster).router_pids()
    workers = {w.worker.incarnation for w in view_of(cluster).workers}
    num_before = num_aborted(cluster)
    whole = call(address_of(cluster), patience_s=PATIENCE_S, max_tokens=NUM_TOKENS)
    expected = text_of(asyncio.run(whole))

    with slow_steps(cluster, "decode", STEP_S):
        # STEP 1: All slots are taken, and clients of both routers wait.
        callers = [Caller(cluster)]
        wait_until(lambda: callers[0].num_events > 2, PATIENCE_S, "it does not run")
        [victim] = [pid for pid in routers if callers[0].port in clients_of(cluster, pid)]
        [survivor] = set(routers) - {victim}
        while len(callers) < NUM_CALLERS or not clients_of(cluster, survivor):
            callers.append(Caller(cluster))
            wait_until(lambda: num_known(cluster) == len(callers), PATIENCE_S, "one is not known")
        doomed = clients_of(cluster, victim)
        others = [caller for caller in callers if caller.port not in doomed]
        assert {each.port for each in others} == clients_of(cluster, survivor)
        assert all(caller.is_alive() for caller in callers), "V: some are over already"
        # STEP 2: Its clients are cut off; the others get all that they asked for.
        victims.kill(victim)
        for caller in callers:
            if caller not in others:
                caller.join(MOMENT_S)
                assert not caller.is_alive(), "a client hangs"
                assert not caller.is_whole
        wait_until(lambda: num_aborted(cluster) > num_before, MOMENT_S, "work goes on for nobody")
        assert any(caller.is_alive() for caller in others), "V: nobody was left"
        for caller in others:
            caller.join(PATIENCE_S)
            assert (caller.is_whole, caller.text) == (True, expected)
    assert all(expected.startswith(caller.text) for caller in callers)
    # STEP 3: Another takes its place, and nothing is held for those that have gone.
    wait_until(lambda: new_routers(cluster, routers), PATIENCE_S, "nobody takes its place")
    for pid in (survivor, *new_routers(cluster, routers)):
        wait_until(lambda pid=pid: serves(cluster, pid), PATIENCE_S, "a router serves nobody")
    wait_until(lambda: view_of(cluster).num_routers == 2, PATIENCE_S, "one is not known")
    wait_until(lambda: is_quiet(cluster), PATIENCE_S, "something is held for nobody")
    wait_until(lambda: are_legs_settled(cluster), PATIENCE_S, "a leg has no end")
    assert {w.worker.incarnation for w in view_of(cluster).workers} == workers
