"""Where a handoff can stand, and what can befall it there."""

from cluster.errors import EngineFault, HandoffFailed, WorkerLost
from cluster.handoff import AbortCause, Commit, Credit, ManifestBytes, Offer
from tests.factories import make_key
from tests.lifecycle.pair import DEADLINE_S, LEASE_S, PATIENCE_S, Pair

KEY = make_key()
FULL = ("someone", "else")


def fill_decode(pair: Pair) -> None:
    pair.d_pool.allocate(pair.d_pool.num_blocks, FULL)


# ---- where it stands


async def queued(pair: Pair):
    pair.start()


async def dialling_while_computing(pair: Pair):
    pair.dialer.may_dial.clear()
    pair.start()
    await pair.step_prefill()


async def dialling_when_exported(pair: Pair):
    pair.dialer.may_dial.clear()
    pair.start()
    await pair.prefill_all()


async def offer_on_its_way(pair: Pair):
    pair.wire.hold = {Offer}
    pair.start()
    await pair.step_prefill()


async def offer_without_leg(pair: Pair):
    pair.start_prefill()
    await pair.step_prefill()


async def waiting_for_blocks(pair: Pair):
    fill_decode(pair)
    pair.start()
    await pair.step_prefill()


async def exported_and_waiting_for_blocks(pair: Pair):
    fill_decode(pair)
    pair.start()
    await pair.prefill_all()


async def credit_on_its_way_while_computing(pair: Pair):
    pair.wire.hold = {Credit}
    pair.start()
    await pair.step_prefill()


async def credit_on_its_way(pair: Pair):
    pair.wire.hold = {Credit}
    pair.start()
    await pair.prefill_all()


async def first_manifest_on_its_way(pair: Pair):
    pair.wire.hold = {ManifestBytes}
    pair.start()
    await pair.step_prefill()


async def first_segment_unread(pair: Pair):
    pair.wire.holds_bytes = True
    pair.start()
    await pair.step_prefill()


async def first_segment_not_landed(pair: Pair):
    pair.wire.holds_landing = True
    pair.start()
    await pair.step_prefill()


async def first_layers_sent(pair: Pair):
    """Out of a step that runs; so do the next two begin."""
    pair.start()
    pair.p_engine.begin()
    await pair.settle()
    pair.p_engine.store(2)
    await pair.settle()


async def all_layers_sent(pair: Pair):
    """Nothing is left but the tokens, which the step has not drawn."""
    await first_layers_sent(pair)
    pair.p_engine.store(4)
    await pair.settle()


async def first_layers_unread(pair: Pair):
    pair.wire.holds_bytes = True
    await first_layers_sent(pair)


async def first_layers_not_landed(pair: Pair):
    pair.wire.holds_landing = True
    await first_layers_sent(pair)


async def between_segments(pair: Pair):
    pair.start()
    await pair.step_prefill()


async def exported_with_the_first_segment_unread(pair: Pair):
    pair.wire.holds_bytes = True
    pair.start()
    await pair.prefill_all()


async def last_manifest_on_its_way(pair: Pair):
    pair.start()
    await pair.step_prefill(2)
    pair.wire.hold = {ManifestBytes}
    await pair.prefill_all()


async def last_segment_unread(pair: Pair):
    pair.start()
    await pair.step_prefill(2)
    pair.wire.holds_bytes = True
    await pair.prefill_all()


async def last_segment_not_landed(pair: Pair):
    pair.start()
    await pair.step_prefill(2)
    pair.wire.holds_landing = True
    await pair.prefill_all()


async def refused_while_computing(pair: Pair):
    await waiting_for_blocks(pair)
    pair.pass_time(PATIENCE_S)
    await pair.settle()


async def refused_when_exported(pair: Pair):
    await exported_and_waiting_for_blocks(pair)
    pair.pass_time(PATIENCE_S)
    await pair.settle()


async def redirected_and_dialling(pair: Pair):
    await refused_while_computing(pair)
    pair.dialer.may_dial.clear()
    pair.redirect("d")
    await pair.settle()


async def redirected_and_waiting_for_blocks(pair: Pair):
    await refused_when_exported(pair)
    pair.redirect("d")
    await pair.settle()


async def redirected_between_segments(pair: Pair):
    await refused_while_computing(pair)
    pair.d_pool.release(FULL)
    pair.redirect("d")
    await pair.settle()


async def redirected_and_unread(pair: Pair):
    await refused_when_exported(pair)
    pair.d_pool.release(FULL)
    pair.wire.holds_bytes = True
    pair.redirect("d")
    await pair.settle()


