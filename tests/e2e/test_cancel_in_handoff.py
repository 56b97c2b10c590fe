"""A client that leaves while its KV is on the way, by each door: both workers give all back."""

import dataclasses

import pytest

from tests.e2e.fault_cells import STATES
from tests.e2e.fault_scene import Scene
from tests.e2e.leaving import CHUNK_TOKENS, DOORS, GAUGES_S, GrpcCall, narrow_pair, report_of
from tests.e2e.plain_cluster import wait_until
from tests.e2e.pool_books import wait_proven
from tests.e2e.process_cluster import fault, process_cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]
STEP_S = 0.15
NUM_PROMPT = {"sent": 4}
"""Of one chunk where the first message with bytes shall be the last."""
PHASES = {
    "offered": "prefill",
    "prefilled": "decode",
    "reserved": "prefill",
    "sending": "prefill",
    "sent": "decode",
    "committed": "decode",
}
"""The ``phase`` of the aborted counter, by state: with its first token out, a request is in decode.
``prefilled``: all is computed, and the decode worker has not heard of it. There is one decode
worker: an export that waits has nowhere to go."""
HELD_AS = {"prefilled": "offered"}
UNFINISHED = (fault("hold", "engine.step", nth=7),)
"""The step that ends a prompt of 40 tokens, and draws the first token."""


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cancel")
    with process_cluster(narrow_pair(tiny_llama), tiny_llama, folder) as cluster:
        yield cluster
        # What any of the stories has done to a pool's books stays wrong until it is looked for.
        cluster.wait_quiet()
        wait_proven(cluster, lambda: GrpcCall(cluster, 48, 4).wait_end())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("state", PHASES)
def test_leaving_in_mid_handoff_gives_everything_back(state, door, cluster):
    """CASES P-11: between "prefilled" and "admitted", and in mid-transfer, nobody keeps blocks.

    What a link is reading is held until it has read, and seen to be free as soon as it is.
    """
    cluster.wait_quiet()
    before, num_drawn = cluster.metrics(), _count(cluster, "prefill-0", "generated_tokens")
    in_prefill = PHASES[state] == "prefill"
    # STEP 1: the handoff stands still, in mid-prompt or with the first token out.
    hold = dataclasses.replace(STATES[HELD_AS.get(state, state)], nth=1)
    holder = Scene(cluster).hold(hold, *(UNFINISHED if in_prefill else ()))
    call = DOORS[door].call(cluster, NUM_PROMPT.get(state, 40), 200)
    cluster.faults(holder).wait_fired()
    if not in_prefill:
        is_out = lambda: _count(cluster, "prefill-0", "generated_tokens") > num_drawn  # noqa: E731
        wait_until(is_out, 10, "no first token")
        cluster.metrics()  # by now its router has it too
    if state == "prefilled":
        is_through = lambda: report_of(cluster, "prefill-0").num_running == 0  # noqa: E731
        wait_until(is_through, 5, "it is still computed")
        assert report_of(cluster, "prefill-0").num_transferring == 1
        assert report_of(cluster, "decode-0").blocks.importing == 0
    # STEP 2: the client leaves, and the handoff goes on.
    DOORS[door].leave(call)
    assert cluster.faults(holder).clear()[0] == 1
    cluster.clear_faults()
    cluster.wait_quiet(GAUGES_S)
    after = cluster.metrics()

    def increase(name: str, **labels: str) -> float:
        name = f"pdserve_requests_{name}_total"
        return after.total(name, **labels) - before.total(name, **labels)

    assert increase("received") == increase("aborted") == 1
    assert increase("aborted", phase=PHASES[state]) == 1
    # STEP 3: the next one finds the workers as they were.
    following = GrpcCall(cluster, 48, 4)
    following.wait_end()


SLOWED = {
    "decode": ("decode-0", "generated_tokens", 1, 40),
    "prefill": ("prefill-0", "prefilled_tokens", CHUNK_TOKENS, 800),
}
"""By half: its worker, what it counts, tokens of a step, and how long a prompt it is asked for."""


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("half", SLOWED)
def test_after_leaving_at_most_the_step_that_runs_and_one_more_are_computed(half, door, cluster):
    """CASES P-11: steps are slow here, so that tokens count them; gauges fall within 1 s."""
    worker_id, counter, num_of_step, num_prompt = SLOWED[half]
    cluster.wait_quiet()
    slowed = cluster.faults(worker_id)
    slowed.set(fault("delay", "engine.step", times=0, seconds=STEP_S))
    before = _count(cluster, worker_id, counter)
    call = DOORS[door].call(cluster, num_prompt, 200)
    is_amidst = lambda: _count(cluster, worker_id, counter) >= before + 3 * num_of_step  # noqa: E731
    wait_until(is_amidst, 10, "it does not come so far")
    at_leaving = _count(cluster, worker_id, counter)
    DOORS[door].leave(call)
    cluster.wait_quiet(GAUGES_S)
    assert slowed.clear()[0] >= 3, "the steps were not slow"
    num_more = _count(cluster, worker_id, counter) - at_leaving
    assert num_more <= 3 * num_of_step, "a report may be a step late"


def _count(cluster, worker_id: str, counter: str) -> float:
    return report_of(cluster, worker_id).counters[counter]
