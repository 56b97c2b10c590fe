"""Completions in the wrong order: each is of its own handoff, whichever is heard first."""

from __future__ import annotations

from cluster.handoff import AbortCause, AbortHandoff, Commit
from cluster.rpc.faults import FaultyLinkEvents
from cluster.transport.faults import Fault, FaultSwitch, Point, Verb
from tests.factories import expected_tokens, make_key
from tests.lifecycle.pair import MAX_TOKENS, Pair

SHORT, LONG = make_key("short"), make_key("long")


class Swapped:
    """Two handoffs on one link; the first message at ``point`` is heard after the one behind it."""

    def __init__(self, point: Point) -> None:
        self.pair = Pair()
        self.heard: list[tuple[type, str]] = []
        """Ends of handoffs, as the prefill worker hears them."""
        self.said: list[tuple[type, str]] = []
        """The same as the decode worker says them."""
        self._switch = FaultSwitch()
        end = self.pair.wire.sender
        self._half = end.events
        self._lane = FaultyLinkEvents(self, self._switch)
        end.events = self._lane
        self._switch.set([Fault(verb=Verb.REORDER, point=point)])
        signal = self.pair.wire.receiver.signal

        def say(message) -> None:
            _note(self.said, message)
            signal(message)

        self.pair.wire.receiver.signal = say

    def on_signal(self, link, message) -> None:
        _note(self.heard, message)
        self._half.on_signal(link, message)

    def on_link_lost(self, link, reason: str) -> None:
        self._half.on_link_lost(link, reason)

    async def begin(self) -> None:
        """Both have their credit, and nothing has landed; only the short one is all computed."""
        self.pair.wire.holds_landing = True
        self.pair.start("short", num_prompt_tokens=12)
        self.pair.start("long", num_prompt_tokens=40)
        await self.pair.step_prefill(2)
        assert self.pair.d_pool.counts().importing == 3 + 10
        assert self.said == []

    async def end_short(self) -> None:
        """The short one is handed over, and its sender has not heard of it."""
        self.pair.wire.let_go()
        for _ in range(3):
            await self.pair.settle()
        assert self.said[-1:] == [(Commit, "handoff-short")]

    async def check(self, *heard: tuple[type, str]) -> None:
        """They were heard in this order, and said in the other; nothing is left of either."""
        await self.pair.run_dry()
        assert self.heard == list(heard) == self.said[::-1]
        assert self._switch.fired() == (1,)
        assert self.pair.p_sink.ends[SHORT].error is None
        assert self.pair.d_sink.output(SHORT) == expected_tokens("short", MAX_TOKENS)
        self.pair.assert_idle()


def _note(messages: list[tuple[type, str]], message) -> None:
    if isinstance(message, Commit | AbortHandoff):
        messages.append((type(message), message.handoff_id))


async def test_two_commits_may_swap():
    """P-21, S-13: each gives back the blocks of its own export, and those only."""
    scene = Swapped(Point.COMMIT)
    await scene.begin()
    await scene.end_short()
    assert (scene.heard, len(scene.pair.prefill.outbox)) == ([], 2)
    await scene.check((Commit, "handoff-long"), (Commit, "handoff-short"))
    assert list(scene.pair.p_sink.ends) == [LONG, SHORT]
    assert scene.pair.p_sink.ends[LONG].error is None
    assert scene.pair.d_sink.output(LONG) == expected_tokens("long", MAX_TOKENS)


async def test_an_abort_may_overtake_a_commit():
    """P-21: the one whose end is heard first was aborted; the other one was not."""
    scene = Swapped(Point.COMMIT)
    await scene.begin()
    await scene.end_short()
    assert scene.heard == []
    scene.pair.decode.abort_leg(LONG, AbortCause.CANCELLED)
    await scene.check((AbortHandoff, "handoff-long"), (Commit, "handoff-short"))


async def test_a_commit_may_overtake_an_abort():
    """P-21: what was aborted first is still computed, and sent to nobody, until that is heard."""
    scene = Swapped(Point.ABORT)
    await scene.begin()
    scene.pair.decode.abort_leg(LONG, AbortCause.CANCELLED)
    await scene.end_short()
    await scene.check((Commit, "handoff-short"), (AbortHandoff, "handoff-long"))
