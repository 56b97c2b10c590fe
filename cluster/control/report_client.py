"""A worker's end of the Report stream: registers, reports on change and each second.

It reconnects and registers again by itself. Changes are gathered: a report goes out at once, the
next one 5 ms later at the earliest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from cluster.control import connection, convert
from cluster.errors import StartupError
from cluster.wire import control_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.clock import Clock
    from cluster.config import Role
    from cluster.control.facts import Registration, WorkerReport
    from cluster.trust import ClusterToken

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTiming:
    """How often a worker reports."""

    gap_s: float = 0.005
    """Between two reports at least."""
    beat_s: float = 1.0
    """Between two reports at most."""
    backoff: connection.Backoff = field(default_factory=connection.Backoff)


class ReportClient:
    """Keeps the control plane at ``address`` told about this worker.

    ``registration`` and ``report`` are called on the event loop whenever one is sent; ``report``
    may drain samples. ``on_abort_grant`` is told to end the legs of a grant, ``on_order`` that an
    operator wants this worker to drain and leave, or to come back in a role. Where the control
    plane does not want this worker, at the start or later, ``refused`` is done and nothing is
    sent any more; ``accepted`` raises the same error where there was no acceptance before.
    """

    def __init__(  # noqa: PLR0913 (what it tells, and what it shows)
        self,
        address: str,
        *,
        registration: Callable[[], Registration],
        report: Callable[[], WorkerReport],
        on_abort_grant: Callable[[str], None],
        on_order: Callable[[Role | None], None] | None = None,
        clock: Clock,
        timing: ReportTiming | None = None,
        token: ClusterToken | None = None,
    ) -> None:
        self._registration = registration
        self._report = report
        self._on_abort_grant = on_abort_grant
        self._on_order = on_order
        self._clock = clock
        self._timing = timing or ReportTiming()
        self._stream: connection.Connection[pb.WorkerFact, pb.Directive] = connection.Connection(
            address,
            lambda stub: cast("Callable[[], object]", stub.Report),
            events=self,
            name="report",
            backoff=self._timing.backoff,
            token=token,
        )
        self._accepted: asyncio.Future[None] | None = None
        self._refused: asyncio.Future[StartupError] | None = None
        self._beats: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._is_connected = False
        self._lost_at: float | None = None
        self._term = 0
        self._num_reports = 0

    @property
    def accepted(self) -> asyncio.Future[None]:
        """Done at the first acceptance; StartupError where the registration is refused."""
        if self._accepted is None:
            self._accepted = asyncio.get_running_loop().create_future()
        return self._accepted

    @property
    def refused(self) -> asyncio.Future[StartupError]:
        """Done, with the reason, when the control plane does not want this worker (any more)."""
        if self._refused is None:
            self._refused = asyncio.get_running_loop().create_future()
        return self._refused

    @property
    def is_connected(self) -> bool:
        """Whether the control plane has accepted this worker on the present stream."""
        return self._is_connected

    @property
    def refusal(self) -> str:
        """Why the control plane did not even talk to this worker; empty where it does."""
        return self._stream.refusal

    def set_tap(self, tap: connection.Tap | None) -> None:
        """Let faults be injected between this client and its stream; None: none, as at first."""
        self._stream.tap = tap

    async def start(self) -> None:
        """Start dialling; await ``accepted`` to know that the worker is placed on."""
        if self._beats is None:
            self._beats = asyncio.get_running_loop().create_task(self._beat(), name="report-beat")
            self._stream.start()

    async def stop(self, reason: str) -> None:
        """Take leave with a last report, and hang up."""
        if self._beats is None:
            return
        self._beats.cancel()
        await asyncio.wait({self._beats})
        self._beats = None
        if self._is_connected:
            self._send_report()
            self._stream.send(pb.WorkerFact(leave=pb.Leave(reason=reason)))
        await self._hang_up()
        if not self.accepted.done():
            self.accepted.cancel()

    def changed(self) -> None:
        """Something that a report tells has changed. Event loop only; cheap."""
        self._changed.set()

    # ---- for the connection

    def on_dialled(self, send: Callable[[pb.WorkerFact], None]) -> None:
        """Register first, on every stream."""
        send(pb.WorkerFact(register=convert.registration_to_wire(self._registration())))

    def on_message(self, message: pb.Directive) -> None:
        """Take one directive."""
        kind = message.WhichOneof("kind")
        if kind == "accepted":
            self._was_accepted(message.accepted.term)
        elif kind == "refused":
            self._was_refused(message.refused.reason)
        elif kind is not None and getattr(message, kind).term < self._term:
            logger.warning("%s of an old term dropped", kind)
        elif kind == "abort":
            self._on_abort_grant(message.abort.grant_id)
        elif kind in ("drain", "role") and self._on_order is not None:
            role = convert.role_from_wire("role", message.role.role) if kind == "role" else None
            self._on_order(role)

    def on_lost(self, num_failures: int) -> None:
        """Nothing to keep: the next stream starts with all there is to know."""
        if self._is_connected:
            self._lost_at = self._clock.now()
        self._is_connected = False

    # ---- inside

    def _was_accepted(self, term: int) -> None:
        self._term = max(self._term, term)
        self._is_connected = True
        self._changed.set()
        if self._lost_at is not None:
            logger.info(
                "term=%d registered again after %.2f s", term, self._clock.now() - self._lost_at
            )
        if not self.accepted.done():
            self.accepted.set_result(None)

    def _was_refused(self, reason: str) -> None:
        if self.refused.done():
            return
        self._is_connected = False
        logger.error("registration refused: %s", reason)
        error = StartupError(f"the control plane refused this worker: {reason}")
        if not self.accepted.done():
            self.accepted.set_exception(error)
            # Whoever awaits it gets it; nobody has to.
            self.accepted.exception()
        self.refused.set_result(error)
        # Not from inside the stream's own task, which would wait for itself.
        self._closing = asyncio.get_running_loop().create_task(self._stream.stop())

    async def _hang_up(self) -> None:
        if self._closing is not None:
            await self._closing
        await self._stream.stop()

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.beat_s):
                    await self._changed.wait()
            self._changed.clear()
            if self._is_connected:
                self._send_report()
            await asyncio.sleep(self._timing.gap_s)

    def _send_report(self) -> None:
        report = convert.report_to_wire(self._report())
        self._num_reports += 1
        report.number = self._num_reports
        self._stream.send(pb.WorkerFact(report=report))
