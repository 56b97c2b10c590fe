"""``handoff``: how long the KV of a 512-token prompt keeps its second token waiting.

The value is the *exposed transfer* as the prefill worker measures it: from the first token until
the decode worker's COMMIT has come back. Requests go one at a time, each with a new prompt, so the
decode worker is idle. A run is 30 requests and counts their median; the reference is raw Gloo for
the same bytes, between two processes on the same two cores, in the pauses between the requests.
"""

from __future__ import annotations

import os
import random
import statistics
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.errors import HandoffFailed
from cluster.wire import public_v1_pb2 as pb
from deploy.bench.gloo_pair import gloo_pair
from deploy.bench.report import Bar, Row, Run, row_of
from deploy.bench.site import prompt_ids
from deploy.client import Client

if TYPE_CHECKING:
    from deploy.bench.site import Doors, Site

NAME = "handoff"
_BAR = Bar(subject="value", relation="<=", limit=10.0)
_WARM_UPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSize:
    """How much is measured; the default is what the bar speaks of."""

    num_tokens: int = 512
    num_bytes: int = 32 * 368_640
    """What has to move: blocks of 16 tokens of the trial model in bf16."""
    num_requests: int = 30
    num_runs: int = 3


def measure(site: Site, doors: Doors, size: HandoffSize | None = None) -> list[Row]:
    """Return the one row; raises HandoffFailed where other bytes moved than should have."""
    size = size or HandoffSize()
    draw = random.Random(1)
    cores = [_core(doors, role) for role in (Role.PREFILL, Role.DECODE)]
    runs = []
    with (
        closing(site.progress(NAME, size.num_runs * size.num_requests, "request")) as bar,
        gloo_pair(size.num_bytes, *cores) as pair,
        Client(doors.grpc) as client,
    ):
        pair.transfer(_WARM_UPS)
        for _ in range(_WARM_UPS):
            _exposed_s(client, draw, size)
        for _ in range(size.num_runs):
            ours, raw = [], []
            for _ in range(size.num_requests):
                ours.append(_exposed_s(client, draw, size))
                raw.extend(pair.transfer(1))
                bar.update()
            runs.append(Run(statistics.median(ours) * 1e3, statistics.median(raw) * 1e3))
    what = f"exposed for {size.num_tokens} tokens, {size.num_bytes / 1e6:.1f} MB, vs raw Gloo"
    return [row_of(NAME, what, "ms", runs, _BAR)]


def _core(doors: Doors, role: Role) -> int:
    """Return the core of a pool's first worker; any core where the pool is not pinned."""
    cores = next(pool.cores for pool in doors.config.pools if pool.role is role)
    return cores[0] if cores else min(os.sched_getaffinity(0))


def _exposed_s(client: Client, draw: random.Random, size: HandoffSize) -> float:
    """Send one request and return its exposed transfer, once it has been checked."""
    prompt = pb.TokenIds(ids=prompt_ids(size.num_tokens, draw))
    # Two tokens: one alone would end the request at the prefill worker.
    pieces = client.generate(
        prompt_ids=prompt, max_tokens=2, temperature=0.0, ignore_eos=True, timeline=True
    )
    prefill = list(pieces)[-1].timeline.prefill
    if prefill.transfer_bytes != size.num_bytes:
        raise HandoffFailed(
            f"{prefill.transfer_bytes} bytes moved for {size.num_tokens} tokens, "
            f"{size.num_bytes} should have",
            stage="bench",
        )
    return float(prefill.exposed_s)
