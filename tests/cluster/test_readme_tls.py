"""The README's way to certificates makes files that a cluster starts with."""

import shutil
import subprocess
import textwrap

import pytest

from cluster.config import SecurityConfig
from cluster.trust import ClusterToken
from tests.e2e.plain_cluster import REPO


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the README's commands are openssl's")
def test_a_member_starts_with_what_the_readme_makes(tmp_path):
    _, _, section = (REPO / "README.md").read_text().partition("- **TLS** is optional")
    commands = textwrap.dedent(section.split("  ```\n")[1])
    assert commands.count("openssl req") == 2
    subprocess.run(
        ["bash", "-ec", commands], cwd=tmp_path, check=True, timeout=60, capture_output=True
    )
    security = SecurityConfig(
        cluster_ca_file=str(tmp_path / "ca.pem"),
        cluster_certificate_file=str(tmp_path / "member.pem"),
        cluster_key_file=str(tmp_path / "member.key"),
    )
    assert ClusterToken.load(security)
