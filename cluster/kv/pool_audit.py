"""Proves a block pool's books: every block is in exactly one state, and every holder is counted."""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass

from cluster.kv.swap_buffer import SwapBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolBooks:
    """All that a pool has written down, as it is while its lock is held."""

    num_blocks: int
    free: Iterable[int]
    cached: Iterable[int]
    held: Mapping[Hashable, Iterable[int]]
    """Each holder's blocks."""
    num_holders: Mapping[int, int]
    """Block -> how many hold it, as the pool counted along."""
    shared: Set[int]
    """Held blocks, among them all that several hold."""
    importing: Mapping[str, Iterable[int]]
    fenced: Mapping[str, Iterable[int]]
    findable: Collection[int]
    """Blocks that the prefix index names."""
    swap: SwapBuffer | None = None


def check_books(books: PoolBooks) -> None:
    """Raise AssertionError, naming every wrong block, unless all books agree.

    Proven: free + cached + held + importing + fenced = all blocks, with none in two of them;
    the count of each block's holders; no holder with a block twice; that only what is held or
    cached can be found by its prefix; and the swap buffer's slots.
    """
    places = _places(books)
    faults = [*_misplaced(books, places), *_miscounted(books), *_unindexed(books, places)]
    if books.swap is not None:
        faults.extend(books.swap.faults(books.held))
    if faults:
        raise AssertionError("KV pool: " + "; ".join(faults))


def _places(books: PoolBooks) -> dict[int, list[str]]:
    """Return the states in which each block was found; holders of one block are one state."""
    places: dict[int, list[str]] = collections.defaultdict(list)
    for block_id in books.free:
        places[block_id].append("free")
    for block_id in books.cached:
        places[block_id].append("cached")
    for block_id, holders in _holders(books).items():
        places[block_id].append("held by " + ", ".join(map(str, holders)))
    for handoff_id, block_ids in books.importing.items():
        for block_id in block_ids:
            places[block_id].append(f"importing {handoff_id}")
    for handoff_id, block_ids in books.fenced.items():
        for block_id in block_ids:
            places[block_id].append(f"fenced for {handoff_id}")
    return places


def _holders(books: PoolBooks) -> dict[int, list[Hashable]]:
    holders: dict[int, list[Hashable]] = collections.defaultdict(list)
    for holder, block_ids in books.held.items():
        for block_id in block_ids:
            holders[block_id].append(holder)
    return holders


def _misplaced(books: PoolBooks, places: Mapping[int, list[str]]) -> Iterable[str]:
    everything = range(books.num_blocks)
    wrong = {b: places.get(b, []) for b in everything if len(places.get(b, ())) != 1}
    strangers = sorted(set(places) - set(everything))
    if wrong:
        yield f"blocks not in exactly one place: {wrong}"
    if strangers:
        yield f"blocks not in exactly one place, unknown to this pool: {strangers}"


def _miscounted(books: PoolBooks) -> Iterable[str]:
    holders = _holders(books)
    for block_id in sorted(holders.keys() | books.num_holders.keys()):
        found = holders.get(block_id, [])
        counted = books.num_holders.get(block_id, 0)
        if len(found) != counted:
            names = ", ".join(map(str, found)) or "nobody"
            yield f"block {block_id} is held by {names}, but {counted} holders are counted"
        elif len(set(found)) != len(found):
            yield f"block {block_id} is held twice by one of {found}"
        if len(found) > 1 and block_id not in books.shared:
            yield f"block {block_id} has {len(found)} holders, and is not listed as shared"
    for block_id in sorted(books.shared - holders.keys()):
        yield f"block {block_id} has no holder, and is listed as shared"


def _unindexed(books: PoolBooks, places: Mapping[int, list[str]]) -> Iterable[str]:
    lost = sorted(set(books.cached) - set(books.findable))
    if lost:
        yield f"cached blocks that no prefix finds: {lost}"
    for block_id in sorted(books.findable):
        state = places.get(block_id, ["nowhere"])[0]
        if state != "cached" and not state.startswith("held"):
            yield f"block {block_id} can be found by its prefix, but is {state}"
