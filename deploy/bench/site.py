"""Where a benchmark runs: a model, a core, and a cluster if it needs one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deploy.progress import Progress

if TYPE_CHECKING:
    import random

    from cluster.config import DeployConfig

_PLAIN_IDS = range(10, 500)
"""Token ids that are ordinary text in the trial model and in any vocabulary of 500 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What every benchmark is given."""

    folder: Path
    """The model."""
    core: int
    """For what runs outside a cluster."""
    progress: Progress


class Doors(Protocol):
    """A running cluster as its clients see it."""

    @property
    def config(self) -> DeployConfig:
        """What it runs."""
        ...

    @property
    def http(self) -> str:
        """Base URL of the HTTP door."""
        ...

    @property
    def grpc(self) -> str:
        """Address of the gRPC door."""
        ...


def prompt_ids(num_tokens: int, draw: random.Random) -> list[int]:
    """Return a prompt of exactly ``num_tokens`` tokens."""
    return draw.choices(_PLAIN_IDS, k=num_tokens)
