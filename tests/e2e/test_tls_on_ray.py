"""All of TLS and a wider bind, on Ray as a user starts it: one pair, and whom it lets in."""

import dataclasses
import ssl

import httpx
import openai
import pytest

from cluster.config import Role, SecurityConfig
from cluster.errors import PdserveError
from deploy.client import CERTIFICATE_VARIABLE, KEY_FILE_VARIABLE, Client, ClientTls
from deploy.doors import http_url
from tests.certificates import Authority, member_tree
from tests.e2e import reference
from tests.e2e.plain_cluster import make_config, view_of
from tests.e2e.ray_cluster import ray_cluster
from tests.e2e.test_listeners import (
    BESIDE_ANOTHER_RAY,
    check_table,
    own_address,
    settled_listeners,
)
from tests.e2e.test_tls import check_refuses_strangers

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]
POOLS = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
PROMPT = [7 + 3 * i for i in range(80)]


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("doors"), "doors")


@pytest.fixture(scope="module")
def secured(tiny_llama, doors, tmp_path_factory):
    """Started with a client's certificate in its environment, for the proof; tests have it too."""
    folder, address = tmp_path_factory.mktemp("secured"), own_address()
    clients = Authority(tmp_path_factory.mktemp("clients"), "clients")
    door, own = doors.sign(address), clients.sign("a client")
    token = folder / "token"
    token.write_text("0123456789abcdef" * 2)
    config = make_config(tiny_llama, POOLS)
    config = dataclasses.replace(
        config,
        endpoints=dataclasses.replace(config.endpoints, host=address),
        security=SecurityConfig(
            cluster_token_file=str(token),
            door_certificate_file=door.certificate,
            door_key_file=door.key,
            door_ca_file=doors.file,
            door_clients_ca_file=clients.file,
            **member_tree(Authority(tmp_path_factory.mktemp("members"), "members")),
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CERTIFICATE_VARIABLE, own.certificate)
        patch.setenv(KEY_FILE_VARIABLE, own.key)
        with ray_cluster(config, folder) as cluster:
            yield cluster


def test_clients_verify_the_doors_and_get_their_tokens(secured, doors, tiny_llama):
    """P-13 by TLS: openai's client and ours; KV has moved, and the text is the reference's."""
    tls = ClientTls(ca_file=doors.file)
    with (
        httpx.Client(verify=tls.context(), trust_env=False) as http,
        openai.OpenAI(
            base_url=f"{http_url(secured.config)}/v1", api_key="none", http_client=http
        ) as client,
    ):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=12, temperature=0.0
        )
    with Client(secured.grpc, tls=tls) as client:
        ask = {"prompt_ids": {"ids": PROMPT}, "max_tokens": 12, "temperature": 0.0}
        pieces = list(client.generate(**ask, timeline=True, deadline_s=60))
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert reference.greedy(tiny_llama, [PROMPT], 12).disagreements([tokens])[0] == []
    assert "".join(piece.text for piece in pieces) == answer.choices[0].text
    assert pieces[-1].timeline.prefill.transfer_bytes > 0


def test_whoever_shows_no_certificate_or_trusts_others_gets_nothing(secured, doors, monkeypatch):
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{http_url(secured.config)}/health/live", verify=ssl.create_default_context())
    monkeypatch.delenv(CERTIFICATE_VARIABLE)
    monkeypatch.delenv(KEY_FILE_VARIABLE)
    bare = ClientTls(ca_file=doors.file)
    with pytest.raises((httpx.HTTPError, ssl.SSLError)):
        httpx.get(f"{http_url(secured.config)}/health/live", verify=bare.context())
    with Client(secured.grpc, tls=bare) as client, pytest.raises(PdserveError):
        client.generate_once(prompt="hi", max_tokens=1, deadline_s=10)


def test_no_port_of_ours_speaks_to_strangers(secured, doors):
    """S-16: the control plane and the workers, as the doors."""
    endpoints = secured.config.endpoints
    workers = [worker.worker.address for worker in view_of(secured).workers]
    assert len(workers) == len(POOLS)
    for address in (secured.control, secured.grpc, *workers):
        check_refuses_strangers(address, doors)
    check_refuses_strangers(f"{endpoints.host}:{endpoints.http_port}", doors)


def test_a_wider_bind_opens_our_ports_there_and_no_others(secured):
    """S-03 on Ray: the doors, the control plane, and what the table says of a worker; the rest is
    as on one machine."""
    ends = secured.config.endpoints
    found = settled_listeners(secured, may_lack=BESIDE_ANOTHER_RAY)
    there = [each for each in found if each.ip == ends.host]
    ports = {f"ray::ServeReplica:pdserve:{name}": set() for name in ("router", "control", "POOL")}
    for each in there:
        ports[each.title].add(each.port)
    assert ports["ray::ServeReplica:pdserve:router"] == {ends.http_port, ends.grpc_port}
    assert ports["ray::ServeReplica:pdserve:control"] == {ends.control_port}
    addresses = [worker.worker.address for worker in view_of(secured).workers]
    for_legs = {int(address.rpartition(":")[2]) for address in addresses}
    assert for_legs < ports["ray::ServeReplica:pdserve:POOL"]
    # Beside that one each end of the one link.
    assert len(ports["ray::ServeReplica:pdserve:POOL"]) <= 2 * len(addresses)
    check_table([each for each in found if each.ip != ends.host], may_lack=BESIDE_ANOTHER_RAY)
