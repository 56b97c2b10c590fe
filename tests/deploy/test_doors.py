"""What our own commands know of doors that speak TLS."""

import dataclasses

import pytest

from cluster.config import DeployConfig, PoolConfig, Role, SecurityConfig
from cluster.errors import StartupError
from deploy import calls, doors


@pytest.fixture
def config():
    return DeployConfig(pools=(PoolConfig(name="m", role=Role.MIXED),))


def test_files_of_no_use_end_a_start_before_anything_runs(config):
    """By the key of the deploy file."""
    for security, name in (
        ({"cluster_token_file": "/none"}, "security.cluster_token_file"),
        (
            {"door_certificate_file": "/none", "door_key_file": "/none"},
            "security.door_certificate_file",
        ),
    ):
        secured = dataclasses.replace(config, security=SecurityConfig(**security))
        with pytest.raises(StartupError, match=name):
            doors.check_files(secured)
    doors.check_files(config)


def test_calls_say_whom_to_trust_where_the_doors_speak_tls(config):
    """Never -plaintext, nor http, where nothing else is spoken."""
    security = SecurityConfig(
        door_certificate_file="/c.pem",
        door_key_file="/k.pem",
        door_ca_file="/ca.pem",
        door_certificate_name="api.example",
        door_clients_ca_file="/clients.pem",
    )
    secured = dataclasses.replace(config, security=security)
    text = calls.calls_text(secured)
    assert doors.http_url(secured) == "https://127.0.0.1:8000"
    assert "http://" not in text
    assert "-plaintext" not in text
    assert "https://api.example:" in text
    assert 'ClientTls(ca_file="/ca.pem", server_name="api.example")' in text
    assert "--cacert /ca.pem --connect-to ::127.0.0.1:" in text
    assert "-cacert /ca.pem -authority api.example" in text
    assert text.count('"$PDSERVE_CLIENT_CERTIFICATE"') == 2
    assert "-plaintext" in calls.calls_text(config)
