"""Every fault in every state of a handoff, with two routers: who notices, and what is left.

Cells mostly wait: for somebody to be missed, or to be back. So several clusters play them at once,
and each test asks for what came of its cell.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
from concurrent.futures import Future

import pytest

from cluster.config import Role, TransportKind
from tests.e2e.fault_cells import STATES, Cell, Scene, cells
from tests.e2e.plain_cluster import make_config, with_pool
from tests.e2e.process_cluster import CONTROL, ProcessCluster
from tests.e2e.streams import Prompts, Stream

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
GLOO, SHM = TransportKind.TORCH_DIST, TransportKind.SHM
PLAIN = list(cells())
CELLS = PLAIN + [dataclasses.replace(cell, transport=SHM) for cell in PLAIN if cell.moves_kv]
NUM_CLUSTERS = {GLOO: 2, SHM: 1}
NUM_PROMPT, NUM_TOKENS, CHUNK = 80, 24, 16


class Arena:
    """The cluster that plays cells of one transport; a new one after a cell that ruined it."""

    def __init__(self, matrix: Matrix, transport: TransportKind) -> None:
        self._matrix = matrix
        self._transport = transport
        self._routers = itertools.cycle(("router-0", "router-1"))
        self._cluster: ProcessCluster | None = None
        self._thread = threading.Thread(target=self._play_all, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "a cell hangs"

    def _play_all(self) -> None:
        try:
            while (cell := self._matrix.next_cell(self._transport)) is not None:
                result = self._matrix.results[cell]
                try:
                    self._play(cell)
                    result.set_result(None)
                except BaseException as error:
                    self._tear_down()
                    result.set_exception(error)
        finally:
            self._tear_down()

    def _play(self, cell: Cell) -> None:
        cluster, router = self._ready(), next(self._routers)
        pids = {name: process.pid for name, process in cluster.processes.items()}
        prompts, number = self._matrix.prompts_of(cell)
        victim = Stream(cluster.routers[router].grpc, prompts.prompts[number], NUM_TOKENS)
        outcome = "FAILED"
        try:
            scene = Scene(cluster)
            scene.play(cell, victim, router)
            scene.mend()
            self._check_left(cell, pids)
            prompts.check(number, victim, is_whole=not (cell.may_fail or cell.fault == "leave"))
            outcome = victim.error or "ok"
        finally:
            self._matrix.outcomes[cell] = f"{outcome} {victim.seconds:.1f}s"

    def _check_left(self, cell: Cell, pids: dict[str, int]) -> None:
        """Q and C: nothing is held, nobody else died, every pool's own check agrees."""
        cluster = self._cluster
        # Nobody is waited for: a grant whose end was not told is forgotten after 20 s.
        cluster.wait_quiet(30 if cell.fault == "drop done" else 10)
        for router in cluster.routers:
            canary = self._matrix.prompts.stream(cluster.routers[router].grpc, 0)
            canary.wait_end()
            self._matrix.prompts.check(0, canary)
        changed = {name for name, pid in pids.items() if cluster.pid(name) != pid}
        assert len(changed) == (cell.fault == "kill"), f"{changed} were replaced"
        for worker in cluster.view().workers:
            assert worker.report.counters["kv_check_failures"] == 0
            assert worker.worker.transport == cell.transport.value
        assert CONTROL in cluster.processes

    def _ready(self) -> ProcessCluster:
        if self._cluster is None:
            matrix = self._matrix
            config = dataclasses.replace(matrix.make_config(), transport=self._transport)
            self._cluster = ProcessCluster(
                config, matrix.model, matrix.make_folder(), num_routers=2
            )
            self._cluster.start()
        return self._cluster

    def _tear_down(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None


class Matrix:
    """The cells that were asked for, what came of them, and who plays them."""

    def __init__(self, model, folders, chosen: list[Cell]) -> None:
        self.model = model
        self._folders = folders
        self._folders_lock = threading.Lock()
        count = len(PLAIN) + 1
        self.prompts = Prompts(model, count, num_prompt=NUM_PROMPT, num_tokens=NUM_TOKENS)
        self.short = Prompts(model, count, num_prompt=CHUNK, num_tokens=NUM_TOKENS)
        self.results: dict[Cell, Future[None]] = {cell: Future() for cell in chosen}
        self.outcomes: dict[Cell, str] = {}
        self._waiting = {kind: queue.SimpleQueue() for kind in NUM_CLUSTERS}
        for cell in chosen:
            self._waiting[cell.transport].put(cell)
        self._arenas = [
            Arena(self, kind) for kind, count in NUM_CLUSTERS.items() for _ in range(count)
        ]
        for arena in self._arenas:
            arena.start()

    def stop(self) -> None:
        """Play no more, and wait until all clusters are gone."""
        for kind in NUM_CLUSTERS:
            while self.next_cell(kind) is not None:
                pass
        for arena in self._arenas:
            arena.join()

    def next_cell(self, transport: TransportKind) -> Cell | None:
        try:
            return self._waiting[transport].get_nowait()
        except queue.Empty:
            return None

    def prompts_of(self, cell: Cell) -> tuple[Prompts, int]:
        """A prompt that no other cell of the transport has: none of it is cached."""
        number = PLAIN.index(dataclasses.replace(cell, transport=GLOO)) + 1
        return (self.short if cell.is_short else self.prompts), number

    def make_config(self):
        """Two workers of each kind, short leases, digests on."""
        pools = {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)}
        config = with_pool(make_config(self.model, pools), "prefill", chunk_tokens=CHUNK)
        limits = dataclasses.replace(config.limits, export_lease_s=3.0, kv_digest=True)
        return dataclasses.replace(config, limits=limits)

    def make_folder(self):
        with self._folders_lock:
            return self._folders.mktemp("matrix")

    def as_text(self) -> str:
        """Return the matrix: for each transport a line for each fault, a column for each state."""
        columns = [*STATES, "any"]
        table = {
            (cell.transport, cell.row, cell.state): text for cell, text in self.outcomes.items()
        }
        rows = list(dict.fromkeys((cell.transport, cell.row) for cell in self.results))
        width = max((len(row) for _, row in rows), default=0)
        lines = []
        for transport in NUM_CLUSTERS:
            heads = "".join(f"  {column:>14}" for column in columns)
            lines.append(f"{transport.value:<{width}}{heads}")
            for kind, row in rows:
                if kind is transport:
                    texts = (table.get((kind, row, column), "") for column in columns)
                    lines.append(f"{row:<{width}}" + "".join(f"  {text:>14}" for text in texts))
        return "\n" + "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def matrix(request, tiny_llama, tmp_path_factory, pytestconfig):
    items = (item for item in request.session.items if item.path == request.path)
    matrix = Matrix(tiny_llama, tmp_path_factory, [item.callspec.params["cell"] for item in items])
    yield matrix
    matrix.stop()
    manager = pytestconfig.pluginmanager
    with manager.getplugin("capturemanager").global_and_fixture_disabled():
        manager.getplugin("terminalreporter").write(matrix.as_text())


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_nothing_is_lost(cell: Cell, matrix: Matrix):
    """CASES P-11, P-19, P-20, P-21: pools add up, the canary is right, and nobody hangs."""
    matrix.results[cell].result()
