"""``handoff``: how long the KV of a 512-token prompt keeps its second token waiting.

The value is the *exposed transfer* as the prefill worker measures it: from the first token until
the decode worker's COMMIT has come back. Requests go one at a time, each with a new prompt, so the
decode worker is idle. For each transport four pairs of workers run, of which one works at a time,
in turns: ``whole`` computes a prompt in one step and sends it then, ``layers`` sends layers out of
that step while later ones are computed, ``digest`` does the same with digests, ``chunked`` computes
the prompt in chunks and sends each while the next is computed. A run is 18 turns and counts
medians. Raw Gloo moves the same bytes between two processes on the same two cores, in the pauses
between the requests.

Sending beside the step shall cost the prefill next to nothing, and so the bar on it is on
``layers``. Two workers that do the same differ by up to 2 %, by the memory that each happened to
get; so in each turn the ``layers`` worker also computes a prompt that it hands to nobody, and a row
compares the two. That counts the offer and its answer too, which every handoff has.

In chunks the step itself takes longer, whatever is sent, and so that row has no bar. 512 tokens
read the weights once, four chunks of 128 four times: 212 MB each time, at 24 GB/s of one core 9 ms,
of which oneDNN hides a part behind the products. With weights that stay in the cache four times 128
rows cost 3 % more than 512, with all layers' in turn 9 %.

Pools are just big enough for the model's longest sequence, and warming up fills them: the first
time a block is written its pages come from the machine, which can take longer than the transfer (30
ms for 11.8 MB), once in the life of a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.config import Role, TransportKind
from cluster.errors import HandoffFailed
from deploy.bench.cluster import bench_config
from deploy.bench.gloo_pair import GlooPair, gloo_pair
from deploy.bench.report import Bar, Row, Run, row_of
from deploy.bench.site import prompt_ids
from deploy.bench.worker_pair import WorkerPair, worker_pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.config import DeployConfig
    from cluster.lifetime import LegTimes
    from deploy.bench.site import Site

NAME = "handoff"
_WHOLE_LIMIT_MS = 10.0
_EXPOSED_LIMIT_MS = {TransportKind.TORCH_DIST: 5.0, TransportKind.SHM: 3.0}
_PREFILL_LIMIT = 1.03
_TITLES = {TransportKind.TORCH_DIST: "Gloo", TransportKind.SHM: "shared memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSize:
    """How much is measured; the default is what the bars speak of."""

    num_tokens: int = 512
    chunk_tokens: int = 128
    num_bytes: int = 32 * 368_640
    """What has to move: blocks of 16 tokens of the trial model in bf16."""
    num_requests: int = 18
    num_runs: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Medians:
    """One run of one kind of pair."""

    exposed_ms: float
    prefill_ms: float
    """From the leg's arrival to its first token."""


def measure(
    site: Site, size: HandoffSize | None = None, config: DeployConfig | None = None
) -> list[Row]:
    """Return seven rows for each transport.

    Raises HandoffFailed where other bytes moved than should have.
    """
    size, config = size or HandoffSize(), config or bench_config("trial.yaml")
    rows = []
    for transport in _TITLES:
        on_transport = dataclasses.replace(config, transport=transport)
        rows += asyncio.run(_measure(site, size, on_transport))
    return rows


