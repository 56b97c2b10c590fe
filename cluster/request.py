"""What a client asked, and the legs, tokens and ends that a router and a worker exchange."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from cluster.errors import PdserveError
from cluster.lifetime import LegTimes

LOGPROB_FLOOR = -9999.0
"""Stands for every log-probability at or below it, minus infinity too: it must fit into JSON."""


MAX_PREFIX_NAMES = 32
"""Of one prompt: the stride is doubled until so many are enough."""
MAX_PREEMPTIONS = 1 << 20
"""No request is preempted so often; what is told beyond it is a mistake."""


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

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0, penalties 0 and a
    ``repetition_penalty`` of 1 are off. ``seed`` is never missing: the router mints one. ``stop``
    strings are matched in the router only.
    """

    max_tokens: int
    """0: the prompt is computed and nothing is drawn."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """No end token is drawn, and no stop string matched, before so many output tokens."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the output (OpenAI's definition)."""
    frequency_penalty: float = 0.0
    """Subtracted as often as the token is in the output (OpenAI's definition)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit), by token id."""
    num_logprobs: int | None = None
    """Best tokens told with each output token; None: no logprobs, 0: the chosen one's only."""
    prompt_logprobs: bool = False
    """Also for the prompt's own tokens."""

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPrefix:
    """The names of a prompt's beginnings, the shortest first: keyed digests of tenant and tokens.

    names:  [ stride tokens ) [ stride tokens ) ...     each stands for all before its end
    """

    stride_tokens: int = 0
    names: tuple[int, ...] = ()


NO_PREFIX = PromptPrefix()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One client call, immutable; ``request_id`` is minted by the router."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    deadline: float
    """Instant on the router's clock after which the request is ended."""
    choice: int = 0
    """Which of the ``n`` choices of its prompt this is; part of what its draws depend on."""
    tenant: str = ""
    """Of the key that the call came with; prefix caches are kept apart by it."""
    expected_tokens: int | None = None
    """The client's guess at its output's length."""
    priority: str = ""
    """Name of its tier; empty: the default one."""


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
    tenant: str = ""
    """Whose request it is, by its authenticated identity; KV is found again within one tenant."""
    priority: str = ""
    """Name of its tier; empty: the default one."""
    expected_tokens: int | None = None
    """The client's guess at its output's length."""
    prefix: PromptPrefix = NO_PREFIX
    """By which the control plane is told what of the prompt is cached no more."""
    waited_s: float = 0.0
    """Seconds since its router took the request, when this was sent: it ages on all its ways."""
    num_preemptions: int = 0
    """How often the choice was preempted before, by what the router knew when this was sent."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, under the model's own distribution: before temperature,
    penalties and bias. All are finite: what the model rules out has ``LOGPROB_FLOOR``."""

    logprob: float
    """Of the token that was chosen."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), best first."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a run of a prompt's tokens, which took no part in any draw.

    ``entries[i]`` is about the prompt token at position ``start + i``. The first token of a prompt
    has none, so the first run starts at 1. Runs come in order; a new attempt tells them anew.
    """

    key: LegKey
    start: int
    entries: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One output token of a leg; repeats and old attempts are dropped by the router."""

    key: LegKey
    output_index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Set where the request asked for them."""


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
    grant_id: str = ""
    """Of an abort that this answers: the worker has no such leg. Another leg may have its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportWaiting:
    """A handoff of a PREFILL leg failed, and its KV is kept: the leg goes on by a ``Redirect``.

    ``error`` says why, ``lease_s`` for how long the export waits. Without a redirect in that time
    the leg ends, with the KV gone.
    """

    key: LegKey
    handoff_id: str
    error: PdserveError
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect:
    """Pass the export of the PREFILL leg ``key`` to ``peer``, by handoff ``handoff_id``.

    The decode worker gets its DECODE leg under the same key. The PREFILL leg stays its grant's: the
    new one is charged for the decode worker alone.
    """

    key: LegKey
    handoff_id: str
    peer: Peer
    num_preemptions: int = 0
    """Of the choice so far, as its router heard: the last decode worker may have lost its link
    before it told the prefill worker that its import gave way."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A leg was preempted; told at once, so that another attempt goes on counting."""

    key: LegKey
    num_preemptions: int
    """Of the choice, on all its ways so far."""


LegNotice = ExportWaiting | Preempted
"""What a leg says on its way, beside what it is for."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker's sign of life: how far its engine is."""

    num_steps: int = 0
    patience_s: float = 0.0
    """Of the step that runs: it hangs when it takes longer. 0: none runs."""
