"""An engine loop on a fake runner that a test can hold and break."""

import threading

from cluster.engine.loop import EngineLoop
from cluster.engine.scheduler import StepScheduler
from cluster.kv.block_pool import BlockPool
from cluster.kv.swap_buffer import SwapBuffer
from tests.factories import (
    BLOCK_SIZE,
    EventLog,
    FakeClock,
    FakeRunner,
    make_sequence,
)

WAIT_S = 10.0


class Told(EventLog):
    """An event log that other threads can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.faults: list[BaseException] = []
        self.threads: set[str] = set()

    def take(self, events) -> None:
        with self.changed:
            super().take(events)
            self.threads.add(threading.current_thread().name)
            self.changed.notify_all()

    def on_fault(self, error: BaseException) -> None:
        with self.changed:
            self.faults.append(error)
            self.changed.notify_all()

    def wait_for(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), "it never happened"

    def wait_for_end(self, sequence):
        self.wait_for(lambda: sequence.key in self.ends)
        return self.ends[sequence.key]


class Gate:
    """Holds the runner inside a step until the test lets it go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, plan) -> None:
        self.entered.set()
        assert self.opened.wait(WAIT_S)


class World:
    """A loop with everything around it."""

    def __init__(
        self, *, num_blocks=100, max_num_seqs=8, on_run=None, pin=None, script=None, swap_slots=0
    ):
        self.clock = FakeClock()
        swap = SwapBuffer(swap_slots) if swap_slots else None
        self.pool = BlockPool(num_blocks, swap=swap)
        self.scheduler = StepScheduler(self.pool, BLOCK_SIZE, max_num_seqs, 1000, 0, 1000)
        self.runner = FakeRunner(clock=self.clock, step_s=0.01, on_run=on_run, script=script)
        self.told = Told()
        self.loop = EngineLoop(
            scheduler=self.scheduler,
            runner=self.runner,
            clock=self.clock,
            on_events=self.told.take,
            on_fault=self.told.on_fault,
            pin=pin,
            copier=self.runner,
        )
        self.clock.on_advance(self.loop.wake)

    def add(self, request_id="r", **fields):
        fields.setdefault("arrived", self.clock.now())
        sequence = make_sequence(request_id, **fields)
        self.loop.add(sequence)
        return sequence
