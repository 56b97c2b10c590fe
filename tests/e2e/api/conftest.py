"""One cluster of each shape for all cases of the API, with a context that is soon full."""

import dataclasses
from collections import Counter

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from cluster.config import Role
from tests.e2e.api.ask import Caller
from tests.e2e.plain_cluster import make_config, running, with_pool

CONTEXT = 256
SHAPES = {
    "colocated": {"mixed": (Role.MIXED, 1)},
    "disaggregated": {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 2)},
}
CANARY = {"prompt": [11, 48, 85, 22, 59, 96, 33, 70], "max_tokens": 12, "temperature": 0}


def _caller(shape, model, folder):
    config = make_config(model, SHAPES[shape])
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_model_len=CONTEXT),
        # A connection may get half as old: no test here is as long.
        limits=dataclasses.replace(config.limits, drain_s=60.0),
    )
    # So few slots that eight calls at once take both decode workers.
    if shape == "disaggregated":
        config = with_pool(config, "decode", max_num_seqs=4)
    with running(config, model, folder) as cluster:
        caller = Caller(cluster)
        yield caller
        caller.close()


@pytest.fixture(scope="package")
def colocated(tiny_llama, tmp_path_factory):
    yield from _caller("colocated", tiny_llama, tmp_path_factory.mktemp("colocated"))


@pytest.fixture(scope="package")
def disaggregated(tiny_llama, tmp_path_factory):
    yield from _caller("disaggregated", tiny_llama, tmp_path_factory.mktemp("disaggregated"))


@pytest.fixture(params=SHAPES)
def caller(request):
    """Each shape in turn; after each test Q and C hold (CASES §0)."""
    caller = request.getfixturevalue(request.param)
    before = caller.ask("gRPC stream", CANARY).texts
    pids = {name: process.pid for name, process in caller.cluster.workers.items()}
    yield caller
    caller.cluster.wait_quiet()
    assert caller.ask("gRPC stream", CANARY).texts == before
    assert {n: p.pid for n, p in caller.cluster.workers.items()} == pids
    assert all(psutil.pid_exists(pid) for pid in pids.values())


@pytest.fixture(scope="session")
def tokenizer(tiny_llama):
    return PreTrainedTokenizerFast.from_pretrained(tiny_llama)


@pytest.fixture
def counted(caller):
    """What the router and the workers count, by calling it: one total for each name."""

    def count() -> Counter:
        caller.cluster.wait_quiet()
        totals: Counter = Counter()
        for (name, _), value in caller.cluster.metrics().items():
            totals[name] += value
        for worker in caller.cluster.view().workers:
            for name, value in worker.report.counters.items():
                totals[f"worker {name}"] += value
        return totals

    return count
