"""Workers that die or stand still under load: nobody loses a token, nobody waits long."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from cluster.config import Role
from deploy.bench.victims import Footprint
from tests.e2e.plain_cluster import make_config, wait_until, with_pool
from tests.e2e.process_cluster import CONTROL, fault, process_cluster
from tests.e2e.streams import Prompts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
NUM_IN_FLIGHT = 20
NUM_PROMPT, NUM_TOKENS = 96, 40
PAUSE_S = 5.0
MOMENTS = {
    "before-prefill": ("prefill", fault("hold", "leg.start", nth=3)),
    "mid-prefill": ("prefill", fault("hold", "engine.step", nth=4)),
    "mid-transfer": ("prefill", fault("hold", "data.send", nth=5)),
    "before-done": ("decode", fault("hold", "data.received", nth=6)),
}
"""Where the work stands still when the worker dies: on which side, and at what."""


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 2 * NUM_IN_FLIGHT, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)


def make_shape(model, num_prefill: int, num_decode: int, **options):
    pools = {"prefill": (Role.PREFILL, num_prefill), "decode": (Role.DECODE, num_decode)}
    config = make_config(model, pools, max_num_seqs=32, **options)
    return with_pool(config, "prefill", chunk_tokens=32)


def incarnations(cluster, role: Role) -> set[str]:
    return {w.worker.incarnation for w in cluster.view().workers if w.worker.role is role}


def check_all(prompts: Prompts, streams, *, within_s: float, since: float) -> None:
    for number, stream in enumerate(streams):
        stream.wait_end()
        prompts.check(number, stream)
        assert stream.ended_at - since < within_s, f"{number} took {stream.ended_at - since:.1f} s"


@pytest.fixture(scope="module", params=[1, 2], ids=["1P1D", "2P1D"])
def prefill_shape(request, tiny_llama, tmp_path_factory):
    config = make_shape(tiny_llama, request.param, 1)
    with process_cluster(config, tiny_llama, tmp_path_factory.mktemp("deaths")) as cluster:
        yield cluster


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_dead_prefill_worker_costs_nobody_a_token(moment, prefill_shape, prompts):
    """CASES P-19: kill -9 with 20 in flight: retried elsewhere, or prefilled where they decode."""
    cluster = prefill_shape
    side, plan = MOMENTS[moment]
    before = incarnations(cluster, Role.DECODE)
    holder = f"{side}-0"
    cluster.faults(holder).set(plan)
    streams = [prompts.stream(cluster.grpc, number) for number in range(NUM_IN_FLIGHT)]
    cluster.faults(holder).wait_fired()
    killed_at = time.monotonic()
    cluster.kill("prefill-0")
    if side == "decode":
        cluster.faults(holder).clear()
    check_all(prompts, streams, within_s=10, since=killed_at)
    assert incarnations(cluster, Role.DECODE) == before, "the decode worker was restarted"
    cluster.wait_quiet()
    cluster.restart("prefill-0")
    cluster.wait_whole()
    check_all(prompts, [prompts.stream(cluster.grpc, 0)], within_s=5, since=time.monotonic())
    cluster.wait_quiet()


def test_a_prefill_worker_that_stood_still_is_taken_back(prefill_shape, prompts):
    """CASES P-19: SIGSTOP for longer than it takes to be declared dead, then SIGCONT."""
    cluster = prefill_shape
    pids = {name: cluster.pid(name) for name in cluster.processes}
    cluster.faults("prefill-0").set(fault("hold", "data.send", nth=5))
    streams = [prompts.stream(cluster.grpc, number) for number in range(NUM_IN_FLIGHT)]
    cluster.faults("prefill-0").wait_fired()
    stopped_at = time.monotonic()
    with cluster.stopped("prefill-0"):
        threading.Event().wait(PAUSE_S)
        check_all(prompts, streams, within_s=12, since=stopped_at)
    cluster.faults("prefill-0").clear()
    cluster.wait_whole()
    assert {name: cluster.pid(name) for name in cluster.processes} == pids
    check_all(prompts, [prompts.stream(cluster.grpc, 0)], within_s=5, since=time.monotonic())
    cluster.wait_quiet()


@pytest.fixture(scope="module")
def decode_shape(tiny_llama, tmp_path_factory):
    """One prefill and two decode workers; each decode worker takes ten of this test's requests."""
    config = make_shape(tiny_llama, 1, 2, kv_tokens=16 * 90)
    with process_cluster(config, tiny_llama, tmp_path_factory.mktemp("decode")) as cluster:
        yield cluster


