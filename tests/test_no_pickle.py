"""Nothing in our packages can read or write anything that executes code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cluster", "prefill_worker", "decode_worker", "router", "deploy")
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
CALLS = {"torch.load", "torch.save", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load"}
BUILTINS = {"eval", "exec"}


def violations(source: str) -> list[str]:
    """Names in ``source`` that execute what they read, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module] if node.module.split(".")[0] in MODULES else []
            names += [alias.name for alias in node.names if is_forbidden(node.module, alias.name)]
        elif isinstance(node, ast.Attribute):
            base = ast.unparse(node.value)
            names = [node.attr] if is_forbidden(base, node.attr) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [node.func.id] if node.func.id in BUILTINS else []
        found += [f"{node.lineno}: {name}" for name in names]
    return found


def is_forbidden(base: str, name: str) -> bool:
    """Whether ``base.name`` is a torch.distributed object call, or one of CALLS."""
    is_object_call = name.endswith(("_object", "_object_list")) and "dist" in base
    return is_object_call or f"{base}.{name}" in CALLS


@pytest.mark.parametrize("package", PACKAGES)
def test_our_packages_hold_no_pickle(package: str):
    found = [
        f"{path.relative_to(ROOT)}:{violation}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for violation in violations(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, dill",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "import torch\ntorch.distributed.all_gather_object([], 1)",
        "from torch.distributed import send_object_list",
        "import yaml\nyaml.load('x')",
        "eval('1')",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str):
    assert violations(source) != []


def test_the_search_leaves_honest_code_alone():
    assert violations("import json\njson.loads('1')\nmodel.eval()\nyaml.safe_load('x')") == []
