"""Faults that take their time: a worker that stands still for half a minute, ten dead actors.

These are the cases' own lengths, and minutes of waiting, so they are ``slow``. The same with
shorter waits is ``faults``: test_worker_deaths.py stops a prefill worker for 5 s, which is longer
than it takes to be declared dead, and restarts each worker 20 times; test_faults_on_ray.py kills a
prefill and a decode worker's actor.
"""

from __future__ import annotations

import random
import threading
import time

import pytest

from cluster.config import Role
from deploy.bench import victims
from deploy.bench.load import Ask, Load, one_call
from deploy.bench.victims import Victims
from deploy.client import Client
from tests.e2e.plain_cluster import make_config, wait_until
from tests.e2e.process_cluster import CONTROL, fault, process_cluster
from tests.e2e.ray_cluster import ray_cluster
from tests.e2e.streams import Prompts
from tests.e2e.test_on_ray import is_quiet
from tests.e2e.test_worker_deaths import (
    MORE_S,
    NUM_IN_FLIGHT,
    NUM_PROMPT,
    NUM_TOKENS,
    RETRIED_S,
    check_all,
    grown,
    incarnations,
    make_shape,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STILL_S = 30.0
"""Longer than every lease and patience that others have with it."""
NUM_FRESH = 24
PACE_S = 3.0
"""All in all longer than 60 s: after a few cold steps it may look slow, which fades by then."""
NUM_KILLS = 10
CONNECTED = 4
"""Calls that may still open connections and links: they say nothing of the usual."""
ASK = Ask(num_prompt_tokens=32, max_tokens=16)


@pytest.mark.parametrize("num_prefill", [1, 2], ids=["1P1D", "2P1D"])
def test_a_prefill_worker_that_stood_still_for_half_a_minute_is_taken_back(
    num_prefill, tiny_llama, tmp_path
):
    """CASES P-19: SIGSTOP 30 s, then SIGCONT: all are served without it, then it serves again."""
    count = NUM_IN_FLIGHT + NUM_FRESH
    prompts = Prompts(tiny_llama, count, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)
    config = make_shape(tiny_llama, num_prefill, 1)
    with process_cluster(config, tiny_llama, tmp_path) as cluster:
        pids = {name: cluster.pid(name) for name in cluster.processes}
        decoding = incarnations(cluster, Role.DECODE)
        cluster.faults("prefill-0").set(fault("hold", "data.send", nth=5))
        streams = [prompts.stream(cluster.grpc, number) for number in range(NUM_IN_FLIGHT)]
        cluster.faults("prefill-0").wait_fired()
        stopped_at = time.monotonic()
        with cluster.stopped("prefill-0"):
            check_all(prompts, streams, within_s=RETRIED_S, since=stopped_at)
            late = prompts.stream(cluster.grpc, 0)
            check_all(prompts, [late], within_s=RETRIED_S, since=time.monotonic())
            threading.Event().wait(max(0.0, stopped_at + STILL_S - time.monotonic()))
        cluster.faults("prefill-0").clear()
        cluster.wait_whole()
        assert {name: cluster.pid(name) for name in cluster.processes} == pids
        assert incarnations(cluster, Role.DECODE) == decoding
        before = _legs(cluster, "prefill-0")
        # Prompts that nobody has cached: each worker gets some of them.
        fresh = range(NUM_IN_FLIGHT, count)
        assert any(_serves(cluster, prompts, n, before) for n in fresh), "it gets no work again"
        cluster.wait_quiet()


def _legs(cluster, worker_id: str) -> float:
    return next(
        w.report.counters["legs_received"]
        for w in cluster.view().workers
        if w.worker.worker_id == worker_id
    )


def _serves(cluster, prompts: Prompts, number: int, before: float) -> bool:
    """Whether the worker has had legs since, after one more call."""
    stream = prompts.stream(cluster.grpc, number)
    stream.wait_end()
    prompts.check(number, stream)
    threading.Event().wait(PACE_S)
    cluster.wait_quiet()  # what it reports is the present by then
    return _legs(cluster, "prefill-0") > before


def test_ten_dead_ray_actors_leave_nothing_behind(tiny_llama, tmp_path):
    """CASES P-23: under load, now a prefill and now a decode worker's actor; Serve replaces it.

    Each is another incarnation, the first request after each is at most a second slower than the
    slowest before, and in the end nobody who lived through it holds more than after the first two.
    """
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    with ray_cluster(make_config(tiny_llama, pools), tmp_path) as cluster:
        hunt = Victims(cluster)
        survivors = {CONTROL: hunt.control_pid(), "router": hunt.router_pids()[0]}
        seen = {w.worker.incarnation for w in hunt.workers()}
        with Client(cluster.grpc) as client, Load(cluster, num_clients=2, ask=ASK) as load:
            load.wait_calls(CONNECTED + 10, 60)
            normal_s = max(call.seconds for call in load.calls[CONNECTED:])
            firsts: list[float] = []
            for index in range(NUM_KILLS):
                dead = hunt.first((Role.PREFILL, Role.DECODE)[index % 2])
                victims.kill(dead.worker.pid)
                heir = hunt.wait_heir(dead, 90)
                assert heir.worker.incarnation not in seen
                seen.add(heir.worker.incarnation)
                hunt.wait_ready(30)
                first = one_call(client, ASK, random.Random(index))
                assert (first.error, first.reason) == ("", "")
                firsts.append(first.seconds)
                if index == 1:
                    warm = held_by(survivors)
        assert max(firsts) <= normal_s + MORE_S, firsts
        wait_until(lambda: is_quiet(cluster), 20, "blocks are leaked")
        wait_until(lambda: not grown(warm, held_by(survivors)), 20, "somebody holds more")
        assert all(call.is_typed for call in load.calls if call.error)
        assert {hunt.control_pid(), hunt.router_pids()[0]} == set(survivors.values())


def held_by(pids: dict[str, int]) -> dict[str, victims.Footprint]:
    return {name: victims.Footprint.of(pid) for name, pid in pids.items()}
