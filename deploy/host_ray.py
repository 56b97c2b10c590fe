"""A cluster on Ray: a local Ray of our own, and Serve on it, both on loopback.

Or Serve on a Ray that runs already, over many nodes; that one is only joined, and left again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import re
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any

from cluster.clock import SystemClock
from cluster.errors import StartupError
from deploy import ray_room
from deploy.bounded import ASKING, are_all_answered, bounded
from deploy.cores import pin_process
from deploy.fit import fit
from deploy.problems import NO_ROOM, raise_all
from deploy.serve_config import APP_NAME, serve_config

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.config import DeployConfig
    from deploy.run_state import RunState

logger = logging.getLogger(__name__)

_STATUS_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 15.0
_SERVE_TIMEOUT_S = 40.0
"""For Serve's controller to be started, and to take the app; with the others it is under 60 s."""
_FAILED = "A replica failed to start"
"""Serve's words."""
_SILENT_S = 30.0  # Serve's controller is back sooner where it only crashed
_OBJECT_STORE_BYTES = 80 << 20  # Ray carries neither tensors nor tokens, so the least it takes
_RAY_ENVIRONMENT = {
    # Ray's core binds every listener to 127.0.0.1 with this (one machine only).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers run at niceness 15 otherwise, behind every other process of the machine.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Whoever fails Serve's checks has nothing left that could drain, or does not hear of it.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def load_ray(*, is_own: bool = True) -> None:
    """Import Ray and Serve, which takes a second; call it before a host is started.

    Without ``is_own``, for a Ray that runs already and by its own settings.
    """
    if is_own:
        # First: Ray reads it when it is imported, and its processes inherit it.
        os.environ.update(_RAY_ENVIRONMENT)
        # Of this run alone: whoever else has an account on this machine reaches its loopback, and
        # who may talk to Ray runs code as this user.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    importlib.import_module("ray")
    importlib.import_module("ray.serve")


class RayHost:
    """A Ray cluster started for this process alone; it ends with it.

    With ``is_joined`` it is one that this process has joined: the app is put there, and stays.
    """

    def __init__(
        self,
        config: DeployConfig,
        *,
        model_path: Path | str,
        state: RunState,
        is_joined: bool = False,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._state = state
        self._is_joined = is_joined
        self._is_started = False
        self._has_app = False
        self._clock = SystemClock()
        self._answered = 0.0
        self._asking: threading.Thread | None = None

    def start(self) -> None:
        """Start Ray and Serve and hand Serve the config file's content.

        Raises StartupError, also where a pool cannot be placed.
        """
        try:
            self._start_ray()
            self._check_fit()
            self._start_serve()
        except StartupError:
            raise
        except Exception as error:
            # Ray and Serve raise what they like: RuntimeError, OSError, their own.
            raise StartupError(f"Ray could not start: {_last_error(str(error))}") from error
        self._answered = self._clock.now()

    def _start_ray(self) -> None:
        import ray

        self._is_started = True
        if self._is_joined:
            return
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=os.cpu_count(),
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=True,
            _temp_dir=str(self._state.ray_dir),
        )

    def _check_fit(self) -> None:
        placing = fit(self._config.pools, ray_room.ray_nodes())
        raise_all(NO_ROOM, placing.problems)
        for problem in placing.at_most:
            logger.warning("when the load asks for all workers: %s", problem)

    def _start_serve(self) -> None:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        # Folders of this machine are nothing to the other nodes of a cluster.
        run_dir = str(self._state.folder) if not self._is_joined else ""
        tree = serve_config(self._config, model_path=str(self._model_path), run_dir=run_dir)
        self._has_app = True
        bounded("Ray Serve", _SERVE_TIMEOUT_S, functools.partial(_hand_over, tree))

    def settle(self) -> None:
        """Move Ray's own processes to the service cores: each burst of theirs is felt in a stream.

        Not earlier, since starting takes every core there is. What Ray starts from now on inherits
        it; workers, routers and control plane pin themselves, and are left alone.
        """
        every_core = os.sched_getaffinity(0)
        for process in self._state.started():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if os.sched_getaffinity(process.pid) == every_core:
                    pin_process(self._config.service_cores, process.pid)
        pin_process(self._config.service_cores)

    def failure(self) -> StartupError | None:
        """Read Serve's status; a deployment that failed names its last error and its log."""
        app = self._status()
        if app is None:
            silent_s = self._clock.now() - self._answered
            if silent_s > _SILENT_S:
                return StartupError(f"Ray Serve has not answered for {silent_s:.0f} s")
            return None
        if app.status.value == "DEPLOY_FAILED" and not app.deployments:
            return StartupError(f"Serve could not build the app: {_last_error(app.message)}")
        for name, deployment in app.deployments.items():
            if deployment.status.value == "DEPLOY_FAILED":
                return self._failed(name, deployment.message)
        return None

    def start_failure(self) -> StartupError | None:
        """Return what Serve says of a replica that did not come up.

        Once another of the same deployment has, Serve tries for ever, and calls that an update.
        """
        app = self._status()
        for name, deployment in (app.deployments if app else {}).items():
            if _FAILED in deployment.message:
                return self._failed(name, deployment.message)
        return None

    def obstacles(self) -> str:
        """Return what Serve says of each part that is not up, in words that end a sentence."""
        app = self._status()
        told = [
            f"; {name}: {_plain(deployment.message).strip().splitlines()[0]}"
            for name, deployment in (app.deployments if app else {}).items()
            if deployment.status.value != "HEALTHY" and deployment.message.strip()
        ]
        return "".join(told)

    def unfinished(self) -> str:
        """Say what Serve is still at; empty: nothing. An update goes on behind ready workers."""
        app = self._status()
        if app is not None and app.status.value == "RUNNING":
            return ""
        at_work = {
            name: deployment.status.value
            for name, deployment in (app.deployments if app else {}).items()
            if deployment.status.value != "HEALTHY"
        }
        return f"Serve is at work: {at_work or 'not told yet'}"

    def _status(self) -> Any:
        """Return the app's status, or None where Serve doesn't tell it within a bounded time."""
        if self._asking is not None and self._asking.is_alive():
            self._asking.join(_STATUS_TIMEOUT_S)
            return None
        found: list[Any] = []
        # Serve's own call has no timeout, and waits for ever where its controller hangs.
        self._asking = threading.Thread(
            target=_ask_status, args=(found,), name=f"{ASKING}serve-status", daemon=True
        )
        self._asking.start()
        self._asking.join(_STATUS_TIMEOUT_S)
        if not found:
            return None
        self._answered = self._clock.now()
        return found[0].applications.get(APP_NAME)

    def _failed(self, deployment: str, message: str) -> StartupError:
        """Write down all that is known, since Serve tells a replica's last error elsewhere."""
        logs = sorted(
            self._log_dir.glob(f"replica_{APP_NAME}_{deployment}_*.log"),
            key=lambda path: path.stat().st_mtime,
        )
        told = [_plain(message), *(path.read_text(errors="replace") for path in logs[-1:])]
        where = self._state.logs_dir / f"{deployment}-failed.log"
        where.write_text("\n\n".join(told), encoding="utf-8")
        return StartupError(f"{deployment} failed to start: {_last_error(message)} (log: {where})")

    @property
    def _log_dir(self) -> Path:
        """Where Serve's replicas log; the folder is there from the start, Serve's part later."""
        logs = (self._state.ray_dir / "session_latest").resolve() / "logs"
        return logs / "serve" if (logs / "serve").is_dir() else logs

    def where_logs(self) -> str:
        """Name the folders of our logs and of Serve's."""
        return f"logs: {self._state.logs_dir}, Serve's: {self._log_dir}"

    def stop(self, timeout_s: float) -> None:
        """Shut Serve and Ray down, for ``timeout_s`` at most; one that runs already is left."""
        if not self._is_started:
            return
        self._is_started = False
        shut_down = functools.partial(_shut_down, has_app=self._has_app and not self._is_joined)
        try:
            bounded("Ray", timeout_s, shut_down)
        except Exception as error:  # what is left is ended with all else that was started
            logger.warning("Ray could not be shut down: %r", error)


def join_ray(address: str) -> None:
    """Join the Ray that runs at ``address``; ``auto``: on this machine.

    Raises StartupError where none answers there.
    """
    import ray
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray.exceptions import RayError

    try:
        host, _, port = str(canonicalize_bootstrap_address_or_die(address)).rpartition(":")
        # Ray itself would try for ten minutes.
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        join = functools.partial(
            ray.init,
            address=f"{host}:{port}",
            log_to_driver=False,
            # It warns of being called in a thread, where it cannot take SIGTERM for itself.
            logging_level=logging.ERROR,
            configure_logging=True,
        )
        # And for ever on one that takes connections and hangs.
        bounded(f"the Ray at {host}:{port}", _JOIN_TIMEOUT_S, join)
        logging.getLogger("ray").setLevel(logging.WARNING)
    except (RayError, OSError, ValueError, RuntimeError) as error:
        raise StartupError(
            f"no Ray answers at {address!r} ({_last_error(str(error))}): start one with `ray up` "
            "or `ray start`, and run this on its head node"
        ) from error


def leave_ray() -> None:
    """Leave the Ray that this process has joined, within a bounded time."""
    import ray

    # Who leaves with a call under way is ended by Ray at once, before he has told why. Ray leaves
    # with the process.
    if are_all_answered():
        with contextlib.suppress(StartupError):
            bounded("Ray", ray_room.ANSWER_S, ray.shutdown)


def _hand_over(tree: dict[str, Any]) -> None:
    """Start Serve where it doesn't run, and have it put the app there."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    serve.start(proxy_location=tree["proxy_location"])
    client: Any = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(tree))


def _ask_status(found: list[Any]) -> None:
    from ray import serve

    try:
        found.append(serve.status())
    except Exception as error:
        logger.warning("Serve's status: %r", error)


def _shut_down(*, has_app: bool) -> None:
    import ray

    try:
        # Not serve.shutdown: it kills the controller in mid-call, which Ray then complains of. And
        # not without an app: Serve would start a Ray of its own to look for it.
        if has_app and ray.is_initialized():
            from ray import serve

            serve.delete(APP_NAME)
    except Exception as error:
        logger.warning("Serve's app could not be deleted: %r", error)
    finally:
        # As for whoever leaves a Ray: with a call under way this would end the process at once.
        # What is left of Ray then is ended with all else that was started.
        if are_all_answered():
            ray.shutdown()


def _plain(message: str) -> str:
    """Return a Serve message without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", message)


def _last_error(message: str) -> str:
    """Return the innermost error line of a Serve message, without colours and traceback."""
    plain = _plain(message)
    if "ActorDiedError" in plain or "WorkerCrashedError" in plain:
        return (
            "its process was killed or crashed while it was loading; where the machine ran out of "
            "memory, the kernel's log says so: free some, or lower kv_tokens or count of the pools"
        )
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"^[\w.]*(Error|Exception|Unsupported\w*)\b", line)]
    line = (named or lines or ["no reason given"])[-1]
    # Our own errors are told without the name of their class.
    return re.sub(r"^cluster\.errors\.\w+: ", "", line)
