"""A router that hears of nothing: it goes on sending legs to a worker that has said it leaves."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.request import Leg, LegKey, LegKind, Peer, SamplingParams
from cluster.rpc.client import WorkerClient
from deploy.worker_life import LAST_GRANTS_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.control.facts import Registration

ANSWER_S = 10.0


class Knock(NamedTuple):
    """One leg."""

    sent_at: float
    was_serving: bool
    """What the worker's health said before it was sent."""
    error: str
    """Why it was refused; empty where it had its token."""


class _Answers:
    """The events of legs."""

    def __init__(self) -> None:
        self.errors: asyncio.Queue[str] = asyncio.Queue()

    def on_beat(self, beat) -> None:
        pass

    def on_tokens(self, tokens, ends, waiting=(), prompts=()) -> None:
        for end in ends:
            self.errors.put_nowait("" if end.error is None else end.error.message)

    def on_worker_lost(self, peer, reason, *, is_alive=False) -> None:
        self.errors.put_nowait(f"lost: {reason}")


class _StaleRouter:
    """Attached to one worker; its legs are whole requests of one token."""

    def __init__(self, peer: Peer, channel: grpc.aio.Channel) -> None:
        self._health = health_pb2_grpc.HealthStub(channel)
        self._answers = _Answers()
        self.client = WorkerClient(
            peer, router_id="stale", incarnation=uuid.uuid4().hex, events=self._answers
        )

    async def knock(self) -> Knock:
        health = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
        sent_at = time.monotonic()
        await self.client.start_leg(
            Leg(
                key=LegKey(uuid.uuid4().hex, 0, 0),
                kind=LegKind.LOCAL,
                prompt_ids=(5, 6, 7),
                params=SamplingParams(max_tokens=1, temperature=0.0),
                remaining_s=ANSWER_S,
            )
        )
        error = await asyncio.wait_for(self._answers.errors.get(), ANSWER_S)
        is_serving = health.status == health_pb2.HealthCheckResponse.SERVING
        return Knock(sent_at, is_serving, error)


async def knock_until_late(worker: Registration, tell: Callable[[], None]) -> list[Knock]:
    """Send a leg, ``tell`` the worker to leave, and go on until it may take none any more.

    The last one was sent more than ``LAST_GRANTS_S`` after its health was seen to have flipped,
    which may have been earlier.
    """
    peer = Peer(
        worker_id=worker.worker_id, incarnation=worker.incarnation, address=worker.address
    )  # fmt: skip
    async with grpc.aio.insecure_channel(worker.address) as channel:
        router = _StaleRouter(peer, channel)
        try:
            knocks = [await router.knock()]
            tell()
            late_at = float("inf")
            while knocks[-1].sent_at <= late_at:
                knocks.append(await router.knock())
                if not knocks[-1].was_serving:
                    late_at = min(late_at, knocks[-1].sent_at + LAST_GRANTS_S)
        finally:
            await router.client.close()
    return knocks
