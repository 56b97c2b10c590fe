"""What both doors call: from a client's call to a stream of text, and the cluster's readiness.

    edge full? ─▶ (body) ─▶ validate ─▶ overload? ─▶ tokenise (off the loop) ─▶ fits? ─▶ dispatch

Each arrow can refuse with a typed error; no step works in proportion to what an earlier one has
not bounded. Both doors get the same verdict since this is the one way in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.errors import EngineFault, InvalidRequest, NoWorker, PdserveError, QueueFull
from cluster.request import Request, SamplingParams
from router.events import Accepted
from router.stream_text import ChoiceText, Detokenizer
from router.validate import Checked, Validator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.clock import Clock
    from cluster.config import LimitsConfig
    from cluster.control.capacity import Capacity
    from cluster.control.facts import ClusterView
    from router.dispatch import Dispatcher, Generation
    from router.given import GenerateInput
    from router.metrics import RouterMetrics
    from router.served import ServedModel
    from router.text import TextCodec

logger = logging.getLogger(__name__)

VIEW_MAX_AGE_S = 10.0
"""An older picture of the cluster is none: the control plane is gone, not restarting."""
_RETRY_AFTER_S = 1.0
_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be served now; ``missing`` names what they lack."""

    missing: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing


class Service:
    """One router's front: constructed cheap, ``start`` connects, ``stop`` ends all requests.

    ``max_open_calls`` bounds what is in this router at all, from the first byte of a call to its
    end: more could neither run nor wait.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        limits: LimitsConfig,
        codec: TextCodec,
        dispatcher: Dispatcher,
        capacity: Capacity,
        max_open_calls: int,
    ) -> None:
        self.model = model
        self.limits = limits
        self.metrics: RouterMetrics = dispatcher.metrics
        self.max_open_calls = max_open_calls
        self._codec = codec
        self._capacity = capacity
        self._num_at_edge = 0
        self.dispatcher = dispatcher
        self._clock: Clock = dispatcher.clock
        max_prompt_chars = model.max_model_len * codec.max_token_chars
        self._validator = Validator(model, limits, max_prompt_chars=max_prompt_chars)
        # Tokenising releases the interpreter lock; one thread keeps order and bounds the work.
        self._tokenising = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self.metrics.watch(lambda: dispatcher.route.view)

    async def start(self) -> None:
        """Connect to the control plane."""
        await self.dispatcher.start()

    async def stop(self) -> None:
        """End all requests as cancelled and give back what they hold; idempotent."""
        await self.dispatcher.stop()
        self._tokenising.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def admission(self) -> Iterator[None]:
        """Hold a place for a call until ``generate`` has made a request of it.

        Raises QueueFull before anything is read of a call that finds the router full.
        """
        if self._num_at_edge + self.dispatcher.num_open >= self.max_open_calls:
            view = self._fresh_view()
            error = QueueFull(
                f"{self.max_open_calls} calls are open here, the most there may be",
                stage="edge",
                retry_after_s=view.retry_after_s if view is not None else _RETRY_AFTER_S,
            )
            self.refused(error)
            raise error
        self._num_at_edge += 1
        try:
            yield
        finally:
            self._num_at_edge -= 1

    async def generate(self, given: GenerateInput) -> Generation:
        """Check a call and start it; the caller reads the Generation, and cancels it on leaving.

        Raises InvalidRequest, ModelNotFound, RequestTooLarge, QueueFull or NoWorker, all of them
        before any worker has heard of it; EngineFault where we fail ourselves.
        """
        accepted = self._clock.now()
        self.metrics.received()
        try:
            checked = self._validator.check(given)
            self._refuse_overload()
            prompt_ids = await self._tokenise(checked)
            request = self._request(checked, prompt_ids, accepted)
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
        text = ChoiceText(Detokenizer(self._codec.decode, self._codec.hidden_ids), checked.stop)
        return self.dispatcher.submit(
            Accepted(
                request=request,
                accepted=accepted,
                text=text,
                wants_timeline=checked.wants_timeline,
            )
        )

    def refused(self, error: PdserveError) -> None:
        """Count a call that its door refused before it could be given to ``generate``."""
        self.metrics.received()
        self.metrics.rejected(error)

    async def cancel(self, request_id: str, *, timeout_s: float = 5.0) -> bool:
        """Stop a running request, of this router or of another; whether it was running."""
        if self.dispatcher.on_cancel(request_id):
            return True
        return await self.dispatcher.route.cancel_request(request_id, timeout_s)

    def readiness(self) -> Readiness:
        """Say whether a request could be placed now, and which role lacks a worker.

        A suspected worker counts: it is back or declared dead within 3 s, and a request waits for
        it so long. So a busy or stuttering worker doesn't flap, and a dead one shows in 4 s.
        """
        view = self._fresh_view()
        if view is None:
            return Readiness(("control plane",))
        roles = {worker.worker.role for worker in view.workers}
        if Role.MIXED in roles:
            return Readiness(())
        return Readiness(tuple(r.value for r in (Role.PREFILL, Role.DECODE) if r not in roles))

    def _fresh_view(self) -> ClusterView | None:
        route = self.dispatcher.route
        if route.view is None or route.view_age_s(self._clock.now()) > VIEW_MAX_AGE_S:
            return None
        return route.view

    def _refuse_overload(self) -> None:
        """Refuse from the last snapshot what could only wait in vain."""
        view, readiness = self._fresh_view(), self.readiness()
        if view is None or not readiness.is_ready:
            reason = f"not ready: no {' and no '.join(readiness.missing)} worker"
            if view is None:
                reason = "not ready: the control plane does not answer"
            raise NoWorker(reason, stage="edge", retry_after_s=_RETRY_AFTER_S)
        if view.num_waiting >= view.max_queue_requests:
            raise QueueFull(
                f"{view.num_waiting} requests are waiting, the most there may be",
                stage="edge",
                retry_after_s=view.retry_after_s or _RETRY_AFTER_S,
            )

    async def _tokenise(self, checked: Checked) -> tuple[int, ...]:
        if checked.prompt_ids is not None:
            return checked.prompt_ids
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenising, self._encode, checked)

    def _encode(self, checked: Checked) -> tuple[int, ...]:
        if checked.messages is not None:
            # A template adds to each turn; what it adds counts as well.
            max_chars = 2 * self._validator.max_prompt_chars
            return self._codec.encode_chat(checked.messages, max_chars=max_chars)
        assert checked.prompt is not None
        return self._codec.encode(checked.prompt)

    def _request(self, checked: Checked, prompt_ids: tuple[int, ...], accepted: float) -> Request:
        seed = secrets.randbits(64) if checked.seed is None else checked.seed % _SEEDS
        return Request(
            request_id=secrets.token_hex(16),
            prompt_ids=prompt_ids,
            params=SamplingParams(
                max_tokens=self._max_tokens(checked, len(prompt_ids)),
                temperature=checked.temperature,
                top_p=checked.top_p,
                top_k=checked.top_k,
                seed=seed,
                stop=checked.stop,
                ignore_eos=checked.ignore_eos,
            ),
            deadline=accepted + checked.timeout_s,
        )

    def _max_tokens(self, checked: Checked, num_prompt_tokens: int) -> int:
        """Return the output tokens to make; raises InvalidRequest where they can't fit."""
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", field=checked.prompt_field)
        room = self._capacity.max_output_tokens(num_prompt_tokens)
        if room == 0:
            raise InvalidRequest(
                f"the prompt has {num_prompt_tokens} tokens; with one to generate, the context "
                f"holds {self._capacity.max_prompt_tokens}",
                field=checked.prompt_field,
            )
        if checked.max_tokens is None:
            return room
        if checked.max_tokens > room:
            raise InvalidRequest(
                f"{checked.max_tokens_field} is {checked.max_tokens}, but {num_prompt_tokens} "
                f"prompt tokens leave room for {room}",
                field=checked.max_tokens_field,
            )
        return checked.max_tokens
