"""Prefill and decode workers that do not match: converted exactly, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from unittest import mock

import httpx
import pytest

from cluster.config import Dtype, Role
from cluster.model.loader import LoadedModel
from tests.e2e.children import run_worker
from tests.e2e.plain_cluster import make_config, wait_until, with_pool
from tests.e2e.process_cluster import ProcessCluster, fault
from tests.e2e.reference import ROUNDED_TIE
from tests.e2e.streams import Prompts
from tests.factories_model import write_tiny_llama

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]
POOLS = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
NUM_CONVERTED, STEP_S = 6, 0.05


class Mismatched(ProcessCluster):
    """Its workers are started one by one, each with a deploy file or a model of its own."""

    def start(self) -> None:
        for name in ("control", "router-0"):
            self.start_one(name)
            self.wait_ready(name)

    def join(self, worker_id: str, *, model=None, config=None, target=run_worker) -> None:
        """Start a worker that believes something else."""
        self.target = target
        self.model, was_model = model or self.model, self.model
        self.config, was_config = config or self.config, self.config
        (self.folder / "deploy.yaml").unlink(missing_ok=True)
        self.start_one(worker_id)
        self.model, self.config = was_model, was_config


@pytest.fixture
def start(tiny_llama, tmp_path):
    started = []

    def start(config) -> Mismatched:
        cluster = Mismatched(config, tiny_llama, tmp_path)
        started.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in started:
        cluster.stop()


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 32), (32, 16), (16, 8)])
def test_block_sizes_that_differ_are_converted(prefill_size, decode_size, start, tiny_llama):
    """CASES P-22: 16 against 32 and the like give the tokens of a pair that agrees."""
    config = make_config(tiny_llama, POOLS)
    config = with_pool(config, "prefill", block_size=prefill_size, chunk_tokens=24)
    cluster = start(with_pool(config, "decode", block_size=decode_size))
    for worker_id in cluster.pools:
        cluster.join(worker_id)
        cluster.wait_ready(worker_id)
    cluster.wait_whole()
    for length in (1, 15, 16, 17, 31, 32, 33, 64, 100):
        prompts = Prompts(tiny_llama, 2, num_prompt=length, num_tokens=12)
        for number in range(2):
            stream = prompts.stream(cluster.grpc, number)
            stream.wait_end()
            prompts.check(number, stream)
    cluster.wait_quiet()


DTYPES = (Dtype.FP32, Dtype.BF16, Dtype.FP16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.value)
def test_dtypes_that_differ_are_converted(dtype, start, tiny_llama):
    """CASES P-22: from each to both others. KV of 16 bits gives the tokens of fp32, but for what
    rounding moves.

    The first token is the prefill worker's own; all others read KV that was converted.
    """
    others = {f"{other.value}-0": other for other in DTYPES if other is not dtype}
    pools = {"prefill": POOLS["prefill"]}
    pools |= {other.value: POOLS["decode"] for other in others.values()}
    config = with_pool(make_config(tiny_llama, pools), "prefill", kv_dtype=dtype)
    for other in others.values():
        # As many places as there are requests, which all run at once: so each has its share.
        num_places = NUM_CONVERTED // len(others)
        config = with_pool(config, other.value, kv_dtype=other, max_num_seqs=num_places)
    cluster = start(config)
    for worker_id in cluster.pools:
        cluster.join(worker_id)
    for worker_id in cluster.pools:
        cluster.wait_ready(worker_id)
    cluster.wait_whole()
    prompts = Prompts(tiny_llama, NUM_CONVERTED, num_prompt=50, num_tokens=12)
    clear = [gaps[1] for gaps in prompts.reference.gaps if gaps[1] > ROUNDED_TIE]
    assert len(clear) >= NUM_CONVERTED - 1, "ties prove nothing"
    for worker_id in others:
        cluster.faults(worker_id).set(fault("delay", "engine.step", times=0, seconds=STEP_S))
    streams = [prompts.stream(cluster.grpc, number) for number in range(NUM_CONVERTED)]
    for number, stream in enumerate(streams):
        stream.wait_end()
        prompts.check(number, stream, near_tie=ROUNDED_TIE)
    cluster.wait_quiet()
    reserved = {worker_id: num_reserved(cluster, worker_id) for worker_id in others}
    assert all(reserved.values()), f"one of the pairs had nothing to do: {reserved}"
    assert sum(reserved.values()) == NUM_CONVERTED
    wait_until(lambda: num_imports(cluster) == reserved, 5, "some KV was not converted")


def num_imports(cluster: Mismatched) -> dict[str, float]:
    """By decode worker."""
    return {
        w.worker.worker_id: w.report.counters["imports_ok"]
        for w in cluster.view().workers
        if w.worker.role is Role.DECODE
    }


def other_layers(tmp_path_factory) -> dict:
    return {"model": write_tiny_llama(tmp_path_factory.mktemp("layers"), num_layers=3)}


def other_weights(tmp_path_factory) -> dict:
    return {"model": write_tiny_llama(tmp_path_factory.mktemp("weights"), seed=7)}


def other_tokenizer(tmp_path_factory) -> dict:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tokenizer"))
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    first, second = list(tree["model"]["vocab"])[300:302]
    vocab = tree["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(tree))
    return {"model": folder}


MISMATCHES = {
    "layers": (other_layers, "layout.num_layers: 2 at the other workers, 3 at this one"),
    "model revision": (other_weights, "layout.model_fingerprint: "),
    "tokenizer": (other_tokenizer, "tokenizer: "),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_what_cannot_be_converted_is_refused_when_it_registers(
    what, start, tiny_llama, tmp_path_factory
):
    """CASES P-22: named in the worker's log, in the view and to the client; never routed."""
    cluster = start(make_config(tiny_llama, POOLS))
    cluster.join("prefill-0")
    cluster.wait_ready("prefill-0")
    make, reason = MISMATCHES[what]
    cluster.join("decode-0", **make(tmp_path_factory))
    wait_until(lambda: cluster.view().refused, 30, "it was not refused")
    check_refused(cluster, reason)


