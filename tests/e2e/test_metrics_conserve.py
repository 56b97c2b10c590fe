"""P-29: what the router and the workers count adds up, never falls, and does not grow for ever."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cluster import errors
from cluster.config import Role
from deploy.client import Client
from tests.e2e.leaving import DOORS, PHASES, narrow_pair, prompt_ids
from tests.e2e.plain_cluster import plain_cluster, running, wait_until

BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens, K and V, layers, kv heads, head dim, fp32
LABELS = {
    "code": set(errors.BY_CODE),
    "phase": {"edge", "queue", "prefill", "decode"},
    "reason": {"stop", "length"},
    "worker": {"prefill-0", "decode-0"},
    "prefill": {"prefill-0"},
    "decode": {"decode-0"},
    "pool": {"prefill", "decode"},
    "role": {"prefill", "decode"},
    "state": {"free", "cached", "held", "importing", "fenced", "total"},
}
"""Labels with all their values; there are ``le`` of histograms and ``router`` besides."""
GAUGES = (
    "pdserve_requests_in_flight",
    "pdserve_requests_queued",
    "pdserve_queue_waiting",
    "pdserve_worker_running",
    "pdserve_worker_waiting",
    "pdserve_worker_transferring",
    "pdserve_worker_queued_tokens",
)


class Scraper(threading.Thread):
    """Reads /metrics all the time and keeps what fell, or was below zero."""

    def __init__(self, cluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._is_over = threading.Event()
        self.num_scrapes = 0
        self.fallen: list[tuple] = []

    def run(self) -> None:
        before: dict = {}
        while not self._is_over.wait(0.02):
            now = self._cluster.metrics()
            for key, value in now.items():
                is_counter = key[0].endswith(("_total", "_count", "_sum", "_bucket"))
                if value < (before.get(key, 0) if is_counter else 0):
                    self.fallen.append((key, before.get(key), value))
            self.fallen += [(key, "gone", None) for key in before.keys() - now.keys()]
            before = now
            self.num_scrapes += 1

    def __enter__(self) -> "Scraper":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        self.join(10)


class Usage:
    """What the clients were told."""

    def __init__(self) -> None:
        self.num_requests = self.prompt_tokens = self.completion_tokens = self.num_blocks = 0

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.num_requests += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if completion_tokens > 1:  # else it ended where it was prefilled
            self.num_blocks += -(-prompt_tokens // 16)


def ten_good(cluster, usage: Usage) -> None:
    """By all doors, of several lengths, one of them a single token."""
    with Client(cluster.grpc) as client:
        for num_prompt, max_tokens in ((1, 8), (16, 8), (17, 8), (200, 8), (40, 1)):
            *_, last = client.generate(
                prompt_ids={"ids": prompt_ids(num_prompt)}, max_tokens=max_tokens, ignore_eos=True
            )
            usage.add(last.usage.prompt_tokens, last.usage.completion_tokens)
    for num_prompt in (15, 32, 33, 100, 300):
        body = {"model": "tiny", "prompt": prompt_ids(num_prompt), "max_tokens": 12}
        answer = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=30).json()
        usage.add(answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])


def three_invalid(cluster) -> None:
    good = {"model": "tiny", "prompt": [5], "max_tokens": 4}
    for bad, status in (({"max_tokens": -1}, 400), ({"model": "other"}, 404)):
        answer = httpx.post(f"{cluster.http}/v1/completions", json=good | bad)
        assert answer.status_code == status
    with Client(cluster.grpc) as client, pytest.raises(errors.InvalidRequest):
        list(client.generate(prompt_ids={"ids": [-1]}))


def five_leave(cluster) -> None:
    """One in each phase before the end, and one more in decode."""
    for phase, door in (
        ("queue", "stream-fin"),
        ("prefill", "whole-rst"),
        ("blocks", "grpc-call"),
        ("decode", "stream-rst"),
        ("decode", "grpc-id"),
    ):
        with PHASES[phase](cluster, DOORS[door]) as call:
            DOORS[door].leave(call)
        cluster.wait_quiet()


def one_too_slow(cluster) -> int:
    """A request whose deadline passes in decode; returns how many tokens it got."""
    tokens: list[int] = []
    with Client(cluster.grpc) as client:
        pieces = client.generate(
            prompt_ids={"ids": prompt_ids(16)}, max_tokens=900, ignore_eos=True, timeout_s=0.3
        )
        with pytest.raises(errors.DeadlineExceeded):
            tokens.extend(token for piece in pieces for token in piece.token_ids)
    return len(tokens)


def ended(metrics) -> float:
    outcomes = ("success", "aborted", "failed", "rejected")
    return sum(metrics.total(f"pdserve_requests_{outcome}_total") for outcome in outcomes)


def wait_shown(cluster) -> None:
    """Wait for the last reports to be in the router's view, which is pushed each second."""
    view = cluster.view()
    legs = sum(w.report.counters["legs_received"] for w in view.workers)

    def is_shown() -> bool:
        metrics = cluster.metrics()
        gauges = sum(metrics.total(name) for name in GAUGES)
        return metrics.total("pdserve_worker_legs_received_total") == legs and gauges == 0

    wait_until(is_shown, 5, "the router shows an old picture")


