"""Workers that die or stand still under load: nobody loses a token, nobody waits long."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from cluster.config import Role
from deploy.bench.restarts import slope
from deploy.bench.victims import Footprint
from tests.e2e.plain_cluster import make_config, wait_until, with_pool
from tests.e2e.process_cluster import CONTROL, fault, process_cluster
from tests.e2e.streams import Prompts, Stream

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
NUM_FRESH = 5
"""Prompts that only the test of one of these moments sends: no worker has them cached."""
RETRIED_S = 5.0
"""So soon each request is through: the dead are known after three seconds at most."""
UNUSED_S, WATCHED_S, PACE_S = 2.0, 3.5, 0.25
"""Nobody is sent to a dead worker after the first of these; calls come until the second."""
SLOW_STEPS = fault("delay", "engine.step", times=0, seconds=0.1)
"""On who decodes: nobody is through before all are there."""
SLOPE = 0.2
"""Of what a survivor holds, per restart."""
MORE_S = 1.0
"""Than usual may the first request after a restart take."""


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 2 * NUM_IN_FLIGHT, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)


def make_shape(model, num_prefill: int, num_decode: int, **options):
    pools = {"prefill": (Role.PREFILL, num_prefill), "decode": (Role.DECODE, num_decode)}
    config = make_config(model, pools, max_num_seqs=32, **options)
    return with_pool(config, "prefill", chunk_tokens=32)


def incarnations(cluster, role: Role) -> set[str]:
    return {w.worker.incarnation for w in cluster.view().workers if w.worker.role is role}


def wait_in_flight(cluster, load: int) -> None:
    """Wait until so many have a grant, or wait for one: what happens now meets them all."""

    def are_there() -> bool:
        view = cluster.view()
        return view.num_granted + view.num_waiting == load

    wait_until(are_there, 10, f"{load} are not in flight")


def counter(cluster, worker_id: str, name: str) -> float:
    workers = cluster.view().workers
    return next(w.report.counters[name] for w in workers if w.worker.worker_id == worker_id)


def check_all(prompts: Prompts, streams, *, within_s: float, since: float, first: int = 0) -> None:
    for number, stream in enumerate(streams, start=first):
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
    """CASES P-19: kill -9 with 20 in flight: retried elsewhere, or prefilled where they decode.

    Those that it had no part in go on as if nothing was; and its heir serves beside the same
    decode worker.
    """
    cluster = prefill_shape
    side, plan = MOMENTS[moment]
    holder = f"{side}-0"
    others = [name for name in cluster.pools if name != "prefill-0"]
    pids = {name: cluster.pid(name) for name in others}
    before = incarnations(cluster, Role.DECODE)
    lost = [lost_legs(cluster, name) for name in others if name != "decode-0"]
    cluster.faults("decode-0").set(*([plan] if side == "decode" else []), SLOW_STEPS)
    if side == "prefill":
        cluster.faults(holder).set(plan)
    streams = [prompts.stream(cluster.grpc, number) for number in range(NUM_IN_FLIGHT)]
    cluster.faults(holder).wait_fired()
    wait_in_flight(cluster, NUM_IN_FLIGHT)
    killed_at = time.monotonic()
    cluster.kill("prefill-0")
    cluster.faults("decode-0").clear()
    check_all(prompts, streams, within_s=RETRIED_S, since=killed_at)
    assert any(s.timeline.num_attempts > 1 for s in streams), "it had no part in any"
    cluster.wait_quiet()
    assert lost == [lost_legs(cluster, name) for name in others if name != "decode-0"]
    cluster.restart("prefill-0")
    cluster.wait_whole()
    first = NUM_IN_FLIGHT + NUM_FRESH * list(MOMENTS).index(moment)
    restarted_at = time.monotonic()
    fresh = [prompts.stream(cluster.grpc, first + i) for i in range(NUM_FRESH)]
    check_all(prompts, fresh, within_s=RETRIED_S, since=restarted_at, first=first)
    cluster.wait_quiet()
    assert counter(cluster, "prefill-0", "legs_handed_over") > 0, "its heir serves nobody"
    assert all(stream.timeline.num_attempts == 1 for stream in fresh)
    assert incarnations(cluster, Role.DECODE) == before, "the decode worker was restarted"
    assert {name: cluster.pid(name) for name in others} == pids


def lost_legs(cluster, worker_id: str) -> float:
    """Legs of a worker that were given up, or failed."""
    return counter(cluster, worker_id, "legs_aborted") + counter(cluster, worker_id, "legs_failed")


def test_a_prefill_worker_that_stood_still_is_taken_back(prefill_shape, prompts):
    """CASES P-19: SIGSTOP for longer than it takes to be declared dead, then SIGCONT."""
    cluster = prefill_shape
    pids = {name: cluster.pid(name) for name in cluster.processes}
    cluster.faults("decode-0").set(SLOW_STEPS)
    cluster.faults("prefill-0").set(fault("hold", "data.send", nth=5))
    streams = [prompts.stream(cluster.grpc, number) for number in range(NUM_IN_FLIGHT)]
    cluster.faults("prefill-0").wait_fired()
    wait_in_flight(cluster, NUM_IN_FLIGHT)
    stopped_at = time.monotonic()
    with cluster.stopped("prefill-0"):
        cluster.faults("decode-0").clear()
        threading.Event().wait(PAUSE_S)
        check_all(prompts, streams, within_s=RETRIED_S, since=stopped_at)
    cluster.faults("prefill-0").clear()
    cluster.wait_whole()
    assert {name: cluster.pid(name) for name in cluster.processes} == pids
    check_all(prompts, [prompts.stream(cluster.grpc, 0)], within_s=5, since=time.monotonic())
    cluster.wait_quiet()


@pytest.fixture(scope="module")
def decode_shape(tiny_llama, tmp_path_factory):
    """One prefill and two decode workers; each decode worker takes ten of this test's requests."""
    config = make_shape(tiny_llama, 1, 2, kv_tokens=16 * 90)
    config = with_pool(config, "prefill", kv_tokens=16 * 180)  # room for all that wait to leave
    with process_cluster(config, tiny_llama, tmp_path_factory.mktemp("decode")) as cluster:
        yield cluster


