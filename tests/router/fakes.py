"""A control plane and workers that do what a test tells them, and a router around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.clock import SystemClock
from cluster.config import LimitsConfig, PoolConfig, Role
from cluster.control.capacity import Capacity
from cluster.control.facts import (
    BlockCounts,
    ClusterView,
    Grant,
    Health,
    LinkView,
    Placed,
    Registration,
    Want,
    WorkerReport,
    WorkerView,
)
from cluster.errors import PdserveError, WorkerLost
from cluster.handoff import AbortCause
from cluster.lifetime import LegTimes
from cluster.request import (
    Beat,
    ExportWaiting,
    FinishReason,
    Leg,
    LegEnd,
    LegKey,
    LegKind,
    Peer,
    Preempted,
    PromptLogprobs,
    Redirect,
    SamplingParams,
    Token,
    TokenLogprobs,
)
from router.dispatch import Dispatcher
from router.legs import Workers
from router.metrics import RouterMetrics
from router.served import ServedModel
from router.service import Door, Service
from router.text import TextCodec

EOS_ID = 256
VOCAB_SIZE = 260
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system turn comes first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MODEL = ServedModel(
    name="tiny", max_model_len=64, vocab_size=VOCAB_SIZE, eos_ids=frozenset({EOS_ID}), created=7
)


POOLS = (
    PoolConfig(name="prefill", role=Role.PREFILL, kv_tokens=128),
    PoolConfig(name="decode", role=Role.DECODE, kv_tokens=128),
)


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, in byte order; id 256 is the EOS."""
    alphabet = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    vocab = {char: byte for byte, char in bytes_to_chars().items()}
    vocab["<eos>"] = EOS_ID
    rust = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer = alphabet[0]
    rust.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def bytes_to_chars() -> dict[int, str]:
    """GPT-2's table of printable stand-ins: a byte keeps its own character where it has one."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


def make_codec(template: str | None = TEMPLATE) -> TextCodec:
    return TextCodec(make_tokenizer(template), eos_ids=frozenset({EOS_ID}))


def make_worker(name: str, role: Role, *, num_blocks: int = 8, **report: object) -> WorkerView:
    return WorkerView(
        worker=Registration(
            worker_id=name,
            incarnation=f"{name}.1",
            pool=role.value,
            role=role,
            address=f"{name}:1",
            num_slots=4,
            num_blocks=num_blocks,
            block_size=16,
            max_model_len=64,
            layout="",
            step_base_s=0.01,
            step_per_seq_s=0.001,
            prefill_per_token_s=0.001,
            pid=1,
            transport="loopback",
        ),
        report=WorkerReport(blocks=BlockCounts(free=num_blocks), **report),
        health=Health.ALIVE,
        report_age_s=0.1,
        num_granted=0,
    )


def make_view(*workers: WorkerView, **changes: object) -> ClusterView:
    view = ClusterView(
        term=1,
        workers=workers or (make_worker("p0", Role.PREFILL), make_worker("d0", Role.DECODE)),
        links=(
            LinkView(
                prefill_worker_id="p0",
                decode_worker_id="d0",
                alpha_s=0.001,
                beta_bytes_per_s=1e9,
                num_transfers=3,
                num_bytes=300,
                last_s=0.01,
            ),
        ),
        num_waiting=0,
        waiting_tokens=0,
        num_granted=0,
        num_routers=1,
        max_queue_requests=8,
        retry_after_s=2.0,
        request_s=0.5,
    )
    return replace(view, **changes)


def placed(worker_id: str) -> Placed:
    """``p0.2`` is the second incarnation of p0."""
    name, _, number = worker_id.partition(".")
    return Placed(
        worker_id=name, incarnation=f"{name}.{number or 1}", address=f"{name}:1", pool="pool"
    )


class FakeRoute:
    """Grants at once what ``pairs`` says, or waits for the test where there is none."""

    def __init__(self) -> None:
        self.view: ClusterView | None = make_view()
        self.age_s = 0.0
        self.is_away_for_long = False
        self.prefix_key = b""
        self.pairs: list[tuple[str | None, str | None]] = []
        self.default_pair: tuple[str | None, str | None] | None = ("p0", "d0")
        self.error: PdserveError | None = None
        self.export_error: PdserveError | None = None
        self.wants: list[Want] = []
        self.withdrawn: list[Want] = []
        self.dones: list[tuple[str, int]] = []
        self.whole_outputs: list[int] = []
        self.grants: list[str] = []
        self.cancel_asked: list[str] = []
        self.wanted = asyncio.Event()
        self.answer: asyncio.Future[Grant] | None = None

    @property
    def awaits_first_view(self) -> bool:
        return self.view is None and not self.is_away_for_long

    def view_age_s(self, now: float) -> float:
        return self.age_s

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def want(self, want: Want) -> Grant:
        self.wants.append(want)
        self.wanted.set()
        if self.error is not None:
            raise self.error
        if want.export is not None and self.export_error is not None:
            raise self.export_error
        pair = self.pairs.pop(0) if self.pairs else self.default_pair
        if pair is None:
            self.answer = asyncio.get_running_loop().create_future()
            try:
                return await self.answer
            except asyncio.CancelledError:
                self.withdrawn.append(want)
                raise
        return self.grant(want, pair)

    def grant(self, want: Want, pair: tuple[str | None, str | None]) -> Grant:
        prefill, decode = pair
        grant_id = f"g{len(self.grants)}"
        self.grants.append(grant_id)
        return Grant(
            term=1,
            grant_id=grant_id,
            request_id=want.request_id,
            attempt=want.attempt,
            prefill=None if prefill is None else placed(prefill),
            decode=None if decode is None else placed(decode),
            handoff_id=f"h{len(self.grants)}" if prefill and decode else "",
            reason="lowest cost",
            predicted_s=0.1,
        )

    def done(self, grant_id: str, num_output_tokens: int, *, whole_output_tokens: int = 0) -> None:
        self.dones.append((grant_id, num_output_tokens))
        self.whole_outputs += [whole_output_tokens] if whole_output_tokens else []

    async def cancel_request(self, request_id: str, timeout_s: float) -> bool:
        self.cancel_asked.append(request_id)
        return False


@dataclass(eq=False)
class FakeWorker:
    """One connection; a test makes its worker speak."""

    peer: Peer
    events: object
    script: Callable[[FakeWorker, Leg], None] | None = None
    legs: list[Leg] = field(default_factory=list)
    aborts: list[tuple[LegKey, AbortCause]] = field(default_factory=list)
    aborted_grants: list[str] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)
    is_refusing: bool = False
    is_mute: bool = False
    is_closed: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def start_leg(self, leg: Leg) -> None:
        if self.is_refusing:
            raise WorkerLost("the worker is gone", worker_id=self.peer.worker_id)
        if not self.is_mute:
            self.events.on_beat(Beat())
        self.legs.append(leg)
        self.started.set()
        if self.script is not None:
            asyncio.get_running_loop().call_soon(self.script, self, leg)

    async def abort_leg(self, key: LegKey, cause: AbortCause, grant_id: str) -> None:
        self.aborts.append((key, cause))
        self.aborted_grants.append(grant_id)

    async def redirect_leg(self, redirect: Redirect) -> None:
        self.redirects.append(redirect)

    async def close(self) -> None:
        self.is_closed = True

    def say(
        self,
        *ids: int,
        start: int = 0,
        finish: FinishReason | None = None,
        error: PdserveError | None = None,
        ends: bool = False,
        times: LegTimes | None = None,
        logprob: float | None = None,
        key: LegKey | None = None,
        aborted_grant: str = "",
        score: Callable[[int], TokenLogprobs | None] | None = None,
    ) -> None:
        """Emit ids of a leg from an output index on, and the end where there is one."""
        key = key or self.legs[-1].key
        if score is None:
            scores = None if logprob is None else TokenLogprobs(logprob)
            score = lambda token_id: scores  # noqa: E731
        tokens = [
            Token(key, start + at, token_id, score(token_id)) for at, token_id in enumerate(ids)
        ]
        end = LegEnd(
            key=key,
            finish_reason=finish,
            error=error,
            times=times or LegTimes(),
            grant_id=aborted_grant,
        )
        is_end = ends or finish is not None or error is not None
        self.events.on_tokens(tokens, [end] if is_end else [])

    def score_prompt(self, leg: Leg) -> None:
        """Tell the prompt's logprobs, in two runs, as an engine with chunks does."""
        scores = [score_of(token_id, leg.params) for token_id in leg.prompt_ids[1:]]
        middle = len(scores) // 2
        runs = [
            PromptLogprobs(leg.key, 1 + at, tuple(run))
            for at, run in ((0, scores[:middle]), (middle, scores[middle:]))
            if run
        ]
        self.events.on_tokens((), (), prompts=runs)

    def export_waits(self, error: PdserveError, *, handoff_id: str | None = None) -> None:
        """Say that the export of the newest leg waits, of its newest handoff."""
        leg = self.legs[-1]
        known = self.redirects[-1].handoff_id if self.redirects else leg.handoff_id
        notice = ExportWaiting(
            key=leg.key, handoff_id=handoff_id or known, error=error, lease_s=10.0
        )
        self.events.on_tokens((), (), [notice])

    def preempted(self, num_preemptions: int) -> None:
        """Say how often the choice of the newest leg was preempted by now."""
        self.events.on_tokens((), (), [Preempted(self.legs[-1].key, num_preemptions)])

    def die(self) -> None:
        self.events.on_worker_lost(self.peer, "killed")

    def give_up(self) -> None:
        """Have nothing more of the router, which was away for too long."""
        self.events.on_worker_lost(self.peer, "no such attach is here", is_alive=True)


