"""A cluster on Ray: a local Ray of our own, and Serve on it, both on loopback."""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import StartupError
from deploy.cores import pin_process
from deploy.serve_config import APP_NAME, serve_config

if TYPE_CHECKING:
    from cluster.config import DeployConfig
    from deploy.run_state import RunState

_OBJECT_STORE_BYTES = 80 << 20  # Ray carries neither tensors nor tokens, so the least it takes
_RAY_ENVIRONMENT = {
    # Ray's core binds every listener to 127.0.0.1 with this (one machine only).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers run at niceness 15 otherwise, behind every other process of the machine.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class RayHost:
    """A Ray cluster started for this process alone; it ends with it."""

    def __init__(self, config: DeployConfig, *, model_path: Path, state: RunState) -> None:
        self._config = config
        self._model_path = model_path
        self._state = state
        self._log_dir = Path()
        self._is_started = False

    def start(self) -> None:
        """Start Ray and Serve and hand Serve the config file's content."""
        # Before Ray is imported: its processes inherit environment and cores of this one. Workers
        # pin themselves to their own.
        os.environ.update(_RAY_ENVIRONMENT)
        pin_process(self._config.service_cores)
        import ray
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        self._is_started = True
        gpus = sum(pool.gpus_per_worker * pool.count for pool in self._config.pools)
        context: Any = ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=os.cpu_count(),
            num_gpus=int(gpus + 0.999) or None,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=True,
            _temp_dir=str(self._state.ray_dir),
        )
        self._log_dir = Path(context.address_info["session_dir"]) / "logs" / "serve"
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        tree = serve_config(
            self._config, model_path=str(self._model_path), cores_dir=str(self._state.cores_dir)
        )
        serve.start(proxy_location=tree["proxy_location"])
        client: Any = _get_global_client()
        client.deploy_apps(ServeDeploySchema.model_validate(tree))

    def failure(self) -> StartupError | None:
        """Read Serve's status; a deployment that failed names its last error and its log."""
        from ray import serve

        app = serve.status().applications.get(APP_NAME)
        if app is None:
            return None
        if app.status.value == "DEPLOY_FAILED" and not app.deployments:
            return StartupError(f"Serve could not build the app: {app.message}")
        for name, deployment in app.deployments.items():
            if deployment.status.value == "DEPLOY_FAILED":
                return self._failed(name, deployment.message)
        return None

    def _failed(self, deployment: str, message: str) -> StartupError:
        logs = sorted(
            self._log_dir.glob(f"replica_{APP_NAME}_{deployment}_*.log"),
            key=lambda path: path.stat().st_mtime,
        )
        where = logs[-1] if logs else self._log_dir
        return StartupError(f"{deployment} failed to start: {_last_error(message)} (log: {where})")

    def stop(self, timeout_s: float) -> None:
        """Shut Serve and Ray down, for ``timeout_s`` at most."""
        if not self._is_started:
            return
        self._is_started = False
        stopper = threading.Thread(target=_shut_down, name="ray-shutdown", daemon=True)
        stopper.start()
        stopper.join(timeout_s)


def _shut_down() -> Any:
    import ray
    from ray import serve

    # Not serve.shutdown: it kills the controller in mid-call, which Ray then complains of.
    serve.delete(APP_NAME)
    ray.shutdown()


def _last_error(message: str) -> str:
    """Return the innermost error line of a Serve message, without colours and traceback."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", message)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"^[\w.]*(Error|Exception|Unsupported\w*)\b", line)]
    return (named or lines or ["no reason given"])[-1]
