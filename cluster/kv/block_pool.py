"""Who owns which KV block of one worker: the one place where blocks change hands.

    free ──allocate──▶ held by its holders ──the last one lets go──▶ free, or cached
      │                 ▲      │    ▲                                  where it can be found
      │                 │    share, └─────allocate(prefix=...)──────── cached ──evicted──▶ free
      │                 │    rename
      └─reserve─▶ importing(handoff, key) ──cancel──▶ free
                    adopt

    importing ──fence──▶ fenced ──unfence──▶ free

A holder is a sequence's key, ``("export", handoff_id)`` for KV that waits for its decode worker, or
``("swap", key)`` for KV on its way to the swap buffer. A held block may have several holders, each
of which has it once; all of them only read it, for none is shared before it is full
(``cluster.engine.prefix_reuse`` says why that holds). Importing and fenced blocks are nobody's:
fenced are those of a reservation that was given up while bytes were being written into them.
Cached blocks have no holder and keep their KV until somebody needs the room, the ones unused for
longest going first.

Every block is in exactly one of these states; ``check`` proves it. The step thread, the event
loop and link threads all come here, so every method takes ``lock``; whoever must look and then act
holds ``lock`` around both.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.kv.outside import Demand, Outside
from cluster.kv.pool_audit import PoolBooks, check_books
from cluster.request import LegKey

if TYPE_CHECKING:
    from cluster.kv.prefix_index import PrefixIndex
    from cluster.kv.swap_buffer import SwapBuffer

Holder = Hashable
"""A sequence's ``LegKey``, or a name of another kind, e.g. ``("export", handoff_id)``."""


class OwnershipError(AssertionError):
    """A block would have changed hands against the rules: our own bug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Blocks of one pool by state; they add up to the pool's size."""

    free: int
    held: int
    importing: int
    cached: int = 0
    fenced: int = 0


@dataclass(frozen=True, slots=True)
class _Import:
    key: LegKey
    block_ids: tuple[int, ...]


