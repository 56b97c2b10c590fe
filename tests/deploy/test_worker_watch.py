"""What a worker looks after by itself, told without a worker: time, legs and links are given."""

from collections import Counter
from types import SimpleNamespace

import pytest

from cluster.kv.block_pool import BlockPool
from deploy.worker_watch import _LEAK_S, TICK_S, WorkerWatch
from tests.factories import FakeClock


class NoLegs(list):
    """The open legs of a half, which had one before."""

    def __init__(self):
        super().__init__()
        self.counts = Counter(received=1)


class Watched:
    """A watch over a pool; ``advance`` lets time pass, tick by tick."""

    def __init__(self):
        self.clock, self.pool, self.is_moving = FakeClock(), BlockPool(8), False
        half = SimpleNamespace(book=NoLegs(), expire=lambda now: None)
        self.watch = WorkerWatch(
            clock=self.clock,
            engine=SimpleNamespace(
                is_hanging=lambda now, since: False, is_stalled=lambda now, since: False
            ),
            pool=self.pool,
            halves=[half],
            are_links_moving=lambda: self.is_moving,
            on_fault=pytest.fail,
        )

    def advance(self, seconds):
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            self.watch.tick(self.clock.now())


def test_a_slow_transfer_of_an_aborted_handoff_is_no_leak():
    """Its bytes were announced, so they are sent, however long that takes."""
    watched = Watched()
    watched.pool.allocate(3, ("segment", "h", 0))
    watched.is_moving = True
    watched.advance(3 * _LEAK_S)
    watched.pool.release(("segment", "h", 0))
    watched.is_moving = False
    watched.advance(3 * _LEAK_S)
    assert (watched.watch.num_pool_checks, watched.watch.num_pool_faults) == (1, 0)


def test_what_is_held_after_the_last_transfer_is_a_leak():
    watched = Watched()
    watched.pool.allocate(3, ("segment", "h", 0))
    watched.is_moving = True
    watched.advance(3 * _LEAK_S)
    watched.is_moving = False
    watched.advance(_LEAK_S - 1)
    with pytest.raises(AssertionError, match="kept for nobody"):
        watched.advance(2)
    assert watched.watch.num_pool_faults == 1
