"""Whoever is not the other half of a handoff: refused, counted, and told nothing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle  # noqa: TID251 (to throw one)
import re
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from cluster.config import Role
from cluster.errors import HandoffFailed, PdserveError, WorkerLost
from cluster.handoff import AbortHandoff, Commit, ManifestBytes, Offer
from cluster.kv.layout import KVLayout
from cluster.request import LegKey, Peer
from cluster.rpc.link_dialer import LinkDialer
from cluster.transport.manifest import Manifest
from cluster.transport.torch_dist import TorchDistTransport
from deploy.client import Client
from tests.e2e.plain_cluster import REPO, make_config, wait_until
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts

if TYPE_CHECKING:
    import torch

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]
NUM_PROMPT = 64


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    folder = tmp_path_factory.mktemp("strangers")
    with process_cluster(make_config(tiny_llama, pools), tiny_llama, folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 4, num_prompt=NUM_PROMPT, num_tokens=16)


class Stranger:
    """Speaks a prefill worker's protocol, and is none of the cluster's."""

    def __init__(self, cluster, **changes) -> None:
        registration = next(
            w.worker for w in cluster.view().workers if w.worker.role is Role.DECODE
        )
        self.layout = KVLayout.parse(registration.layout)
        self.peer = Peer(
            worker_id=registration.worker_id,
            incarnation=changes.pop("incarnation", registration.incarnation),
            address=registration.address,
        )
        self.heard: list[object] = []
        self.changed = asyncio.Event()
        self.lost = asyncio.Event()
        self._dialer = LinkDialer(
            me=Peer(worker_id="stranger", incarnation="1", address=""),
            layout=changes.pop("layout", self.layout),
            transport=TorchDistTransport(),
            events=self,
        )

    def on_signal(self, link, message) -> None:
        self.heard.append(message)
        self.changed.set()

    def on_link_lost(self, link, reason: str) -> None:
        self.lost.set()

    @contextlib.asynccontextmanager
    async def link(self):
        try:
            yield await self._dialer.link_to(self.peer, 10)
        finally:
            await self._dialer.close()

    async def until_heard(self, kind: type) -> object:
        async with asyncio.timeout(15):
            while not any(isinstance(message, kind) for message in self.heard):
                self.changed.clear()
                await self.changed.wait()
        return next(message for message in self.heard if isinstance(message, kind))

    async def replay(self, link, handoff_id: str, request_id: str) -> None:
        """Send bytes of 255 under another's handoff."""
        manifest = Manifest.of(
            handoff_id, LegKey(request_id, 0, 0), self.layout,
            num_tokens=NUM_PROMPT, output_ids=(7,),
        )  # fmt: skip

        def gather(start: int, num_blocks: int, out_B: torch.Tensor) -> None:
            out_B.fill_(255)

        await link.send_export(manifest, gather)


async def stranger_of(cluster, **changes) -> Stranger:
    return await asyncio.to_thread(functools.partial(Stranger, cluster, **changes))


def report_of(cluster):
    decode = next(w for w in cluster.view().workers if w.worker.role is Role.DECODE)
    return decode.report


async def counter(cluster, name: str) -> float:
    report = await asyncio.to_thread(report_of, cluster)
    return report.counters[name]


async def until_counted(cluster, name: str, number: float) -> None:
    """Wait until the decode worker reports that number."""

    def is_so() -> bool:
        return report_of(cluster).counters[name] == number

    await asyncio.to_thread(wait_until, is_so, 5, f"{name} is not {number}")


def handoff_of(cluster) -> tuple[str, str]:
    """The last handoff that the decode worker's log tells of, and its request."""
    return re.findall(r"handoff=(\S+) leg=([^/\s]+)/", cluster.log("decode-0"))[-1]


async def test_a_transfer_replayed_in_its_midst_and_afterwards_changes_nothing(cluster, prompts):
    """CASES S-13: its id is known, and the link is not the handoff's: dropped and counted."""
    stranger = await stranger_of(cluster)
    dropped = await counter(cluster, "segments_dropped")
    cluster.faults("prefill-0").set(fault("hold", "data.send"))
    stream = prompts.stream(cluster.grpc, 0)
    await asyncio.to_thread(cluster.faults("prefill-0").wait_fired)
    async with stranger.link() as link:
        await stranger.replay(link, *handoff_of(cluster))
        link.signal(Commit(handoff_id=handoff_of(cluster)[0]))
        await until_counted(cluster, "segments_dropped", dropped + 1)
        cluster.faults("prefill-0").clear()
        await asyncio.to_thread(stream.wait_end)
        prompts.check(0, stream)
        await stranger.replay(link, *handoff_of(cluster))
        await until_counted(cluster, "segments_dropped", dropped + 2)
    await asyncio.to_thread(cluster.wait_quiet)
    assert not [message for message in stranger.heard if isinstance(message, Commit)]


