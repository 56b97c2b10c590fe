"""Two prefill and two decode GPUs: by trying, every order of events ends; by waiting, some do not.

Each of the four links has transfers to make. A state is what locks, machines and words on their
way are; a move is the delivery of one word, or the end of one transfer that both ends have begun.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import product

import pytest

from cluster.transport.transfer_lock import LockWord, ReceiverTurns, SenderTurns, TransferLock


@dataclass(eq=False)
class ModelLink:
    """One link with both ends' machines; its two threads want one transfer after the other."""

    sending_lock: TransferLock
    receiving_lock: TransferLock
    num_left: int
    down: deque[LockWord] = field(default_factory=deque)
    up: deque[LockWord] = field(default_factory=deque)
    sends: bool = False
    receives: bool = False
    receiver_wants: bool = False

    def __post_init__(self) -> None:
        self.sender = SenderTurns(self.sending_lock, self.down.append)
        self.receiver = ReceiverTurns(self.receiving_lock, self.up.append)
        self.sender.want(self.may_send)

    def may_send(self) -> None:
        self.sends = True

    def may_receive(self) -> None:
        assert self.receiving_lock.is_taken
        self.receives = True

    def moves(self) -> list[str]:
        """What can happen next."""
        able = {
            "down": bool(self.down),
            "up": bool(self.up),
            "manifest": self.num_left > 0 and not self.receiver_wants,
            "end": self.sends and self.receives,
        }
        return [name for name, is_able in able.items() if is_able]

    def move(self, name: str) -> None:
        if name == "down":
            self.receiver.hear(self.down.popleft())
        elif name == "up":
            self.sender.hear(self.up.popleft())
        elif name == "manifest":  # the receiving thread comes to the transfer
            self.receiver_wants = True
            self.receiver.want(self.may_receive)
        else:
            self.sends = self.receives = self.receiver_wants = False
            self.num_left -= 1
            self.receiver.done()
            self.sender.done()
            if self.num_left:
                self.sender.want(self.may_send)


class Model:
    """Two senders, two receivers, and all four links between them."""

    def __init__(self, num_transfers: int) -> None:
        self.locks = [TransferLock() for _ in range(4)]
        self.links = [
            ModelLink(self.locks[sender], self.locks[2 + receiver], num_transfers)
            for sender, receiver in product(range(2), range(2))
        ]

    def moves(self) -> list[tuple[int, str]]:
        return [(i, name) for i, link in enumerate(self.links) for name in link.moves()]

    def move(self, move: tuple[int, str]) -> None:
        index, name = move
        self.links[index].move(name)
        for lock in range(4):
            ends = [
                (link.sends, link.receives)[side]
                for link in self.links
                for side, held in enumerate((link.sending_lock, link.receiving_lock))
                if held is self.locks[lock]
            ]
            assert sum(ends) <= 1, "two transfers on one GPU"

    def check_over(self) -> None:
        assert [link.num_left for link in self.links] == [0] * 4
        assert not any(lock.is_taken for lock in self.locks)

    def key(self) -> tuple:
        """All that decides what can still happen."""
        holders = [lock._holder for lock in self.locks]
        machines = [m for link in self.links for m in (link.sender, link.receiver)]
        number = {machine: i for i, machine in enumerate(machines)}
        waiting = [tuple(number[retry.__self__] for retry in lock._waiting) for lock in self.locks]
        return (
            tuple(number.get(holder) for holder in holders),
            tuple(waiting),
            tuple(
                (
                    link.num_left, tuple(link.down), tuple(link.up), link.sends, link.receives,
                    link.receiver_wants, link.sender._on_ready is None, link.sender._is_asking,
                    link.sender._is_held_off, link.receiver._on_ready is None,
                    link.receiver._owes_word,
                )
                for link in self.links
            ),
        )  # fmt: skip


def replay(history: tuple[tuple[int, str], ...]) -> Model:
    model = Model(1)
    for move in history:
        model.move(move)
    return model


