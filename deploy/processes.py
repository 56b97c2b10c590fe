"""Find and end processes by what they are, so that a reused pid is never taken for its old owner.

A process is its pid *and* its start time. Processes of one run are found by a variable in their
environment: children inherit it, whoever starts them, and no registry can miss it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.clock import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterable

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRef:
    """One process, told apart from a later one with the same pid."""

    pid: int
    started: int
    """Clock ticks from the boot to its start."""
    name: str = ""

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie doesn't."""
        found = look_up(self.pid)
        return found is not None and found.started == self.started

    def __str__(self) -> str:
        """Return what a person needs to find it."""
        return f"{self.name or 'process'} (pid {self.pid})"


def look_up(pid: int) -> ProcessRef | None:
    """Return the living process with this pid, or None."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # pid (name) state ppid ... : the name may hold spaces and brackets of its own.
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    if fields[0] in "ZX":
        return None
    return ProcessRef(pid=pid, started=int(fields[19]), name=name)


def boot_id() -> str:
    """Return what tells this boot of the machine from another; start times count from it."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def find_marked(variable: str, prefix: str) -> list[ProcessRef]:
    """Return this user's processes started with ``variable`` in their environment.

    Its value must begin with ``prefix``. Processes of other users and of other pid namespaces are
    not looked at, the caller and its ancestors are left out.
    """
    marker = f"{variable}={prefix}".encode()
    spared = _me_and_ancestors()
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        if _is_ours(entry) and _has_variable(entry, marker):
            process = look_up(int(entry.name))
            if process is not None:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def end_all(
    processes: Iterable[ProcessRef],
    *,
    term_s: float,
    kill_s: float,
    clock: Clock | None = None,
) -> list[ProcessRef]:
    """Ask the processes to end, kill those that still run after ``term_s``; return survivors."""
    clock = clock or SystemClock()
    with contextlib.ExitStack() as stack:
        handles = {}
        for process in processes:
            handle = _open(process)
            if handle is not None:
                stack.callback(os.close, handle)
                handles[handle] = process
        for number, patience_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
            if not handles or patience_s <= 0:
                continue
            for handle in handles:
                # It may have ended meanwhile; the handle still means it and nobody else.
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
            _wait(handles, patience_s, clock)
        return list(handles.values())


def _open(process: ProcessRef) -> int | None:
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # Checked after opening: from here on the handle can't come to mean another process.
    if process.is_alive():
        return handle
    os.close(handle)
    return None


def _wait(handles: dict[int, ProcessRef], timeout_s: float, clock: Clock) -> None:
    """Wait for the processes to end and drop those that did."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    deadline = clock.now() + timeout_s
    while handles and (left_s := deadline - clock.now()) > 0:
        for handle, _ in poll.poll(left_s * 1000):
            poll.unregister(handle)
            handles.pop(handle)


def _me_and_ancestors() -> set[int]:
    pids = {os.getpid()}
    pid = os.getppid()
    while pid > 1 and pid not in pids:
        pids.add(pid)
        try:
            stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return pids


def _is_ours(entry: Path) -> bool:
    try:
        same_user = entry.stat().st_uid == os.getuid()
        return same_user and (entry / "ns/pid").readlink() == Path("/proc/self/ns/pid").readlink()
    except OSError:
        return False


def _has_variable(entry: Path, marker: bytes) -> bool:
    try:
        environment = (entry / "environ").read_bytes()
    except OSError:
        return False
    return any(variable.startswith(marker) for variable in environment.split(b"\0"))