class FakeCluster:
    """A router's whole outside: the route and all worker connections it makes."""

    def __init__(self) -> None:
        self.route = FakeRoute()
        self.connections: list[FakeWorker] = []
        self.script: Callable[[FakeWorker, Leg], None] | None = None
        self.refusing: set[str] = set()
        self.muted: set[str] = set()

    def connect(self, peer: Peer, events: object) -> FakeWorker:
        worker = FakeWorker(peer, events, self.script)
        worker.is_refusing = peer.incarnation in self.refusing
        worker.is_mute = peer.incarnation in self.muted
        self.connections.append(worker)
        return worker

    def worker(self, name: str) -> FakeWorker:
        """Return the newest connection to a worker."""
        return next(w for w in reversed(self.connections) if w.peer.worker_id == name)

    async def started(self, *names: str) -> list[FakeWorker]:
        """Wait until each of the workers has a leg."""
        await until(lambda: set(names) <= {w.peer.worker_id for w in self.connections if w.legs})
        return [self.worker(name) for name in names]


def make_router(
    cluster: FakeCluster,
    *,
    limits: LimitsConfig | None = None,
    template: str | None = TEMPLATE,
    model: ServedModel = MODEL,
    pools: tuple[PoolConfig, ...] = POOLS,
    max_open_calls: int = 100,
    resumes: bool = True,
    door: Door | None = None,
) -> Service:
    dispatcher = Dispatcher(
        route=lambda events: cluster.route,
        workers=Workers(cluster.connect),
        clock=SystemClock(),
        metrics=RouterMetrics("r0"),
        resumes=resumes,
    )
    return Service(
        model=model,
        limits=limits or LimitsConfig(max_body_bytes=20_000),
        codec=make_codec(template),
        dispatcher=dispatcher,
        capacity=Capacity.of(pools, max_model_len=model.max_model_len),
        max_open_calls=max_open_calls,
        door=door,
    )