@pytest.mark.parametrize(("load", "num_held"), [(10, 4), (20, 10)], ids=["half-load", "full-load"])
@pytest.mark.parametrize("moment", ["waiting", "mid-transfer", "streaming"])
def test_a_dead_decode_worker_costs_nobody_a_token(moment, load, num_held, decode_shape, prompts):
    """CASES P-20: the streams go on elsewhere, with nothing repeated and nothing lost.

    So many are on the worker that dies: all that it takes, or about half of that.
    Calls come all the while: none of those that come two seconds after the death or later is
    sent to the dead worker, by its first try or by any other.
    """
    cluster = decode_shape
    holds = {"waiting": "signal.offer", "mid-transfer": "data.received", "streaming": "engine.step"}
    nth = {"waiting": 2, "mid-transfer": 3, "streaming": 15}[moment]
    cluster.faults("decode-0").set(fault("hold", holds[moment], nth=nth), SLOW_STEPS)
    cluster.faults("decode-1").set(SLOW_STEPS)
    streams = [prompts.stream(cluster.grpc, number) for number in range(load)]
    cluster.faults("decode-0").wait_fired()
    wait_in_flight(cluster, load)
    wait_until(lambda: num_on(cluster, "decode-0") >= num_held, 5, "it has less than that")
    killed_at = time.monotonic()
    cluster.kill("decode-0")
    cluster.faults("decode-1").clear()
    late = call_until(cluster, prompts, killed_at + WATCHED_S)
    check_all(prompts, streams, within_s=RETRIED_S, since=killed_at)
    assert any(s.timeline.num_attempts > 1 or s.timeline.num_redirected for s in streams)
    for number, stream in enumerate(late, start=NUM_IN_FLIGHT):
        check_all(prompts, [stream], within_s=RETRIED_S, since=stream.started_at, first=number)
    unaware = [s for s in late if s.started_at >= killed_at + UNUSED_S]
    assert len(unaware) >= 4
    for stream in unaware:
        times = stream.timeline
        assert (times.num_attempts, times.num_redirected, times.decode_worker) == (1, 0, "decode-1")
    cluster.wait_quiet()
    cluster.restart("decode-0")
    cluster.wait_whole()


