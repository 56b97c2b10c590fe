"""A whole cluster by TLS: doors, control plane, legs and links, with real worker processes."""

import dataclasses
import ssl

import grpc
import httpx
import psutil
import pytest
import yaml

from cluster import config as deploy_config
from cluster.config import Role, SecurityConfig
from deploy import cli
from deploy.client import CERTIFICATE_VARIABLE, KEY_FILE_VARIABLE, Client, ClientTls
from tests.certificates import Authority, member_tree
from tests.e2e.plain_cluster import make_config, running

pytestmark = pytest.mark.slow

POOLS = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
ASK = {"prompt_ids": {"ids": [7 + 3 * i for i in range(80)]}, "max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("doors"), "doors")


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("clients"), "clients")


@pytest.fixture(scope="module")
def secured(tiny_llama, doors, clients, tmp_path_factory):
    folder = tmp_path_factory.mktemp("secured")
    members = Authority(tmp_path_factory.mktemp("members"), "members")
    door, token = doors.sign("127.0.0.1"), folder / "token"
    token.write_text("0123456789abcdef" * 2)
    security = SecurityConfig(
        cluster_token_file=str(token),
        door_certificate_file=door.certificate,
        door_key_file=door.key,
        door_ca_file=doors.file,
        door_clients_ca_file=clients.file,
        **member_tree(members),
    )
    config = dataclasses.replace(make_config(tiny_llama, POOLS), security=security)
    own = clients.sign("a client")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CERTIFICATE_VARIABLE, own.certificate)
        patch.setenv(KEY_FILE_VARIABLE, own.key)
        with running(config, tiny_llama, folder) as cluster:
            yield cluster


def answer(cluster, tls=None):
    """The token ids of a request, and its timeline."""
    with Client(cluster.grpc, tls=tls) as client:
        pieces = list(client.generate(**ASK, timeline=True, deadline_s=60))
    return [i for piece in pieces for i in piece.token_ids], pieces[-1].timeline


def test_the_same_tokens_come_and_kv_moves(secured, doors, tiny_llama, tmp_path):
    tokens, timeline = answer(secured, ClientTls(ca_file=doors.file))
    assert len(tokens) == ASK["max_tokens"]
    assert timeline.prefill.transfer_bytes > 0
    secured.wait_quiet()
    with running(make_config(tiny_llama, POOLS), tiny_llama, tmp_path) as plain:
        assert answer(plain)[0] == tokens


def listeners(cluster):
    """Each port that this process or a worker listens on."""
    processes = [psutil.Process(), *(psutil.Process(p.pid) for p in cluster.workers.values())]
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_every_grpc_and_http_port_speaks_tls_to_whom_it_knows_only(secured, doors):
    """S-16: whoever shows no certificate, or a foreign one, gets no answer at any of them.

    What else listens is Gloo's: KV moves in clear, and the README says so.
    """
    config, found = secured.config, listeners(secured)
    addresses = {worker.worker.address for worker in secured.view().workers}
    ports = {int(address.rpartition(":")[2]) for address in addresses}
    ends = config.endpoints
    ports |= {ends.http_port, ends.grpc_port, ends.control_port}
    assert ports <= found
    for port in ports:
        check_refuses_strangers(f"127.0.0.1:{port}", doors)


def check_refuses_strangers(address: str, doors: Authority) -> None:
    """Neither plaintext nor a client without a certificate is answered there."""
    with grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    foreign = ssl.create_default_context(cafile=doors.file)
    foreign.check_hostname, foreign.verify_mode = False, ssl.CERT_NONE
    with httpx.Client(verify=foreign, trust_env=False) as client:
        for scheme in ("https", "http"):
            with pytest.raises(httpx.HTTPError):
                client.get(f"{scheme}://{address}/health/live")


def test_our_own_commands_speak_it(secured, capsys, tmp_path):
    path = tmp_path / "deploy.yaml"
    path.write_text(yaml.safe_dump(deploy_config.to_tree(secured.config)))
    assert cli.main(["status", "--config", str(path)]) == 0
    assert "prefill-0" in capsys.readouterr().out
    asked = ["generate", "--raw", "--max-tokens", "4", "--config", str(path), "a b"]
    assert cli.main(asked) == 0
    assert "4 out" in capsys.readouterr().out


def test_a_command_with_foreign_certificates_is_told_why(secured, clients, capsys, tmp_path):
    tree = deploy_config.to_tree(secured.config)
    tree["security"] |= member_tree(clients)
    path = tmp_path / "deploy.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert cli.main(["status", "--config", str(path)]) == 1
    assert "door_clients_ca_file: the cluster's own CA" in capsys.readouterr().err
    tree["security"]["door_clients_ca_file"] = ""
    path.write_text(yaml.safe_dump(tree))
    assert cli.main(["status", "--config", str(path)]) == 1
    assert "TLS handshake failed" in capsys.readouterr().err
