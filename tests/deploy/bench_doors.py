"""Doors without a cluster: they answer as a router would, with the durations a test gives them."""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import grpc

from cluster.config import DeployConfig, PoolConfig, Role
from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from deploy.bench.site import Site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

QUEUE_S, COMPUTE_S = 0.002, 0.008


class QuietBar:
    def update(self, n: float = 1) -> None: ...

    def close(self) -> None: ...


def make_site(folder: Path, core: int = 0) -> Site:
    return Site(folder=folder, core=core, progress=lambda _what, _total, _unit: QuietBar())


@dataclass
class FakeDoors:
    """Streams of one character a token; the prompts' lengths are noted."""

    gap_s: float = 0.0
    """Between the tokens of a stream."""
    stall_s: float = 0.0
    """How long a prompt of more than 100 tokens holds up every stream."""
    exposed_s: float = 0.004
    block_bytes: int = 1000
    fails: bool = False
    is_local: bool = False
    """Whether the worker that decodes also prefills."""
    prompts: list[int] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    grpc: str = ""
    http: str = ""

    def __post_init__(self) -> None:
        self.config = DeployConfig(
            pools=(
                PoolConfig(name="prefill", role=Role.PREFILL, cores=(0,)),
                PoolConfig(name="decode", role=Role.DECODE, cores=(1,)),
            )
        )
        self.lock = threading.Lock()
        self.engine = threading.Lock()

    def prefill(self, num_prompt_tokens: int) -> None:
        with self.lock:
            self.prompts.append(num_prompt_tokens)
        if num_prompt_tokens > 100 and self.stall_s:
            with self.engine:
                pause(self.stall_s)
        else:
            pause(QUEUE_S + COMPUTE_S)

    def step(self) -> None:
        pause(self.gap_s)
        with self.engine:
            pass

    def timeline(self, num_prompt_tokens: int) -> pb.Timeline:
        num_blocks = -(-num_prompt_tokens // 16)
        prefill = pb.LegTimes(
            queue_s=QUEUE_S, compute_s=COMPUTE_S, exposed_s=self.exposed_s,
            transfer_bytes=num_blocks * self.block_bytes,
        )  # fmt: skip
        if self.is_local:
            return pb.Timeline(prefill_worker="d", decode_worker="d", decode=prefill)
        return pb.Timeline(prefill_worker="p", decode_worker="d", prefill=prefill)


def pause(seconds: float) -> None:
    if seconds:
        threading.Event().wait(seconds)


class _Inference(pb_grpc.InferenceServicer):
    def __init__(self, doors: FakeDoors) -> None:
        self._doors = doors

    def Generate(self, request, context):
        doors = self._doors
        if doors.fails:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no decode worker")
        num_tokens = len(request.prompt_ids.ids) or len(request.prompt.split())
        yield pb.GenerateResponse(request_id="r")
        doors.prefill(num_tokens)
        for index in range(request.max_tokens):
            if index:
                doors.step()
            if not context.is_active():
                with doors.lock:
                    doors.cancelled += 1
                return
            yield pb.GenerateResponse(request_id="r", text="x", token_ids=[7])
        yield pb.GenerateResponse(
            request_id="r", finish_reason="length", timeline=doors.timeline(num_tokens)
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    doors: FakeDoors

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.doors.fails:
            return self._answer(503, b'{"error": {"message": "no decode worker"}}')
        self.doors.prefill(len(body["prompt"].split()))
        times = {"queue_s": QUEUE_S, "compute_s": COMPUTE_S}
        events = [
            {"choices": [{"text": "x"}]},
            {
                "choices": [{"text": "y", "finish_reason": "length"}],
                "pdserve": {"timeline": {"prefill": times}},
            },
        ]
        lines = [*map(json.dumps, events), "[DONE]"]
        return self._answer(200, "".join(f"data: {line}\n\n" for line in lines).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None: ...


@contextlib.contextmanager
def open_doors(doors: FakeDoors) -> Iterator[FakeDoors]:
    """Serve both doors for the time of a ``with``."""
    server = grpc.server(ThreadPoolExecutor(16))
    pb_grpc.add_InferenceServicer_to_server(_Inference(doors), server)
    doors.grpc = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    handler = type("Handler", (_Handler,), {"doors": doors})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    doors.http = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield doors
    finally:
        http.shutdown()
        http.server_close()
        thread.join(5)
        server.stop(0).wait(5)
