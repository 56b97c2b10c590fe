"""Loading: facts of a checkpoint, refusals, and the packed layers."""

import json
import logging
import shutil

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from cluster.config import Dtype
from cluster.errors import StartupError, UnsupportedModel
from cluster.model import checkpoint, packed
from cluster.model.loader import load_model, probe, resolve_dtype
from tests.factories_model import EOS_ID, MAX_POSITIONS, VOCAB_SIZE, write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_facts_of_a_checkpoint(folder):
    loaded = load_model(folder, dtype=Dtype.FP32, device="cpu")
    assert (loaded.eos_ids, loaded.max_model_len) == (frozenset({EOS_ID}), MAX_POSITIONS)
    assert (loaded.vocab_size, loaded.dtype) == (VOCAB_SIZE, "fp32")
    layout = loaded.layout(16)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (2, 2, 16)
    assert layout.token_bytes == 2 * 2 * 2 * 16 * 4


def test_eos_ids_come_from_the_generation_config_or_else_from_the_config(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert load_model(copy, dtype=Dtype.FP32, device="cpu").eos_ids == {0, 2}
    (copy / "generation_config.json").unlink()
    edit_config(copy, eos_token_id=7)
    assert load_model(copy, dtype=Dtype.FP32, device="cpu").eos_ids == {7}


def test_the_fingerprint_tells_weights_and_configurations_apart(folder, tmp_path):
    same = write_tiny_llama(tmp_path / "same")
    assert checkpoint.fingerprint(same) == checkpoint.fingerprint(folder)
    other = write_tiny_llama(tmp_path / "other", seed=1)
    assert checkpoint.fingerprint(other) != checkpoint.fingerprint(folder)
    before = checkpoint.fingerprint(same)
    edit_config(same, rms_norm_eps=0.5)
    assert checkpoint.fingerprint(same) != before


def test_the_tokenizer_has_a_fingerprint_of_its_own(folder, tmp_path):
    copy = write_tiny_llama(tmp_path / "copy", seed=1)
    same = checkpoint.tokenizer_fingerprint(folder)
    assert (
        checkpoint.tokenizer_fingerprint(copy)
        == same
        == load_model(folder, dtype=Dtype.FP32, device="cpu").tokenizer
    )
    (copy / "tokenizer.json").write_text("{}")
    assert checkpoint.tokenizer_fingerprint(copy) not in ("", same)
    (copy / "tokenizer.json").unlink()
    assert checkpoint.tokenizer_fingerprint(copy) == ""


def test_only_safetensors_are_loaded(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"no safetensors weights; pytorch_model\.bin"):
        load_model(copy, dtype=Dtype.FP32, device="cpu")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        load_model(tmp_path, dtype=Dtype.FP32, device="cpu")


def test_a_name_that_is_neither_folder_nor_id_is_refused():
    with pytest.raises(UnsupportedModel, match="neither a folder nor"):
        load_model("not/a/model/name", dtype=Dtype.FP32, device="cpu")


def test_code_that_comes_with_a_checkpoint_is_not_run(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    edit_config(copy, model_type="mine", auto_map={"AutoConfig": "config.Mine"})
    (copy / "config.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(UnsupportedModel, match="config cannot be read"):
        load_model(copy, dtype=Dtype.FP32, device="cpu")


def test_missing_weights_are_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    edit_config(copy, num_hidden_layers=3)
    with pytest.raises(UnsupportedModel, match=r"lacks .*layers\.2"):
        load_model(copy, dtype=Dtype.FP32, device="cpu")


def test_a_weight_file_cut_short_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(UnsupportedModel, match="llama: cannot be loaded"):
        load_model(copy, dtype=Dtype.FP32, device="cpu")


def test_weights_of_another_shape_are_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    edit_config(copy, intermediate_size=64)
    with pytest.raises(UnsupportedModel, match="llama: cannot be loaded"):
        load_model(copy, dtype=Dtype.FP32, device="cpu")


def test_positions_end_where_a_rope_would_change_with_the_batch():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}  # fmt: skip
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope
    )
    assert checkpoint.max_model_len(config) == 64
    assert checkpoint.max_model_len(LlamaConfig(max_position_embeddings=256)) == 256


def test_a_missing_device_is_said(folder):
    if torch.cuda.is_available():
        pytest.skip("has CUDA")
    with pytest.raises(StartupError, match="no CUDA device"):
        load_model(folder, dtype=Dtype.FP32, device="cuda")


def test_stated_dtypes_are_taken_as_they_are():
    assert resolve_dtype(Dtype.FP32, "cpu") == "fp32"
    assert resolve_dtype(Dtype.BF16, "cpu") == "bf16"
    assert resolve_dtype(Dtype.AUTO, "cpu") in {"fp32", "bf16"}


def test_quantised_weights_are_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    edit_config(copy, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModel, match="quantised"):
        load_model(copy, dtype=Dtype.FP32, device="cpu")


class TokenShift(nn.Module):
    """Adds to each token its neighbour in the flat batch, as a recurrent layer would."""

    def forward(self, x):
        return x + x.roll(1, dims=1)


def test_a_model_that_mixes_tokens_by_itself_is_refused(folder):
    model = load_model(folder, dtype=Dtype.FP32, device="cpu").model
    assert probe(model, "fp32", torch.device("cpu")) == (2, 2, 16)
    model.model.layers[1].mlp = TokenShift()
    with pytest.raises(UnsupportedModel, match="llama: mixes tokens"):
        probe(model, "fp32", torch.device("cpu"))


def test_a_model_that_does_not_look_at_positions_is_refused(folder, monkeypatch):
    model = load_model(folder, dtype=Dtype.FP32, device="cpu").model
    table = model.model.embed_tokens.weight

    def by_row(ids):
        return table[ids] + torch.arange(ids.shape[1])[None, :, None]

    monkeypatch.setattr(model.model.embed_tokens, "forward", by_row)
    with pytest.raises(UnsupportedModel, match="ignores positions"):
        probe(model, "fp32", torch.device("cpu"))


def test_a_model_that_reuses_another_layers_kv_is_refused(folder):
    model = load_model(folder, dtype=Dtype.FP32, device="cpu").model
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModel, match="layer 0 attends twice"):
        probe(model, "fp32", torch.device("cpu"))


