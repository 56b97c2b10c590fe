"""Who owns which KV block of one worker: the one place where blocks change hands.

    free ──allocate──▶ held by a holder ──release──▶ free
      │                     ▲      └──rename──▶ held by another holder
      └──reserve──▶ importing(handoff, key) ──adopt──┘
                        └──cancel──▶ free

A holder is a sequence's key, or ``("export", handoff_id)`` for KV that waits for its decode
worker. Every block is in exactly one of these places; ``check`` proves it. The step thread, the
event loop and link threads all come here, so every method takes ``lock``; whoever must look and
then act holds ``lock`` around both.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from cluster.request import LegKey

Holder = Hashable
"""A sequence's ``LegKey``, or ``("export", handoff_id)``."""


class OwnershipError(AssertionError):
    """A block would have changed hands against the rules: our own bug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks of one pool by state; they add up to the pool's size."""

    free: int
    held: int
    importing: int


@dataclass(frozen=True, slots=True)
class _Import:
    key: LegKey
    block_ids: tuple[int, ...]


class BlockPool:
    """The blocks of one worker: free + held + importing = ``num_blocks``, no block twice."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.lock = threading.RLock()
        self._num_blocks = num_blocks
        # Taken from the end: block 0 first, later the one that was freed last, which is warm.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[Holder, list[int]] = {}
        self._importing: dict[str, _Import] = {}
        self._num_set_aside = 0
        self._subscribers: tuple[Callable[[], None], ...] = ()

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns; may change at once unless the caller holds ``lock``."""
        return len(self._free)

    def subscribe(self, on_free: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_free`` whenever blocks became free; returns a function that ends it.

        It runs after the method that freed them gave up its hold of ``lock``, on whichever
        thread that was, so it may only wake somebody.
        """
        with self.lock:
            self._subscribers = (*self._subscribers, on_free)

        def unsubscribe() -> None:
            with self.lock:
                self._subscribers = tuple(fn for fn in self._subscribers if fn is not on_free)

        return unsubscribe

    def allocate(self, num_blocks: int, holder: Holder) -> list[int] | None:
        """Append free blocks to the holder's and return them; None, and nothing taken, if short."""
        with self.lock:
            if num_blocks > len(self._free):
                return None
            block_ids = self._take(num_blocks)
            if block_ids:
                self._held.setdefault(holder, []).extend(block_ids)
            return block_ids

    def take_over(self, victim: Holder, num_blocks: int, holder: Holder) -> list[int] | None:
        """Free all blocks of ``victim`` and allocate to ``holder``, with nobody in between.

        None where even these are too few; the victim's blocks are free then.
        """
        with self.lock:
            self._give_back(self._held.pop(victim, ()))
            block_ids = self.allocate(num_blocks, holder)
        self._tell()
        return block_ids

    def blocks_of(self, holder: Holder) -> tuple[int, ...]:
        """Return the holder's blocks in the order of their tokens; empty if it has none."""
        with self.lock:
            return tuple(self._held.get(holder, ()))

    def release(self, holder: Holder) -> int:
        """Free all blocks of the holder and return how many; an unknown holder has none."""
        with self.lock:
            block_ids = self._held.pop(holder, [])
            self._give_back(block_ids)
        if block_ids:
            self._tell()
        return len(block_ids)

    def rename(self, old: Holder, new: Holder) -> None:
        """Pass all blocks of ``old`` to ``new``, which must hold none.

        Raises KeyError where ``old`` holds nothing.
        """
        with self.lock:
            if new in self._held:
                raise OwnershipError(f"{new} already holds blocks")
            self._held[new] = self._held.pop(old)

    def reserve(self, num_blocks: int, handoff_id: str, key: LegKey) -> list[int] | None:
        """Take free blocks for KV that will come by a handoff; None, and nothing taken, if short.

        Blocks that were set aside for sequences already started are not given out here.
        """
        with self.lock:
            if handoff_id in self._importing:
                raise OwnershipError(f"handoff {handoff_id} has its reservation")
            if num_blocks > len(self._free) - self._num_set_aside:
                return None
            block_ids = self._take(num_blocks)
            self._importing[handoff_id] = _Import(key, tuple(block_ids))
            return block_ids

    def importing(self, handoff_id: str) -> tuple[int, ...] | None:
        """Return the blocks reserved for this handoff; None once it was adopted or cancelled."""
        with self.lock:
            entry = self._importing.get(handoff_id)
            return entry.block_ids if entry is not None else None

    def adopt(self, handoff_id: str) -> list[int]:
        """Make the handoff's blocks its sequence's own; raises KeyError when not importing."""
        with self.lock:
            entry = self._importing[handoff_id]
            if entry.key in self._held:
                raise OwnershipError(f"{entry.key} already holds blocks")
            del self._importing[handoff_id]
            if entry.block_ids:
                self._held[entry.key] = list(entry.block_ids)
            return list(entry.block_ids)

    def cancel(self, handoff_id: str) -> int:
        """Free the handoff's reservation and return how many blocks; unknown: 0."""
        with self.lock:
            entry = self._importing.pop(handoff_id, None)
            block_ids = entry.block_ids if entry is not None else ()
            self._give_back(block_ids)
        if block_ids:
            self._tell()
        return len(block_ids)

    def set_aside(self, num_blocks: int) -> None:
        """Leave this many free blocks to sequences that already started; replaces the last call.

        Without it, reservations for newcomers could take every block that becomes free, and a
        preempted sequence would never come back.
        """
        with self.lock:
            has_more = num_blocks < self._num_set_aside
            self._num_set_aside = num_blocks
        if has_more:
            self._tell()

    def counts(self) -> BlockCounts:
        """Return how many blocks are in each state."""
        with self.lock:
            return BlockCounts(
                free=len(self._free),
                held=sum(map(len, self._held.values())),
                importing=sum(len(entry.block_ids) for entry in self._importing.values()),
            )

    def check(self) -> None:
        """Prove that every block is in exactly one place; raises AssertionError naming those not.

        Used when a worker is idle and at the end of tests.
        """
        with self.lock:
            places: dict[int, list[str]] = collections.defaultdict(list)
            for block_id in self._free:
                places[block_id].append("free")
            for holder, block_ids in self._held.items():
                for block_id in block_ids:
                    places[block_id].append(f"held by {holder}")
            for handoff_id, entry in self._importing.items():
                for block_id in entry.block_ids:
                    places[block_id].append(f"importing {handoff_id}")
            wrong = {b: places[b] for b in range(self._num_blocks) if len(places[b]) != 1}
            strangers = sorted(places.keys() - set(range(self._num_blocks)))
        if wrong or strangers:
            raise AssertionError(f"blocks not in exactly one place: {wrong}; unknown: {strangers}")

    def _take(self, num_blocks: int) -> list[int]:
        if num_blocks < 0:
            raise ValueError(f"cannot take {num_blocks} blocks")
        return [self._free.pop() for _ in range(num_blocks)]

    def _give_back(self, block_ids: list[int] | tuple[int, ...]) -> None:
        self._free.extend(reversed(block_ids))

    def _tell(self) -> None:
        for on_free in self._subscribers:
            on_free()
