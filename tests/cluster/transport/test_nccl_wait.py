"""A transfer over NCCL on a pretended GPU: its wait is bounded, and on a stream of its own."""

import contextlib
import os
import time

import pytest
import torch

from cluster.transport import torch_dist
from cluster.transport.base import ChannelClosed, PeerLost, TransferTimeout


class FakeStream:
    device = "cuda:0"

    def __init__(self, device=None) -> None:
        self.waited_for = []

    def wait_stream(self, other) -> None:
        self.waited_for.append(other)


class FakeEvent:
    num_polls = 0
    done_after = 3

    def record(self, stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        FakeEvent.num_polls += 1
        return FakeEvent.num_polls > FakeEvent.done_after


class FakeGroup:
    def __init__(self, error=None) -> None:
        self.error = error
        self.calls = []

    def send(self, tensors, peer, tag):
        self.calls.append(("send", peer, in_stream[-1]))
        if self.error is not None:
            raise self.error
        return self

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        self.calls.append("abort")


in_stream = [None]


@pytest.fixture
def default_stream(monkeypatch):
    default = FakeStream()

    @contextlib.contextmanager
    def enter(stream):
        in_stream.append(stream)
        try:
            yield
        finally:
            in_stream.pop()

    monkeypatch.setattr(FakeEvent, "num_polls", 0)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: default)
    return default


def make_channel(group):
    return torch_dist._NcclChannel(group, object(), 0, torch.device("cuda:0"))


def test_it_polls_until_the_transfer_is_through_on_its_own_stream(default_stream):
    group = FakeGroup()
    channel = make_channel(group)
    channel.send(torch.zeros(4, dtype=torch.uint8), 5.0)
    assert group.calls == [("send", 1, channel._stream)]
    assert channel._stream.waited_for == [default_stream]
    assert default_stream.waited_for == [], "the next step does not wait for the transfer"
    assert FakeEvent.num_polls == 4
    channel.close()
    assert group.calls[-1] == "abort"


def test_a_silent_peer_ends_the_channel_at_the_deadline(default_stream, monkeypatch):
    monkeypatch.setattr(FakeEvent, "done_after", 10**9)
    group, started_at = FakeGroup(), time.monotonic()
    channel = make_channel(group)
    with pytest.raises(TransferTimeout, match=r"within 0\.1 s"):
        channel.send(torch.zeros(4, dtype=torch.uint8), 0.1)
    assert time.monotonic() - started_at < 5
    assert group.calls[-1] == "abort"
    assert channel.is_dead
    with pytest.raises(ChannelClosed):
        channel.send(torch.zeros(4, dtype=torch.uint8), 0.1)


def test_a_link_that_is_lost_ends_the_wait_at_once(default_stream, monkeypatch):
    """Others of its GPU wait until it is over: not for the deadline of bytes that never come."""
    monkeypatch.setattr(FakeEvent, "done_after", 10**9)
    group = FakeGroup()
    channel = make_channel(group)
    record = FakeEvent.record

    def lose(event, stream) -> None:
        record(event, stream)
        channel.condemn()
        assert group.calls[-1] != "abort", "it is still in use"

    monkeypatch.setattr(FakeEvent, "record", lose)
    with pytest.raises(ChannelClosed, match="while bytes moved"):
        channel.send(torch.zeros(4, dtype=torch.uint8), 30.0)
    assert FakeEvent.num_polls < 100
    assert group.calls[-1] == "abort"
    channel.close()
    assert group.calls.count("abort") == 1


def test_an_error_of_the_library_is_a_lost_peer(default_stream):
    group = FakeGroup(RuntimeError("NCCL communicator was aborted"))
    with pytest.raises(PeerLost, match="aborted"):
        make_channel(group).send(torch.zeros(4, dtype=torch.uint8), 5.0)
    assert group.calls[-1] == "abort"


def test_the_watchdog_is_told_off_before_a_group_is_made(monkeypatch):
    seen = []

    class Nccl:
        class Options:
            pass

        def __init__(self, store, rank, size, options) -> None:
            names = torch_dist._NCCL_ENVIRONMENT
            seen.append(({name: os.environ.get(name) for name in names}, options._timeout))

        def eager_connect_single_device(self, device) -> None:
            pass

    for name in torch_dist._NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch_dist.dist, "ProcessGroupNCCL", Nccl, raising=False)
    torch_dist.TorchDistTransport(device="cuda:0")._make_nccl(object(), 0)
    environment, timeout = seen[0]
    assert environment == dict.fromkeys(environment, "0")
    assert timeout.days == 1
