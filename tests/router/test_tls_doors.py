"""Both doors by TLS: who gets in, and that nothing else is spoken there."""

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from dataclasses import dataclass

import httpx
import pytest
import uvloop

from cluster import errors
from cluster.config import SecurityConfig
from cluster.tls import DoorTls
from deploy.client import CERTIFICATE_VARIABLE, KEY_FILE_VARIABLE, Client, ClientTls
from router.api import build_api
from router.grpc_api import GrpcDoor
from router.http_door import HttpDoor
from router.http_guard import HttpCaps
from router.https_listener import HttpsListener
from router.shares import Shares
from tests.certificates import Authority
from tests.router.fakes import EOS_ID, FakeCluster, make_router, speaks, until

ASK = {"prompt": "hi", "max_tokens": 8}


@dataclass(frozen=True)
class Site:
    """Who signs for the doors and for their clients, and what the doors have."""

    doors: Authority
    clients: Authority
    security: SecurityConfig


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    doors = Authority(tmp_path_factory.mktemp("doors"), "doors")
    clients = Authority(tmp_path_factory.mktemp("clients"), "clients")
    pair = doors.sign("127.0.0.1", "api.example")
    security = SecurityConfig(
        door_certificate_file=pair.certificate, door_key_file=pair.key, door_ca_file=doors.file
    )
    return Site(doors, clients, security)


@contextlib.asynccontextmanager
async def opened(site, *, asks_clients=False):
    """Yield the addresses of the HTTP and of the gRPC door."""
    clients_ca = site.clients.file if asks_clients else ""
    tls = DoorTls(dataclasses.replace(site.security, door_clients_ca_file=clients_ca))
    cluster = FakeCluster()
    cluster.script = speaks([*b"ok", EOS_ID])
    service = make_router(cluster)
    caps = HttpCaps(head_timeout_s=0.5)
    http = HttpDoor(build_api(service), host="127.0.0.1", port=0, caps=caps, tls=tls)
    by_grpc = GrpcDoor(service, host="127.0.0.1", port=0, tls=tls)
    try:
        yield f"127.0.0.1:{await http.start()}", f"127.0.0.1:{await by_grpc.start()}"
    finally:
        await http.stop()
        await by_grpc.stop()
        await service.stop()


@contextlib.asynccontextmanager
async def https_door(site, **caps):
    """Yield the address of the HTTP door alone, on any loop."""
    service = make_router(FakeCluster())
    tls = DoorTls(site.security)
    door = HttpDoor(build_api(service), host="127.0.0.1", port=0, caps=HttpCaps(**caps), tls=tls)
    try:
        yield f"127.0.0.1:{await door.start()}"
    finally:
        await door.stop()
        await service.stop()


def ask_grpc(address, tls=None):
    with Client(address, tls=tls) as client:
        return client.generate_once(**ASK, deadline_s=10).choices[0].text


async def ask_http(address, tls):
    async with httpx.AsyncClient(verify=tls.context(), trust_env=False) as client:
        return await client.post(f"https://{address}/v1/completions", json=ASK)


async def test_both_doors_answer_whoever_trusts_them(site):
    tls = ClientTls(ca_file=site.doors.file)
    async with opened(site) as (http, by_grpc):
        answer = await ask_http(http, tls)
        assert answer.json()["choices"][0]["text"] == "ok"
        assert await asyncio.to_thread(ask_grpc, by_grpc, tls) == "ok"
        named = ClientTls(ca_file=site.doors.file, server_name="api.example")
        assert await asyncio.to_thread(ask_grpc, by_grpc, named) == "ok"


async def test_nothing_is_said_in_plaintext(site):
    """And a client does not fall back to it."""
    async with opened(site) as (http, by_grpc):
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http://{http}/health/live")
        with pytest.raises(errors.PdserveError):
            await asyncio.to_thread(ask_grpc, by_grpc)


async def test_a_client_refuses_doors_of_others(site):
    strange = ClientTls(ca_file=site.clients.file)
    other_name = ClientTls(ca_file=site.doors.file, server_name="other.example")
    async with opened(site) as (http, by_grpc):
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await ask_http(http, strange)
        for tls in (strange, other_name):
            with pytest.raises(errors.PdserveError, match=r"handshake failed|Verification Check"):
                await asyncio.to_thread(ask_grpc, by_grpc, tls)


async def test_where_clients_show_certificates_nobody_else_is_heard(site, monkeypatch):
    own = site.clients.sign("a client")
    foreign = site.doors.sign("no client")
    ca = {"ca_file": site.doors.file}
    async with opened(site, asks_clients=True) as (http, by_grpc):
        for tls in (
            ClientTls(**ca),
            ClientTls(**ca, certificate_file=foreign.certificate, key_file=foreign.key),
        ):
            with pytest.raises((httpx.HTTPError, ssl.SSLError)):
                await ask_http(http, tls)
            with pytest.raises(errors.PdserveError):
                await asyncio.to_thread(ask_grpc, by_grpc, tls)
        monkeypatch.setenv(CERTIFICATE_VARIABLE, own.certificate)
        monkeypatch.setenv(KEY_FILE_VARIABLE, own.key)
        tls = ClientTls(**ca)
        assert (await ask_http(http, tls)).status_code == 200
        assert await asyncio.to_thread(ask_grpc, by_grpc, tls) == "ok"


