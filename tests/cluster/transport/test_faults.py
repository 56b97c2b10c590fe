"""The fault switch: what it is told happens, to the message it names, as often as it says."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cluster.errors import InvalidRequest
from cluster.transport.base import (
    RECEIVER,
    SENDER,
    PeerLost,
    Rendezvous,
    TransferTimeout,
    TransportError,
)
from cluster.transport.faults import VERBS, Fault, FaultSwitch, Point, Verb
from cluster.transport.faulty_channel import FaultyTransport
from cluster.transport.loopback import LoopbackTransport

LONG_S = 10.0


class Board(Rendezvous):
    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self.changed:
            self.entries[key] = value
            self.changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.entries, timeout_s)
            return self.entries[key]


class Link:
    """Both ends of one link of worker p-0 to worker d-0, each with a switch and a thread."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.threads = threads
        self.switches = FaultSwitch(), FaultSwitch()
        shared, board = LoopbackTransport(), Board()
        opening = [
            threads.submit(
                FaultyTransport(shared, switch).open,
                link_id="p-0>d-0/7", rank=rank, rendezvous=board, timeout_s=LONG_S,
            )
            for rank, switch in zip((SENDER, RECEIVER), self.switches, strict=True)
        ]  # fmt: skip
        self.sender, self.receiver = (end.result(LONG_S) for end in opening)

    def move(self, *messages: list[int], timeout_s: float = LONG_S) -> list[list[int]]:
        """Send them all and receive as many; raises what the receiver met, else the sender."""
        sending = self.threads.submit(self._send, messages, timeout_s)
        received = []
        try:
            for message in messages:
                into = torch.full((len(message),), 99, dtype=torch.uint8)
                self.receiver.recv(into, timeout_s)
                received.append(into.tolist())
        finally:
            error = sending.exception(LONG_S)
        if error is not None:
            raise error
        return received

    def _send(self, messages, timeout_s: float) -> None:
        for message in messages:
            self.sender.send(torch.tensor(message, dtype=torch.uint8), timeout_s)


@pytest.fixture
def link():
    with ThreadPoolExecutor(2) as threads:
        link = Link(threads)
        yield link
        link.sender.close()
        link.receiver.close()


def fault(verb: Verb, point: Point, **options) -> Fault:
    return Fault(verb=verb, point=point, **options)


def test_without_a_plan_all_passes_and_is_counted(link):
    assert link.move([1, 2], [3]) == [[1, 2], [3]]
    assert link.switches[0].passed() == {Point.SEND: 2}
    assert link.switches[1].passed() == {Point.RECV: 2, Point.RECEIVED: 2}
    assert link.switches[0].fired() == ()


@pytest.mark.parametrize(
    ("end", "verb", "point", "expected"),
    [
        (SENDER, Verb.CORRUPT, Point.SEND, [3, 251]),
        (RECEIVER, Verb.CORRUPT, Point.RECV, [3, 251]),
        (RECEIVER, Verb.DROP, Point.RECV, [99, 99]),
        (RECEIVER, Verb.TRUNCATE, Point.RECV, [3, 99]),
    ],
)
def test_the_second_message_is_not_what_was_sent(link, end, verb, point, expected):
    link.switches[end].set([fault(verb, point, nth=2, offset=-1)])
    assert link.move([1, 2], [3, 4], [5, 6]) == [[1, 2], expected, [5, 6]]
    assert link.switches[end].fired() == (1,)


def test_a_message_said_to_be_there_before_it_came_is_received_next(link):
    link.switches[RECEIVER].set([fault(Verb.EARLY, Point.RECV)])
    sending = link.threads.submit(link._send, ([1],), LONG_S)
    into = torch.tensor([99], dtype=torch.uint8)
    link.receiver.recv(into, LONG_S)
    assert into.tolist() == [99]
    link.receiver.recv(into, LONG_S)
    assert into.tolist() == [1]
    sending.result(LONG_S)


