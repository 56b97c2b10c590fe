"""Both doors of one router, and one way to say the same to either: the HTTP API's field names."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import httpx

from cluster.wire import public_v1_pb2 as pb
from cluster.wire import public_v1_pb2_grpc as pb_grpc
from router.api import build_api
from router.grpc_api import GrpcDoor
from router.service import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Verdict:
    """What a door made of a call; ``status`` is HTTP's at both."""

    status: int
    param: str | None = None
    message: str = ""


@dataclass(frozen=True)
class Doors:
    """A router's two doors."""

    service: Service
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    address: str
    """Of the gRPC door."""

    @property
    def stub(self) -> pb_grpc.InferenceStub:
        return pb_grpc.InferenceStub(self.channel)

    async def post(self, given: Mapping[str, Any], path: str = "") -> httpx.Response:
        """Say it over HTTP; a chat where there are messages."""
        chosen = path or ("/v1/chat/completions" if "messages" in given else "/v1/completions")
        # Not httpx' own JSON: it refuses to say NaN, and half a character.
        return await self.http.post(chosen, content=json.dumps(given), headers=JSON)

    async def http_verdict(self, given: Mapping[str, Any], path: str = "") -> Verdict:
        response = await self.post(given, path)
        if response.status_code == 200:
            return Verdict(200)
        # The refusal is valid JSON itself, whatever was sent.
        error = json.loads(response.text, parse_constant=_no_constant)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return Verdict(response.status_code, error["param"], error["message"])

    async def grpc_verdict(self, given: Mapping[str, Any]) -> Verdict:
        try:
            async for _ in self.stub.Generate(grpc_request(given)):
                pass
        except grpc.aio.AioRpcError as error:
            return verdict_of(error)
        return Verdict(200)

    async def once(self, given: Mapping[str, Any]) -> pb.GenerateOnceResponse:
        """Say it over gRPC and return the whole answer."""
        return await self.stub.GenerateOnce(grpc_request(given))


STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.OUT_OF_RANGE: 413,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
}


def verdict_of(error: grpc.aio.AioRpcError) -> Verdict:
    trailing = dict(error.trailing_metadata() or ())
    return Verdict(STATUS[error.code()], trailing.get("pdserve-param"), error.details() or "")


@contextlib.asynccontextmanager
async def open_doors(service: Service, **headers: str) -> AsyncIterator[Doors]:
    """Open both; the service is stopped with them."""
    door = GrpcDoor(service, host="127.0.0.1", port=0)
    port = await door.start()
    transport = httpx.ASGITransport(build_api(service))
    try:
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            yield Doors(service, http, channel, f"127.0.0.1:{port}")
    finally:
        await door.stop()
        await service.stop()


def grpc_request(given: Mapping[str, Any]) -> pb.GenerateRequest:
    """Return the message that says what a body says; KeyError-like errors where none can."""
    fields = dict(given)
    request = pb.GenerateRequest()
    if "messages" in fields:
        request.chat.CopyFrom(_chat(fields))
        for name in ("messages", "tools", "tool_choice", "logprobs"):
            fields.pop(name, None)
    elif "prompt" in fields:
        _set_prompt(request, fields.pop("prompt"))
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    for token_id, bias in fields.pop("logit_bias", {}).items():
        request.logit_bias[int(token_id)] = bias
    if "priority" in fields:
        request.priority = str(fields.pop("priority"))
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Any) -> None:
    if isinstance(prompt, str):
        request.prompt = prompt
    elif prompt and isinstance(prompt[0], list | str):
        request.prompts.SetInParent()
        for item in prompt:
            added = request.prompts.prompts.add()
            if isinstance(item, str):
                added.text = item
            else:
                added.ids.SetInParent()
                added.ids.ids.extend(item)
    else:
        request.prompt_ids.SetInParent()
        request.prompt_ids.ids.extend(prompt)


def _chat(given: Mapping[str, Any]) -> pb.Chat:
    chat = pb.Chat(tool_choice=given.get("tool_choice", ""))
    for turn in given["messages"]:
        message = chat.messages.add(
            role=turn.get("role", ""),
            tool_call_id=turn.get("tool_call_id", ""),
            name=turn.get("name", ""),
        )
        if isinstance(content := turn.get("content"), list):
            message.parts.extend(part["text"] for part in content)
        elif content is not None:
            message.content = content
        for call in turn.get("tool_calls") or ():
            message.tool_calls.add(
                id=call["id"],
                name=call["function"]["name"],
                arguments=call["function"]["arguments"],
            )
    for tool in given.get("tools") or ():
        function = tool["function"]
        parameters = json.dumps(function["parameters"]) if "parameters" in function else ""
        chat.tools.add(
            name=function["name"],
            description=function.get("description", ""),
            parameters=parameters,
        )
    return chat


def events_of(body: str) -> list[tuple[str, Any]]:
    """Return the (event, data) pairs of an SSE body; each line is JSON but the last."""
    events = []
    for block in body.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        data = fields["data"]
        events.append(
            (fields.get("event", "message"), data if data == "[DONE]" else json.loads(data))
        )
    return events


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