async def test_an_offer_that_no_leg_asked_for_gets_no_memory(cluster):
    """CASES S-13: the receiver accepts only what was registered with it."""
    stranger = await stranger_of(cluster)
    dropped = await counter(cluster, "segments_dropped")
    async with stranger.link() as link:
        offer = Offer(handoff_id="forged", key=LegKey("r", 0, 0), num_blocks=4, num_tokens=64)
        link.signal(offer)
        await stranger.replay(link, "forged", "r")
        await until_counted(cluster, "segments_dropped", dropped + 1)
        assert await places_taken(cluster) == 0
        refused = await stranger.until_heard(AbortHandoff)
        assert await places_taken(cluster) == 0
    assert refused.handoff_id == "forged"


async def places_taken(cluster) -> int:
    """Blocks of the decode worker that something is to be written into."""
    blocks = (await asyncio.to_thread(report_of, cluster)).blocks
    return blocks.importing + blocks.fenced + blocks.held


class Canary:
    """What a pickle of it does when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


async def test_a_pickle_is_read_by_nobody(cluster, tmp_path):
    """CASES S-01, S-02: thrown at every port, and sent where a manifest is due."""
    canary = pickle.dumps(Canary(tmp_path / "canary"))
    host, ports = cluster.config.endpoints.host, set(cluster.ports.values())
    endpoints = cluster.config.endpoints
    ports |= {endpoints.http_port, endpoints.grpc_port, endpoints.control_port}
    for port in ports:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(canary)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 10)
        writer.close()
    stranger = await stranger_of(cluster)
    async with stranger.link() as link:
        link.signal(ManifestBytes(payload=canary))
        await asyncio.wait_for(stranger.lost.wait(), 10)
    assert not (tmp_path / "canary").exists()
    pickle.loads(canary)  # noqa: S301 (the bird does sing where it is read)
    assert (tmp_path / "canary").exists()


async def test_an_old_incarnation_and_another_layout_get_no_link(cluster):
    """CASES S-13, P-23: who means another worker, or other blocks, is refused, and counted."""
    refused = await counter(cluster, "links_refused")
    with pytest.raises(WorkerLost):
        async with (await stranger_of(cluster, incarnation="an older one")).link():
            pass
    layout = (await stranger_of(cluster)).layout
    other = KVLayout.parse(layout.describe().replace("num_layers=2", "num_layers=3"))
    with pytest.raises(HandoffFailed, match="num_layers"):
        async with (await stranger_of(cluster, layout=other)).link():
            pass
    await until_counted(cluster, "links_refused", refused + 2)


async def test_a_payload_of_another_size_loses_its_link_and_nothing_else(cluster, prompts):
    """CASES S-13: fewer bytes than were announced are noticed, and no block is written."""
    failed = await counter(cluster, "imports_failed")
    cluster.faults("prefill-0").set(fault("truncate", "data.send"))
    stream = prompts.stream(cluster.grpc, 1)
    await asyncio.to_thread(stream.wait_end)
    assert cluster.faults("prefill-0").clear() == [1]
    prompts.check(1, stream)
    await until_counted(cluster, "imports_failed", failed + 1)
    await asyncio.to_thread(cluster.wait_quiet)


def secrets_of(cluster) -> list[str]:
    """What no client may read: names, incarnations, addresses and paths."""
    view = cluster.view()
    names = [w.worker.worker_id for w in view.workers]
    names += [w.worker.incarnation for w in view.workers]
    ports = [str(port) for port in cluster.ports.values()]
    return [*names, *ports, "127.0.0.1", str(cluster.folder), str(REPO), "Traceback", ".py"]


def test_errors_tell_clients_no_names_hosts_or_paths(cluster, prompts):
    """CASES S-13: a worker is killed amid streams of each door, and the next calls find none."""
    secrets = secrets_of(cluster)
    body = {"model": "tiny", "prompt": prompts.prompts[3], "max_tokens": 16, "timeout_s": 2}
    url = f"{cluster.http}/v1/completions"
    # Slow steps: the streams shall not be over before the worker is.
    cluster.faults("decode-0").set(fault("delay", "engine.step", times=0, seconds=0.15))
    stream = prompts.stream(cluster.grpc, 2, deadline_s=3)
    streamed = {**body, "stream": True, "ignore_eos": True, "temperature": 0, "timeout_s": 3}
    with httpx.stream("POST", url, json=streamed, timeout=10) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        stream.wait_tokens(2)
        cluster.kill("decode-0")
        assert not stream.ended_at
        rest = list(lines)
    (error,) = (line for line in rest if '"error"' in line)
    assert "data: [DONE]" not in rest
    stream.wait_end()
    assert stream.error
    assert len(stream.tokens) < prompts.num_tokens
    said = [error, stream.error_text]
    for _ in range(6):
        answer = httpx.post(url, json=body, timeout=10)
        assert answer.status_code in (502, 503, 504)
        said.append(answer.text)
    with Client(cluster.grpc) as client, pytest.raises(PdserveError) as refused:
        list(client.generate(prompt_ids={"ids": [5, 6]}, max_tokens=4, timeout_s=2))
    said.append(str(vars(refused.value)))
    found = [(secret, text) for secret in secrets for text in said if secret in text]
    assert found == []
