"""The workloads that come along, each with the configurations that answer its question.

Sizes are for the trial model on two cores; what is sent, and in which order, is the same for every
configuration. A ``scale`` below 1 plays the long ones in less time: all their instants times it,
and as many requests.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster import config_tree
from cluster.errors import ConfigError
from deploy.lab.configurations import Base, Configuration, Draft
from deploy.lab.workload import Arrival, Ask, Loop, Objective, Traffic, Workload, poisson

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A workload and what it is played on."""

    workload: Workload
    configurations: Callable[[Base], tuple[Configuration, ...]]


# ---- batches: what a batch's longest member costs the others

_LEAD = Ask(kind="first", num_prompt_tokens=16, max_tokens=60)


def _batches(_scale: float) -> Comparison:
    def traffic(_draw: random.Random) -> Traffic:
        short = Ask(kind="short", num_prompt_tokens=32, max_tokens=60)
        long = Ask(kind="long", num_prompt_tokens=32, max_tokens=360)
        eight = (short, short, short, long) * 2
        arrivals = [Arrival(at_s=0.0, ask=_LEAD)]
        arrivals += [Arrival(at_s=0.05 + 0.005 * i, ask=ask) for i, ask in enumerate(eight * 3)]
        return Traffic(arrivals=tuple(arrivals))

    workload = Workload(
        name="batches",
        title="Static, dynamic and continuous batching",
        arrivals="one request, and while it runs three times eight, 5 ms apart: in each eight "
        "six of 60 tokens and two of 360",
        traffic=traffic,
        objective=Objective(ttft_factor=100.0, tpot_factor=3.0),  # most wait for others
    )
    return Comparison(workload=workload, configurations=_batches_on)


def _batches_on(base: Base) -> tuple[Configuration, ...]:
    draft, off = Draft(base), {"preemption": "off"}
    return (
        Configuration(
            name="static",
            what="batches of 8 that run to their last member",
            deploy=draft.single(scheduling=off, batching="static", max_num_seqs=8),
        ),
        Configuration(
            name="dynamic",
            what="batches of 8 that collect for 20 ms and run to their last member",
            deploy=draft.single(scheduling=off, batching="dynamic", max_num_seqs=8),
        ),
        Configuration(
            name="continuous",
            what="whoever waits takes a slot as soon as one is free",
            deploy=draft.single(scheduling=off, max_num_seqs=8),
        ),
    )


# ---- order: one bulky request ahead of short ones

_NEVER_S = 3600.0


def _order(_scale: float) -> Comparison:
    def traffic(_draw: random.Random) -> Traffic:
        bulky = Ask(kind="bulky", num_prompt_tokens=512, max_tokens=256, tier="low")
        short = Ask(kind="short", num_prompt_tokens=32, max_tokens=16, tier="high")
        arrivals = [Arrival(at_s=0.0, ask=_LEAD), Arrival(at_s=0.05, ask=bulky)]
        arrivals += [Arrival(at_s=0.08 + 0.01 * i, ask=short) for i in range(8)]
        return Traffic(arrivals=tuple(arrivals))

    workload = Workload(
        name="order",
        title="One bulky request ahead of short ones",
        arrivals="one request, and while it runs a bulky one, then eight short ones 10 ms "
        "apart; one slot",
        traffic=traffic,
        objective=Objective(ttft_factor=60.0),
    )
    return Comparison(workload=workload, configurations=_order_on)


def _order_on(base: Base) -> tuple[Configuration, ...]:
    told = {
        "fcfs": "first come, first served",
        "sjf": "the least work first",
        "priority": "the highest tier first",
    }
    return tuple(
        Configuration(
            name=policy,
            what=what,
            deploy=Draft(base).single(
                # The order alone: what bounds it is another workload's question.
                scheduling={"policy": policy, "preemption": "off", "aging_s": _NEVER_S},
                max_num_seqs=1,
            ),
        )
        for policy, what in told.items()
    )


# ---- starvation: a stream of short ones against a long one

_STREAM_S = 20.0
_AGING_S = 5.0


