"""Nothing in our packages can read or write anything that executes code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cluster", "prefill_worker", "decode_worker", "router", "deploy")
MODULES = {
    "pickle", "_pickle", "cPickle", "pickletools", "copyreg", "dill", "cloudpickle", "shelve",
    "marshal", "joblib", "multiprocessing",
}  # fmt: skip
"""They read, or send, what executes code; multiprocessing pickles whatever it passes on."""
ATTRIBUTES = {
    "Unpickler", "find_class", "__reduce__", "__reduce_ex__", "send_pyobj", "recv_pyobj",
    "add_safe_globals", "safe_globals", "weights_only", "allow_pickle", "trust_remote_code",
}  # fmt: skip
"""Ways round the rule: pickles by another name, and lists of what may be unpickled."""
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
            is_bad = is_forbidden(base, node.attr) or node.attr in ATTRIBUTES
            names = [node.attr] if is_bad else []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name] if node.name in ATTRIBUTES else []
        elif isinstance(node, ast.keyword):
            names = [node.arg] if node.arg in ATTRIBUTES and not is_off(node.value) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [node.func.id] if node.func.id in BUILTINS else []
        found += [f"{node.lineno}: {name}" for name in names]
    return found


def is_off(value: ast.expr) -> bool:
    """Whether a keyword says no in so many words."""
    return isinstance(value, ast.Constant) and value.value is False


def is_forbidden(base: str, name: str) -> bool:
    """Whether ``base.name`` is a torch.distributed object call, or one of CALLS."""
    is_object_call = name.endswith(("_object", "_object_list")) and "dist" in base
    return is_object_call or f"{base}.{name}" in CALLS


@pytest.mark.parametrize("package", PACKAGES)
def test_our_packages_hold_no_pickle(package: str):
    """CASES S-01, S-02: nor a list of what may be unpickled; generated wire code included."""
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
        "class Careful(base.Unpickler): pass",
        "class A:\n    def find_class(self, module, name): ...",
        "class A:\n    def __reduce__(self): ...",
        "torch.serialization.add_safe_globals([dict])",
        "read('x', weights_only=True)",
        "socket.recv_pyobj()",
        "import multiprocessing.connection",
        "from multiprocessing import Pipe",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str):
    assert violations(source) != []


def test_the_search_leaves_honest_code_alone():
    assert violations("import json\njson.loads('1')\nmodel.eval()\nyaml.safe_load('x')") == []
