"""Stop strings and characters across token borders, over both doors, streamed and whole."""

from __future__ import annotations

import random

import pytest

from cluster.request import FinishReason
from router.stream_text import ChoiceText, Detokenizer, StopMatcher
from tests.router.doors import events_of, grpc_request, open_doors
from tests.router.fakes import (
    EOS_ID,
    FakeCluster,
    assert_conserved,
    make_codec,
    make_router,
    metric,
    speaks,
    until,
)

TEXT = "one two three"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def cluster():
    return FakeCluster()


@pytest.fixture
async def doors(cluster):
    async with open_doors(make_router(cluster)) as doors:
        yield doors


async def pieces_of(doors, given):
    """Return the pieces of a text, and its finish, as each door streams it, and whole."""
    streamed = await doors.post({**given, "stream": True})
    chunks = [data["choices"][0] for _, data in events_of(streamed.text)[:-1]]
    texts = [c["delta"].get("content", "") if "delta" in c else c["text"] for c in chunks]
    yield texts, chunks[-1]["finish_reason"]
    whole = (await doors.post(given)).json()["choices"][0]
    text = whole["message"]["content"] if "message" in whole else whole["text"]
    yield [text], whole["finish_reason"]
    messages = [message async for message in doors.stub.Generate(grpc_request(given))]
    yield [message.text for message in messages], messages[-1].finish_reason
    (choice,) = (await doors.once(given)).choices
    yield [choice.text], choice.finish_reason


@pytest.mark.parametrize("source", [{"prompt": "hi"}, {"messages": HI}], ids=["text", "chat"])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["e tw"], "on"),
        (["two", "tw"], "one "),
        (["ab", "abc", "two t", "o thr"], "one "),
        (["threeX"], TEXT),
        (["one"], ""),
        ([TEXT], ""),
        ("three", "one two "),
    ],
)
async def test_stop_strings_cut_alike_everywhere(doors, cluster, source, stop, expected):
    """P-05: joined pieces = the whole text = cut at the earliest match, and the work ends."""
    cluster.script = speaks([*TEXT.encode(), *b"x" * 20], FinishReason.LENGTH)
    if expected == TEXT:
        cluster.script = speaks([*TEXT.encode()], FinishReason.LENGTH)
    async for pieces, reason in pieces_of(doors, {**source, "stop": stop}):
        joined = ""
        for piece in pieces:
            joined += piece
            assert expected.startswith(joined), "never a character that is taken back"
        assert joined == expected
        assert reason == ("length" if expected == TEXT else "stop")
    await until(lambda: metric(doors.service, "pdserve_requests_in_flight") == 0)
    if expected != TEXT:
        legs = [key for worker in cluster.connections for key, _ in worker.aborts]
        assert metric(doors.service, "pdserve_wasted_tokens_total") > 0 or legs
    assert_conserved(doors.service)


async def test_a_stop_at_the_last_token_is_a_stop(doors, cluster):
    """P-08: hit exactly at max_tokens."""
    cluster.script = speaks([*TEXT.encode()])
    given = {"prompt": "hi", "stop": [" two"], "max_tokens": len("one two")}
    async for pieces, reason in pieces_of(doors, given):
        assert ("".join(pieces), reason) == ("one", "stop")


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, "a"), (3, "a"), (4, "abca"), (6, "abca"), (7, "abcabca")]
)
async def test_stop_strings_wait_for_min_tokens(doors, cluster, min_tokens, expected):
    """P-08: what completes before min_tokens is text; what completes with or after it ends."""
    cluster.script = speaks([*b"abcabcabcx"], FinishReason.LENGTH)
    given = {"prompt": "hi", "stop": ["bc"], "min_tokens": min_tokens, "max_tokens": 10}
    async for pieces, reason in pieces_of(doors, given):
        assert ("".join(pieces), reason) == (expected, "stop")
    assert cluster.worker("p0").legs[-1].params.min_tokens == min_tokens


def test_old_text_completes_no_stop_string():
    """min_tokens: a match ends in armed text, wherever it begins."""
    matcher = StopMatcher(["ab", "abc", "xab"])
    assert matcher.push("zxab", is_armed=False) == "zx"
    assert matcher.push("c") == ""
    assert matcher.is_stopped
    random.seed(5)
    codec = make_codec()
    for _ in range(200):
        text = "".join(random.choice("ab") for _ in range(12))
        stops = ["".join(random.choice("ab") for _ in range(random.randint(1, 3))) for _ in "12"]
        min_tokens = random.randint(0, 12)
        ends = [
            (at + len(stop), at)
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) >= max(1, min_tokens)
        ]
        # By token and so by character here: the first end that counts, then its earliest start.
        expected = text[: min(ends)[1]] if ends else text
        detokenizer = Detokenizer(codec.decode, codec.hidden_ids)
        choice = ChoiceText(detokenizer, stops, min_tokens=min_tokens)
        shown = ""
        for byte in text.encode():
            shown += choice.push(byte)
            if choice.is_stopped:
                break
        else:
            shown += choice.flush()
        assert choice.is_stopped is bool(ends), (text, stops, min_tokens)
        assert shown == expected, (text, stops, min_tokens)


@pytest.mark.parametrize(
    "text",
    ["😀 face", "你好、世界", "👩‍👩‍👧‍👦", "e\u0301a\u0308", " leading"],
    ids=["emoji", "cjk", "family", "combining", "space"],
)
@pytest.mark.parametrize("source", [{"prompt": "hi"}, {"messages": HI}], ids=["text", "chat"])
async def test_characters_are_never_halved(doors, cluster, text, source):
    """P-06: each piece is whole characters, also where max_tokens cuts one."""
    ids = [*text.encode(), EOS_ID]
    cluster.script = speaks(ids)
    for max_tokens in (None, 3, 6):
        expected = text.encode()[:max_tokens].decode(errors="replace")
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        async for pieces, _ in pieces_of(doors, source | limit):
            joined = "".join(pieces)
            assert joined.rstrip("\ufffd") == expected.rstrip("\ufffd")
            assert joined == make_codec().decode(ids[:max_tokens])
            assert not any("\ufffd" in piece for piece in pieces[:-1])


async def test_bytes_that_are_no_text_do_not_stall(doors, cluster):
    """P-06: every chunk is valid JSON in UTF-8; joined they are what decoding everything gives."""
    ids = [0xFF, *b"a", 0x80, 0x80, 0x80, 0x80, *b"b", 0xF0, 0x9F, *b"c", 0xE4, 0xBD]
    cluster.script = speaks(ids, FinishReason.LENGTH)
    async for pieces, _ in pieces_of(doors, {"prompt": "hi"}):
        assert "".join(pieces) == make_codec().decode(ids)


async def test_a_stop_string_of_one_emoji(doors, cluster):
    """P-05, P-06."""
    cluster.script = speaks([*"a😀b".encode()], FinishReason.LENGTH)
    async for pieces, reason in pieces_of(doors, {"prompt": "hi", "stop": "😀"}):
        assert ("".join(pieces), reason) == ("a", "stop")
