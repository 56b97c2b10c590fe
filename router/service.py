"""What both doors call: from a client's call to a stream of text, and the cluster's readiness.

    full? ─▶ (body) ─▶ full? ─▶ validate ─▶ overload? ─▶ tokenise (off the loop) ─▶ fits? ─▶ start

Each arrow can refuse with a typed error; no step works in proportion to what an earlier one has
not bounded. Both doors get the same verdict since this is the one way in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.config import SchedulingConfig
from cluster.control.readiness import (
    LINK,
    broken_links,
    can_serve,
    faults,
    lack,
    may_wait,
    missing_roles,
)
from cluster.errors import (
    ClusterFull,
    EngineFault,
    InvalidRequest,
    NoWorker,
    PdserveError,
)
from cluster.policy.order import Ordering
from cluster.policy.tiers import Tiers
from router.auth import Keys, StreamsPerKey
from router.calls import CLIENT_PREFIX, Call, Calls, client_name
from router.gate import Gate
from router.given import ANYBODY, Caller
from router.intake import Intake
from router.validate import Validator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.clock import Clock
    from cluster.config import LimitsConfig
    from cluster.control.capacity import Capacity
    from cluster.control.facts import ClusterView
    from cluster.errors import QueueFull
    from router.calls import CallPlan
    from router.checked import Checked
    from router.dispatch import Dispatcher
    from router.given import GenerateInput, TokenizeInput
    from router.metrics import RouterMetrics
    from router.served import ServedModel
    from router.text import TextCodec

logger = logging.getLogger(__name__)

VIEW_MAX_AGE_S = 15.0
"""An older picture of the cluster is none: the control plane is gone, not restarting. One that was
stopped for 10 s is waited for."""
READY_MAX_AGE_S = 6.0
"""With an older one nobody else should send requests here, though those that come still wait."""
_RETRY_AFTER_S = 1.0
CONTROL_PLANE = "control plane"
ROUTER = "router"
_LEAVES = "this router is shutting down"
MAX_WATCHERS = 256
"""Clients that watch the cluster through one router."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be served now; ``missing`` names what they lack, or do without."""

    missing: tuple[str, ...]
    reasons: tuple[str, ...]
    """In words; also of what is broken and not missing."""
    is_ready: bool = False

    def has(self, role: str) -> bool:
        """Whether a worker fills a role."""
        return not {role, CONTROL_PLANE} & set(self.missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Who is let in, and what is open."""

    keys: Keys = field(default_factory=Keys)
    calls: Calls = field(default_factory=Calls)
    tiers: Tiers = field(default_factory=lambda: Tiers.of(SchedulingConfig()))
    ordering: Ordering = field(default_factory=Ordering)


class Service:
    """One router's front: constructed cheap, ``start`` connects, ``stop`` ends all requests.

    ``max_open_calls`` bounds what is in this router at all, from the first byte of a call to its
    end: more could neither run nor wait. Each choice of a call counts.
    """

    def __init__(  # noqa: PLR0913 (what it is made of)
        self,
        *,
        model: ServedModel,
        limits: LimitsConfig,
        codec: TextCodec,
        dispatcher: Dispatcher,
        capacity: Capacity,
        max_open_calls: int,
        door: Door | None = None,
    ) -> None:
        self.model = model
        self.limits = limits
        self.codec = codec
        self.metrics: RouterMetrics = dispatcher.metrics
        self.max_open_calls = max_open_calls
        self.dispatcher = dispatcher
        self._clock: Clock = dispatcher.clock
        self._door = door or Door()
        self._streams = StreamsPerKey(limits.max_streams_per_key)
        self._num_at_edge = self._num_watching = 0
        self._is_leaving = self._is_shut = False
        self.num_reading = 0
        """Calls whose body is on its way."""
        max_prompt_chars = model.max_model_len * codec.max_token_chars
        self._validator = Validator(model, limits, max_prompt_chars=max_prompt_chars)
        self.tiers = self._door.tiers
        self._gate = Gate(self._door.ordering, self.tiers, self.metrics, model.max_model_len)
        self._intake = Intake(
            codec, capacity, self._clock, max_prompt_chars=max_prompt_chars, tiers=self.tiers
        )
        self.metrics.watch(lambda: dispatcher.route.view)

    @property
    def keys(self) -> Keys:
        """The keys that open the doors."""
        return self._door.keys

    async def start(self) -> None:
        """Connect to the control plane."""
        await self.dispatcher.start()

    async def stop(self) -> None:
        """End all requests as cancelled and give back what they hold; idempotent."""
        await self.dispatcher.stop()
        self._intake.close()

    @property
    def num_calls(self) -> int:
        """Calls that are here, from their body's first byte to their end; watchers don't count."""
        return self.dispatcher.num_open + self._num_at_edge + self.num_reading

    def leave(self) -> None:
        """Be ready no more; whoever comes is served still."""
        self._is_leaving = True

    def shut(self) -> None:
        """Refuse whoever comes, and send away who watches; what runs goes on."""
        self._is_leaving = self._is_shut = True

    def reopen(self) -> None:
        """Serve whoever comes after all; it is still not ready."""
        self._is_shut = False

    def check_stays(self) -> None:
        """Raise NoWorker once this router leaves: whoever watches shall watch another."""
        if self._is_leaving:
            raise NoWorker(_LEAVES, stage="edge", retry_after_s=_RETRY_AFTER_S)

    def check_open(self) -> None:
        """Raise NoWorker once this router is shut."""
        if self._is_shut:
            raise NoWorker(_LEAVES, stage="edge", retry_after_s=_RETRY_AFTER_S)

    @contextlib.contextmanager
    def admission(self, caller: Caller = ANYBODY) -> Iterator[None]:
        """Hold a place for a call until ``generate`` has made requests of it.

        Raises QueueFull before anything is read of a call that finds the router or the queue full,
        or its key with too many calls open.
        """
        try:
            self._refuse_new(caller)
            self._streams.take(caller)
        except PdserveError as error:
            self.refused(error)
            raise
        self._num_at_edge += 1
        try:
            with self._gate.entering():
                yield
        finally:
            self._num_at_edge -= 1
            self._streams.give_back(caller)

    @contextlib.contextmanager
    def reading(self, caller: Caller, *, generates: bool) -> Iterator[None]:
        """Let a call's body be read; raises QueueFull where that would be in vain.

        It counts for its key and holds no other place: a body that doesn't come is in nobody's way.
        """
        if generates:
            self._refuse_new(caller)
        else:
            self._refuse_if_full(1)
        self._streams.take(caller)
        self.num_reading += 1
        try:
            yield
        finally:
            self.num_reading -= 1
            self._streams.give_back(caller)

    async def generate(self, given: GenerateInput, caller: Caller = ANYBODY) -> Call:
        """Check a call and start it; the caller reads the Call, and cancels it on leaving.

        Raises InvalidRequest, ModelNotFound, RequestTooLarge, QueueFull or NoWorker, all of them
        before any worker has heard of it; EngineFault where we fail ourselves.
        """
        accepted = self._clock.now()
        self.metrics.received()
        try:
            checked = self._validator.check(given)
            self._refuse_overload(checked, caller)
            with self._gate.coming(checked):
                plan = await self._intake.plan(checked, caller, accepted)
            self._gate.tokenised(checked, sum(len(prompt.ids) for prompt in plan.prompts))
            # It was held at the edge until now: its key has room for it.
            return self._start(plan)
        except PdserveError as error:
            self.metrics.rejected(error)
            raise
        except asyncio.CancelledError:
            self.metrics.left()
            raise
        except Exception:
            logger.exception("a call failed at the edge")
            fault = EngineFault("a call failed at the edge", stage="edge")
            self.metrics.rejected(fault)
            raise fault from None

    @contextlib.contextmanager
    def edge(self, caller: Caller) -> Iterator[None]:
        """Hold a place for a call that generates nothing; raises QueueFull where there is none."""
        self._refuse_if_full(1)
        self._streams.take(caller)
        self._num_at_edge += 1
        try:
            yield
        finally:
            self._num_at_edge -= 1
            self._streams.give_back(caller)

    @contextlib.contextmanager
    def watching(self, caller: Caller) -> Iterator[None]:
        """Hold a place for one who watches the cluster; raises QueueFull where there is none."""
        self.check_stays()
        if self._num_watching >= MAX_WATCHERS:
            reason = f"{MAX_WATCHERS} clients watch the cluster, the most there may be"
            raise ClusterFull(reason, stage="edge", retry_after_s=_RETRY_AFTER_S)
        self._streams.take(caller)
        self._num_watching += 1
        try:
            yield
        finally:
            self._num_watching -= 1
            self._streams.give_back(caller)

    async def tokenise(self, given: TokenizeInput) -> tuple[int, ...]:
        """Return the ids that a prompt would have; raises as ``generate`` does."""
        return await self._intake.tokenise(self._validator.check_text(given))

    async def detokenise(self, model: object, tokens: object) -> str:
        """Return the text of ids; raises InvalidRequest or ModelNotFound."""
        return await self._intake.detokenise(self._validator.check_tokens(model, tokens))

    def refused(self, error: PdserveError) -> None:
        """Count a call that its door refused before it could be given to ``generate``."""
        self.metrics.received()
        self.metrics.rejected(error)

    async def cancel(self, request_id: str, *, timeout_s: float = 5.0) -> bool:
        """Stop a running call, of this router or of another; whether it was running."""
        # The name of a client's own id can be made by anybody: it is no request's id.
        is_own = request_id.startswith(CLIENT_PREFIX)
        return False if is_own else await self._cancel(request_id, timeout_s)

    async def cancel_by_client_id(
        self, client_request_id: object, caller: Caller, *, timeout_s: float = 5.0
    ) -> bool:
        """Stop the calls that a tenant gave this id; whether one was running."""
        own = self._validator.client_request_id(client_request_id)
        if not own:
            raise InvalidRequest("client_request_id is missing", field="client_request_id")
        return await self._cancel(client_name(caller.tenant, own), timeout_s)

    def view(self) -> ClusterView:
        """Return the cluster as it was last told; raises NoWorker where that is too long ago."""
        view = self._fresh_view()
        if view is None:
            reason = "not ready: the control plane does not answer"
            raise NoWorker(reason, stage="edge", retry_after_s=_RETRY_AFTER_S)
        return view

    def readiness(self) -> Readiness:
        """Say whether a request could be placed now, and which role lacks a worker.

        A suspected worker counts: it is back or declared dead within 3 s, and a request waits for
        it so long. So a busy or stuttering worker doesn't flap, and a dead one shows in 4 s, one
        whose engine hangs in 7 s. Decode workers prefill by themselves while there is no prefill
        worker, or no link that works.
        """
        if self._is_leaving:
            return Readiness((ROUTER,), (f"{ROUTER}: it is shutting down",))
        view = self._fresh_view(READY_MAX_AGE_S)
        if view is None:
            return Readiness((CONTROL_PLANE,), (f"{CONTROL_PLANE}: it does not answer",))
        missing = [role.value for role in missing_roles(view)]
        num_broken, num_links = broken_links(view)
        if num_broken and num_broken == num_links:
            missing.append(LINK)
        return Readiness(tuple(missing), faults(view), is_ready=can_serve(view))

    async def _cancel(self, name: str, timeout_s: float) -> bool:
        if self._door.calls.cancel(name):
            return True
        return await self.dispatcher.route.cancel_request(name, timeout_s)

    def _start(self, plan: CallPlan) -> Call:
        self._streams.take(plan.caller, is_known=True)
        call = Call(
            plan,
            submit=self.dispatcher.submit,
            metrics=self.metrics,
            on_over=self._over,
        )
        self._door.calls.add(call)
        call.start()
        return call

    def _over(self, call: Call) -> None:
        self._door.calls.remove(call)
        self._streams.give_back(call.caller)

    def _fresh_view(self, max_age_s: float = VIEW_MAX_AGE_S) -> ClusterView | None:
        route = self.dispatcher.route
        if route.view is None or route.view_age_s(self._clock.now()) > max_age_s:
            return None
        return route.view

    def _refuse_new(self, caller: Caller) -> None:
        self._refuse_if_full(1)
        view = self._fresh_view()
        if view is not None:
            _raise(self._gate.full(view, caller))

    def _refuse_if_full(self, num_more: int) -> None:
        self.check_open()
        if self._num_at_edge + self.dispatcher.num_open + num_more > self.max_open_calls:
            view = self._fresh_view()
            raise ClusterFull(
                f"{self.max_open_calls} calls are open here, the most there may be",
                stage="edge",
                retry_after_s=view.retry_after_s if view is not None else _RETRY_AFTER_S,
            )

    def _refuse_overload(self, checked: Checked, caller: Caller) -> None:
        """Refuse from the last snapshot what could only wait in vain."""
        num_choices = checked.num_all_choices
        if num_choices > self.max_open_calls:
            raise InvalidRequest(
                f"n times the number of prompts is {num_choices}; this cluster holds "
                f"{self.max_open_calls} choices",
                field="n",
            )
        if num_choices > 1:
            # One is counted already, as the call at the edge.
            self._refuse_if_full(num_choices - 1)
        view = self._fresh_view()
        if view is None:
            if not self.dispatcher.route.awaits_first_view:
                self.view()
        elif not may_wait(view):
            reason = f"not ready: {lack(missing_roles(view), view.refused)}"
            raise NoWorker(reason, stage="edge", retry_after_s=_RETRY_AFTER_S)
        else:
            _raise(self._gate.refusal(view, checked, caller))


def _raise(error: QueueFull | None) -> None:
    """Raise it, if there is one, and name it no longer.

    A frame that names its error is a cycle with it, which keeps all that a refused call had: after
    a thousand of those the collector stops the loop for 50 ms.
    """
    if error is not None:
        try:
            raise error
        finally:
            del error
