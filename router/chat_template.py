"""A model's chat template: checked turns into one text, in a sandbox, with nothing lost.

Templates differ in what they know. What one has no words for is written in a documented way
(calls of tools as Hermes' ``<tool_call>`` lines, ``developer`` as ``system``); a turn that does
not show in the result, or that the template refuses, is an error that names ``messages[i]``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import (
    _compile_jinja_template as compile_template,  # the sandbox that apply_chat_template runs
)

from cluster.errors import InvalidRequest, RequestTooLarge
from router import strict_json
from router.time_cap import Overtime, time_cap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.messages import Chat, ChatMessage, ToolCall

MAX_RENDER_S = 2.0
"""Of the template's own work for one chat."""
_MAX_PRODUCT = 1 << 20
"""Characters or items, or bits of a power, that a template may multiply up to."""
_MAX_CALL_DEPTH = 32  # of a tool call's arguments, as of what the model is told of a tool
_THOUGHTS_END = "</think>"  # templates cut thoughts out of earlier turns, and that is right
_NO_TEMPLATE = "this model has no chat template"


class ChatTemplate:
    """Renders chats with one template; immutable, for any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        # The lookup of transformers' environment, with its filters, and narrower arithmetic.
        environment = compile_template("").environment.overlay()
        environment.intercepted_binops = frozenset({"*", "**"})
        environment.binop_table = {**environment.binop_table, "*": _times, "**": _power}
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._knows_calls = "tool_calls" in source
        self._knows_tools = "tools" in source
        self._knows_developer = "developer" in source

    def render(self, chat: Chat, *, max_chars: int) -> str:
        """Return the text that asks for the assistant's next turn.

        Raises InvalidRequest where the template refuses a turn or drops it, RequestTooLarge above
        ``max_chars``.
        """
        if chat.tools and not self._knows_tools:
            raise InvalidRequest("this model's chat template knows no tools", field="tools")
        turns = [self._turn(message) for message in chat.messages]
        try:
            text = self._write(turns, chat, max_chars)
        except _Refused as error:
            raise self._named(error, turns, chat, max_chars) from error
        for number, message in enumerate(chat.messages):
            if lost := _lost(message, text):
                field = f"messages[{number}]"
                raise InvalidRequest(
                    f"{field}: this model's chat template drops its {lost}", field=field
                )
        return text

    def _turn(self, message: ChatMessage) -> dict[str, Any]:
        is_renamed = message.role == "developer" and not self._knows_developer
        turn: dict[str, Any] = {
            "role": "system" if is_renamed else message.role,
            "content": message.content,
        }
        if message.tool_calls and self._knows_calls:
            turn["tool_calls"] = [_call(call) for call in message.tool_calls]
        elif message.tool_calls:
            turn["content"] += "".join(_call_text(call) for call in message.tool_calls)
        for name in ("tool_call_id", "name"):
            if value := getattr(message, name):
                turn[name] = value
        return turn

    def _write(self, turns: Sequence[Mapping[str, Any]], chat: Chat, max_chars: int) -> str:
        """Run the template; raises _Refused where it fails, RequestTooLarge where it goes on."""
        pieces: list[str] = []
        num_chars = 0
        try:
            with time_cap(MAX_RENDER_S):
                for piece in self._template.generate(
                    messages=turns,
                    tools=list(chat.tools) or None,
                    documents=None,
                    add_generation_prompt=True,
                    **self._special_tokens,
                ):
                    pieces.append(piece)
                    num_chars += len(piece)
                    if num_chars > max_chars:
                        raise Overtime
        except Overtime as error:
            raise RequestTooLarge("the conversation is too long", field="messages") from error
        except jinja2.TemplateError as error:
            raise _Refused(error.message or "it cannot be rendered") from error
        except Exception as error:
            # A template is a program of the model's authors: what it trips over is what it's given.
            raise _Refused("it cannot be rendered") from error
        return "".join(pieces)

    def _named(
        self, error: _Refused, turns: Sequence[Mapping[str, Any]], chat: Chat, max_chars: int
    ) -> InvalidRequest:
        """Find the turn with which the template begins to refuse: after those before it passed."""
        passing, failing = 0, len(turns)
        while failing - passing > 1:
            middle = (passing + failing) // 2
            try:
                self._write(turns[:middle], chat, max_chars)
                passing = middle
            except (_Refused, RequestTooLarge):
                failing = middle
        field = f"messages[{failing - 1}]"
        reason = f"the model's chat template refuses {field}: {error}"
        return InvalidRequest(reason, field=field)


class _Refused(Exception):
    """The template raised; the text is its own, made for users."""


def _times(left: Any, right: Any) -> Any:
    """Multiply, but no text or list so often that it would fill the memory."""
    for repeated, times in ((left, right), (right, left)):
        is_list = hasattr(repeated, "__len__") and isinstance(times, int)
        if is_list and len(repeated) * times > _MAX_PRODUCT:
            raise SecurityError("a product is too large")
    return left * right


def _power(base: Any, exponent: Any) -> Any:
    are_whole = isinstance(base, int) and isinstance(exponent, int)
    if are_whole and base.bit_length() * exponent > _MAX_PRODUCT:
        raise SecurityError("a power is too large")
    return base**exponent


def refuse_without_template() -> InvalidRequest:
    """Return the error for a chat with a model that has no template."""
    return InvalidRequest(_NO_TEMPLATE, field="messages")


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": _arguments(call)},
    }


def _arguments(call: ToolCall) -> Any:
    """Return arguments as templates expect them, an object; a text that is none stays a text.

    So does one whose object could not be written again: it is too deep, or holds half a character.
    """
    text = call.arguments.encode()
    try:
        arguments = strict_json.parse(text, max_depth=_MAX_CALL_DEPTH, what="arguments")
        json.dumps(arguments, ensure_ascii=False).encode()
    except (InvalidRequest, UnicodeEncodeError):
        return call.arguments
    return arguments if isinstance(arguments, dict) else call.arguments


def _call_text(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": _arguments(call)}, ensure_ascii=False)
    return f"\n<tool_call>\n{body}\n</tool_call>"


def _lost(message: ChatMessage, text: str) -> str:
    """Return what of a turn isn't in the text; empty: all is."""
    content = message.content.strip()
    if message.role == "assistant":
        content = content.rpartition(_THOUGHTS_END)[2].strip()
    if content not in text:
        escaped = (json.dumps(content, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
        if not any(form in text for form in escaped):
            return "content"
    return "" if all(call.name in text for call in message.tool_calls) else "tool_calls"