def num_on(cluster, worker_id: str) -> int:
    """How many of those in flight have a grant to decode there."""
    worker = next(w for w in cluster.view().workers if w.worker.worker_id == worker_id)
    return worker.num_granted + len(worker.report.held_grants)


def call_until(cluster, prompts: Prompts, instant: float) -> list[Stream]:
    """Send one request after another until then, none waiting for another."""
    streams: list[Stream] = []
    while time.monotonic() < instant:
        streams.append(prompts.stream(cluster.grpc, NUM_IN_FLIGHT + len(streams)))
        threading.Event().wait(PACE_S)
    return streams


class Background(threading.Thread):
    """Sends one request after another until told to stop; keeps those that ended."""

    def __init__(self, address: str, prompts: Prompts) -> None:
        super().__init__(daemon=True)
        self._address, self.prompts = address, prompts
        self._is_over = threading.Event()
        self.ended: list[tuple[int, object]] = []

    def run(self) -> None:
        for number in itertools.cycle(range(2 * NUM_IN_FLIGHT)):
            if self._is_over.is_set():
                return
            stream = self.prompts.stream(self._address, number)
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
                seen = _restart(cluster, victim, 4, background, normal_s)
                warm = footprints(cluster, others)
                looks = []
                for _ in range(16):
                    seen |= _restart(cluster, victim, 1, background, normal_s)
                    looks.append(footprints(cluster, others))
                assert len(seen) == 20, "an incarnation came twice"
                assert growing(looks) == []
                # The last dead link's thread may be in a transfer, which ends within 5 s.
                wait_until(
                    lambda warm=warm, others=others: not grown(warm, footprints(cluster, others)),
                    10,
                    "a survivor holds more than before",
                )
            survivors = ("prefill-0", "decode-0", "router-0")
            warm, term = footprints(cluster, survivors), cluster.view().term
            for _ in range(2):
                pid = cluster.kill(CONTROL)
                cluster.restart(CONTROL)
                cluster.wait_whole()
                assert cluster.pid(CONTROL) != pid
                assert cluster.view().term > term, "it speaks for the one before"
                term = cluster.view().term
                assert _timed(cluster, prompts) <= normal_s + MORE_S
            wait_until(
                lambda: not grown(warm, footprints(cluster, survivors)), 10, "a stream was left"
            )
        for number, stream in background.ended:
            prompts.check(number, stream)
        assert len(background.ended) >= 42
        cluster.wait_quiet()


def _timed(cluster, prompts: Prompts) -> float:
    stream = prompts.stream(cluster.grpc, 0)
    stream.wait_end()
    prompts.check(0, stream)
    return stream.seconds


def _restart(cluster, name: str, times: int, background: Background, normal_s: float) -> set[str]:
    """Kill a worker and start it at the same address, so often; its incarnations.

    Each time the first request after it is ready takes about as long as any.

    Whoever was being served goes on meanwhile, and is through before the next one dies: a request
    that has killed two workers is not tried again.
    """
    seen = set()
    for _ in range(times):
        num_ended = len(background.ended)
        cluster.kill(name)
        cluster.restart(name)
        cluster.wait_whole()
        assert _timed(cluster, background.prompts) <= normal_s + MORE_S
        wait_until(lambda n=num_ended: len(background.ended) > n, 10, "nothing is served")
        seen |= incarnations(cluster, cluster.pools[name].role)
    return seen


def growing(looks: list[dict[str, Footprint]]) -> list[str]:
    """Who holds more with every restart, whatever comes and goes between two of them."""
    return [
        f"{name}: {what}"
        for name in looks[0]
        for what in ("num_files", "num_sockets", "num_threads")
        if slope([getattr(look[name], what) for look in looks]) > SLOPE
    ]


def grown(before: dict[str, Footprint], after: dict[str, Footprint]) -> list[str]:
    """Who holds more than before, by more than comes and goes."""
    return [
        name
        for name, was in before.items()
        if (now := after[name]).num_files > was.num_files + 6
        or now.num_threads > was.num_threads + 4
        or now.memory_bytes - was.memory_bytes > 16 << 20
    ]