async def _measure(site: Site, size: HandoffSize, config: DeployConfig) -> list[Row]:
    cores = [_core(config, role) for role in (Role.PREFILL, Role.DECODE)]
    title = f"{NAME}, {_TITLES[config.transport]}"
    async with contextlib.AsyncExitStack() as stack:
        bar = site.progress(title, size.num_runs * size.num_requests, "turn")
        stack.enter_context(closing(bar))
        stack.enter_context(_beside(config.service_cores))
        turns = _Turns(
            size=size,
            raw=stack.enter_context(gloo_pair(size.num_bytes, *cores)),
            pairs={
                name: await stack.enter_async_context(worker_pair(changed, site.folder))
                for name, changed in _variants(config, size.chunk_tokens).items()
            },
            on_turn=bar.update,
        )
        await turns.warm_up(1 + -(-config.model.max_model_len // size.num_tokens))
        for _ in range(size.num_runs):
            await turns.run()
    return _rows(config.transport, size, turns.runs, turns.raw_ms)


@dataclass(slots=True, kw_only=True)
class _Turns:
    """Lets every pair, and raw Gloo, move the same bytes in turns."""

    size: HandoffSize
    raw: GlooPair
    pairs: Mapping[str, WorkerPair]
    on_turn: Callable[[], object]
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    runs: dict[str, list[_Medians]] = field(default_factory=lambda: defaultdict(list))
    raw_ms: list[float] = field(default_factory=list)

    async def warm_up(self, times: int) -> None:
        """Make the first calls, which cost more."""
        self.raw.transfer(times)
        for pair in self.pairs.values():
            for _ in range(times):
                await _request(pair, self.draw, self.size)

    async def run(self) -> None:
        """Make one run of everything."""
        times: dict[str, list[LegTimes]] = defaultdict(list)
        raw_s: list[float] = []
        for _ in range(self.size.num_requests):
            for name, pair in self.pairs.items():
                times[name].append(await _request(pair, self.draw, self.size))
            prompt = prompt_ids(self.size.num_tokens, self.draw)
            times["alone"].append(await self.pairs["layers"].prefill(prompt))
            raw_s += self.raw.transfer(1)
            self.on_turn()
        self.raw_ms.append(1e3 * statistics.median(raw_s))
        for name, of_pair in times.items():
            self.runs[name].append(_medians(of_pair))


def _medians(times: Sequence[LegTimes]) -> _Medians:
    return _Medians(
        exposed_ms=1e3 * statistics.median(each.exposed_s for each in times),
        prefill_ms=1e3 * statistics.median(each.queue_s + each.compute_s for each in times),
    )


@contextlib.contextmanager
def _beside(cores: tuple[int, ...]) -> Iterator[None]:
    """Keep this process where routers and the control plane would be."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _request(pair: WorkerPair, draw: random.Random, size: HandoffSize) -> LegTimes:
    """Send one prompt; returns its times, once the bytes were counted."""
    times = await pair.request(prompt_ids(size.num_tokens, draw))
    if times.transfer_bytes != size.num_bytes:
        raise HandoffFailed(
            f"{times.transfer_bytes} bytes moved for {size.num_tokens} tokens, "
            f"{size.num_bytes} should have",
            stage="bench",
        )
    return times


def _variants(config: DeployConfig, chunk_tokens: int) -> dict[str, DeployConfig]:
    small = tuple(
        dataclasses.replace(pool, kv_tokens=config.model.max_model_len) for pool in config.pools
    )

    def changed(chunk: int, *, streams: bool = True, has_digest: bool = False) -> DeployConfig:
        pools = tuple(
            dataclasses.replace(pool, chunk_tokens=chunk) if pool.role is Role.PREFILL else pool
            for pool in small
        )
        limits = dataclasses.replace(config.limits, stream_kv=streams, kv_digest=has_digest)
        return dataclasses.replace(config, pools=pools, limits=limits)

    return {
        "whole": changed(0, streams=False),
        "layers": changed(0),
        "digest": changed(0, has_digest=True),
        "chunked": changed(chunk_tokens),
    }


def _rows(
    transport: TransportKind,
    size: HandoffSize,
    runs: Mapping[str, list[_Medians]],
    raw_ms: list[float],
) -> list[Row]:
    whole, layers, digest, chunked, alone = (
        runs[name] for name in ("whole", "layers", "digest", "chunked", "alone")
    )
    through = _TITLES[transport]
    tokens = f"{size.num_tokens} tokens, {size.num_bytes / 1e6:.1f} MB, {through}"
    chunks = f"in chunks of {size.chunk_tokens}"

    def exposed(of: list[_Medians], reference: list[float]) -> list[Run]:
        return [Run(run.exposed_ms, other) for run, other in zip(of, reference, strict=True)]

    def prefill(of: list[_Medians], reference: list[_Medians]) -> list[Run]:
        pairs = zip(of, reference, strict=True)
        return [Run(run.prefill_ms, other.prefill_ms) for run, other in pairs]

    whole_ms = [run.exposed_ms for run in whole]
    layers_ms = [run.exposed_ms for run in layers]
    limit_ms = Bar(subject="value", relation="<=", limit=_EXPOSED_LIMIT_MS[transport])
    whole_limit = Bar(subject="value", relation="<=", limit=_WHOLE_LIMIT_MS)
    prefill_limit = Bar(subject="ratio", relation="<=", limit=_PREFILL_LIMIT)
    rows = (
        (f"exposed, whole: {tokens}, vs raw Gloo", exposed(whole, raw_ms), whole_limit),
        (f"exposed, by layers: {tokens}, vs whole", exposed(layers, whole_ms), limit_ms),
        (f"exposed, by layers, digest: {tokens}, vs none", exposed(digest, layers_ms), None),
        (f"exposed, {chunks}: {tokens}, vs whole", exposed(chunked, whole_ms), limit_ms),
        (f"prefill, by layers: {tokens}, vs whole", prefill(layers, whole), prefill_limit),
        (f"prefill, by layers: {tokens}, vs no handoff", prefill(layers, alone), None),
        (f"prefill {chunks}: {tokens}, vs whole", prefill(chunked, whole), None),
    )
    return [row_of(NAME, what, "ms", of, bar) for what, of, bar in rows]


def _core(config: DeployConfig, role: Role) -> int:
    """Return the core of a pool's first worker; any core where the pool is not pinned."""
    cores = next(pool.cores for pool in config.pools if pool.role is role)
    return cores[0] if cores else min(os.sched_getaffinity(0))
