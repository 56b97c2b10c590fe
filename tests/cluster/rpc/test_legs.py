"""Legs on the wire: conversion, the rules, and the book."""

import dataclasses

import pytest

from cluster.engine import finish
from cluster.errors import BY_CODE, DeadlineExceeded, InvalidRequest, PdserveError
from cluster.handoff import AbortCause
from cluster.kv.layout import KVLayout
from cluster.lifetime import LegTimes
from cluster.request import (
    MAX_PREEMPTIONS,
    FinishReason,
    LegEnd,
    LegKey,
    LegKind,
    Peer,
    Preempted,
    PromptPrefix,
    Token,
)
from cluster.rpc import convert
from cluster.rpc.leg_rules import LegRules
from cluster.rpc.legs import LegBook
from cluster.wire import worker_pb2 as wire
from tests.factories import make_key
from tests.factories_attach import KEY, make_leg

LAYOUT = KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=1, block_size=4, dtype="fp32", model_fingerprint="f"
)


# ---- conversion


@pytest.mark.parametrize(
    "leg",
    [
        make_leg(),
        make_leg(
            kind=LegKind.DECODE, peer=None, output_ids=(4, 5), tenant="t", waited_s=1.5,
            prefix=PromptPrefix(stride_tokens=1, names=(2**64 - 1, 7)), num_preemptions=3,
            expected_tokens=7, priority="low",
        ),
        make_leg(
            kind=LegKind.LOCAL,
            params={
                "temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 2**64 - 1,
                "stop_token_ids": (1,), "ignore_eos": True,
            },
        ),
    ],
)  # fmt: skip
def test_a_leg_survives_the_wire(leg):
    data = convert.leg_to_wire(leg).SerializeToString()
    assert convert.leg_from_wire(wire.Leg.FromString(data)) == leg


def test_stop_strings_stay_in_the_router():
    leg = make_leg(params={"stop": ("secret",)})
    assert b"secret" not in convert.leg_to_wire(leg).SerializeToString()


def test_tokens_and_ends_survive_the_wire():
    token = Token(KEY, 4, 99)
    assert convert.token_from_wire(convert.token_to_wire(token)) == token
    times = LegTimes(**{f.name: 1 for f in dataclasses.fields(LegTimes)})
    for reason in (None, *FinishReason):
        end = LegEnd(key=KEY, finish_reason=reason, times=times)
        assert convert.end_from_wire(convert.end_to_wire(end)) == end


@pytest.mark.parametrize("kind", BY_CODE.values())
def test_errors_survive_the_wire(kind):
    error = kind("what", stage="prefill", worker_id="p", field="seed")
    back = convert.error_from_wire(convert.error_to_wire(error))
    assert type(back) is kind
    assert (back.message, back.stage, back.worker_id, back.field) == (
        "what",
        "prefill",
        "p",
        "seed",
    )


def test_unknown_codes_and_causes_are_errors_all_the_same():
    assert type(convert.error_from_wire(wire.Error(code="new", message="m"))) is PdserveError
    assert convert.cause_from_wire(77) is AbortCause.FAULT
    for cause in AbortCause:
        assert convert.cause_from_wire(convert.cause_to_wire(cause)) is cause


def test_a_leg_without_a_kind_or_with_half_a_peer_is_refused():
    message = convert.leg_to_wire(make_leg())
    message.kind = wire.LEG_KIND_UNSPECIFIED
    with pytest.raises(InvalidRequest) as caught:
        convert.leg_from_wire(message)
    assert caught.value.field == "kind"
    message = convert.leg_to_wire(make_leg())
    message.peer.address = ""
    with pytest.raises(InvalidRequest) as caught:
        convert.leg_from_wire(message)
    assert caught.value.field == "peer"


# ---- rules

RULES = LegRules(layout=LAYOUT, num_blocks=8, max_model_len=64, vocab_size=100, worker_id="p")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("leg", "field"),
    [
        (make_leg(key=LegKey("", 0, 0)), "request_id"),
        (make_leg(key=LegKey("x" * 129, 0, 0)), "request_id"),
        (make_leg(handoff_id="x" * 129), "handoff_id"),
        (make_leg(waited_s=-0.1), "waited_s"),
        (make_leg(waited_s=NAN), "waited_s"),
        (make_leg(waited_s=INF), "waited_s"),
        (make_leg(num_preemptions=-1), "num_preemptions"),
        (make_leg(num_preemptions=MAX_PREEMPTIONS + 1), "num_preemptions"),
        (make_leg(prompt_ids=()), "prompt_ids"),
        (make_leg(prompt_ids=(1, 100)), "prompt_ids"),
        (make_leg(output_ids=(100,)), "output_ids"),
        (make_leg(prompt_ids=(1,) * 57), "max_tokens"),
        (make_leg(kind=LegKind.DECODE, prompt_ids=(1,) * 26), "max_tokens"),
        (make_leg(prompt_ids=(1,) * 33), "max_tokens"),
        (make_leg(params={"max_tokens": 0}, output_ids=(1,)), "max_tokens"),
        (make_leg(params={"max_tokens": 0}, kind=LegKind.DECODE), "max_tokens"),
        (make_leg(output_ids=(1,) * 8), "max_tokens"),
        (make_leg(params={"temperature": -1.0}), "temperature"),
        (make_leg(params={"temperature": NAN}), "temperature"),
        (make_leg(params={"temperature": INF}), "temperature"),
        (make_leg(params={"top_p": 0.0}), "top_p"),
        (make_leg(params={"top_p": NAN}), "top_p"),
        (make_leg(params={"top_k": -1}), "top_k"),
        (make_leg(handoff_id=""), "handoff_id"),
        (make_leg(kind=LegKind.DECODE, handoff_id=""), "handoff_id"),
        (make_leg(peer=None), "peer"),
        (make_leg(peer=Peer(worker_id="p", incarnation="1", address="a")), "peer"),
    ],
)
def test_a_bad_leg_is_refused_by_the_name_of_its_field(leg, field):
    with pytest.raises(InvalidRequest) as caught:
        RULES.check(leg)
    assert caught.value.field == field


