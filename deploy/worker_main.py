"""One worker as a plain process: ``python -m deploy.worker_main --config FILE --pool NAME ...``.

Prints one JSON line when the control plane has accepted it. SIGTERM or SIGINT drain it, within
``limits.drain_s``; a second one ends it at once. Exit codes: 0 drained as asked, 1 the engine
failed or it was ended at once, 2 it could not start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from cluster import config as deploy_config
from cluster.errors import StartupError
from deploy.heap import keep_what_start_made
from deploy.hosted_worker import HostedWorker

logger = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Run the worker until it is told to stop, and return the exit code."""
    options = _parse(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s %(message)s"
    )
    try:
        config = deploy_config.load(options.config)
        worker = HostedWorker.build(
            config,
            config.pool(options.pool),
            worker_id=options.worker_id,
            model_path=options.model_path,
            control_address=options.control,
            cores=options.cores,
            port=options.port,
        )
        return asyncio.run(_serve(worker, config.limits.drain_s))
    except StartupError as error:
        logger.error("worker=%s cannot start: %s", options.worker_id, error.message)
        return 2


async def _serve(hosted: HostedWorker, drain_s: float) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopped.is_set():
            os._exit(1)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    asked = asyncio.ensure_future(stopped.wait())
    starting = asyncio.ensure_future(hosted.start())
    first: set[asyncio.Future[Any]] = {starting, asked}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        await starting
        worker = hosted.worker
        keep_what_start_made()
        line = json.dumps({"ready": worker.worker_id, "address": worker.me.address})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        endings: set[asyncio.Future[Any]] = {asked, hosted.fault, hosted.drained}
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
    starting.cancel()
    await hosted.end(drain_s)
    await asyncio.gather(starting, return_exceptions=True)
    asked.cancel()
    return 1 if hosted.fault.done() else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.worker_main", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--pool", required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--control", required=True, metavar="ADDRESS")
    parser.add_argument("--cores", type=_cores, default=(), help="e.g. 0,1; all if not given")
    parser.add_argument("--port", type=int, default=0, help="to listen on; any if not given")
    return parser.parse_args(arguments)


def _cores(text: str) -> tuple[int, ...]:
    return tuple(int(core) for core in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
