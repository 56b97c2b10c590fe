"""Sampling rules through the whole engine, against a reference that has no cache and no batch."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cluster.model.draw import Draw
from cluster.model.sampler import gumbel_noise
from cluster.request import FinishReason, SamplingParams
from tests.factories_model import VOCAB_SIZE
from tests.factories_runner import NEAR_TIE, make_prompts

NUM_OUTPUTS = 24
PLAIN = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, num_logprobs=0)
KITS = {
    "repetition": replace(PLAIN, repetition_penalty=1.8),
    "presence and frequency": replace(PLAIN, presence_penalty=2.0, frequency_penalty=2.0),
    "raised": replace(PLAIN, presence_penalty=-2.0, frequency_penalty=-2.0),
    "bias": replace(PLAIN, logit_bias=tuple((i, 25.0) for i in range(40, 400, 9))),
    "min_p": replace(PLAIN, temperature=1.5, min_p=0.05, seed=3),
    "limits": replace(PLAIN, temperature=1.5, min_p=0.001, top_p=0.97, top_k=60, seed=4),
    "everything": replace(
        PLAIN, temperature=1.8, seed=5, top_p=0.95, top_k=100, min_p=1e-4,
        presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3,
        logit_bias=((7, 20.0), (8, -100.0)), num_logprobs=5,
    ),
}  # fmt: skip
PROMPTS = dict(zip(KITS, make_prompts([20, 33, 5, 40, 17, 9, 26]), strict=True))


@pytest.fixture(scope="module")
def undisturbed(make_model_engine):
    """Every kit's output and logprobs, each computed alone."""
    results = {}
    for name, params in KITS.items():
        engine = make_model_engine()
        sequence = add(engine, name, params)
        engine.run_to_end()
        results[name] = (engine.tokens(sequence), engine.log.logprobs[sequence.key])
    return results


def add(engine, name, params, **fields):
    fields.setdefault("prompt_ids", tuple(PROMPTS[name]))
    return engine.add(name, params=params, eos_ids=frozenset(), **fields)


@torch.inference_mode()
def reference_step(reference, prompt, output, params):
    """Return the logprobs of the next token and the scores whose best it is."""
    ids = torch.tensor([[*prompt, *output]])
    logits = reference(ids).logits[:, -1].float()
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, logits.clone())
    counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=VOCAB_SIZE)
    scores -= counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    for token_id, bias in params.logit_bias:
        scores[0, token_id] += bias
    if params.temperature > 0:
        warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
        if params.top_k:
            warpers.append(TopKLogitsWarper(params.top_k))
        warpers.append(TopPLogitsWarper(params.top_p))
        warpers.append(MinPLogitsWarper(params.min_p))
        draw = Draw(params=params, choice=0, output_index=len(output))
        scores = warpers(ids, scores) + gumbel_noise([draw], VOCAB_SIZE, scores.device)
    return logits.log_softmax(-1)[0], scores[0]


@pytest.mark.parametrize("name", KITS)
def test_a_request_alone_draws_as_the_reference(tiny_reference, undisturbed, name):
    """P-07, P-08: the chosen token and its logprob at every index, with each rule."""
    tokens, logprobs = undisturbed[name]
    assert len(tokens) == NUM_OUTPUTS
    num_top = KITS[name].num_logprobs
    for index, token_id in enumerate(tokens):
        output = tokens[:index]
        expected, scores = reference_step(tiny_reference, PROMPTS[name], output, KITS[name])
        best = scores.topk(2)
        if token_id != int(best.indices[0]):
            assert float(best.values[0] - best.values[1]) < NEAR_TIE
        entry = logprobs[index]
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-4, rel=2e-5)
        values = [value for _, value in entry.top]
        assert values == pytest.approx(expected.topk(num_top).values.tolist(), abs=1e-4, rel=2e-5)


@pytest.mark.parametrize("name", KITS)
def test_each_rule_changes_the_output(undisturbed, make_model_engine, name):
    """What the other tests compare would prove nothing of a rule that does nothing."""
    engine = make_model_engine()
    sequence = add(engine, name, PLAIN)
    engine.run_to_end()
    assert engine.tokens(sequence) != undisturbed[name][0]


