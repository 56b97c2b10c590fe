"""Messages into unchecked input, alike to what an HTTP body becomes: unset is absent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from cluster.errors import InvalidRequest
from router import strict_json
from router.given import GenerateInput, TokenizeInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config import LimitsConfig
    from cluster.wire import public_v1_pb2 as pb

T = TypeVar("T")

_OPTIONAL = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "ignore_eos", "echo", "expected_tokens",
    "timeout_s",
)  # fmt: skip


_TOOL_DEPTH = 4
"""Levels of JSON around a tool's parameters in an HTTP body."""


def generate_input(
    request: pb.GenerateRequest, call_remaining_s: float | None, limits: LimitsConfig
) -> GenerateInput:
    """Return what a GenerateRequest asks for; raises InvalidRequest for what JSON can't say.

    Of lists only as much is taken as may be there: an empty entry of two bytes becomes an object.
    """
    chat = request.chat if request.WhichOneof("input") == "chat" else None
    fields: dict[str, Any] = {name: _value(request, name) for name in _OPTIONAL}
    return GenerateInput(
        **fields,
        model=request.model or None,
        prompt=_prompt(request, limits),
        messages=None if chat is None else _messages(chat, limits),
        tools=None if chat is None else _tools(chat, limits),
        tool_choice=None if chat is None else chat.tool_choice or None,
        logit_bias=dict(request.logit_bias),
        stop=list(request.stop),
        stop_token_ids=list(request.stop_token_ids),
        **_logprobs(request),
        user=request.user or None,
        priority=_priority(request.priority),
        call_remaining_s=call_remaining_s,
        timeline=request.timeline,
        client_request_id=request.client_request_id or None,
    )


def tokenize_input(request: pb.TokenizeRequest, limits: LimitsConfig) -> TokenizeInput:
    """Return what a TokenizeRequest asks for."""
    kind = request.WhichOneof("input")
    return TokenizeInput(
        model=request.model or None,
        prompt=request.prompt if kind == "prompt" else None,
        messages=_messages(request.chat, limits) if kind == "chat" else None,
        tools=_tools(request.chat, limits) if kind == "chat" else None,
        add_special_tokens=_value(request, "add_special_tokens"),
    )


def _value(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _few(items: Sequence[T], high: int) -> Sequence[T]:
    """Return what may be there, and one more, if there is, for the validator to refuse."""
    return items[: high + 1]


def _prompt(request: pb.GenerateRequest, limits: LimitsConfig) -> object:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        return request.prompt
    if kind == "prompt_ids":
        return list(request.prompt_ids.ids)
    if kind == "prompts":
        prompts = _few(request.prompts.prompts, limits.max_prompts)
        return [
            list(prompt.ids.ids) if prompt.WhichOneof("kind") == "ids" else prompt.text
            for prompt in prompts
        ]
    return None


def _logprobs(request: pb.GenerateRequest) -> dict[str, Any]:
    """Return the fields as HTTP has them: a chat asks for logprobs, and then for how many."""
    top = _value(request, "top_logprobs")
    logprobs = _value(request, "logprobs")
    if request.WhichOneof("input") != "chat":
        return {"logprobs": logprobs, "top_logprobs": top}
    if logprobs is not None:
        reason = "logprobs is for a prompt; a chat takes top_logprobs"
        raise InvalidRequest(reason, field="logprobs")
    return {"logprobs": top is not None, "top_logprobs": top}


def _priority(text: str) -> object:
    """Return a number where the text is one, as JSON tells the two apart."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text or None


def _messages(chat: pb.Chat, limits: LimitsConfig) -> list[dict[str, object]]:
    turns = _few(chat.messages, limits.max_messages)
    return [_message(message, f"messages[{i}]", limits) for i, message in enumerate(turns)]


def _message(message: pb.Message, field: str, limits: LimitsConfig) -> dict[str, object]:
    content: object = _value(message, "content")
    if message.parts:
        if content is not None:
            raise InvalidRequest(f"{field}: either content or parts", field=f"{field}.content")
        parts = _few(message.parts, limits.max_content_parts)
        content = [{"type": "text", "text": text} for text in parts]
    turn: dict[str, object] = {"role": message.role, "content": content}
    if message.tool_calls:
        calls = _few(message.tool_calls, limits.max_tools)
        turn["tool_calls"] = [
            {
                "id": call.id or None,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return turn | {"tool_call_id": message.tool_call_id or None, "name": message.name or None}


def _tools(chat: pb.Chat, limits: LimitsConfig) -> list[dict[str, object]] | None:
    tools = _few(chat.tools, limits.max_tools)
    return [_tool(tool, f"tools[{i}]", limits) for i, tool in enumerate(tools)] or None


def _tool(tool: pb.Tool, field: str, limits: LimitsConfig) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        name = f"{field}.function.parameters"
        function["parameters"] = strict_json.parse(
            tool.parameters.encode(),
            max_depth=limits.max_json_depth - _TOOL_DEPTH,
            what=name,
            field=name,
        )
    return {"type": "function", "function": function}
