"""Clients that keep one connection open for all their calls, one after the other."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

import grpc
import httpx

from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc

GAP_S = 0.1
CALL_S = 20.0


class _Caller(threading.Thread):
    """Calls until the end of a ``with``."""

    def __init__(
        self, address: str, prompt: list[int], num_tokens: int, *, gap_s: float = GAP_S
    ) -> None:
        """``gap_s``: from an answer to the next call."""
        super().__init__(daemon=True)
        self._address = address
        self._prompt = prompt
        self._num_tokens = num_tokens
        self._gap_s = gap_s
        self._is_over = threading.Event()
        self.num_calls = 0
        self.errors: list[str] = []

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        self.join(2 * CALL_S)

    def check(self) -> None:
        """It has called, and each call was answered."""
        assert not self.is_alive(), "a call hangs"
        assert self.num_calls > 0
        assert not self.errors


class KeptHttp(_Caller):
    """Speaks HTTP, over the same connection as long as the server keeps that open."""

    def run(self) -> None:
        body = {"prompt": self._prompt, "max_tokens": self._num_tokens, "temperature": 0.0}
        self.connections: Counter[object] = Counter()
        """Calls by the client's own address."""
        with httpx.Client(base_url=self._address, timeout=CALL_S) as client:
            while not self._is_over.wait(self._gap_s):
                self.num_calls += 1
                try:
                    answer = client.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.errors.append(repr(error))
                    continue
                stream = answer.extensions["network_stream"]
                with contextlib.suppress(OSError):  # the server has ended it with this answer
                    self.connections[stream.get_extra_info("client_addr")] += 1
                if answer.status_code != httpx.codes.OK:
                    self.errors.append(answer.text)


class KeptGrpc(_Caller):
    """Speaks gRPC over one channel."""

    def run(self) -> None:
        request = pb.GenerateRequest(
            prompt_ids=pb.TokenIds(ids=self._prompt), max_tokens=self._num_tokens
        )
        # Channels of one process to one address would share a connection.
        own = (("grpc.use_local_subchannel_pool", 1),)
        with grpc.insecure_channel(self._address, own) as channel:
            stub = pb_grpc.InferenceStub(channel)
            while not self._is_over.wait(self._gap_s):
                self.num_calls += 1
                try:
                    stub.GenerateOnce(request, timeout=CALL_S)
                except grpc.RpcError as error:
                    self.errors.append(f"{error.code()} {error.details()}")
