"""Log-probabilities of a prompt's own tokens, and prompts that nothing is drawn for."""

from dataclasses import replace

import pytest
import torch

from cluster.request import FinishReason, SamplingParams
from tests.factories import Engine
from tests.factories_runner import make_prompts

SCORED = SamplingParams(max_tokens=4, temperature=0.0, num_logprobs=3, prompt_logprobs=True)
PLAIN = replace(SCORED, num_logprobs=None, prompt_logprobs=False)


def add(engine, request_id, prompt, params=SCORED, **fields):
    return engine.add(
        request_id, prompt_ids=tuple(prompt), params=params, eos_ids=frozenset(), **fields
    )


@torch.inference_mode()
def assert_scores(reference, prompt, entries, num_top=3):
    """Compare with transformers' log-softmax over the whole prompt; the first token has none."""
    expected = reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    assert len(entries) == len(prompt) - 1
    for position, entry in enumerate(entries, start=1):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4, rel=2e-5)
        values = [value for _, value in entry.top]
        assert values == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4, rel=2e-5)


@pytest.mark.parametrize("chunk", [0, 1, 7, 64])
def test_scores_are_those_of_the_whole_prompt_however_it_is_cut(
    make_model_engine, tiny_reference, chunk
):
    """P-07: also where a token and the row that tells of it lie in different chunks."""
    engine = make_model_engine(chunk_tokens=chunk)
    prompts = make_prompts([2, 17, 65, 130])
    sequences = [add(engine, f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    engine.run_to_end()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert_scores(tiny_reference, prompt, engine.log.prompt_logprobs[sequence.key])
        assert len(engine.tokens(sequence)) == 4
    engine.assert_idle()


def test_a_prompt_of_one_token_has_no_scores(make_model_engine):
    engine = make_model_engine()
    sequence = add(engine, "r", [7])
    engine.run_to_end()
    assert engine.log.prompt_logprobs == {}
    assert len(engine.tokens(sequence)) == 4


def test_without_num_logprobs_only_the_prompts_tokens_are_told(make_model_engine, tiny_reference):
    engine = make_model_engine()
    [prompt] = make_prompts([20])
    sequence = add(engine, "r", prompt, replace(SCORED, num_logprobs=None))
    engine.run_to_end()
    entries = engine.log.prompt_logprobs[sequence.key]
    assert_scores(tiny_reference, prompt, entries, num_top=0)
    assert engine.log.logprobs[sequence.key] == [None] * 4


def test_neighbours_draw_what_they_draw_without_scores_beside_them(make_model_engine):
    """P-14: the head runs apart in such a step, and to the same result."""
    prompts = make_prompts([30, 40, 50])
    outputs = []
    for beside in (PLAIN, SCORED):
        engine = make_model_engine(chunk_tokens=16)
        neighbours = [add(engine, f"n{i}", prompt, PLAIN) for i, prompt in enumerate(prompts[:2])]
        add(engine, "beside", prompts[2], beside)
        engine.run_to_end()
        outputs.append([engine.tokens(neighbour) for neighbour in neighbours])
    assert outputs[0] == outputs[1]


def test_logits_of_a_prompt_are_made_a_few_rows_at_a_time(make_model_engine, monkeypatch):
    """A vocabulary for each token of a prompt would not fit into memory."""
    engine = make_model_engine()
    loaded = engine.runner._loaded
    heights = []
    logits = type(loaded).logits

    def noted(self, hidden_rH):
        heights.append(len(hidden_rH))
        return logits(self, hidden_rH)

    monkeypatch.setattr(type(loaded), "logits", noted)
    add(engine, "r", make_prompts([150])[0])
    add(engine, "plain", make_prompts([90])[0], PLAIN)
    engine.step()
    assert heights == [64, 64, 21, 2]


def test_steps_that_score_nothing_take_the_usual_way(make_model_engine, monkeypatch):
    engine = make_model_engine()
    monkeypatch.setattr(type(engine.runner._loaded), "hidden", None)
    sequence = add(engine, "r", make_prompts([30])[0], PLAIN)
    engine.run_to_end()
    assert len(engine.tokens(sequence)) == 4


def test_scores_that_were_told_are_not_told_again_after_a_preemption(
    make_model_engine, tiny_reference
):
    """P-15: the log fails where a run does not follow the one before it."""
    prompts = make_prompts([60, 60])
    engine = make_model_engine(num_blocks=40, chunk_tokens=8)
    params = replace(SCORED, max_tokens=40)
    sequences = [add(engine, f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    engine.run_to_end()
    assert engine.scheduler.num_preemptions > 0
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert_scores(tiny_reference, prompt, engine.log.prompt_logprobs[sequence.key])


def test_a_preemption_in_the_middle_of_a_prompt_tells_the_rest_only():
    engine = Engine(chunk_tokens=8)
    sequence = engine.add(num_prompt_tokens=30, params=SCORED)
    engine.step()
    engine.step()
    told = len(engine.log.prompt_logprobs[sequence.key])
    engine.scheduler._preempt(sequence)
    engine.pool.release(sequence.key)
    engine.run_to_end()
    assert told == 16
    entries = engine.log.prompt_logprobs[sequence.key]
    assert [entry.logprob for entry in entries] == [-float(i) for i in range(1, 30)]


def test_an_imported_prompt_is_scored_where_it_was_computed_only():
    """P-07: the decode worker has the KV and tells nothing, also where it computes it again."""
    engine = Engine(num_blocks=12)
    imported = engine.add_imported("r", num_prompt_tokens=20, params=replace(SCORED, max_tokens=9))
    engine.step()
    engine.scheduler._preempt(imported)
    engine.pool.release(imported.key)
    engine.run_to_end()
    assert engine.log.prompt_logprobs == {}
    assert len(engine.tokens(imported)) == 8


def test_scores_of_a_sequence_that_ended_meanwhile_are_dropped():
    engine = Engine()
    sequence = engine.add(num_prompt_tokens=10, params=SCORED)
    engine.step(before_commit=lambda: engine.abort(sequence))
    assert engine.log.prompt_logprobs == {}
    engine.assert_idle()


class TestNothingDrawn:
    """P-01: max_tokens 0 computes the prompt, tells its scores, and ends."""

    @pytest.mark.parametrize("chunk", [0, 7])
    def test_it_ends_by_length_with_every_block_free(
        self, make_model_engine, tiny_reference, chunk
    ):
        engine = make_model_engine(chunk_tokens=chunk)
        [prompt] = make_prompts([33])
        sequence = add(engine, "r", prompt, replace(SCORED, max_tokens=0))
        neighbour = add(engine, "n", prompt, PLAIN)
        engine.run_to_end()
        assert engine.end(sequence).finish_reason is FinishReason.LENGTH
        assert engine.tokens(sequence) == []
        assert len(engine.tokens(neighbour)) == 4
        assert_scores(tiny_reference, prompt, engine.log.prompt_logprobs[sequence.key])
        engine.assert_idle()

    def test_its_prompt_may_fill_the_context(self):
        engine = Engine(max_model_len=40)
        filling = engine.add("a", num_prompt_tokens=40, max_tokens=0)
        too_long = engine.add("b", num_prompt_tokens=41, max_tokens=0)
        engine.run_to_end()
        assert engine.end(filling).finish_reason is FinishReason.LENGTH
        assert engine.end(too_long).error.field == "prompt"

    def test_it_survives_a_preemption(self):
        engine = Engine(chunk_tokens=8)
        sequence = engine.add(num_prompt_tokens=30, params=replace(SCORED, max_tokens=0))
        engine.step()
        engine.scheduler._preempt(sequence)
        engine.pool.release(sequence.key)
        engine.run_to_end()
        assert engine.end(sequence).finish_reason is FinishReason.LENGTH
        assert len(engine.log.prompt_logprobs[sequence.key]) == 29
        engine.assert_idle()

    def test_it_leaves_by_its_end_even_where_it_should_hand_over(self):
        engine = Engine()
        sequence = engine.add(num_prompt_tokens=9, max_tokens=0, hands_over_at=1)
        engine.run_to_end()
        assert engine.end(sequence).finish_reason is FinishReason.LENGTH
        engine.assert_idle()