def speaks(
    ids: Sequence[int], finish: FinishReason = FinishReason.STOP
) -> Callable[[FakeWorker, Leg], None]:
    """Return a script that plays both halves well: the whole choice is ``ids``.

    It is cut at ``max_tokens``, as an engine does it, and has the logprobs that are asked for.
    """

    def script(worker: FakeWorker, leg: Leg) -> None:
        made = list(ids)[: leg.params.max_tokens]
        reason = finish if len(made) == len(ids) else FinishReason.LENGTH

        def say(*ids: int, **ends: object) -> None:
            worker.say(*ids, key=leg.key, score=lambda i: score_of(i, leg.params), **ends)

        if leg.kind is not LegKind.DECODE and leg.params.prompt_logprobs:
            worker.score_prompt(leg)
        if leg.kind is LegKind.PREFILL:
            is_over = len(made) <= 1
            times = LegTimes(compute_s=0.5, transfer_bytes=64, num_computed_tokens=9)
            say(*made[:1], finish=reason if is_over else None, ends=True, times=times)
        elif leg.kind is LegKind.LOCAL or len(made) > 1:
            say(*made, finish=reason, times=LegTimes(compute_s=0.25, num_steps=len(made)))
        else:
            say(ends=True)

    return script


def score_of(token_id: int, params: SamplingParams) -> TokenLogprobs | None:
    """What every fake model thinks of a token: it is second best, after its neighbour."""
    if params.num_logprobs is None:
        return None
    others = [((token_id + step) % VOCAB_SIZE, -0.5 * step) for step in range(1, 20)]
    best = [others[0], (token_id, -0.75), *others[1:]]
    return TokenLogprobs(-0.75, tuple(best[: params.num_logprobs]))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something has happened; the test's timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
        await asyncio.sleep(0.001)


def metric(service: Service, name: str) -> float:
    """Return the sum of a metric over its labels; ``name{a="b"}`` of those with that label."""
    lines = service.metrics.text().decode().splitlines()
    name, _, label = name.rstrip("}").partition("{")
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith((f"{name} ", f"{name}{{")) and label in line
    )


def assert_conserved(service: Service) -> None:
    """received = success + aborted + failed + rejected, and nothing is in flight."""
    ends = ("success", "aborted", "failed", "rejected")
    total = sum(metric(service, f"pdserve_requests_{end}_total") for end in ends)
    assert metric(service, "pdserve_requests_received_total") == total
    assert metric(service, "pdserve_requests_in_flight") == 0
    assert metric(service, "pdserve_requests_queued") == 0
