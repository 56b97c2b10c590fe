"""The Dockerfile, as far as it can be checked without an engine."""

import re
import shlex
import tomllib

import pytest

from cluster.config import EndpointsConfig
from tests.e2e.plain_cluster import REPO

PINS = dict(
    line.split("==", 1)
    for line in (REPO / "constraints.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def steps():
    """The instructions in order, continued lines joined, as (word, rest)."""
    text = re.sub(r"^\s*#.*\n", "", (REPO / "Dockerfile").read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def sources(steps):
    """What is copied from the repository."""
    words = [shlex.split(rest) for name, rest in steps if name in {"COPY", "ADD"}]
    return [source for line in words if not line[0].startswith("--from") for source in line[:-1]]


def test_what_it_copies_is_there_and_sent_to_the_engine(steps):
    sent = set(re.findall(r"^!(.+)$", (REPO / ".dockerignore").read_text(), re.M))
    for source in sources(steps):
        assert (REPO / source).exists(), source
    assert set(sources(steps)) == sent


def test_all_that_the_wheel_has_is_copied(steps):
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packages) <= set(sources(steps))


def test_the_last_user_is_not_root(steps):
    last_stage = max(i for i, (name, _) in enumerate(steps) if name == "FROM")
    users = [rest for name, rest in steps[last_stage:] if name == "USER"]
    assert users
    assert all(int(user) >= 10000 for user in users)
    after = [name for name, _ in steps[last_stage:]]
    assert "RUN" not in after[after.index("USER") :]


def test_everything_is_pinned(steps):
    """The base by its whole version, which the project allows; packages by constraints.txt."""
    (base,) = [rest.partition("=")[2] for name, rest in steps if rest.startswith("PYTHON=")]
    assert {rest.split()[0] for name, rest in steps if name == "FROM"} == {"${PYTHON}"}
    version = re.fullmatch(r"python:(\d+)\.(\d+)\.\d+-[a-z]+-[a-z]+", base)
    least = re.fullmatch(r">=(\d+)\.(\d+)", PROJECT["project"]["requires-python"])
    assert tuple(map(int, version.groups())) >= tuple(map(int, least.groups()))
    installs = [
        part for name, rest in steps if name == "RUN"
        for part in rest.split("&&") if "pip install" in part
    ]  # fmt: skip
    assert len(installs) == 3
    for install in installs:
        assert "constraints.txt" in install or "-c pins.txt" in install, install
    for package in ("torch", "ray", "hatchling", "editables", "transformers", "grpcio"):
        assert package in PINS, package


def test_it_opens_the_doors_of_the_default_deploy_file(steps):
    (ports,) = [rest.split() for name, rest in steps if name == "EXPOSE"]
    assert ports == [str(EndpointsConfig().http_port), str(EndpointsConfig().grpc_port)]
    (entry,) = [rest for name, rest in steps if name == "ENTRYPOINT"]
    assert re.findall(r'"([^"]+)"', entry) == [*PROJECT["project"]["scripts"]]