def check_sums(metrics, usage: Usage) -> None:
    """What must hold while nothing runs, whatever has been."""
    assert metrics.total("pdserve_requests_received_total") == ended(metrics)
    assert metrics.total("pdserve_requests_success_total") == usage.num_requests
    assert metrics.total("pdserve_prompt_tokens_total") == usage.prompt_tokens
    assert metrics.total("pdserve_generated_tokens_total") == usage.completion_tokens
    for name in ("first_token", "request", "queue"):
        assert metrics.total(f"pdserve_{name}_seconds_count") == usage.num_requests
    for name in GAUGES:
        assert metrics.total(name) == 0, name
    blocks = "pdserve_worker_blocks"
    assert metrics.total(blocks, state="free") == metrics.total(blocks, state="total") > 0
    worker = "pdserve_worker_"
    kinds = {name for name, _ in metrics if name.startswith(f"{worker}legs_")}
    received = f"{worker}legs_received_total"
    assert metrics.total(received) == sum(metrics.total(name) for name in kinds - {received})
    started, ok, failed = (
        metrics.total(f"{worker}transfers_{name}_total") for name in ("started", "ok", "failed")
    )
    assert started == ok + failed
    assert metrics.total(f"{worker}imports_ok_total") == ok


def check_good(cluster, usage: Usage) -> None:
    """What holds while everything has ended well: each count is exact."""
    cluster.wait_quiet()
    wait_shown(cluster)
    metrics = cluster.metrics()
    check_sums(metrics, usage)
    assert metrics.total("pdserve_wasted_tokens_total") == 0
    assert metrics.total("pdserve_link_bytes_total") == usage.num_blocks * BLOCK_BYTES
    assert metrics.total("pdserve_link_transfers_total") == usage.num_requests - 1
    # A token is counted by the worker that drew or computed it, and by no other.
    drawn = metrics.total("pdserve_worker_generated_tokens_total")
    assert drawn == usage.completion_tokens
    assert metrics.total("pdserve_worker_prefilled_tokens_total") == usage.prompt_tokens


def check_labels(metrics) -> None:
    """Every label is a known one with a known value; there is one router."""
    routers = set()
    for name, labels in metrics:
        for label, value in labels:
            if label == "router":
                routers.add(value)
            else:
                assert label == "le" or value in LABELS[label], (name, label, value)
    assert len(routers) <= 1


@pytest.fixture
def pair(tiny_llama, tmp_path):
    with running(narrow_pair(tiny_llama), tiny_llama, tmp_path) as cluster:
        yield cluster


