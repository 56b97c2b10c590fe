"""`ray up` of the file for machines of one's own, with SSH that comes out on this machine.

Each node has a loopback address of its own, all else is what a user does: `ray up`, `pdserve
deploy`, calls. Ray's token and the cluster's are asked for throughout.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import httpx
import pytest
import yaml

from cluster import config as deploy_config
from cluster.clock import SystemClock
from cluster.config import Role, SecurityConfig
from cluster.control.status import get_cluster
from cluster.errors import NoWorker
from cluster.trust import ClusterToken
from deploy import processes
from deploy.run_state import RunState
from tests.e2e.plain_cluster import REPO, free_ports, make_config, with_pool
from tests.e2e.ray_cluster import PDSERVE

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(400)]

HEAD, *WORKERS = "127.0.0.2", "127.0.0.3", "127.0.0.4"
MARK = "RAY_UP_TEST"
BIN = Path(sys.executable).parent

SSH = """#!/bin/bash
# What follows the target runs here, as if this were the machine of that address.
while [[ $# -gt 0 && $1 != *@* ]]; do shift; done
[[ $# -gt 1 ]] || exit 0
export NODE_IP="${1#*@}"
shift
# One after the other: two nodes that start at once on one machine take the same socket.
exec flock -o "$HOME/lock" bash -c "$*" </dev/null
"""
RSYNC = r"""#!/bin/bash
from="${@: -2:1}" to="${@: -1}"
from="${from#*@*:}" to="${to#*@*:}"
from="${from/#\~/$HOME}" to="${to/#\~/$HOME}"
mkdir -p "$(dirname "$to")"
[[ $from -ef $to ]] && exit 0
if [[ -d $from ]]; then mkdir -p "$to" && cp -r "$from/." "$to"; else cp "$from" "$to"; fi
"""


class Site:
    """A home folder, tools that reach "other machines", and the cluster file for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.token_file = folder / "cluster-token"
        self.token_file.write_text(uuid.uuid4().hex)
        (folder / "ray-token").write_text(uuid.uuid4().hex * 2)
        tools = folder / "tools"
        tools.mkdir()
        for name, text in (("ssh", SSH), ("rsync", RSYNC)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.environment = os.environ | {
            MARK: self.mark,
            "SPT_NOENV": "1",  # else processes write their titles over the mark
            "HOME": str(folder),
            "RAY_TMPDIR": str(folder),
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{tools}:{BIN}:{os.environ['PATH']}",
        }
        for name in (".bashrc", ".bash_profile"):  # login shells set a PATH of their own
            (folder / name).write_text(f'export PATH="{self.environment["PATH"]}"\n')
        (folder / ".ray").mkdir()
        shutil.copy(folder / "ray-token", folder / ".ray" / "auth_token")
        (self.port,) = free_ports(1)
        self.file = folder / "local.yaml"
        self.file.write_text(self._cluster_file())

    def _cluster_file(self) -> str:
        text = (REPO / "deploy" / "ray" / "local.yaml").read_text()
        tree = yaml.safe_load(text.replace("6379", str(self.port)))
        tree["provider"] |= {"head_ip": HEAD, "worker_ips": WORKERS}
        tree["auth"] = {"ssh_user": "me", "ssh_private_key": str(self.token_file)}
        # What they would install is here already, and so is the repository.
        tree["setup_commands"] = []
        tree["file_mounts"] = {f"{self.folder}/.ray/auth_token": str(self.folder / "ray-token")}
        (client_port,) = free_ports(1)
        (start,) = tree["head_start_ray_commands"]
        tree["head_start_ray_commands"] = [f"{start} --ray-client-server-port={client_port}"]
        return yaml.safe_dump(tree)

    def run(self, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s,
            check=False, cwd=REPO,
        )  # fmt: skip

    def clear(self) -> None:
        """End what this site started, and nothing else: `ray stop` would end every Ray here."""
        for _ in range(3):  # a supervisor may start another one meanwhile
            left = processes.find_marked(MARK, self.mark)
            if not left:
                return
            processes.end_all(left, term_s=2.0, kill_s=5.0, clock=SystemClock())
        raise AssertionError(f"still there: {processes.find_marked(MARK, self.mark)}")


@pytest.fixture(scope="module")
def site():
    # Not pytest's folder: the paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="up", ignore_cleanup_errors=True) as folder:
        made = Site(Path(folder))
        try:
            up = made.run(str(BIN / "ray"), "up", "-y", str(made.file), timeout_s=120)
            assert up.returncode == 0, up.stdout + up.stderr
            yield made
        finally:
            made.clear()


@pytest.fixture(scope="module")
def config(site, tiny_llama):
    """A worker for each of three nodes: it takes all CPUs of one."""
    made = make_config(tiny_llama, {"mixed": (Role.MIXED, 1 + len(WORKERS))})
    made = with_pool(made, "mixed", cpus_per_worker=float(os.cpu_count() or 1))
    tree = deploy_config.to_tree(made)
    tree["endpoints"]["host"] = "head"
    tree["security"] = deploy_config.to_tree(made)["security"] | {
        "cluster_token_file": str(site.token_file)
    }
    (site.folder / "deploy.yaml").write_text(yaml.safe_dump(tree))
    return deploy_config.from_tree(tree)


def test_a_cluster_comes_up_and_serves_who_has_its_tokens(site, config):
    """`ray up`, then `pdserve deploy` waits for the nodes; S-16: a stranger learns nothing."""
    file, address = str(site.folder / "deploy.yaml"), f"{HEAD}:{site.port}"
    done = site.run(
        *PDSERVE, "deploy", file, "--cluster", address,
        "--wait-nodes", "120", "--wait-ready", "150",
        timeout_s=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"http://{HEAD}:{config.endpoints.http_port}" in done.stdout
    control = f"{HEAD}:{config.endpoints.control_port}"
    token = ClusterToken.load(SecurityConfig(cluster_token_file=str(site.token_file)))
    view = asyncio.run(get_cluster(control, 10.0, token))
    assert len({worker.worker.pid for worker in view.workers}) == 3
    with pytest.raises(NoWorker, match="UNAUTHENTICATED"):
        asyncio.run(get_cluster(control, 10.0))
    ask = {"model": "tiny", "prompt": "the harbour", "max_tokens": 8}
    url = f"http://{HEAD}:{config.endpoints.http_port}/v1/completions"
    assert httpx.post(url, json=ask, timeout=60).raise_for_status().json()["choices"]

    # Ray itself, too, talks to nobody without its token.
    stranger = site.environment | {"HOME": str(site.folder / "nobody")}
    (site.folder / "nobody").mkdir()
    refused = subprocess.run(
        [*PDSERVE, "plan", file, "--cluster", address], env=stranger, capture_output=True,
        text=True, timeout=90, check=False,
    )  # fmt: skip
    assert refused.returncode != 0
    gone = site.run(*PDSERVE, "down", "--cluster", address, timeout_s=90)
    RunState(config.endpoints.control_port).clear(10)
    assert "taken away" in gone.stdout, gone.stderr
