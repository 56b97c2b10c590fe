"""One client call as its reader sees it: all choices of all its prompts, begun and ended as one.

    prompt 0 ─▶ choice 0 ──first event──▶ choices 1, 2, ... n - 1 ┐
    prompt 1 ─▶ choice n ──first event──▶ choices n + 1, ...      ┴──▶ ``next``, in any order

Each choice is a request of its own to everything behind this: placed, resumed and ended alone. The
later choices of a prompt start when the first one has its first token: its KV is in a prefix cache
then, and they are placed there if that is cheapest, so that they share it and don't compute the
prompt again. An error of one choice is the call's end, and stops the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from cluster.errors import Cancelled, PdserveError
from cluster.request import TokenLogprobs
from router.events import Accepted, Counter, Delta, Finish, Scored
from router.given import Caller
from router.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.control.route_client import RouteEvents
    from router.dispatch import Generation

Event = Delta | Finish

CLIENT_PREFIX = "client:"


@dataclass(slots=True, kw_only=True)
class CallPrompt:
    """One prompt of a call, as an answer may show it."""

    ids: tuple[int, ...]
    text: str = ""
    """What is echoed."""
    offsets: tuple[int, ...] = ()
    """Where in ``text`` each token begins."""
    num_cached_tokens: int = 0
    """As its first choice found them."""
    scores: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens from the second on, where they were asked for."""

    def take(self, scored: Scored) -> None:
        """Note what is told of a run of tokens; a new attempt tells it again."""
        num_known = scored.start - 1
        self.scores[num_known:] = scored.logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Shows:
    """What an answer holds besides the text."""

    timeline: bool = False
    logprobs: bool = False
    echo: bool = False
    """The prompt, before each choice's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """A call that is ready to start.

    ``accepted`` makes the request of a choice by its index, of who counts it and of the
    incarnation whose prefix cache has its prompt.
    """

    request_id: str
    client_request_id: str
    caller: Caller
    prompts: tuple[CallPrompt, ...]
    num_choices: int
    """Of each prompt; choice ``i`` belongs to prompt ``i // num_choices``."""
    shows: Shows
    remaining_s: float
    accepted: Callable[[int, Counter, str], Accepted]


