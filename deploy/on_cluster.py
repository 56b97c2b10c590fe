"""``pdserve deploy``: put the app on a Ray that runs already, and wait until it serves.

check what one GPU has to hold -> find Ray -> wait for nodes -> check that every pool has room and
the doors are free -> hand Serve the config file -> wait until every worker has registered and the
doors answer -> prove it with one streamed request.

It then runs by itself: Serve keeps it up, and ``pdserve down --cluster`` takes it away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import time
from typing import TYPE_CHECKING

from cluster.config import HEAD
from cluster.config_rules import is_loopback
from cluster.errors import StartupError
from deploy import calls, doors, proof
from deploy.bounded import bounded
from deploy.fit import fit, suits
from deploy.host_ray import RayHost, join_ray, leave_ray, load_ray
from deploy.loading import ClusterLoading
from deploy.machine import check_ports
from deploy.plan import check_gpus
from deploy.problems import NO_ROOM, raise_all
from deploy.ray_room import app_details, ask_serve, ray_nodes
from deploy.readiness import missing
from deploy.run_state import RunState
from deploy.serve_config import APP_NAME, named
from deploy.start_watch import STUCK_S, StartWatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.config import DeployConfig
    from deploy.fit import Node

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_QUIET_S = 10.0
_GIVE_UP_S = 5.0
"""Whoever waits for the reason of a failure is not kept for longer."""
_SILENT_S = 30.0
"""For Ray to tell what its nodes load."""
_END_S = 30.0
"""For an app to be gone, once all of it may have drained."""
_GIVEN_BACK_S = 5.0
"""Ray tells only a moment later what somebody has given back."""
_HEAD_RESOURCE = "node:__internal_head__"


def nodes_of(address: str) -> list[Node]:
    """Return the nodes of a running Ray; raises StartupError where there is none."""
    with _joined(address):
        return ray_nodes()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a deployment may take."""

    nodes_s: float = 0.0
    """For nodes that are still starting."""
    ready_s: float = 1800.0
    """For weights to be fetched and loaded."""


def deploy(
    config: DeployConfig, address: str, patience: Patience, arguments: Sequence[str] = ()
) -> int:
    """Deploy, and return once it serves; raises StartupError with the reason where it doesn't.

    What was deployed and never served is taken away again, unless it was to replace what serves.
    So is what gets on no more (``start_watch``).
    """
    doors.check_files(config)
    check_gpus(config)
    state = RunState(config.endpoints.control_port)
    state.join()
    state.logs_dir.mkdir(mode=0o700, exist_ok=True)
    with _joined(address):
        _wait_for_nodes(config, patience.nodes_s)
        config, same = _at_head(config, ray_nodes())
        config = named(config)
        had_app = _has_app()
        if not had_app:
            check_ports(config)
        drain_s = max(config.limits.drain_s, _deployed_drain_s()) if had_app else 0.0
        host = RayHost(config, model_path=config.model.path, state=state, is_joined=True)
        _say("deploying ...")
        try:
            host.start()
            _wait_until_ready(config, host, ready_s=patience.ready_s, drain_s=drain_s)
            proof.prove(config)
        except StartupError:
            if not had_app:
                _give_up_app()
            raise
    calls.print_calls(config, [*arguments, *same])
    _say("it serves on; `pdserve down --cluster` takes it away")
    return 0


def remove(address: str) -> int:
    """Take the app away from a running Ray; raises StartupError where it does not go."""
    with _joined(address):
        was_there = _has_app()
        if was_there:
            within_s = _deployed_drain_s() + _END_S
            _delete()
            _wait_until_gone(within_s)
    _say("taken away" if was_there else "nothing was there")
    return 0


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    load_ray(is_own=False)
    join_ray(address)
    try:
        yield
    finally:
        leave_ray()


def _wait_for_nodes(config: DeployConfig, wait_s: float) -> None:
    began = time.monotonic()
    told: tuple[str, ...] = ()
    while problems := fit(config.pools, nodes := ray_nodes()).problems:
        alone = fit(config.pools, [dataclasses.replace(node, used={}) for node in nodes])
        patience_s = wait_s if alone.problems else max(wait_s, _GIVEN_BACK_S)
        if time.monotonic() - began >= patience_s:
            raise_all(NO_ROOM, problems)
        if problems != told:
            told = problems
            _say("waiting for nodes: " + "; ".join(problems))
        time.sleep(_POLL_S)