@pytest.mark.parametrize("remaining_s", [0.0, -1.0, NAN])
def test_a_leg_past_its_deadline_is_refused(remaining_s):
    with pytest.raises(DeadlineExceeded):
        RULES.check(make_leg(remaining_s=remaining_s))


@pytest.mark.parametrize(
    "leg",
    [
        make_leg(),
        make_leg(prompt_ids=(1,) * 32),
        make_leg(params={"max_tokens": 1}, handoff_id="", peer=None),
        make_leg(params={"max_tokens": 0}, handoff_id="", peer=None),
        make_leg(params={"max_tokens": 0}, kind=LegKind.LOCAL, prompt_ids=(1,) * 32),
        make_leg(kind=LegKind.DECODE, peer=None, prompt_ids=(1,) * 25),
        make_leg(kind=LegKind.LOCAL, handoff_id="", peer=None),
    ],
)
def test_what_can_be_served_passes(leg):
    RULES.check(leg)


# ---- the book


class ListSink:
    def __init__(self) -> None:
        self.messages = []
        self.notices = []

    def emit(self, tokens, ends, notices=(), prompts=()) -> None:
        self.messages.append((list(tokens), list(ends)))
        self.notices.extend(notices)


def test_a_step_is_one_message_for_each_router():
    book, one, other = LegBook(), ListSink(), ListSink()
    legs = [book.open(make_leg(key=LegKey(f"r{i}", 0, 0)), one, 0.0) for i in range(2)]
    legs.append(book.open(make_leg(key=LegKey("r2", 0, 0)), other, 0.0))
    for opened in legs:
        book.token(opened, Token(opened.key, 0, 1))
    book.end(legs[0], finish_reason=FinishReason.STOP)
    book.flush()
    book.flush()
    assert [(len(t), len(e)) for t, e in one.messages] == [(2, 1)]
    assert [(len(t), len(e)) for t, e in other.messages] == [(1, 0)]
    assert legs[0].key not in book
    assert book.counts == {"received": 3, "stop": 1}


def test_a_leg_goes_on_counting_its_preemptions_and_tells_each_at_once():
    """Also of one that is given up: another attempt goes on from there."""
    book, sink = LegBook(), ListSink()
    opened = book.open(make_leg(num_preemptions=2), sink, 0.0)
    assert opened.sequence(frozenset(), 0.0).num_preemptions_before == 2
    opened.give_up(AbortCause.CANCELLED, None)
    told = [Preempted(opened.key, 3), Preempted(make_key("another half's"), 1)]
    book.preempted(told, {opened.key})
    book.flush()
    assert sink.notices == told[:1]
    opened.preempted(1)
    assert opened.sequence(frozenset(), 0.0).num_preemptions_before == 3, "old word is no news"


def test_the_engine_is_told_what_the_order_goes_by():
    said = {"expected_tokens": 7, "priority": "low", "tenant": "t"}
    sequence = LegBook().open(make_leg(**said), ListSink(), 0.0).sequence(frozenset(), 0.0)
    assert {name: getattr(sequence, name) for name in said} == said


def test_a_leg_goes_on_aging_and_is_measured_from_when_it_came():
    opened = LegBook().open(make_leg(waited_s=3.0), ListSink(), 10.0)
    assert opened.arrived == 7.0
    sequence = opened.sequence(frozenset(), 11.0)
    assert (sequence.arrived, sequence.entered) == (7.0, 11.0)
    assert finish.end_of(sequence, 13.0, None, None).queue_s == 2.0


def test_legs_that_differ_by_a_moment_go_in_the_order_in_which_they_came():
    """What they waited is measured in two processes, and their way between them is not in it."""
    book = LegBook()
    waits = {"first": 1.0, "a moment more": 1.2, "older": 3.0, "younger": 0.5}
    ages = [
        book.open(make_leg(key=make_key(name), waited_s=waited_s), ListSink(), 10.0).arrived
        for name, waited_s in waits.items()
    ]
    assert ages == [9.0, 9.0, 7.0, 9.5]


def test_the_book_tells_of_every_change():
    changes = []
    book = LegBook(lambda: changes.append(1))
    book.end(book.open(make_leg(), ListSink(), 0.0))
    assert len(changes) == 2
