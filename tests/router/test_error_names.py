"""Errors name stage, worker and cause in the log, and the client is told the stage alone."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.errors import IN_STEP, DeadlineExceeded, HandoffFailed, WorkerLost
from router.public_errors import public_message
from tests.router.fakes import FakeCluster, make_router, until
from tests.router.reading import finished, read, start

if TYPE_CHECKING:
    from collections.abc import Iterator

A = ord("a")
ROOT = Path(__file__).parents[2]
SERVING = ("cluster", "router", "prefill_worker", "decode_worker", "deploy")
OFFLINE = ("deploy/bench", "deploy/lab", "cluster/wire")
OPERATORS = {"control", "status", "order"}
"""Stages of what only an operator asks for, or hears of."""


@pytest.fixture
def lines(caplog):
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_an_error_that_names_nobody_is_that_of_the_worker_who_said_it(lines, kind):
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service)
    for number in range(3):
        workers = dict(zip(("prefill", "decode"), await cluster.started("p0", "d0"), strict=True))
        await until(lambda: len(workers["decode"].legs) == number + 1)  # noqa: B023 (at once)
        error = HandoffFailed("handoff aborted: fault", stage="handoff")
        cluster.route.export_error = error  # nobody takes the export
        workers[kind].say(error=error)
    _, _, error = await read(generation)
    name = {"prefill": "p0", "decode": "d0"}[kind]
    assert (error.stage, error.worker_id) == ("handoff", name)
    request_id = cluster.route.wants[0].request_id
    place = f"stage=handoff worker={name}"
    told = [line for line in lines() if place in line]
    assert told == [
        f"request={request_id} attempt=0 {place} goes on elsewhere at token=0 after handoff_failed",
        f"request={request_id} attempt=1 {place} goes on elsewhere at token=0 after handoff_failed",
        f"request={request_id} {place}: handoff aborted: fault",
    ]
    await finished(service, cluster)


async def test_a_handoff_that_failed_names_the_decode_worker_it_was_meant_for(lines):
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, max_tokens=2)
    prefill, _ = await cluster.started("p0", "d0")
    cluster.route.export_error = HandoffFailed("nobody", stage="placement")
    prefill.export_waits(HandoffFailed("the offer got no answer", stage="handoff"))
    await until(lambda: len(cluster.route.wants) == 3)
    assert any("stage=handoff worker=d0 goes on elsewhere" in line for line in lines())
    generation.cancel()
    await finished(service, cluster)


@pytest.mark.parametrize(("num_tokens", "place"), [(0, ("prefill", "p0")), (1, ("decode", "d0"))])
async def test_a_deadline_names_the_worker_that_was_at_work(lines, num_tokens, place):
    cluster = FakeCluster()
    service = make_router(cluster)
    generation = await start(cluster, service, timeout_s=0.2)
    prefill, _ = await cluster.started("p0", "d0")
    if num_tokens:
        prefill.say(A, ends=True)
    _, _, error = await read(generation)
    assert isinstance(error, DeadlineExceeded)
    assert (error.stage, error.worker_id) == place
    assert any("stage={} worker={}: the deadline passed".format(*place) in line for line in lines())
    await finished(service, cluster)


async def test_a_deadline_in_the_queue_names_nobody():
    cluster = FakeCluster()
    cluster.route.default_pair = None
    service = make_router(cluster)
    _, _, error = await read(await start(cluster, service, timeout_s=0.1))
    assert (error.stage, error.worker_id) == ("queue", "")
    await finished(service, cluster)


def test_the_client_is_told_of_a_failed_step_as_of_any_stage():
    error = WorkerLost("a step failed: RuntimeError", stage=IN_STEP, worker_id="d0")
    assert public_message(error) == "a worker was lost; try again (stage: step)"


def test_every_stage_of_a_request_is_told():
    stages = {stage for path in sources() for stage in stages_in(path)}
    assert {"transfer", "sample", "decode", IN_STEP} <= stages, "they are not found any more"
    for stage in sorted(stages - OPERATORS):
        error = HandoffFailed("secret", stage=stage)
        assert public_message(error).endswith(f"try again (stage: {stage})")


def sources() -> Iterator[Path]:
    """What may raise an error while it serves."""
    for room in SERVING:
        for path in (ROOT / room).rglob("*.py"):
            if not path.relative_to(ROOT).as_posix().startswith(OFFLINE):
                yield path


def stages_in(path: Path) -> Iterator[str]:
    """The names in ``stage=...``, and what is kept to be one: ``STAGE``, ``IN_STEP``, a phase."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "stage":
            yield from texts_of(node.value)
        elif isinstance(node, ast.Assign):
            names = {getattr(each, "attr", getattr(each, "id", "")) for each in node.targets}
            if names & {"STAGE", "IN_STEP", "_phase", "stage"}:
                yield from texts_of(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("stage"):
            for each in ast.walk(node):
                if isinstance(each, ast.Return) and each.value is not None:
                    yield from texts_of(each.value)


def texts_of(value: ast.expr) -> Iterator[str]:
    """What it can be: a text, or one of two."""
    if isinstance(value, ast.IfExp):
        yield from texts_of(value.body)
        yield from texts_of(value.orelse)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value:
        yield value.value
