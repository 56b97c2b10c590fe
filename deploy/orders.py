"""``pdserve drain`` and ``pdserve set-role``: tell one worker, and wait until it has done so."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from cluster.clock import SystemClock
from cluster.control.facts import Health
from cluster.control.orders import give_order
from cluster.control.status import asking
from cluster.errors import NoWorker, StartupError
from cluster.trust import ClusterToken
from deploy import commands
from deploy.worker_life import LAST_GRANTS_S

if TYPE_CHECKING:
    from cluster.config import DeployConfig, Role
    from cluster.control.facts import ClusterView, WorkerView

_TIMEOUT_S = 5.0
_POLL_S = 0.25
_BEYOND_S = 60.0
"""To leave, and to come back, after all that may take ``limits.drain_s``."""


def drain(config: DeployConfig, worker_id: str) -> int:
    """Drain a worker, and return when it has left; raises PdserveError with the reason."""
    return asyncio.run(_Order(config, worker_id, None).run())


def set_role(config: DeployConfig, worker_id: str, role: Role) -> int:
    """Give a worker another role, and return when it serves; raises PdserveError likewise."""
    return asyncio.run(_Order(config, worker_id, role).run())


class _Order:
    """One order, from the control plane's yes to what comes of it."""

    def __init__(self, config: DeployConfig, worker_id: str, role: Role | None) -> None:
        endpoints = config.endpoints
        self._address = f"{endpoints.host}:{endpoints.control_port}"
        self._token = ClusterToken.load(config.security)
        self._patience_s = config.limits.drain_s + _BEYOND_S
        self._worker_id = worker_id
        self._role = role
        self._told = ""

    async def run(self) -> int:
        try:
            incarnation = await give_order(
                self._address, self._worker_id, self._role, timeout_s=_TIMEOUT_S, token=self._token
            )
        except NoWorker as error:
            raise StartupError(f"{error.message}; {commands.START_REMEDY}") from error
        clock = SystemClock()
        deadline = clock.now() + self._patience_s
        while not await self._is_done(incarnation):
            if clock.now() >= deadline:
                raise StartupError(f"after {self._patience_s:.0f} s: {self._told}")
            await asyncio.sleep(_POLL_S)
        return 0

    async def _is_done(self, incarnation: str) -> bool:
        try:
            async with asking(self._address, self._token) as ask:
                view = await ask(_TIMEOUT_S)
        except NoWorker:
            # It restarts: the worker goes on, and what it says will be seen.
            self._say("the control plane does not answer")
            return False
        worker = self._find(view)
        if worker is not None and worker.worker.incarnation == incarnation:
            self._say(_progress(worker))
            return False
        if self._role is None:
            self._say(f"{self._worker_id} has drained and left")
            return True
        if worker is None:
            self._say(f"{self._worker_id} has left, to come back as {self._role.value}")
            return False
        role = worker.worker.role
        if role is not self._role:
            raise StartupError(
                f"{self._worker_id} ended, and another took its place in its pool's role, "
                f"{role.value}"
            )
        if worker.health is not Health.ALIVE:
            return False
        self._say(f"{self._worker_id} serves as {role.value}")
        return True

    def _find(self, view: ClusterView) -> WorkerView | None:
        return next((w for w in view.workers if w.worker.worker_id == self._worker_id), None)

    def _say(self, text: str) -> None:
        if text != self._told:
            self._told = text
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


def _progress(worker: WorkerView) -> str:
    report, name = worker.report, worker.worker.worker_id
    if not report.is_draining:
        return f"{name} is told"
    num_open = len(report.held_grants)
    if not num_open:
        return f"{name} drains: nothing left, waiting {LAST_GRANTS_S:g} s for late grants"
    return f"{name} drains: {num_open} requests left"
