"""Clients that leave, and ways to bring one request into a phase and hold it there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from cluster.config import Role
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from tests.e2e.plain_cluster import PlainCluster, make_config, wait_until, with_pool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.config import DeployConfig

NUM_BLOCKS = 64
CHUNK_TOKENS = 6
"""So small that a prompt of some hundred tokens is being computed for a while."""
READ_S = 30
GAUGES_S = 1.0
"""So soon after a client has left its work is seen to be gone."""
PATIENCE_S = 20.0


def narrow_pair(model: Path) -> DeployConfig:
    """One prefill slot, two decode slots, and 64 blocks on each side.

    All prompts begin alike, and each shall be computed for a while: no prefix is kept. Whoever
    waits for blocks does so for as long as a test looks on.
    """
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    config = make_config(
        model, pools, kv_tokens=16 * NUM_BLOCKS, max_num_seqs=2, prefix_cache=False
    )
    limits = dataclasses.replace(config.limits, reserve_patience_s=PATIENCE_S)
    config = dataclasses.replace(config, limits=limits)
    return with_pool(config, "prefill", max_num_seqs=1, chunk_tokens=CHUNK_TOKENS)


def prompt_ids(num_tokens: int) -> list[int]:
    return [5 + i % 500 for i in range(num_tokens)]


class HttpCall:
    """One completion over a raw socket, so that the test decides how the connection ends."""

    def __init__(
        self, cluster: PlainCluster, num_prompt: int, max_tokens: int, *, stream: bool
    ) -> None:
        body = json.dumps(
            {
                "model": "tiny",
                "prompt": prompt_ids(num_prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": stream,
            }
        ).encode()
        endpoints = cluster.config.endpoints
        self._socket = socket.create_connection((endpoints.host, endpoints.http_port), READ_S)
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)
        self._is_stream = stream
        self._read = b""

    def wait_tokens(self) -> bool:
        """Read until some text came; False where the answer comes in one piece."""
        while self._is_stream and self._read.count(b"data: ") < 3:
            self._more()
        return self._is_stream

    def wait_end(self) -> None:
        """Read until the answer is whole."""
        end = b"[DONE]" if self._is_stream else b'"usage"'
        while end not in self._read:
            self._more()

    def leave_by_fin(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def leave_by_rst(self) -> None:
        no_linger = struct.pack("ii", 1, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        self._socket.close()

    def _more(self) -> None:
        data = self._socket.recv(65536)
        assert data, f"closed after {self._read[-300:]!r}"
        self._read += data


class GrpcCall:
    """One Generate call; its request id is known before its first token."""

    def __init__(self, cluster: PlainCluster, num_prompt: int, max_tokens: int) -> None:
        self._address = cluster.grpc
        self._channel = grpc.insecure_channel(self._address)
        request = pb.GenerateRequest(
            prompt_ids=pb.TokenIds(ids=prompt_ids(num_prompt)),
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
        )
        self._call = pb_grpc.InferenceStub(self._channel).Generate(request, timeout=READ_S)
        self.request_id = dict(self._call.initial_metadata())["x-request-id"]

    def wait_tokens(self) -> bool:
        next(self._call)
        next(self._call)
        return True

    def wait_num_tokens(self, num_tokens: int) -> None:
        """Read so many tokens; a message may carry several."""
        while num_tokens > 0:
            num_tokens -= len(next(self._call).token_ids)

    def wait_end(self) -> None:
        assert list(self._call)[-1].finish_reason

    def leave_by_call(self) -> None:
        self._call.cancel()
        self._channel.close()

    def leave_by_id(self) -> None:
        """Another client asks; the caller sees CANCELLED, or all of it where it was over."""
        with grpc.insecure_channel(self._address) as channel:
            stub = pb_grpc.InferenceStub(channel)
            was_running = stub.Cancel(pb.CancelRequest(request_id=self.request_id)).was_running
        try:
            list(self._call)
            code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            code = error.code()
        self._channel.close()
        assert code is (grpc.StatusCode.CANCELLED if was_running else grpc.StatusCode.OK)


Calling = Callable[[PlainCluster, int, int], Any]
"""From a cluster, a prompt's length and max_tokens to a call that was sent."""


class Door(NamedTuple):
    """How a client calls, and how it leaves."""

    call: Calling
    leave: Callable[[Any], None]


def _http(*, stream: bool) -> Calling:
    return lambda *ask: HttpCall(*ask, stream=stream)


DOORS = {
    "stream-fin": Door(_http(stream=True), HttpCall.leave_by_fin),
    "stream-rst": Door(_http(stream=True), HttpCall.leave_by_rst),
    "whole-fin": Door(_http(stream=False), HttpCall.leave_by_fin),
    "whole-rst": Door(_http(stream=False), HttpCall.leave_by_rst),
    "grpc-call": Door(GrpcCall, GrpcCall.leave_by_call),
    "grpc-id": Door(GrpcCall, GrpcCall.leave_by_id),
}


def report_of(cluster: PlainCluster, worker_id: str):
    return next(w.report for w in cluster.view().workers if w.worker.worker_id == worker_id)


