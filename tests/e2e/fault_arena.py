"""Who plays the cells of the fault matrix: several clusters at once, for cells mostly wait."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import random
import threading
from collections import Counter
from concurrent.futures import Future

from cluster.config import Role, TransportKind
from tests.e2e.asker import Asker
from tests.e2e.fault_cells import REASONS, STATES, Cell, Row, rows
from tests.e2e.fault_scene import NotEntered, Scene
from tests.e2e.plain_cluster import make_config, with_pool
from tests.e2e.pool_books import wait_proven
from tests.e2e.process_cluster import CONTROL, ProcessCluster
from tests.e2e.streams import Prompts, Stream

GLOO, SHM = TransportKind.TORCH_DIST, TransportKind.SHM
NUM_CLUSTERS = {GLOO: 4, SHM: 1}
CHUNK, NUM_TOKENS = 32, 16
NUM_PROMPT = {"stored": CHUNK, "sent": CHUNK // 2}
"""By state: a prompt of one chunk, sent by layers or, where it is short, in one segment. Others
are sent in three segments."""
NUM_LONG = 80
NUM_ROUNDS = 5
"""In which every worker of an arena gets something to do."""
NUM_CANARY, NUM_CANARY_TOKENS, NUM_BYSTANDER_TOKENS = 40, 6, 200
DEADLINE_S = 15.0
LATE_S = 1.0
"""No request may end so long after its deadline."""
FORGOTTEN_S = 30.0
"""A grant whose end was not told is forgotten after 20 s."""


class Arena:
    """The cluster that plays cells of one transport; a new one after a cell that ruined it."""

    def __init__(self, matrix: Matrix, transport: TransportKind) -> None:
        self._matrix = matrix
        self._transport = transport
        self._routers = itertools.cycle(("router-0", "router-1"))
        self._cluster: ProcessCluster | None = None
        self._thread = threading.Thread(target=self._play_all, daemon=True)
        self.proof: Future[None] = Future()
        """Of the books of every worker that is there after the last cell."""

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "a cell hangs"

    def _play_all(self) -> None:
        try:
            while batch := self._matrix.next_batch(self._transport):
                for cell in batch:
                    self._play_one(cell, is_last=cell is batch[-1])
            if self._cluster is not None:
                wait_proven(self._cluster, self._serve_on_all)
            self.proof.set_result(None)
        except BaseException as error:
            self.proof.set_exception(error)
        finally:
            self._tear_down()

    def _serve_on_all(self) -> None:
        """Send prompts that are cached nowhere, many at a time, until each worker has had one."""
        cluster, draw = self._cluster, random.Random(0)
        before = self._num_legs()
        for _ in range(NUM_ROUNDS):
            streams = [
                Stream(doors.grpc, [draw.randrange(5, 500) for _ in range(NUM_LONG)], NUM_TOKENS)
                for doors in (*cluster.routers.values(),) * 4
            ]
            for stream in streams:
                stream.start()
            for stream in streams:
                stream.wait_end()
                assert not stream.error
            cluster.wait_quiet()
            after = self._num_legs()
            if all(after[name] > number for name, number in before.items()):
                return
        raise AssertionError("they all went to the same workers")

    def _num_legs(self) -> dict[str, float]:
        workers = self._cluster.view().workers
        return {w.worker.worker_id: w.report.counters["legs_received"] for w in workers}

    def _play_one(self, cell: Cell, *, is_last: bool) -> None:
        result = self._matrix.results[cell]
        try:
            try:
                self._play(cell, is_last=is_last)
            except NotEntered:
                # By what cells before it have left (a pair that is shunned for some seconds).
                self._tear_down()
                self._play(cell, is_last=is_last)
            result.set_result(None)
        except BaseException as error:
            self._tear_down()
            result.set_exception(error)

    def _play(self, cell: Cell, *, is_last: bool) -> None:
        cluster, router = self._ready(), next(self._routers)
        pids = {name: process.pid for name, process in cluster.processes.items()}
        prompts, number = self._matrix.prompts_of(cell)
        address = cluster.routers[router].grpc
        victim = Stream(address, prompts.prompts[number], NUM_TOKENS, deadline_s=DEADLINE_S)
        (other,) = {*cluster.routers} - {router}
        bystanders = self._matrix.bystanders_of(cell)
        beside = other if cell.kills_router else router
        bystander = bystanders.ask(cluster.routers[beside].grpc)
        outcome = "FAILED"
        try:
            scene = Scene(cluster, router)
            scene.play(cell, victim, bystander)
            scene.mend()
            self._check_left(cell, pids, is_last=is_last)
            prompts.check(number, victim, is_whole=not cell.may_fail)
            if bystander.started_at:
                bystanders.check(0, bystander)
            assert victim.seconds < DEADLINE_S + LATE_S, "it hung past its deadline"
            assert not cell.is_left or victim.error == "cancelled", "it ended before it left"
            outcome = cell.outcome(victim.error)
        finally:
            self._matrix.outcomes[cell] = f"{outcome} {victim.seconds:.1f}s"

    def _check_left(self, cell: Cell, pids: dict[str, int], *, is_last: bool) -> None:
        """Q and C: nothing is held, nobody else died, every pool's own check agrees."""
        cluster = self._cluster
        if cell.is_forgotten_late and not is_last:
            cluster.wait_quiet(knows_all=False)
        else:
            cluster.wait_quiet(FORGOTTEN_S if cell.is_forgotten_late else 10)
        ask = self._matrix.canaries.ask
        canaries = [ask(doors.grpc) for doors in cluster.routers.values()]
        for canary in canaries:
            canary.start()
        for canary in canaries:
            canary.wait_end()
            self._matrix.canaries.check(0, canary)
            self._matrix.canaries.check_text(canary)
        changed = {name for name, pid in pids.items() if cluster.pid(name) != pid}
        assert len(changed) == cell.kills, f"{changed} were replaced"
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
            self._cluster.ask_view = matrix.asker.view
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
        self.asker = Asker()
        self._folders = folders
        self._folders_lock = threading.Lock()
        self.canaries = Prompts(model, 1, num_prompt=NUM_CANARY, num_tokens=NUM_CANARY_TOKENS)
        self._bystanders = {
            num: Prompts(model, 1, num_prompt=NUM_CANARY, num_tokens=num)
            for num in (1, NUM_BYSTANDER_TOKENS)
        }
        self._prompts: dict[Cell, tuple[Prompts, int]] = {}
        for kind in NUM_CLUSTERS:
            self._give_prompts([cell for cell in chosen if cell.transport is kind])
        self.results: dict[Cell, Future[None]] = {cell: Future() for cell in chosen}
        self.outcomes: dict[Cell, str] = {}
        self._waiting = {kind: queue.SimpleQueue() for kind in NUM_CLUSTERS}
        late = [cell for cell in chosen if cell.is_forgotten_late]
        batches = [late] if late else []
        batches += [[cell] for cell in chosen if not cell.is_forgotten_late]
        for batch in batches:
            self._waiting[batch[0].transport].put(batch)
        self.arenas = [
            Arena(self, kind) for kind, count in NUM_CLUSTERS.items() for _ in range(count)
        ]
        for arena in self.arenas:
            arena.start()

    def stop(self) -> None:
        """Play no more, and wait until all clusters are gone."""
        for kind in NUM_CLUSTERS:
            while self.next_batch(kind):
                pass
        for arena in self.arenas:
            arena.join()
        self.asker.close()

    def next_batch(self, transport: TransportKind) -> list[Cell]:
        """Return cells that one cluster plays in turn; none where all are taken."""
        try:
            return self._waiting[transport].get_nowait()
        except queue.Empty:
            return []

    def _give_prompts(self, cells: list[Cell]) -> None:
        """Give each a prompt that no other cell of its transport has: none of it is cached."""
        first = 1  # after the canary's
        for length in (NUM_LONG, *NUM_PROMPT.values()):
            mine = [cell for cell in cells if NUM_PROMPT.get(cell.state, NUM_LONG) == length]
            prompts = Prompts(
                self.model, len(mine), num_prompt=length, num_tokens=NUM_TOKENS, first=first
            )
            self._prompts |= {cell: (prompts, number) for number, cell in enumerate(mine)}
            first += len(mine)

    def prompts_of(self, cell: Cell) -> tuple[Prompts, int]:
        """The cell's prompt, as a number of some."""
        return self._prompts[cell]

    def bystanders_of(self, cell: Cell) -> Prompts:
        """One for one token, which needs no decode worker; or a stream that a router outlasts."""
        return self._bystanders[NUM_BYSTANDER_TOKENS if cell.kills_router else 1]

    def make_config(self):
        """Two workers of each kind, short leases, digests on."""
        pools = {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)}
        config = make_config(self.model, pools, kv_tokens=1024)
        config = with_pool(config, "prefill", chunk_tokens=CHUNK)
        limits = dataclasses.replace(config.limits, export_lease_s=3.0, kv_digest=True)
        return dataclasses.replace(config, limits=limits)

    def make_folder(self):
        with self._folders_lock:
            return self._folders.mktemp("matrix")

    def as_text(self) -> str:
        """Return the matrix: for each transport a line for each fault, a column for each state."""
        mine = {cell.row for cell in self.results}
        chosen = [row for row in rows() if row in mine or all(map(row.obstacle, STATES))]
        width = max((len(str(row)) for row in chosen), default=0)
        lines = []
        for transport in NUM_CLUSTERS:
            heads = "".join(f"  {state:>14}" for state in STATES)
            lines.append(f"{transport.value:<{width}}{heads}")
            for row in chosen:
                texts = (self._text_of(row, state, transport) for state in STATES)
                lines.append(f"{row!s:<{width}}" + "".join(f"  {text:>14}" for text in texts))
        lines += [f"({name}) {reason}" for name, reason in REASONS.items()]
        kinds = Counter((cell.transport.value, cell.row.kind.value) for cell in self.outcomes)
        lines += [f"{count} cells: {name}, {kind}" for (name, kind), count in kinds.items()]
        return "\n" + "\n".join(lines) + "\n"

    def _text_of(self, row: Row, state: str, transport: TransportKind) -> str:
        cell = Cell(row, state, transport)
        return f"({cell.obstacle})" if cell.obstacle else self.outcomes.get(cell, "not asked for")
