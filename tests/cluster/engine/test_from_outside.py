"""What an engine takes, and leaves, while blocks are to come from outside it."""

from dataclasses import replace

import pytest

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.kv.outside import Outsider
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import BLOCK_SIZE, Engine, expected_tokens, make_key

TIERS = Tiers(names=("low", "normal", "high"), default="normal")
BY_TIER = Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=3), tiers=TIERS)
EXPORT = ("export", "h")


def running(plan):
    return {share.key.request_id for share in plan.shares}


def fence(engine, num_blocks):
    """Blocks of an import that gave way while bytes were written into them."""
    assert engine.pool.reserve(num_blocks, "h", make_key("gone")) is not None
    engine.pool.fence("h")


def test_one_that_comes_takes_nobodys_blocks_while_enough_are_about_to_be_free():
    """P-15: and no lower one has them before it."""
    engine = Engine(num_blocks=16, rules=BY_TIER)
    low = engine.add("low", priority="low", num_prompt_tokens=16, max_tokens=12)
    engine.step()
    fence(engine, 6)
    engine.add("high", priority="high", num_prompt_tokens=24)
    assert running(engine.step()) == {"low"}
    assert engine.pool.outside.kept_from(low.tier) > engine.pool.num_free
    engine.pool.unfence("h")
    assert running(engine.step()) == {"low", "high"}
    assert low.num_preemptions == 0
    engine.run_to_end()
    engine.assert_idle()


def test_one_that_grows_waits_for_them_too():
    engine = Engine(num_blocks=8, rules=BY_TIER)
    engine.add("normal", num_prompt_tokens=16, max_tokens=6)
    low = engine.add("low", priority="low", num_prompt_tokens=4, max_tokens=6)
    engine.step()
    fence(engine, engine.pool.num_free)
    assert engine.step() is None
    engine.pool.unfence("h")
    assert running(engine.step()) == {"low", "normal"}
    assert low.num_preemptions == 0
    engine.run_to_end()
    engine.assert_idle()


def test_nobody_behind_one_without_a_slot_takes_the_blocks_that_it_asked_for():
    """P-15: nor the slot; it has both once the export gave its blocks."""
    engine = Engine(num_blocks=14, max_num_seqs=1, rules=BY_TIER)
    engine.add("low", priority="low", num_prompt_tokens=4, max_tokens=20)
    engine.step()
    engine.pool.allocate(6, EXPORT)
    now = engine.clock.now()
    engine.pool.outside.enter(Outsider(holder=EXPORT, tier=0, arrived=now, num_preemptions=0))
    engine.add("high", priority="high", num_prompt_tokens=32)
    engine.add("normal", num_prompt_tokens=8)
    assert running(engine.step()) == {"low"}
    assert engine.pool.outside.asked() == [EXPORT]
    engine.pool.release(EXPORT)
    engine.pool.outside.leave(EXPORT)
    assert running(engine.step()) == {"high"}
    engine.run_to_end()
    engine.assert_idle()


@pytest.mark.parametrize("moves", [False, True], ids=["all stand", "one moves"])
def test_one_that_waits_for_a_slot_gives_its_blocks_when_nobody_who_has_one_can_move(moves):
    """P-16: also where it gave way too often; else both would wait for one another."""
    engine = Engine(
        num_blocks=11 if moves else 9,
        max_num_seqs=1 + moves,
        rules=replace(BY_TIER, max_preemptions=1),
    )
    if moves:
        engine.add("moves", priority="high", num_prompt_tokens=4, max_tokens=4)
    grows = engine.add("grows", num_prompt_tokens=16)
    engine.step()
    assert engine.pool.reserve(5, "h-waits", make_key("waits")) is not None
    waits = engine.add_imported(
        "waits", priority="low", num_prompt_tokens=12, num_preemptions_before=1
    )
    assert len(waits.block_ids) * BLOCK_SIZE >= 12 + 8 - 1, "all that it may come to need"
    engine.run_to_end()
    assert engine.tokens(grows) == expected_tokens("grows", 8)
    assert engine.tokens(waits) == expected_tokens("waits", 8)[1:]
    assert waits.num_preemptions == (not moves)
    engine.assert_idle()
