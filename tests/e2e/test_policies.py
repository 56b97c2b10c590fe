"""Every policy and kind of batching on real workers: the same tokens, and nothing is left."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from cluster.config import Batching, FaultsConfig, Policy, Preemption, Role, SchedulingConfig
from deploy.client import Client
from tests.e2e.plain_cluster import make_config, running, wait_until, with_pool
from tests.e2e.slow_steps import slow_steps

PROMPTS = [[11 + 37 * i + j * j % 89 for j in range(8 + 9 * i)] for i in range(6)]
NUM_TOKENS = 24
OFF = {"preemption": Preemption.OFF}
PAIR = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
MIXED = {"mixed": (Role.MIXED, 1)}
SETTINGS = {
    "static": (PAIR, OFF, {"batching": Batching.STATIC, "batch_size": 2}),
    "dynamic": (MIXED, OFF, {"batching": Batching.DYNAMIC, "batch_size": 3}),
    "sjf, fair": (MIXED, {"policy": Policy.SJF, "fair_tenants": True}, {}),
    "tiers": (PAIR, {"policy": Policy.PRIORITY}, {"max_num_seqs": 2}),
}


SEEDED = {"temperature": 0.9, "max_tokens": NUM_TOKENS, "ignore_eos": True}
ASKS = [
    SEEDED | {"temperature": 0.0, "logprobs": 3},
    SEEDED | {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    SEEDED | {"repetition_penalty": 1.5, "top_k": 60, "logprobs": 2},
    SEEDED | {"logit_bias": {7: 5.0, 8: -100.0}, "min_p": 0.001, "echo": True, "logprobs": 1},
    SEEDED | {"top_p": 0.9, "logprobs": 0},
    SEEDED,
]
"""Of each prompt, with its number as the seed; the last two are stopped in mid-text."""


def generate(cluster, index, stop=()):
    """One of them: its text, tokens and finish, all logprobs, and which tokens were the best."""
    tier = ("low", "normal", "high")[index % 3]
    with Client(cluster.grpc) as client:
        pieces = list(
            client.generate(
                prompt_ids={"ids": PROMPTS[index]}, seed=index, priority=tier, stop=stop,
                **ASKS[index],
            )
        )  # fmt: skip
    entries = [entry for p in pieces for entry in (*p.echo.logprobs, *p.logprobs)]
    values = [each.logprob for each in entries]
    values += [best.logprob for each in entries for best in each.top]
    return (
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.token_ids],
        pieces[-1].finish_reason,
        [[best.token_id for best in each.top] for each in entries],
        values,
    )


def generate_all(cluster, stops):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda i: generate(cluster, i, stops[i]), range(len(PROMPTS))))


@pytest.fixture(scope="module")
def undisturbed(tiny_llama, tmp_path_factory):
    with running(make_config(tiny_llama, MIXED), tiny_llama, tmp_path_factory.mktemp("m")) as own:
        yield own


@pytest.fixture(scope="module")
def stops(undisturbed):
    """A piece of text for each that is stopped, from the middle of what it would say."""
    found = [[] for _ in PROMPTS]
    for index in (4, 5):
        text = generate(undisturbed, index)[0]
        middle = len(text) * 3 // 4
        found[index] = [text[middle : middle + 4]]
    return found


@pytest.fixture(scope="module")
def expected(undisturbed, stops):
    """Each alone, one after another."""
    alone = [generate(undisturbed, index, stops[index]) for index in range(len(PROMPTS))]
    assert [reason for _, _, reason, *_ in alone] == ["length"] * 4 + ["stop"] * 2
    return alone


@pytest.mark.parametrize("name", SETTINGS)
def test_a_policy_changes_no_token(name, expected, stops, tiny_llama, tmp_path):
    """P-13, P-14, P-15: in fp32, whoever waits for whom, and whoever shares a step with whom.

    Nor a stop, nor a logprob: of seeds, penalties, biases and prompts' scores side by side.
    """
    pools, scheduling, options = SETTINGS[name]
    config = make_config(tiny_llama, pools, chunk_tokens=16)
    for pool in pools if options else ():
        config = with_pool(config, pool, **options)
    config = replace(config, scheduling=SchedulingConfig(**scheduling))
    with running(config, tiny_llama, tmp_path) as cluster:
        for ours, alone in zip(generate_all(cluster, stops), expected, strict=True):
            assert ours[:-1] == alone[:-1]
            assert ours[-1] == pytest.approx(alone[-1], abs=1e-3)
        cluster.wait_quiet()


class Streamed(threading.Thread):
    """One stream, with the instants of its first token and of its end."""

    def __init__(self, cluster, num_prompt_tokens, num_tokens, seed, priority):
        super().__init__(daemon=True)
        self._cluster, self._priority = cluster, priority
        self._prompt = [11 + (7 + seed) * i % 397 for i in range(num_prompt_tokens)]
        self._ask = {"max_tokens": num_tokens, "seed": seed, "temperature": 0.9}
        self.tokens = []
        self.first_at = self.ended_at = None
        self.error = None
        self.start()

    def run(self):
        try:
            with Client(self._cluster.grpc) as client:
                for piece in client.generate(
                    prompt_ids={"ids": self._prompt}, ignore_eos=True,
                    priority=self._priority, **self._ask,
                ):  # fmt: skip
                    self.tokens += piece.token_ids
                    self.first_at = self.first_at or time.monotonic()
        except BaseException as error:
            self.error = error
        self.ended_at = time.monotonic()

    def result(self):
        self.join(60)
        assert self.error is None, self.error
        return self.tokens


STEP_S = 0.05
"""So long a step takes where streams must outlast what is done meanwhile."""
SCARCE = {
    # slots and tokens of whoever decodes; prompt and output of the low ones, and of the high one
    "slots": ({"max_num_seqs": 2}, (12, 900), (20, 8)),
    "blocks": ({"max_num_seqs": 8, "kv_tokens": 1024}, (250, 250), (600, 8)),
}


CELLS = [
    (PAIR, "slots", Preemption.RECOMPUTE),
    (PAIR, "slots", Preemption.SWAP),
    (PAIR, "blocks", Preemption.RECOMPUTE),
    (PAIR, "blocks", Preemption.SWAP),
    (MIXED, "slots", Preemption.RECOMPUTE),
    (MIXED, "blocks", Preemption.RECOMPUTE),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pools", "scarce", "preemption"),
    CELLS,
    ids=["-".join((*pools, scarce, how.value)) for pools, scarce, how in CELLS],
)
def test_a_higher_tier_takes_what_streams_of_lower_ones_have(
    pools, scarce, preemption, undisturbed, tiny_llama, tmp_path
):
    """P-15: through the control plane, at once; who gave way comes back, and no token changes."""
    options, low_sizes, high_sizes = SCARCE[scarce]
    alone = [Streamed(undisturbed, *low_sizes, seed, "").result() for seed in (1, 2)]
    alone_high = Streamed(undisturbed, *high_sizes, 3, "").result()
    buffer = {"swap_tokens": 4096} if preemption is Preemption.SWAP else {}
    decoding = list(pools)[-1]
    config = with_pool(make_config(tiny_llama, pools), decoding, **buffer, **options)
    scheduling = replace(
        config.scheduling, policy=Policy.PRIORITY, preemption=preemption, aging_s=60.0
    )
    config = replace(config, scheduling=scheduling, faults=FaultsConfig(enabled=True))
    with running(config, tiny_llama, tmp_path) as cluster:

        def decode():
            (worker,) = [w for w in cluster.view().workers if w.worker.pool == decoding]
            return worker.report

        with slow_steps(cluster, decoding, STEP_S):
            lows = [Streamed(cluster, *low_sizes, seed, "low") for seed in (1, 2)]
            wait_until(lambda: decode().num_running == 2, 30, "the low ones run")
            high = Streamed(cluster, *high_sizes, 3, "high")
            assert high.result() == alone_high
        assert [low.result() for low in lows] == alone
        assert high.first_at < min(low.ended_at for low in lows)
        assert high.ended_at < min(low.ended_at for low in lows)
        cluster.wait_quiet()
        counters = decode().counters
        assert counters["preemptions"] > 0
        assert (counters["preemptions_swapped"] > 0) is (preemption is Preemption.SWAP)


@pytest.mark.slow
def test_a_worker_that_dies_while_places_change_hands_costs_nobody_a_token(
    undisturbed, tiny_llama, tmp_path
):
    """P-15, P-19: both go on elsewhere, where the higher one takes a place again."""
    low_sizes, high_sizes = (12, 900), (20, 500)
    alone = [Streamed(undisturbed, *low_sizes, seed, "").result() for seed in (1, 2)]
    alone_high = Streamed(undisturbed, *high_sizes, 3, "").result()
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 2)}
    config = with_pool(make_config(tiny_llama, pools), "decode", max_num_seqs=1)
    scheduling = replace(config.scheduling, policy=Policy.PRIORITY, aging_s=60.0)
    with running(replace(config, scheduling=scheduling), tiny_llama, tmp_path) as cluster:

        def decode(fact):
            reports = {w.worker.worker_id: w.report for w in cluster.view().workers}
            return {n: fact(report) for n, report in reports.items() if n.startswith("decode")}

        def preempting():
            return [n for n, count in decode(lambda r: r.counters["preemptions"]).items() if count]

        lows = [Streamed(cluster, *low_sizes, seed, "low") for seed in (1, 2)]
        wait_until(lambda: all(decode(lambda r: r.num_running).values()), 30, "the low ones run")
        high = Streamed(cluster, *high_sizes, 3, "high")
        wait_until(preempting, 30, "one gives way")
        (lost,) = preempting()
        cluster.kill(lost)
        assert high.ended_at is None
        assert high.result() == alone_high
        assert high.ended_at < min(low.ended_at or time.monotonic() for low in lows)
        assert [low.result() for low in lows] == alone
        (left,) = {"decode-0", "decode-1"} - {lost}
        wait_until(lambda: preempting() == [left], 30, "the other one gave way, and this is dead")
        cluster.wait_quiet()
