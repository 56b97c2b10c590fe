"""The same call said in four ways: over HTTP and gRPC, whole and streamed; one kind of answer."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import httpx
from google.protobuf.json_format import MessageToDict

from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from tests.router.doors import JSON, Verdict, events_of, grpc_request, verdict_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TIMEOUT_S = 60.0
_LARGE = (("grpc.max_receive_message_length", 64 << 20),)


@dataclass(frozen=True)
class Scored:
    """One token's logprobs: of its best ones by token text, in their order."""

    token: str
    token_bytes: bytes
    logprob: float | None
    top: tuple[tuple[str, float], ...]


@dataclass
class Choice:
    """One choice as its client has it in the end."""

    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""
    ids: list[int] = field(default_factory=list)
    """Over gRPC only."""
    logprobs: list[Scored] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Of prompts only."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class Answer:
    """What came of a good call."""

    choices: list[Choice]
    usage: tuple[int, int] | None
    """(prompt, completion) tokens."""
    timelines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def texts(self) -> list[tuple[str, str]]:
        """What must not depend on the way: (text, finish) of each choice."""
        return [(choice.text, choice.finish_reason) for choice in self.choices]


class Caller:
    """One cluster's doors."""

    def __init__(self, cluster) -> None:
        self.cluster = cluster
        self._http = httpx.Client(base_url=cluster.http, timeout=TIMEOUT_S)
        self._channel = grpc.insecure_channel(cluster.grpc, _LARGE)
        self._stub = pb_grpc.InferenceStub(self._channel)

    def close(self) -> None:
        self._http.close()
        self._channel.close()

    def ask(self, way: str, given: Mapping[str, Any]) -> Answer:
        """Make a good call; AssertionError with the refusal where it is none."""
        return _WAYS[way](self, given)

    def ask_all(self, given: Mapping[str, Any]) -> dict[str, Answer]:
        return {way: self.ask(way, given) for way in WAYS}

    def http_verdict(self, given: Mapping[str, Any] | bytes, path: str = "") -> Verdict:
        """Make a call over HTTP that may be bad; bytes are a body as it stands."""
        body = given if isinstance(given, bytes) else json.dumps(given).encode()
        chosen = path or ("/v1/chat/completions" if b'"messages"' in body else "/v1/completions")
        response = self._http.post(chosen, content=body, headers=JSON)
        if response.status_code == 200:
            return Verdict(200)
        error = json.loads(response.text, parse_constant=_no_constant)["error"]
        return Verdict(response.status_code, error["param"], error["message"])

    def grpc_verdict(self, given: Mapping[str, Any]) -> Verdict:
        """Make a call over gRPC that may be bad; ValueError where no message can say it."""
        request = grpc_request(given)
        try:
            self._stub.GenerateOnce(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return verdict_of(error)
        return Verdict(200)

    # ---- the ways

    def _whole(self, given: Mapping[str, Any]) -> Answer:
        body = self._post(given)
        choices = [_http_choice(choice) for choice in body["choices"]]
        usage = body["usage"]
        return Answer(
            choices,
            (usage["prompt_tokens"], usage["completion_tokens"]),
            _timelines(body.get("pdserve", {})),
        )

    def _streamed(self, given: Mapping[str, Any]) -> Answer:
        asked = {**given, "stream": True, "stream_options": {"include_usage": True}}
        *events, (_, last) = events_of(self._post_text(asked))
        assert last == "[DONE]"
        found: defaultdict[int, Choice] = defaultdict(Choice)
        usage, added = None, {}
        for kind, body in events:
            assert kind == "message", body
            added |= body.get("pdserve", {})
            if not body["choices"]:
                usage = body["usage"]
            for delta in body["choices"]:
                assert body["usage"] is None
                _merge(found[delta["index"]], _http_choice(delta))
        assert usage is not None
        choices = [found[index] for index in sorted(found)]
        return Answer(
            choices, (usage["prompt_tokens"], usage["completion_tokens"]), _timelines(added)
        )

    def _grpc_whole(self, given: Mapping[str, Any]) -> Answer:
        answer = self._stub.GenerateOnce(grpc_request(given), timeout=TIMEOUT_S)
        choices = [_grpc_choice(choice) for choice in answer.choices]
        return Answer(choices, _grpc_usage(answer.usage), _grpc_timelines(answer.choices))

    def _grpc_streamed(self, given: Mapping[str, Any]) -> Answer:
        found: defaultdict[int, Choice] = defaultdict(Choice)
        usage, timelines = None, []
        for message in self._stub.Generate(grpc_request(given), timeout=TIMEOUT_S):
            assert usage is None, "a message after the last"
            _merge(found[message.index], _grpc_choice(message))
            timelines += _grpc_timelines([message])
            if message.HasField("usage"):
                usage = _grpc_usage(message.usage)
        return Answer([found[index] for index in sorted(found)], usage, timelines)

    def _post(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return json.loads(self._post_text(given), parse_constant=_no_constant)

    def _post_text(self, given: Mapping[str, Any]) -> str:
        path = "/v1/chat/completions" if "messages" in given else "/v1/completions"
        response = self._http.post(path, content=json.dumps(given), headers=JSON)
        assert response.status_code == 200, (given, response.text)
        return response.content.decode()  # strict: every line is UTF-8


_WAYS = {
    "HTTP": Caller._whole,
    "SSE": Caller._streamed,
    "gRPC": Caller._grpc_whole,
    "gRPC stream": Caller._grpc_streamed,
}
WAYS = tuple(_WAYS)


def plain_ids(tokenizer) -> list[int]:
    """Ids of printable ASCII, which any text can hold."""
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
    special = set(tokenizer.all_special_ids)
    return [
        i for i, t in texts.items() if i not in special and t and t.isascii() and t.isprintable()
    ]


def _merge(choice: Choice, more: Choice) -> None:
    assert not choice.finish_reason, "a choice goes on after its end"
    choice.pieces += more.pieces
    choice.ids += more.ids
    choice.logprobs += more.logprobs
    choice.offsets += more.offsets
    choice.finish_reason = more.finish_reason


def _http_choice(body: Mapping[str, Any]) -> Choice:
    chat = body.get("message") or body.get("delta")
    text = body["text"] if "text" in body else (chat or {}).get("content", "")
    choice = Choice([text] if text else [], body["finish_reason"] or "")
    told = body.get("logprobs") or {}
    for entry in told.get("content") or ():
        top = tuple((other["token"], other["logprob"]) for other in entry["top_logprobs"])
        choice.logprobs.append(Scored(entry["token"], bytes(entry["bytes"]), entry["logprob"], top))
    if "tokens" in told:
        columns = ("tokens", "bytes", "token_logprobs", "top_logprobs", "text_offset")
        assert len({len(told[name]) for name in columns}) == 1, told
        for token, raw, logprob, top, _ in zip(*(told[name] for name in columns), strict=True):
            best = tuple((top or {}).items())
            choice.logprobs.append(Scored(token, bytes(raw), logprob, best))
        choice.offsets = told["text_offset"]
    return choice


def _grpc_choice(message: pb.Choice | pb.GenerateResponse) -> Choice:
    choice = Choice([message.text] if message.text else [], message.finish_reason)
    choice.ids = list(message.token_ids)
    entries = list(message.logprobs)
    if message.HasField("echo"):
        choice.pieces.insert(0, message.echo.text)
        entries = [*message.echo.logprobs, *entries]
    choice.logprobs = list(_grpc_scores(entries))
    choice.offsets = [entry.text_offset for entry in entries]
    return choice


def _grpc_scores(entries: Iterable[pb.TokenLogprobs]) -> Iterable[Scored]:
    for entry in entries:
        top = tuple((other.token, other.logprob) for other in entry.top)
        logprob = entry.logprob if entry.HasField("logprob") else None
        yield Scored(entry.token, entry.token_bytes, logprob, top)


def _grpc_usage(usage: pb.Usage) -> tuple[int, int]:
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return usage.prompt_tokens, usage.completion_tokens


def _grpc_timelines(messages) -> list[dict[str, Any]]:
    return [
        MessageToDict(
            message.timeline,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        for message in messages
        if message.HasField("timeline")
    ]


def _timelines(added: Mapping[str, Any]) -> list[dict[str, Any]]:
    return added.get("timelines") or [t for t in [added.get("timeline")] if t]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
