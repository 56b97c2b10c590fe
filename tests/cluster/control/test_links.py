"""What a link's estimate learns, shares and forgets."""

import random
import statistics

import pytest

from cluster.control.facts import TransferSample
from cluster.control.links import LinkTable

PAIR, POOLS = ("p0", "d0"), ("prefill", "decode")


def observe(table, num_bytes, seconds, *, pair=PAIR, now=0.0):
    sample = TransferSample(peer_worker_id=pair[1], num_bytes=num_bytes, seconds=seconds)
    table.observe(pair, POOLS, sample, now)


def predict(table, num_bytes, *, pair=PAIR, now=0.0):
    return table.predict_s(pair, POOLS, num_bytes, now)


def test_links_that_nobody_measured_are_equal():
    table = LinkTable(60.0)
    assert predict(table, 1 << 20) == predict(table, 1 << 20, pair=("p1", "d1")) > 0


def test_alpha_and_beta_come_from_transfers_of_several_sizes():
    table = LinkTable(60.0)
    for num_bytes in (1_000_000, 4_000_000, 2_000_000, 8_000_000):
        observe(table, num_bytes, 0.005 + num_bytes / 5e8)
    (view,) = table.view(0.0)
    assert view.alpha_s == pytest.approx(0.005, rel=0.01)
    assert view.beta_bytes_per_s == pytest.approx(5e8, rel=0.01)
    assert predict(table, 10_000_000) == pytest.approx(0.025, rel=0.01)


def test_transfers_of_one_size_still_predict_that_size():
    table = LinkTable(60.0)
    for _ in range(5):
        observe(table, 1_000_000, 0.02)
    assert predict(table, 1_000_000) == pytest.approx(0.02)


@pytest.mark.parametrize(
    "samples", [[(0, 0.1)], [(10, 0.0)], [(1_000, 0.5), (1_000_000, 0.1)]], ids=str
)
def test_odd_samples_never_predict_less_than_nothing(samples):
    table = LinkTable(60.0)
    for num_bytes, seconds in samples:
        observe(table, num_bytes, seconds)
    assert predict(table, 1 << 30) >= 0.0
    assert all(view.beta_bytes_per_s >= 0.0 for view in table.view(0.0))


def test_bytes_under_way_are_waited_for():
    table = LinkTable(60.0)
    for _ in range(3):
        observe(table, 1_000_000, 0.02)
    idle_s = predict(table, 1_000_000)
    table.started(PAIR, POOLS, 1_000_000)
    assert predict(table, 1_000_000) > idle_s + 0.015
    table.ended(PAIR, 1_000_000)
    assert predict(table, 1_000_000) == idle_s


def test_an_estimate_ages_back_to_the_mean_of_its_pools():
    table = LinkTable(60.0)
    observe(table, 1_000_000, 1.0)
    for _ in range(40):
        observe(table, 1_000_000, 0.01, pair=("p0", "d1"))
    other_s = predict(table, 1_000_000, pair=("p1", "d1"), now=60.0)
    assert predict(table, 1_000_000) == pytest.approx(1.0)
    assert other_s < predict(table, 1_000_000, now=30.0) < 1.0
    assert predict(table, 1_000_000, now=60.0) == other_s


def test_a_gone_worker_takes_its_links_along():
    table = LinkTable(60.0)
    observe(table, 1_000_000, 1.0)
    table.forget("d0")
    assert table.view(0.0) == ()
    table.ended(PAIR, 5)


def test_what_an_old_link_shows_now_counts_more_than_what_it_was():
    """Slow, then unused for 45 s, then well: it does not take another 60 s to be believed."""
    table = LinkTable(60.0)
    for _ in range(20):
        observe(table, 1_000_000, 1.0)
        observe(table, 1_000_000, 0.01, pair=("p0", "d1"))
    observe(table, 1_000_000, 0.01, now=60.0)
    assert predict(table, 1_000_000, now=60.0) < 0.02
    for _ in range(20):
        observe(table, 1_000_000, 1.0, now=60.0)
    observe(table, 1_000_000, 0.01, now=61.0)
    assert predict(table, 1_000_000, now=61.0) > 0.5, "one good transfer in a row of bad ones"


@pytest.mark.parametrize("noise", [0.3, 0.6])
def test_links_that_differ_by_chance_do_not_differ(noise):
    """Equal links, transfers that scatter: nearly all predictions are the mean."""
    rng = random.Random(1)
    table = LinkTable(60.0)
    pairs = [(f"p{i}", f"d{j}") for i in range(2) for j in range(2)]
    num_apart = 0
    for _ in range(200):
        for pair in pairs:
            observe(table, 1_000_000, 0.02 * rng.lognormvariate(0.0, noise), pair=pair)
        predicted = [predict(table, 1_000_000, pair=pair) for pair in pairs]
        num_apart += sum(seconds != statistics.mode(predicted) for seconds in predicted)
    assert num_apart < 0.15 * 200 * len(pairs)


def test_a_link_that_is_truly_slower_stands_out_of_the_scatter():
    rng = random.Random(1)
    table = LinkTable(60.0)
    for _ in range(30):
        observe(table, 1_000_000, 0.02 * rng.lognormvariate(0.0, 0.3))
        observe(table, 1_000_000, 0.06 * rng.lognormvariate(0.0, 0.3), pair=("p0", "d1"))
    assert predict(table, 1_000_000, pair=("p0", "d1")) > 1.3 * predict(table, 1_000_000)


def test_a_view_shows_links_with_bytes_under_way():
    table = LinkTable(60.0)
    table.started(PAIR, POOLS, 10)
    (view,) = table.view(0.0)
    assert (view.num_transfers, view.in_flight_bytes) == (0, 10)
    table.ended(PAIR, 10)
    assert table.view(0.0) == ()
