"""Tenants with standing demand get like shares of a worker's tokens, whatever each of them asks.

The bound is that of virtual counters: whoever was let in last had the lowest counter then, and is
ahead by what his requests take from then on, a prompt and the outputs of all slots. Where blocks
are scarce he is also ahead by what passes a large prompt until its aging bound keeps room for it.
"""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.engine.sequence import SequenceState
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import BLOCK_SIZE, Engine

TIERS = Tiers(names=("low", "normal", "high"), default="normal")
STEP_S = 0.01
NUM_AGING_STEPS = 5
MAX_STEPS = 30_000


class Standing:
    """Tenants who always have some requests waiting, at one engine."""

    def __init__(self, sizes, slots, policy, *, is_scarce, chunk, seed):
        self.dice = random.Random(seed)
        self.sizes, self.slots = sizes, slots
        self.most_prompt = max(most for most, _ in sizes.values())
        self.most_output = max(most for _, most in sizes.values())
        room = -(-(self.most_prompt + self.most_output) // BLOCK_SIZE) + 1
        num_blocks = room * (self.dice.randint(1, slots) if is_scarce else slots + 1)
        aging_s = NUM_AGING_STEPS * STEP_S if is_scarce else 1e6
        ordering = Ordering(policy=policy, num_tiers=3, aging_s=aging_s, is_fair=True)
        self.engine = Engine(
            rules=Rules(ordering=ordering, tiers=TIERS), max_num_seqs=slots,
            num_blocks=num_blocks, chunk_tokens=chunk, token_budget=200,
        )  # fmt: skip
        self.is_scarce = is_scarce
        self.served, self.waiting, self.running = Counter(), {}, {}
        self.num_asked = 0
        self.refill()

    @property
    def bound(self):
        """By how many tokens one tenant may be ahead of another."""
        ahead = self.most_prompt + self.slots * self.most_output
        num_passing = NUM_AGING_STEPS * self.slots + self.slots if self.is_scarce else 0
        return ahead + num_passing * (self.most_prompt + self.most_output)

    def refill(self):
        """Each tenant asks until more of it wait than there are slots."""
        tenants = Counter(sequence.tenant for sequence in self.waiting.values())
        short = [t for t in self.sizes for _ in range(self.slots + 1 - tenants[t])]
        self.dice.shuffle(short)
        for tenant in short:
            most_prompt, most_output = self.sizes[tenant]
            sequence = self.engine.add(
                f"{tenant}{self.num_asked}",
                tenant=tenant,
                num_prompt_tokens=self.dice.randint(max(1, most_prompt // 4), most_prompt),
                max_tokens=self.dice.randint(max(1, most_output // 4), most_output),
            )
            self.waiting[sequence.key] = sequence
            self.num_asked += 1

    def step(self):
        if self.dice.random() < 0.05:
            self.abort_one()
        plan = self.engine.step()
        assert plan is not None, "nothing runs though everybody waits"
        for key, sequence in list(self.waiting.items()):
            if sequence.started_at is not None or sequence.state is SequenceState.RUNNING:
                del self.waiting[key]
                self.running[key] = sequence
                self.served[sequence.tenant] += sequence.num_prompt_tokens
        for share in plan.shares:
            self.served[share.key.request_id[0]] += share.is_sampled
        shares = [self.served[tenant] for tenant in self.sizes]
        assert max(shares) - min(shares) <= self.bound, self.served
        self.refill()

    def abort_one(self):
        """Whoever leaves in mid-prompt was served what was computed of it."""
        alive = [s for s in self.running.values() if s.state is not SequenceState.ENDED]
        sequence = self.dice.choice([*self.waiting.values(), *alive])
        if self.waiting.pop(sequence.key, None) is None:
            left = sequence.num_prompt_tokens - sequence.num_prefilled_tokens
            self.served[sequence.tenant] -= left
        self.engine.abort(sequence)


@given(
    sizes=st.dictionaries(
        st.sampled_from("abcde"),
        st.tuples(st.integers(8, 100), st.integers(4, 30)),
        min_size=2,
    ),
    slots=st.integers(1, 5),
    policy=st.sampled_from(Policy),
    is_scarce=st.booleans(),
    chunk=st.sampled_from([0, 16, 64]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=12, deadline=None)
def test_tenants_with_standing_demand_get_token_shares_within_a_factor_of_two(
    sizes, slots, policy, is_scarce, chunk, seed
):
    world = Standing(sizes, slots, policy, is_scarce=is_scarce, chunk=chunk, seed=seed)
    for _ in range(MAX_STEPS):
        world.step()
        if min(world.served[tenant] for tenant in sizes) >= world.bound:
            break
    shares = [world.served[tenant] for tenant in sizes]
    assert max(shares) <= 2 * min(shares), world.served


def test_who_leaves_in_mid_prompt_was_served_what_was_computed():
    """Else whoever gives up a long prompt pays for all of it with his next ones."""
    ordering = Ordering(is_fair=True)
    engine = Engine(max_num_seqs=1, chunk_tokens=16, rules=Rules(ordering=ordering))
    long = engine.add("long", tenant="a", num_prompt_tokens=80)
    engine.add("other", tenant="b", num_prompt_tokens=40, max_tokens=1)
    for tenant in "ba":
        engine.add(f"next-{tenant}", tenant=tenant, max_tokens=1)
    engine.step()
    assert long.num_computed_tokens == 16
    engine.abort(long)
    engine.run_to_end()
    assert [key.request_id for key in engine.log.started] == ["long", "other", "next-a", "next-b"]
