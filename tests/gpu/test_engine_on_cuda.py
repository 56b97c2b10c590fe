"""The engine's tensors on CUDA: the same tokens and the same noise as elsewhere."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config import Dtype
from cluster.model.draw import Draw
from cluster.model.loader import load_model
from cluster.model.logprobs import token_logprobs
from cluster.model.sampler import gumbel_noise, sample
from cluster.request import SamplingParams
from tests.factories_model import write_tiny_llama
from tests.factories_preemption import assert_undisturbed
from tests.factories_runner import Driver, assert_matches, make_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def test_ragged_chunks_match_transformers(tmp_path):
    write_tiny_llama(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    driver = Driver(load_model(tmp_path, dtype=Dtype.FP32, device="cuda"))
    prompts = make_prompts([1, 16, 33, 200])
    for prompt in prompts:
        driver.add(prompt)
    for prompt, output in zip(prompts, driver.run(16, chunk=40), strict=True):
        assert_matches(reference, prompt, output)


def test_blocks_leave_a_gpu_and_come_back_through_host_memory(tmp_path):
    write_tiny_llama(tmp_path)
    loaded = load_model(tmp_path, dtype=Dtype.BF16, device="cuda")
    sender, receiver = Driver(loaded), Driver(loaded)
    [prompt] = make_prompts([50])
    for driver in (sender, receiver):
        driver.add(prompt)
        driver.step()
    blocks = sender.lines[0].block_ids
    staging = torch.empty(len(blocks) * sender.cache.layout.block_bytes, dtype=torch.uint8)
    sender.cache.export_blocks(blocks, staging)
    receiver.cache.clear_blocks(receiver.lines[0].block_ids)
    receiver.cache.import_blocks(receiver.lines[0].block_ids, staging)
    assert receiver.run(20) == sender.run(20)


@pytest.mark.parametrize("swaps", [False, True])
def test_preempted_is_undisturbed(tmp_path, swaps):
    """P-15: its KV waits in pinned memory, or is computed again."""
    write_tiny_llama(tmp_path)
    loaded = load_model(tmp_path, dtype=Dtype.FP32, device="cuda")
    engine = assert_undisturbed(loaded, SamplingParams(max_tokens=40, temperature=0.0), swaps=swaps)
    assert engine.memory.is_pinned


def test_noise_has_the_same_bits_as_on_a_cpu():
    draws = [
        Draw(params=SamplingParams(max_tokens=1, seed=seed), choice=0, output_index=seed)
        for seed in range(16)
    ]
    on_cpu = gumbel_noise(draws, 50_000, torch.device("cpu"))
    on_gpu = gumbel_noise(draws, 50_000, torch.device("cuda")).cpu()
    assert torch.equal(on_cpu, on_gpu)


def test_rules_and_logprobs_are_those_of_a_cpu():
    logits = torch.randn(5, 50_000, generator=torch.Generator().manual_seed(3)) * 4
    kinds = [
        {}, {"repetition_penalty": 1.5, "temperature": 0.8}, {"min_p": 0.1, "top_k": 50},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.0},
        {"logit_bias": ((7, 9.0), (60_000, 9.0)), "top_p": 0.8},
    ]  # fmt: skip
    draws = [
        Draw(
            params=SamplingParams(max_tokens=9, seed=4, **kind), choice=0, output_index=3,
            prompt_ids=(1, 2, 3), output_ids=(9, 9, 4), banned_ids=(5, 70_000),
        )
        for kind in kinds
    ]  # fmt: skip
    token_ids = sample(logits, draws)
    assert sample(logits.cuda(), draws) == token_ids
    on_cpu = token_logprobs(logits, token_ids, [0, 1, 5, 20, 3])
    on_gpu = token_logprobs(logits.cuda(), token_ids, [0, 1, 5, 20, 3])
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
