"""How this installation's commands are called, ready to paste into any shell of the machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from cluster.config import EndpointsConfig

START_REMEDY = (
    "start a cluster with `make run` or `pdserve serve`, or name the ports of a running one with "
    "its --config or --set"
)


def pdserve(*arguments: str) -> str:
    """Return a ``pdserve`` command line; it needs no activated environment."""
    script = Path(sys.executable).with_name("pdserve")
    words = [str(script)] if script.exists() else [sys.executable, "-m", "deploy.cli"]
    return shlex.join([*words, *arguments])


def python() -> str:
    """Return this interpreter as a shell word."""
    return shlex.quote(sys.executable)


def down(control_port: int) -> str:
    """Return what clears the cluster with this control port, whatever its deploy file is."""
    is_default = control_port == EndpointsConfig().control_port
    return pdserve(
        "down", *(() if is_default else ("--set", f"endpoints.control_port={control_port}"))
    )
