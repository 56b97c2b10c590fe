"""What the check for machines with a GPU needs, looked up without importing it."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PYTHONS = ((3, 11), (3, 12))
LOWEST = {"torch": (2, 11), "transformers": (5, 17)}
PRESENT = ("safetensors", "msgpack", "protobuf", "PyYAML")


def lacking(
    python: tuple[int, ...] = sys.version_info[:2],
    version_of: Callable[[str], str] = metadata.version,
) -> list[str]:
    """Return what is missing, too old or too new, a line each; nothing where all is well."""
    found = []
    if python[:2] not in PYTHONS:
        allowed = " or ".join(map(_dotted, PYTHONS))
        found.append(f"Python {_dotted(python[:2])}: {allowed} is needed")
    for name in (*LOWEST, *PRESENT):
        lowest = LOWEST.get(name, ())
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name}: it is not installed")
            continue
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < lowest:
            found.append(f"{name} {version}: {_dotted(lowest)} or newer is needed")
    return found


def refuse(found: list[str]) -> int:
    """Say what is lacking on standard error; returns the exit code."""
    for line in found:
        sys.stderr.write(f"check: {line}\n")
    return 2


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
