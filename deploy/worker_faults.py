"""Where a worker's parts meet the fault switch; without ``faults.enabled`` none is there."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

from cluster.errors import EngineFault
from cluster.rpc.fault_seam import FaultService, FaultyTap
from cluster.rpc.faults import FaultyLegs, FaultyLinkEvents
from cluster.transport.faults import FaultSwitch, Point, Verb
from cluster.transport.faulty_channel import FaultyTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from cluster.config import DeployConfig
    from cluster.engine.loop import Runner
    from cluster.engine.plan import Outcome, Plan, Scheduled
    from cluster.engine.stored import OnStored
    from cluster.rpc.legs import LegHandler
    from cluster.rpc.link import LinkEvents
    from deploy.worker_parts import WorkerParts

_HELD_S = 3600.0


class FaultyRunner:
    """Computes the steps of another runner, each when the switch lets it."""

    def __init__(self, inner: Runner, switch: FaultSwitch) -> None:
        self._inner = inner
        self._switch = switch
        self._never = threading.Event()

    def run(self, plan: Plan, on_stored: OnStored | None = None) -> Outcome:
        """Compute one step, late or not at all where the plan says so."""
        self._pass(Point.STEP, plan.num_tokens)
        if on_stored is None:
            return self._inner.run(plan)

        def tell(shares: tuple[Scheduled, ...], num_layers: int) -> None:
            on_stored(shares, num_layers)
            self._pass(Point.STORED)

        return self._inner.run(plan, tell)

    def _pass(self, point: Point, num_tokens: int = 0) -> None:
        firing = self._switch.at(point)
        if firing is None:
            return
        if firing.fault.verb is Verb.FAIL:
            raise EngineFault("broken on purpose", stage="step")
        patience_s = _HELD_S
        if firing.fault.verb is Verb.DELAY:
            patience_s = firing.fault.seconds + firing.fault.seconds_per_token * num_tokens
        self._switch.wait_over(firing, patience_s, self._never)


class WorkerFaults:
    """Puts the switch into the ways of one worker, or leaves them alone."""

    def __init__(self, config: DeployConfig) -> None:
        self.switch = FaultSwitch() if config.faults.enabled else None

    def parts(self, parts: WorkerParts) -> WorkerParts:
        """Return the parts with a transport and a runner that can fail."""
        if self.switch is None:
            return parts
        return dataclasses.replace(
            parts,
            transport=FaultyTransport(parts.transport, self.switch),
            runner=FaultyRunner(parts.runner, self.switch),
        )

    def link_events(self, events: LinkEvents) -> LinkEvents:
        """Return what shall hear of the links instead."""
        return events if self.switch is None else FaultyLinkEvents(events, self.switch)

    def legs(self, legs: LegHandler) -> LegHandler:
        """Return what shall hear of the routers instead."""
        return legs if self.switch is None else FaultyLegs(legs, self.switch)

    def tap(self) -> FaultyTap | None:
        """Return what stands in the stream to the control plane."""
        return None if self.switch is None else FaultyTap(self.switch)

    def services(self) -> tuple[Callable[[grpc.aio.Server], None], ...]:
        """Return what is served besides; nothing without the switch."""
        return () if self.switch is None else (FaultService(self.switch).add_to,)
