"""What the router knows about the model that its cluster serves."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Name and limits of the one model; ``created`` is Unix seconds, as OpenAI lists it."""

    name: str
    max_model_len: int
    vocab_size: int
    """Rows of the embedding: token ids from 0 to one less are legal."""
    eos_ids: frozenset[int] = field(default_factory=frozenset)
    created: int = 0


def served_model(folder: Path, *, name: str, max_model_len: int) -> ServedModel:
    """Read a model folder's config files, without torch; raises StartupError if they can't be."""
    config = _read(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = (_read(generation) if generation.exists() else {}).get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    text = config.get("text_config") or config
    vocab_size, limit = text.get("vocab_size"), text.get("max_position_embeddings")
    if not isinstance(vocab_size, int):
        raise StartupError(f"{folder}/config.json: vocab_size is missing")
    return ServedModel(
        name=name,
        max_model_len=min(max_model_len, limit) if isinstance(limit, int) else max_model_len,
        vocab_size=vocab_size,
        eos_ids=frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos]),
        created=int(time.time()),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read as JSON") from error
    if not isinstance(tree, dict):
        raise StartupError(f"{path} is not an object")
    return tree
