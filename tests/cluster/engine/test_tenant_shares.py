"""Tenants with standing demand get like shares of a tier's tokens, whatever each of them asks.

The bound is that of virtual counters: whoever was let in last had the lowest counter then, and is
ahead by what his requests take from then on, a prompt and the outputs of all slots. Where blocks
are scarce he is also ahead by what passes a large prompt until its aging bound keeps room for it.
"""

import random
from collections import Counter

from hypothesis import example, given, settings
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
    """Tenants who always have some requests waiting in some tiers, at one engine.

    Those who are ``eager`` fill half of its slots in the highest tier besides.
    """

    def __init__(self, sizes, slots, policy, *, tiers, eager, is_scarce, chunk, seed):
        self.dice = random.Random(seed)
        self.sizes, self.slots = sizes, slots
        self.tiers = tiers
        self.eager = sorted(eager & sizes.keys()) if "high" not in tiers else []
        self.most_prompt = max(most for most, _ in sizes.values())
        self.most_output = max(most for _, most in sizes.values())
        room = -(-(self.most_prompt + self.most_output) // BLOCK_SIZE) + 1
        num_blocks = room * (self.dice.randint(1, slots) if is_scarce else slots + 1)
        aging_s = NUM_AGING_STEPS * STEP_S if is_scarce else 1e6
        ordering = Ordering(policy=policy, num_tiers=3, aging_s=aging_s, is_fair=True)
        rules = Rules(ordering=ordering, tiers=TIERS)
        self.ranks = {rules.tier(name) for name in tiers}
        self.engine = Engine(
            rules=rules, max_num_seqs=slots,
            num_blocks=num_blocks, chunk_tokens=chunk, token_budget=200,
        )  # fmt: skip
        self.is_scarce = is_scarce
        self.served, self.waiting, self.running = Counter(), {}, {}
        self.extra, self.num_asked = [], 0
        self.refill()

    @property
    def bound(self):
        """By how many tokens one tenant may be ahead of another."""
        ahead = self.most_prompt + self.slots * self.most_output
        num_passing = NUM_AGING_STEPS * self.slots + self.slots if self.is_scarce else 0
        return ahead + num_passing * (self.most_prompt + self.most_output)

    def refill(self):
        """Each tenant asks in each tier until more of it wait than there are slots."""
        lines = Counter((sequence.tenant, sequence.priority) for sequence in self.waiting.values())
        short = [
            (tenant, tier)
            for tenant in self.sizes
            for tier in self.tiers
            for _ in range(self.slots + 1 - lines[tenant, tier])
        ]
        self.extra = [s for s in self.extra if s.state is not SequenceState.ENDED]
        num_more = max(0, self.slots // 2 - len(self.extra)) if self.eager else 0
        short += [(self.dice.choice(self.eager), "high") for _ in range(num_more)]
        self.dice.shuffle(short)
        for tenant, tier in short:
            sequence = self.ask(tenant, tier)
            if tier not in self.tiers:
                self.extra.append(sequence)

    def ask(self, tenant, tier):
        most_prompt, most_output = self.sizes[tenant]
        sequence = self.engine.add(
            f"{tenant}{self.num_asked}",
            tenant=tenant,
            priority=tier,
            num_prompt_tokens=self.dice.randint(max(1, most_prompt // 4), most_prompt),
            max_tokens=self.dice.randint(max(1, most_output // 4), most_output),
        )
        self.waiting[sequence.key] = sequence
        self.num_asked += 1
        return sequence

    def step(self):
        if self.dice.random() < 0.05:
            self.abort_one()
        plan = self.engine.step()
        assert plan is not None, "nothing runs though everybody waits"
        for key, sequence in list(self.waiting.items()):
            if sequence.started_at is not None or sequence.state is SequenceState.RUNNING:
                del self.waiting[key]
                self.running[key] = sequence
                self.served[sequence.tier, sequence.tenant] += sequence.num_prompt_tokens
        for share in plan.shares:
            sequence = self.running[share.key]
            self.served[sequence.tier, sequence.tenant] += share.is_sampled
        for shares in self.shares():
            assert max(shares) - min(shares) <= self.bound, self.served
        self.refill()

    def shares(self):
        """What each tenant was served, of each tier in which all of them always wait."""
        return [[self.served[rank, tenant] for tenant in self.sizes] for rank in self.ranks]

    def settled(self):
        """Of those tiers in which all have had as much as one may be ahead."""
        return [shares for shares in self.shares() if min(shares) >= self.bound]

    def abort_one(self):
        """Whoever leaves in mid-prompt was served what was computed of it."""
        alive = [s for s in self.running.values() if s.state is not SequenceState.ENDED]
        sequence = self.dice.choice([*self.waiting.values(), *alive])
        if self.waiting.pop(sequence.key, None) is None:
            left = sequence.num_prompt_tokens - sequence.num_prefilled_tokens
            self.served[sequence.tier, sequence.tenant] -= left
        self.engine.abort(sequence)


@example(
    sizes={"a": (40, 10), "b": (40, 10)}, slots=4, policy=Policy.PRIORITY, tiers=["normal"],
    eager={"a"}, is_scarce=False, chunk=0, seed=1,
)  # fmt: skip
@given(
    sizes=st.dictionaries(
        st.sampled_from("abcde"),
        st.tuples(st.integers(8, 100), st.integers(4, 30)),
        min_size=2,
    ),
    slots=st.integers(1, 5),
    policy=st.sampled_from(Policy),
    tiers=st.lists(st.sampled_from(TIERS.names), min_size=1, max_size=2, unique=True),
    eager=st.sets(st.sampled_from("abcde")),
    is_scarce=st.booleans(),
    chunk=st.sampled_from([0, 16, 64]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=12, deadline=None)
def test_tenants_with_standing_demand_get_token_shares_within_a_factor_of_two(
    sizes, slots, policy, tiers, eager, is_scarce, chunk, seed
):
    """In each tier, whatever they are served in others."""
    world = Standing(
        sizes, slots, policy,
        tiers=tiers, eager=eager, is_scarce=is_scarce, chunk=chunk, seed=seed,
    )  # fmt: skip
    for _ in range(MAX_STEPS):
        world.step()
        if world.settled():
            break
    assert world.settled(), f"nobody gets anywhere: {world.served}"
    for shares in world.settled():
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
