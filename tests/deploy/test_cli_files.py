"""The commands about deploy files that start nothing, and those that are refused before they do."""

import subprocess

import pytest
import yaml

from deploy import cli
from deploy.run_state import RunState
from tests.e2e.plain_cluster import REPO, free_ports
from tests.e2e.ray_cluster import PDSERVE

TRIAL = str(REPO / "deploy" / "configs" / "trial.yaml")


def test_build_writes_what_serve_run_takes(tmp_path, capsys):
    out = tmp_path / "serve.yaml"
    assert cli.main(["build", TRIAL, "--out", str(out)]) == 0
    assert cli.main(["build", TRIAL]) == 0
    assert capsys.readouterr().out == out.read_text()
    assert yaml.safe_load(out.read_text())["applications"][0]["name"] == "pdserve"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_no_wider_door_without_an_address_and_a_token(host, capsys):
    """S-16: refused before anything starts, with what is missing."""
    assert cli.main(["build", TRIAL, "--set", f"endpoints.host='{host}'"]) == 1
    assert "endpoints.host" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("serve", "--config"), ("deploy",)])
@pytest.mark.parametrize(
    ("host", "remedy"),
    [
        ("0.0.0.0", "use 127.0.0.1, or name the head node's address"),
        ("192.0.2.7", "set security.cluster_token_file, or use 127.0.0.1"),
    ],
)
def test_nothing_starts_on_a_wider_door_without_a_token(host, remedy, command):
    """S-16: exit code 1, one line with the remedy, and no run folder."""
    (port,) = free_ports(1)
    changes = f"endpoints.host='{host}'", f"endpoints.control_port={port}"
    options = [word for change in changes for word in ("--set", change)]
    done = subprocess.run(
        [*PDSERVE, *command, TRIAL, *options],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"pdserve: endpoints.host: {host} "), done.stderr
    assert remedy in done.stderr
    assert done.stderr.count("\n") == 1
    assert not RunState(port).folder.exists()


def test_a_pool_that_no_gpu_holds_is_a_failure_of_its_plan(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}'
    )
    changes = {
        "model.path": str(tmp_path),
        "pools.mixed.accelerator_type": "T4",
        "pools.mixed.kv_bytes": "99_000_000_000",
    }
    options = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    file = str(REPO / "deploy" / "configs" / "single-gpu.yaml")
    assert cli.main(["plan", file, *options]) == 1
    shown = capsys.readouterr()
    assert "T4" in shown.out
    assert "pool mixed: a worker takes 99" in shown.err
