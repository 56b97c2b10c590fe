"""A seed belongs to its request, and a preempted request ends as an undisturbed one."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from cluster.config import Preemption, Role, SchedulingConfig
from deploy.client import Client
from tests.e2e.plain_cluster import (
    make_config,
    plain_cluster,
    running,
    wait_until,
    with_pool,
)

PROMPTS = [[7 + 31 * i + j * j % 97 for j in range(10 + i)] for i in range(6)]
SEEDED = {"temperature": 0.9, "seed": 42, "max_tokens": 48}
NUM_LONG_TOKENS = 240
MAX_TURNS = 9
"""For each of six requests to be preempted; mostly it takes three."""
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def colocated(tiny_llama, tmp_path_factory):
    """One worker that does both halves, with blocks for everybody: the reference."""
    pools = {"mixed": (Role.MIXED, 1)}
    with plain_cluster(tiny_llama, tmp_path_factory.mktemp("big"), pools) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def disaggregated(tiny_llama, tmp_path_factory):
    """A pair whose decode pool holds 2.5 sequences of the longest kind."""
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    num_blocks = (NUM_LONG_TOKENS + 16) * 5 // 2 // 16
    config = with_pool(make_config(tiny_llama, pools), "decode", kv_tokens=16 * num_blocks)
    with running(config, tiny_llama, tmp_path_factory.mktemp("small")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def swapping(tiny_llama, tmp_path_factory):
    """The same with two decode workers that swap, and an ample buffer."""
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 2)}
    num_blocks = (NUM_LONG_TOKENS + 16) * 3 // 2 // 16
    config = with_pool(make_config(tiny_llama, pools), "decode", kv_tokens=16 * num_blocks)
    scheduling = SchedulingConfig(preemption=Preemption.SWAP)
    config = with_pool(replace(config, scheduling=scheduling), "decode", swap_tokens=4096)
    with running(config, tiny_llama, tmp_path_factory.mktemp("swapping")) as cluster:
        yield cluster


def generate(cluster, prompt: list[int], **ask) -> tuple[list[int], str, str]:
    """Stream one choice: its ids, its text and why it ended."""
    with Client(cluster.grpc) as client:
        pieces = list(client.generate(prompt_ids={"ids": prompt}, **{"ignore_eos": True, **ask}))
    ids = [token for piece in pieces for token in piece.token_ids]
    return ids, "".join(piece.text for piece in pieces), pieces[-1].finish_reason


def generate_all(cluster, asks: list[tuple[list[int], dict]]) -> list[tuple[list[int], str, str]]:
    """All of them at once."""
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(lambda ask: generate(cluster, ask[0], **ask[1]), asks))


def count(cluster, worker_id: str, counter: str) -> float:
    workers = {w.worker.worker_id: w.report.counters for w in cluster.view().workers}
    return workers[worker_id][counter]


@pytest.mark.parametrize("shape", ["colocated", "disaggregated"])
def test_a_seed_gives_the_same_tokens_in_any_company(shape, request, colocated):
    """CASES P-04: alone, beside seven without a seed, beside itself, in one piece."""
    cluster = request.getfixturevalue(shape)
    expected = generate(colocated, PROMPTS[0], **SEEDED)
    assert len(expected[0]) == 48
    assert generate(cluster, PROMPTS[0], **SEEDED) == expected
    unseeded = {"temperature": 0.9, "max_tokens": 48}
    beside = generate_all(
        cluster, [*((PROMPTS[0], unseeded) for _ in range(7)), (PROMPTS[0], SEEDED)]
    )
    assert beside[-1] == expected
    assert expected not in beside[:-1]
    assert generate_all(cluster, [(PROMPTS[0], SEEDED)] * 2) == [expected] * 2
    body = {"model": "tiny", "prompt": PROMPTS[0], "ignore_eos": True, **SEEDED}
    whole = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=30).json()
    assert whole["choices"][0]["text"] == expected[1]


@pytest.mark.parametrize("shape", ["colocated", "disaggregated"])
def test_without_a_seed_answers_differ(shape, request):
    """CASES P-04: a seed is drawn for each request that brings none; another seed is another."""
    cluster = request.getfixturevalue(shape)
    unseeded = {"temperature": 0.9, "max_tokens": 48}
    first, second = generate_all(cluster, [(PROMPTS[0], unseeded)] * 2)
    assert first[0] != second[0]
    other = generate(cluster, PROMPTS[0], **{**SEEDED, "seed": 43})
    assert other[0] != generate(cluster, PROMPTS[0], **SEEDED)[0]


def long_asks(colocated) -> list[tuple[list[int], dict]]:
    """Six long requests: greedy, seeded, and with a stop string late in the text of either."""
    greedy = {"temperature": 0.0, "max_tokens": NUM_LONG_TOKENS}
    seeded = {**greedy, "temperature": 0.9}
    asks = [
        (PROMPTS[0], greedy),
        (PROMPTS[1], greedy),
        (PROMPTS[2], {**seeded, "seed": 1}),
        (PROMPTS[3], {**seeded, "seed": 2, "top_p": 0.9, "top_k": 50, **PENALTIES}),
    ]
    for prompt, ask in ((PROMPTS[4], {**seeded, "seed": 3}), (PROMPTS[5], {**seeded, "seed": 4})):
        _, text, _ = generate(colocated, prompt, **ask)
        at = len(text) * 4 // 5
        stop = next(text[at : at + n] for n in range(3, 20) if text.find(text[at : at + n]) == at)
        asks.append((prompt, {**ask, "stop": [stop]}))
    return asks


def test_preempted_requests_end_as_undisturbed_ones(colocated, disaggregated):
    """CASES P-15: ids, text and reason as with a big pool, though each has lost its blocks."""
    asks = long_asks(colocated)
    expected = [generate(colocated, prompt, **ask) for prompt, ask in asks]
    assert [reason for _, _, reason in expected] == ["length"] * 4 + ["stop"] * 2
    num_preempted = Counter[int]()
    # Whoever comes last gives way first, as far as the others grow meanwhile: so each comes last.
    for turn in range(MAX_TURNS):
        order = [(number + 2 * turn) % 6 for number in range(6)]
        for number, (answer, times) in generate_in_turn(disaggregated, asks, order).items():
            assert answer == expected[number]
            num_preempted[number] += times.num_preemptions
        disaggregated.wait_quiet()
        if all(num_preempted[number] for number in range(6)):
            break
    else:
        pytest.fail(f"not all were preempted: {num_preempted}")
    assert count(colocated, "mixed-0", "preemptions") == 0


@pytest.mark.slow
def test_swapped_requests_end_as_undisturbed_ones_and_compute_nothing_twice(colocated, swapping):
    """CASES P-15: ids, text and reason; each decode leg computes one token for each it draws."""
    asks = long_asks(colocated)
    expected = [generate(colocated, prompt, **ask) for prompt, ask in asks]
    before = num_swapped(swapping)
    answers, times = generate_all_timed(swapping, asks)
    assert answers == expected
    assert num_swapped(swapping) > before
    nums = [each.num_preemptions for each in times]
    assert sum(num > 0 for num in nums) >= 2, nums
    for each in times[:4]:
        assert each.num_computed_tokens == NUM_LONG_TOKENS - 1
    assert sum(count(swapping, f"decode-{i}", "swaps_refused") for i in range(2)) == 0
    swapping.wait_quiet()


@pytest.mark.slow
def test_a_worker_is_lost_with_what_it_has_swapped_out(colocated, swapping):
    """CASES P-15, P-20: another one goes on; nobody else has that KV. Its worker's end is last."""
    asks = [(prompt, {"temperature": 0.0, "max_tokens": NUM_LONG_TOKENS}) for prompt in PROMPTS]
    expected = [generate(colocated, prompt, **ask) for prompt, ask in asks]
    before = num_swapped(swapping, "decode-1")
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(generate_all, swapping, asks)
        wait_until(lambda: num_swapped(swapping, "decode-1") > before, 30, "nothing was swapped")
        swapping.kill("decode-1")
        assert answers.result() == expected
    assert swapping.metrics().total("pdserve_requests_resumed_total") > 0


