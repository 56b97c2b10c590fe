"""What holds of the dispatcher whatever comes: policies, capacities, arrivals, sizes and aborts."""

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import LocalPrefill, Policy, Role
from tests.cluster.control.factory import grants, make_pool
from tests.cluster.control.story import Story
from tests.cluster.control.test_planner_random import World

NUM_STEPS = 250


@st.composite
def pools(draw):
    kinds = draw(st.sampled_from(["pairs", "mixed", "all"]))
    kv_tokens, slots = draw(st.sampled_from([512, 640, 1024])), draw(st.integers(1, 4))
    built = []
    if kinds != "mixed":
        built += [
            make_pool("prefill", Role.PREFILL, draw(st.sampled_from([512, 1024])), 4),
            make_pool("decode", Role.DECODE, kv_tokens, slots),
        ]
    if kinds != "pairs":
        built.append(make_pool("both", Role.MIXED, kv_tokens, draw(st.integers(1, 3))))
    return tuple(built)


@given(
    pools=pools(),
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(Policy),
    is_fair=st.booleans(),
    local=st.sampled_from([LocalPrefill.AUTO, LocalPrefill.NEVER]),
)
@settings(max_examples=15, deadline=None)
def test_nothing_is_over_committed_idle_overtaken_or_ended_twice(
    pools, seed, policy, is_fair, local
):
    """P-16: no slot or block is given twice, nobody who has room waits but for one past its aging
    bound, equals keep their order, nobody overtakes by more than the bound, each ends once."""
    world = World(seed, pools, policy=policy, fair_tenants=is_fair, local_prefill=local)
    for _ in range(NUM_STEPS):
        world.step()
    world.drain()
    assert len(world.planner._queue) == 0
    assert not world.planner._ledger.grants


class Standing:
    """Tenants who always have two requests waiting, on one worker whose grants end in turn."""

    def __init__(self, sizes, slots, policy):
        both = make_pool("both", Role.MIXED, 1 << 14, slots)
        self.story = Story(
            both, policy=policy, fair_tenants=True, aging_s=1e6, tenant_queue_share=1.0
        )
        self.sizes = sizes
        self.running = deque()
        self.served = Counter()
        self.tenants = {}
        for tenant in sizes:
            for _ in range(3):
                self.come(tenant)

    def come(self, tenant):
        name = f"r{len(self.tenants)}"
        self.tenants[name] = tenant
        prompt, output = self.sizes[tenant]
        self.take(
            self.story.want(name, tenant=tenant, num_prompt_tokens=prompt, max_tokens=2 * output)
        )

    def take(self, decisions):
        for grant in grants(decisions):
            self.running.append(grant)
            tenant = self.tenants[grant.request_id]
            self.served[tenant] += sum(self.sizes[tenant])
            self.come(tenant)

    def end_one(self):
        grant = self.running.popleft()
        self.story.now += 0.01
        held = [g.grant_id for g in self.running]
        self.take(self.story.report("both-0", *held, num_running=len(held)))
        self.take(self.story.done(grant, self.sizes[self.tenants[grant.request_id]][1]))


@given(
    sizes=st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.integers(1, 400), st.integers(1, 100)),
        min_size=2,
        max_size=4,
    ),
    slots=st.integers(1, 4),
    policy=st.sampled_from(Policy),
)
@settings(max_examples=15, deadline=None)
def test_tenants_with_standing_demand_get_token_shares_within_a_factor_of_two(sizes, slots, policy):
    """However large one's requests are; whoever asks for little gets as many tokens as others."""
    world = Standing(sizes, slots, policy)
    largest = max(sum(size) for size in sizes.values())
    while max(world.served.values()) < 8 * (slots + 1) * largest and len(world.tenants) < 1500:
        world.end_one()
    world.story.planner.check()
    if len(world.tenants) < 1500:
        shares = [world.served[tenant] for tenant in sizes]
        assert max(shares) <= 2 * min(shares), world.served
