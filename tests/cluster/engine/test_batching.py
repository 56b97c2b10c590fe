"""How one engine forms its batches, as stories."""

import pytest

from cluster.config import Batching
from cluster.engine.rules import Rules
from cluster.policy.batching import SETTLE_S
from tests.factories import Engine


def started(engine):
    return [key.request_id for key in engine.log.started]


def running(plan):
    return {share.key.request_id for share in plan.shares}


def test_a_static_batch_runs_to_its_last_member():
    rules = Rules(batching=Batching.STATIC, batch_size=2, preempts=False)
    engine = Engine(max_num_seqs=4, rules=rules)
    lengths = {"a": 2, "b": 6, "c": 3, "d": 3}
    for name, length in lengths.items():
        engine.add(name, num_prompt_tokens=8, max_tokens=length)
    batches = [running(engine.step()) for _ in range(9)]
    assert batches[:6] == [{"a", "b"}] * 2 + [{"b"}] * 4, "its slot stays empty"
    assert batches[6:] == [{"c", "d"}] * 3
    engine.assert_idle()


def test_a_static_batch_forms_from_what_waits():
    rules = Rules(batching=Batching.STATIC, batch_size=4, preempts=False)
    engine = Engine(rules=rules)
    engine.add("alone", max_tokens=3)
    engine.clock.advance(SETTLE_S)
    assert engine.step() is None, "nobody had looked before, so it may just have come"
    engine.clock.advance(SETTLE_S)
    assert running(engine.step()) == {"alone"}
    engine.add("late", max_tokens=3)
    assert running(engine.step()) == {"alone"}


def test_those_that_come_at_once_are_one_static_batch():
    """One by one, as the network brings them: to an idle worker, and when a batch has ended."""
    rules = Rules(batching=Batching.STATIC, batch_size=8, preempts=False)
    engine = Engine(rules=rules)
    for batch in "ab":
        names = {f"{batch}{i}" for i in range(7)}
        for name in sorted(names):
            engine.add(name, max_tokens=3)
            assert engine.step() is None
            assert engine.next_instant == engine.clock.now() + SETTLE_S
            engine.clock.advance(SETTLE_S / 2)
        engine.clock.advance(SETTLE_S)
        assert [running(engine.step()) for _ in range(3)] == [names] * 3
    for index in range(8):
        engine.add(f"c{index}", max_tokens=1)
    assert len(engine.step().shares) == 8, "a full one waits for nobody"
    engine.assert_idle()


def test_an_abort_or_a_deadline_ends_a_member_and_not_its_batch():
    rules = Rules(batching=Batching.STATIC, batch_size=3, preempts=False)
    engine = Engine(rules=rules)
    aborted = engine.add("aborted", max_tokens=20)
    engine.add("late", max_tokens=20, deadline=engine.clock.now() + 0.025)
    engine.add("stays", max_tokens=20)
    engine.step()
    engine.abort(aborted)
    engine.add("next", max_tokens=2)
    assert running(engine.step()) == {"late", "stays"}
    engine.step()
    assert running(engine.step()) == {"stays"}
    engine.run_to_end()
    engine.clock.advance(SETTLE_S)
    engine.run_to_end()
    assert len(engine.log.ends) == 4
    engine.assert_idle()


def test_a_dynamic_batch_collects_for_a_window():
    rules = Rules(batching=Batching.DYNAMIC, batch_size=3, batch_window_s=0.02, preempts=False)
    engine = Engine(rules=rules)
    engine.add("a", max_tokens=2)
    assert engine.step() is None
    assert engine.next_instant == pytest.approx(engine.clock.now() + 0.02)
    engine.clock.advance(0.01)
    engine.add("b", max_tokens=2)
    assert engine.step() is None
    engine.clock.advance(0.01)
    assert running(engine.step()) == {"a", "b"}
    engine.add("c", max_tokens=2)
    assert running(engine.step()) == {"a", "b"}
    assert engine.step() is None, "a batch of its own"
    engine.clock.advance(0.02)
    assert running(engine.step()) == {"c"}


def test_a_full_dynamic_batch_waits_for_nothing():
    rules = Rules(batching=Batching.DYNAMIC, batch_size=2, batch_window_s=9.0, preempts=False)
    engine = Engine(rules=rules)
    for name in "ab":
        engine.add(name, max_tokens=2)
    assert running(engine.step()) == {"a", "b"}