class Call:
    """The reader's end of one call. Whoever holds it must ``cancel`` it when leaving."""

    def __init__(
        self,
        plan: CallPlan,
        *,
        submit: Callable[[Accepted], Generation],
        metrics: Counter,
        on_over: Callable[[Call], None],
    ) -> None:
        self.request_id = plan.request_id
        self.client_request_id = plan.client_request_id
        self.caller = plan.caller
        self.shows = plan.shows
        self.remaining_s = plan.remaining_s
        """Of its deadline, when it was made."""
        self.num_all_choices = len(plan.prompts) * plan.num_choices
        self._plan = plan
        self._submit = submit
        self._tally = Tally(
            metrics,
            num_prompt_tokens=self.num_prompt_tokens,
            num_requests=self.num_all_choices,
            on_over=lambda: on_over(self),
        )
        self._generations: dict[int, Generation] = {}
        self._events: asyncio.Queue[Event | PdserveError] = asyncio.Queue()
        self._pumps: set[asyncio.Task[None]] = set()
        self._is_cancelled = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self._plan.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of all prompts whose KV was there already."""
        return sum(prompt.num_cached_tokens for prompt in self._plan.prompts)

    def prompt_of(self, index: int) -> CallPrompt:
        """Return the prompt of a choice."""
        return self._plan.prompts[index // self._plan.num_choices]

    def start(self) -> None:
        """Start the first choice of each prompt."""
        for index in range(0, self.num_all_choices, self._plan.num_choices):
            self._start(index)
        if self.num_all_choices > 1:
            for index in list(self._generations):
                self._pump(index)

    async def next(self) -> Event:
        """Return the next event of any choice; nothing follows the last choice's Finish.

        Raises the PdserveError that ended the call. One reader at a time.
        """
        if self.num_all_choices == 1:
            # No pump stands between a lone choice and its reader.
            return await self._next_of(0)
        event = await self._events.get()
        if isinstance(event, PdserveError):
            raise event
        return event

    def cancel(self) -> bool:
        """Stop all choices, wherever they are; whether anything ran. Idempotent."""
        self._is_cancelled = True
        is_running = not self._tally.is_over
        for generation in self._generations.values():
            generation.cancel()
        self._tally.close()
        return is_running

    def _start(self, index: int, cached_on: str = "") -> None:
        accepted = self._plan.accepted(index, self._tally, cached_on)
        self._generations[index] = self._submit(accepted)

    def _pump(self, index: int) -> None:
        task = asyncio.get_running_loop().create_task(self._read(index))
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)

    async def _read(self, index: int) -> None:
        """Pass one choice's events on, and start those that wait for its first."""
        is_first = index % self._plan.num_choices == 0
        waiting: Sequence[int] = (
            range(index + 1, index + self._plan.num_choices) if is_first else ()
        )
        try:
            while True:
                event = await self._next_of(index)
                if waiting and self._is_cancelled:
                    raise Cancelled("the request was cancelled", stage="queue")
                for other in waiting:
                    self._start(other, self._generations[index].prefilled_on)
                    self._pump(other)
                waiting = ()
                self._events.put_nowait(event)
                if isinstance(event, Finish):
                    return
        except PdserveError as error:
            self._events.put_nowait(error)
            self.cancel()

    async def _next_of(self, index: int) -> Event:
        while isinstance(event := await self._generations[index].next(), Scored):
            self.prompt_of(index).take(event)
        if isinstance(event, Finish) and index % self._plan.num_choices == 0:
            self.prompt_of(index).num_cached_tokens = event.num_cached_tokens
        return replace(event, index=index) if index else event


class Calls:
    """The open calls of one router, by the names they can be cancelled by."""

    def __init__(self) -> None:
        self._by_name: dict[str, set[Call]] = {}

    def add(self, call: Call) -> None:
        """Take a call in."""
        for name in _names_of(call):
            self._by_name.setdefault(name, set()).add(call)

    def remove(self, call: Call) -> None:
        """Forget a call that is over."""
        for name in _names_of(call):
            calls = self._by_name.get(name, set())
            calls.discard(call)
            if not calls:
                self._by_name.pop(name, None)

    def cancel(self, name: str) -> bool:
        """Stop the calls of a name; whether one was running."""
        # All of them, so no any() over a generator, which stops at the first.
        return True in [call.cancel() for call in list(self._by_name.get(name, ()))]


def client_name(tenant: str, client_request_id: str) -> str:
    """Return the name of a client's own id: the same on each router, and no client's text.

    It is what travels through the control plane, so that nobody can cancel across tenants.
    """
    digest = blake2b(f"{tenant}\0{client_request_id}".encode(), digest_size=16)
    return f"{CLIENT_PREFIX}{digest.hexdigest()}"


def _names_of(call: Call) -> Sequence[str]:
    own = call.client_request_id
    return (call.request_id, client_name(call.caller.tenant, own)) if own else (call.request_id,)


class CallEvents:
    """Hears the control plane for a router: cancels name calls, all else goes on as it is."""

    def __init__(self, calls: Calls, events: RouteEvents) -> None:
        self._calls = calls
        self._events = events

    def on_cancel(self, request_id: str) -> bool:
        """Cancel a call if it runs here; whether it did."""
        return self._calls.cancel(request_id) or self._events.on_cancel(request_id)

    def on_worker_dead(self, worker_id: str, incarnation: str) -> None:
        """Pass on that a worker was declared dead."""
        self._events.on_worker_dead(worker_id, incarnation)

    def on_leg_missed(self, request_id: str, attempt: int, error: PdserveError) -> None:
        """Pass on that a living worker has never heard of a leg."""
        self._events.on_leg_missed(request_id, attempt, error)