def test_a_model_that_runs_its_layers_in_another_order_is_refused(folder):
    """The first layers' KV leaves while later ones are computed: which those are must be known."""
    model = load_model(folder, dtype=Dtype.FP32, device="cpu").model
    for layer, number in zip(model.model.layers, (1, 0), strict=True):
        layer.self_attn.layer_idx = number
    with pytest.raises(UnsupportedModel, match="layers in another order"):
        probe(model, "fp32", torch.device("cpu"))


packs = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 on this CPU"
)


@packs
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_packed_layers_give_the_plain_product(has_bias, num_rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 160, bias=has_bias), nn.Linear(160, 32, bias=has_bias))
    model.to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(1, num_rows, 96).to(torch.bfloat16)
    plain = model(x)
    assert packed.pack_linears(model) == 2
    assert not [module for module in model.modules() if type(module) is nn.Linear]
    torch.testing.assert_close(model(x), plain, rtol=2**-6, atol=2**-6)


def test_layers_stay_plain_where_the_cpu_has_no_kernels_for_them(monkeypatch, caplog):
    def reorder(*_):
        raise RuntimeError("bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", reorder)
    model = nn.Sequential(nn.Linear(8, 8)).to(torch.bfloat16).requires_grad_(False)
    assert packed.pack_linears(model) == 0
    assert type(model[0]) is nn.Linear
    assert "linear=plain layers=1 reason=operator failed: bf16 path" in caplog.text


@packs
def test_layers_stay_plain_where_a_packed_result_differs(monkeypatch, caplog):
    class Broken(packed.PackedLinear):
        def forward(self, x):
            return super().forward(x) + 1

    monkeypatch.setattr(packed, "PackedLinear", Broken)
    model = nn.Sequential(nn.Linear(8, 8)).to(torch.bfloat16).requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        assert packed.pack_linears(model) == 0
    assert type(model[0]) is nn.Linear
    assert "linear=plain" in caplog.text
    assert "results differ" in caplog.text
