"""Stop strings and characters over token borders, of what two workers made."""

import itertools
from dataclasses import dataclass

import pytest

from tests.e2e.api.ask import WAYS, plain_ids
from tests.factories_model import VOCAB_SIZE

PROMPTS = [[11 + i, 48, 85, 22, 59, 96 + i, 33, 70, 107, 44] for i in range(8)]
NUM_TOKENS = 32
EMOJI = "\U0001f600"


@dataclass(frozen=True)
class Told:
    """An undisturbed greedy answer of printable ASCII, and where each token's text ends."""

    ask: dict
    text: str
    ends: list[int]

    def spanning(self) -> tuple[str, int, int]:
        """(stop, where it begins, tokens up to its end): from inside one token into the third."""
        for i in range(1, len(self.ends) - 2):
            begin, end = self.ends[i] - 1, self.ends[i + 1] + 1
            inside = self.ends[i - 1] < begin and end < self.ends[i + 2]
            if inside and self.text.find(self.text[begin:end]) == begin:
                return self.text[begin:end], begin, i + 3
        raise AssertionError("no token of two characters: choose another prompt")


@pytest.fixture(scope="module")
def told(colocated, tokenizer):
    """Only plain tokens may be drawn: any other would be no text by itself."""
    plain = set(plain_ids(tokenizer))
    others = [i for i in range(VOCAB_SIZE) if i not in plain]
    assert len(others) <= 300
    ask = {
        "max_tokens": NUM_TOKENS, "temperature": 0, "frequency_penalty": 1.0,
        "logit_bias": {str(i): -100 for i in others},
    }  # fmt: skip
    for prompt in PROMPTS:
        given = {**ask, "prompt": prompt}
        (choice,) = colocated.ask("gRPC", given).choices
        assert choice.text == tokenizer.decode(choice.ids)
        ends = list(itertools.accumulate(len(tokenizer.decode([i])) for i in choice.ids))
        found = Told(given, choice.text, ends)
        try:
            found.spanning()
        except AssertionError:
            continue
        return found
    raise AssertionError("no prompt gives two neighbours of several characters")


def stops_of(told: Told) -> dict[str, tuple[list[str], int | None]]:
    """What to stop at, and where the text is cut; None: not at all."""
    text = told.text
    spanning, at, _ = told.spanning()
    late = text[at : at + 6]
    return {
        "over three tokens": ([spanning], at),
        "the longer one as well": ([spanning, late], at),
        "overlapping": ([late[1:], spanning], min(at, text.find(late[1:]))),
        "at the first character": ([text[:2]], 0),
        "only its beginning, at the end": ([text[-3:] + "\x00"], None),
        "nowhere": (["\x00\x01"], None),
    }


@pytest.mark.parametrize("kind", [
    "over three tokens", "the longer one as well", "overlapping", "at the first character",
    "only its beginning, at the end", "nowhere",
])  # fmt: skip
def test_stop_strings_cut_the_same_text_everywhere(kind, told, caller):
    """CASES P-05: joined pieces = the whole = cut at the match; no piece tells what comes later."""
    stops, at = stops_of(told)[kind]
    expected = (told.text if at is None else told.text[:at], "length" if at is None else "stop")
    for way, answer in caller.ask_all({**told.ask, "stop": stops}).items():
        assert answer.texts == [expected], way


def test_a_stop_string_ends_the_work(told, caller, counted):
    """CASES P-05: a long answer isn't made to its end for nobody."""
    stop, _, num_tokens = told.spanning()
    before = counted()
    answer = caller.ask("SSE", {**told.ask, "stop": [stop], "max_tokens": 200})
    assert answer.usage[1] == num_tokens
    more = counted() - before
    assert more["pdserve_generated_tokens_total"] == num_tokens
    assert more["worker generated_tokens"] < 200 - num_tokens


def test_pieces_come_as_soon_as_they_may(told, caller):
    """CASES P-05: what can't become the stop string is not held back."""
    plain = caller.ask("gRPC stream", told.ask).choices[0].pieces
    held = caller.ask("gRPC stream", {**told.ask, "stop": ["\x00\x01\x02"]}).choices[0].pieces
    assert held == plain
    assert len(plain) > NUM_TOKENS // 2


def test_chats_stop_as_prompts_do(caller, told):
    """CASES P-05: on the other endpoint, which has another template but the same rules."""
    ask = {
        "messages": [{"role": "user", "content": "tell me of the harbour"}],
        "max_tokens": NUM_TOKENS, "temperature": 0, "logit_bias": told.ask["logit_bias"],
    }  # fmt: skip
    (whole,) = caller.ask("HTTP", ask).texts
    stop = whole[0][5:9]
    expected = (whole[0][: whole[0].find(stop)], "stop")
    for way, answer in caller.ask_all({**ask, "stop": stop}).items():
        assert answer.texts == [expected], way


@pytest.mark.parametrize("prompt", PROMPTS[:4])
def test_broken_bytes_are_what_decoding_all_ids_gives(prompt, caller, tokenizer):
    """CASES P-06: a tiny model speaks in bytes; every way tells them as one decoding would."""
    ask = {"prompt": prompt, "max_tokens": 60, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    answers = caller.ask_all(ask)
    ids = answers["gRPC"].choices[0].ids
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert "\ufffd" in expected, "nothing was broken"
    for way, answer in answers.items():
        assert answer.choices[0].text == expected, way


@pytest.mark.parametrize("text", ["é", "你", EMOJI])
def test_characters_of_several_tokens_are_never_halved(text, caller, tokenizer):
    """CASES P-06: drawn from the bytes of one character; cut wherever max_tokens cuts."""
    ids = sorted(set(tokenizer(text, add_special_tokens=False)["input_ids"]))
    assert len(ids) == len(text.encode())
    ask = {"prompt": PROMPTS[0], "temperature": 2.0, "logit_bias": {str(i): 100 for i in ids}}
    num_whole = 0
    for seed, num_tokens in enumerate((1, 2, 3, 60)):
        answers = caller.ask_all({**ask, "seed": seed, "max_tokens": num_tokens})
        drawn = answers["gRPC"].choices[0].ids
        assert set(drawn) <= set(ids)
        expected = tokenizer.decode(drawn)
        num_whole += expected.count(text)
        for way, answer in answers.items():
            assert answer.choices[0].text == expected, way
            # A piece is whole characters: what is broken in it is broken in the whole, too.
            assert sum(p.count("\ufffd") for p in answer.choices[0].pieces) == expected.count(
                "\ufffd"
            ), way
    assert num_whole or text == EMOJI


def test_echoed_emoji_come_back_whole(caller):
    """CASES P-06: a family of joined emoji, an accent that combines, a leading space."""
    text = " a\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 你好"
    for way in WAYS:
        for stop in ([], [EMOJI]):
            ask = {"prompt": text, "echo": True, "max_tokens": 1, "temperature": 0, "stop": stop}
            assert caller.ask(way, ask).choices[0].text.startswith(text), way
