"""A worker's speed is learnt from its steps."""

import random

import pytest

from cluster.engine.step_model import StepModel


def test_it_knows_nothing_at_first():
    assert StepModel().predict(4, 100) == 0.0


def test_it_believes_what_it_was_made_with_until_a_step_tells_better():
    model = StepModel(base_s=0.1, per_seq_s=0.01, prefill_per_token_s=0.001)
    assert model.predict(2, 100) == pytest.approx(0.22)
    model.observe(0, 100, 0.5)
    assert model.prefill_per_token_s == pytest.approx(0.005)
    assert model.base_s == 0.1


def test_it_finds_base_and_slope_in_noise():
    rng, model = random.Random(1), StepModel()
    for _ in range(300):
        n = rng.randint(1, 8)
        model.observe(n, 0, (0.010 + 0.002 * n) * rng.uniform(0.97, 1.03))
    assert model.base_s == pytest.approx(0.010, rel=0.15)
    assert model.per_seq_s == pytest.approx(0.002, rel=0.15)


def test_steps_of_one_size_follow_the_level():
    model = StepModel()
    for _ in range(200):
        model.observe(4, 0, 0.02)
    assert model.predict(4, 0) == pytest.approx(0.02)
    for _ in range(400):
        model.observe(4, 0, 0.04)
    assert model.predict(4, 0) == pytest.approx(0.04, rel=0.05)


def test_prompt_tokens_cost_what_the_decodes_beside_them_do_not():
    model = StepModel()
    for n in (1, 2, 3, 4) * 20:
        model.observe(n, 0, 0.010 + 0.002 * n)
    for _ in range(50):
        model.observe(4, 500, 0.018 + 500 * 0.001)
    assert model.prefill_per_token_s == pytest.approx(0.001, rel=0.02)
    assert model.predict(4, 100) == pytest.approx(0.118, rel=0.02)


def test_a_worker_that_only_prefills_has_a_rate():
    model = StepModel()
    model.observe(0, 512, 0.512)
    model.observe(0, 100, 0.100)
    assert model.prefill_per_token_s == pytest.approx(0.001)
    assert (model.base_s, model.per_seq_s) == (0.0, 0.0)


def test_nothing_is_ever_negative():
    model = StepModel()
    for n, seconds in [(1, 0.05), (8, 0.01), (2, 0.04), (4, 0.0), (8, 1.0), (1, 0.0)] * 5:
        model.observe(n, 0, seconds)
        assert model.base_s >= 0
        assert model.per_seq_s >= 0
        model.observe(n, 7, 0.0)
        assert model.prefill_per_token_s >= 0
    model.observe(0, 0, 1.0)


def test_a_process_that_stood_still_is_no_slow_worker():
    """CASES P-19: SIGSTOP for 30 s in the midst of a step; it was not the worker's speed."""
    model = StepModel(base_s=0.01, per_seq_s=0.001, prefill_per_token_s=0.0001)
    for _ in range(50):
        model.observe(0, 32, 0.0032)
        model.observe(4, 0, 0.014)
    model.observe(0, 32, 30.0)
    model.observe(4, 0, 30.0)
    assert model.predict(0, 32) < 1.5 * 0.0032
    assert model.predict(4, 0) < 1.5 * 0.014


def test_a_worker_that_has_become_slow_is_soon_known_to_be():
    model = StepModel(base_s=0.01, prefill_per_token_s=0.0001)
    for _ in range(5):
        model.observe(0, 32, 0.32)
    assert model.predict(0, 32) > 0.5 * 0.32


@pytest.mark.parametrize(("before_s", "after_s"), [(0.003, 0.6), (0.06, 0.3), (0.3, 0.6)])
def test_longer_steps_are_known_within_seconds(before_s, after_s):
    """However few they are: 50 of 0.6 s take half a minute."""
    model = StepModel(base_s=before_s)
    for _ in range(100):
        model.observe(2, 0, before_s)
    for _ in range(round(5.0 / after_s)):
        model.observe(2, 0, after_s)
    assert model.predict(2, 0) > before_s + 0.7 * (after_s - before_s)


@pytest.mark.parametrize("step_s", [0.06, 0.3])
def test_one_longer_step_alone_changes_little(step_s):
    model = StepModel(base_s=step_s)
    for _ in range(100):
        model.observe(2, 0, step_s)
    model.observe(2, 0, 5 * step_s)
    assert model.predict(2, 0) < 1.5 * step_s
    model.observe(2, 0, step_s)
    assert model.predict(2, 0) < 1.4 * step_s
