"""Mutual TLS among the members of a cluster: what a start refuses, and whom a member refuses."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from cluster.clock import SystemClock
from cluster.config import SecurityConfig, from_tree, to_tree
from cluster.control import connection
from cluster.control.report_client import ReportClient, ReportTiming
from cluster.control.server import ControlServer
from cluster.control.status import get_cluster
from cluster.errors import ConfigError, NoWorker, StartupError, WorkerLost
from cluster.request import Peer
from cluster.rpc.client import WorkerClient
from cluster.rpc.link_acceptor import LinkAcceptor
from cluster.rpc.link_dialer import LinkDialer
from cluster.rpc.server import WorkerServer
from cluster.tls import DoorTls
from cluster.transport.loopback import LoopbackTransport
from cluster.trust import ClusterToken
from tests.certificates import Authority, member_tree
from tests.cluster.control.factory import make_config, make_registration, make_report
from tests.factories_attach import Events, Handler, make_leg, soon
from tests.factories_link import LAYOUT, LIMITS, LONG_S, Half

CERTIFICATE, KEY, CA = "cluster_certificate_file", "cluster_key_file", "cluster_ca_file"
STRANGERS = ["plaintext", "foreign"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("foreign"), "foreign")


@pytest.fixture(scope="module")
def security(ours):
    """The keys of the deploy file of a cluster with certificates."""
    return member_tree(ours)


@pytest.fixture(scope="module")
def member(security):
    return ClusterToken.load(SecurityConfig(**security))


@pytest.fixture(scope="module")
def strangers(ours, foreign):
    """Who speaks no TLS, and who has a certificate that another authority has signed."""
    own = SecurityConfig(**member_tree(foreign))
    return {"plaintext": ClusterToken(), "foreign": ClusterToken.load(own)}


# ---- the deploy file


@pytest.mark.parametrize(
    ("security", "field"),
    [
        ({CERTIFICATE: "/c", KEY: "/k"}, CA),
        ({CA: "/ca"}, CERTIFICATE),
        ({CERTIFICATE: "/c", CA: "/ca"}, KEY),
        ({CERTIFICATE: "c", KEY: "/k", CA: "/ca"}, CERTIFICATE),
        ({"door_certificate_file": "/c"}, "door_key_file"),
        ({"door_clients_ca_file": "/ca"}, "door_certificate_file"),
        ({"door_ca_file": "/ca"}, "door_certificate_file"),
        ({"door_certificate_name": "n"}, "door_certificate_file"),
        ({"door_certificate_file": "/c", "door_key_file": "k"}, "door_key_file"),
    ],
)
def test_files_that_are_of_no_use_alone_are_refused(security, field):
    with pytest.raises(ConfigError) as caught:
        from_tree(to_tree(make_config()) | {"security": security})
    assert caught.value.field == f"security.{field}"


def test_clients_are_not_signed_by_the_clusters_own_authority(security):
    """Whoever may call the doors could register workers."""
    doors = {"door_certificate_file": "/c", "door_key_file": "/k"}
    doors["door_clients_ca_file"] = security[CA]
    with pytest.raises(ConfigError, match=r"door_clients_ca_file: the cluster's own CA"):
        from_tree(to_tree(make_config()) | {"security": security | doors})


def test_clients_are_not_signed_by_it_in_another_file_either(ours, foreign, tmp_path):
    """Copied, renewed, one of several, or above the clients' own: what counts is who signs."""
    door = ours.sign("api.example", file="apart")
    copy, several = tmp_path / "copy.pem", tmp_path / "several.pem"
    copy.write_bytes(Path(ours.file).read_bytes())
    several.write_bytes(Path(foreign.file).read_bytes() + copy.read_bytes())
    renewed = Authority(tmp_path / "renewed", "of another name", like=ours).file
    below = Authority(tmp_path / "below", "below", by=ours).file
    namesake = Authority(tmp_path / "namesake", "ours").file

    def load(clients_ca):
        return DoorTls(
            SecurityConfig(
                door_certificate_file=door.certificate,
                door_key_file=door.key,
                door_clients_ca_file=str(clients_ca),
                **member_tree(ours),
            )
        )

    for clients_ca in (copy, several, renewed, below):
        with pytest.raises(StartupError, match=r"door_clients_ca_file: .* member of the cluster"):
            load(clients_ca)
    for clients_ca in (foreign.file, namesake):
        assert load(clients_ca)


# ---- the start


def refusal(security, **changes) -> str:
    with pytest.raises(StartupError) as caught:
        ClusterToken.load(SecurityConfig(**{**security, **changes}))
    return caught.value.message


@pytest.mark.parametrize("name", [CERTIFICATE, KEY, CA])
def test_a_file_that_cannot_be_used_is_named_by_its_key(security, name, tmp_path):
    none, junk, folder = tmp_path / "none", tmp_path / "junk", tmp_path
    junk.write_text("no certificate")
    assert refusal(security, **{name: str(none)}) == (
        f"security.{name}: {none} cannot be read on this node: No such file or directory"
    )
    assert refusal(security, **{name: str(folder)}).endswith("on this node: Is a directory")
    assert refusal(security, **{name: str(junk)}) == f"security.{name}: {junk} is not PEM"
    junk.write_text("-----BEGIN NOTHING-----")
    assert refusal(security, **{name: str(junk)}).startswith(f"security.{name}: {junk} holds no ")


