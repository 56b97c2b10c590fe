"""Words of two handoffs on one link in the wrong order: each is of its own handoff.

Behind each of them nothing of its own handoff comes that way: the fault matrix, whose victims are
alone, has nothing that could overtake it.
"""

from __future__ import annotations

import pytest

from cluster.config import Role
from tests.e2e.leaving import report_of
from tests.e2e.plain_cluster import make_config, wait_until, with_pool
from tests.e2e.pool_books import wait_proven
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]
CHUNK, NUM_PROMPT, NUM_TOKENS = 32, 320, 8
STEP_S = 0.1
SOON_S = 5.0
"""Before any lease is over."""


@pytest.fixture(scope="module")
def prompts(tiny_llama):
    return Prompts(tiny_llama, 7, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def cluster(tiny_llama, prompts, tmp_path_factory):
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    config = with_pool(make_config(tiny_llama, pools), "prefill", chunk_tokens=CHUNK)
    with process_cluster(config, tiny_llama, tmp_path_factory.mktemp("overtaken")) as cluster:
        yield cluster
        wait_proven(cluster, lambda: prompts.stream(cluster.grpc, 6).wait_end())


class Told:
    """What comes before a word that was said earlier, each time, as the log of a worker has it."""

    def __init__(self, cluster, worker_id: str) -> None:
        self._cluster, self._worker_id = cluster, worker_id
        self._num_before = len(self._all())

    def _all(self) -> list[str]:
        lines = self._cluster.log(self._worker_id).splitlines()
        return [line.rpartition("=")[2] for line in lines if "fault=reorder overtaken by=" in line]

    def overtaken_by(self) -> list[str]:
        return self._all()[self._num_before :]


def serve(cluster, prompts: Prompts, number: int) -> None:
    stream = prompts.stream(cluster.grpc, number)
    stream.wait_end()
    prompts.check(number, stream)


def is_reserved(cluster) -> bool:
    return report_of(cluster, "decode-0").blocks.importing > 0


def num_sent(cluster) -> tuple[float, float]:
    counters = report_of(cluster, "prefill-0").counters
    return counters["transfers_ok"], counters["transfers_failed"]


def test_a_credit_that_the_next_handoff_overtakes(cluster, prompts):
    """CASES P-21, S-13: each is sent to the blocks of its own, whichever is credited first."""
    (num_ok, _), told = num_sent(cluster), Told(cluster, "prefill-0")
    prefill = cluster.faults("prefill-0")
    prefill.set(fault("reorder", "signal.credit"))
    first = prompts.stream(cluster.grpc, 0)
    prefill.wait_fired()
    wait_until(lambda: is_reserved(cluster), SOON_S, "nothing is reserved")
    serve(cluster, prompts, 1)
    first.wait_end()
    prompts.check(0, first)
    cluster.wait_quiet(SOON_S)
    assert told.overtaken_by() == ["signal.credit"]
    assert num_sent(cluster) == (num_ok + 2, 0)
    prefill.clear()


def test_a_commit_that_the_next_handoff_overtakes(cluster, prompts):
    """CASES P-21, S-13: its export is kept until it is heard, and the other one by its own."""
    (num_ok, _), told = num_sent(cluster), Told(cluster, "prefill-0")
    prefill = cluster.faults("prefill-0")
    prefill.set(fault("reorder", "signal.commit"))
    serve(cluster, prompts, 2)
    assert prefill.fired() == [1]
    is_kept = lambda: report_of(cluster, "prefill-0").num_transferring == 1  # noqa: E731
    wait_until(is_kept, SOON_S, "it is given back though nobody has said so")
    serve(cluster, prompts, 3)
    cluster.wait_quiet(SOON_S)
    assert told.overtaken_by() == ["signal.credit"]
    assert num_sent(cluster) == (num_ok + 2, 0)
    prefill.clear()


def test_an_abort_that_the_next_handoff_overtakes(cluster, prompts):
    """CASES P-21, S-13: its blocks are kept until it is heard, and the other one gets others."""
    told = Told(cluster, "decode-0")
    prefill, decode = cluster.faults("prefill-0"), cluster.faults("decode-0")
    prefill.set(fault("delay", "engine.step", times=0, seconds=STEP_S))
    # Neither the router nor the control plane tells the decode worker that the client has left.
    decode.set(
        fault("reorder", "signal.abort"),
        fault("drop", "leg.abort"),
        fault("drop", "control.in", peer="abort", times=0),
    )
    left = prompts.stream(cluster.grpc, 4)
    wait_until(lambda: is_reserved(cluster), SOON_S, "nothing is reserved")
    left.leave()
    decode.wait_fired(0)
    decode.wait_fired(1)
    assert is_reserved(cluster)
    serve(cluster, prompts, 5)
    cluster.wait_quiet(SOON_S)
    assert told.overtaken_by() == ["signal.offer"]
    left.wait_end()
    assert left.error == "cancelled"
    decode.clear()
    prefill.clear()
