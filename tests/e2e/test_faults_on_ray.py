"""Workers that die under load: what clients see, and what is back afterwards."""

import threading

import httpx
import openai
import psutil
import pytest

from cluster import errors
from cluster.config import Role
from deploy.client import Client
from tests.e2e.plain_cluster import make_config
from tests.e2e.ray_cluster import ray_cluster
from tests.e2e.test_on_ray import PROMPT_IDS, is_quiet, view_of, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(240)]
NUM_STREAMS = 4


@pytest.fixture(scope="module")
def one_pair(tiny_llama, tmp_path_factory):
    """One prefill and one decode worker on Ray: whichever dies, there is no other."""
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    with ray_cluster(make_config(tiny_llama, pools), tmp_path_factory.mktemp("pair")) as cluster:
        yield cluster


class Stream(threading.Thread):
    """One long request; keeps how it ended and when."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.address = address
        self.decoding = threading.Event()
        """Set at the second token: the first one still comes from the prefill worker."""
        self.error: errors.PdserveError | None = None
        self.is_whole = False

    def run(self) -> None:
        try:
            with Client(self.address) as client:
                pieces = client.generate(
                    prompt_ids={"ids": PROMPT_IDS}, max_tokens=900, ignore_eos=True
                )
                num_tokens = 0
                for piece in pieces:
                    num_tokens += len(piece.token_ids)
                    if num_tokens > 1:
                        self.decoding.set()
            self.is_whole = True
        except errors.PdserveError as error:
            self.error = error
        finally:
            self.decoding.set()


def worker_of(cluster, pool: str):
    return next(w.worker for w in view_of(cluster).workers if w.worker.pool == pool)


def has_heir(cluster, victim) -> bool:
    workers = [view.worker for view in view_of(cluster).workers]
    return any(w.pool == victim.pool and w.pid != victim.pid for w in workers)


def answers(cluster) -> bool:
    try:
        with openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="-", max_retries=0) as client:
            client.completions.create(model="tiny", prompt=PROMPT_IDS, max_tokens=4, timeout=10)
    except (openai.APIStatusError, openai.APITimeoutError):
        return False
    return True


def is_missing(cluster, role: str) -> bool:
    ready = httpx.get(f"{cluster.http}/health/ready")
    return ready.status_code == 503 and role in ready.text


@pytest.mark.parametrize("pool", ["decode", "prefill"])
def test_a_killed_worker_costs_only_its_requests_and_comes_back(pool, one_pair):
    """CASES P-19, P-20: nobody hangs, streams go on with the heir, no block is leaked."""
    assert answers(one_pair)
    victim = worker_of(one_pair, pool)
    streams = [Stream(one_pair.grpc) for _ in range(NUM_STREAMS)]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.decoding.wait(30)
    psutil.Process(victim.pid).kill()
    for stream in streams:
        stream.join(60)
        assert not stream.is_alive(), "a stream hangs"
    wait_until(lambda: not psutil.pid_exists(victim.pid), 5, "the fault did not happen")
    for stream in streams:
        # Running streams need no prefill worker. A lost decode worker's wait for its heir.
        is_late = pool == "decode" and isinstance(stream.error, errors.NoWorker)
        assert stream.is_whole or is_late, stream.error
    wait_until(lambda: has_heir(one_pair, victim), 60, "the worker did not come back")
    assert answers(one_pair)
    heir = worker_of(one_pair, pool)
    assert (heir.worker_id, heir.pid != victim.pid) == (victim.worker_id, True)
    assert heir.incarnation != victim.incarnation
    wait_until(lambda: is_quiet(one_pair), 10, "blocks are leaked")


def test_no_worker_is_said_at_once(one_pair):
    """With the only decode worker gone: 503 and Retry-After, not a hang."""
    wait_until(lambda: answers(one_pair), 60, "the cluster is not whole to begin with")
    victim = worker_of(one_pair, "decode")
    psutil.Process(victim.pid).kill()
    # What was on its way to it waits for its heir; what comes once it is missed does not.
    wait_until(lambda: is_missing(one_pair, "decode"), 20, "readiness does not name the role")
    body = {"model": "tiny", "prompt": PROMPT_IDS, "max_tokens": 4}
    answer = httpx.post(f"{one_pair.http}/v1/completions", json=body, timeout=15)
    assert answer.elapsed.total_seconds() < 2
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "no_worker"
    wait_until(lambda: answers(one_pair), 60, "the worker did not come back")
