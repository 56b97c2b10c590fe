"""A small cluster for clients that others made, and where those are installed."""

import dataclasses
import os
from pathlib import Path

import pytest

from cluster.config import Role
from tests.e2e.plain_cluster import REPO, make_config, running

FOLDER = Path(os.environ.get("CLIENTS") or REPO / "build" / "clients")


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    """A short context and few choices: what is made up shall not take for ever."""
    config = make_config(tiny_llama, {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)})
    limits = dataclasses.replace(config.limits, max_n=4, max_choices=8)
    model = dataclasses.replace(config.model, max_model_len=128)
    config = dataclasses.replace(config, limits=limits, model=model)
    with running(config, tiny_llama, tmp_path_factory.mktemp("clients")) as cluster:
        yield cluster


@pytest.fixture
def program(request):
    """The path of the client that a test's parameter names; skips where it isn't installed."""
    path = FOLDER / "bin" / request.param
    if not path.exists():
        pytest.skip(f"{request.param} is not in {FOLDER}: see requirements.txt beside this test")
    return path
