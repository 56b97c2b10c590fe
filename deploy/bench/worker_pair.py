"""A prefill and a decode worker in their own processes, without routers: what a link costs shows.

Both are started as a plain cluster starts them, and register at a control plane that lives here.
Requests go one at a time, straight to the two of them, as a router's legs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from cluster import config as deploy_config
from cluster.clock import SystemClock
from cluster.config import Role
from cluster.control.server import ControlServer
from cluster.control.status import get_cluster
from cluster.errors import StartupError, WorkerLost
from cluster.request import Leg, LegKey, LegKind, Peer, SamplingParams
from cluster.rpc.client import WorkerClient

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Sequence

    from cluster.config import DeployConfig, PoolConfig
    from cluster.lifetime import LegTimes
    from cluster.request import Beat, LegEnd, LegNotice, PromptLogprobs, Token

_READY_S = 120.0
_REQUEST_S = 60.0
_STOP_S = 10.0
_NUM_OUTPUTS = 2
"""One alone would end the request at the prefill worker."""


class _Ends:
    """Hears of the legs of one request at one worker."""

    def __init__(self) -> None:
        self.next: asyncio.Future[LegEnd] = asyncio.get_running_loop().create_future()

    def on_beat(self, beat: Beat) -> None:
        """Nobody waits long enough to care."""

    def on_tokens(
        self,
        tokens: Sequence[Token],
        ends: Sequence[LegEnd],
        notices: Sequence[LegNotice] = (),
        prompts: Sequence[PromptLogprobs] = (),
    ) -> None:
        """Take the end of the one leg there is."""
        for end in ends:
            self.next.set_result(end)

    def on_worker_lost(self, peer: Peer, reason: str, *, is_alive: bool = False) -> None:
        """Fail whoever waits."""
        if not self.next.done():
            error = WorkerLost(f"worker {peer.worker_id}: {reason}", worker_id=peer.worker_id)
            self.next.set_exception(error)

    async def take(self) -> LegEnd:
        """Return the next end."""
        end = await asyncio.wait_for(self.next, _REQUEST_S)
        self.next = asyncio.get_running_loop().create_future()
        return end


class WorkerPair:
    """Two workers that serve one request at a time; made by ``worker_pair``."""

    def __init__(self, prefill: Peer, decode: Peer) -> None:
        self._decode = decode
        self._numbers = itertools.count()
        self._ends = {peer.worker_id: _Ends() for peer in (prefill, decode)}
        self._clients = [
            WorkerClient(
                peer, router_id="bench", incarnation="bench", events=self._ends[peer.worker_id]
            )
            for peer in (prefill, decode)
        ]

    async def request(self, prompt_ids: Sequence[int]) -> LegTimes:
        """Send a prompt through both; returns the times of its prefill leg.

        Raises what a leg ended with, where it did not end well.
        """
        leg = self._leg(prompt_ids, _NUM_OUTPUTS)
        handed_over = replace(leg, handoff_id=leg.grant_id)
        to_prefill, to_decode = self._clients
        await to_prefill.start_leg(replace(handed_over, peer=self._decode))
        await to_decode.start_leg(replace(handed_over, kind=LegKind.DECODE))
        prefilled, decoded = [await ends.take() for ends in self._ends.values()]
        for end in (prefilled, decoded):
            if end.error is not None:
                raise end.error
        return prefilled.times

    async def prefill(self, prompt_ids: Sequence[int]) -> LegTimes:
        """Have a prompt's first token drawn, and nothing handed over; returns that leg's times.

        Raises what the leg ended with, where it did not end well.
        """
        await self._clients[0].start_leg(self._leg(prompt_ids, 1))
        end = await next(iter(self._ends.values())).take()
        if end.error is not None:
            raise end.error
        return end.times

    async def close(self) -> None:
        """End the streams to the workers."""
        for client in self._clients:
            await client.close()

    def _leg(self, prompt_ids: Sequence[int], num_outputs: int) -> Leg:
        name = f"bench-{next(self._numbers)}"
        return Leg(
            key=LegKey(name, 0, 0),
            kind=LegKind.PREFILL,
            prompt_ids=tuple(prompt_ids),
            params=SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True),
            remaining_s=_REQUEST_S,
            grant_id=name,
        )


@contextlib.asynccontextmanager
async def worker_pair(config: DeployConfig, model: Path) -> AsyncIterator[WorkerPair]:
    """Run a pair for the time of a ``with``; ``config`` has one worker in each of two pools.

    Raises StartupError with a worker's last words where one does not start.
    """
    control = ControlServer(config, SystemClock())
    address = await control.start(config.endpoints.host, 0)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(control.stop)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-pair-")))
        path = folder / "deploy.yaml"
        path.write_text(yaml.safe_dump(deploy_config.to_tree(config)), encoding="utf-8")
        started = []
        for pool in config.pools:
            started.append(await _start(path, pool, model, address))
            stack.push_async_callback(_stop, started[-1])
        for pool, process in zip(config.pools, started, strict=True):
            assert process.stdout is not None
            if not await asyncio.wait_for(process.stdout.readline(), _READY_S):
                raise StartupError(f"a worker ended: {_last_words(folder / f'{pool.name}.log')}")
        view = await get_cluster(address, timeout_s=5.0)
        peers = {
            each.worker.role: Peer(
                worker_id=each.worker.worker_id,
                incarnation=each.worker.incarnation,
                address=each.worker.address,
            )
            for each in view.workers
        }
        pair = WorkerPair(peers[Role.PREFILL], peers[Role.DECODE])
        stack.push_async_callback(pair.close)
        yield pair


async def _start(config: Path, pool: PoolConfig, model: Path, control: str) -> Process:
    cores = ("--cores", ",".join(map(str, pool.cores))) if pool.cores else ()
    with (config.parent / f"{pool.name}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "deploy.worker_main",
            "--config", str(config), "--pool", pool.name, "--worker-id", f"{pool.name}-0",
            "--model-path", str(model), "--control", control, *cores,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is the bench's to handle
        )  # fmt: skip


def _last_words(log: Path) -> str:
    words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return (words or ["it said nothing"])[-1]


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()