@pytest.mark.parametrize("chunk", [0, 7])
def test_rules_stay_with_their_request_in_a_batch(undisturbed, make_model_engine, chunk):
    """P-14, P-04: everybody together, arriving one by one, prompts whole or in chunks."""
    engine = make_model_engine(chunk_tokens=chunk)
    sequences = {}
    for name, params in KITS.items():
        sequences[name] = add(engine, name, params)
        engine.step()
    engine.run_to_end()
    for name, sequence in sequences.items():
        tokens, logprobs = undisturbed[name]
        assert engine.tokens(sequence) == tokens, name
        for ours, alone in zip(engine.log.logprobs[sequence.key], logprobs, strict=True):
            assert ours.logprob == pytest.approx(alone.logprob, abs=1e-3)
    engine.assert_idle()


@pytest.mark.parametrize("swap_slots", [0, 100])
def test_preempted_requests_go_on_by_the_same_rules(undisturbed, make_model_engine, swap_slots):
    """P-15: counts and seeds are derived anew after each preemption; swapped KV is as it was."""
    engine = make_model_engine(num_blocks=30, chunk_tokens=16, swap_slots=swap_slots)
    sequences = {name: add(engine, name, params) for name, params in KITS.items()}
    engine.run_to_end()
    assert engine.scheduler.num_preemptions > 3
    for name, sequence in sequences.items():
        assert engine.tokens(sequence) == undisturbed[name][0], name
    again = [engine.end(s).num_computed_tokens - s.num_tokens + 1 for s in sequences.values()]
    assert (sum(again) == 0) == (swap_slots > 0), "tokens that were computed again"
    engine.assert_idle()


@pytest.mark.parametrize("name", KITS)
def test_a_choice_resumed_at_any_index_goes_on_as_before(undisturbed, make_model_engine, name):
    """P-15: another worker gets prompt and output so far, and nothing else."""
    tokens, logprobs = undisturbed[name]
    engine = make_model_engine(max_num_seqs=NUM_OUTPUTS, num_blocks=600)
    sequences = [
        engine.add(
            f"cut {index}", params=KITS[name], eos_ids=frozenset(),
            prompt_ids=tuple(PROMPTS[name]), output_ids=list(tokens[:index]),
        )
        for index in range(1, NUM_OUTPUTS)
    ]  # fmt: skip
    engine.run_to_end()
    for index, sequence in enumerate(sequences, start=1):
        assert engine.tokens(sequence) == tokens[index:]
        assert engine.log.first_index[sequence.key] == index
        got = [entry.logprob for entry in engine.log.logprobs[sequence.key]]
        assert got == pytest.approx([entry.logprob for entry in logprobs[index:]], abs=1e-3)
        for entry, alone in zip(engine.log.logprobs[sequence.key], logprobs[index:], strict=True):
            assert dict(entry.top) == pytest.approx(dict(alone.top), abs=1e-3)


def test_no_end_token_is_drawn_before_min_tokens(undisturbed, make_model_engine):
    """P-08: what would have ended the choice is passed over, and ends it later."""
    engine = make_model_engine()
    add(engine, "bias", PLAIN)
    engine.run_to_end()
    [plain] = engine.log.tokens.values()
    stops = tuple(plain[:3])
    early = engine.add(
        "early", params=replace(PLAIN, stop_token_ids=stops),
        prompt_ids=tuple(PROMPTS["bias"]), eos_ids=frozenset(),
    )  # fmt: skip
    bias = tuple((token_id, 100.0) for token_id in stops)
    late = engine.add(
        "late", params=replace(PLAIN, stop_token_ids=stops[:2], min_tokens=9, logit_bias=bias[:2]),
        prompt_ids=tuple(PROMPTS["bias"]), eos_ids=frozenset(stops[2:]),
    )  # fmt: skip
    engine.run_to_end()
    assert engine.tokens(early) == plain[:1]
    assert not set(engine.tokens(late)[:9]) & set(stops)
    assert engine.tokens(late)[9] in stops
    assert engine.end(late).finish_reason is FinishReason.STOP


def test_shares_without_rules_carry_no_history(make_model_engine):
    """What has no penalties, and asks for nothing, costs a step nothing."""
    engine = make_model_engine()
    plain, biased = add(engine, "repetition", PLAIN), add(engine, "bias", KITS["bias"])
    penalised = add(engine, "raised", KITS["raised"])
    for num_outputs in range(3):
        needs = {share.key: share.needs for share in engine.step().shares}
        assert needs[plain.key] is None
        assert needs[biased.key] is None
        assert needs[penalised.key].prompt_ids == tuple(PROMPTS["raised"])
        assert needs[penalised.key].output_ids == tuple(engine.tokens(penalised)[:num_outputs])