def _starvation(scale: float) -> Comparison:
    stream_s, long_at_s = _STREAM_S * scale, 1.0 * scale

    def traffic(_draw: random.Random) -> Traffic:
        long = Ask(kind="long", num_prompt_tokens=256, max_tokens=128)
        short = Ask(kind="short", num_prompt_tokens=32, max_tokens=16)
        return Traffic(
            arrivals=(Arrival(at_s=long_at_s, ask=long),),
            loops=(Loop(ask=short, num_clients=4, from_s=0.0, until_s=stream_s),),
        )

    workload = Workload(
        name="starvation",
        title="A stream of short requests against a long one",
        arrivals=f"closed loop: for {stream_s:g} s four clients send short requests one "
        f"after another; one long request after {long_at_s:g} s; one slot",
        traffic=traffic,
        objective=Objective(ttft_factor=60.0),
    )
    return Comparison(
        workload=workload,
        configurations=functools.partial(_starvation_on, aging_s=_AGING_S * scale),
    )


def _starvation_on(base: Base, *, aging_s: float) -> tuple[Configuration, ...]:
    told: dict[str, tuple[str, dict[str, Any]]] = {
        "fcfs": ("first come, first served", {"policy": "fcfs"}),
        "sjf": ("the least work first, without a bound", {"policy": "sjf", "aging_s": _NEVER_S}),
        "sjf-aging": (
            f"the least work first, and nobody younger by {aging_s:g} s overtakes",
            {"policy": "sjf", "aging_s": aging_s},
        ),
    }
    return tuple(
        Configuration(
            name=name,
            what=what,
            deploy=Draft(base).single(
                scheduling={"preemption": "off", **scheduling}, max_num_seqs=1
            ),
        )
        for name, (what, scheduling) in told.items()
    )


# ---- interference: running streams beside long prompts

_PERIOD_S = 8.0
_NUM_STREAMS = 64
"""So many that a step is long against what else a core does between two tokens."""
_FIRST_PROMPT_S = 9.0


def _interference(scale: float) -> Comparison:
    first_s, period_s = _FIRST_PROMPT_S * scale, _PERIOD_S * scale
    leave_s = first_s + 2 * period_s

    def traffic(_draw: random.Random) -> Traffic:
        stream = Ask(kind="stream", num_prompt_tokens=64, max_tokens=600)
        long = Ask(kind="prompt", num_prompt_tokens=2048, max_tokens=2)
        streams = [Arrival(at_s=0.0, ask=stream, until_s=leave_s) for _ in range(_NUM_STREAMS)]
        prompts = [Arrival(at_s=first_s + period_s * i, ask=long) for i in range(2)]
        return Traffic(arrivals=(*streams, *prompts))

    workload = Workload(
        name="interference",
        title="Running streams beside long prompts",
        arrivals=f"{_NUM_STREAMS} streams at once; from {first_s:g} s on a prompt of "
        f"2,048 tokens every {period_s:g} s, twice; the streams' clients leave after "
        f"{leave_s:g} s",
        traffic=traffic,
        watched="stream",
        disturber="prompt",
    )
    return Comparison(workload=workload, configurations=_interference_on)


