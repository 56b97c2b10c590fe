"""What holds of the dispatcher whatever comes: policies, capacities, arrivals, sizes and aborts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import LocalPrefill, Policy, Role
from tests.cluster.control.factory import make_pool
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
