"""Measured pair cost against load, in simulated time: what it must move, and what it must not."""

import pytest

from cluster.control.facts import TransferSample
from tests.cluster.control.factory import grants, two_pools
from tests.cluster.control.simulator import LeastLoaded, PlannerPlacer, Simulation
from tests.cluster.control.story import Story

SLOW_PAIR = ("p-0", "d-0")
WARM_S = 10.0
GOOD = (0.002, 5e6)
"""2 ms and 5 MB/s: 4 to 9 ms for these prompts."""


def uniform(pair, now):
    return GOOD


def slow(line, until=float("inf")):
    return lambda pair, now: line if pair == SLOW_PAIR and now < until else GOOD


def first_token(job):
    return job.first_token_s


def total(job):
    return job.total_s


@pytest.mark.parametrize(
    "line", [(0.4, 5e6), (0.002, 5e4)], ids=["delay 400 ms", "a hundredth of the bandwidth"]
)
def test_traffic_leaves_a_slow_link(line):
    planned = Simulation(PlannerPlacer(2, 2), link=slow(line), noise=0.2).run(rate=8, seconds=60)
    blind = Simulation(LeastLoaded(2, 2), link=slow(line), noise=0.2).run(rate=8, seconds=60)
    whole = Simulation(PlannerPlacer(2, 2), link=uniform, noise=0.2).run(rate=8, seconds=60)
    assert blind.pairs(WARM_S)[SLOW_PAIR] > 0.15, "the reference is hit by the slow link"
    assert planned.pairs(WARM_S)[SLOW_PAIR] < 0.01
    assert planned.mean(total, WARM_S) < 1.03 * whole.mean(total, WARM_S)
    assert blind.mean(total, WARM_S) > 1.2 * whole.mean(total, WARM_S)
    assert planned.quantile(0.99, total, WARM_S) < 0.7 * blind.quantile(0.99, total, WARM_S)


def test_every_worker_of_a_slow_link_is_still_used():
    line = slow((0.4, 5e6))
    shares = Simulation(PlannerPlacer(2, 2), link=line).run(rate=8, seconds=60).pairs(WARM_S)
    for worker in ("p-0", "p-1", "d-0", "d-1"):
        used = sum(share for pair, share in shares.items() if worker in pair)
        assert 0.3 < used < 0.7, (worker, shares)


def test_load_outweighs_a_small_link_gain():
    """10 ms less of transfer is not worth a place behind three more sequences."""
    story = Story(*two_pools(slots=8), counts={"decode": 2})
    near = TransferSample(peer_worker_id="decode-0", num_bytes=4096, seconds=0.002)
    far = TransferSample(peer_worker_id="decode-1", num_bytes=4096, seconds=0.012)
    story.report("prefill-0", transfers=(near, far) * 20)
    assert {grants(story.want(f"r{i}"))[0].decode.worker_id for i in range(1)} == {"decode-0"}
    story.report("decode-0", num_running=4)
    story.report("decode-1", num_running=1)
    (grant,) = grants(story.want("loaded"))
    assert grant.decode.worker_id == "decode-1"


def test_a_slow_link_costs_what_it_is_worth_and_no_more_under_load():
    """At 20 ms more than the others a link is used when its workers are freer."""
    line = slow((0.022, 5e6))
    planned = Simulation(PlannerPlacer(2, 2), link=line, noise=0.2).run(rate=8, seconds=100)
    blind = Simulation(LeastLoaded(2, 2), link=line, noise=0.2).run(rate=8, seconds=100)
    assert 0.01 < planned.pairs(WARM_S)[SLOW_PAIR] < 0.2
    assert planned.mean(total, WARM_S) < 1.01 * blind.mean(total, WARM_S)


def test_a_link_that_is_well_again_is_tried_and_used():
    """Slow for 40 s: within 60 s of its last transfer it is tried, and its share comes back."""
    line = slow((0.4, 5e6), until=40.0)
    run = Simulation(PlannerPlacer(2, 2), link=line, noise=0.2).run(rate=8, seconds=160)
    tries = [job.arrived for job in run.ended if job.pair == SLOW_PAIR]
    last_slow = max(at for at in tries if at < 40.0)
    first_well = min(at for at in tries if at >= 40.0)
    assert first_well < max(last_slow + 62.0, 102.0)
    assert run.pairs(30.0, 40.0)[SLOW_PAIR] < 0.02
    assert run.pairs(105.0, 160.0)[SLOW_PAIR] > 0.15


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("rate", [8, 14], ids=["half load", "high load"])
def test_uniform_links_give_the_spread_and_latencies_of_least_loaded(rate, noise):
    runs = []
    for placer in (PlannerPlacer(2, 2), LeastLoaded(2, 2)):
        runs.append(Simulation(placer, link=uniform, noise=noise).run(rate=rate, seconds=100))
    planned, reference = runs
    shares, expected = planned.pairs(), reference.pairs()
    assert all(abs(shares[pair] - expected[pair]) < 0.06 for pair in shares), (shares, expected)
    for read in (first_token, total):
        assert planned.mean(read) == pytest.approx(reference.mean(read), rel=0.02)
        # The 99th percentile is that of a few jobs, and moves with any draw.
        for q, rel in ((0.5, 0.05), (0.99, 0.1)):
            assert planned.quantile(q, read) == pytest.approx(reference.quantile(q, read), rel=rel)


def test_unequal_pools_spread_evenly_too():
    run = Simulation(PlannerPlacer(3, 5), num_prefill=3, num_decode=5, link=uniform, noise=0.3).run(
        rate=20, seconds=60
    )
    shares = run.pairs(WARM_S)
    assert len(shares) == 15
    assert max(shares.values()) < 2.2 * min(shares.values()), shares
