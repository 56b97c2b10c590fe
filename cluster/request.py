"""What a client asked, and the legs, tokens and ends that a router and a worker exchange."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from cluster.errors import PdserveError
from cluster.lifetime import LegTimes


class FinishReason(enum.Enum):
    """Why a choice ended well; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


class LegKind(enum.Enum):
    """What a worker is asked to do for one choice."""

    PREFILL = "prefill"
    """Compute the prompt's KV, sample the first token, hand both to a decode worker."""
    DECODE = "decode"
    """Import the KV of a handoff and go on from output index 1."""
    LOCAL = "local"
    """Do both here, without a handoff."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and where a choice ends, checked at the edge.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off. ``seed`` is never missing:
    the router mints one. ``stop`` strings are matched in the router only.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One client call, immutable; ``request_id`` is minted by the router."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    deadline: float
    """Instant on the router's clock after which the request is ended."""


@dataclass(frozen=True, slots=True, order=True)
class LegKey:
    """Names one attempt at one choice; unique among the sequences of a worker."""

    request_id: str
    attempt: int
    choice: int

    def __str__(self) -> str:
        """Return the key as logs show it: request, choice, attempt."""
        return f"{self.request_id}/{self.choice}.{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where the other worker of a handoff is reached."""

    worker_id: str
    incarnation: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """What a router asks of one worker for one choice.

    ``output_ids`` are tokens the client already has (a resumed choice); sampling goes on at
    index ``len(output_ids)``. ``handoff_id`` is empty where nothing is handed over: in a LOCAL
    leg, and in a PREFILL leg whose choice ends at its first token. ``peer`` is the decode worker,
    and set in PREFILL legs with a handoff only.
    """

    key: LegKey
    kind: LegKind
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    params: SamplingParams
    remaining_s: float
    """Seconds left of the request's deadline when this was sent."""
    grant_id: str = ""
    handoff_id: str = ""
    peer: Peer | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One output token of a leg; repeats and old attempts are dropped by the router."""

    key: LegKey
    output_index: int
    token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LegEnd:
    """The one last word about a leg.

    Both ``finish_reason`` and ``error`` are None where a PREFILL leg ended well because the
    decode worker took over.
    """

    key: LegKey
    finish_reason: FinishReason | None = None
    error: PdserveError | None = None
    times: LegTimes = field(default_factory=LegTimes)
