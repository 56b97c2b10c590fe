"""What clients write is in no metric: neither as a name nor as a label (S-17)."""

import itertools

from tests.router.doors import open_doors
from tests.router.fakes import EOS_ID, FakeCluster, make_router, speaks

MARKER = "xylophonist"
KINDS = 12
"""Of calls, one of each before the soak."""


def call(number: int) -> tuple[dict, dict]:
    """A body and its headers, in which every value that a client chooses is new."""
    word = f"{MARKER}-{number}"
    body = {"prompt": word, "max_tokens": 4, "user": word, "stop": [f"{word}."]}
    body["seed"], body["expected_tokens"] = number, number % 30 + 1
    spoiled = (
        {}, {"model": word}, {"priority": word}, {"temperature": word}, {word: number},
        {"max_tokens": -number - 1}, {"stream": True}, {"n": 2}, {"logprobs": 1},
        {"prompt": f"{word} " * 200}, {"messages": [{"role": word, "content": word}]},
        {"timeout_s": 1e-9 * (number + 1)},
    )  # fmt: skip
    headers = {"x-client-request-id": word, "user-agent": word, "referer": word}
    return body | spoiled[number % KINDS], headers


def series_of(service) -> set[str]:
    """Every series that is shown, without its value."""
    lines = service.metrics.text().decode().splitlines()
    return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}


async def test_a_soak_of_new_values_makes_no_new_series():
    """S-17: as many after 360 calls, no two alike, as after one of each kind."""
    cluster = FakeCluster()
    cluster.script = speaks([*b"ok", EOS_ID])
    service = make_router(cluster)
    numbers = itertools.count()
    async with open_doors(service) as doors:

        async def ask(count: int) -> set[int]:
            statuses = set()
            for number in itertools.islice(numbers, count):
                body, headers = call(number)
                path = "chat/completions" if "messages" in body else "completions"
                answer = await doors.http.post(f"/v1/{path}", json=body, headers=headers)
                statuses.add(answer.status_code)
            return statuses

        assert {200, 400, 404} <= await ask(KINDS)
        first = series_of(service)
        await ask(360)
        assert series_of(service) == first
    assert len(first) > 20
    assert not any(MARKER in series for series in first)