def test_a_certificate_that_its_peers_would_refuse_is_refused_at_the_start(ours, foreign, security):
    def why(pair):
        return refusal(member_tree(ours, pair))

    assert "certificate has expired" in why(ours.sign(file="old", days=(-3, -1)))
    assert "certificate is not yet valid" in why(ours.sign(file="young", days=(1, 2)))
    assert "certificate signature failure" in why(foreign.sign()) or "issuer" in why(foreign.sign())
    other = why(ours.sign("other.name"))
    assert "not valid for 'pdserve-cluster'" in other
    assert "security.cluster_certificate_file: " in other
    assert ClusterToken.load(
        SecurityConfig(
            **member_tree(ours, ours.sign("other.name")), cluster_certificate_name="other.name"
        )
    )
    key = refusal(security, **{KEY: ours.sign(file="another").key})
    assert "is not the key of security.cluster_certificate_file" in key


def test_the_doors_certificate_is_checked_too(ours):
    def load(pair, **changes):
        files = {"door_certificate_file": pair.certificate, "door_key_file": pair.key}
        return DoorTls(SecurityConfig(**(files | changes)))

    good = ours.sign("api.example")
    assert load(good)
    for pair, changes, why in (
        (ours.sign("api.example", file="old", days=(-3, -1)), {}, "certificate has expired"),
        (good, {"door_key_file": ours.sign(file="more").key}, "door_key_file: .* is not the key"),
        (good, {"door_clients_ca_file": good.key}, "door_clients_ca_file: .* no certificate"),
        (good, {"door_clients_ca_file": "/none"}, "door_clients_ca_file: /none cannot be read"),
    ):
        with pytest.raises(StartupError, match=f"security.*{why}"):
            load(pair, **changes)


# ---- who is let in


@pytest.fixture
async def control(security):
    """A control plane; returns its config and address."""
    config = from_tree(to_tree(make_config()) | {"security": security})
    server = ControlServer(config, SystemClock())
    yield config, await server.start("127.0.0.1", 0)
    await server.stop()


async def test_the_control_plane_answers_members_only(control, member, strangers):
    """S-16: a typed error, which says what a handshake failed of."""
    _, address = control
    assert (await get_cluster(address, 5.0, member)).workers == ()
    with pytest.raises(NoWorker, match="UNAVAILABLE"):
        await get_cluster(address, 5.0, strangers["plaintext"])
    with pytest.raises(NoWorker, match="TLS handshake failed"):
        await get_cluster(address, 5.0, strangers["foreign"])


async def test_nobody_is_asked_who_goes_by_another_name(control, ours):
    """Callers look at it. Whom the authority has signed may call: each cluster has its own."""
    _, address = control
    security = SecurityConfig(
        **member_tree(ours, ours.sign("other-cluster")), cluster_certificate_name="other-cluster"
    )
    with pytest.raises(NoWorker, match=r"TLS handshake failed.*Hostname"):
        await get_cluster(address, 5.0, ClusterToken.load(security))


async def test_a_member_does_not_talk_to_a_control_plane_without_tls(member):
    """Never in plaintext because the other side has nothing better."""
    server = ControlServer(make_config(), SystemClock())
    address = await server.start("127.0.0.1", 0)
    try:
        with pytest.raises(NoWorker, match="TLS handshake failed"):
            await get_cluster(address, 5.0, member)
    finally:
        await server.stop()


async def test_a_worker_with_a_foreign_certificate_is_not_registered(
    control, member, strangers, caplog
):
    config, address = control
    registration = make_registration(config.pools[0])
    client = ReportClient(
        address,
        registration=lambda: registration,
        report=lambda: make_report(registration),
        on_abort_grant=lambda grant_id: None,
        clock=SystemClock(),
        timing=ReportTiming(backoff=connection.Backoff(first_s=0.01, last_s=0.01)),
        token=strangers["foreign"],
    )
    await client.start()
    try:
        async with asyncio.timeout(LONG_S):
            while not client.refusal:
                view = await get_cluster(address, 5.0, member)
        assert "TLS handshake failed" in client.refusal
        assert client.refusal in caplog.text
        assert not client.accepted.done()
        assert view.workers == ()
    finally:
        await client.stop("over")


@pytest.fixture
async def decode_worker(member):
    """A decode worker: how to reach it, and its transport."""
    transport, me = LoopbackTransport(), Peer(worker_id="d", incarnation="d-1", address="")
    acceptor = LinkAcceptor(me=me, layout=LAYOUT, transport=transport, events=Half(), limits=LIMITS)
    server = WorkerServer(Handler(), acceptor, incarnation="d-1", host="127.0.0.1", token=member)
    yield dataclasses.replace(me, address=await server.start()), transport
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


@pytest.mark.parametrize("name", STRANGERS)
async def test_a_stranger_gets_no_link(decode_worker, strangers, name):
    with pytest.raises(WorkerLost, match="handshake failed" if name == "foreign" else "connect"):
        await dial(decode_worker, strangers[name])


async def test_a_member_gets_one(decode_worker, member):
    assert await dial(decode_worker, member)


@pytest.mark.parametrize("name", [*STRANGERS, "member"])
async def test_only_members_start_legs(decode_worker, member, strangers, name):
    peer, _ = decode_worker
    events = Events()
    token = {**strangers, "member": member}[name]
    router = WorkerClient(peer, router_id="r", incarnation="r-1", events=events, token=token)
    await router.start_leg(make_leg())
    if name == "member":
        await soon(events.beats)
    else:
        assert "UNAVAILABLE" in (await soon(events.lost))[1]
    await router.close()
