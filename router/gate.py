"""What a router knows of the queue before it tokenises, and whom it refuses by that.

The last view says what waited when it was made; what this router has let in since, and what is
waiting no more, it knows itself. Sizes are guessed from the length of the text. It cannot know how
much of a prompt is cached, nor how short its tenant's outputs are, which order by work goes by: for
the wait until its turn it takes both to be for the best, and for whether it exceeds the bounds as
the first of all neither. The control plane asks the same again when the want arrives, with what
waits then.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from cluster.config import Policy, Role
from cluster.control import overload
from cluster.control.facts import Health
from cluster.control.overload import Newcomer, QueueBounds, QueueLoad

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.control.facts import ClusterView, WorkerView
    from cluster.errors import QueueFull
    from cluster.policy.order import Ordering
    from cluster.policy.tiers import Tiers
    from router.checked import Checked
    from router.given import Caller
    from router.metrics import RouterMetrics

_CHARS_PER_TOKEN = 4.0
"""Of text, until some was tokenised."""
_LEARNS = 0.2


class Gate:
    """Asks ``overload`` on behalf of one router."""

    def __init__(
        self, ordering: Ordering, tiers: Tiers, metrics: RouterMetrics, max_model_len: int
    ) -> None:
        self._max_model_len = max_model_len
        self._ordering = ordering
        self._tiers = tiers
        self._metrics = metrics
        self._view: ClusterView | None = None
        self._num_others = 0
        """Requests of other routers that wait, by the last view."""
        self._room = 0
        self._num_entering = self._num_coming = 0
        self._chars_per_token = _CHARS_PER_TOKEN

    def full(self, view: ClusterView, caller: Caller) -> QueueFull | None:
        """Return why a call that was not even read may not wait; None where it may."""
        who = Newcomer(
            tenant=caller.tenant, standing=0, num_tokens=0, remaining_s=float("inf")
        )  # fmt: skip
        num_entering = max(0, self._num_entering)
        return overload.refusal(self._load(view, num_entering), who, _bounds(view))

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Count a call as one that will wait, while it is checked.

        Of a thousand that come at once, those that the queue has no place for hear so before they
        have let all others have their turn.
        """
        self._num_entering += 1
        try:
            yield
        finally:
            self._num_entering -= 1

    def refusal(self, view: ClusterView, checked: Checked, caller: Caller) -> QueueFull | None:
        """Return why a call that was read may not wait; None where it may.

        Raises InvalidRequest where it asks for a tier that it may not have.
        """
        tier = self._tiers.allowed(
            checked.priority, default=caller.tier, ceiling=caller.ceiling
        )  # fmt: skip
        num_tokens = self._guess_tokens(checked)
        rank, work = self._tiers.rank(tier), self._work(checked, num_tokens)
        who = Newcomer(
            tenant=caller.tenant,
            standing=self._ordering.standing(tier=rank, work=work),
            least_standing=self._ordering.standing(tier=rank, work=_least_work(checked)),
            num_requests=checked.num_all_choices,
            num_tokens=num_tokens * checked.num_choices,
            remaining_s=checked.timeout_s,
        )
        return overload.refusal(self._load(view), who, _bounds(view))

    @contextlib.contextmanager
    def coming(self, checked: Checked) -> Iterator[None]:
        """Count a call as one that will wait, while it is tokenised."""
        self._num_entering -= 1
        self._num_coming += checked.num_all_choices
        try:
            yield
        finally:
            self._num_coming -= checked.num_all_choices
            self._num_entering += 1

    def tokenised(self, checked: Checked, num_tokens: int) -> None:
        """Learn how long a token is."""
        num_chars = checked.num_chars
        if num_chars and num_tokens:
            now = num_chars / num_tokens
            self._chars_per_token += _LEARNS * (now - self._chars_per_token)

    def _load(self, view: ClusterView, num_entering: int = 0) -> QueueLoad:
        num_here = self._metrics.num_queued
        if view is not self._view:
            self._view = view
            self._num_others = max(0, view.num_waiting - num_here)
            self._room = 0 if view.num_waiting else sum(map(_free_slots, view.workers))
        num_requests = self._num_others + num_here + self._num_coming + num_entering
        standings = view.waiting_standings
        if self._ordering.policy is Policy.FCFS:
            standings = {0: num_requests}
        return QueueLoad(
            num_requests=num_requests,
            num_tokens=view.waiting_tokens,
            request_s=view.request_s,
            is_fair=view.are_tenants_fair,
            room=self._room,
            tenants=view.waiting_tenants,
            standings=standings,
        )

    def _work(self, checked: Checked, num_tokens: int) -> float:
        """Return how much work it is, if nothing of it is cached, and it ends when it must."""
        num_prompt = num_tokens / max(1, len(checked.prompts))
        room = max(0.0, self._max_model_len - num_prompt)
        told = (room, checked.max_tokens, checked.expected_tokens)
        return num_prompt + min(most for most in told if most is not None)

    def _guess_tokens(self, checked: Checked) -> int:
        num_ids = sum(len(prompt) for prompt in checked.prompts if not isinstance(prompt, str))
        return num_ids + int(checked.num_chars / self._chars_per_token)


def _least_work(checked: Checked) -> float:
    """Return how little work it may turn out to be: a token to compute, and its output."""
    most, hint = checked.max_tokens, checked.expected_tokens
    if hint is None:
        return 1.0
    return 1.0 + (hint if most is None else min(hint, most))


def _bounds(view: ClusterView) -> QueueBounds:
    return QueueBounds(
        max_requests=view.max_queue_requests,
        max_tokens=view.max_queue_tokens,
        tenant_share=view.tenant_queue_share,
    )


def _free_slots(view: WorkerView) -> int:
    if view.worker.role is Role.PREFILL or view.health is not Health.ALIVE:
        return 0
    report = view.report
    num_used = max(len(report.held_grants), report.num_running + report.num_waiting)
    return max(0, view.worker.num_slots - num_used - view.num_granted)
