"""The run folder: what one cluster on this machine leaves for the next one to know.

A cluster is named by its control port, so two of them live side by side:

    /tmp/pdserve-UID/              mode 0700, owner checked, symbolic links refused
        PORT.lock                  held while a run begins or is cleared; never deleted
        door-HOST-PORT.lock        held by the routers that have this door (``door_locks``)
        PORT/run.json              the launcher, its run id and its ports
        PORT/processes.jsonl       processes started by hand, one a line
        PORT/cores/                the workers' core leases
        PORT/logs/ PORT/ray/       our processes' logs; Ray's session

Everything a launcher starts carries its run id in its environment, and the run id begins with a
digest of the folder's name. So what a killed launcher left is found even without the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.clock import Clock, SystemClock
from cluster.errors import StartupError
from deploy import commands, locks, processes
from deploy.processes import ProcessRef

if TYPE_CHECKING:
    from collections.abc import Mapping

RUN_ID_VARIABLE = "PDSERVE_RUN_ID"
"""The environment variable that marks all processes of a run."""
_KEEP_ENVIRONMENT = "SPT_NOENV"
"""Asks Ray's setproctitle not to write a process's title over its environment, marker included."""
_LOCK_S = 30.0
_ROUNDS = 3


class RunState:
    """The run folder of the cluster with this control port.

    ``begin`` is for the launcher, the rest for whoever looks after it.
    """

    def __init__(
        self, control_port: int, *, root: Path = Path("/tmp"), clock: Clock | None = None
    ) -> None:
        self._control_port = control_port
        self._parent = root / f"pdserve-{os.getuid()}"
        self.folder = self._parent / str(control_port)
        self._lock_path = self._parent / f"{control_port}.lock"
        self._clock = clock or SystemClock()
        self._prefix = hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]

    @property
    def cores_dir(self) -> Path:
        """Where workers lease their cores."""
        return self.folder / "cores"

    @property
    def logs_dir(self) -> Path:
        """Where our own processes log."""
        return self.folder / "logs"

    @property
    def ray_dir(self) -> Path:
        """Where Ray is to put its sessions, so that they go with the run."""
        return self.folder / "ray"

    def begin(self, ports: Mapping[str, int]) -> str:
        """Claim the folder for a run of this process and return the run id.

        Sets the marker in this process's environment: call it before anything is started. Raises
        StartupError where such a cluster runs already, or an earlier one left processes.
        """
        self._make_private(self._parent)
        with locks.locked(self._lock_path, timeout_s=_LOCK_S):
            self.check_free()
            if self.folder.exists():
                self._check_private(self.folder)
                shutil.rmtree(self.folder)
            for folder in (self.folder, self.cores_dir, self.logs_dir, self.ray_dir):
                folder.mkdir(mode=0o700)
            run_id = f"{self._prefix}-{secrets.token_hex(8)}"
            me = processes.look_up(os.getpid())
            assert me is not None
            self._write_run(
                {
                    "run_id": run_id,
                    "boot_id": processes.boot_id(),
                    "launcher": _to_plain(me),
                    "ports": dict(ports),
                }
            )
        os.environ[RUN_ID_VARIABLE] = run_id
        os.environ[_KEEP_ENVIRONMENT] = "1"
        return run_id

    def join(self) -> Path:
        """Return the folder, for a process that no launcher of this machine has started.

        Raises StartupError where it cannot be had for this user alone.
        """
        for folder in (self._parent, self.folder):
            self._make_private(folder)
        return self.folder

    def record(self, pid: int, name: str) -> None:
        """Note a process that the marker may not reach; one that has ended already is skipped."""
        process = processes.look_up(pid)
        if process is None:
            return
        line = json.dumps(_to_plain(process) | {"name": name})
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.folder / "processes.jsonl", flags, 0o600)
        try:
            os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)

    def running(self) -> ProcessRef | None:
        """Return the launcher of this cluster while it lives."""
        run = self._read_run()
        if run is None:
            return None
        launcher = _from_plain(run.get("launcher"))
        return launcher if launcher is not None and launcher.is_alive() else None

    def ports(self) -> dict[str, int]:
        """Return the ports of the last run by door; empty where none is known."""
        run = self._read_run() or {}
        ports = run.get("ports")
        return {str(name): int(port) for name, port in ports.items()} if ports else {}

    def leftovers(self) -> list[ProcessRef]:
        """Return what a dead launcher left alive; nothing while the launcher lives."""
        return [] if self.running() is not None else self.started()

    def check_free(self) -> None:
        """Raise StartupError where such a cluster runs, or an earlier one left processes."""
        launcher = self.running()
        if launcher is not None:
            raise StartupError(
                f"a cluster with this control port is running already: {launcher}; "
                f"stop it with `{commands.down(self._control_port)}`, or choose other ports"
            )
        left = self.leftovers()
        if left:
            raise StartupError(
                f"an earlier run left {len(left)} processes behind: {', '.join(map(str, left))}; "
                f"clear them with `{commands.down(self._control_port)}`"
            )

    def clear(self, timeout_s: float, *, keep_folder: bool = False) -> list[ProcessRef]:
        """End the whole run and remove its folder; return the processes that were ended.

        A living launcher is asked first, so that it can stop the rest in order; when this process
        is the launcher it sweeps what it started. ``keep_folder`` leaves the logs of a failed start
        to be read; the next run removes them. Raises StartupError where a process survives.
        """
        if not self._parent.exists() and not self.started():
            return []
        self._make_private(self._parent)
        deadline = self._clock.now() + timeout_s
        # Before the lock is taken: the launcher takes it too, to sweep behind itself.
        ended = self._stop_launcher(timeout_s)
        with locks.locked(self._lock_path, timeout_s=_LOCK_S):
            ended += self._sweep(deadline)
            if self.folder.exists() and not keep_folder:
                self._check_private(self.folder)
                shutil.rmtree(self.folder)
        return ended

    def _stop_launcher(self, timeout_s: float) -> list[ProcessRef]:
        launcher = self.running()
        if launcher is None or launcher.pid == os.getpid():
            return []
        processes.end_all([launcher], term_s=0.6 * timeout_s, kill_s=1.0, clock=self._clock)
        return [launcher]

    def _sweep(self, deadline: float) -> list[ProcessRef]:
        ended: dict[ProcessRef, None] = {}
        for round_ in range(_ROUNDS):
            left = self.started()
            if not left:
                return list(ended)
            ended.update(dict.fromkeys(left))
            # A supervisor may have started a child while it was asked to end: then kill at once.
            term_s = 0.6 * max(0.0, deadline - self._clock.now()) if round_ == 0 else 0.0
            processes.end_all(
                left, term_s=term_s, kill_s=max(1.0, deadline - self._clock.now() - term_s),
                clock=self._clock,
            )  # fmt: skip
        survivors = self.started()
        if survivors:
            names = ", ".join(map(str, survivors))
            raise StartupError(f"could not end {names}: end them by hand, or restart the machine")
        return list(ended)

    def started(self) -> list[ProcessRef]:
        """Return living processes of any run of this folder, without launchers and this process."""
        found = {p.pid: p for p in processes.find_marked(RUN_ID_VARIABLE, f"{self._prefix}-")}
        for process in self._read_records():
            if process.pid not in found and process.pid != os.getpid() and process.is_alive():
                found[process.pid] = process
        return [found[pid] for pid in sorted(found)]

    def _make_private(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StartupError(
                f"cannot make the run folder {folder}: {error.strerror}; free that name"
            ) from error
        self._check_private(folder)

    def _check_private(self, folder: Path) -> None:
        """Refuse a folder that another user could have put there or could write to."""
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            reason = "is not a folder"
        elif status.st_uid != os.getuid():
            reason = f"belongs to another user (uid {status.st_uid})"
        elif status.st_mode & 0o077:
            reason = f"is open to other users (mode {stat.S_IMODE(status.st_mode):o})"
        else:
            return
        raise StartupError(f"the run folder {folder} {reason}: remove it, then start again")

    def _write_run(self, run: Mapping[str, Any]) -> None:
        draft = self.folder / "run.json.new"
        draft.write_text(json.dumps(run), encoding="utf-8")
        draft.rename(self.folder / "run.json")

    def _read_run(self) -> dict[str, Any] | None:
        """The last run's facts, where there are any and they are of this boot."""
        text = self._read("run.json")
        try:
            run = json.loads(text) if text else None
        except ValueError:
            return None
        is_current = isinstance(run, dict) and run.get("boot_id") == processes.boot_id()
        return run if is_current else None

    def _read_records(self) -> list[ProcessRef]:
        if self._read_run() is None:
            return []
        found = []
        for line in self._read("processes.jsonl").splitlines():
            try:
                process = _from_plain(json.loads(line))
            except ValueError:
                continue  # the launcher died while it wrote this line
            if process is not None:
                found.append(process)
        return found

    def _read(self, name: str) -> str:
        if not self._parent.exists() or not self.folder.exists():
            return ""
        # What is read here names processes to end: it must be our own word.
        self._check_private(self._parent)
        self._check_private(self.folder)
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""


def _to_plain(process: ProcessRef) -> dict[str, Any]:
    return {"pid": process.pid, "started": process.started, "name": process.name}


def _from_plain(tree: Any) -> ProcessRef | None:
    try:
        return ProcessRef(pid=int(tree["pid"]), started=int(tree["started"]), name=tree["name"])
    except (KeyError, TypeError, ValueError):
        return None