def num_swapped(cluster, *worker_ids: str) -> float:
    workers = worker_ids or [w.worker.worker_id for w in cluster.view().workers]
    return sum(count(cluster, each, "preemptions_swapped") for each in workers)


def generate_timed(cluster, prompt: list[int], ask: dict):
    """As ``generate``, with the times of the decode leg."""
    with Client(cluster.grpc) as client:
        ask = {"ignore_eos": True, "timeline": True, **ask}
        pieces = list(client.generate(prompt_ids={"ids": prompt}, **ask))
    ids = [token for piece in pieces for token in piece.token_ids]
    reason = next(piece.finish_reason for piece in pieces if piece.finish_reason)
    times = next(p.timeline.decode for p in reversed(pieces) if p.HasField("timeline"))
    return (ids, "".join(piece.text for piece in pieces), reason), times


def generate_all_timed(cluster, asks: list[tuple[list[int], dict]]):
    """All of them at once; returns the answers, and the times of their decode legs."""
    with ThreadPoolExecutor(len(asks)) as pool:
        pairs = list(pool.map(lambda ask: generate_timed(cluster, *ask), asks))
    return [answer for answer, _ in pairs], [times for _, times in pairs]


def generate_in_turn(cluster, asks: list[tuple[list[int], dict]], order: Sequence[int]):
    """Two by two, the next as soon as those before have their places: who came last gives way.

    Returns the answers and the times of their decode legs, by number.
    """
    with ThreadPoolExecutor(len(asks)) as pool:
        futures = {}
        for number in order:
            if futures and len(futures) % 2 == 0:
                num = len(futures)
                wait_until(lambda num=num: cluster.view().num_granted >= num, 10, "no place")
            futures[number] = pool.submit(generate_timed, cluster, *asks[number])
    return {number: future.result() for number, future in futures.items()}


