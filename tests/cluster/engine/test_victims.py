"""What is freed when several let go of their blocks, and when nobody needs to count that."""

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.engine.victims import Victims, freed_in_turn
from cluster.kv.block_pool import BlockPool
from cluster.kv.outside import Demand
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import BLOCK_SIZE, Engine, make_key

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
        BlockPool, "shares_of", lambda pool, key: counted.append(key) or shares_of(pool, key)
    )
    victims, live = Victims.of(engine.pool, BY_TIER), engine.scheduler._live.values()

    def chosen(num_blocks):
        demand = Demand(num_blocks=num_blocks, tier=1)
        return victims.below(demand, live, engine.clock.now(), needs_slot=False)

    assert (chosen(5), counted) == ([], []), "4 are all that they hold"
    assert chosen(4) == lows[::-1]
    assert counted == [low.key for low in lows[::-1]]
