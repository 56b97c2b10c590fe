"""`ray up` of the file for machines of one's own, with SSH that comes out on this machine.

Each node has a loopback address of its own, all else is what a user does: the README's commands,
the cluster file's set-up, calls. Ray's token and the cluster's are asked for throughout.
"""

import asyncio
import contextlib
import getpass
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
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

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

HEAD, *WORKERS = "127.0.0.2", "127.0.0.3", "127.0.0.4"
MARK = "RAY_UP_TEST"
BIN = Path(sys.executable).parent
ENVIRONMENT = "pdserve-env"
"""The cluster file's, in the home folder of each machine."""

SSH = """#!/bin/bash
# What follows the target runs here, as if this were the machine of that address.
while [[ $# -gt 0 && $1 != *@* ]]; do shift; done
[[ $# -gt 1 ]] || exit 0
export NODE_IP="${1#*@}"
shift
[[ $* == *"pdserve d"* ]] && exec bash -c "$*" </dev/null
# One after the other: two nodes that start at once on one machine take the same socket.
exec flock -o "$HOME/lock" bash -c "$*" </dev/null
"""
RSYNC = r"""#!/bin/bash
# Leaves out what the cluster file says, and what else only a checkout has.
from="${@: -2:1}" to="${@: -1}"
from="${from#*@*:}" to="${to#*@*:}"
from="${from/#\~/$HOME}" to="${to/#\~/$HOME}"
mkdir -p "$(dirname "$to")"
[[ $from -ef $to ]] && exit 0
if [[ -d $from ]]; then
    mkdir -p "$to"
    tar -C "$from" --exclude=./{.git,.venv,build,.*_cache} -cf - . | tar -C "$to" -xf -
else
    cp "$from" "$to"
fi
"""
SUDO = """#!/bin/bash
exec "${@//\\/etc\\/pdserve/$HOME/etc/pdserve}"
"""


def commands() -> list[str]:
    """What the README tells people with several machines, line by line."""
    _, _, section = (REPO / "README.md").read_text().partition("## On several machines\n")
    return section.split("```\n")[1].splitlines()