@contextlib.contextmanager
def in_queue(cluster: PlainCluster, door: Door) -> Iterator[Any]:
    """A call that waits at the control plane since others have the decode slots."""
    blockers = [GrpcCall(cluster, 16, 900) for _ in range(2)]
    for blocker in blockers:
        blocker.wait_tokens()
    call = door.call(cluster, 16, 16)
    wait_until(lambda: cluster.view().num_waiting == 1, 5, "it doesn't wait for a slot")
    yield call
    wait_until(lambda: cluster.view().num_waiting == 0, GAUGES_S, "it still waits for a slot")
    assert cluster.view().num_granted == 2, "those that run were disturbed"
    for blocker in blockers:
        blocker.leave_by_call()


@contextlib.contextmanager
def in_prefill(cluster: PlainCluster, door: Door) -> Iterator[Any]:
    """A call whose prompt is being computed, chunk by chunk."""
    before = report_of(cluster, "prefill-0").counters["prefilled_tokens"]
    call = door.call(cluster, 1000, 16)
    wait_until(lambda: report_of(cluster, "prefill-0").num_running == 1, 5, "no prefill")
    yield call
    wait_until(lambda: report_of(cluster, "prefill-0").num_running == 0, GAUGES_S, "it goes on")
    after = report_of(cluster, "prefill-0").counters["prefilled_tokens"]
    assert after - before < 1000, "the prompt was computed to its end"


@contextlib.contextmanager
def in_prefill_queue(cluster: PlainCluster, door: Door) -> Iterator[Any]:
    """A call that has its grant, and waits at the prefill worker while another is computed."""
    before = report_of(cluster, "prefill-0").counters["prefilled_tokens"]
    first = GrpcCall(cluster, 800, 2)
    wait_until(lambda: report_of(cluster, "prefill-0").num_running == 1, 5, "no prefill")
    call = door.call(cluster, 16, 16)
    wait_until(lambda: report_of(cluster, "prefill-0").num_waiting == 1, 5, "it does not wait")
    yield call
    wait_until(lambda: report_of(cluster, "prefill-0").num_waiting == 0, GAUGES_S, "it waits on")
    first.wait_end()
    after = report_of(cluster, "prefill-0").counters["prefilled_tokens"]
    assert after - before == 800, "it was computed though its client had left"


@contextlib.contextmanager
def in_wait_for_blocks(cluster: PlainCluster, door: Door) -> Iterator[Any]:
    """A call whose KV can't move, since a decode worker's other sequence grew meanwhile.

    The grant counted blocks that were free then. The prefill worker stands still until they are
    not, so that its offer of 40 blocks comes when the other sequence holds more than 24 of 64.
    """
    holder = GrpcCall(cluster, 16, 900)
    holder.wait_num_tokens(3 * 16)
    with _standing_still(cluster, "prefill-0"):
        call = door.call(cluster, 40 * 16, 4)
        wait_until(lambda: cluster.view().num_granted == 2, 5, "no grant")
        holder.wait_num_tokens(22 * 16)
    wait_until(lambda: _is_held_up(cluster), 5, "it had blocks in time")
    yield call
    wait_until(lambda: report_of(cluster, "decode-0").num_waiting == 0, GAUGES_S, "it waits on")
    holder.leave_by_call()


@contextlib.contextmanager
def _standing_still(cluster: PlainCluster, worker_id: str) -> Iterator[None]:
    """For less time than it takes the control plane to suspect the worker."""
    process = cluster.workers[worker_id]
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def _is_held_up(cluster: PlainCluster) -> bool:
    """Whether KV is ready on the prefill side, and the decode side has no blocks for it."""
    prefill, decode = report_of(cluster, "prefill-0"), report_of(cluster, "decode-0")
    is_ready = prefill.num_transferring == 1 and prefill.num_running == prefill.num_waiting == 0
    return is_ready and decode.num_waiting == decode.num_running == 1


@contextlib.contextmanager
def in_decode(cluster: PlainCluster, door: Door) -> Iterator[Any]:
    """A call that has some of its tokens."""
    before = report_of(cluster, "decode-0").counters["generated_tokens"]
    call = door.call(cluster, 40, 900)
    if not call.wait_tokens():
        wait_until(lambda: report_of(cluster, "decode-0").num_running == 1, 5, "no decode")
    yield call
    wait_until(lambda: report_of(cluster, "decode-0").num_running == 0, GAUGES_S, "it goes on")
    after = report_of(cluster, "decode-0").counters["generated_tokens"]
    assert after - before < 899, "the choice was decoded to its end"


@contextlib.contextmanager
def after_the_end(cluster: PlainCluster, door: Door) -> Iterator[Any]:
    """A call that has been answered, its connection still open."""
    call = door.call(cluster, 40, 8)
    call.wait_end()
    yield call


PHASES = {
    "queue": in_queue,
    "prefill": in_prefill,
    "blocks": in_wait_for_blocks,
    "decode": in_decode,
    "end": after_the_end,
}
NUM_LEFT = {"blocks": 2, "end": 0}
"""Clients that left in the same phase, where it is not one: a call in decode held the blocks."""
COUNTED_AS = {"queue": "queue", "prefill": "prefill", "blocks": "decode", "decode": "decode"}
"""The ``phase`` of the aborted counter: with its first token out, a request is in decode."""
