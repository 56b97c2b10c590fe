"""Every fault in every state of a request, with two routers: who notices, and what is left.

Cells mostly wait: for somebody to be missed, or to be back. So several clusters play them at once,
and each test asks for what came of its cell. ``-s`` prints them all as a table, with a reason where
there can be no cell.
"""

from __future__ import annotations

import pytest

from tests.e2e.fault_arena import Matrix
from tests.e2e.fault_cells import Cell, cells
from tests.factories_model import write_tiny_llama

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
HEAD_DIM = 1024
"""32 KiB of KV a token: a step of one chunk is worth sending layer by layer."""


@pytest.fixture(scope="module")
def matrix(request, tmp_path_factory, pytestconfig):
    mine = (item for item in request.session.items if item.path == request.path)
    cells = [item.callspec.params["cell"] for item in mine if hasattr(item, "callspec")]
    model = write_tiny_llama(tmp_path_factory.mktemp("wide-llama"), head_dim=HEAD_DIM)
    matrix = Matrix(model, tmp_path_factory, cells)
    yield matrix
    matrix.stop()
    manager = pytestconfig.pluginmanager
    with manager.getplugin("capturemanager").global_and_fixture_disabled():
        manager.getplugin("terminalreporter").write(matrix.as_text())


@pytest.mark.parametrize("cell", list(cells()), ids=str)
def test_nothing_is_lost(cell: Cell, matrix: Matrix):
    """CASES P-11, P-19, P-20, P-21: pools add up, the canary is right, and nobody hangs."""
    matrix.results[cell].result()


def test_every_pool_proves_its_books_after_its_last_cell(matrix: Matrix):
    """CASES P-11, P-19, P-20, P-21: a worker's own proof is due a second after its last leg."""
    for arena in matrix.arenas:
        arena.proof.result(120)