def test_both_choices_of_a_preempted_request_end_as_undisturbed_ones(colocated, disaggregated):
    """CASES P-15: n=2, which share their prompt's blocks, behind two whom they give theirs."""
    ask = {"temperature": 0.9, "seed": 5, "max_tokens": NUM_LONG_TOKENS, "n": 2}
    expected, _ = generate_choices(colocated, PROMPTS[0], **ask)
    assert expected[0] != expected[1]
    others = [(prompt, {"max_tokens": NUM_LONG_TOKENS}) for prompt in PROMPTS[1:3]]
    num_preempted = Counter[int]()
    for _ in range(MAX_TURNS):
        with ThreadPoolExecutor(1) as pool:
            before = pool.submit(generate_all, disaggregated, others)
            wait_until(lambda: disaggregated.view().num_granted >= len(others), 10, "no place")
            choices, preempted = generate_choices(disaggregated, PROMPTS[0], **ask)
            before.result()
        assert choices == expected
        num_preempted += preempted
        disaggregated.wait_quiet()
        if len(num_preempted) == 2:
            break
    else:
        pytest.fail(f"not both were preempted: {num_preempted}")


def generate_choices(
    cluster, prompt: list[int], **ask
) -> tuple[dict[int, list[int]], Counter[int]]:
    """Stream all choices: the ids of each, and how often each was preempted, by index."""
    choices: dict[int, list[int]] = {}
    num_preempted = Counter[int]()
    ask = {"ignore_eos": True, "timeline": True, **ask}
    with Client(cluster.grpc) as client:
        for piece in client.generate(prompt_ids={"ids": prompt}, **ask):
            choices.setdefault(piece.index, []).extend(piece.token_ids)
            num_preempted[piece.index] += piece.timeline.decode.num_preemptions
    return choices, +num_preempted
