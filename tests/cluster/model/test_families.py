"""Families of transformers models over the paged cache: token-exact, or refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.config import Dtype
from cluster.errors import UnsupportedModel
from cluster.model.loader import load_model
from tests.factories_runner import Driver, assert_matches, make_prompts

VOCAB_SIZE = 97
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
MODERN = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 9, "query_pre_attn_scalar": 8},
    "phi3": {},
    "granite": {},
    "olmo2": {},
    "cohere2": {"sliding_window": 9},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
}
OLDER = {
    "gpt2": {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": dict(SIZES, num_key_value_heads=None),
    "opt": dict(SIZES, ffn_dim=48, word_embed_proj_dim=32),
}
SERVED = {name: SIZES | extra for name, extra in MODERN.items()} | {
    name: SIZES | extra if name != "gpt2" else extra | {"initializer_range": 0.3}
    for name, extra in OLDER.items()
}


def write_model(folder, name, options):
    torch.manual_seed(3)
    options = {key: value for key, value in options.items() if key != "head_dim" or name != "phi3"}
    config = AutoConfig.for_model(name, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", SERVED)
def test_served_families_match_transformers(name, tmp_path):
    """Chunks and decodes share steps; windows and caps reach over chunk and block borders."""
    reference = write_model(tmp_path, name, SERVED[name])
    loaded = load_model(tmp_path, dtype=Dtype.FP32, device="cpu")
    driver = Driver(loaded, block_size=4)
    prompts = make_prompts([3, 4, 26, 45], vocab_size=VOCAB_SIZE)
    for prompt in prompts:
        driver.add(prompt)
    for prompt, output in zip(prompts, driver.run(12, chunk=14), strict=True):
        assert_matches(reference, prompt, output)
    assert len({token for line in driver.lines for token in line.output_ids}) > 4
    # Alone, its first chunks are steps that draw nothing.
    alone = Driver(loaded, block_size=4)
    alone.add(prompts[-1])
    assert alone.run(4, chunk=14) == [driver.lines[-1].output_ids[:4]]


def test_a_long_prompt_is_attended_in_tiles(tmp_path):
    for name in ("llama", "mistral"):
        reference = write_model(tmp_path / name, name, SERVED[name])
        driver = Driver(load_model(tmp_path / name, dtype=Dtype.FP32, device="cpu"))
        [prompt] = make_prompts([230], vocab_size=VOCAB_SIZE)
        driver.add(prompt)
        assert_matches(reference, prompt, driver.run(8)[0])


SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
REFUSED = {
    "t5": (
        {"vocab_size": 97, "d_model": 32, "d_ff": 48, "num_layers": 1, "num_heads": 4},
        "encoder-decoder",
    ),
    "bloom": (
        {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "max_position_embeddings",
    ),
    "mamba": ({"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}, "'linear_attention'"),
    "gpt_oss": (SIZES | EXPERTS | {"sliding_window": 8}, "'s_aux'"),
    "lfm2": (SIZES | {"layer_types": ["conv", "full_attention"]}, "'conv'"),
    "falcon": (
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_its_name(name, tmp_path):
    options, reason = REFUSED[name]
    config = AutoConfig.for_model(name, **options)
    if name == "t5":
        from transformers import T5ForConditionalGeneration

        T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    else:
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"^{name}: .*{reason}"):
        load_model(tmp_path, dtype=Dtype.FP32, device="cpu")
