"""S-03: every listener of every process stands in the README's table of ports; few are wide."""

import dataclasses
import ipaddress
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from cluster.config import EndpointsConfig, Host, Role, TransportKind
from deploy.run_state import RunState
from tests.e2e.plain_cluster import REPO, make_config, view_of, wait_until
from tests.e2e.ray_cluster import PDSERVE, ray_cluster

pytestmark = pytest.mark.ray
README = REPO / "README.md"
_NOT_ALWAYS = frozenset({"ray::RuntimeEnvAgent"})
"""Processes that listen for a part of their life."""
BESIDE_ANOTHER_RAY = _NOT_ALWAYS | {"python monitor", "python dashboard"}
"""And those whose port is the same for all Rays of a host: the first one has it."""
_SETTLE_S = 60.0


def rows(*, of_ray: bool = True) -> list[tuple[str, str, str, str]]:
    """The table of ports, on Ray or of what runs without it: process, port, address, reason."""
    section = README.read_text().split("## Ports", 1)[1].split("\n## ", 1)[0]
    tables = section.split("\nWithout Ray ", 1)
    table = tables[0 if of_ray else 1]
    found = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", table, re.M)
    assert all(reason.strip() for *_, reason in found)
    return found


def documented() -> dict[str, bool]:
    """Process title -> whether a wide bind is stated."""
    wide: dict[str, bool] = {}
    for title, _, bind, _ in rows():
        wide[title] = wide.get(title, False) or "every interface" in bind
    return wide


def title_of(process: psutil.Process) -> str:
    """Ray's process titles without what differs from run to run."""
    words = process.cmdline()
    title = words[0] if words else process.name()
    if title.startswith("ray::"):
        title = title.partition(".")[0]  # what it runs right now
        return re.sub(r"(ServeReplica:pdserve:)(prefill|decode|mixed)$", r"\1POOL", title)
    name = Path(title).name
    if name.startswith("python"):
        scripts = [Path(word).stem for word in words[1:] if not word.startswith("-")]
        return f"python {scripts[0]}"
    return name


class Listener(NamedTuple):
    """One socket that waits for connections."""

    pid: int
    title: str
    ip: str
    port: int

    @property
    def is_wide(self) -> bool:
        return not ipaddress.ip_address(self.ip).is_loopback


def listeners(on_ray) -> list[Listener]:
    """Those of every process that the cluster has started, and of the one that started it."""
    state = RunState(on_ray.config.endpoints.control_port)
    pids = {process.pid for process in state.started()} | {on_ray.process.pid}
    found = []
    for pid in pids:
        process = psutil.Process(pid)
        title = "pdserve" if pid == on_ray.process.pid else title_of(process)
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                ip = connection.laddr.ip.removeprefix("::ffff:")
                found.append(Listener(pid, title, ip, connection.laddr.port))
    return found


def settled_listeners(on_ray, *, may_lack: frozenset[str] = _NOT_ALWAYS) -> list[Listener]:
    """Those of every process, as soon as each row of the table has one: what Ray starts beside its
    raylet (its monitor, its dashboard) listens a while later on a busy machine."""
    found: list[Listener] = []

    def is_settled() -> bool:
        found[:] = listeners(on_ray)
        return not documented().keys() - {each.title for each in found} - may_lack

    wait_until(is_settled, _SETTLE_S, "a row of the table has no listener", pace_s=0.5)
    return found


def test_every_listener_is_documented(on_ray):
    """S-03, with two router replicas up: wide ones only where the table says so and why."""
    found = settled_listeners(on_ray)
    check_table(found)
    check_ports(found, on_ray.config.endpoints)
    legs = {w.worker.pid: int(w.worker.address.rpartition(":")[2]) for w in view_of(on_ray).workers}
    assert len(legs) == 4
    for pid, port in legs.items():
        at = narrow_ports(found, pid)
        assert port in at
        # Beside it that of Ray's core, and one for each link.
        assert 1 <= len(at - {port}) <= 1 + len(legs) / 2


def check_ports(found: list[Listener], endpoints: EndpointsConfig) -> None:
    """The table's second column: what it names is there, and each other port is one that is any."""
    for title in {row[0] for row in rows()}:
        told = [(port, bind) for row_title, port, bind, _ in rows() if row_title == title]
        named = dict(re.findall(r"`endpoints\.(\w+)` \((\d+)\)", str(told)))
        assert all(int(port) == getattr(EndpointsConfig(), key) for key, port in named.items())
        assert all(port.startswith(("any", "`endpoints.")) for port, _ in told)
        fixed = {getattr(endpoints, key) for key in named}
        num_any = sum(port == "any" and bind == "loopback" for port, bind in told)
        for pid in {each.pid for each in found if each.title == title}:
            at = narrow_ports(found, pid)
            assert fixed <= at, title
            assert not (at - fixed) & set(dataclasses.astuple(endpoints)), title
            if fixed:
                assert len(at - fixed) == num_any, (title, at, fixed)


def narrow_ports(found: list[Listener], pid: int) -> set[int]:
    return {each.port for each in found if each.pid == pid and not each.is_wide}


