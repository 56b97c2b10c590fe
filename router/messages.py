"""The turns of a chat, checked: roles, contents as text or parts, calls of tools as input.

Errors name ``messages[i]``. Parts of one content are joined without anything between them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.errors import InvalidRequest
from router import values

if TYPE_CHECKING:
    from cluster.config import LimitsConfig

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOT_SERVED = ("function_call", "audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the assistant made in an earlier turn; ``arguments`` is a JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation, checked."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    @property
    def num_chars(self) -> int:
        """Characters that the turn adds to a prompt at least."""
        return len(self.content) + sum(len(c.name) + len(c.arguments) for c in self.tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation, and the tools that its template is to describe, as OpenAI's objects."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


class MessageCheck:
    """Checks chats against the limits; ``max_chars`` is for all turns together."""

    def __init__(self, limits: LimitsConfig, *, max_chars: int, max_model_len: int) -> None:
        self._limits = limits
        self._max_chars = max_chars
        self._too_long = f"longer than {max_model_len} tokens, the context, can be"

    def chat(self, messages: object, tools: object, tool_choice: object) -> Chat:
        """Return a chat; raises InvalidRequest that names the turn or the tool."""
        checked = Chat(messages=self._turns(messages), tools=self._tools(tools))
        if tool_choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "tool_choice: calls cannot be forced; none and auto are served", field="tool_choice"
            )
        return checked

    def _turns(self, value: object) -> tuple[ChatMessage, ...]:
        items = values.listed(
            value, "messages", what="turns", low=1, high=self._limits.max_messages
        )
        turns = tuple(self._turn(item, f"messages[{i}]") for i, item in enumerate(items))
        if sum(turn.num_chars for turn in turns) > self._max_chars:
            raise InvalidRequest(f"messages are {self._too_long}", field="messages")
        return turns

    def _turn(self, value: object, field: str) -> ChatMessage:
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{field} must be an object", field=field)
        role = value.get("role")
        if role not in _ROLES:
            raise InvalidRequest(
                f"{field}.role must be one of {', '.join(_ROLES)}", field=f"{field}.role"
            )
        for name in _NOT_SERVED:
            if value.get(name):
                raise InvalidRequest(f"{field}.{name} is not supported", field=f"{field}.{name}")
        calls = self._calls(value.get("tool_calls"), role, f"{field}.tool_calls")
        content = value.get("content")
        if content is None and role == "assistant":
            content = value.get("refusal")
        return ChatMessage(
            role=role,
            content="" if content is None and calls else self._content(content, role, field),
            tool_calls=calls,
            tool_call_id=self._tool_call_id(value.get("tool_call_id"), role, field),
            name=self._id(value.get("name"), f"{field}.name"),
        )

    def _content(self, value: object, role: str, field: str) -> str:
        name = f"{field}.content"
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            high = self._limits.max_content_parts
            parts = values.listed(value, name, what="parts", low=1, high=high)
            text = "".join(self._part(part, role, f"{name}[{i}]") for i, part in enumerate(parts))
        elif isinstance(value, str):
            text = value
        else:
            raise InvalidRequest(f"{name} must be a string or a list of parts", field=name)
        return self._text(text, name)

    def _part(self, value: object, role: str, field: str) -> str:
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{field} must be an object", field=field)
        kind = value.get("type")
        if kind == "text" or (kind == "refusal" and role == "assistant"):
            return values.string(value.get(kind), f"{field}.{kind}")
        raise InvalidRequest(
            f"{field}.type must be text: this is a text model", field=f"{field}.type"
        )

    def _calls(self, value: object, role: str, field: str) -> tuple[ToolCall, ...]:
        if value is None or (value == [] and role == "assistant"):
            return ()
        if role != "assistant":
            raise InvalidRequest(f"{field}: only an assistant's turn has them", field=field)
        items = values.listed(value, field, what="calls", low=1, high=self._limits.max_tools)
        return tuple(self._call(item, f"{field}[{i}]") for i, item in enumerate(items))

    def _call(self, value: object, field: str) -> ToolCall:
        function = value.get("function") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(function, Mapping):
            raise InvalidRequest(f"{field} must be an object with a function", field=field)
        if value.get("type") not in (None, "function"):
            raise InvalidRequest(f"{field}.type must be function", field=f"{field}.type")
        name = self._id(function.get("name"), f"{field}.function.name")
        if not name:
            name_of = f"{field}.function.name"
            raise InvalidRequest(f"{name_of} is missing", field=name_of)
        return ToolCall(
            id=self._id(value.get("id"), f"{field}.id"),
            name=name,
            arguments=self._text(function.get("arguments"), f"{field}.function.arguments"),
        )

    def _tool_call_id(self, value: object, role: str, field: str) -> str:
        name = f"{field}.tool_call_id"
        checked = self._id(value, name)
        if role == "tool" and not checked:
            raise InvalidRequest(f"{name} is missing", field=name)
        return checked

    def _id(self, value: object, field: str) -> str:
        return values.short_string(value, field, max_chars=self._limits.max_id_chars) or ""

    def _text(self, value: object, field: str) -> str:
        if isinstance(value, str) and len(value) > self._max_chars:
            raise InvalidRequest(f"{field} is {self._too_long}", field=field)
        return values.string(value, field)

    def _tools(self, value: object) -> tuple[Mapping[str, Any], ...]:
        if value is None:
            return ()
        items = values.listed(value, "tools", what="tools", low=0, high=self._limits.max_tools)
        return tuple(self._tool(item, f"tools[{i}]") for i, item in enumerate(items))

    def _tool(self, value: object, field: str) -> Mapping[str, Any]:
        function = value.get("function") if isinstance(value, Mapping) else None
        is_tool = isinstance(value, Mapping) and value.get("type") == "function"
        if not is_tool or not isinstance(function, Mapping):
            raise InvalidRequest(f"{field} must be of type function", field=field)
        if not self._id(function.get("name"), f"{field}.function.name"):
            raise InvalidRequest(
                f"{field}.function.name is missing", field=f"{field}.function.name"
            )
        # The whole object goes into the prompt, so all of it has to be text.
        self._text(json.dumps(value, ensure_ascii=False), field)
        assert isinstance(value, Mapping)
        return value
