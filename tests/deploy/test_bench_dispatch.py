"""The dispatch benchmark in small: it measures what it says."""

from pathlib import Path

from deploy.bench.dispatch import NAME, DispatchSize, measure
from deploy.bench.site import Site


class Quiet:
    def update(self, *_):
        pass

    def close(self):
        pass


def test_rate_and_choice():
    site = Site(folder=Path(), core=0, progress=lambda *_: Quiet())
    size = DispatchSize(
        num_workers=20, num_waiting=100, num_placements=50, num_choices=20, num_wide_choices=4
    )
    *rates, cost, worst = measure(site, size)
    assert {row.name for row in (*rates, cost, worst)} == {NAME}
    assert len(rates) == 4, "one of each order"
    assert all(rate.value > 0 for rate in rates)
    assert cost.ratio <= 1.05
    assert 1.0 <= worst.ratio <= 1.05
