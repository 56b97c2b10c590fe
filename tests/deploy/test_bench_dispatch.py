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
    size = DispatchSize(num_workers=20, num_waiting=100, num_placements=50, num_choices=20)
    rate, cost = measure(site, size)
    assert rate.name == cost.name == NAME
    assert rate.value > 0
    assert cost.ratio <= 1.05
