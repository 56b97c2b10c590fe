"""S-17: what is installed is what constraints.txt says, and nothing with a hole that we know of."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PINS = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)$", (Path(__file__).parents[1] / "constraints.txt").read_text(), re.M
    )
}
FLOORS = {
    "ray": "2.54.0",  # CVE-2026-27482: POST and PUT were blocked for strangers, DELETE not (S-04)
    "torch": "2.6.0",  # CVE-2025-32434: weights_only was no protection (S-09)
    "jinja2": "3.1.6",  # CVE-2025-27516: a way out of the sandbox of chat templates
    "h11": "0.16.0",  # CVE-2025-43859: chunked bodies could be smuggled
    "starlette": "0.49.1",  # CVE-2025-62727: quadratic time for a Range header
    "protobuf": "6.31.1",  # CVE-2025-4565: recursion without a bound
    "requests": "2.32.4",  # CVE-2024-47081: a .netrc was told to another host
    "urllib3": "2.5.0",  # CVE-2025-50181: redirects that were not to be followed
}


def needed(name: str, extras: tuple[str, ...] = (), seen: set[str] | None = None) -> set[str]:
    """Every distribution that is installed because this one is."""
    seen = set() if seen is None else seen
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            continue
        other = canonicalize_name(requirement.name)
        key = f"{other}[{','.join(sorted(requirement.extras))}]"
        if key not in seen and is_installed(other):
            seen.add(key)
            needed(other, tuple(requirement.extras), seen)
    return {key.partition("[")[0] for key in seen}


def is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def test_whatever_is_needed_is_pinned_to_what_is_installed():
    names = needed("pdserve", ("dev",)) - {"pdserve", "setuptools"}
    assert len(names) > 50
    # setuptools is there before anything is installed. A build of torch for CPUs has a local
    # version, and one for CUDA brings libraries of its own.
    libraries = {name for name in names if name.startswith(("nvidia-", "triton", "cuda-"))}
    odd = {
        name: metadata.version(name)
        for name in names - libraries
        if PINS.get(name, Version("0")).public != Version(metadata.version(name)).public
    }
    assert odd == {}


@pytest.mark.parametrize("name", FLOORS)
def test_nothing_is_older_than_its_last_known_hole(name):
    assert PINS[name] >= Version(FLOORS[name])