@pytest.mark.parametrize("load", [10, 20], ids=["half-load", "full-load"])
@pytest.mark.parametrize("moment", ["waiting", "mid-transfer", "streaming"])
def test_a_dead_decode_worker_costs_nobody_a_token(moment, load, decode_shape, prompts):
    """CASES P-20: the streams go on elsewhere, with nothing repeated and nothing lost."""
    cluster = decode_shape
    holds = {"waiting": "signal.offer", "mid-transfer": "data.received", "streaming": "engine.step"}
    nth = {"waiting": 2, "mid-transfer": 3, "streaming": 15}[moment]
    cluster.faults("decode-0").set(fault("hold", holds[moment], nth=nth))
    streams = [prompts.stream(cluster.grpc, number) for number in range(load)]
    cluster.faults("decode-0").wait_fired()
    killed_at = time.monotonic()
    cluster.kill("decode-0")
    check_all(prompts, streams, within_s=12, since=killed_at)
    cluster.wait_quiet()
    late = prompts.stream(cluster.grpc, 0)
    check_all(prompts, [late], within_s=5, since=time.monotonic())
    cluster.restart("decode-0")
    cluster.wait_whole()


class Background(threading.Thread):
    """Sends one request after another until told to stop; keeps those that ended."""

    def __init__(self, address: str, prompts: Prompts) -> None:
        super().__init__(daemon=True)
        self._address, self._prompts = address, prompts
        self._is_over = threading.Event()
        self.ended: list[tuple[int, object]] = []

    def run(self) -> None:
        for number in itertools.cycle(range(2 * NUM_IN_FLIGHT)):
            if self._is_over.is_set():
                return
            stream = self._prompts.stream(self._address, number)
            stream.join()
            self.ended.append((number, stream))

    def __enter__(self) -> Background:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        self.join(30)


def footprints(cluster, names) -> dict[str, Footprint]:
    return {name: Footprint.of(cluster.pid(name)) for name in names}


def test_twenty_restarts_at_the_same_address_leave_nothing_behind(tiny_llama, tmp_path, prompts):
    """CASES P-23: each worker 20 times, then the control plane twice, all of it under load."""
    with process_cluster(make_shape(tiny_llama, 1, 1), tiny_llama, tmp_path) as cluster:
        normal_s = min(_timed(cluster, prompts) for _ in range(3))
        with Background(cluster.grpc, prompts) as background:
            for victim, others in (
                ("prefill-0", ("decode-0", "router-0", CONTROL)),
                ("decode-0", ("prefill-0", "router-0", CONTROL)),
            ):
                _restart(cluster, victim, 4, background)
                warm = footprints(cluster, others)
                seen = _restart(cluster, victim, 16, background)
                assert len(seen) == 16, "an incarnation came twice"
                # The last dead link's thread may be in a transfer, which ends within 5 s.
                wait_until(
                    lambda warm=warm, others=others: not grown(warm, footprints(cluster, others)),
                    10,
                    "a survivor holds more than before",
                )
                assert _timed(cluster, prompts) <= normal_s + 1.0
            for _ in range(2):
                cluster.kill(CONTROL)
                cluster.restart(CONTROL)
                cluster.wait_whole()
                assert _timed(cluster, prompts) <= normal_s + 1.0
        for number, stream in background.ended:
            prompts.check(number, stream)
        assert len(background.ended) >= 42
        cluster.wait_quiet()


def _timed(cluster, prompts: Prompts) -> float:
    stream = prompts.stream(cluster.grpc, 0)
    stream.wait_end()
    prompts.check(0, stream)
    return stream.seconds


def _restart(cluster, name: str, times: int, background: Background) -> set[str]:
    """Kill a worker and start it at the same address, so often; its incarnations.

    Whoever was being served goes on meanwhile, and is through before the next one dies: a request
    that has killed two workers is not tried again.
    """
    seen = set()
    for _ in range(times):
        num_ended = len(background.ended)
        cluster.kill(name)
        cluster.restart(name)
        cluster.wait_whole()
        wait_until(lambda n=num_ended: len(background.ended) > n, 10, "nothing is served")
        seen |= incarnations(cluster, cluster.pools[name].role)
    return seen


def grown(before: dict[str, Footprint], after: dict[str, Footprint]) -> list[str]:
    """Who holds more than before, by more than comes and goes."""
    return [
        name
        for name, was in before.items()
        if (now := after[name]).num_files > was.num_files + 6
        or now.num_threads > was.num_threads + 4
        or now.memory_bytes - was.memory_bytes > 16 << 20
    ]
