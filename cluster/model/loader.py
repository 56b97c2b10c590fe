"""Load a transformers causal LM so that it runs over the paged cache, or refuse it by name."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.config import Dtype
from cluster.errors import StartupError, UnsupportedModel
from cluster.kv.cache import TORCH_DTYPES
from cluster.kv.layout import KVLayout
from cluster.model import attention, checkpoint, packed
from cluster.model.head import SplitModel

if TYPE_CHECKING:
    from cluster.model.attention import AttentionOptions, AttentionStep, PagedStep

logger = logging.getLogger(__name__)

_CPU_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
_PROBE_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}


class KVShape(NamedTuple):
    """What one token leaves in the cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its device, and the facts that others need about it."""

    model: nn.Module
    split: SplitModel
    """The same model in two parts, for logits of many rows."""
    device: torch.device
    dtype: str
    """``fp32``, ``bf16`` or ``fp16``."""
    kv_shape: KVShape
    eos_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    """Rows of the embedding; ids from 0 below this are valid."""
    fingerprint: str
    tokenizer: str
    """Digest of the tokenizer beside the weights; empty where there is none."""

    def layout(self, block_size: int, kv_dtype: Dtype = Dtype.AUTO) -> KVLayout:
        """Return what a block of this model's KV looks like; AUTO: stored as the weights are."""
        return KVLayout(
            **self.kv_shape._asdict(),
            block_size=block_size,
            dtype=self.dtype if kv_dtype is Dtype.AUTO else kv_dtype.value,
            model_fingerprint=self.fingerprint,
        )

    @torch.inference_mode()
    def forward(
        self, input_ids_n: Tensor, positions_n: Tensor, rows_s: Tensor, step: AttentionStep
    ) -> Tensor:
        """Run one flat batch of n tokens; returns logits ``[s, vocab]`` of the rows asked for."""
        return _forward(self.model, input_ids_n, positions_n, rows_s, step)

    @torch.inference_mode()
    def store(self, input_ids_n: Tensor, positions_n: Tensor, step: PagedStep) -> None:
        """Run one flat batch for the KV that it leaves in the cache.

        What the last layer makes of it, and the head, are not computed: about 6 ms in 100 for a
        chunk of 128 tokens of the trial model.
        """
        step.is_for_kv_alone = True
        with suppress(attention.KVStored):
            _hidden(self.split, input_ids_n, positions_n, step)

    @torch.inference_mode()
    def hidden(self, input_ids_n: Tensor, positions_n: Tensor, step: AttentionStep) -> Tensor:
        """Run one flat batch up to its head; returns ``[n, hidden]`` for ``logits``."""
        return _hidden(self.split, input_ids_n, positions_n, step)

    @torch.inference_mode()
    def logits(self, hidden_rH: Tensor) -> Tensor:
        """Run the head over some rows of ``hidden``; returns ``[r, vocab]``."""
        return self.split.logits(hidden_rH[None])


def resolve_dtype(dtype: Dtype, device: torch.device | str) -> str:
    """Return the name a layout carries; AUTO takes bf16 where the device has it in hardware."""
    if dtype is not Dtype.AUTO:
        return str(dtype.value)
    if torch.device(device).type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    return "bf16" if words & _CPU_BF16_FLAGS else "fp32"


def load_model(path: str | Path, *, dtype: Dtype, device: torch.device | str) -> LoadedModel:
    """Load a folder (or Hugging Face id) of safetensors weights for serving.

    Raises UnsupportedModel, saying why, where the engine would compute something else than
    transformers does, and StartupError where the device is not there.
    """
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError("device cuda was asked for, and torch finds no CUDA device here")
    folder = checkpoint.find_checkpoint(path)
    resolved = resolve_dtype(dtype, device)
    model = _load(folder, resolved).to(device).eval().requires_grad_(False)
    if device.type == "cpu" and resolved == "bf16" and packed.pack_linears(model):
        _let_go_of_files(model)
    kv_shape = probe(model, resolved, device)
    config = model.config
    loaded = LoadedModel(
        model=model,
        split=SplitModel(model),
        device=device,
        dtype=resolved,
        kv_shape=kv_shape,
        eos_ids=checkpoint.eos_ids(folder, config),
        max_model_len=checkpoint.max_model_len(config),
        vocab_size=model.get_input_embeddings().num_embeddings,
        fingerprint=checkpoint.fingerprint(folder),
        tokenizer=checkpoint.tokenizer_fingerprint(folder),
    )
    logger.info(
        "model=%s dtype=%s device=%s layers=%d fingerprint=%s",
        config.model_type, resolved, device, kv_shape.num_layers, loaded.fingerprint,
    )  # fmt: skip
    return loaded


