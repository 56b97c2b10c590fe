"""``pdserve serve`` and ``pdserve down``: the life of one cluster on this machine.

check the machine -> fetch the model -> claim the run folder -> start the host -> wait until every
worker has registered and the doors answer -> prove it with one streamed request -> serve -> stop.

Ctrl-C is KeyboardInterrupt in any of these phases, and stopping takes less than 10 s. What a failed
run logged stays in its run folder until the next one.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING

from cluster.config import Host
from cluster.errors import StartupError
from deploy import calls, doors, proof
from deploy.machine import check_machine, check_memory
from deploy.model_source import resolve_model
from deploy.plan import with_kv_tokens
from deploy.readiness import missing
from deploy.run_state import RunState
from deploy.start_watch import STUCK_S, StartWatch, work_of, work_on_app
from deploy.stop_signals import StopSignals
from router.auth import Keys
from router.served import served_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cluster.config import DeployConfig
    from deploy.host import ClusterHost

_READY_TIMEOUT_S = 180.0
_POLL_S = 0.25
_WATCH_S = 1.0
_STOP_TIMEOUT_S = 6.0
_CLEAR_TIMEOUT_S = 2.0


def serve(config: DeployConfig, *, is_once: bool, arguments: Sequence[str] = ()) -> int:
    """Run a cluster until Ctrl-C (or SIGTERM), or until its proof with ``is_once``.

    ``arguments`` are the options of the command that chose this config; the printed calls repeat
    them. Raises StartupError with the reason and the remedy, or KeyboardInterrupt where it is told
    to stop before it serves; whatever was started is stopped first.
    """
    signals = StopSignals()
    signals.arm()
    try:
        return _serve(config, signals, is_once=is_once, arguments=arguments)
    finally:
        signals.disarm()


def _serve(
    config: DeployConfig, signals: StopSignals, *, is_once: bool, arguments: Sequence[str]
) -> int:
    began = time.monotonic()
    state = RunState(config.endpoints.control_port)
    check_machine(config, state=state)
    Keys.of(config)
    proof.check_key(config)
    doors.check_files(config)
    model = resolve_model(config.model.path, config.model.name)
    config = _completed(config, model.folder, model.name)
    config = with_kv_tokens(config, str(model.folder))
    check_memory(config, model.folder)
    with signals.held():
        host = _host(config, model.folder, state)
    state.begin(_ports(config))
    keep_logs = True
    try:
        try:
            _start(config, host, state, signals)
            host.settle()
            _say(f"ready after {time.monotonic() - began:.1f} s; one request as a proof:\n")
            proof.prove(config)
            if not is_once:
                calls.print_calls(config, arguments)
                _say("serving; stop with Ctrl-C")
                _serve_until_told(host)
        finally:
            signals.disarm()
        keep_logs = False
    except KeyboardInterrupt:
        keep_logs = False
        raise
    except StartupError as error:
        # One log may tell all; where none is named yet, say where they are.
        if str(state.folder) in error.message:
            raise
        raise StartupError(f"{error.message} ({host.where_logs()})") from error
    finally:
        signals.disarm()
        _stop(host, state, keep_logs=keep_logs)
    return 0


def down(config: DeployConfig) -> int:
    """End what a run with this control port started, whether its launcher lives or not."""
    ended = RunState(config.endpoints.control_port).clear(_STOP_TIMEOUT_S + _CLEAR_TIMEOUT_S)
    _say("\n".join(f"ended {process}" for process in ended) or "nothing was left")
    return 0


def _completed(config: DeployConfig, folder: Path, name: str) -> DeployConfig:
    """Return the config with what the model itself decides: its name, and its longest context."""
    served = served_model(folder, name=name, max_model_len=config.model.max_model_len)
    model = dataclasses.replace(config.model, name=name, max_model_len=served.max_model_len)
    return dataclasses.replace(config, model=model)


def _ports(config: DeployConfig) -> dict[str, int]:
    endpoints = config.endpoints
    return {
        "http": endpoints.http_port,
        "grpc": endpoints.grpc_port,
        "control": endpoints.control_port,
    }


def _host(config: DeployConfig, folder: Path, state: RunState) -> ClusterHost:
    # Each host loads much that the other has no use for.
    if config.host is Host.INLINE:
        from deploy.host_inline import InlineHost

        return InlineHost(config, model_path=folder)
    from deploy.host_ray import RayHost, load_ray

    load_ray()
    return RayHost(config, model_path=folder, state=state)


def _start(config: DeployConfig, host: ClusterHost, state: RunState, signals: StopSignals) -> None:
    """Start the host, and wait until all workers are there and the router says ready."""
    _say("starting the cluster ...")
    host.start()
    signals.arm()  # Ray takes SIGTERM for itself
    deadline = time.monotonic() + _READY_TIMEOUT_S
    watch = StartWatch()
    while waits_for := missing(config):
        works = work_on_app(state.started(), [pool.name for pool in config.pools])
        watch.look(waits_for, works | work_of(state.cores_dir), time.monotonic())
        failure = host.failure() or host.start_failure()
        if failure is not None:
            raise failure
        if watch.is_stuck:
            raise StartupError(
                f"not ready, and nothing has moved for {STUCK_S:.0f} s: {waits_for}; see its log "
                "for what it waits for"
            )
        if time.monotonic() >= deadline:
            raise StartupError(
                f"not ready after {_READY_TIMEOUT_S:.0f} s: {waits_for}; see its log for what it "
                "waits for, and start again with a smaller model or fewer workers"
            )
        time.sleep(_POLL_S)


def _serve_until_told(host: ClusterHost) -> None:
    """Serve until Ctrl-C, which is how it is meant to end."""
    try:
        while True:
            time.sleep(_WATCH_S)
            failure = host.failure()
            if failure is not None:
                raise failure
    except KeyboardInterrupt:
        return


def _stop(host: ClusterHost, state: RunState, *, keep_logs: bool) -> None:
    """Stop in order, then end whatever is left; a second Ctrl-C changes nothing."""
    _say("stopping ...")
    host.stop(_STOP_TIMEOUT_S)
    state.clear(_CLEAR_TIMEOUT_S, keep_folder=keep_logs)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
