"""The step thread of one worker: schedule, tell who started, run, commit, tell what came of it.

    any thread ──add, abort──▶ inbox ──▶ step thread ──on_events──▶ the worker's halves

The thread owns scheduler and runner. It sleeps only when nothing can be computed, and wakes by
events: a command, blocks that became free, the next deadline, or ``wake``. Commands take effect
between steps; an abort that came during a step drops that step's token.

A step that raises is a fault, and the worker's death: all sequences end with ``WorkerLost``, as
does whatever is added later. Those in that step may be why: their error's stage is ``IN_STEP``.
``on_fault`` is called once, whatever else fails. After ``stop`` the rest ends with ``Cancelled``.
"""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from cluster.engine import stored
from cluster.engine.plan import Outcome, Plan, SequenceEnd, StepEvents, Swaps
from cluster.engine.sequence import Sequence
from cluster.engine.snapshot import EngineSnapshot
from cluster.engine.step_model import StepModel
from cluster.errors import IN_STEP, Cancelled, PdserveError, WorkerLost
from cluster.request import Beat, LegKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.clock import Clock
    from cluster.engine.scheduler import StepScheduler

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0
"""Waits are cut here: a lock cannot time out after any number of seconds."""
_NO_EVENTS = StepEvents()
_STALL_FLOOR_S = 5.0
_STALL_FACTOR = 4.0
"""A step that takes longer than both the floor and so many times its prediction hangs."""
_STUCK_FACTOR = 2.0
"""One that takes so many times longer than that is stuck for good."""


