"""What is asked of a cluster, and when: pure, and the same for the same seed.

A workload's arrivals are either *scheduled* (open loop: sent at their instant, however slow the
cluster is) or made by *loops* (closed: so many clients, each of which sends its next request when
its last one has ended).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from deploy.bench.site import prompt_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A kind of request; figures are told by kind and tier."""

    kind: str
    num_prompt_tokens: int
    max_tokens: int
    """Exactly so many come, unless the client leaves."""
    tier: str = ""
    """Empty: the cluster's default."""

    @property
    def group(self) -> str:
        """What its figures stand under."""
        size = f"{self.kind} ({self.num_prompt_tokens} in, {self.max_tokens} out)"
        return f"{size}, {self.tier}" if self.tier else size


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of an open loop; instants are seconds since the play began."""

    at_s: float
    ask: Ask
    until_s: float | None = None
    """When its client leaves, if it has not ended by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Clients that each send one request after another, the first at ``from_s``."""

    ask: Ask
    num_clients: int
    from_s: float
    until_s: float
    """No request is sent from then on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All that is asked in one play."""

    arrivals: tuple[Arrival, ...] = ()
    loops: tuple[Loop, ...] = ()

    @property
    def asks(self) -> tuple[Ask, ...]:
        """Each kind once, in the order of their first arrival."""
        sent = sorted(
            [(arrival.at_s, arrival.ask) for arrival in self.arrivals]
            + [(loop.from_s, loop.ask) for loop in self.loops],
            key=lambda item: item[0],
        )
        return tuple(dict.fromkeys(ask for _, ask in sent))


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What counts as good, in multiples of what the same request takes on an idle cluster."""

    ttft_factor: float = 5.0
    tpot_factor: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One question, as traffic."""

    name: str
    title: str
    arrivals: str
    """The arrival process in words."""
    traffic: Callable[[random.Random], Traffic]
    objective: Objective = field(default_factory=Objective)
    watched: str = ""
    """The kind of streams whose gaps are told beside, and apart from, requests of ``disturber``."""
    disturber: str = ""


def poisson(draw: random.Random, *, rate_per_s: float, count: int) -> list[float]:
    """Return ``count`` instants of a Poisson process, the first gap included."""
    instants, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate_per_s)
        instants.append(now)
    return instants


def traffic_of(workload: Workload, seed: int) -> Traffic:
    """Return the traffic of a workload; each run and each configuration gets the same."""
    return workload.traffic(random.Random(f"{workload.name}/{seed}"))


def prompt(num_tokens: int, *, seed: int, run: int, call: str) -> list[int]:
    """Return the prompt of one call; no two calls or runs share one."""
    return prompt_ids(num_tokens, random.Random(f"{seed}/{run}/{call}"))
