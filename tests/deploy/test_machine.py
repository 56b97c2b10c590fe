"""Pre-flight checks: each names what is wrong and what to do, before anything starts."""

import contextlib
import json
import os
import re
import socket
import subprocess

import psutil
import pytest
import yaml

from cluster import config as deploy_config
from cluster.errors import StartupError
from deploy import hardware, machine
from deploy.run_state import RunState

MIB = 1 << 20


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_config(**changes):
    pools = changes.pop(
        "pools", [{"name": "prefill", "role": "prefill"}, {"name": "d", "role": "decode"}]
    )
    doors = {f"{door}_port": free_port() for door in ("http", "grpc", "control")}
    endpoints = doors | changes.pop("endpoints", {})
    return deploy_config.from_tree({"pools": pools, "endpoints": endpoints} | changes)


@pytest.fixture
def state(tmp_path):
    return RunState(8002, root=tmp_path)


@pytest.fixture
def model(tmp_path):
    """A model of 1 Mi bf16 parameters, whose token takes 2 x 30 x 3 x 64 KV elements."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "dtype": "bfloat16", "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "hidden_size": 576,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes(2 * MIB))
    return folder


def test_a_fit_machine_passes(state, model):
    machine.check_machine(make_config(), state=state)
    machine.check_memory(make_config(), model)


def test_a_taken_port_is_named_with_its_holder_and_key(state):
    with contextlib.closing(socket.socket()) as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        config = make_config(endpoints={"grpc_port": port})
        me = psutil.Process().name()
        expected = (
            rf"port {port} \(endpoints.grpc_port\) is taken by {me} \(pid {os.getpid()}\).*--set"
        )
        with pytest.raises(StartupError, match=expected):
            machine.check_machine(config, state=state)


def test_the_doors_of_a_cluster_that_comes_to_this_machine_are_free():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(StartupError, match=rf"^port {port} \(endpoints\.http_port\) is taken"):
            machine.check_ports(make_config(endpoints={"http_port": port}))
    machine.check_ports(make_config())


def test_of_another_machines_doors_nobody_can_tell(monkeypatch):
    """`pdserve deploy` from a worker node: the routers look themselves."""
    monkeypatch.setattr(machine, "port_problems", pytest.fail)
    shared = {"security": {"cluster_token_env": "TOKEN"}}
    machine.check_ports(make_config(endpoints={"host": "192.0.2.1"}, **shared))
    assert machine.is_here("127.0.0.1")
    assert machine.is_here("::1")


def test_a_port_taken_on_all_interfaces_with_reuseport_is_found():
    with contextlib.closing(socket.socket()) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert "is taken" in str(machine.port_problem("127.0.0.1", port, "k"))


def test_lingering_connections_do_not_take_a_port():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # this side closes first: its half of the connection lingers
        assert client.recv(1) == b""
        client.close()
    assert machine.port_problem("127.0.0.1", port, "k") is None


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("no.such.host.invalid", "is not an address"),
        ("192.0.2.1", "not an address of this machine"),
    ],
)
def test_a_host_that_is_not_here_is_refused(host, reason):
    assert reason in str(machine.port_problem(host, 8000, "k"))


def test_cores_that_do_not_exist_are_named(state):
    pools = [{"name": "m", "role": "mixed", "cores": [min(os.sched_getaffinity(0)), 4095]}]
    with pytest.raises(StartupError, match=r"pools\.m\.cores: .* no core 4095: choose from"):
        machine.check_machine(make_config(pools=pools), state=state)


def test_several_problems_are_told_together(state):
    pools = [{"name": "m", "role": "mixed", "cores": [4095]}]
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as holder:
        config = make_config(pools=pools, endpoints={"grpc_port": holder.getsockname()[1]})
        with pytest.raises(StartupError, match=r"(?s)- pools\.m\.cores.*- port \d+ \(endp"):
            machine.check_machine(config, state=state)


def test_the_remedy_for_missing_cores_can_be_loaded(state):
    """service_cores asks for cores of each pool, so all of them are given up together."""
    pools = [{"name": "m", "role": "mixed", "cores": [4095]}]
    config = make_config(pools=pools, service_cores=[min(os.sched_getaffinity(0))])
    with pytest.raises(StartupError, match="pin nothing") as caught:
        machine.check_machine(config, state=state)
    overrides = re.findall(r"--set (\S+)", caught.value.message)
    file = state.folder.parent.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(deploy_config.to_tree(config)))
    machine.check_machine(deploy_config.load(file, overrides), state=state)


def test_leftovers_are_told_alone(state, monkeypatch):
    for name in ("PDSERVE_RUN_ID", "SPT_NOENV"):
        monkeypatch.setenv(name, "")
    state.begin({})
    pools = [{"name": "m", "role": "mixed", "cores": [4095]}]
    with subprocess.Popen(["sleep", "600"]) as child:
        with pytest.raises(StartupError, match="running already"):
            machine.check_machine(make_config(pools=pools), state=state)
        child.kill()
    state.clear(1)


def test_the_estimate_counts_weights_kv_and_fixed_parts(model):
    pools = [
        {"name": "p", "role": "prefill", "dtype": "bf16", "kv_tokens": 1600},
        {"name": "d", "role": "decode", "dtype": "fp32", "kv_tokens": 3200, "count": 2},
    ]
    token_elements = 2 * 30 * 3 * 64
    tensors = 2 * (MIB + 1600 * token_elements) + 2 * 4 * (MIB + 3200 * token_elements)
    config = make_config(pools=pools, router={"replicas": 2})
    fixed = (3 * 350 + 2 * 200 + 120 + 800) * MIB
    assert machine.estimate_bytes(config, model) == tensors + fixed
    inline = make_config(pools=pools, host="inline", transport="loopback")
    assert machine.estimate_bytes(inline, model) == tensors + 550 * MIB


def test_a_gpu_takes_weights_and_kv_off_the_host(model):
    pools = [
        {"name": "m", "role": "mixed", "device": "cuda", "kv_tokens": 1 << 20, "gpus_per_worker": 1}
    ]
    config = make_config(pools=pools)
    assert machine.estimate_bytes(config, model) == (1500 + 200 + 120 + 800) * MIB


def test_too_little_memory_is_refused_with_both_numbers(model, monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda: 100 * MIB)
    with pytest.raises(StartupError, match=r"about \d+ MiB of memory, 100 MiB.*kv_tokens"):
        machine.check_memory(make_config(), model)


def test_a_models_older_words_are_understood(model):
    (model / "config.json").write_text(
        json.dumps({"n_layer": 2, "n_head": 4, "n_embd": 64, "torch_dtype": "float32"})
    )
    pools = [{"name": "m", "role": "mixed", "dtype": "fp32", "kv_tokens": 1600}]
    tensors = 2 * MIB + 1600 * 4 * 256
    assert machine.estimate_bytes(make_config(pools=pools), model) == tensors + 1470 * MIB


def test_an_unreadable_model_configuration_is_an_error_of_ours(model):
    (model / "config.json").write_text("{")
    with pytest.raises(StartupError, match="cannot read the model's configuration"):
        machine.estimate_bytes(make_config(), model)


def test_a_containers_limit_counts(tmp_path):
    (tmp_path / "memory.max").write_text(f"{512 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{500 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {100 * MIB}\n")
    assert machine.available_bytes(tmp_path) == 112 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_bytes(tmp_path) > 112 * MIB


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx512f avx512_bf16x", False),
        ("model name\t: bf16", False),
    ],
)
def test_bf16_in_hardware_is_read_from_the_cpus_flags(tmp_path, line, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n")
    assert hardware.has_bf16(cpuinfo) is expected
    assert hardware.has_bf16(tmp_path / "none") is False
