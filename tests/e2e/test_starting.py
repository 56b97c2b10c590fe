"""What can go wrong between `pdserve serve` and its end, and what is left of it: nothing."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from cluster import config as deploy_config
from cluster.config import Device, Host, Role, TransportKind
from deploy.cores import holders
from deploy.run_state import RunState
from tests.e2e.plain_cluster import REPO, make_config
from tests.e2e.ray_cluster import PDSERVE
from tests.factories_model import make_tokenizer

PAIR = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
STOP_S = 10.0
"""Ctrl-C ends everything within this."""
FAIL_S = 60.0
"""A worker that cannot load ends the start within this."""
CONFIGS = sorted((REPO / "deploy" / "configs").glob("*.yaml"))
on_a_cluster = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]


def on_ray_marks(function):
    for mark in on_a_cluster:
        function = mark(function)
    return function


class Start:
    """One `pdserve serve` in a process group of its own, as a terminal starts it."""

    def __init__(self, folder: Path, config, **environment: str) -> None:
        self.config = config
        self.state = RunState(config.endpoints.control_port)
        self.file = folder / "deploy.yaml"
        self.file.write_text(yaml.safe_dump(deploy_config.to_tree(config)))
        self.output = folder / "output.txt"
        self.began = time.monotonic()
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*PDSERVE, "serve", "--config", str(self.file)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | environment,
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, is_there, timeout_s: float = 90) -> None:
        """Poll what another process writes; it has no event to wait for."""
        deadline = time.monotonic() + timeout_s
        while not is_there(self):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def ctrl_c(self) -> None:
        """What a terminal does: the signal goes to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def down(self) -> subprocess.CompletedProcess[str]:
        return pdserve("down", "--config", str(self.file))

    def close(self) -> None:
        """Whatever the test found, nothing of it is left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self.down()

    def assert_nothing_left(self) -> None:
        assert self.state.started() == []
        endpoints = self.config.endpoints
        for port in (endpoints.http_port, endpoints.grpc_port, endpoints.control_port):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((endpoints.host, port))
                probe.listen(1)


def pdserve(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PDSERVE, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.fixture
def starts(tmp_path):
    """Start clusters that end with the test."""
    made = []

    def start(config, **environment):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Start(folder, config, **environment))
        return made[-1]

    yield start
    for each in made:
        each.close()


def is_claimed(start) -> bool:
    return "starting the cluster" in start.text()


def has_raylet(start) -> bool:
    return any(process.name == "raylet" for process in start.state.started())


def worker_pid(start) -> int:
    """The process that holds a place of the decode pool, from before it loads anything."""
    holder = holders(start.state.cores_dir).get("decode-0")
    return holder.pid if holder is not None else 0


def is_serving(start) -> bool:
    return "serving; stop with Ctrl-C" in start.text()


PHASES = {
    "start": (is_claimed, 130),
    "ray": (has_raylet, 130),
    "load": (worker_pid, 130),
    "proof": (lambda start: "one request as a proof" in start.text(), 130),
    "serve": (is_serving, 0),
}


@pytest.mark.parametrize("phase", PHASES)
@on_ray_marks
def test_ctrl_c_ends_everything_in_any_phase(phase, starts, tiny_llama):
    """Within 10 s, a second Ctrl-C included; no process and no port is left, without `down`."""
    is_there, code = PHASES[phase]
    start = starts(make_config(tiny_llama, PAIR))
    start.wait_for(is_there)
    told_at = time.monotonic()
    start.ctrl_c()
    if start.process.poll() is None:
        start.ctrl_c()
    ended_with = start.process.wait(30)
    assert time.monotonic() - told_at < STOP_S
    # The proof may be over before the signal arrives.
    assert ended_with in ({code, 0} if phase == "proof" else {code}), start.text()
    # A library that was cut short in a callback may say so before.
    assert start.text().splitlines()[-1] == "stopping ..."
    start.assert_nothing_left()
    assert not start.state.folder.exists()


@pytest.mark.faults
def test_ctrl_c_ends_one_process_while_it_loads(starts, tiny_llama):
    config = make_config(tiny_llama, PAIR)
    start = starts(inline(config))
    start.wait_for(is_claimed)
    told_at = time.monotonic()
    start.ctrl_c()
    assert start.process.wait(30) == 130, start.text()
    assert time.monotonic() - told_at < STOP_S
    start.assert_nothing_left()


def inline(config):
    tree = deploy_config.to_tree(config)
    return deploy_config.from_tree(
        tree | {"host": Host.INLINE.value, "transport": TransportKind.LOOPBACK.value}
    )


@on_ray_marks
def test_a_killed_launcher_leaves_what_down_clears(starts, tiny_llama):
    """SIGKILL: the next start refuses and says how to clear; then it works."""
    start = starts(make_config(tiny_llama, PAIR))
    start.wait_for(is_serving)
    processes = start.state.started()
    start.process.kill()
    start.process.wait(10)
    refused = pdserve("serve", "--once", "--config", str(start.file))
    assert refused.returncode == 1
    assert re.search(r"an earlier run left \d+ processes.*pid \d+", refused.stderr), refused.stderr
    command = re.search(r"`(.* down.*)`", refused.stderr)
    assert command is not None, refused.stderr
    # As it is printed, in a shell, from another folder.
    done = subprocess.run(
        command[1], shell=True, cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ended" in done.stdout
    assert not any(process.is_alive() for process in processes)
    start.assert_nothing_left()
    again = pdserve("serve", "--once", "--config", str(start.file), timeout_s=120)
    assert again.returncode == 0, again.stdout + again.stderr


def log_named_in(text: str) -> Path:
    found = re.search(r"\(log: (\S+)\)", text)
    assert found is not None, text
    return Path(found[1])


@on_ray_marks
def test_a_worker_that_cannot_load_ends_the_start(starts, tiny_llama, tmp_path):
    """A tensor is missing: the folder looks whole, the loader knows better."""
    folder = tmp_path / "torn"
    shutil.copytree(tiny_llama, folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    start = starts(make_config(folder, PAIR))
    assert start.process.wait(90) == 1
    assert time.monotonic() - start.began < FAIL_S
    assert "failed to start" in start.text()
    assert "model.layers.1.mlp.up_proj.weight" in start.text().splitlines()[-1]
    assert "up_proj" in log_named_in(start.text()).read_text()
    start.assert_nothing_left()


@on_ray_marks
def test_a_worker_killed_while_it_loads_ends_the_start(starts, tiny_llama):
    start = starts(make_config(tiny_llama, PAIR))
    start.wait_for(worker_pid)
    victim = worker_pid(start)
    os.kill(victim, signal.SIGKILL)
    assert start.process.wait(90) == 1
    assert time.monotonic() - start.began < FAIL_S
    assert "decode failed to start: its process was killed" in start.text()
    assert log_named_in(start.text()).exists()
    start.assert_nothing_left()


@on_ray_marks
def test_an_unsupported_model_is_refused_with_the_reason(starts, tmp_path):
    """An encoder-decoder model: the loader names what it is."""
    folder = tmp_path / "t5"
    config = T5Config(
        vocab_size=512, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    start = starts(make_config(folder, PAIR))
    assert start.process.wait(90) == 1
    assert time.monotonic() - start.began < FAIL_S
    assert re.search(r"failed to start: .*(t5|encoder-decoder)", start.text()), start.text()
    start.assert_nothing_left()


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("limits.default_deadline=5", "limits.default_deadline", "default_deadline_s"),
        ("pools.decode.role=decoder", "pools.1.role", "decode"),
        ("pools.decode.dtype=pf16", "pools.1.dtype", "fp16"),
        ("scheduling.policy=fcfc", "scheduling.policy", "fcfs"),
    ],
)
def test_an_unknown_key_or_value_is_named_with_the_nearest_valid(override, key, nearest):
    """Nothing is started, and it is said within seconds."""
    before = time.monotonic()
    done = pdserve("serve", "--once", "--set", override)
    assert done.returncode == 1
    assert key in done.stderr
    assert f"did you mean {nearest!r}" in done.stderr, done.stderr
    assert done.stdout == ""
    assert time.monotonic() - before < 10


def test_a_taken_port_is_named(tiny_llama, tmp_path):
    config = make_config(tiny_llama, PAIR)
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(deploy_config.to_tree(config)))
    with socket.socket() as holder:
        holder.bind((config.endpoints.host, config.endpoints.http_port))
        holder.listen(1)
        done = pdserve("serve", "--once", "--config", str(file))
    assert done.returncode == 1
    assert f"port {config.endpoints.http_port} (endpoints.http_port) is taken" in done.stderr
    assert "--set endpoints.http_port=" in done.stderr
    assert "starting" not in done.stdout


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads(file):
    config = deploy_config.load(file)
    assert deploy_config.from_tree(deploy_config.to_tree(config)) == config
    is_for_cpus = all(pool.device is Device.CPU for pool in config.pools)
    assert (config.model.path == "trial") is is_for_cpus


@pytest.mark.parametrize("command", [["status"], ["generate", "hello"]])
def test_commands_without_a_cluster_say_what_to_do(command, tiny_llama, tmp_path):
    config = make_config(tiny_llama, PAIR)
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(deploy_config.to_tree(config)))
    name, *rest = command
    done = pdserve(name, "--config", str(file), *rest)
    assert done.returncode == 1
    assert "answers at 127.0.0.1" in done.stderr
    assert "make run" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.faults
def test_printed_calls_work_as_they_stand(starts, tiny_llama):
    """Each of them in a shell, from another folder, with a proxy around that leads nowhere."""
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "grpc_proxy"), "http://127.0.0.1:9")
    start = starts(inline(make_config(tiny_llama, PAIR)), **proxies)
    start.wait_for(is_serving)
    calls = re.split(r"\n\n", start.text().split("\ncurl ", 1)[1])
    blocks = ["curl " + calls[0], calls[1], *calls[3].splitlines()]
    for block in blocks:
        environment = os.environ | ({} if block.startswith("curl") else proxies)
        done = subprocess.run(
            block, shell=True, cwd="/", env=environment, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        assert '"error"' not in done.stdout, done.stdout
        assert done.stdout.strip()
        if block.startswith("curl"):
            assert done.stdout.rstrip().endswith("data: [DONE]")
