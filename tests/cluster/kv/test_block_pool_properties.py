"""Any sequence of operations, against a model that only knows who may have which block when."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.kv.block_pool import BlockPool
from tests.factories import BLOCK_SIZE, make_key, make_prefix_index

NUM_BLOCKS = 12
_keys = st.sampled_from([make_key(name) for name in "abcd"])
_holders = st.one_of(_keys, st.sampled_from([("export", "1"), ("export", "2")]))
_handoffs = st.sampled_from(["h1", "h2"])
_tenants = st.sampled_from(["", "t"])
_numbers = st.one_of(st.integers(0, 4), st.just(NUM_BLOCKS))


class Pool(RuleBasedStateMachine):
    """The model: each holder's blocks, each reservation's and what is fenced.

    It keeps no free list and no counts: what nobody has is free or cached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, make_prefix_index())
        self.held: dict[object, list[int]] = {}
        self.importing: dict[str, tuple[object, list[int]]] = {}
        self.fences: dict[str, list[int]] = {}
        self.set_aside = 0
        self.heard = 0
        self.pool.subscribe(self._hear)

    def _hear(self) -> None:
        self.heard += 1

    def taken(self) -> set[int]:
        groups = [*self.held.values(), *(ids for _, ids in self.importing.values())]
        return set().union(*groups, *self.fences.values())

    def num_available(self) -> int:
        return NUM_BLOCKS - len(self.taken())

    def gave(self, block_ids: list[int] | None, num_blocks: int) -> None:
        """What was given out is as much as was asked for, and was nobody's."""
        assert block_ids is not None
        assert len(block_ids) == len(set(block_ids)) == num_blocks
        assert not set(block_ids) & self.taken()

    @rule(holder=_holders, num_blocks=_numbers, num_spare=st.integers(0, 3))
    def allocate(self, holder, num_blocks, num_spare) -> None:
        block_ids = self.pool.allocate(num_blocks, holder, num_spare=num_spare)
        if num_blocks + num_spare > self.num_available():
            assert block_ids is None
            return
        self.gave(block_ids, num_blocks)
        if block_ids:
            self.held.setdefault(holder, []).extend(block_ids)

    @rule(key=_keys, tenant=_tenants, num_blocks=st.integers(1, 5))
    def start_and_end(self, key, tenant, num_blocks) -> None:
        """A whole life, so that there is something cached to begin with."""
        self.release(key)
        self.start_behind_a_prefix(key, tenant, num_blocks)
        self.release(key)

    @rule(holder=_holders, tenant=_tenants, num_blocks=st.integers(1, 5))
    def start_behind_a_prefix(self, holder, tenant, num_blocks) -> None:
        """As the scheduler does it: find, begin with what was found, compute, make findable."""
        if holder in self.held:
            return
        digests: list[bytes] = []
        token_ids = range(num_blocks * BLOCK_SIZE)
        self.pool.prefix.extend(digests, tenant, token_ids)
        prefix = self.pool.prefix.find(digests)
        new = num_blocks + 1 - len(prefix)
        num_cached = len(set(prefix) - self.taken())
        block_ids = self.pool.allocate(new, holder, prefix=prefix)
        if new + num_cached > self.num_available():
            assert block_ids is None
            return
        assert block_ids is not None
        assert block_ids[: len(prefix)] == prefix
        self.gave(block_ids[len(prefix) :], new)
        self.held[holder] = list(block_ids)
        self.pool.register(holder, len(prefix), digests[len(prefix) :])

    @rule(old=_holders, new=_holders, first=st.integers(0, 3), last=st.integers(0, 6))
    def share(self, old, new, first, last) -> None:
        block_ids = self.held.get(old, [])[first:last]
        if old == new or set(block_ids) & set(self.held.get(new, ())):
            return
        self.pool.share(old, block_ids, new)
        if block_ids:
            self.held.setdefault(new, []).extend(block_ids)

    @rule(holder=_holders)
    def release(self, holder) -> None:
        mine = self.held.pop(holder, [])
        heard = self.heard
        assert self.pool.release(holder) == len(mine)
        assert self.heard == heard + bool(mine)

    @rule(victim=_holders, holder=_holders, num_blocks=st.integers(0, 5))
    def take_over(self, victim, holder, num_blocks) -> None:
        if victim == holder:
            return
        self.held.pop(victim, None)
        block_ids = self.pool.take_over(victim, num_blocks, holder)
        if num_blocks > self.num_available():
            assert block_ids is None
            return
        self.gave(block_ids, num_blocks)
        if block_ids:
            self.held.setdefault(holder, []).extend(block_ids)

    @rule(old=_holders, new=_holders)
    def rename(self, old, new) -> None:
        if old in self.held and new not in self.held:
            self.pool.rename(old, new)
            self.held[new] = self.held.pop(old)

    @rule(handoff_id=_handoffs, key=_keys, num_blocks=_numbers)
    def reserve(self, handoff_id, key, num_blocks) -> None:
        if handoff_id in self.importing or handoff_id in self.fences:
            return
        block_ids = self.pool.reserve(num_blocks, handoff_id, key)
        if num_blocks > self.num_available() - self.set_aside:
            assert block_ids is None
            return
        self.gave(block_ids, num_blocks)
        self.importing[handoff_id] = (key, block_ids)

    @rule(handoff_id=_handoffs)
    def adopt(self, handoff_id) -> None:
        key, block_ids = self.importing.get(handoff_id, (None, []))
        if key is None or key in self.held:
            return
        assert self.pool.adopt(handoff_id) == block_ids
        del self.importing[handoff_id]
        if block_ids:
            self.held[key] = list(block_ids)

    @rule(handoff_id=_handoffs)
    def cancel(self, handoff_id) -> None:
        _, block_ids = self.importing.pop(handoff_id, (None, []))
        assert self.pool.cancel(handoff_id) == len(block_ids)

    @rule(handoff_id=_handoffs)
    def fence(self, handoff_id) -> None:
        self.pool.fence(handoff_id)
        if handoff_id in self.importing:
            _, self.fences[handoff_id] = self.importing.pop(handoff_id)

    @rule(handoff_id=_handoffs)
    def unfence(self, handoff_id) -> None:
        assert self.pool.unfence(handoff_id) == len(self.fences.pop(handoff_id, ()))

    @rule(num_blocks=st.integers(0, 4))
    def leave(self, num_blocks) -> None:
        self.pool.set_aside(num_blocks)
        self.set_aside = num_blocks

    @invariant()
    def the_books_agree(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        held = set().union(*self.held.values())
        assert counts.held == len(held)
        assert counts.importing == sum(len(ids) for _, ids in self.importing.values())
        assert counts.fenced == sum(map(len, self.fences.values()))
        assert counts.free + counts.cached == self.pool.num_free == self.num_available()
        for holder, block_ids in self.held.items():
            assert self.pool.blocks_of(holder) == tuple(block_ids)
        for handoff_id, (_, block_ids) in self.importing.items():
            assert self.pool.importing(handoff_id) == tuple(block_ids)


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