def test_a_shorter_message_is_sent(link):
    link.switches[SENDER].set([fault(Verb.TRUNCATE, Point.SEND)])
    with pytest.raises(TransportError, match="1 bytes where 2 were expected"):
        link.move([1, 2])


def test_a_lost_message_is_one_the_receiver_waits_for(link):
    link.switches[SENDER].set([fault(Verb.DROP, Point.SEND)])
    with pytest.raises(TransferTimeout):
        link.move([1], timeout_s=0.05)
    assert link.switches[SENDER].fired() == (1,)


def test_the_nth_breaks_the_channel_for_ever(link):
    link.switches[SENDER].set([fault(Verb.FAIL, Point.SEND, nth=2)])
    with pytest.raises(PeerLost):
        link.move([1], [2], timeout_s=LONG_S)
    assert link.sender.is_dead


@pytest.mark.parametrize(("end", "point"), [(SENDER, Point.SEND), (RECEIVER, Point.RECEIVED)])
def test_what_is_held_goes_on_when_the_plan_is_cleared(link, end, point):
    switch = link.switches[end]
    switch.set([fault(Verb.HOLD, point)])
    moving = link.threads.submit(link.move, [1])
    with ThreadPoolExecutor(1) as watcher:
        assert watcher.submit(until_fired, switch).result(LONG_S)
        assert not moving.done()
        switch.set(())
        assert moving.result(LONG_S) == [[1]]


def until_fired(switch: FaultSwitch) -> bool:
    while not sum(switch.fired()):
        threading.Event().wait(0.001)
    return True


def test_closing_ends_what_is_held(link):
    link.switches[SENDER].set([fault(Verb.HOLD, Point.SEND)])
    sending = link.threads.submit(link._send, ([1],), LONG_S)
    assert until_fired(link.switches[SENDER])
    link.sender.close()
    with pytest.raises(PeerLost):
        sending.result(LONG_S)


def test_only_its_peer_is_met(link):
    switch = link.switches[SENDER]
    switch.set([fault(Verb.CORRUPT, Point.SEND, peer="d-1"), fault(Verb.CORRUPT, Point.SEND)])
    assert link.move([1]) == [[254]]
    assert switch.fired() == (0, 1)


def test_times_says_how_many_and_a_new_plan_counts_anew():
    switch = FaultSwitch()
    switch.set([fault(Verb.DROP, Point.COMMIT, nth=2, times=2)])
    assert [switch.at(Point.COMMIT) is not None for _ in range(5)] == [0, 1, 1, 0, 0]
    switch.set([fault(Verb.DROP, Point.COMMIT, nth=2, times=0)])
    assert [switch.at(Point.COMMIT) is not None for _ in range(4)] == [0, 1, 1, 1]
    assert (switch.fired(), switch.passed()) == ((3,), {Point.COMMIT: 4})


@pytest.mark.parametrize("point", list(Point))
def test_what_a_point_does_not_know_is_refused(point):
    for verb in set(Verb) - VERBS[point]:
        with pytest.raises(InvalidRequest, match=point.value):
            fault(verb, point)


def test_a_slow_link_takes_as_long_as_its_bytes(link):
    switch = link.switches[SENDER]
    switch.set([fault(Verb.DELAY, Point.SEND, times=0, seconds_per_byte=0.05)])

    began = time.monotonic()
    assert link.move([1, 2, 3, 4], [5]) == [[1, 2, 3, 4], [5]]

    assert time.monotonic() - began >= 5 * 0.05
    assert switch.fired() == (2,)


@pytest.mark.parametrize(
    "bad",
    [
        {"nth": 0},
        {"times": -1},
        {"seconds": -0.1},
        {"seconds_per_byte": 1e-6},
        {"seconds_per_token": 1e-6},
    ],
)
def test_numbers_that_make_no_sense_are_refused(bad):
    with pytest.raises(InvalidRequest):
        fault(Verb.DROP, Point.COMMIT, **bad)
