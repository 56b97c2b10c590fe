"""Which transport a link gets: by where its two ends are, the same at both."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.config import TransportKind
from cluster.transport.auto import AutoTransport, is_near, place_of
from cluster.transport.base import Rendezvous, TransportError
from cluster.transport.loopback import LoopbackTransport
from cluster.transport.shm import ShmTransport, host_id


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


@pytest.mark.parametrize(
    ("ours", "theirs", "near"),
    [
        ("a cpu", "a cpu", True),
        ("a cpu", "b cpu", False),
        ("a cpu", "a gpu-1", True),
        ("a gpu-1", "a gpu-1", True),
        ("a gpu-1", "a gpu-2", False),
        ("a gpu-1", "b gpu-2", False),
    ],
)
def test_links_within_a_host_are_near_unless_nccl_has_a_way(ours: str, theirs: str, near: bool):
    assert is_near(ours.encode(), theirs.encode()) is near
    assert is_near(theirs.encode(), ours.encode()) is near


def test_a_cpu_and_a_gpu_on_two_hosts_are_told_that_nothing_links_them():
    for ours, theirs in ((b"a cpu", b"b gpu-1"), (b"b gpu-1", b"a cpu")):
        with pytest.raises(TransportError, match="no transport in common"):
            is_near(ours, theirs)


@pytest.mark.parametrize("is_apart", [False, True])
def test_both_ends_come_to_the_same_choice_and_name_it(is_apart: bool):
    far = LoopbackTransport()
    ends = [AutoTransport(far=far), AutoTransport(far=far)]
    if is_apart:
        ends[1]._place = place_of("cpu", lambda: "another-host")
    board = Board()
    with ThreadPoolExecutor(2) as threads:
        channels = list(
            threads.map(
                lambda rank: ends[rank].open(
                    link_id="p/1", rank=rank, rendezvous=board, timeout_s=10
                ),
                range(2),
            )
        )
    chosen = TransportKind.LOOPBACK if is_apart else TransportKind.SHM
    assert [channel.kind for channel in channels] == [chosen, chosen]
    for channel in channels:
        channel.close()


def test_shared_memory_refuses_another_host():
    board = Board()
    board.set("p/1/shm/host/1", b"another-host")
    with pytest.raises(TransportError, match="cannot leave the host"):
        ShmTransport().open(link_id="p/1", rank=0, rendezvous=board, timeout_s=10)


def test_a_host_is_named_by_what_sockets_and_memory_need():
    assert host_id() == host_id()
    boot_id, namespace, user = host_id().split("/")
    assert boot_id
    assert int(namespace) > 0
    assert int(user) >= 0
