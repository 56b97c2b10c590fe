"""Giant prompts beside short ones and running streams, counted in steps and tokens (P-24).

A chunk's time is that of a step here, since no step has more than one chunk of a giant.
"""

import pytest

from cluster.config import Policy
from cluster.engine.rules import Rules
from cluster.engine.sequence import SequenceState
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from tests.factories import BLOCK_SIZE, Engine, expected_tokens

CONTEXT = 512
CHUNK = 64
SHORT = 3
TIERS = Tiers(names=("normal", "high"), default="normal")
RULES = {
    "fcfs": Rules(),
    "sjf": Rules(ordering=Ordering(policy=Policy.SJF)),
    "priority": Rules(ordering=Ordering(policy=Policy.PRIORITY, num_tiers=2), tiers=TIERS),
}


def make_engine(policy, **options):
    options = {
        "num_blocks": 2000, "max_num_seqs": 32, "swap_slots": 500, "token_budget": CHUNK + 4,
        **options,
    }  # fmt: skip
    return Engine(rules=RULES[policy], chunk_tokens=CHUNK, **options)


def crowd(engine, policy):
    """Four streams that run, four giants of which one is begun, and then 20 short prompts."""
    streams = [engine.add(f"s{i}", num_prompt_tokens=4, max_tokens=200) for i in range(4)]
    while any(not s.output_ids for s in streams):
        engine.step()
    giants = [engine.add(f"g{i}", num_prompt_tokens=CONTEXT - 32, max_tokens=32) for i in range(4)]
    engine.step()
    tier = {"priority": "high"} if policy == "priority" else {}
    shorts = [engine.add(f"q{i}", num_prompt_tokens=SHORT, max_tokens=1, **tier) for i in range(20)]
    return streams, giants, shorts


def steps_to_first(engine, sequences):
    """Step until all have their first token; returns how many steps each waited, sorted."""
    waited, number = {}, 0
    while len(waited) < len(sequences):
        engine.step()
        number += 1
        waited |= {s.key: number for s in sequences if s.output_ids and s.key not in waited}
    return sorted(waited.values())


@pytest.mark.parametrize("token_budget", [CHUNK + 4, 4 * CHUNK])
@pytest.mark.parametrize("policy", RULES)
def test_short_prompts_pass_giants_at_the_next_chunk(policy, token_budget):
    """P-24: within three chunk times, 95 % of them; alone the first would take one step.

    With a budget of a chunk and with the usual one of four, whatever the policy.
    """
    engine = make_engine(policy, token_budget=token_budget)
    streams, giants, shorts = crowd(engine, policy)
    waits = steps_to_first(engine, shorts)
    assert waits[len(waits) * 95 // 100 - 1] <= 3
    assert all(giant.state is not SequenceState.ENDED for giant in giants)
    engine.run_to_end()
    for sequence in (*streams, *giants, *shorts):
        name = sequence.key.request_id
        assert engine.tokens(sequence) == expected_tokens(name, sequence.params.max_tokens)
    engine.assert_idle()


@pytest.mark.parametrize(
    ("token_budget", "least"), [(CHUNK + 4, CHUNK // 2 - 2), (4 * CHUNK, CHUNK)]
)
def test_however_many_short_ones_come_a_giant_loses_half_of_its_speed_at_most(token_budget, least):
    """P-24: bounded overtaking; giants go one after another, in the order in which they came."""
    engine = make_engine("fcfs", token_budget=token_budget)
    _, giants, _ = crowd(engine, "fcfs")
    number = 0
    while any(not giant.output_ids for giant in giants):
        while engine.scheduler.num_waiting < 12:
            engine.add(f"more{number}", num_prompt_tokens=SHORT, max_tokens=1)
            number += 1
        keys = {giant.key for giant in giants if not giant.output_ids}
        left = sum(giant.num_tokens_left for giant in giants if not giant.output_ids)
        chunks = [share for share in engine.step().shares if share.key in keys]
        assert sum(len(share.token_ids) for share in chunks) >= min(least, left)
        assert sum(not share.is_sampled for share in chunks) <= 1
    firsts = [engine.log.started.index(giant.key) for giant in giants]
    assert firsts == sorted(firsts)
    assert number > 100, "there was a flood"


def test_a_step_beside_giants_is_as_short_as_one_chunk_of_theirs():
    """P-24: with room for four chunks in a step, four giants would make it four times as long."""
    engine = make_engine("fcfs", token_budget=4 * CHUNK)
    _, giants, shorts = crowd(engine, "fcfs")
    before = sum(giant.num_computed_tokens for giant in giants)
    plan = engine.step()
    assert plan.num_tokens <= 4 + CHUNK + SHORT * len(shorts)
    assert sum(giant.num_computed_tokens for giant in giants) == before + CHUNK


@pytest.mark.parametrize("policy", RULES)
def test_streams_get_a_token_in_every_step_beside_giants(policy):
    """P-24: and no step computes more than a chunk beside them, so a gap is a chunk's time."""
    engine = make_engine(policy)
    streams, giants, _ = crowd(engine, policy)
    while any(not giant.output_ids for giant in giants):
        before = [len(s.output_ids) for s in streams]
        plan = engine.step()
        assert [len(s.output_ids) for s in streams] == [n + 1 for n in before]
        assert plan.num_tokens <= CHUNK + 4


def test_a_decode_worker_computes_nothing_of_giants_that_are_imported():
    """P-24: the reason for two pools: its steps are as long as without the giants."""
    engine = make_engine("fcfs")
    streams = [engine.add(f"s{i}", num_prompt_tokens=4, max_tokens=50) for i in range(4)]
    while any(not s.output_ids for s in streams):
        engine.step()
    giants = [
        engine.add_imported(f"g{i}", num_prompt_tokens=CONTEXT - 32, max_tokens=32)
        for i in range(4)
    ]
    while giants[0].state is not SequenceState.ENDED:
        plan = engine.step()
        assert all(len(share.token_ids) == 1 for share in plan.shares)
        assert len(plan.shares) == 8
    engine.run_to_end()
    engine.assert_idle()


@pytest.mark.parametrize("policy", RULES)
def test_a_giant_that_does_not_fit_yet_is_passed_only_for_so_long(policy):
    """P-24: short ones go by for the aging bound, then it is next, however many still come."""
    engine = make_engine(policy, num_blocks=CONTEXT // BLOCK_SIZE, max_num_seqs=8)
    holder = engine.add("holder", num_prompt_tokens=200, max_tokens=100)
    engine.step()
    giant = engine.add("giant", num_prompt_tokens=CONTEXT - 32, max_tokens=16)
    passed = 0
    for number in range(4000):
        if giant.key in engine.log.ends:
            break
        if engine.scheduler.num_waiting < 4:
            engine.add(f"q{number}", num_prompt_tokens=8, max_tokens=8)
        engine.step()
        engine.clock.advance(0.09)
        passed += giant.started_at is None
    assert engine.tokens(giant) == expected_tokens("giant", 16)
    bound_s = RULES[policy].ordering.aging_s
    assert giant.started_at - giant.arrived <= bound_s + 100 * 0.1 + 2, "the holder, and the bound"
    assert holder.key in engine.log.ends
    engine.run_to_end()
    engine.assert_idle()