@pytest.mark.slow
def test_ray_listens_to_nobody_without_the_token_of_its_run(on_ray):
    """S-04: whoever else has an account on this machine reaches these ports, too."""
    (gcs,) = [found for found in listeners(on_ray) if found.title == "gcs_server"]
    token = {"RAY_AUTH_TOKEN": psutil.Process(gcs.pid).environ()["RAY_AUTH_TOKEN"]}
    address = f"{gcs.ip}:{gcs.port}"
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray looks for it at another address
    }
    tried = {
        name: subprocess.Popen(
            [*PDSERVE, "plan", REPO / "deploy/configs/trial.yaml", "--cluster", address],
            env=environment | foreign, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name, foreign in {
            "ours": token,
            "another": {"RAY_AUTH_TOKEN": "f" * 64},
            "none": {"RAY_AUTH_MODE": "disabled"},
        }.items()
    }  # fmt: skip
    said = {name: process.communicate(timeout=90)[0] for name, process in tried.items()}
    refused = {name for name, text in said.items() if re.search("(?i)authenticat", text)}
    assert refused == {"another", "none"}, said
    assert "no Ray answers" not in said["ours"], said


def check_table(found: list[Listener], *, may_lack: frozenset[str] = _NOT_ALWAYS) -> None:
    """Those of a cluster on Ray, on one machine, but what a wider bind opens."""
    table = documented()
    for listener in found:
        assert listener.title in table, f"{listener} is not in the table"
        assert table[listener.title] or not listener.is_wide, f"{listener} is wide"
    titles = {listener.title for listener in found}
    assert {"raylet", "gcs_server", "ray::ServeReplica:pdserve:router"} <= titles
    # One port a Serve replica: the one that Serve hard-codes. No proxy of Serve's runs, so none of
    # its statistics ports is there either.
    wide = Counter(listener.pid for listener in found if listener.is_wide)
    replicas = {each.pid for each in found if each.title.startswith("ray::ServeReplica:")}
    assert wide == dict.fromkeys(replicas, 1)
    # Every row is somebody's (what is gone must leave the table).
    assert table.keys() - titles <= may_lack


_REACH = """
import socket, sys
for port in map(int, sys.argv[2:]):
    with socket.socket() as each:
        each.settimeout(5)
        if each.connect_ex((sys.argv[1], port)) == 0:
            print(port)
"""


@pytest.fixture
def other_host():
    """A network namespace beside this one, with a wire to it: the address of this end, and a way to
    run a command at the other."""
    here, there, name = f"pd{os.getpid()}a", f"pd{os.getpid()}b", f"pdserve-{os.getpid()}"
    addresses = "198.51.100.1", "198.51.100.2"  # of a network that is for examples

    def ip(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)

    if shutil.which("ip") is None or ip("netns", "add", name).returncode:
        pytest.skip("no network namespace can be made here")
    try:
        for words in (
            ("link", "add", here, "type", "veth", "peer", "name", there, "netns", name),
            ("address", "add", f"{addresses[0]}/30", "dev", here),
            ("link", "set", here, "up"),
            ("-n", name, "address", "add", f"{addresses[1]}/30", "dev", there),
            ("-n", name, "link", "set", there, "up"),
        ):
            if (made := ip(*words)).returncode:
                pytest.skip(f"no wire to a network namespace can be laid here: {made.stderr}")
        yield addresses[0], lambda *words: ip("netns", "exec", name, *words)
    finally:
        ip("link", "del", here)
        ip("netns", "del", name)


def test_another_host_reaches_what_the_table_says_and_nothing_else(on_ray, other_host):
    """S-03, S-04: every port of Ray's own refuses; there is no dashboard to be found."""
    address, run_there = other_host
    found = listeners(on_ray)
    ports = sorted({listener.port for listener in found})
    # 8265: the dashboard; 8404 and 9101: the statistics of Serve's proxies; 10001: Ray's client.
    asked = [*ports, 8265, 8404, 9101, 10001]
    answer = run_there(sys.executable, "-c", _REACH, address, *map(str, asked))
    assert answer.returncode == 0, answer.stderr
    reached = {int(port) for port in answer.stdout.split()}
    assert reached == {listener.port for listener in found if listener.is_wide}
    assert reached, "the wire carries nothing (V)"


def own_address() -> str:
    """An address of this machine that is not loopback, where it has one."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family is socket.AF_INET and not ipaddress.ip_address(each.address).is_loopback:
                return each.address
    return pytest.skip("this machine has no address but loopback")


@pytest.mark.slow
def test_a_wider_bind_opens_its_ports_there_and_nowhere_else(tiny_llama, tmp_path):
    """S-03: all in one process, with a cluster token, on an address that is named."""
    address, token = own_address(), tmp_path / "token"
    token.write_text("0123456789abcdef" * 2)
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    config = make_config(tiny_llama, pools)
    config = dataclasses.replace(
        config,
        host=Host.INLINE,
        transport=TransportKind.LOOPBACK,
        endpoints=dataclasses.replace(config.endpoints, host=address),
        security=dataclasses.replace(config.security, cluster_token_file=str(token)),
    )
    with ray_cluster(config, tmp_path) as cluster:
        process = psutil.Process(cluster.process.pid)
        found = {
            tuple(connection.laddr)
            for each in (process, *process.children(recursive=True))
            for connection in each.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    ends = config.endpoints
    ports = {ends.http_port, ends.grpc_port, ends.control_port}
    found = {(ip.removeprefix("::ffff:"), port) for ip, port in found}
    wide = {port for ip, port in found if ip == address}
    assert wide >= ports
    assert len(wide - ports) == len(pools), "a worker's gRPC server each, on any port"
    assert all(ipaddress.ip_address(ip).is_loopback for ip, _ in found if ip != address)
