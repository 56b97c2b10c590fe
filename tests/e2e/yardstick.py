"""How long this machine takes to start a process of what a worker is made of. A bound in seconds on
a worker's start is the product's own; where a plain process of the same run takes longer than
``USUAL_S`` for its imports, that is the machine, and is forgiven.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time

from tests.e2e.plain_cluster import REPO

logger = logging.getLogger(__name__)

USUAL_S = 8.0
"""On an idle core of 2 GHz."""
_STARTS = 2.0
"""Imports that a start takes: a node's processes and the worker's, beside whatever runs there."""
_IMPORTS = "import deploy.worker_actor, transformers.models.llama.modeling_llama"


def forgiven_s() -> float:
    """Import it all once; returns by how much longer than elsewhere a start may take here."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", _IMPORTS], cwd=REPO, check=True)
    took_s = time.monotonic() - began
    forgiven = _STARTS * max(0.0, took_s - USUAL_S)
    if forgiven:
        logger.warning("imports take %.1f s: a start may take %.1f s longer", took_s, forgiven)
    return forgiven
