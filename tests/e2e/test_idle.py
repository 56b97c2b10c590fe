"""CASES P-26: idle for ten minutes, and then it answers as it did before.

What idling could trip is a timer. Each of ours that is longer than the test is one that no idle
cluster waits for, or is shortened here, by name; so is the age at which a door asks its clients to
connect anew. All shorter ones, and gRPC's pings over connections without data, run as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from unittest import mock

import httpx
import psutil
import pytest

from cluster.config import Role
from cluster.control.settings import ControlSettings
from deploy.client import Client
from router.grpc_api import GrpcCaps
from tests.e2e import children
from tests.e2e.plain_cluster import REPO, make_config, wait_until
from tests.e2e.process_cluster import ProcessCluster
from tests.e2e.reference import NEAR_TIE
from tests.e2e.streams import Prompts
from tests.e2e.test_health import Health, always_ready

IDLE_S = 17.0
SHORT_S = 1.0
AGE_S = 4.0
SHORTENED = {
    "cluster/control/costs.py": "_SPEED_AGE_S",
    "cluster/control/pace.py": "_KEPT_S",
    "cluster/rpc/given_up.py": "REMEMBERED_S",
    "decode_worker/past.py": "REMEMBERED_S",
    "deploy/worker_watch.py": "_LEAK_S",
    "prefill_worker/broken_links.py": "_KEPT_S",
}
"""Of a minute; with ``link_age_s``, ``link_idle_s`` and ``connection_age_s``."""
OF_WORK = {
    "cluster/config_shape.py": "quiet_s start_s default_deadline_s max_deadline_s drain_s",
    "cluster/control/settings.py": "replacement_wait_s refused_keep_s",
    "cluster/transport/staging.py": "idle_s turn_s",
    "deploy/worker.py": "START_TIMEOUT_S",
    "router/http_body.py": "READ_TIMEOUT_S",
    "router/http_guard.py": "stall_timeout_s",
}
"""Those of a request, a transfer, a start, an end, or of a pool that is scaled (which an idle one
is, see ``test_autoscaling``). ``idle_s`` is ``link_idle_s`` where links are made."""
OTHERS = {
    "cluster/config_shape.py": "link_idle_s",
    "cluster/control/settings.py": "link_age_s",
    "router/grpc_api/caps.py": "connection_age_s",
}
LONGEST_S = 900.0
PAIR = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
NUM_WARM, NUM_TOKENS = 3, 16


@contextlib.contextmanager
def hasty():
    """Shorten the timers of this process for the time of a ``with``."""
    links = functools.partial(ControlSettings, link_age_s=SHORT_S)
    doors = functools.partial(GrpcCaps, connection_age_s=AGE_S)
    with contextlib.ExitStack() as stack:
        for file, name in SHORTENED.items():
            module = file.removesuffix(".py").replace("/", ".")
            stack.enter_context(mock.patch(f"{module}.{name}", SHORT_S))
        stack.enter_context(mock.patch("cluster.control.server.ControlSettings", links))
        stack.enter_context(mock.patch("router.ingress.GrpcCaps", doors))
        yield


def run_worker(arguments) -> int:
    with hasty():
        return children.run_worker(arguments)


def run_control(config) -> None:
    with hasty():
        children.run_control(config)


def run_router(config, model) -> None:
    with hasty():
        children.run_router(config, model)


def ask(client: Client, prompts: Prompts, number: int) -> float:
    """Have one prompt answered, rightly; returns the seconds to its first token."""
    tokens, first_s, began = [], 0.0, time.monotonic()
    for piece in client.generate(
        prompt_ids={"ids": prompts.prompts[number]},
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        ignore_eos=True,
    ):
        first_s = first_s or time.monotonic() - began
        tokens += piece.token_ids
    assert len(tokens) == NUM_TOKENS
    assert prompts.reference.wrong_at(number, tokens, NEAR_TIE) is None
    return first_s


def num_links(cluster: ProcessCluster) -> int:
    """Connections of the prefill worker to the decode worker's port for links."""
    port = cluster.ports["decode-0"]
    connections = psutil.Process(cluster.pid("prefill-0")).net_connections("tcp")
    return sum(bool(each.raddr) and each.raddr.port == port for each in connections)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_after_ten_idle_minutes_it_answers_as_before(tiny_llama, tmp_path, monkeypatch):
    """CASES P-26: ready all along, nobody is replaced, and a client's old connection does."""
    monkeypatch.setattr(children, "run_control", run_control)
    monkeypatch.setattr(children, "run_router", run_router)
    config = make_config(tiny_llama, PAIR)
    limits = dataclasses.replace(config.limits, link_idle_s=SHORT_S, drain_s=2 * AGE_S)
    cluster = ProcessCluster(dataclasses.replace(config, limits=limits), tiny_llama, tmp_path)
    cluster.target = run_worker
    prompts = Prompts(tiny_llama, NUM_WARM + 2, num_prompt=64, num_tokens=NUM_TOKENS)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.stop)
        cluster.start()
        client = stack.enter_context(Client(cluster.grpc))
        http = stack.enter_context(httpx.Client(base_url=cluster.http, timeout=30))
        health = Health(cluster)
        stack.callback(health.close)
        usual_s = max(ask(client, prompts, number) for number in range(NUM_WARM))
        before = {w.worker.worker_id: w.worker.incarnation for w in cluster.view().workers}
        assert num_links(cluster) == 1
        with always_ready(health, pace_s=0.5):
            time.sleep(IDLE_S)  # to be idle is the case
        assert num_links(cluster) == 0, "its link was not idle"
        assert ask(client, prompts, NUM_WARM) < usual_s + 1.0
        body = {"model": "tiny", "prompt": prompts.prompts[NUM_WARM + 1], "max_tokens": NUM_TOKENS}
        assert http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
        workers = cluster.view().workers
        assert {w.worker.worker_id: w.worker.incarnation for w in workers} == before
        for worker in workers:
            counters = worker.report.counters
            assert counters["kv_checks"] >= 1
            assert counters["kv_check_failures"] == 0
        wait_until(lambda: num_imports(cluster) == NUM_WARM + 2, 5, "one was not handed over")
        cluster.wait_quiet()


def num_imports(cluster: ProcessCluster) -> float:
    return sum(w.report.counters.get("imports_ok", 0) for w in cluster.view().workers)


def test_no_longer_timer_was_forgotten():
    """Each that could end in ten idle minutes, and not in those of this file, is named here."""
    is_named = {
        (file, name)
        for names in (SHORTENED, OF_WORK, OTHERS)
        for file, listed in names.items()
        for name in listed.split()
    }
    pattern = re.compile(r"^\s*(\w+_[sS])(?:: float)? = ([\d_.]+)$", re.M)
    files = [
        path
        for folder in ("cluster", "router", "prefill_worker", "decode_worker")
        for path in (REPO / folder).rglob("*.py")
    ]
    files += (REPO / "deploy").glob("*worker*.py")
    found = {
        (str(path.relative_to(REPO)), name)
        for path in files
        for name, value in pattern.findall(path.read_text())
        if IDLE_S - 2.0 < float(value) <= LONGEST_S
    }
    assert found == is_named
