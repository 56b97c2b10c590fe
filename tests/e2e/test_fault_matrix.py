"""Every fault in every state of a handoff, with two routers: who notices, and what is left."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from cluster.config import Role
from tests.e2e.fault_cells import STATES, Cell, Scene, cells
from tests.e2e.plain_cluster import make_config, with_pool
from tests.e2e.process_cluster import CONTROL, ProcessCluster
from tests.e2e.streams import Prompts, Stream

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]
CELLS = list(cells())
NUM_PROMPT, NUM_TOKENS, CHUNK = 80, 24, 16


class Arena:
    """The cluster all cells are played on; a new one after a cell that left it in ruins."""

    def __init__(self, config, model, folders) -> None:
        self._config = config
        self._model = model
        self._folders = folders
        self.cluster: ProcessCluster | None = None
        self.routers = itertools.cycle(("router-0", "router-1"))
        count = len(CELLS) + 1
        self.prompts = Prompts(model, count, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)
        self.short = Prompts(model, count, num_prompt=CHUNK, num_tokens=NUM_TOKENS)
        self.table: dict[tuple[str, str], str] = {}

    def ready(self) -> Scene:
        if self.cluster is None:
            folder = self._folders.mktemp("matrix")
            self.cluster = ProcessCluster(self._config, self._model, folder, num_routers=2)
            self.cluster.start()
        return Scene(self.cluster)

    def check_canary(self, router: str) -> None:
        canary = self.prompts.stream(self.cluster.routers[router].grpc, 0)
        canary.wait_end()
        self.prompts.check(0, canary)

    def tear_down(self) -> None:
        if self.cluster is not None:
            self.cluster.stop()
            self.cluster = None

    def as_text(self) -> str:
        """Return the matrix: a line for each fault, a column for each state."""
        columns = [*STATES, "any"]
        rows = list(dict.fromkeys(row for row, _ in self.table))
        width = max((len(row) for row in rows), default=0)
        lines = [" " * width + "".join(f"  {column:>14}" for column in columns)]
        lines += [
            f"{row:<{width}}" + "".join(f"  {self.table.get((row, c), ''):>14}" for c in columns)
            for row in rows
        ]
        return "\n" + "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def arena(tiny_llama, tmp_path_factory, pytestconfig):
    """Two workers of each kind and two routers, short leases, digests on."""
    pools = {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)}
    config = with_pool(make_config(tiny_llama, pools), "prefill", chunk_tokens=CHUNK)
    limits = dataclasses.replace(config.limits, export_lease_s=3.0, kv_digest=True)
    config = dataclasses.replace(config, limits=limits)
    arena = Arena(config, tiny_llama, tmp_path_factory)
    yield arena
    arena.tear_down()
    manager = pytestconfig.pluginmanager
    with manager.getplugin("capturemanager").global_and_fixture_disabled():
        manager.getplugin("terminalreporter").write(arena.as_text())


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_nothing_is_lost(cell: Cell, arena: Arena):
    """CASES P-11, P-19, P-20, P-21: pools add up, the canary is right, and nobody hangs."""
    scene, router, number = arena.ready(), next(arena.routers), CELLS.index(cell) + 1
    cluster = arena.cluster
    pids = {name: process.pid for name, process in cluster.processes.items()}
    prompts = arena.short if cell.is_short else arena.prompts
    victim = Stream(cluster.routers[router].grpc, prompts.prompts[number], NUM_TOKENS)
    try:
        scene.play(cell, victim, router)
        scene.mend()
        arena.table[cell.row, cell.state] = f"{victim.error or 'ok'} {victim.seconds:.1f}s"
        check_left(arena, cell, pids)
        is_whole = not (cell.may_fail or cell.fault == "leave")
        prompts.check(number, victim, is_whole=is_whole)
    except BaseException:
        arena.table[cell.row, cell.state] = f"FAILED {victim.error} {victim.seconds:.1f}s"
        arena.tear_down()
        raise


def check_left(arena: Arena, cell: Cell, pids: dict[str, int]) -> None:
    """Q and C: nothing is held, nobody else died, every pool's own check agrees."""
    cluster = arena.cluster
    # Nobody is waited for: a grant whose end was not told is forgotten after 20 s.
    cluster.wait_quiet(30 if cell.fault == "drop done" else 10)
    for router in cluster.routers:
        arena.check_canary(router)
    changed = {name for name, pid in pids.items() if cluster.pid(name) != pid}
    assert len(changed) == (cell.fault == "kill"), f"{changed} were replaced"
    for worker in cluster.view().workers:
        assert worker.report.counters["kv_check_failures"] == 0
    assert CONTROL in cluster.processes
