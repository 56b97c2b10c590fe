"""S-16: who has no cluster token registers no worker, places nothing, and gets no KV."""

import asyncio
import contextlib
import dataclasses

import pytest

from cluster.clock import SystemClock
from cluster.config import from_tree, to_tree
from cluster.control import connection
from cluster.control.report_client import ReportClient, ReportTiming
from cluster.control.server import ControlServer
from cluster.control.status import get_cluster
from cluster.errors import WorkerLost
from cluster.request import Peer
from cluster.rpc.client import WorkerClient
from cluster.rpc.link_acceptor import LinkAcceptor
from cluster.rpc.link_dialer import LinkDialer
from cluster.rpc.server import WorkerServer
from cluster.transport.loopback import LoopbackTransport
from cluster.trust import ClusterToken
from tests.cluster.control.factory import make_config, make_registration, make_report
from tests.factories_attach import Events, Handler, make_leg, soon
from tests.factories_link import LAYOUT, LIMITS, LONG_S, Half

TOKEN = "0123456789abcdef0123456789abcdef"
MEMBER, ROGUE = ClusterToken(TOKEN), ClusterToken(TOKEN[::-1])
STRANGERS = [None, ROGUE]


@pytest.fixture
async def control(monkeypatch):
    """A control plane with a token; returns its config and address."""
    monkeypatch.setenv("TOKEN", TOKEN)
    config = from_tree(to_tree(make_config()) | {"security": {"cluster_token_env": "TOKEN"}})
    server = ControlServer(config, SystemClock())
    address = await server.start("127.0.0.1", 0)
    yield config, address
    await server.stop()


@contextlib.asynccontextmanager
async def reporting(control, token):
    config, address = control
    registration = make_registration(config.pools[0])
    client = ReportClient(
        address,
        registration=lambda: registration,
        report=lambda: make_report(registration),
        on_abort_grant=lambda grant_id: None,
        clock=SystemClock(),
        timing=ReportTiming(backoff=connection.Backoff(first_s=0.01, last_s=0.01)),
        token=token,
    )
    await client.start()
    try:
        yield client
    finally:
        await client.stop("over")


@pytest.mark.parametrize("token", STRANGERS, ids=["none", "wrong"])
async def test_a_rogue_worker_is_not_registered(control, token):
    async with reporting(control, token) as client, asyncio.timeout(LONG_S):
        while not client.refusal:
            view = await get_cluster(control[1], 5.0, MEMBER)
        assert "cluster token" in client.refusal
        assert not client.accepted.done()
        assert view.workers == ()


async def test_a_member_is(control):
    async with reporting(control, MEMBER) as client:
        await asyncio.wait_for(asyncio.shield(client.accepted), LONG_S)
        assert client.refusal == ""


@pytest.fixture
async def decode_worker():
    """A decode worker that lets members in: how to reach it, and its transport."""
    transport, me = LoopbackTransport(), Peer(worker_id="d", incarnation="d-1", address="")
    acceptor = LinkAcceptor(me=me, layout=LAYOUT, transport=transport, events=Half(), limits=LIMITS)
    server = WorkerServer(
        Handler(), acceptor, incarnation="d-1", host="127.0.0.1", token=MEMBER
    )  # fmt: skip
    peer = dataclasses.replace(me, address=await server.start())
    yield peer, transport
    await acceptor.close()
    await server.stop(0.5)


async def dial(decode_worker, token):
    peer, transport = decode_worker
    me = Peer(worker_id="p", incarnation="p-1", address="")
    dialer = LinkDialer(
        me=me, layout=LAYOUT, transport=transport, events=Half(), limits=LIMITS, token=token
    )
    try:
        return (await dialer.link_to(peer, LONG_S)).is_open
    finally:
        await dialer.close()


@pytest.mark.parametrize("token", STRANGERS, ids=["none", "wrong"])
async def test_a_rogue_peer_gets_no_link(decode_worker, token):
    """S-13: KV moves over links only, so what gets no link gets no KV and sends none."""
    num_before = MEMBER.num_refused
    with pytest.raises(WorkerLost, match="cluster token"):
        await dial(decode_worker, token)
    assert MEMBER.num_refused > num_before, "and is counted"


async def test_a_member_gets_one(decode_worker):
    assert await dial(decode_worker, MEMBER)


@contextlib.asynccontextmanager
async def leg_started(decode_worker, token):
    """Yield what a router with this token hears of a leg that it starts."""
    peer, _ = decode_worker
    events = Events()
    router = WorkerClient(peer, router_id="r", incarnation="r-1", events=events, token=token)
    await router.start_leg(make_leg())
    try:
        yield events
    finally:
        await router.close()


@pytest.mark.parametrize("token", STRANGERS, ids=["none", "wrong"])
async def test_strangers_start_no_legs(decode_worker, token):
    for _ in range(10):
        async with leg_started(decode_worker, token) as events:
            reason = (await soon(events.lost))[1]
        # Where a call ends while its first message is on the way, grpc.aio may not say how.
        if "Internal error from Core" not in reason:
            break
    assert "cluster token" in reason


async def test_members_do(decode_worker):
    async with leg_started(decode_worker, MEMBER) as events:
        await soon(events.beats)
