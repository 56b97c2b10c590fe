"""What the processes of clusters run that are forked from one which has imported everything."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.clock import SystemClock
from cluster.control.server import ControlServer
from deploy import worker_main
from router.ingress import Ingress

if TYPE_CHECKING:
    from cluster.config import DeployConfig


forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload([__name__])


def in_child(target, arguments, out: str) -> None:
    """Be a process that says on ``out`` when it is ready, and logs beside it."""
    log = os.open(Path(out).with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 (they live as long)
    faulthandler.register(signal.SIGUSR2, file=2)
    sys.exit(target(*arguments))


def run_worker(arguments: list[str]) -> int:
    """Be a worker, with the arguments of its command line; returns its exit code."""
    os.environ["OMP_NUM_THREADS"] = "1"
    return worker_main.main(arguments)


def run_control(config: DeployConfig) -> None:
    """Be a control plane."""

    async def serve() -> None:
        control = ControlServer(config, SystemClock())
        await control.start(config.endpoints.host, config.endpoints.control_port)
        await _forever()

    asyncio.run(serve())


def run_router(config: DeployConfig, model: Path) -> None:
    """Be a router; SIGTERM drains it."""

    async def serve() -> None:
        ingress = Ingress(config, model)
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        await ingress.start()
        _say_ready()
        await told.wait()
        await ingress.stop(config.limits.drain_s)

    asyncio.run(serve())


async def _forever() -> None:
    _say_ready()
    await asyncio.Event().wait()


def _say_ready() -> None:
    sys.stdout.write("{}\n")
    sys.stdout.flush()