class Site:
    """A home folder, tools that reach "other machines", and the cluster file for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.cluster_token_file = folder / "etc" / "pdserve" / "cluster-token"
        self.deploy_file = folder / "deploy.yaml"
        tools = folder / "tools"
        tools.mkdir()
        for name, text in (("ssh", SSH), ("rsync", RSYNC), ("sudo", SUDO)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        self.environment = os.environ | {
            MARK: self.mark,
            "SPT_NOENV": "1",  # else processes write their titles over the mark
            "HOME": str(folder),
            "USER": getpass.getuser(),  # SSH would set it
            "RAY_TMPDIR": str(folder),
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HF_HUB_OFFLINE": "1",
            "PIP_NO_INDEX": "1",
            "PATH": f"{tools}:{BIN}:{os.environ['PATH']}",
        }
        for name in (".bashrc", ".bash_profile"):  # login shells set a PATH of their own
            (folder / name).write_text(f'export PATH="{self.environment["PATH"]}"\n')
        with (folder / ".bash_profile").open("a") as profile:
            profile.write(". ~/.bashrc\n")
        self._make_environment()
        (self.port,) = free_ports(1)
        self.file = folder / "local.yaml"
        self.file.write_text(self._cluster_file())

    def _make_environment(self) -> None:
        """As the set-up makes it, with the packages of this one, which would take minutes."""
        made = self.folder / ENVIRONMENT
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", made], check=True, timeout=60
        )
        (packages,) = made.glob("lib/python*/site-packages")
        installed = next(path for path in sys.path if path.endswith("site-packages"))
        (packages / "here.pth").write_text(installed + "\n")
        (made / "bin" / "pip").write_text(f'#!/bin/bash\nexec {made}/bin/python -m pip "$@"\n')
        (made / "bin" / "pip").chmod(0o755)

    def _cluster_file(self) -> str:
        text = (REPO / "deploy" / "ray" / "local.yaml").read_text()
        text = text.replace("6379", str(self.port)).replace("/home/pdserve", str(self.folder))
        tree = yaml.safe_load(text)
        tree["provider"] |= {"head_ip": HEAD, "worker_ips": WORKERS}
        key = self.folder / "key"
        key.touch(mode=0o600)
        tree["auth"] = {"ssh_user": "me", "ssh_private_key": str(key)}
        (client_port,) = free_ports(1)
        (start,) = tree["head_start_ray_commands"]
        tree["head_start_ray_commands"] = [f"{start} --ray-client-server-port={client_port}"]
        return yaml.safe_dump(tree)

    def run(self, *command: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s,
            check=False, cwd=REPO,
        )  # fmt: skip

    def run_told(self, start: str, timeout_s: float) -> str:
        """Run the README's line that starts so, with this site's files and nobody to ask."""
        (line,) = [line for line in commands() if line.startswith(start)]
        line = re.sub(r"deploy/ray/\w+\.yaml", str(self.file), line)
        line = re.sub(r"pdserve/deploy/configs/[\w-]+\.yaml", str(self.deploy_file), line)
        line = line.replace("ray up ", "ray up -y ")
        done = self.run("bash", "-c", line, timeout_s=timeout_s)
        assert done.returncode == 0, line + done.stdout + done.stderr
        return done.stdout

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
            made.run_told("ray get-auth-token", timeout_s=60)
            made.run_told("mkdir", timeout_s=60)
            made.run_told("ray up", timeout_s=300)
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
    tree["security"] |= {"cluster_token_file": str(site.cluster_token_file)}
    site.deploy_file.write_text(yaml.safe_dump(tree))
    return deploy_config.from_tree(tree)


def test_set_up_installs_the_project_and_gives_it_the_token(site):
    installed = site.folder / ENVIRONMENT / "bin" / "pdserve"
    done = site.run(str(installed), "--help", timeout_s=60)
    assert done.returncode == 0, done.stderr
    (package,) = (site.folder / ENVIRONMENT).glob("lib/python*/site-packages/cluster/__init__.py")
    assert package.is_file()
    file = site.folder / ".pdserve" / "cluster-token"
    made = file.read_text()
    assert len(made.strip()) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    assert site.cluster_token_file.read_text() == made
    assert site.cluster_token_file.stat().st_mode & 0o777 == 0o600


def test_a_cluster_comes_up_and_serves_who_has_its_tokens(site, config):
    """`ray up`, then `pdserve deploy` waits for the nodes; S-16: a stranger learns nothing."""
    said = site.run_told("ray exec deploy/ray/aws.yaml 'pdserve deploy", timeout_s=300)
    assert f"http://{HEAD}:{config.endpoints.http_port}" in said
    control = f"{HEAD}:{config.endpoints.control_port}"
    token = ClusterToken.load(SecurityConfig(cluster_token_file=str(site.cluster_token_file)))
    view = asyncio.run(get_cluster(control, 10.0, token))
    assert len({worker.worker.pid for worker in view.workers}) == 3
    with pytest.raises(NoWorker, match="UNAUTHENTICATED"):
        asyncio.run(get_cluster(control, 10.0))
    ask = {"model": "tiny", "prompt": "the harbour", "max_tokens": 8}
    url = f"http://{HEAD}:{config.endpoints.http_port}/v1/completions"
    assert httpx.post(url, json=ask, timeout=60).raise_for_status().json()["choices"]

    # Ray's server talks to nobody with another token or none: its clients send what they have.
    for foreign in ({"RAY_AUTH_TOKEN": "f" * 64}, {"RAY_AUTH_MODE": "disabled"}):
        refused = subprocess.run(
            [*PDSERVE, "plan", str(site.deploy_file), "--cluster", f"{HEAD}:{site.port}"],
            env=site.environment | foreign, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert refused.returncode != 0
        assert re.search("(?i)authenticat", refused.stdout + refused.stderr), refused
    said = site.run_told("ray exec deploy/ray/aws.yaml 'pdserve down", timeout_s=90)
    RunState(config.endpoints.control_port).clear(10)
    assert "taken away" in said


def test_serve_run_takes_what_build_wrote(site, config):
    """The same app by Serve's own command, on the same nodes."""
    built = site.folder / "serve.yaml"
    told = site.run(
        *PDSERVE, "build", str(site.deploy_file), "--out", str(built),
        "--set", f"endpoints.host={HEAD}",
        timeout_s=60,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    url = f"http://{HEAD}:{config.endpoints.http_port}"
    with (site.folder / "serve-run.txt").open("w+") as output:
        running = subprocess.Popen(
            # A run in the background of a script inherits that SIGINT is ignored.
            ["env", "--default-signal=INT", BIN / "serve", "run", built,
             f"--address={HEAD}:{site.port}"],
            env=site.environment, stdout=output, stderr=subprocess.STDOUT, cwd=REPO,
        )  # fmt: skip
        try:
            until = time.monotonic() + 150
            while not is_ready(url):
                output.seek(0)
                assert running.poll() is None, output.read()
                assert time.monotonic() < until, output.read()
                time.sleep(0.5)
            ask = {"model": "tiny", "prompt": "the harbour", "max_tokens": 8}
            answer = httpx.post(f"{url}/v1/completions", json=ask, timeout=60)
            assert answer.raise_for_status().json()["choices"]
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(60)


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health/ready", timeout=10).status_code == 200
    return False


def test_every_command_of_the_section_was_run():
    told = ("ray get-auth-token", "mkdir", "ray up", "ray exec", "ray exec")
    for line, start in zip(commands(), told, strict=True):
        assert line.startswith(start)
