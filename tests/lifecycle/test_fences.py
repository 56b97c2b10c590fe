"""CASES P-21, S-13: late bytes reach nobody else's blocks, and nobody's bytes leave for another.

Each story is told twice: as the product is, and with its fence taken out, where it must go wrong;
so the story itself is shown to be one that a fence is needed for.
"""

import pytest

from cluster.handoff import AbortCause
from cluster.request import LegKind
from decode_worker import inbox
from decode_worker.landing import Landing
from tests.factories import expected_tokens, make_key, make_prompt, make_sequence
from tests.lifecycle.pair import MAX_TOKENS, NUM_PROMPT_TOKENS, Pair
from tests.lifecycle.states import (
    KEY,
    abort_decode,
    abort_prefill,
    cut_and_dial_again,
    exported_with_the_first_segment_unread,
    first_layers_not_landed,
    first_layers_unread,
    first_segment_not_landed,
    first_segment_unread,
    last_segment_not_landed,
    last_segment_unread,
    names,
    pass_deadline,
    redirect_to_another,
)

NEXT = make_key("next")
ROUNDS = 50


class Unfenced(Landing):
    """A landing that writes where it was once allowed to, without looking again."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._reserved = ()

    def writable(self):
        self._reserved = super().writable() or self._reserved
        return self._reserved

    def announce(self, manifest):
        is_first = super().announce(manifest)
        self._reserved = self._pool.importing(self.handoff.handoff_id)
        return is_first


@pytest.fixture(params=[True, False], ids=["fenced", "unfenced"])
def is_fenced(request):
    return request.param


# ---- the receiver's side: blocks that are given to the next while bytes are on their way


async def run_next(pair: Pair, wire, reserved: tuple[int, ...]) -> None:
    """The next request computes in the blocks that the aborted handoff had; then its bytes come."""
    pair.start_local("next")
    await pair.step_decode(3)
    assert pair.d_sink.output(NEXT)
    assert pair.d_pool.blocks_of(NEXT)[: len(reserved)] == reserved
    wire.let_go()
    await pair.settle()
    await pair.run_dry()


LATE = (
    first_layers_unread, first_layers_not_landed, first_segment_unread, first_segment_not_landed,
    exported_with_the_first_segment_unread, last_segment_unread, last_segment_not_landed,
)  # fmt: skip
ENDS = (abort_decode, abort_prefill, pass_deadline, redirect_to_another)


@pytest.mark.parametrize("end", ENDS, ids=names(ENDS))
@pytest.mark.parametrize("state", LATE, ids=names(LATE))
async def test_late_bytes_do_not_reach_the_next_request(monkeypatch, is_fenced, state, end):
    """Its pool is so small that the next one must get the same blocks."""
    if not is_fenced:
        monkeypatch.setattr(inbox, "Landing", Unfenced)
    pair = Pair(d_blocks=6)
    await state(pair)
    reserved = pair.d_pool.importing("handoff-r")
    end(pair)
    await pair.settle()
    assert KEY in pair.d_sink.ends
    wire = pair.wire
    if not is_fenced:
        with pytest.raises(AssertionError, match=r"another's|was never computed"):
            await run_next(pair, wire, reserved)
        return
    await run_next(pair, wire, reserved)
    assert pair.d_sink.output(NEXT) == expected_tokens("next", MAX_TOKENS)
    assert pair.decode.inbox.counts["dropped_segments"] >= 1
    await pair.run_dry()
    for side in pair.sides.values():
        side.half.abort_leg(KEY, AbortCause.CANCELLED)
    abort_prefill(pair)
    await pair.run_dry()
    pair.assert_idle()


async def test_late_bytes_of_fifty_aborts_in_a_row(monkeypatch, is_fenced):
    """A transfer is held up, its request given up, and the next one gets its blocks."""
    if not is_fenced:
        monkeypatch.setattr(inbox, "Landing", Unfenced)
    pair = Pair(d_blocks=6)
    num_wrong = 0
    for round_number in range(ROUNDS):
        late, request_id = f"late{round_number}", f"next{round_number}"
        pair.wire.released.clear()
        pair.wire.holds_landing = True
        pair.start(late)
        await pair.step_prefill(1 + round_number % 3)
        pair.decode.abort_leg(make_key(late), AbortCause.CANCELLED)
        pair.start_local(request_id)
        await pair.step_decode(4)
        try:
            await pair.run_dry()
        except AssertionError:
            num_wrong += 1
            pair.decode.abort_leg(make_key(request_id), AbortCause.CANCELLED)
            await pair.run_dry()
            continue
        key = make_key(request_id)
        assert pair.d_sink.output(key) == expected_tokens(request_id, MAX_TOKENS)
    assert num_wrong == (0 if is_fenced else ROUNDS)
    assert pair.decode.inbox.counts["dropped_segments"] >= ROUNDS
    pair.assert_idle()


async def test_late_bytes_of_an_old_link_do_not_reach_what_came_over_a_new_one(
    monkeypatch, is_fenced
):
    """The next request's KV came by a handoff of its own, into the same blocks."""
    if not is_fenced:
        monkeypatch.setattr(inbox, "Landing", Unfenced)
    pair = Pair(d_blocks=6)
    await first_segment_not_landed(pair)
    old = pair.wire
    pair.new_wire()
    abort_decode(pair)
    pair.start("next")
    await pair.prefill_all()
    assert pair.d_sink.output(NEXT) == expected_tokens("next", 1)
    old.let_go()
    await pair.settle()
    if not is_fenced:
        with pytest.raises(AssertionError, match="another's"):
            await pair.run_dry()
        return
    await pair.run_dry()
    assert pair.d_sink.output(NEXT) == expected_tokens("next", MAX_TOKENS)
    abort_prefill(pair)
    await pair.run_dry()
    pair.assert_idle()