@pytest.mark.faults  # in one of the phases a process stands still
def test_metrics_conserve(pair):
    """CASES P-29: good, aborted in each phase, invalid and too late; everything adds up."""
    usage = Usage()
    with Scraper(pair) as scraper:
        ten_good(pair, usage)
        check_good(pair, usage)
        three_invalid(pair)
        num_late = one_too_slow(pair)
        five_leave(pair)
        wait_shown(pair)
    metrics = pair.metrics()
    check_sums(metrics, usage)
    assert metrics.total("pdserve_requests_rejected_total") == 3
    assert metrics.total("pdserve_requests_failed_total", code="deadline_exceeded") == 1
    aborted = {
        phase: metrics.total("pdserve_requests_aborted_total", phase=phase)
        for phase in LABELS["phase"]
    }
    # One waited for blocks, two were read; two held slots and one held blocks.
    assert aborted == {"edge": 0, "queue": 1, "prefill": 1, "decode": 6}
    wasted = metrics.total("pdserve_wasted_tokens_total")
    assert wasted >= num_late + 17 * 16
    drawn = metrics.total("pdserve_worker_generated_tokens_total")
    assert drawn >= usage.completion_tokens + wasted
    assert metrics.total("pdserve_link_bytes_total") % BLOCK_BYTES == 0
    assert scraper.num_scrapes > 10
    assert scraper.fallen == []
    check_labels(metrics)
    num_series = len(metrics)
    ten_good(pair, usage)
    three_invalid(pair)
    assert len(pair.metrics()) == num_series


@pytest.mark.faults
def test_metrics_conserve_when_a_worker_dies(pair):
    """CASES P-29: a request that its worker's heir goes on with is counted once, as a success."""
    usage = Usage()
    with Client(pair.grpc) as client:
        pieces = client.generate(
            prompt_ids={"ids": prompt_ids(40)}, max_tokens=900, ignore_eos=True
        )
        next(pieces)
        next(pieces)
        pair.kill("decode-0")
        pair.start_worker("decode", "decode-0")
        num_left = sum(len(piece.token_ids) for piece in pieces)
    assert num_left == 898
    pair.wait_ready("decode-0")
    pair.wait_served()
    ten_good(pair, usage)
    wait_shown(pair)
    metrics = pair.metrics()
    assert metrics.total("pdserve_requests_received_total") == ended(metrics) == 11
    assert metrics.total("pdserve_requests_success_total") == 11
    assert metrics.total("pdserve_requests_resumed_total") == 1
    assert metrics.total("pdserve_generated_tokens_total") == usage.completion_tokens + 900
    assert metrics.total("pdserve_handoffs_waiting") == 0
    for name in GAUGES:
        assert metrics.total(name) == 0, name
    check_labels(metrics)


def footprint(pid: int) -> tuple[int, int]:
    """A process's own memory in bytes, swapped out or not, and its open files."""
    fields = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = value
    memory = sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))
    return memory, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_thousand_requests_leave_nothing_behind(tiny_llama, tmp_path):
    """CASES P-29: memory, open files and series are flat once warm, on both sides."""
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    with plain_cluster(tiny_llama, tmp_path, pools) as cluster, Client(cluster.grpc) as client:
        pids = {name: process.pid for name, process in cluster.workers.items()}
        pids["router, control plane and this client"] = os.getpid()

        def short(number: int) -> None:
            ids = prompt_ids(8 + number % 40)
            list(client.generate(prompt_ids={"ids": ids}, max_tokens=4, ignore_eos=True))

        def load(num_requests: int) -> tuple[dict[str, tuple[int, int]], int]:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(short, range(num_requests)))
            cluster.wait_quiet()
            return {name: footprint(pid) for name, pid in pids.items()}, len(cluster.metrics())

        # What is remembered of requests that ended is bounded, and full after so many.
        warm, num_series_warm = load(3000)
        after, num_series = load(2000)
    assert num_series == num_series_warm
    for name, (memory, num_files) in after.items():
        memory_warm, num_files_warm = warm[name]
        assert memory - memory_warm < 3 << 20, f"{name} grew by {memory - memory_warm} bytes"
        assert num_files <= num_files_warm + 4, name  # connections of scrapes come and go
