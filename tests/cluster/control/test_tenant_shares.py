"""Tenants with standing demand get like shares of a tier's tokens, whatever they ask for.

The bound is that of virtual counters: whoever was served last had the lowest counter then, so he
is ahead by his last request, and by what estimates of outputs under way are wrong. Where blocks are
scarce he is also ahead by what passes a large request until its aging bound keeps room for it. As
soon as everybody has had as much as the bound, nobody has more than twice what another has.
"""

import random
from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.config import LocalPrefill, Policy, Preemption, Role, SchedulingConfig
from tests.cluster.control.factory import grants, make_pool, rejects
from tests.cluster.control.story import Story

TIERS = SchedulingConfig().tiers
NUM_WAITING = 3
"""Requests of each tenant in each tier of its demand, at all times."""
GAP_S = 0.01
"""Between two ends."""
AGING_S = 5 * GAP_S
NUM_GAPS = 6
"""Ends while somebody who has no room may still be passed."""


class Standing:
    """Tenants who always have some requests waiting in some tiers, on workers whose grants end in
    any order.

    Those who are ``eager`` fill half of the slots in the highest tier besides.
    """

    def __init__(self, sizes, slots, policy, *, tiers, eager, is_pair, is_scarce, seed):
        self.dice = random.Random(seed)
        self.sizes, self.slots = sizes, slots
        self.tiers = tiers
        self.eager = sorted(eager & sizes.keys()) if "high" not in tiers else []
        self.has_tiers = policy is Policy.PRIORITY
        # With several tiers they take nothing from one another: a grant is a slot.
        is_one_tier = len(tiers) == 1 and not self.eager
        preemption = SchedulingConfig().preemption if is_one_tier else Preemption.OFF
        self.most_output = max(most for _, most in sizes.values())
        self.largest = max(map(sum, sizes.values()))
        # Whatever is asked for has room in an empty pool: else it would be refused.
        most = max(prompt + 2 * output + 1 for prompt, output in sizes.values())
        room = -(-most // 16) * 16 + 64
        kv_tokens = room * (self.dice.randint(1, slots) if is_scarce else slots)
        pools = [make_pool("decode", Role.DECODE, kv_tokens, slots)] if is_pair else []
        role = Role.PREFILL if is_pair else Role.MIXED
        self.story = Story(
            *pools,
            make_pool("prefill", role, 1 << 14 if is_pair else kv_tokens, slots),
            policy=policy, fair_tenants=True, aging_s=AGING_S if is_scarce else 1e6,
            tenant_queue_share=1.0, local_prefill=LocalPrefill.NEVER if is_pair else "auto",
            run_ahead_tokens=1 << 20, preemption=preemption,
        )  # fmt: skip
        self.num_scarce = NUM_GAPS + slots if is_scarce else 0
        self.running, self.waiting, self.asked = [], {}, {}
        self.served = Counter()
        # Others have all slots, so that the tenants come before any of them is served.
        for _ in range(slots):
            self.come("opener", tiers[0], output=self.most_output, prompt=1)
        coming = [(tenant, tier) for tenant in sizes for tier in tiers for _ in range(NUM_WAITING)]
        self.dice.shuffle(coming)
        for tenant, tier in coming:
            self.come(tenant, tier)

    @property
    def bound(self):
        """By how many tokens one tenant may be ahead of another."""
        wrong = self.slots * 2 * self.most_output
        return self.largest + wrong + self.num_scarce * self.largest

    def come(self, tenant, tier, prompt=0, output=0):
        name = f"r{len(self.asked)}"
        most_prompt, most_output = self.sizes.get(tenant, (1, 1))
        prompt = prompt or self.dice.randint(max(1, most_prompt // 4), most_prompt)
        output = output or self.dice.randint(max(1, most_output // 4), most_output)
        self.asked[name] = (tenant, tier, prompt, output)
        self.waiting[name] = (tenant, tier)
        most = self.dice.randint(output, 2 * output) + 1  # more than one: it takes a slot
        decisions = self.story.want(
            name, tenant=tenant, priority=tier, num_prompt_tokens=prompt, max_tokens=most
        )
        assert not rejects(decisions)
        self.take(decisions)

    def take(self, decisions):
        for grant in grants(decisions):
            tenant, tier, prompt, output = self.asked[grant.request_id]
            del self.waiting[grant.request_id]
            self.running.append(grant)
            assert len(self.running) <= self.slots
            if tenant == "opener":
                continue
            self.served[self.share_of(tier), tenant] += prompt + output
            if set(self.waiting.values()) >= {(t, each) for t in self.sizes for each in self.tiers}:
                self.check()
            if tier in self.tiers:
                self.come(tenant, tier)

    def share_of(self, tier):
        """In which tier they share; all of them in one, where tiers have no say."""
        return tier if self.has_tiers else ""

    def check(self):
        for shares in self.shares():
            assert max(shares) - min(shares) <= self.bound, self.served

    def shares(self):
        """What each tenant was served, of each tier in which all of them always wait."""
        tiers = {self.share_of(tier) for tier in self.tiers}
        return [[self.served[tier, tenant] for tenant in self.sizes] for tier in sorted(tiers)]

    def settled(self):
        """Of those tiers in which all have had as much as one may be ahead."""
        return [shares for shares in self.shares() if min(shares) >= self.bound]

    def go_on(self):
        """One of those that run ends; now and then one that waits is given up, and asks again."""
        self.story.now += GAP_S
        ended = self.running.pop(self.dice.randrange(len(self.running)))
        held = [g.grant_id for g in self.running]
        for worker_id in self.story.workers:
            self.take(self.story.report(worker_id, *held, ended.grant_id))
            self.take(self.story.report(worker_id, *held))
        self.take(self.story.done(ended, self.asked[ended.request_id][-1]))
        alive = [*self.waiting, *(grant.request_id for grant in self.running)]
        num_extra = sum(self.asked[name][1] not in self.tiers for name in alive)
        if self.eager and num_extra < self.slots // 2:
            self.come(self.dice.choice(self.eager), "high")
        if self.dice.random() < 0.05:
            name = self.dice.choice(sorted(self.waiting))
            tenant, tier = self.waiting.pop(name)
            self.take(self.story.planner.cancel_want(name, 0, self.story.now))
            self.come(tenant, tier)


@example(
    sizes={"a": (40, 10), "b": (40, 10)}, slots=4, policy=Policy.PRIORITY, tiers=["normal"],
    eager={"a"}, is_scarce=False, is_pair=True, seed=1,
)  # fmt: skip
@given(
    sizes=st.dictionaries(
        st.sampled_from("abcde"),
        st.tuples(st.integers(8, 400), st.integers(4, 100)),
        min_size=2,
    ),
    slots=st.integers(1, 5),
    policy=st.sampled_from(Policy),
    tiers=st.lists(st.sampled_from(TIERS), min_size=1, max_size=2, unique=True),
    eager=st.sets(st.sampled_from("abcde")),
    is_pair=st.booleans(),
    is_scarce=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=12, deadline=None)
def test_tenants_with_standing_demand_get_token_shares_within_a_factor_of_two(
    sizes, slots, policy, tiers, eager, is_pair, is_scarce, seed
):
    """However large one's requests are; whoever asks for little gets as many tokens as others, in
    each tier, whatever they get in others."""
    world = Standing(
        sizes, slots, policy,
        tiers=tiers, eager=eager, is_pair=is_pair, is_scarce=is_scarce, seed=seed,
    )  # fmt: skip
    while not world.settled():
        world.go_on()
    world.story.planner.check()
    for shares in world.settled():
        assert max(shares) <= 2 * min(shares), world.served