# ---- the sender's side: blocks that are given to the next while they are being read


def take_out_the_fence(pair: Pair) -> None:
    pair.p_pool.share = lambda old, block_ids, new: None


def kv_of(pair: Pair, request_id: str) -> list[dict]:
    """What the blocks of a request's prompt hold, by a worker that computed nothing else."""
    cache = pair.p_engine.runner
    sequence = make_sequence(
        request_id, prompt_ids=make_prompt(NUM_PROMPT_TOKENS, request_id), num_prompt_tokens=0
    )
    probe = type(cache)()
    sequence.num_computed_tokens = NUM_PROMPT_TOKENS
    probe.imported(sequence, range(5))
    slots = probe._slots
    return [{i: slots[b, i] for i in range(4) if (b, i) in slots} for b in range(5)]


UNREAD = (first_segment_unread, exported_with_the_first_segment_unread, last_segment_unread)
GIVEN_UP = (abort_prefill, pass_deadline, cut_and_dial_again)


@pytest.mark.parametrize("state", UNREAD, ids=names(UNREAD))
async def test_what_was_announced_is_sent_as_it_was(is_fenced, state):
    """CASES P-21, mirror: the next request must not get blocks that are still to be read."""
    pair = Pair(p_blocks=10)
    if not is_fenced:
        take_out_the_fence(pair)
    await state(pair)
    num_before = len(pair.wire.sent)
    abort_prefill(pair)
    await pair.step_prefill()
    leg = pair.leg(LegKind.PREFILL, "next", num_prompt_tokens=34, handoff_id="", peer=None)
    pair.prefill.start_leg(leg, pair.p_sink)
    for _ in range(6):
        await pair.step_prefill()
    pair.wire.let_go()
    await pair.settle()
    whole = kv_of(pair, "r")
    segments = pair.wire.sent[num_before:]
    assert segments
    start = sum(map(len, pair.wire.sent[:num_before]))
    sent = [block for segment in segments for block in segment]
    assert (sent == whole[start : start + len(sent)]) == is_fenced
    await pair.run_dry()


async def test_what_is_read_of_fifty_aborts_in_a_row(is_fenced):
    """CASES P-21, mirror: each time the next one computes over what is still to be read."""
    pair = Pair(p_blocks=10)
    if not is_fenced:
        take_out_the_fence(pair)
    num_wrong = 0
    for round_number in range(ROUNDS):
        late, following = f"late{round_number}", f"next{round_number}"
        pair.wire.released.clear()
        pair.wire.holds_bytes = True
        num_before = len(pair.wire.sent)
        pair.start(late)
        await pair.step_prefill(1 + round_number % 2)
        pair.prefill.abort_leg(make_key(late), AbortCause.CANCELLED)
        leg = pair.leg(LegKind.PREFILL, following, num_prompt_tokens=34, handoff_id="", peer=None)
        pair.prefill.start_leg(leg, pair.p_sink)
        await pair.step_prefill(6)
        pair.wire.let_go()
        await pair.settle()
        sent = [block for segment in pair.wire.sent[num_before:] for block in segment]
        assert sent, "nothing was under way"
        num_wrong += sent != kv_of(pair, late)[: len(sent)]
        await pair.run_dry()
    assert num_wrong == (0 if is_fenced else ROUNDS)
    if is_fenced:
        pair.assert_idle()


async def preempted_while_unread(pair: Pair) -> None:
    """An older sequence of the same engine takes our prompt's blocks while the link waits."""
    older = make_sequence("older", num_prompt_tokens=4, max_tokens=60, arrived=pair.clock.now())
    pair.p_engine.add(older)
    await pair.step_prefill()
    pair.wire.holds_bytes = True
    pair.start(num_prompt_tokens=40)
    await pair.step_prefill()
    pair.p_pool.allocate(pair.p_pool.num_free, "filler")
    while pair.p_engine.scheduler.num_preemptions == 0:
        await pair.step_prefill()
    # It grows into what our prompt had, but not into what is being read.
    for _ in range(30):
        await pair.step_prefill()
    pair.wire.let_go()
    await pair.settle()
    pair.p_pool.release("filler")
    await pair.run_dry()


async def test_a_preempted_prompt_keeps_what_is_being_read(is_fenced):
    """CASES P-15, P-21: its blocks go to another, all but those of the segment under way."""
    pair = Pair(p_blocks=24)
    if not is_fenced:
        take_out_the_fence(pair)
        with pytest.raises(AssertionError, match="another's"):
            await preempted_while_unread(pair)
        return
    await preempted_while_unread(pair)
    assert pair.p_engine.scheduler.num_preemptions > 0
    assert pair.d_sink.output(KEY) == expected_tokens("r", MAX_TOKENS)
    pair.assert_idle()


@pytest.mark.parametrize("end", GIVEN_UP, ids=names(GIVEN_UP))
@pytest.mark.parametrize("state", UNREAD, ids=names(UNREAD))
async def test_blocks_that_are_being_read_are_held_until_they_were(state, end):
    """And all others are free at once."""
    pair = Pair()
    await state(pair)
    wire = pair.wire
    end(pair)
    abort_prefill(pair)
    wire_is_lost = not wire.sender.is_open
    await pair.step_prefill()
    num_unread = 0 if wire_is_lost else {0: 2, 2: 1}[len(wire.sent)]
    assert pair.p_pool.counts().held == num_unread
    wire.let_go()
    await pair.settle()
    assert pair.p_pool.num_free == pair.p_pool.num_blocks