def test_from_every_state_with_try_locks_all_transfers_can_end():
    """All states that one transfer on each link can reach: none is stuck, and no loop is closed."""
    before: dict[tuple, set[tuple]] = {}
    ends, frontier = set(), [((), None)]
    while frontier:
        history, parent = frontier.pop()
        model = replay(history)
        key = model.key()
        is_new = key not in before
        before.setdefault(key, set()).add(parent)
        if not is_new:
            continue
        moves = model.moves()
        if not moves:
            model.check_over()
            ends.add(key)
        frontier.extend(((*history, move), key) for move in moves)
    assert len(before) > 100
    assert ends
    can_end, frontier = set(ends), list(ends)
    while frontier:
        for parent in before[frontier.pop()] - can_end - {None}:
            can_end.add(parent)
            frontier.append(parent)
    assert can_end == before.keys()


@pytest.mark.parametrize("seed", range(20))
def test_many_transfers_in_any_order_all_come_to_their_end(seed: int):
    dice = random.Random(seed)
    for num_transfers in range(1, 9):
        model = Model(num_transfers)
        for _ in range(100_000):
            moves = model.moves()
            if not moves:
                break
            model.move(dice.choice(moves))
        model.check_over()


def test_locks_that_are_waited_for_get_stuck():
    """What the try-locks are for: each end takes its own lock, then waits for the other end's.

    Both threads of a link begin a transfer as NCCL does: whoever comes first occupies its GPU and
    waits there for the peer. A state is who occupies which GPU.
    """
    links = list(product((0, 1), (2, 3)))
    free: tuple[int | None, ...] = (None,) * 4
    stuck, seen, frontier = [], set(), [(free, frozenset(links))]
    while frontier:
        state = frontier.pop()
        if state in seen:
            continue
        seen.add(state)
        occupied, left = state
        following = []
        for sender, receiver in left:
            link = links.index((sender, receiver))
            for gpu in (sender, receiver):
                if occupied[gpu] is None:
                    taken = (*occupied[:gpu], link, *occupied[gpu + 1 :])
                    following.append((taken, left))
            if occupied[sender] == occupied[receiver] == link:
                given = tuple(None if held == link else held for held in occupied)
                following.append((given, left - {(sender, receiver)}))
        if left and not following:
            stuck.append(occupied)
        frontier.extend(following)
    assert (free, frozenset()) in seen, "it can end well"
    # GPU 0 waits in link 0>2 for 2, 2 in 1>2 for 1, 1 in 1>3 for 3, and 3 in 0>3 for 0.
    assert (0, 3, 2, 1) in stuck


def test_a_lock_goes_to_whoever_asks_next_and_only_its_holder_gives_it_back():
    lock, woken = TransferLock(), []
    assert lock.try_take("a")
    assert not lock.try_take("b")
    lock.when_free(lambda: woken.append(lock.try_take("b")))
    lock.give_back("b")
    assert woken == []
    lock.give_back("a")
    assert woken == [True]
    lock.give_back("b")
    assert not lock.is_taken
    assert woken == [True]


def test_a_link_that_is_lost_while_it_asks_gives_its_lock_back():
    words: list[LockWord] = []
    lock = TransferLock()
    turns = SenderTurns(lock, words.append)
    turns.want(lambda: None)
    assert words == [LockWord.ASK]
    assert lock.is_taken
    turns.done()
    assert not lock.is_taken
    turns.hear(LockWord.GRANTED)
    assert not lock.is_taken


def test_a_receiver_whose_thread_is_elsewhere_is_busy_until_it_comes():
    words: list[LockWord] = []
    begun = []
    lock = TransferLock()
    turns = ReceiverTurns(lock, words.append)
    turns.hear(LockWord.ASK)
    assert words == [LockWord.BUSY]
    turns.want(lambda: begun.append(True))
    assert words == [LockWord.BUSY, LockWord.FREE]
    assert not lock.is_taken
    turns.hear(LockWord.ASK)
    assert words[-1] is LockWord.GRANTED
    assert begun == [True]