class BlockPool:
    """The blocks of one worker: free + cached + held + importing + fenced = ``num_blocks``."""

    def __init__(
        self, num_blocks: int, prefix: PrefixIndex | None = None, swap: SwapBuffer | None = None
    ) -> None:
        """Without ``prefix`` no block is ever found again, so that none is cached.

        ``swap`` is where the KV of preempted sequences goes, if it is kept.
        """
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.lock = threading.RLock()
        self.prefix = prefix
        self.swap = swap
        self._num_blocks = num_blocks
        # Taken from the end: block 0 first, later the one that was freed last, which is warm.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._held: dict[Holder, list[int]] = {}
        self._num_holders: dict[int, int] = {}
        self._shared: set[int] = set()  # held, and by more than one at once, now or before
        self._importing: dict[str, _Import] = {}
        self._fenced: dict[str, tuple[int, ...]] = {}
        self._num_set_aside = 0
        self.demand: Demand | None = None
        """What was asked for last, by ``ask``."""
        self.outside = Outside(self.lock, self._tell)
        self._subscribers: tuple[Callable[[], None], ...] = ()

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can give out, cached ones included.

        May change at once unless the caller holds ``lock``.
        """
        return len(self._free) + len(self._cached)

    def subscribe(self, on_free: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_free`` whenever blocks can be given out again; the result ends it.

        It runs after the method that freed them gave up its hold of ``lock``, on whichever
        thread that was, so it may only wake somebody.
        """
        with self.lock:
            self._subscribers = (*self._subscribers, on_free)

        def unsubscribe() -> None:
            with self.lock:
                self._subscribers = tuple(fn for fn in self._subscribers if fn is not on_free)

        return unsubscribe

    # ---- held blocks

    def allocate(
        self, num_blocks: int, holder: Holder, *, prefix: Sequence[int] = (), num_spare: int = 0
    ) -> list[int] | None:
        """Append blocks to the holder's and return them; None, and nothing taken, if short.

        ``prefix`` are blocks that were just found by their prefix (hold ``lock`` around both):
        the holder, which has none yet, begins with these. It is short as well where fewer than
        ``num_spare`` blocks could be given out after that.
        """
        with self.lock:
            num_woken = sum(block_id in self._cached for block_id in prefix)
            if num_blocks + num_woken + num_spare > self.num_free:
                return None
            self._check_prefix(prefix, holder)
            # The prefix first: what is evicted for the rest must not be part of it.
            for block_id in prefix:
                self._cached.pop(block_id, None)
            block_ids = [*prefix, *self._take(num_blocks)]
            self._hold(holder, block_ids)
            return block_ids

    def share(self, old: Holder, block_ids: Sequence[int], new: Holder) -> None:
        """Make ``new`` one more holder of blocks that ``old`` holds and nobody writes any more.

        They are appended to those that ``new`` has. Raises OwnershipError where ``old`` does not
        hold one of them, or ``new`` does.
        """
        with self.lock:
            theirs, mine = set(self._held.get(old, ())), set(self._held.get(new, ()))
            if len(set(block_ids)) != len(block_ids) or not theirs.issuperset(block_ids):
                raise OwnershipError(f"{old} does not hold all of {list(block_ids)}")
            if not mine.isdisjoint(block_ids):
                raise OwnershipError(f"{new} holds some of {list(block_ids)} already")
            self._hold(new, block_ids)

    def take_over(self, victim: Holder, num_blocks: int, holder: Holder) -> list[int] | None:
        """Free all blocks of ``victim`` and allocate to ``holder``, with nobody in between.

        Blocks that others hold too stay theirs. None where what is left is too little; the
        victim has no blocks then.
        """
        with self.lock:
            self._let_go(self._held.pop(victim, ()))
            block_ids = self.allocate(num_blocks, holder)
        self._tell()
        return block_ids

    def shares_of(self, holder: Holder, but: Collection[int] = ()) -> tuple[int, dict[int, int]]:
        """Return how many blocks nobody but the holder has, and how many have each of its others;
        of these it may be the last one. Blocks in ``but`` are left out."""
        with self.lock:
            block_ids = [b for b in self._held.get(holder, ()) if b not in but]
            shared = self._shared.intersection(block_ids) if self._shared else ()
            return len(block_ids) - len(shared), {b: self._num_holders[b] for b in shared}

    def held_of(self, block_ids: Iterable[int]) -> frozenset[int]:
        """Return those of the blocks that have a holder now."""
        with self.lock:
            return frozenset(b for b in block_ids if b in self._num_holders)

    def blocks_of(self, holder: Holder) -> tuple[int, ...]:
        """Return the holder's blocks in the order of their tokens; empty if it has none."""
        with self.lock:
            return tuple(self._held.get(holder, ()))

    def release(self, holder: Holder) -> int:
        """Take the holder from its blocks and return how many it had; an unknown one has none.

        A block that nobody else holds is free then, or cached where it can be found.
        """
        with self.lock:
            block_ids = self._held.pop(holder, [])
            self._let_go(block_ids)
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

    def register(self, holder: Holder, first: int, digests: Sequence[bytes]) -> None:
        """Make the holder's blocks from index ``first`` on findable: they are full and computed.

        Nothing happens in a pool without a prefix index.
        """
        if self.prefix is None:
            return
        with self.lock:
            block_ids = self._held[holder][first : first + len(digests)]
            for digest, block_id in zip(digests, block_ids, strict=True):
                self.prefix.put(digest, block_id)

    # ---- importing blocks

    def reserve(self, num_blocks: int, handoff_id: str, key: LegKey) -> list[int] | None:
        """Take free blocks for KV that will come by a handoff; None, and nothing taken, if short.

        Blocks that were set aside for sequences already started are not given out here. Whoever
        has its blocks asks for none any more.
        """
        with self.lock:
            if handoff_id in self._importing or handoff_id in self._fenced:
                raise OwnershipError(f"handoff {handoff_id} has its reservation")
            if num_blocks > self.num_free - self._num_set_aside:
                return None
            block_ids = self._take(num_blocks)
            self._importing[handoff_id] = _Import(key, tuple(block_ids))
            has_asked, self.demand = self.demand is not None, None
            self.outside.import_served()
        if has_asked:
            self._tell()
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
            self._hold(entry.key, entry.block_ids)
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

    # ---- fenced blocks

    def fence(self, handoff_id: str) -> None:
        """End a reservation like ``cancel``, but give its blocks to nobody before ``unfence``.

        For bytes that are being written into the blocks at this moment.
        """
        with self.lock:
            entry = self._importing.pop(handoff_id, None)
            if entry is not None:
                self._fenced[handoff_id] = entry.block_ids

    def unfence(self, handoff_id: str) -> int:
        """End the handoff's fence and return how many blocks it was around; without one: 0."""
        with self.lock:
            block_ids = self._fenced.pop(handoff_id, ())
            self._give_back(block_ids)
        if block_ids:
            self._tell()
        return len(block_ids)

    # ---- for everybody

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

    def ask(self, demand: Demand | None) -> None:
        """Ask whoever schedules sequences to make room for an import; replaces the last call.

        Subscribers are told of it as of free blocks. One of tier 0 is none: nobody is below it.
        """
        if demand is not None and demand.tier < 1:
            demand = None
        with self.lock:
            is_new = demand != self.demand
            self.demand = demand
        if is_new:
            self._tell()

    def counts(self) -> BlockCounts:
        """Return how many blocks are in each state."""
        with self.lock:
            return BlockCounts(
                free=len(self._free),
                held=len(self._num_holders),
                importing=sum(len(entry.block_ids) for entry in self._importing.values()),
                cached=len(self._cached),
                fenced=sum(map(len, self._fenced.values())),
            )

    def check(self) -> None:
        """Prove that every block is in exactly one state and every holder is counted; of the swap
        buffer, that every slot is free or somebody's.

        Raises AssertionError that names what is wrong. For idle workers, and the ends of tests.
        """
        with self.lock:
            check_books(
                PoolBooks(
                    num_blocks=self._num_blocks,
                    free=self._free,
                    cached=self._cached,
                    held=self._held,
                    num_holders=self._num_holders,
                    shared=self._shared,
                    importing={h: entry.block_ids for h, entry in self._importing.items()},
                    fenced=dict(self._fenced),
                    findable=self.prefix.block_ids() if self.prefix is not None else frozenset(),
                    swap=self.swap,
                )
            )

    def _take(self, num_blocks: int) -> list[int]:
        if num_blocks < 0:
            raise ValueError(f"cannot take {num_blocks} blocks")
        return [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        if self.prefix is not None:
            self.prefix.forget(block_id)
        return block_id

    def _hold(self, holder: Holder, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._held.setdefault(holder, []).extend(block_ids)
        for block_id in block_ids:
            count = self._num_holders[block_id] = self._num_holders.get(block_id, 0) + 1
            if count > 1:
                self._shared.add(block_id)

    def _let_go(self, block_ids: Sequence[int]) -> None:
        bare = []
        for block_id in block_ids:
            self._num_holders[block_id] -= 1
            if not self._num_holders[block_id]:
                del self._num_holders[block_id]
                self._shared.discard(block_id)
                bare.append(block_id)
        self._give_back(bare)

    def _give_back(self, block_ids: Sequence[int]) -> None:
        """Put blocks that nobody holds any more where they belong; given in their tokens' order."""
        # The end of a chain is of no use without its beginning, so it shall be evicted first.
        for block_id in reversed(block_ids):
            if self.prefix is not None and block_id in self.prefix:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def _check_prefix(self, prefix: Sequence[int], holder: Holder) -> None:
        if prefix and holder in self._held:
            raise OwnershipError(f"{holder} already holds blocks")
        for block_id in prefix:
            if self.prefix is None or block_id not in self.prefix:
                raise OwnershipError(f"block {block_id} is not to be found by any prefix")

    def _tell(self) -> None:
        for on_free in self._subscribers:
            on_free()
