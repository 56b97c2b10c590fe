"""P-16: a request ages from when its router took it, whichever workers it comes to."""

import pytest

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.kv.outside import Demand
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import expected_tokens, make_key
from tests.lifecycle.pair import MAX_TOKENS, PATIENCE_S, Pair

TIERS = Tiers(names=("low", "normal", "high"), default="normal")
BY_TIER = Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=3), tiers=TIERS)
AGING_S = BY_TIER.ordering.aging_s


def live(pair: Pair, name: str):
    return pair.d_engine.scheduler._live[make_key(name)]


async def end_all(pair: Pair, **lengths) -> None:
    await pair.run_dry()
    for name, length in lengths.items():
        assert pair.d_sink.output(make_key(name)) == expected_tokens(name, length)
    assert pair.d_pool.demand is None
    pair.assert_idle()


@pytest.mark.parametrize("is_local", [False, True], ids=["imported", "local"])
async def test_one_that_aged_before_it_came_gives_nothing(is_local):
    """The one beside it gives way, which came to this worker first."""
    pair = Pair(d_blocks=14, rules=BY_TIER)
    sizes = {"num_prompt_tokens": 20, "max_tokens": 10}
    pair.start("young", priority="low", **sizes)
    start = pair.start_local if is_local else pair.start
    start("aged", priority="low", waited_s=AGING_S, **sizes)
    await pair.prefill_all()
    await pair.step_decode(4 if is_local else 2)
    young, aged = live(pair, "young"), live(pair, "aged")
    assert pair.d_engine.scheduler.holdings(pair.clock.now()).firm == {aged.key}
    pair.start("high", priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    await pair.step_decode()
    assert (young.num_preemptions, aged.num_preemptions) == (1, 0)
    await end_all(pair, young=10, aged=10, high=MAX_TOKENS)


async def test_a_handoff_does_not_make_it_young_again():
    pair = Pair(d_blocks=14, rules=BY_TIER)
    pair.wire.holds_bytes = True
    pair.start("low", priority="low", waited_s=AGING_S - 1.0, num_prompt_tokens=40)
    await pair.prefill_all()
    pair.clock.advance(1.5)
    pair.wire.let_go()
    await pair.settle()
    await pair.step_decode()
    low = live(pair, "low")
    pair.start("high", priority="high", num_prompt_tokens=20)
    await pair.prefill_all()
    await pair.step_decode()
    assert pair.decode.inbox.num_waiting == 1
    assert low.num_preemptions == 0
    await end_all(pair, low=MAX_TOKENS, high=MAX_TOKENS)


async def test_an_export_that_goes_out_again_is_as_old_as_before():
    pair = Pair(rules=BY_TIER)
    pair.add_decode("e")
    pair.start("low", priority="low", waited_s=2.0)
    await pair.step_prefill()
    came = pair.clock.now() - 2.0
    pair.clock.advance(1.0)
    pair.wire.cut()
    await pair.prefill_all()
    pair.redirect("e", "low", priority="low", waited_s=3.0)
    await pair.settle()
    side = pair.sides["e"]
    (sequence,) = side.engine.scheduler._live.values()
    assert (sequence.arrived, sequence.entered) == (came, pair.clock.now())
    await pair.run_dry()
    pair.assert_idle()


@pytest.mark.parametrize("ages_here", [False, True], ids=["aged", "ages"])
async def test_an_aged_import_is_not_passed_by_those_of_higher_tiers(ages_here):
    """However steadily they come, blocks are its as soon as there are enough."""
    pair = Pair(d_blocks=14, rules=BY_TIER)
    pair.d_pool.allocate(13, "another")
    waited_s = AGING_S - PATIENCE_S / 2 if ages_here else AGING_S
    pair.start("low", priority="low", waited_s=waited_s, num_prompt_tokens=28)
    await pair.prefill_all()
    if ages_here:
        pair.clock.advance(0.1)
        pair.start("before", priority="high", num_prompt_tokens=16)
        await pair.prefill_all()
        assert pair.d_pool.demand == Demand(num_blocks=4, tier=2, is_import=True)
        pair.pass_time(PATIENCE_S / 2)
    assert pair.d_pool.demand == Demand(num_blocks=7, tier=2, is_import=True)
    pair.start("high", priority="high", num_prompt_tokens=16)
    await pair.prefill_all()
    assert pair.decode.inbox.num_waiting == 2 + ages_here
    pair.d_pool.release("another")
    await pair.settle()
    assert next(iter(pair.d_engine.scheduler._live)) == make_key("low")
    lengths = {"low": MAX_TOKENS, "high": MAX_TOKENS}
    await end_all(pair, **lengths, **({"before": MAX_TOKENS} if ages_here else {}))