class KVCopier(Protocol):
    """What moves KV between a pool's blocks and its swap buffer; used by the step thread only."""

    def copy_out(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks to slots, given as (block, slot)."""
        ...

    def copy_back(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Copy slots to blocks, given as (slot, block)."""
        ...


class Runner(Protocol):
    """What computes steps; used by the step thread only."""

    def run(self, plan: Plan, on_stored: stored.OnStored | None = None) -> Outcome:
        """Compute the shares, draw for the sampled ones, and tell of layers where that is asked."""
        ...


@dataclass(frozen=True, slots=True)
class _Abort:
    key: LegKey
    error: PdserveError


@dataclass(frozen=True, slots=True)
class _Pass:
    """One round of the step thread, from its wait to its next one."""

    since: float
    patience_s: float = _STALL_FLOOR_S


class EngineLoop:
    """Runs one engine on a thread of its own.

    ``on_events`` is called on that thread: before a step when sequences start in it, after a
    step, and when something ended without one. Only before ``start`` and after the thread has
    ended, ``add`` and ``stop`` may call it on their caller's thread.
    """

    def __init__(  # noqa: PLR0913 (the parts it is made of)
        self,
        *,
        scheduler: StepScheduler,
        runner: Runner,
        clock: Clock,
        on_events: Callable[[StepEvents], None],
        on_fault: Callable[[BaseException], None],
        pin: Callable[[], None] | None = None,
        speed: StepModel | None = None,
        copier: KVCopier | None = None,
    ) -> None:
        """``speed`` is what is known of it before the first step.

        ``copier`` is needed where the scheduler's pool has a swap buffer.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._on_events = on_events
        self._on_fault = on_fault
        self._pin = pin
        self._copier = copier
        self._num_swaps_refused = 0
        self._speed = speed or StepModel()
        self._pass: _Pass | None = None
        self._num_steps = 0
        self._fault: WorkerLost | None = None
        self._published = EngineSnapshot()
        self._thread: threading.Thread | None = None
        # The condition guards what is below. Nothing else is locked or called under it, so that
        # it can be taken under the pool's lock.
        self._changed = threading.Condition(threading.Lock())
        self._inbox: list[Sequence | _Abort] = []
        self._has_news = False
        self._is_stopping = False
        self._is_over = False

    def start(self) -> None:
        """Start the step thread; raises RuntimeError when it was started or stopped before."""
        with self._changed:
            if self._thread is not None or self._is_stopping:
                raise RuntimeError("an engine loop starts once")
            self._thread = threading.Thread(target=self._main, name="engine-step", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop after the running step and end with ``Cancelled`` what is left; idempotent.

        Returns whether the step thread has ended. A step that outlasts ``timeout_s`` is left to end
        by itself; its sequences end then, and until then it writes to their blocks.
        """
        with self._changed:
            self._is_stopping = True
            thread = self._thread
            is_mine = thread is None and not self._is_over
            self._is_over = self._is_over or is_mine
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                logger.error("thread=%s still in a step after %.1f s", thread.name, timeout_s)
                return False
        elif is_mine:
            self._close()
        return True

    def add(self, sequence: Sequence) -> None:
        """Hand a sequence to the step thread; it ends exactly once, also after a fault or stop."""
        if not self._post(sequence):
            self._refuse(sequence)

    def abort(self, key: LegKey, error: PdserveError) -> None:
        """End a sequence with ``error`` between two steps; nothing happens where it ended."""
        self._post(_Abort(key, error))

    def wake(self) -> None:
        """Have the step thread look again at the clock and the pool."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._has_news = True
            self._changed.notify()

    def snapshot(self) -> EngineSnapshot:
        """Return the load as of the last step, with what was added since."""
        with self._changed:
            added = [item for item in self._inbox if isinstance(item, Sequence)]
            published = self._published
        if not added:
            return published
        return replace(
            published,
            num_waiting=published.num_waiting + len(added),
            queued_tokens=published.queued_tokens + sum(s.num_tokens_left for s in added),
        )

    def beat(self) -> Beat:
        """Return how far the step thread is, and how long its running step may take."""
        running = self._pass
        return Beat(self._num_steps, 0.0 if running is None else running.patience_s)

    def is_stalled(self, now: float, awake_since: float = float("-inf")) -> bool:
        """Whether the step thread is stuck: in one step for twice as long as ``beat`` allows.

        Others give it no work before that. Waiting is no stall: blocks may be held by exports,
        which have deadlines of their own.
        Time before ``awake_since`` does not count, as when the whole process had been stopped.
        """
        return self._takes_longer(_STUCK_FACTOR, now, awake_since)

    def is_hanging(self, now: float, awake_since: float = float("-inf")) -> bool:
        """Whether one step takes longer than ``beat`` allows; it may come to its end still."""
        return self._takes_longer(1.0, now, awake_since)

    def _takes_longer(self, num_patiences: float, now: float, awake_since: float) -> bool:
        running = self._pass
        if running is None:
            return False
        return now - max(running.since, awake_since) > num_patiences * running.patience_s

    def _post(self, item: Sequence | _Abort) -> bool:
        with self._changed:
            if self._is_over:
                return False
            self._inbox.append(item)
            self._changed.notify()
            return True

    def _main(self) -> None:
        unsubscribe = self._scheduler.pool.subscribe(self.wake)
        try:
            self._guarded(self._pin_thread)
            while not self._is_stopping:
                if not self._guarded(self._step):
                    self._wait()
        finally:
            unsubscribe()
            self._close()

    def _pin_thread(self) -> bool:
        if self._pin is not None:
            self._pin()
        return True

    def _guarded(self, action: Callable[[], bool]) -> bool:
        """Do it; what it raises is the engine's fault, or a later one that changes nothing."""
        self._pass = _Pass(self._clock.now())
        try:
            return action()
        except BaseException as error:  # whatever it is: in silence every leg would hang
            logger.exception("thread=engine-step a step failed")
            is_first = self._fault is None
            if self._fault is None:
                self._fault = WorkerLost(f"a step failed: {type(error).__name__}", stage=IN_STEP)
                self._fault.__cause__ = error
            self._end_all(self._fault)
            if is_first:
                self._call(functools.partial(self._on_fault, error))
            return False
        finally:
            self._pass = None

    def _step(self) -> bool:
        """Make one step; False when there was nothing to compute."""
        self._take_inbox()
        if self._fault is not None:
            self._tell(self._scheduler.take_events())
            return False
        started_at = self._clock.now()
        plan = self._scheduler.schedule(started_at)
        self._publish()
        self._tell(self._scheduler.take_events())
        if plan is None:
            return False
        if plan.swaps is not None:
            self._swap(plan, plan.swaps)
            return True
        num_decodes = sum(len(share.token_ids) == 1 for share in plan.shares)
        num_prefills = plan.num_tokens - num_decodes
        predicted_s = self._speed.predict(num_decodes, num_prefills)
        self._pass = _Pass(started_at, max(_STALL_FLOOR_S, _STALL_FACTOR * predicted_s))
        outcome = stored.run(self._runner, plan, self._on_events)
        self._take_inbox()
        now = self._clock.now()
        events = self._scheduler.commit(plan, outcome, now)
        self._num_steps += 1
        self._speed.observe(num_decodes, num_prefills, now - started_at)
        self._publish()
        self._tell(events)
        return True

    def _swap(self, plan: Plan, swaps: Swaps) -> None:
        """Copy between two steps: quick enough not to be one."""
        assert self._copier is not None, "the pool has a swap buffer"
        self._copier.copy_out(swaps.out)
        self._copier.copy_back(swaps.back)
        self._take_inbox()
        self._tell(self._scheduler.commit(plan, Outcome({}), self._clock.now()))
        self._publish()

    def _take_inbox(self) -> None:
        with self._changed:
            items, self._inbox = self._inbox, []
            self._has_news = False
        for item in items:
            if isinstance(item, _Abort):
                self._scheduler.abort(item.key, item.error, self._clock.now())
                continue
            try:
                self._scheduler.add(item)
            except ValueError:
                logger.exception("seq=%s added twice, the second is dropped", item.key)
        if self._fault is not None:
            self._abort_all(self._fault)

    def _wait(self) -> None:
        # After a fault nothing expires: what could not be ended then must not keep us awake.
        now = self._clock.now()
        deadline = self._scheduler.next_instant(now) if self._fault is None else None
        with self._changed:
            if self._inbox or self._has_news or self._is_stopping:
                return
            timeout_s = None
            if deadline is not None:
                timeout_s = min(max(0.0, deadline - now), _LONGEST_WAIT_S)
            self._changed.wait(timeout_s)

    def _tell(self, events: StepEvents) -> None:
        if events != _NO_EVENTS:
            self._on_events(events)

    def _publish(self) -> None:
        scheduler, speed, swapping = self._scheduler, self._speed, self._scheduler.swapping
        self._published = EngineSnapshot(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            queued_tokens=scheduler.queued_tokens,
            num_steps=self._num_steps,
            step_base_s=speed.base_s,
            step_per_seq_s=speed.per_seq_s,
            prefill_per_token_s=speed.prefill_per_token_s,
            num_preemptions=scheduler.num_preemptions,
            num_swapped=swapping.num_swapped,
            num_swaps_refused=swapping.num_refused,
            num_blocks_swapped=swapping.num_blocks_copied,
            generated_tokens=scheduler.num_generated_tokens,
            prefilled_tokens=scheduler.num_prefilled_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            holdings=scheduler.holdings(self._clock.now()),
        )
        if swapping.num_refused > self._num_swaps_refused:
            self._num_swaps_refused = swapping.num_refused
            logger.warning(
                "swaps_refused=%d the swap buffer is full: KV is dropped, and computed again later",
                swapping.num_refused,
            )

    def _end_all(self, error: PdserveError) -> None:
        self._call(functools.partial(self._abort_all, error))
        self._call(self._publish)
        self._call(lambda: self._tell(self._scheduler.take_events()))

    def _abort_all(self, error: PdserveError) -> None:
        self._scheduler.abort_all(error, self._clock.now(), others=self._outside_error())

    def _call(self, action: Callable[[], object]) -> None:
        """Call out of a fault: what fails now must not hide the ends of the others."""
        try:
            action()
        except BaseException:
            logger.exception("thread=engine-step a callback failed after the fault")

    def _outside_error(self) -> PdserveError:
        """What to say of those that were in no step when it failed or ended."""
        if self._fault is None:
            return Cancelled("the worker stopped", stage="engine")
        return WorkerLost("the worker's engine failed in a step without this", stage="queue")

    def _close(self) -> None:
        """End what is left; from here on ``add`` refuses on its caller's thread."""
        with self._changed:
            self._is_over = True
        self._call(self._take_inbox_and_end)

    def _take_inbox_and_end(self) -> None:
        self._take_inbox()
        self._end_all(self._fault or self._outside_error())

    def _refuse(self, sequence: Sequence) -> None:
        self._scheduler.pool.release(sequence.key)
        self._on_events(
            StepEvents(ends=(SequenceEnd(key=sequence.key, error=self._outside_error()),))
        )
