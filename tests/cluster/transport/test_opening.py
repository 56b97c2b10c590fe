"""The opening of a group that nobody can break off: bounded all the same."""

import os
import threading
import time

import pytest
import torch.distributed as dist

from cluster.transport.base import PeerLost, TransferTimeout
from cluster.transport.opening import opened_within
from cluster.transport.torch_dist import TorchDistTransport

SHORT_S = 0.05


class Made:
    """Something that takes as long to make as a test lets it."""

    def __init__(self) -> None:
        self.go, self.is_discarded = threading.Event(), threading.Event()
        self.discarded = []

    def make(self) -> str:
        assert self.go.wait(10)
        return "made"

    def discard(self, late) -> None:
        self.discarded.append(late)
        self.is_discarded.set()


class FakeNccl:
    """``ProcessGroupNCCL`` whose peer never makes its half until the test lets it."""

    peer_came = threading.Event()
    made = []  # noqa: RUF012

    class Options:
        pass

    def __init__(self, store, rank, size, options) -> None:
        self.store, self.place = store, (rank, size)
        self.is_aborted = threading.Event()
        self.error = None
        FakeNccl.made.append(self)

    def eager_connect_single_device(self, device) -> None:
        assert self.peer_came.wait(10)
        try:
            self.store.get("late")
        except PeerLost as error:
            self.error = error

    def abort(self) -> None:
        self.is_aborted.set()


def test_what_is_made_in_time_is_returned_and_what_fails_is_raised():
    made = Made()
    made.go.set()
    assert opened_within(10, "a", made.make, made.discard) == "made"
    with pytest.raises(ZeroDivisionError):
        opened_within(10, "a", lambda: 1 / 0, made.discard)
    with pytest.raises(TimeoutError, match="its own"):
        opened_within(10, "a", lambda: (_ for _ in ()).throw(TimeoutError("its own")), made.discard)
    assert made.discarded == []


def test_what_is_late_is_given_up_and_discarded_when_it_comes():
    made = Made()
    with pytest.raises(TransferTimeout, match="not open within"):
        opened_within(SHORT_S, "a", made.make, made.discard)
    assert made.discarded == []
    made.go.set()
    assert made.is_discarded.wait(10)
    assert made.discarded == ["made"]


def test_what_fails_late_is_nobodys(caplog):
    failed = threading.Event()

    def make():
        assert failed.wait(10)
        raise ValueError("secret")

    with pytest.raises(TransferTimeout):
        opened_within(SHORT_S, "a", make, lambda late: pytest.fail("nothing was made"))
    (thread,) = (each for each in threading.enumerate() if each.name == "open-a")
    with caplog.at_level("INFO"):
        failed.set()
        thread.join(10)
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


@pytest.fixture
def nccl(monkeypatch):
    """NCCL on a machine without a GPU, with a peer that died while the link opened."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(FakeNccl, "peer_came", threading.Event())
    monkeypatch.setattr(FakeNccl, "made", [])
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "unset")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "unset")
    return FakeNccl


def test_a_link_over_nccl_whose_peer_never_comes_is_given_up_at_its_deadline(nccl):
    """CASES P-23: as over gloo; else its thread, and all who wait for the link, hang for ever."""
    transport = TorchDistTransport(device="cuda:0")
    started = time.monotonic()
    with pytest.raises(TransferTimeout):
        transport.open(link_id="p>d/1", rank=1, rendezvous=None, timeout_s=SHORT_S)
    assert time.monotonic() - started < 5
    (group,) = nccl.made
    assert (group.place, group.is_aborted.is_set()) == ((1, 2), False)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"

    # The rendezvous is over, so what is late finds nobody; and it is let go of.
    nccl.peer_came.set()
    assert group.is_aborted.wait(10)
    assert isinstance(group.error, PeerLost)
