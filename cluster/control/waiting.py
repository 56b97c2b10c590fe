"""The wants that wait for a placement, in the policy's order: exports first, whatever it is.

An export holds blocks of a prefill worker under a lease that runs out; placing it frees them, and
needs nothing of any prefill worker. Where higher tiers take from lower ones exports are the first
of their tiers: a low one that finds no room shall not keep a high request from taking some. Age
counts from when the router took the request.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from cluster.config import Policy
from cluster.control.facts import Want
from cluster.control.ledger import NOTHING_COUNTED, Counted
from cluster.control.needs import Kind, Needs
from cluster.policy.order import Ahead, Ordering, Ticket
from cluster.policy.queue import PolicyQueue
from cluster.policy.tiers import Tiers
from cluster.policy.work import OutputEstimates

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping

    from cluster.config import SchedulingConfig
    from cluster.control.ledger import GrantRecord, WantKey
    from cluster.control.needs import NeedsRule
    from cluster.policy.walk import Sieve, Walk


K = TypeVar("K", bound="Hashable")

_MAX_REMEMBERED = 4096


@dataclass(slots=True, kw_only=True)
class Waiting:
    """A want in the queue; instants are on the planner's clock."""

    want: Want
    router_id: str
    needs: Needs
    ticket: Ticket
    deadline: float
    entered: float
    standing: int
    routeless_since: float | None = None
    """Since when no worker is there that could serve it."""

    @property
    def key(self) -> WantKey:
        """Its name."""
        return (self.want.request_id, self.want.attempt)

    @property
    def group(self) -> Hashable:
        """Equal for wants that have room, or none, together."""
        return self.ticket.group


class _Sizes:
    """How many need how much; the least is known."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.sorted: list[int] = []
        """Each once."""

    def count(self, size: int, change: int) -> None:
        """Count one in, or out."""
        count = self._counts.get(size, 0)
        if count == 0:
            bisect.insort(self.sorted, size)
        if count + change:
            self._counts[size] = count + change
        else:
            del self._counts[size], self.sorted[bisect.bisect_left(self.sorted, size)]


class _Crowd:
    """What the wants of one kind need."""

    def __init__(self) -> None:
        self._prefills, self._decodes = _Sizes(), _Sizes()

    def __bool__(self) -> bool:
        """Tell whether there is any."""
        return bool(self._prefills.sorted)

    def count(self, needs: Needs, change: int) -> None:
        """Count one in, or out."""
        self._prefills.count(needs.prefill_tokens, change)
        self._decodes.count(needs.decode_tokens, change)

    def smallest(self) -> tuple[int, int]:
        """Return the least of each, which need not be one's."""
        return self._prefills.sorted[0], self._decodes.sorted[0]


