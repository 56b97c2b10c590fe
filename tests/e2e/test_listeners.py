"""S-03: every listener of every process stands in the README's table of ports; few are wide."""

import ipaddress
import re
from pathlib import Path

import psutil
import pytest

from deploy.run_state import RunState

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