async def commit_on_its_way(pair: Pair):
    pair.wire.hold = {Commit}
    pair.start()
    await pair.prefill_all()


async def committed(pair: Pair):
    pair.start()
    await pair.prefill_all()


async def streaming(pair: Pair):
    pair.start()
    await pair.prefill_all()
    await pair.step_decode(2)


UNLINKED = (queued, dialling_while_computing, dialling_when_exported)
KNOWN = (
    offer_without_leg, waiting_for_blocks, exported_and_waiting_for_blocks,
    credit_on_its_way_while_computing, credit_on_its_way, first_manifest_on_its_way,
    first_layers_sent, first_layers_unread, first_layers_not_landed,
    first_segment_unread, first_segment_not_landed, between_segments,
    exported_with_the_first_segment_unread, last_manifest_on_its_way, last_segment_unread,
    last_segment_not_landed, redirected_and_waiting_for_blocks, redirected_between_segments,
    redirected_and_unread,
)  # fmt: skip
"""The decode worker was offered the KV, and has not taken it over."""
OPEN_TO_REDIRECTS = (*UNLINKED, offer_on_its_way, *KNOWN)
"""The export is with nobody else, and may go to another at any time."""
WAITING = (refused_while_computing, refused_when_exported)
"""The export waits for a redirect."""
COMMITTED = (commit_on_its_way, committed, streaming)
STATES = (*OPEN_TO_REDIRECTS, *WAITING, redirected_and_dialling, *COMMITTED)


# ---- what befalls it


def abort_prefill(pair: Pair):
    pair.prefill.abort_leg(KEY, AbortCause.CANCELLED)


def abort_decode(pair: Pair):
    for side in pair.sides.values():
        side.half.abort_leg(KEY, AbortCause.CANCELLED)


def abort_both(pair: Pair):
    abort_prefill(pair)
    abort_decode(pair)


def stop_string(pair: Pair):
    pair.prefill.abort_leg(KEY, AbortCause.STOPPED)
    pair.decode.abort_leg(KEY, AbortCause.STOPPED)


def lose_router_of_prefill(pair: Pair):
    pair.prefill.router_lost(pair.p_sink, AbortCause.CANCELLED)


def lose_router_of_decode(pair: Pair):
    pair.decode.router_lost(pair.d_sink, AbortCause.CANCELLED)


def take_the_grant_back(pair: Pair):
    pair.decode.abort_leg(KEY, AbortCause.LEASE)


def cut_link(pair: Pair):
    pair.wire.cut()
    pair.dialer.error = HandoffFailed("no link")


def cut_and_dial_again(pair: Pair):
    pair.wire.cut()
    pair.new_wire()


def fail_prefill_engine(pair: Pair):
    pair.p_engine.fail()
    pair.prefill.close(AbortCause.FAULT, EngineFault("the engine failed"))


def fail_decode_engine(pair: Pair):
    pair.d_engine.fail()
    pair.decode.close(AbortCause.FAULT, EngineFault("the engine failed"))


def stop_prefill(pair: Pair):
    pair.stop_prefill()
    pair.dialer.error = HandoffFailed("stopping")


def stop_decode(pair: Pair):
    pair.stop_decode()
    pair.dialer.error = WorkerLost("stopping")


def redirect_to_another(pair: Pair):
    pair.add_decode("e")
    pair.redirect("e")


def redirect_to_the_same(pair: Pair):
    pair.redirect("d")


def redirect_to_a_full_one(pair: Pair):
    side = pair.add_decode("e")
    side.pool.allocate(side.pool.num_blocks, FULL)
    pair.redirect("e")


def pass_patience(pair: Pair):
    pair.pass_time(PATIENCE_S + 0.1)


def pass_lease(pair: Pair):
    pair.pass_time(LEASE_S + 1)


def pass_deadline(pair: Pair):
    pair.pass_time(DEADLINE_S + 1)


FAULTS = (
    abort_prefill, abort_decode, abort_both, stop_string, lose_router_of_prefill,
    lose_router_of_decode, take_the_grant_back, cut_link, cut_and_dial_again, fail_prefill_engine,
    fail_decode_engine, stop_prefill, stop_decode, redirect_to_another, redirect_to_the_same,
    redirect_to_a_full_one, pass_patience, pass_lease, pass_deadline,
)  # fmt: skip


def names(functions) -> list[str]:
    return [function.__name__ for function in functions]


def free_everything(pair: Pair) -> None:
    for side in pair.sides.values():
        side.pool.release(FULL)
