"""Detokenising and stop strings, token by token."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from router.stream_text import ChoiceText, Detokenizer, StopMatcher
from tests.router.fakes import EOS_ID, make_codec

CODEC = make_codec()
TEXTS = (
    "plain words, and a line\nmore",
    "😀 a four-byte face",
    "你好、世界 and 日本語",
    "👩‍👩‍👧‍👦 a family of seven code points",
    "e\u0301 a\u0308: combining accents",
    "",
)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def make_byte_fallback() -> Tokenizer:
    """Return a tokenizer as SentencePiece models have: what is in no word is bytes."""
    vocab = {piece: i for i, piece in enumerate([*BYTES, "▁a", "b"])}
    rust = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return rust


def make_choice(*stops: str) -> ChoiceText:
    return ChoiceText(Detokenizer(CODEC.decode, CODEC.hidden_ids), stops)


def play(choice: ChoiceText, ids: list[int]) -> list[str]:
    pieces = []
    for token_id in ids:
        pieces.append(choice.push(token_id))
        if choice.is_stopped:
            return pieces
    return [*pieces, choice.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_joined_pieces_are_the_text_and_never_half_a_character(text):
    """P-06: every piece is whole characters though each token is one byte."""
    pieces = play(make_choice(), list(text.encode()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("num_bytes", range(1, 12))
def test_a_cut_inside_a_character_shows_as_decoding_everything_does(num_bytes):
    """P-06: max_tokens may end in the middle of a character."""
    ids = list("a😀é你".encode()[:num_bytes])
    assert "".join(play(make_choice(), ids)) == CODEC.decode(ids)


def test_random_bytes_are_exact_and_never_stall():
    """P-06: bytes that are no text hold the stream back by one character at most."""
    random.seed(3)
    for _ in range(200):
        ids = [random.randrange(256) for _ in range(40)]
        choice, shown = make_choice(), ""
        for number, token_id in enumerate(ids, start=1):
            shown += choice.push(token_id)
            whole = CODEC.decode(ids[:number])
            assert whole.startswith(shown)
            assert len(whole) - len(shown) <= 3
        assert shown + choice.flush() == CODEC.decode(ids)


@pytest.mark.parametrize("text", ["日本語", "😀😀", "éé", "a😀日b"])
def test_characters_in_bytes_one_after_the_other(text):
    """P-06: a byte fallback shows a run of bytes as broken while its last character is."""
    detokenizer = Detokenizer(make_byte_fallback().decode, frozenset())
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert [piece for piece in pieces if piece] == list(text)
    assert detokenizer.flush() == ""


def test_a_cut_after_whole_characters_in_bytes_breaks_only_the_last():
    """P-06: what is out stays what it was."""
    detokenizer = Detokenizer(make_byte_fallback().decode, frozenset())
    pieces = [detokenizer.push(byte) for byte in "日本".encode()[:-1]]
    assert "".join([*pieces, detokenizer.flush()]) == "日\ufffd\ufffd"


def test_a_long_run_of_broken_characters_is_decoded_in_pieces():
    """S-10: a bias towards half a character may not cost the square of the length."""
    num_decoded = 0

    def decode(ids):
        nonlocal num_decoded
        num_decoded += len(ids)
        return CODEC.decode(ids)

    random.seed(4)
    for alphabet in (b"\x80", b"\xf0\x9f\x98", b"\xe2\x82\xac\x80", b"\xef\xbf\xbd"):
        ids = random.choices(alphabet, k=2000)
        detokenizer, num_decoded = Detokenizer(decode, frozenset()), 0
        pieces = [detokenizer.push(token_id) for token_id in ids]
        assert num_decoded < 200 * len(ids)
        assert "".join([*pieces, detokenizer.flush()]) == CODEC.decode(ids)


def test_hidden_ids_leave_no_text():
    assert "".join(play(make_choice(), [*b"ab", EOS_ID, *b"c"])) == "abc"


def test_a_decoder_that_strips_the_first_space_is_followed():
    """P-06: sentencepiece-like decoders treat the first piece differently."""
    words = ["▁the", "▁cat", "s", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "."]
    rust = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    ids = [0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    detokenizer = Detokenizer(rust.decode, frozenset())
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join([*pieces, detokenizer.flush()]) == rust.decode(ids) == "the cats 😀. cats"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["wo th"], "one t"),
        ("xabcx", ["abc", "ab"], "x"),
        ("abcd", ["bcd", "c"], "ab"),
        ("stop here", ["s"], ""),
        ("no match at all", ["mash"], "no match at all"),
        ("ends in a half sto", ["stop"], "ends in a half sto"),
        ("face 😀 here", ["😀"], "face "),
        ("aaaab", ["aab"], "aa"),
    ],
)
def test_stop_strings_cut_wherever_the_tokens_end(text, stops, expected):
    """P-05: the cut doesn't depend on how the text was cut into pieces."""
    assert "".join(play(make_choice(*stops), list(text.encode()))) == expected
    random.seed(1)
    for _ in range(50):
        matcher, shown, at = StopMatcher(stops), "", 0
        while at < len(text) and not matcher.is_stopped:
            size = random.randint(1, 4)
            shown += matcher.push(text[at : at + size])
            at += size
        is_by_character = matcher.is_stopped is (expected != text)
        assert is_by_character
        if not matcher.is_stopped:
            shown += matcher.flush()
        assert shown == expected


def test_only_what_may_become_a_stop_string_is_held_back():
    """P-05: held back are longest stop - 1 characters at most, and only a proper prefix."""
    matcher = StopMatcher(["END", "!?"])
    assert matcher.push("text E") == "text "
    assert matcher.push("N") == ""
    assert matcher.push("x") == "ENx"
    assert matcher.push("!") == ""
    assert matcher.flush() == "!"


def test_nothing_comes_after_a_stop():
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == "a"
    assert (matcher.push("more"), matcher.flush()) == ("", "")
