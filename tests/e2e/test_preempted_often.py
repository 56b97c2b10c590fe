"""Requests that are preempted again and again end as those that nobody disturbs."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, defaultdict

import pytest

from cluster.config import FaultsConfig, Policy, Preemption, Role
from deploy.client import Client
from tests.e2e.plain_cluster import make_config, running, wait_until, with_pool
from tests.e2e.slow_steps import slow_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
NUM_TOKENS, NUM_HIGH_TOKENS = 120, 12
STEP_S = 0.01
TAKEN_AT = (15, 35, 55, 75)
"""Tokens of each choice after which all places are taken; three times is a request preempted at
most, by default."""
SEEDED = {"temperature": 0.9, "seed": 3}
ASKS = {
    "greedy": {"temperature": 0.0},
    "seeded": {**SEEDED, "top_p": 0.9, "top_k": 50},
    "penalties": {
        **SEEDED, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
    },
    "stop": SEEDED,
    "two choices": {**SEEDED, "n": 2},
}  # fmt: skip
NUM_PLACES = len(ASKS) + 1


class Low(threading.Thread):
    """One request of the lowest tier; keeps what came of each choice."""

    def __init__(self, cluster, ask: dict) -> None:
        super().__init__(daemon=True)
        self._client = Client(cluster.grpc)
        self._ask = ask
        self.tokens = defaultdict[int, list[int]](list)
        self.texts = defaultdict[int, str](str)
        self.reasons: dict[int, str] = {}
        self.num_preemptions = Counter[int]()
        self.start()

    def run(self) -> None:
        with self._client as client:
            for piece in client.generate(
                prompt_ids={"ids": list(range(7, 47))}, max_tokens=NUM_TOKENS, ignore_eos=True,
                priority="low", timeline=True, **self._ask,
            ):  # fmt: skip
                self.tokens[piece.index].extend(piece.token_ids)
                self.texts[piece.index] += piece.text
                self.num_preemptions[piece.index] += piece.timeline.decode.num_preemptions
                if piece.finish_reason:
                    self.reasons[piece.index] = piece.finish_reason

    def has(self, num_tokens: int) -> bool:
        """Whether so many tokens of each choice have come."""
        num_choices = self._ask.get("n", 1)
        return sum(len(ids) >= num_tokens for ids in [*self.tokens.values()]) == num_choices

    def result(self):
        self.join(90)
        assert len(self.reasons) == self._ask.get("n", 1), "it did not end"
        return self.tokens, self.texts, self.reasons


@pytest.fixture(scope="module", params=[Preemption.RECOMPUTE, Preemption.SWAP])
def cluster(request, tiny_llama, tmp_path_factory):
    """A pair whose decode worker has a place for each choice, and no more."""
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    buffer = {"swap_tokens": 4096} if request.param is Preemption.SWAP else {}
    config = with_pool(make_config(tiny_llama, pools), "decode", max_num_seqs=NUM_PLACES, **buffer)
    scheduling = dataclasses.replace(
        config.scheduling, policy=Policy.PRIORITY, preemption=request.param, aging_s=60.0
    )
    config = dataclasses.replace(config, scheduling=scheduling, faults=FaultsConfig(enabled=True))
    with running(config, tiny_llama, tmp_path_factory.mktemp("often")) as cluster:
        yield cluster


def test_preempted_several_times_they_end_as_undisturbed(cluster):
    """CASES P-15: ids, text and reason of every choice, and of a stream that a stop string ends."""
    stop = stop_of(Low(cluster, ASKS["stop"]))
    asks = {**ASKS, "stop": {**ASKS["stop"], "stop": [stop]}}
    calm = {kind: Low(cluster, ask) for kind, ask in asks.items()}
    expected = {kind: low.result() for kind, low in calm.items()}
    assert expected["stop"][2] == {0: "stop"}
    assert not any(low.num_preemptions.total() for low in calm.values())
    with slow_steps(cluster, "decode", STEP_S):
        lows = {kind: Low(cluster, ask) for kind, ask in asks.items()}
        for num_tokens in TAKEN_AT:
            for low in lows.values():
                wait_until(lambda low=low, num=num_tokens: low.has(num), 60, "it does not go on")
            take_all_places(cluster)
        answers = {kind: low.result() for kind, low in lows.items()}
    assert answers == expected
    times = {kind: low.num_preemptions for kind, low in lows.items()}
    assert all(times[kind][choice] >= 2 for kind in asks for choice in expected[kind][0]), times
    cluster.wait_quiet()


def stop_of(low: Low) -> str:
    """A string that its text has late, and not before."""
    low.result()
    text = low.texts[0]
    at = len(text) * 4 // 5
    return next(text[at : at + n] for n in range(3, 20) if text.find(text[at : at + n]) == at)


def take_all_places(cluster) -> None:
    """Ask for as many choices of the highest tier, and wait for their ends."""
    ask = {"n": NUM_PLACES, "max_tokens": NUM_HIGH_TOKENS, "temperature": 0.9, "ignore_eos": True}
    with Client(cluster.grpc) as client:
        assert list(client.generate(prompt_ids={"ids": [5, 6, 7]}, priority="high", **ask))