def _at_head(config: DeployConfig, nodes: Sequence[Node]) -> tuple[DeployConfig, list[str]]:
    """Return the config with the head node's address, and the options that say the same.

    Raises StartupError where workers could be on nodes that don't reach ``endpoints.host``.
    """
    head = next(node for node in nodes if _HEAD_RESOURCE in node.resources).address
    host = config.endpoints.host
    if host == HEAD:
        endpoints = dataclasses.replace(config.endpoints, host=head)
        same = ["--set", f"endpoints.host={head}"]
        return dataclasses.replace(config, endpoints=endpoints), same
    away = [
        node.name
        for node in nodes
        if node.address != head
        and not is_loopback(node.address)
        and any(suits(pool, node) for pool in config.pools)
    ]
    if is_loopback(host) and away:
        raise StartupError(
            f"endpoints.host: {host} is this machine alone, and workers could be on "
            f"{', '.join(away)}: use head, and a cluster token",
            field="endpoints.host",
        )
    return config, []


def _wait_until_ready(
    config: DeployConfig, host: RayHost, *, ready_s: float, drain_s: float
) -> None:
    """Wait for all that is wanted, and for the end of those that it replaces, in ``drain_s``."""
    deadline = time.monotonic() + ready_s
    watch, loading, is_long = StartWatch(), ClusterLoading(), False
    told = ""
    while waits_for := (lack := missing(config)) or host.unfinished():
        now = time.monotonic()
        # In an update the predecessors may be draining still, which moves nothing.
        stuck_s = STUCK_S if lack else max(STUCK_S, drain_s + _POLL_S)
        # Most are up before any node need be asked.
        is_long |= watch.still_s >= _QUIET_S
        works = functools.partial(loading.works, now)
        # An app that Serve has built gets on, though nobody answers yet.
        watch.look(
            f"{waits_for}; {host.unfinished()}",
            bounded("Ray", _SILENT_S, works) if is_long else {},
            now,
        )
        failure = host.failure() or host.start_failure()
        if failure is not None:
            raise failure
        if watch.still_s >= stuck_s:
            raise StartupError(
                f"not ready, and nothing has moved for {stuck_s:.0f} s: "
                f"{waits_for}{host.obstacles()}"
            )
        if now >= deadline:
            raise StartupError(f"not ready after {ready_s:.0f} s: {waits_for}{host.obstacles()}")
        if waits_for != told:
            told = waits_for
            _say(waits_for)
        time.sleep(_POLL_S)


def _has_app() -> bool:
    from ray import serve

    return APP_NAME in ask_serve(serve.status).applications


def _delete() -> None:
    """Have Serve take the app away, and don't wait for it."""
    from ray import serve

    ask_serve(lambda: serve.delete(APP_NAME, _blocking=False))


def _wait_until_gone(within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while _has_app():
        if time.monotonic() >= deadline:
            raise StartupError(
                f"the app is still there after {within_s:.0f} s: Serve goes on taking it away"
            )
        time.sleep(_POLL_S)


def _deployed_drain_s() -> float:
    """Return how long those that serve now may drain: by their deploy file, and not by the new.

    0 where nothing serves any more, or what serves was not deployed by a file of ours.
    """
    args = (app_details().get("deployed_app_config") or {}).get("args", {})
    return float(args.get("config", {}).get("limits", {}).get("drain_s", 0.0))


def _give_up_app() -> None:
    """Have it taken away; Serve goes on alone with what takes longer."""
    with contextlib.suppress(StartupError, SystemExit):  # why it was given up is told in any case
        bounded("Ray Serve", _GIVE_UP_S, _take_away)


def _take_away() -> None:
    # Not for longer than anybody waits: once this process has left Ray, asking would start another.
    deadline = time.monotonic() + _GIVE_UP_S - _POLL_S
    try:
        while time.monotonic() < deadline and _has_app():
            _delete()  # each time: a slow hand-over may come to its end meanwhile
            time.sleep(_POLL_S)
    except Exception as error:  # Ray and Serve raise what they like
        logger.warning("what never served could not be taken away: %r", error)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