def test_another_number_of_shards_is_refused(start, tiny_llama):
    """CASES P-22: a worker that holds half of each block's heads, in as many bytes."""
    cluster = start(make_config(tiny_llama, POOLS))
    cluster.join("prefill-0")
    cluster.wait_ready("prefill-0")
    cluster.join("decode-0", target=run_half)
    wait_until(lambda: cluster.view().refused, 30, "it was not refused")
    check_refused(cluster, "layout.num_shards: 1 in the deploy file, 2 at the worker")


def run_half(arguments: list[str]) -> int:
    """Run a worker that says it is the first of two shards."""
    whole = LoadedModel.layout

    def half(self, *block):
        return dataclasses.replace(whole(self, *block), num_shards=2)

    with mock.patch.object(LoadedModel, "layout", half):
        return run_worker(arguments)


def test_a_worker_that_contradicts_the_deploy_file_is_refused(start, tiny_llama):
    """CASES P-22: another maximum length or block size than the deploy file has."""
    config = make_config(tiny_llama, POOLS)
    cluster = start(config)
    cluster.join("prefill-0")
    cluster.wait_ready("prefill-0")
    cluster.join("decode-0", config=with_pool(config, "decode", block_size=32, kv_tokens=16384))
    wait_until(lambda: cluster.view().refused, 30, "it was not refused")
    check_refused(cluster, "block_size: 16 in the deploy file, 32 at the worker")


def test_another_maximum_length_is_refused(start, tiny_llama):
    """CASES P-22: a worker that would take longer requests than the cluster promises."""
    config = make_config(tiny_llama, POOLS)
    short = dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=256))
    cluster = start(short)
    cluster.join("prefill-0")
    cluster.wait_ready("prefill-0")
    cluster.join("decode-0", config=config)
    wait_until(lambda: cluster.view().refused, 30, "it was not refused")
    check_refused(cluster, "max_model_len")


def check_refused(cluster: Mismatched, reason: str) -> None:
    """The same reason everywhere, and a client that hears it at once; no KV for it is computed."""
    (refused,) = cluster.view().refused
    assert refused.worker_id == "decode-0"
    assert reason in refused.reason
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 4}
    for patience_s in (5, 1):  # a control plane that has just started rejects nobody for 3 s
        answer = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=10)
        assert answer.status_code == 503
        assert answer.elapsed.total_seconds() < patience_s
    assert reason in answer.json()["error"]["message"]
    process = cluster.processes.pop("decode-0")
    process.join(20)
    assert process.exitcode == 2, "it could not start, and says so"
    assert reason in cluster.log("decode-0")
    assert num_reserved(cluster) == 0
    assert cluster.processes["prefill-0"].is_alive()
    (view,) = cluster.view().workers
    assert view.worker.worker_id == "prefill-0"
    assert view.report.counters["legs_received"] == 0


def num_reserved(cluster: Mismatched, worker_id: str = "decode-0") -> int:
    """Imports that a decode worker has ever begun: its log tells each."""
    return len(re.findall(r"handoff=\S+ leg=\S+ reserved", cluster.log(worker_id)))