async def test_who_connected_before_the_door_closed_may_finish_shaking_hands(site):
    """CASES P-27: a door that closes for an heir has a moment for those who came to it."""
    made, context = asyncio.Event(), ClientTls(ca_file=site.doors.file).context()

    def make(place):
        made.set()
        return asyncio.Protocol()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        listener = HttpsListener(
            listening, DoorTls(site.security).context, make=make, places=Shares(8, 8),
            handshake_timeout_s=10.0,
        )  # fmt: skip
        early, late = (socket.create_connection(address) for _ in range(2))
        await until(lambda: len(listener._shaking) == 2)
        listener.close()
        _, writer = await asyncio.open_connection(
            sock=early, ssl=context, server_hostname="127.0.0.1"
        )
        await asyncio.wait_for(made.wait(), 5)
        listener.close()
        await listener.wait_closed()
        with pytest.raises((ConnectionError, ssl.SSLError)):
            await asyncio.open_connection(sock=late, ssl=context, server_hostname="127.0.0.1")
        writer.close()
        late.close()


SHARE = 8
GOOD = "127.0.0.1"
CROWDS = {"silent": "127.0.0.2", "half a hello": "127.0.0.3", "shaken, no request": "127.0.0.4"}
"""Each goes so far, and has an address."""


async def come(http: str, how: str, client: ssl.SSLContext) -> tuple:
    """Connect as one of a crowd."""
    host, _, port = http.partition(":")
    tls = {"ssl": client, "server_hostname": host} if how == "shaken, no request" else {}
    reader, writer = await asyncio.open_connection(
        host, int(port), local_addr=(CROWDS[how], 0), **tls
    )
    if how == "half a hello":
        writer.write(b"\x16\x03\x01\x02\x00\x01")
    return reader, writer


async def is_served(http: str, address: str, client: ssl.SSLContext) -> bool:
    """Whether a client at this address gets an answer."""
    transport = httpx.AsyncHTTPTransport(verify=client, local_address=address)
    async with httpx.AsyncClient(transport=transport) as each:
        try:
            answer = await each.get(f"https://{http}/health/live")
        except httpx.TransportError:
            return False
    return answer.status_code == 200


async def is_shut_out(http: str, how: str, client: ssl.SSLContext) -> bool:
    """Whether one more of them is closed without a word."""
    try:
        reader, writer = await come(http, how, client)
        with contextlib.closing(writer):
            return await reader.read() == b""
    except (ConnectionError, ssl.SSLError):
        return True


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_who_does_not_finish_a_handshake_is_counted(site, loop):
    """CASES S-14: a crowd of one address has its share of the connections, others find theirs.

    On either loop: Ray runs routers on uvloop.
    """
    client = ClientTls(ca_file=site.doors.file).context()
    num_places = SHARE * len(CROWDS) + 1
    caps = {"max_connections": num_places, "max_per_address": SHARE, "head_timeout_s": 60.0}

    async def story():
        async with asyncio.timeout(30), https_door(site, **caps) as http:
            crowd = [await come(http, how, client) for how in CROWDS for _ in range(SHARE)]
            for how in CROWDS:
                assert await is_shut_out(http, how, client)
                assert await is_served(http, GOOD, client)
                assert await is_shut_out(http, how, client), "somebody was dropped for it"
            for _, writer in crowd:
                writer.transport.abort()
            for address in CROWDS.values():
                while not await is_served(http, address, client):
                    pass

    factory = asyncio.new_event_loop if loop == "asyncio" else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(story())


async def test_a_peer_that_does_not_shake_hands_is_cut_off(site):
    """S-14: as one that sends no head is; its place is free again."""
    client = ClientTls(ca_file=site.doors.file).context()
    caps = {"max_per_address": 1, "head_timeout_s": 0.2}
    async with asyncio.timeout(30), https_door(site, **caps) as http:
        for how, address in CROWDS.items():
            reader, writer = await come(http, how, client)
            assert await reader.read() == b""
            writer.close()
            assert await is_served(http, address, client)


async def test_a_large_head_is_refused_over_tls_too(site):
    tls = ClientTls(ca_file=site.doors.file)
    async with opened(site) as (http, _):
        async with httpx.AsyncClient(verify=tls.context(), trust_env=False) as client:
            answer = await client.get(f"https://{http}/health/live", headers={"x": "y" * (1 << 20)})
        assert answer.status_code == 431


@pytest.mark.parametrize("name", ["ca_file", "certificate_file"])
def test_a_file_that_cannot_be_used_is_told(name):
    tls = ClientTls(**{name: "/none"})
    with pytest.raises(errors.StartupError, match="/none"):
        Client("127.0.0.1:1", tls=tls)
