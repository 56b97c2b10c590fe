"""Which slots of the swap buffer hold whose blocks: KV of preempted sequences, outside the pool.

    held by its key ──share, release──▶ leaving ──copied──▶ out ──bring back──▶ entering ──copied──▶
                                        blocks              slots               blocks      held by
                                        and slots           only                and slots   its key

A leaving block is held by ``swap_holder(key)``, so that nobody is given it before it was copied.
The buffer only keeps the books of its slots; all of it runs under the lock of the pool it belongs
to, whose ``check`` proves these books too. Where the bytes are is ``swap_memory``'s business.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

_LEAVING = "swap"


def swap_holder(key: Hashable) -> tuple[str, Hashable]:
    """Return the pool's name for the holder of the blocks that leave."""
    return (_LEAVING, key)


class SwapBuffer:
    """Slots of one block each; a sequence has its own from its preemption until it is back."""

    def __init__(self, num_slots: int) -> None:
        """Raises ValueError for a buffer without slots."""
        if num_slots < 1:
            raise ValueError(f"a swap buffer needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        # Taken from the end: slot 0 first, so that a buffer that is little used stays small.
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: dict[Hashable, tuple[int, ...]] = {}

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        return len(self._free)

    @property
    def num_holders(self) -> int:
        """Sequences that have slots."""
        return len(self._held)

    def take(self, key: Hashable, num_slots: int) -> tuple[int, ...] | None:
        """Return slots for as many blocks; None, and nothing taken, where the buffer is too full.

        Raises ValueError where ``key`` has slots already.
        """
        if key in self._held:
            raise ValueError(f"{key} is in the swap buffer already")
        if num_slots > len(self._free):
            return None
        slots = tuple(self._free.pop() for _ in range(num_slots))
        self._held[key] = slots
        return slots

    def slots_of(self, key: Hashable) -> tuple[int, ...]:
        """Return its slots in the order of its tokens; empty where it has none."""
        return self._held.get(key, ())

    def give_back(self, key: Hashable) -> int:
        """Free its slots and return how many; one that has none frees none."""
        slots = self._held.pop(key, ())
        self._free.extend(reversed(slots))
        return len(slots)

    def faults(self, held: Mapping[Hashable, Iterable[int]]) -> Iterable[str]:
        """Yield what is wrong: a slot not in exactly one place, or leaving blocks without slots.

        ``held`` are the pool's holders with their blocks.
        """
        places = collections.Counter(self._free)
        for slots in self._held.values():
            places.update(slots)
        wrong = sorted(s for s in range(self.num_slots) if places.pop(s, 0) != 1)
        if wrong or places:
            yield f"swap slots not in exactly one place: {[*wrong, *sorted(places)]}"
        for holder, block_ids in held.items():
            if isinstance(holder, tuple) and len(holder) == 2 and holder[0] == _LEAVING:
                num_blocks, num_slots = len(list(block_ids)), len(self.slots_of(holder[1]))
                if num_blocks != num_slots:
                    yield f"{num_blocks} blocks of {holder[1]} leave for {num_slots} slots"
