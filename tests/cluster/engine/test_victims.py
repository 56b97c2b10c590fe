"""What is freed when several let go of their blocks, and when nobody needs to count that."""

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.engine.victims import Victims, freed_in_turn
from cluster.kv.block_pool import BlockPool
from cluster.kv.outside import Demand
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import BLOCK_SIZE, Engine, make_key, make_prompt

A, B, C = make_key("a"), make_key("b"), make_key("c")
TIERS = Tiers(names=("low", "normal", "high"), default="normal")
BY_TIER = Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=3), tiers=TIERS)


def test_a_block_is_free_when_the_last_of_its_holders_lets_go():
    pool = BlockPool(10)
    both, all_three, _ = pool.allocate(3, A)
    pool.share(A, [both, all_three], B)
    pool.share(A, [all_three], C)
    pool.allocate(2, B)
    assert list(freed_in_turn(pool, [A, B, C])) == [1, 3, 1]
    assert list(freed_in_turn(pool, [B, A])) == [2, 2], "C keeps one"
    pool.share(A, [both], ("export", "h"))
    assert list(freed_in_turn(pool, [A, B, C])) == [1, 2, 1], "what is sent stays"
    assert list(freed_in_turn(pool, [make_key("unknown")])) == [0]


def test_nobodys_blocks_are_counted_where_all_of_them_together_are_too_few(monkeypatch):
    engine = Engine(rules=BY_TIER)
    lows = [engine.add(n, priority="low", num_prompt_tokens=2 * BLOCK_SIZE) for n in ("l1", "l2")]
    engine.add("h", priority="high")
    engine.step()
    counted = []
    shares_of = BlockPool.shares_of
    monkeypatch.setattr(
        BlockPool, "shares_of", lambda pool, key, but: counted.append(key) or shares_of(pool, key)
    )
    victims, live = Victims.of(engine.pool, BY_TIER), engine.scheduler._live.values()

    def chosen(num_blocks):
        demand = Demand(num_blocks=num_blocks, tier=1)
        return victims.below(demand, live, engine.clock.now(), needs_slot=False)

    assert (chosen(5), counted) == ([], []), "4 are all that they hold"
    assert chosen(4) == lows[::-1]
    assert counted == [low.key for low in lows[::-1]]


def preempted_by_one_that_shares(holder_tier: str, num_more: int):
    """Two low ones run, and one whose prompt a high one has too, with so many tokens behind it."""
    engine = Engine(rules=BY_TIER, num_blocks=17, has_prefix_cache=True)
    shared = make_prompt(6 * BLOCK_SIZE, "shared")
    running = [
        engine.add(name, priority="low", num_prompt_tokens=5 * BLOCK_SIZE - 2, max_tokens=9)
        for name in ("older", "younger")
    ]
    running.append(engine.add("holder", priority=holder_tier, prompt_ids=shared, max_tokens=9))
    engine.step()
    prompt = (*shared, *range(7, 7 + num_more))
    high = engine.add("high", priority="high", prompt_ids=prompt, max_tokens=3)
    engine.step()
    assert high.num_cached_tokens == len(shared)
    return {sequence.key.request_id for sequence in running if sequence.num_preemptions}


def test_blocks_that_it_will_share_need_not_be_given():
    """P-15, P-17: of its seven or so it lacks one; five are more than enough."""
    assert preempted_by_one_that_shares("high", num_more=2) == {"younger"}


def test_blocks_that_it_will_share_are_no_gain_where_they_are_given():
    """P-15, P-17: all that the youngest has is of no use, and so the next gives too, at once."""
    assert preempted_by_one_that_shares("low", num_more=2 * BLOCK_SIZE) == {"holder", "younger"}
