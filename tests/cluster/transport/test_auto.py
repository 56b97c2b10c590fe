"""Which transport a link gets: by where its two ends are, the same at both."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.config import TransportKind
from cluster.transport.auto import FAR, NEAR, AutoTransport, choose, place_of
from cluster.transport.base import Channel, Rendezvous, TransportError
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


def open_both(ends: list[AutoTransport]) -> list[Channel]:
    board = Board()
    with ThreadPoolExecutor(2) as threads:
        return list(
            threads.map(
                lambda rank: ends[rank].open(
                    link_id="p/1", rank=rank, rendezvous=board, timeout_s=10
                ),
                range(2),
            )
        )


BOTH, SHM, TORCH = b"near far", b"near", b"far"


@pytest.mark.parametrize(
    ("ours", "theirs", "way"),
    [
        (b"a cpu", b"a cpu", NEAR),
        (b"a cpu", b"b cpu", FAR),
        (b"a cpu", b"a gpu-1", NEAR),
        (b"a gpu-1", b"a gpu-1", NEAR),
        (b"a gpu-1", b"a gpu-2", FAR),
        (b"a gpu-1", b"b gpu-2", FAR),
    ],
)
def test_links_within_a_host_are_near_unless_nccl_has_a_way(ours, theirs, way):
    ours, theirs = ours + b" " + BOTH, theirs + b" " + BOTH
    assert choose(ours, theirs) == choose(theirs, ours) == way


@pytest.mark.parametrize(
    ("ours", "theirs", "ways", "way"),
    [
        (b"a cpu", b"a cpu", TORCH, FAR),
        (b"a cpu", b"a cpu", SHM, NEAR),
        (b"a gpu-1", b"a gpu-2", SHM, NEAR),
        (b"a cpu", b"b cpu", SHM, None),
        (b"a gpu-1", b"a gpu-1", TORCH, None),
        (b"a cpu", b"a gpu-1", TORCH, None),
    ],
)
def test_an_end_that_takes_one_way_only_gets_that_or_an_error(ours, theirs, ways, way):
    ours, theirs = ours + b" " + BOTH, theirs + b" " + ways
    for pair in ((ours, theirs), (theirs, ours)):
        if way is not None:
            assert choose(*pair) == way
            continue
        with pytest.raises(TransportError, match="no transport in common that both pools take"):
            choose(*pair)


def test_a_cpu_and_a_gpu_on_two_hosts_are_told_that_nothing_links_them():
    ends = (b"a cpu near far", b"b gpu-1 near far")
    for ours, theirs in (ends, ends[::-1]):
        with pytest.raises(TransportError, match="on different hosts have no transport in common"):
            choose(ours, theirs)


@pytest.mark.parametrize("kind", [TransportKind.SHM, TransportKind.TORCH_DIST])
def test_a_pool_of_one_transport_links_with_one_that_takes_both(kind: TransportKind):
    channels = open_both([AutoTransport(), AutoTransport(kind=kind)])
    assert [channel.kind for channel in channels] == [kind, kind]
    for channel in channels:
        channel.close()


@pytest.mark.parametrize("is_apart", [False, True])
def test_both_ends_come_to_the_same_choice_and_name_it(is_apart: bool):
    far = LoopbackTransport()
    ends = [AutoTransport(far=far), AutoTransport(far=far)]
    if is_apart:
        ends[1]._place = place_of("cpu", lambda: "another-host")
    channels = open_both(ends)
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