def _load(folder: Path, dtype: str) -> Any:
    attention.register()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as exc:
        raise UnsupportedModel(f"{folder}: its config cannot be read: {exc}") from exc
    checkpoint.refuse_config(config)
    checkpoint.max_model_len(config)
    try:
        loading: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=attention.BACKEND,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as exc:
        raise UnsupportedModel(f"{config.model_type}: cannot be loaded: {exc}") from exc
    except KeyError as exc:
        # Older classes look their attention up in a table of their own.
        raise UnsupportedModel(f"{config.model_type}: has no attention {exc}") from exc
    model, info = loading
    if missing := sorted(info["missing_keys"]):
        # transformers would fill them with noise and go on.
        raise UnsupportedModel(f"{config.model_type}: the checkpoint lacks {', '.join(missing)}")
    return model


def _let_go_of_files(model: nn.Module) -> None:
    """Copy what was not packed: one tensor read in place keeps a whole weight file in memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _forward(
    model: nn.Module, input_ids_n: Tensor, positions_n: Tensor, rows_s: Tensor, step: AttentionStep
) -> Tensor:
    output = model(
        input_ids=input_ids_n[None],
        position_ids=positions_n[None],
        use_cache=False,
        logits_to_keep=rows_s,
        **{attention.STEP_KWARG: step},
    )
    logits: Tensor = output.logits[0]
    return logits


def _hidden(
    split: SplitModel, input_ids_n: Tensor, positions_n: Tensor, step: AttentionStep
) -> Tensor:
    hidden_1nH = split.hidden(
        input_ids=input_ids_n[None],
        position_ids=positions_n[None],
        **{attention.STEP_KWARG: step},
    )
    return hidden_1nH[0]


@dataclass(slots=True)
class _ProbeStep:
    """An attention in which every token sees itself alone, and which notes what each layer did."""

    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def attend(
        self, layer: int, q_HnD: Tensor, k_HnD: Tensor, v_HnD: Tensor, options: AttentionOptions
    ) -> Tensor:
        if layer in self.shapes:
            raise UnsupportedModel(f"layer {layer} attends twice: shared KV is not supported")
        if k_HnD.shape != v_HnD.shape or q_HnD.shape[-1] != k_HnD.shape[-1]:
            raise UnsupportedModel("K and V of different shapes are not supported")
        num_kv_heads, _, head_dim = k_HnD.shape
        self.shapes[layer] = (num_kv_heads, head_dim)
        return v_HnD.repeat_interleave(q_HnD.shape[0] // num_kv_heads, dim=0).transpose(0, 1)


@torch.inference_mode()
def probe(model: nn.Module, dtype: str, device: torch.device) -> KVShape:
    """Prove that nothing but attention mixes the tokens of a flat batch; returns the KV's shape.

    With an attention that keeps tokens apart, two tokens in one batch must give what each gives
    alone. Recurrent layers, convolutions and ignored positions fail this whatever their name. So
    do models whose head, run over the layers' output, gives something else than the whole does.
    """
    name = model.config.model_type  # type: ignore[union-attr]
    tokens, positions = torch.tensor([3, 5], device=device), torch.tensor([2, 0], device=device)
    steps = [_ProbeStep() for _ in range(4)]
    both = torch.arange(2, device=device)
    try:
        together = _forward(model, tokens, positions, both, steps[0])
        alone = [
            _forward(model, tokens[i : i + 1], positions[i : i + 1], both[:1], steps[i + 1])
            for i in range(2)
        ]
        split = SplitModel(model)
        in_parts = split.logits(_hidden(split, tokens, positions, steps[3])[None])
    except UnsupportedModel as exc:
        raise UnsupportedModel(f"{name}: {exc.message}") from exc
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as exc:
        raise UnsupportedModel(f"{name}: does not run as one flat batch: {exc!r}") from exc
    shapes = steps[0].shapes
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers  # type: ignore[union-attr, operator]
    if sorted(shapes) != list(range(num_layers)):
        raise UnsupportedModel(
            f"{name}: {len(shapes)} of {num_layers} layers use the registered attention; "
            "recurrent layers and attention of a model's own are not supported"
        )
    if list(shapes) != sorted(shapes):
        raise UnsupportedModel(f"{name}: runs its layers in another order than they are numbered")
    if len(set(shapes.values())) != 1:
        raise UnsupportedModel(f"{name}: layers with different KV shapes are not supported")
    if not _agree(torch.cat(alone), together, dtype):
        raise UnsupportedModel(f"{name}: mixes tokens outside attention, or ignores positions")
    if not _agree(in_parts, together, dtype):
        raise UnsupportedModel(f"{name}: its head does more than its layers' output tells")
    return KVShape(num_layers, *shapes[0])


def _agree(ours_sV: Tensor, expected_sV: Tensor, dtype: str) -> bool:
    difference = float((ours_sV.float() - expected_sV.float()).abs().max())
    scale = max(1.0, float(expected_sV.float().abs().max()))
    return difference <= _PROBE_TOLERANCE[dtype] * scale
