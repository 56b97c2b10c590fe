"""What a model's ``config.json`` alone tells of the memory it takes; no weights are needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import DEFAULT_KV_TOKENS, PoolConfig
from cluster.errors import StartupError, UnsupportedModel
from deploy.hardware import element_bytes
from deploy.model_source import HUB_ID
from deploy.trial_model import trial_folder

_WIDE_LOGITS_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of one model."""

    kv_elements: int
    """Elements of one token's K and V over all layers."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    """Positions that it knows; 0 where its configuration doesn't say."""

    def token_bytes(self, pool: PoolConfig) -> int:
        """Bytes that one token's KV takes in a worker of ``pool``."""
        return self.kv_elements * element_bytes(pool.stored_dtype, pool.device)

    def kv_tokens(self, pool: PoolConfig) -> int:
        """Tokens of KV that a worker holds: as configured, or what ``kv_bytes`` has room for.

        Raises StartupError where there is no room for a block.
        """
        if not pool.kv_bytes:
            return pool.kv_tokens
        num_blocks = pool.kv_bytes // (self.token_bytes(pool) * pool.block_size)
        if not num_blocks:
            raise StartupError(
                f"pools.{pool.name}.kv_bytes: {pool.kv_bytes} has no room for a block of "
                f"{pool.block_size} tokens",
                field=f"pools.{pool.name}.kv_bytes",
            )
        return num_blocks * pool.block_size

    def activation_bytes(self, pool: PoolConfig) -> int:
        """Estimate what a full step takes besides: states, the two gates, K and V, logits.

        Of each token of the budget: six hidden states, three of the feed-forward width, one
        layer's K and V; of each sequence: logits in fp32 twice, and its whole context's K and V of
        one layer, which attention gathers.
        """
        element = element_bytes(pool.dtype, pool.device)
        layer_kv = self.kv_elements // max(1, self.num_layers)
        token = 6 * self.hidden_size + 3 * self.intermediate_size + layer_kv
        logits = 2 * _WIDE_LOGITS_BYTES * self.vocab_size * pool.max_num_seqs
        gathered = layer_kv * element * min(
            self.kv_tokens(pool), pool.max_num_seqs * (self.max_model_len or DEFAULT_KV_TOKENS)
        )  # fmt: skip
        return pool.token_budget * token * element + logits + gathered


def read_shape(path: str) -> ModelShape:
    """Read the model that ``model.path`` names, and fetch no weights.

    Raises StartupError where its config.json is not to be had.
    """
    file = config_file(path)
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"model {path}: {file} cannot be read as JSON") from error
    text: dict[str, Any] = tree.get("text_config") or tree
    return ModelShape(
        kv_elements=kv_elements(text),
        num_layers=first_number(text, "num_hidden_layers", "n_layer"),
        hidden_size=first_number(text, "hidden_size", "n_embd"),
        intermediate_size=first_number(text, "intermediate_size", "ffn_dim", "n_inner")
        or 4 * first_number(text, "hidden_size", "n_embd"),
        vocab_size=first_number(text, "vocab_size"),
        max_model_len=first_number(text, "max_position_embeddings", "n_positions"),
    )


def stated_layout(path: str) -> dict[str, int]:
    """Return the fields of ``KVLayout`` that the model's config.json states; fetches nothing.

    Only what stands there: where an entry is missing, each architecture has a default of its own.
    Empty where this machine does not have the file.
    """
    try:
        file = _cached(path) if _is_hub_id(path) else config_file(path)
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, StartupError):
        return {}
    text: dict[str, Any] = tree.get("text_config") or tree
    stated = {
        "num_layers": first_number(text, "num_hidden_layers", "n_layer"),
        "num_kv_heads": first_number(text, "num_key_value_heads"),
        "head_dim": first_number(text, "head_dim"),
    }
    return {name: number for name, number in stated.items() if number}


def kv_elements(text: dict[str, Any]) -> int:
    """Elements of one token's K and V; 0 where the usual words are missing."""
    num_heads = first_number(text, "num_attention_heads", "n_head")
    num_kv_heads = first_number(text, "num_key_value_heads") or num_heads
    width = first_number(text, "hidden_size", "n_embd")
    head_dim = first_number(text, "head_dim") or (width // num_heads if num_heads else 0)
    return 2 * first_number(text, "num_hidden_layers", "n_layer") * num_kv_heads * head_dim


def first_number(tree: dict[str, Any], *names: str) -> int:
    """Return the first of these entries that is a number; 0 where none is."""
    return next((tree[name] for name in names if isinstance(tree.get(name), int)), 0)


def config_file(path: str) -> Path:
    """Return the config.json of the model that ``model.path`` names; raises StartupError."""
    if path == "trial":
        file = trial_folder() / "config.json"
        if not file.is_file():
            raise StartupError(
                "the trial model is not on this machine yet: `make run` fetches it",
                field="model.path",
            )
        return file
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / "config.json"
    if not _is_hub_id(path):
        raise StartupError(
            f"model.path: {path!r} is neither `trial`, nor a folder, nor a Hugging Face id",
            field="model.path",
        )
    return _fetch(path)


def _is_hub_id(path: str) -> bool:
    is_place = path == "trial" or path.startswith((".", "/", "~")) or Path(path).is_dir()
    return not is_place and HUB_ID.fullmatch(path) is not None


def _cached(hub_id: str) -> Path:
    """Return where an earlier fetch has left it; raises OSError where none has."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    if not isinstance(found, str):
        raise FileNotFoundError(hub_id)
    return Path(found)


def _fetch(hub_id: str) -> Path:
    # Imported here: only this case needs them.
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError, ValueError) as error:
        raise StartupError(
            f"model {hub_id}: its config.json can't be fetched and isn't in the cache "
            f"({type(error).__name__}); check the id and the network, or give a folder that has "
            "the file with --set model.path=FOLDER",
            field="model.path",
        ) from error


def count_parameters(path: str) -> int:
    """Count the parameters of a model that is never loaded; raises UnsupportedModel."""
    # Seconds of start-up, which commands that ask for no model need not take.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    folder = config_file(path).parent
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config  # untyped
            model = make(config, trust_remote_code=False)
    except (OSError, ValueError, TypeError) as error:
        raise UnsupportedModel(f"{folder}: its config cannot be read: {error}") from error
    return int(sum(parameter.numel() for parameter in model.parameters()))
