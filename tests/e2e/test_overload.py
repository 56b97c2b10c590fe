"""P-25: a thousand calls at once, on a cluster of tiny workers whose queue holds 64."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import time
from collections import Counter
from pathlib import Path

import pytest

from cluster.config import FaultsConfig, LimitsConfig, LocalPrefill, Role, SchedulingConfig
from tests.e2e.plain_cluster import make_config, running, wait_until
from tests.e2e.slow_steps import slow_steps

pytestmark = pytest.mark.slow

logger = logging.getLogger(__name__)

PAIR = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
NUM_CALLS, QUEUE_LIMIT, NUM_SLOTS = 1000, 64, 8
CLIENT_TIMEOUT_S, NUM_RETRIES = 5.0, 2
BURST_STEP_S = 0.04
"""What the decode worker's steps take longer in the burst, so that what the queue holds, nine turns
of the slots, takes longer than the clients wait."""
MAX_REFUSAL_S = 2.0
"""Of this process, which is the router, the control plane and all clients, until the last of them
has its refusal: what the clock shows on a machine with nothing else to do."""
MAX_RECOVERY_S = 10.0
"""From the burst's end until nothing is left of it and 20 calls were served, one by one."""
NUM_TOKENS = 24
PROMPT = [11 + 37 * i % 200 for i in range(24)]


@dataclasses.dataclass
class Answer:
    status: int
    seconds: float
    at_cpu_s: float
    retry_after: str = ""
    body: bytes = b""


async def call(address, *, patience_s=CLIENT_TIMEOUT_S, **changes):
    """One call on a connection of its own; None where the client gave up and hung up."""
    body = json.dumps(
        {
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            **changes,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    began = time.monotonic()
    writer = None
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(head.encode() + body)
            whole = await reader.read()
    except TimeoutError:
        return None
    finally:
        if writer is not None:
            writer.close()
    top, _, content = whole.partition(b"\r\n\r\n")
    headers = top.decode().lower()
    retry_after = headers.partition("retry-after: ")[2].partition("\r\n")[0]
    now, cpu_s = time.monotonic(), time.process_time()
    return Answer(int(top.split()[1]), now - began, cpu_s, retry_after, content)


async def client(address):
    """Gives up after a while and tries again, twice; returns what it got each time."""
    answers = []
    while len(answers) < 1 + NUM_RETRIES:
        answers.append(await call(address))
        if answers[-1] is not None:
            break
    return answers


def address_of(cluster):
    endpoints = cluster.config.endpoints
    return endpoints.host, endpoints.http_port


def is_refusal(answer):
    return answer is not None and answer.status in (429, 503)


def text_of(answer):
    assert answer.status == 200, answer
    return json.loads(answer.body)["choices"][0]["text"]


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    config = dataclasses.replace(
        make_config(tiny_llama, PAIR, max_num_seqs=NUM_SLOTS, prefix_cache=False),
        scheduling=SchedulingConfig(
            max_queue_requests=QUEUE_LIMIT, local_prefill=LocalPrefill.NEVER
        ),
        limits=LimitsConfig(kv_digest=True),
        faults=FaultsConfig(enabled=True),
    )
    with running(config, tiny_llama, tmp_path_factory.mktemp("overload")) as built:
        yield built


def test_of_a_thousand_calls_the_queue_takes_what_it_holds_and_refuses_the_rest_at_once(cluster):
    """P-25: each excess call hears 429 or 503 and when to come back; the others are served."""
    address = address_of(cluster)
    expected = text_of(asyncio.run(call(address, patience_s=60)))
    pids = {w.worker.worker_id: w.worker.pid for w in cluster.view().workers}
    base = rss_bytes()

    async def burst():
        return await asyncio.gather(*(client(address) for _ in range(NUM_CALLS)))

    with slow_steps(cluster, "decode", BURST_STEP_S):
        cpu_began = time.process_time()
        clients = asyncio.run(burst())
        burst_ended = time.monotonic()
    answers = list(itertools.chain(*clients))
    statuses = Counter(answer.status if answer else None for answer in answers)
    refused = [answer for answer in answers if is_refusal(answer)]
    served = [answer for answer in answers if answer and answer.status == 200]
    at_once = [first for first, *_ in clients if is_refusal(first)]
    slowest_s = max(answer.seconds for answer in at_once)
    cpu_s = max(answer.at_cpu_s for answer in at_once) - cpu_began
    again = Counter(each[-1].status if each[-1] else None for each in clients if len(each) > 1)
    logger.info("%s; slowest refusal: %.2f s, %.2f s of CPU", statuses, slowest_s, cpu_s)
    logger.info("of those that tried again: %s", again)
    assert set(statuses) <= {200, 429, 503, None}, statuses
    assert again[200] > 0, again
    assert len(refused) > NUM_CALLS / 2, statuses
    assert len(served) >= NUM_SLOTS
    assert all(int(answer.retry_after) >= 1 for answer in refused)
    assert cpu_s <= MAX_REFUSAL_S, f"{slowest_s:.2f} s on the clock"
    assert {text_of(answer) for answer in served} == {expected}

    cluster.wait_quiet()

    async def normal():
        return [await call(address, patience_s=MAX_RECOVERY_S) for _ in range(20)]

    assert {text_of(answer) for answer in asyncio.run(normal())} == {expected}
    recovery_s = time.monotonic() - burst_ended
    logger.info("quiet, and 20 calls served, %.2f s after the burst", recovery_s)
    assert recovery_s <= MAX_RECOVERY_S
    assert {w.worker.worker_id: w.worker.pid for w in cluster.view().workers} == pids
    assert all(process.poll() is None for process in cluster.workers.values())
    assert rss_bytes() - base < 100 << 20, "the router runs in this process"


def num_prefilled(cluster):
    counters = [worker.report.counters for worker in cluster.view().workers]
    return sum(each["prefilled_tokens"] for each in counters)


def test_what_expires_in_the_queue_is_never_prefilled(cluster):
    """P-25: the slots are taken for longer than the deadlines of those that wait."""
    address = address_of(cluster)
    cluster.wait_quiet()
    before = num_prefilled(cluster)

    async def scene():
        long = [
            asyncio.create_task(call(address, patience_s=60, max_tokens=900))
            for _ in range(NUM_SLOTS)
        ]
        taken = before + NUM_SLOTS * len(PROMPT)
        await asyncio.to_thread(
            wait_until, lambda: num_prefilled(cluster) == taken, 20, "not all slots are taken"
        )
        late = await asyncio.gather(
            *(call(address, patience_s=60, timeout_s=0.2) for _ in range(NUM_SLOTS))
        )
        assert not any(task.done() for task in long), "V: a slot was free meanwhile"
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        return late, taken

    late, taken = asyncio.run(scene())
    statuses = {answer.status for answer in late}
    assert 504 in statuses, "V: nothing has waited until it expired"
    assert statuses <= {503, 504}, late
    cluster.wait_quiet()
    assert num_prefilled(cluster) == taken
