"""S-03: every listener of every process stands in the README's table of ports; few are wide."""

import dataclasses
import ipaddress
import re
import socket
from pathlib import Path

import psutil
import pytest

from cluster.config import Host, Role, TransportKind
from deploy.run_state import RunState
from tests.e2e.plain_cluster import make_config
from tests.e2e.ray_cluster import ray_cluster

pytestmark = pytest.mark.ray
README = Path(__file__).parents[2] / "README.md"


def documented() -> dict[str, bool]:
    """The table of ports: process title -> whether a wide bind is stated, with its reason."""
    section = README.read_text().split("## Ports", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.M)
    assert all(reason.strip() for *_, reason in rows)
    wide: dict[str, bool] = {}
    for title, _, bind, _ in rows:
        wide[title] = wide.get(title, False) or "every interface" in bind
    return wide


def title_of(process: psutil.Process) -> str:
    """Ray's process titles without what differs from run to run."""
    words = process.cmdline()
    title = words[0] if words else process.name()
    if title.startswith("ray::"):
        return re.sub(r"(ServeReplica:pdserve:)(prefill|decode|mixed)$", r"\1POOL", title)
    name = Path(title).name
    if name.startswith("python"):
        scripts = [Path(word).stem for word in words[1:] if not word.startswith("-")]
        return f"python {scripts[0]}"
    return name


def test_every_listener_is_documented(on_ray):
    """S-03, with two router replicas up: wide ones only where the table says so and why."""
    table = documented()
    state = RunState(on_ray.config.endpoints.control_port)
    pids = {process.pid for process in state.started()} | {on_ray.process.pid}
    seen_wide: dict[str, int] = {}
    seen = set()
    for pid in pids:
        process = psutil.Process(pid)
        title = "pdserve" if pid == on_ray.process.pid else title_of(process)
        for connection in process.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_LISTEN:
                continue
            assert title in table, f"{title} listens on {connection.laddr} and is not in the table"
            seen.add(title)
            address = ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:"))
            if not address.is_loopback:
                assert table[title], f"{title} listens wide on {connection.laddr}"
                seen_wide[f"{title} {pid}"] = seen_wide.get(f"{title} {pid}", 0) + 1
    assert {"raylet", "gcs_server", "ray::ServeReplica:pdserve:router"} <= seen
    # One port a Serve replica: the one that Serve hard-codes.
    assert set(seen_wide.values()) == {1}


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