class WaitingQueue:
    """A ``PolicyQueue`` of wants. A want that comes twice keeps its time."""

    def __init__(self, scheduling: SchedulingConfig, rule: NeedsRule) -> None:
        self._ordering = Ordering.of(scheduling)
        self._tiers = Tiers.of(scheduling)
        self._rule = rule
        self._ahead_of = Ahead.OF_TIER if rule.tiers_take else Ahead.OF_ALL
        self._queue: PolicyQueue[Waiting] = PolicyQueue(self._ordering, self._has_aged)
        self._outputs = OutputEstimates()
        self._taken_back: OrderedDict[str, None] = OrderedDict()
        """Requests whose count was taken back lately: it is made anew if they come again."""
        self._deadlines: list[tuple[float, int, WantKey]] = []
        self._orders = itertools.count()
        self._crowds: dict[Kind, _Crowd] = {}
        self._newcomers: set[Hashable] = set()
        self._has_left = False
        self.samples: dict[Kind, Want] = {}
        """One want of each kind that waits, but for the special ones."""
        self.rivals: dict[Kind, Hashable] = {}
        """``Needs.rivals`` of each of these kinds."""
        self.routeless: set[WantKey] = set()
        """Wants that nobody who is there could serve."""
        self.num_special = 0
        """Wants that are alone of their kind: exports, and those that avoid workers."""
        self.num_tokens = 0
        """Prompt tokens that wait."""
        self.tenants: Counter[str] = Counter()
        """Wants by tenant."""
        self._standings: Counter[int] = Counter()

    def __len__(self) -> int:
        """Return the number of wants."""
        return len(self._queue)

    def __iter__(self) -> Iterator[Waiting]:
        """Walk over a copy, in no order."""
        return iter(list(self._queue))

    def __contains__(self, key: WantKey) -> bool:
        """Tell whether the want waits."""
        return key in self._queue

    def check(self, want: Want) -> None:
        """Raise InvalidRequest where there is no such tier."""
        self._tiers.rank(want.priority)

    def add(self, want: Want, router_id: str, now: float) -> Waiting:
        """Enter a want, in place of its former self if it was there.

        It was checked.
        """
        tier, needs = self._tiers.rank(want.priority), self._rule.needs(want)
        work = self._work(want)
        old = self.remove((want.request_id, want.attempt))
        waiting = Waiting(
            want=want,
            router_id=router_id,
            needs=needs,
            ticket=Ticket(
                arrived=now - want.waited_s if old is None else old.ticket.arrived,
                order=next(self._orders) if old is None else old.ticket.order,
                tier=tier if self._ordering.policy is Policy.PRIORITY else 0,
                tenant=want.tenant,
                work=work,
                group=self._rule.group(want, needs),
                ahead=Ahead.NO if want.export is None else self._ahead_of,
            ),
            deadline=now + want.remaining_s,
            entered=now if old is None else old.entered,
            standing=self._ordering.standing(tier=tier, work=work),
            routeless_since=None if old is None else old.routeless_since,
        )
        self._queue.add(waiting.key, waiting, waiting.ticket)
        self.note_route(waiting, waiting.routeless_since)
        heapq.heappush(self._deadlines, (waiting.deadline, waiting.ticket.order, waiting.key))
        if len(self._deadlines) > 64 + 2 * len(self._queue):
            self._deadlines = [due for due in self._deadlines if due[2] in self._queue]
            heapq.heapify(self._deadlines)
        self._count(waiting, 1)
        self._newcomers.add(waiting.group)
        return waiting

    def remove(self, key: WantKey) -> Waiting | None:
        """Take a want out; None where it does not wait."""
        waiting = self._queue.remove(key)
        if waiting is not None:
            self.routeless.discard(key)
            self._count(waiting, -1)
            self._has_left = True
        return waiting

    def remove_router(self, router_id: str) -> list[Waiting]:
        """Take out all wants of a router."""
        gone = [waiting for waiting in self if waiting.router_id == router_id]
        for waiting in gone:
            self.remove(waiting.key)
        return gone

    def take_news(self) -> tuple[bool, Collection[Hashable]]:
        """Whether a want has gone since the last call, and the groups of those that have come."""
        news = self._has_left, self._newcomers
        if self._newcomers:
            self._newcomers = set()
        self._has_left = False
        return news

    def take_expired(self, now: float) -> list[Waiting]:
        """Take out the wants whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, key = heapq.heappop(self._deadlines)
            waiting = self._queue.get(key)
            # It may have been sent again, with a deadline of its own.
            if waiting is not None and waiting.deadline == deadline:
                self.remove(key)
                expired.append(waiting)
        return expired

    def walk(self, now: float, sieve: Sieve[Waiting]) -> Walk[Waiting]:
        """Begin a walk in order; only what it returned last may be taken out meanwhile."""
        return self._queue.walk(now, sieve)

    def note_route(self, waiting: Waiting, routeless_since: float | None) -> None:
        """Note since when no worker is there that could serve it; None: one is."""
        waiting.routeless_since = routeless_since
        if routeless_since is None:
            self.routeless.discard(waiting.key)
        else:
            self.routeless.add(waiting.key)

    def passable_until(self, waiting: Waiting, *, from_above: bool = False) -> float:
        """Return up to which arrival others may take what it waits for, while it has no room.

        ``from_above``: others of a higher tier.
        """
        return self._ordering.passable_until(waiting.ticket, from_above=from_above)

    @property
    def is_by_arrival(self) -> bool:
        """Whether those of one group are in the order of their arrival, whatever tier or tenant."""
        return self._ordering.policy is Policy.FCFS and not self._ordering.is_fair

    @property
    def is_fair(self) -> bool:
        """Whether tenants take turns."""
        return self._ordering.is_fair

    def standing(self, want: Want) -> int:
        """Return the rough place of a want that has not aged."""
        tier = self._tiers.rank(want.priority)
        return self._ordering.standing(tier=tier, work=self._work(want))

    def standings(self, now: float) -> Mapping[int, int]:
        """Return how many wants have each ``Ordering.standing`` now."""
        self._queue.age(now)
        return self._standings

    def smallest(self, kind: Kind) -> tuple[int, int]:
        """Return the least prefill and the least decode room that any want of a kind needs."""
        return self._crowds[kind].smallest()

    # ---- what its tenants are served

    def _work(self, want: Want) -> float:
        """Return what the order goes by; finding that out takes time."""
        if self._ordering.policy is not Policy.SJF:
            return 0.0
        return self._rule.uncached_tokens(want) + self.expected_output(want)

    def expected_output(self, want: Want) -> float:
        """Return how many tokens are expected to follow."""
        return self._outputs.expected(
            want.tenant, max_tokens=want.max_tokens, hint=want.expected_tokens
        )

    def granted(self, waiting: Waiting) -> Counted:
        """Count a want as served; returns what was counted."""
        want, tier = waiting.want, waiting.ticket.tier
        if not self._ordering.is_fair or want.export is not None:
            return NOTHING_COUNTED
        # A later attempt was counted with the first, unless that had not come to anything.
        if want.attempt > 0 and want.request_id not in self._taken_back:
            return NOTHING_COUNTED
        self._taken_back.pop(want.request_id, None)
        counted = Counted(want.num_prompt_tokens, self.expected_output(want))
        self._queue.tenants(tier).expect(want.tenant, sum(counted))
        return counted

    def note_output(self, tenant: str, num_output_tokens: int) -> None:
        """Learn how long an output was that has ended well."""
        self._outputs.note(tenant, num_output_tokens)

    def settle(self, record: GrantRecord, num_output_tokens: int, *, has_begun: bool) -> None:
        """Count what a grant has come to, in place of what was expected.

        A prompt of which nothing has begun to be computed is not counted any more.
        """
        if not self._ordering.is_fair:
            return
        num_tokens = num_output_tokens
        if has_begun or num_output_tokens:
            num_tokens += record.counted.prompt_tokens
        elif record.counted.prompt_tokens:
            self._taken_back[record.grant.request_id] = None
            if len(self._taken_back) > _MAX_REMEMBERED:
                self._taken_back.popitem(last=False)
        tenants = self._queue.tenants(record.tier)
        tenants.settle(record.tenant, sum(record.counted), num_tokens)

    def _has_aged(self, waiting: Waiting) -> None:
        _count_in(self._standings, waiting.standing, -1)
        ticket = waiting.ticket
        waiting.standing = self._ordering.standing(tier=ticket.tier, work=ticket.work, is_aged=True)
        _count_in(self._standings, waiting.standing, 1)

    def _count(self, waiting: Waiting, change: int) -> None:
        needs, ticket = waiting.needs, waiting.ticket
        self.num_tokens += change * waiting.want.num_prompt_tokens
        _count_in(self.tenants, ticket.tenant, change)
        _count_in(self._standings, waiting.standing, change)
        if needs.is_special:
            self.num_special += change
            return
        kind = needs.kind
        assert isinstance(kind, Kind), "but for the special ones"
        crowd = self._crowds.get(kind)
        if crowd is None:
            crowd = self._crowds[kind] = _Crowd()
            self.samples[kind], self.rivals[kind] = waiting.want, kind.rivals
        crowd.count(needs, change)
        if not crowd:
            del self._crowds[kind], self.samples[kind], self.rivals[kind]


def _count_in(counts: Counter[K], name: K, change: int) -> None:
    counts[name] += change
    if not counts[name]:
        del counts[name]
