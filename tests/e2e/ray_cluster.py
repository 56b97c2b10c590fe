"""A real cluster on Ray for tests, started as a user starts it: by the ``pdserve`` command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import yaml

from cluster import config as deploy_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.config import DeployConfig

READY = "serving"


class RayCluster:
    """One ``pdserve serve`` process and its doors."""

    def __init__(self, config: DeployConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.config_file = folder / "deploy.yaml"
        self.config_file.write_text(yaml.safe_dump(deploy_config.to_tree(config)))
        endpoints = config.endpoints
        self.http = f"http://{endpoints.host}:{endpoints.http_port}"
        self.grpc = f"{endpoints.host}:{endpoints.grpc_port}"
        self.control = f"{endpoints.host}:{endpoints.control_port}"
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.process = subprocess.Popen(
            [*PDSERVE, "serve", "--config", str(self.config_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if READY in line:
                self._ready.set()
        self._ready.set()

    def wait_ready(self, timeout_s: float = 90) -> None:
        is_told = self._ready.wait(timeout_s)
        if not is_told or self.process.poll() is not None:
            raise RuntimeError("not ready:\n" + "".join(self.lines))

    def command(self, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run another ``pdserve`` command against this cluster."""
        name, *rest = arguments
        return subprocess.run(
            [*PDSERVE, name, "--config", str(self.config_file), *rest],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def interrupt(self, timeout_s: float = 15) -> int:
        """Ctrl-C; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        self.process.stdout.close()
        return code


PDSERVE = [sys.executable, "-m", "deploy.cli"]


@contextlib.contextmanager
def ray_cluster(config: DeployConfig, folder: Path) -> Iterator[RayCluster]:
    """Run a cluster for the time of a ``with``; whatever happens, nothing of it is left."""
    cluster = RayCluster(config, folder)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        if cluster.process.poll() is None:
            try:
                cluster.interrupt()
            except subprocess.TimeoutExpired:
                cluster.process.kill()
                cluster.process.wait(10)
        cluster.command("down")
