"""S-03: what listens without Ray is what the README's second table of ports says, and no more."""

from __future__ import annotations

import dataclasses
import ipaddress

import psutil
import pytest

from cluster.config import EndpointsConfig, Host, Role, TransportKind
from tests.e2e.plain_cluster import make_config, plain_cluster
from tests.e2e.ray_cluster import ray_cluster
from tests.e2e.streams import Stream
from tests.e2e.test_listeners import rows

pytestmark = pytest.mark.timeout(120)
INLINE, WORKER = "pdserve serve", "python -m deploy.worker_main"
PAIR = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
FORK = {**PAIR, "decode": (Role.DECODE, 2)}
PROMPT_IDS, NUM_TOKENS = [11 + 3 * i for i in range(40)], 600


def ports_of(pid: int) -> set[int]:
    """All that a process and its children listen at, which is on loopback alone."""
    process = psutil.Process(pid)
    found = {
        connection.laddr
        for each in (process, *process.children(recursive=True))
        for connection in each.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    wide = {
        at for at in found if not ipaddress.ip_address(at.ip.removeprefix("::ffff:")).is_loopback
    }
    assert not wide
    return {at.port for at in found}


def told(title: str) -> list[str]:
    """What the table says of this process's ports; all of them on loopback."""
    table = rows(of_ray=False)
    assert {row[0] for row in table} == {INLINE, WORKER}
    assert {bind for _, _, bind, _ in table} == {"loopback"}
    return [port for row_title, port, _, _ in table if row_title == title]


def test_one_process_listens_at_its_doors_and_once_for_each_worker(tiny_llama, tmp_path):
    """As `pdserve serve` runs it, which has sent a request through all of it by then."""
    config = dataclasses.replace(
        make_config(tiny_llama, PAIR), host=Host.INLINE, transport=TransportKind.LOOPBACK
    )
    endpoints = config.endpoints
    named = ("http_port", "grpc_port", "control_port")
    table = [f"`endpoints.{key}` ({getattr(EndpointsConfig(), key)})" for key in named]
    assert told(INLINE) == [*table, "any, one a worker"]
    with ray_cluster(config, tmp_path) as cluster:
        found = ports_of(cluster.process.pid)
    doors = {getattr(endpoints, key) for key in named}
    assert doors <= found
    assert len(found - doors) == len(PAIR)


def test_a_worker_process_listens_once_and_once_for_each_link(tiny_llama, tmp_path):
    """One with links to two others, which have a link each."""
    assert told(WORKER) == ["any, one for legs and links, one a Gloo link"]
    num_links = {"prefill-0": 2, "decode-0": 1, "decode-1": 1}
    with plain_cluster(tiny_llama, tmp_path, FORK, max_num_seqs=1) as cluster:
        # Of two at once each decode worker has one.
        streams = [Stream(cluster.grpc, [number, *PROMPT_IDS], NUM_TOKENS) for number in (7, 8)]
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.wait_tokens(2)
        legs = {
            view.worker.worker_id: int(view.worker.address.rpartition(":")[2])
            for view in cluster.view().workers
        }
        found = {name: ports_of(process.pid) for name, process in cluster.workers.items()}
        for stream in streams:
            stream.wait_end()
            assert len(stream.tokens) == NUM_TOKENS, stream.error
    assert {stream.timeline.decode_worker for stream in streams} == {"decode-0", "decode-1"}
    for name, ports in found.items():
        assert legs[name] in ports, name
        assert len(ports) == 1 + num_links[name], name
