"""A checkpoint before its weights are loaded: where it is, whether it can be served, who it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from cluster.errors import UnsupportedModel

_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention"})
_LENGTH_BOUND_ROPES = frozenset({"dynamic", "longrope"})
_SAMPLED_BYTES, _SAMPLES = 4096, 64
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


def find_checkpoint(path_or_id: str | Path) -> Path:
    """Return the folder of a checkpoint, fetched first where ``path_or_id`` is a Hugging Face id.

    Raises UnsupportedModel where there is none, or none with safetensors weights.
    """
    folder = Path(path_or_id)
    if not folder.is_dir():
        folder = _fetch(str(path_or_id))
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{path_or_id}: no config.json there")
    if not weight_files(folder):
        others = [f.name for f in folder.iterdir() if f.suffix in {".bin", ".pt", ".pth", ".gguf"}]
        found = f"; {', '.join(sorted(others))} would have to be converted" if others else ""
        raise UnsupportedModel(f"{path_or_id}: no safetensors weights{found}")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, sorted by name."""
    return sorted(folder.glob("*.safetensors"))


def fingerprint(folder: Path) -> str:
    """Return a digest of a checkpoint's configuration and weights.

    Cheap, so not of every byte: of the configuration, and of each weight file its size, its
    header, and blocks spread over its data, which tells a fine-tuned model from its base.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text())
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
            for index in range(_SAMPLES):
                file.seek(8 + header_bytes + (size - 8 - header_bytes) * index // _SAMPLES)
                digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()[:32]


def tokenizer_fingerprint(folder: Path) -> str:
    """Return a digest of what turns text into ids; empty where the folder has no tokenizer."""
    digest, has_any = hashlib.sha256(), False
    for name in _TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            has_any = True
            digest.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32] if has_any else ""


def refuse_config(config: Any) -> None:
    """Raise UnsupportedModel for a transformers configuration that names what is not served."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: encoder-decoder models are not supported")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"{name}: quantised weights are not supported")
    text = config.get_text_config(decoder=True)
    for layer_type in sorted(set(getattr(text, "layer_types", None) or ())):
        if layer_type not in _ATTENTION_TYPES:
            raise UnsupportedModel(f"{name}: layers of type {layer_type!r} are not supported")


def max_model_len(config: Any) -> int:
    """Return how many positions the model may use.

    Rotary embeddings that change with the longest sequence of a batch are used below that point
    only: a sequence must not depend on its neighbours.
    """
    text = config.get_text_config(decoder=True)
    limit: int | None = getattr(text, "max_position_embeddings", None)
    if limit is None:
        raise UnsupportedModel(f"{config.model_type}: no max_position_embeddings in its config")
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in _LENGTH_BOUND_ROPES:
            original = parameters.get("original_max_position_embeddings")
            own = getattr(text, "original_max_position_embeddings", None)
            limit = min(limit, original or own or limit)
    return limit


def eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """Return the ids that end a text: of generation_config.json, else of the configuration."""
    path = folder / "generation_config.json"
    stated = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if stated is None:
        stated = config.get_text_config(decoder=True).eos_token_id
    if stated is None:
        return frozenset()
    return frozenset([stated] if isinstance(stated, int) else stated)


def _fetch(model_id: str) -> Path:
    # Imported where it is needed: a local folder asks nothing of the hub's client.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return Path(snapshot_download(model_id, allow_patterns=patterns))
    except (HFValidationError, OSError, ValueError) as exc:
        raise UnsupportedModel(f"{model_id}: neither a folder nor to be had: {exc}") from exc
