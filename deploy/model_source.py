"""From the deploy file's ``model.path`` to a checkpoint folder that the engine may read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cluster.errors import StartupError, UnsupportedModel
from deploy import progress as progress_bars
from deploy.trial_model import TRIAL_NAME, ensure_trial_model

if TYPE_CHECKING:
    from deploy.progress import Progress

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
_CODE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class ResolvedModel(NamedTuple):
    """A checkpoint on this machine, and what clients call it."""

    folder: Path
    name: str


def resolve_model(
    path: str, name: str = "", *, progress: Progress = progress_bars.show
) -> ResolvedModel:
    """Find or fetch the model: ``trial``, a folder, or a Hugging Face id.

    ``name`` overrides what clients call it. Raises StartupError, or UnsupportedModel for a
    checkpoint that holds no safetensors.
    """
    if path == "trial":
        return ResolvedModel(ensure_trial_model(progress=progress), name or TRIAL_NAME)
    folder = Path(path).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        check_checkpoint(folder)
        return ResolvedModel(folder, name or folder.name)
    if not HUB_ID.fullmatch(path) or path.startswith((".", "/", "~")):
        raise StartupError(
            f"model.path: {path!r} is neither `trial`, nor a folder, nor a Hugging Face id "
            "(OWNER/NAME)",
            field="model.path",
        )
    folder = _fetch(path)
    check_checkpoint(folder)
    return ResolvedModel(folder, name or path)


def model_name(path: str, name: str = "") -> str:
    """Return what clients call a model, without looking for it."""
    if name:
        return name
    if path == "trial":
        return TRIAL_NAME
    is_local = path.startswith((".", "/", "~")) or Path(path).is_dir()
    return Path(path).expanduser().resolve().name if is_local else path


def check_checkpoint(folder: Path) -> None:
    """Refuse a folder that isn't a safetensors checkpoint with a tokenizer, naming what lacks."""
    has_weights = any(folder.glob("*.safetensors"))
    if not has_weights and any(p.suffix in _CODE_SUFFIXES for p in folder.iterdir()):
        raise UnsupportedModel(
            f"{folder} holds its weights in a format that can execute code when it is read; only "
            "safetensors is read: save the model again with transformers' save_pretrained",
            field="model.path",
        )
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not has_weights:
        missing.append("*.safetensors")
    if missing:
        raise UnsupportedModel(
            f"{folder} is not a whole checkpoint: it lacks {', '.join(missing)}", field="model.path"
        )


def _fetch(hub_id: str) -> Path:
    # Imported here: only this case needs it, and it is a second of start-up.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_PATTERNS)))
    except GatedRepoError as error:
        reason, remedy = "its owner has to let you in", "ask on its page, then log in with `hf`"
        cause: Exception = error
    except (RepositoryNotFoundError, HFValidationError) as error:
        reason, remedy, cause = "there is no such model", "check the id", error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError) as error:
        reason, cause = "its files can't be fetched and aren't in the cache", error
        remedy = "check the network, or give a folder"
    except (httpx.HTTPError, OSError) as error:
        reason, cause = f"fetching it failed ({type(error).__name__})", error
        remedy = "check the network and the free space, or give a folder"
    raise StartupError(f"model {hub_id}: {reason}; {remedy}", field="model.path") from cause
