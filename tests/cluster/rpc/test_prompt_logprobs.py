"""A prompt's log-probabilities on their way from a half to the router."""

from cluster.handoff import AbortCause
from cluster.request import (
    FinishReason,
    Leg,
    LegEnd,
    LegKey,
    LegKind,
    PromptLogprobs,
    SamplingParams,
    Token,
    TokenLogprobs,
)
from cluster.rpc import convert
from cluster.rpc.legs import LegBook
from cluster.wire import worker_pb2 as wire

A, B, C = (LegKey(name, 0, 0) for name in "abc")


def make_run(key=A, start=1, count=2, num_top=1) -> PromptLogprobs:
    top = tuple((i, -0.5 - i) for i in range(num_top))
    return PromptLogprobs(key, start, tuple(TokenLogprobs(-1.5 - i, top) for i in range(count)))


class Sink:
    def __init__(self):
        self.messages = []

    def emit(self, tokens, ends, waiting=(), prompts=()):
        self.messages.append((list(prompts), list(tokens), list(ends)))


def opened(book, key, sink):
    leg = Leg(
        key=key, kind=LegKind.LOCAL, prompt_ids=(1, 2, 3), params=SamplingParams(max_tokens=1),
        remaining_s=9.0,
    )  # fmt: skip
    return book.open(leg, sink, 0.0)


def test_a_run_survives_the_wire():
    for run in (make_run(count=64, num_top=20), make_run(start=65, num_top=0), make_run(count=0)):
        data = convert.prompts_to_wire(run).SerializeToString()
        assert convert.prompts_from_wire(wire.PromptLogprobs.FromString(data)) == run


def test_a_half_passes_on_what_its_own_open_legs_ask_for():
    """An aborted leg's, another half's and an unknown leg's are dropped."""
    book, sink = LegBook(), Sink()
    leg = opened(book, A, sink)
    opened(book, B, sink).give_up(AbortCause.CANCELLED, None)
    opened(book, C, sink)
    unknown = LegKey("d", 0, 0)
    book.prompts([make_run(key) for key in (A, B, C, unknown)], {A, B, unknown})
    book.token(leg, Token(A, 0, 5))
    book.end(leg, finish_reason=FinishReason.LENGTH)
    book.flush()
    end = LegEnd(key=A, finish_reason=FinishReason.LENGTH)
    assert sink.messages == [([make_run()], [Token(A, 0, 5)], [end])]