def _interference_on(base: Base) -> tuple[Configuration, ...]:
    draft = Draft(base, max_model_len=4096)
    each: dict[str, Any] = {"kv_tokens": 28672, "max_num_seqs": _NUM_STREAMS // 2 + 4}
    return (
        Configuration(
            name="unchunked",
            what="two colocated workers, each prompt in one step",
            deploy=draft.colocated(token_budget=4096, chunk_tokens=0, **each),
        ),
        Configuration(
            name="chunked",
            what="two colocated workers, 512 tokens of a prompt in a step",
            deploy=draft.colocated(token_budget=544, chunk_tokens=512, **each),
        ),
        Configuration(
            name="disaggregated",
            what="one prefill and one decode worker",
            deploy=draft.disaggregated(
                prefill={"kv_tokens": 16384, "token_budget": 2048, "chunk_tokens": 512},
                decode={"kv_tokens": 57344, "max_num_seqs": _NUM_STREAMS + 8},
            ),
        ),
    )


def _open_loop(draw: random.Random, ask: Ask, *, count: int, apart_s: float) -> Traffic:
    instants = poisson(draw, rate_per_s=1 / apart_s, count=count)
    return Traffic(arrivals=tuple(Arrival(at_s=at_s, ask=ask) for at_s in instants))


# ---- window: what collecting a batch costs when nobody else comes

_WINDOW_MS = 20.0


def _window(scale: float) -> Comparison:
    count, apart_s = 16, 1.0 * scale

    def traffic(draw: random.Random) -> Traffic:
        ask = Ask(kind="lone", num_prompt_tokens=32, max_tokens=8)
        return _open_loop(draw, ask, count=count, apart_s=apart_s)

    workload = Workload(
        name="window",
        title="The window of dynamic batching at low load",
        arrivals=f"open loop, Poisson: {count} requests, {1 / apart_s:g} a second",
        traffic=traffic,
    )
    return Comparison(workload=workload, configurations=_window_on)


def _window_on(base: Base) -> tuple[Configuration, ...]:
    draft, off = Draft(base), {"preemption": "off"}
    return (
        Configuration(
            name="continuous",
            what="whoever comes starts at once",
            deploy=draft.single(scheduling=off),
        ),
        Configuration(
            name="dynamic",
            what=f"a batch collects for {_WINDOW_MS:g} ms",
            deploy=draft.single(scheduling=off, batching="dynamic", batch_window_ms=_WINDOW_MS),
        ),
    )


# ---- bandwidth: where the transfer eats the gain

_LINKS_MB_PER_S = (100, 25, 10, 5)


def _bandwidth(scale: float) -> Comparison:
    count, apart_s = 12, 2.0 * scale

    def traffic(draw: random.Random) -> Traffic:
        ask = Ask(kind="mid", num_prompt_tokens=512, max_tokens=32)
        return _open_loop(draw, ask, count=count, apart_s=apart_s)

    workload = Workload(
        name="bandwidth",
        title="Disaggregated over slower and slower links against colocated",
        arrivals=f"open loop, Poisson: {count} requests, one every {apart_s:g} s",
        traffic=traffic,
    )
    return Comparison(workload=workload, configurations=_bandwidth_on)


def _bandwidth_on(base: Base) -> tuple[Configuration, ...]:
    draft = Draft(base)
    colocated = Configuration(
        name="colocated",
        what="two colocated workers, no transfer",
        deploy=draft.colocated(),
    )
    # One deploy file for all of them: they are played on one cluster, one after another.
    deploy = draft.disaggregated(prefill={}, decode={}, has_faults=True)
    split = Configuration(
        name="link", what="one prefill and one decode worker, the link as it is", deploy=deploy
    )
    slower = [
        Configuration(
            name=f"link-{rate}",
            what=f"the same, the link slowed to {rate} MB/s",
            deploy=deploy,
            link_bytes_per_s=rate * 1e6,
        )
        for rate in _LINKS_MB_PER_S
    ]
    return (colocated, split, *slower)


_MAKERS: dict[str, Callable[[float], Comparison]] = {
    "batches": _batches,
    "order": _order,
    "starvation": _starvation,
    "interference": _interference,
    "window": _window,
    "bandwidth": _bandwidth,
}
NAMES = tuple(_MAKERS)


def comparison(name: str, scale: float = 1.0) -> Comparison:
    """Return the comparison of a workload; raises ConfigError that names the nearest one.

    ``scale``, above 0 and at most 1: of the time that a workload takes where it is longer than its
    requests.
    """
    if not name:
        raise ConfigError(f"which workload? There are: {', '.join(NAMES)}", field="lab")
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale: above 0 and at most 1, not {scale:g}", field="scale")
    if name not in _MAKERS:
        raise config_tree.refused("lab", name, NAMES, what="workload")
    return _MAKERS[name](scale)


def chosen(
    configurations: Sequence[Configuration], names: Sequence[str]
) -> tuple[Configuration, ...]:
    """Return those with these names (none: all), in their own order; raises ConfigError."""
    known = [configuration.name for configuration in configurations]
    for name in names:
        if name not in known:
            raise config_tree.refused("--config", name, known, what="configuration")
    return tuple(each for each in configurations if not names or each.name in names)


def by_cluster(
    configurations: Sequence[Configuration],
) -> list[list[Configuration]]:
    """Group neighbours that one running cluster can serve: those with the same deploy file."""
    groups = itertools.groupby(configurations, key=lambda each: each.deploy)
    return [list(group) for _, group in groups]
