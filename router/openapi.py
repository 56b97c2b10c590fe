"""What the OpenAPI document says of bodies and statuses: the checks' own limits, and no more.

Requests are read by hand, so that their errors are ours; their schemas stand here.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi

from cluster.config import MAX_TIER_CHARS
from router.http_auth import OPEN_PATHS
from router.http_errors import ErrorEnvelope
from router.openai_shapes import (
    ChatCompletion,
    DetokenizeAnswer,
    Health,
    TextCompletion,
    TokenizeAnswer,
)
from router.validate import MAX_PROMPT_LOGPROBS

if TYPE_CHECKING:
    from fastapi import FastAPI

    from cluster.config import LimitsConfig
    from router.auth import Keys
    from router.served import ServedModel

Schema = dict[str, Any]

_BODY_ERRORS = (400, 401, 404, 413, 415, 429, 499, 500, 503)
_GENERATE_ERRORS = (*_BODY_ERRORS, 502, 504)
_TEXT: Schema = {"type": "string"}
_EVENTS: Schema = {
    "description": "Server-sent events: a chunk as JSON in each, and [DONE] in the last; or, where "
    "it goes wrong, an event named error with the envelope in it, and no [DONE]"
}
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not ready"}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error answers of a route: all have one body."""
    return {
        status: {"model": ErrorEnvelope, "description": HTTPStatus(status).phrase}
        if status != 499  # nginx's, which Python has no name for
        else {"model": ErrorEnvelope, "description": "Cancelled"}
        for status in statuses
    }


METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Metrics", "content": {"text/plain": {"schema": _TEXT}}},
    **errors(401),
}


def chat(model: ServedModel, limits: LimitsConfig) -> dict[str, Any]:
    """Return what the document says of /v1/chat/completions."""
    fields = {
        "messages": {
            "type": "array",
            "minItems": 1,
            "maxItems": limits.max_messages,
            "items": _message(limits),
        },
        "tools": _nullable(
            {"type": "array", "maxItems": limits.max_tools, "items": {"type": "object"}}
        ),
        "tool_choice": {"enum": ["none", "auto", None]},
        "logprobs": _nullable({"type": "boolean"}),
        "top_logprobs": _integer(0, limits.max_logprobs),
        **_shared(model, limits),
    }
    return _generating(ChatCompletion, fields, required=["messages"])


def completions(model: ServedModel, limits: LimitsConfig) -> dict[str, Any]:
    """Return what the document says of /v1/completions."""
    ids = _ids(model, low=1, high=model.max_model_len - 1)
    several = {"type": "array", "minItems": 1, "maxItems": limits.max_prompts}
    high = min(MAX_PROMPT_LOGPROBS, limits.max_logprobs)
    fields = {
        "prompt": {"anyOf": [_TEXT, ids, {**several, "items": _TEXT}, {**several, "items": ids}]},
        "echo": _nullable({"type": "boolean"}),
        "logprobs": _integer(0, high),
        **_shared(model, limits),
    }
    return _generating(TextCompletion, fields, required=["prompt"])


def tokenize(limits: LimitsConfig) -> dict[str, Any]:
    """Return what the document says of /tokenize."""
    messages = {
        "type": "array",
        "minItems": 1,
        "maxItems": limits.max_messages,
        "items": _message(limits),
    }
    flag = _nullable({"type": "boolean"})
    texts = {"prompt": _TEXT, "add_special_tokens": flag, "model": _nullable(_TEXT)}
    chats = {"messages": messages, "model": _nullable(_TEXT)}
    schema = {
        "anyOf": [
            {"type": "object", "properties": texts, "required": ["prompt"]},
            {"type": "object", "properties": chats, "required": ["messages"]},
        ]
    }
    return _posting(TokenizeAnswer, schema, errors(*_BODY_ERRORS))


def detokenize(model: ServedModel) -> dict[str, Any]:
    """Return what the document says of /detokenize."""
    fields = {"tokens": _ids(model, low=0, high=model.max_model_len), "model": _nullable(_TEXT)}
    schema = {"type": "object", "properties": fields, "required": ["tokens"]}
    return _posting(DetokenizeAnswer, schema, errors(*_BODY_ERRORS))


def add_document(api: FastAPI, keys: Keys) -> None:
    """Serve the document, made once, with the key check in it where there is one."""

    def document() -> Schema:
        if api.openapi_schema is None:
            schema = get_openapi(title=api.title, version=api.version, routes=api.routes)
            if keys.are_needed:
                schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
                schemes["key"] = {"type": "http", "scheme": "bearer"}
                for path, item in schema["paths"].items():
                    for operation in item.values():
                        operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
            api.openapi_schema = schema
        return api.openapi_schema

    api.openapi = document  # type: ignore[method-assign]


def _generating(kind: type, fields: Schema, *, required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": fields, "required": required}
    return _posting(kind, schema, errors(*_GENERATE_ERRORS), has_stream=True)


def _posting(
    kind: type, schema: Schema, answers: dict[int | str, Any], *, has_stream: bool = False
) -> dict[str, Any]:
    good: dict[str, Any] = {"model": kind, "description": "The answer"}
    if has_stream:
        good["content"] = {"text/event-stream": {"schema": _EVENTS}}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"responses": {200: good, **answers}, "openapi_extra": {"requestBody": body}}


def _shared(model: ServedModel, limits: LimitsConfig) -> Schema:
    stop = {"type": "string", "minLength": 1, "maxLength": limits.max_stop_chars}
    stops = {"type": "array", "maxItems": limits.max_stop_strings, "items": stop}
    flag = _nullable({"type": "boolean"})
    return {
        "model": {"enum": [model.name, None]},
        "n": _integer(1, limits.max_n),
        "max_tokens": _integer(0),
        "max_completion_tokens": _integer(0),
        "min_tokens": _integer(0),
        "temperature": _number(0, 2),
        "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _integer(-1),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(0.1, 2),
        "logit_bias": _nullable(
            {
                "type": "object",
                "maxProperties": limits.max_logit_bias,
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            }
        ),
        "seed": {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1},
        "stop": {"anyOf": [stop, stops, {"type": "null"}]},
        "stop_token_ids": _nullable(_ids(model, low=0, high=limits.max_stop_token_ids)),
        "ignore_eos": flag,
        "stream": flag,
        "stream_options": _nullable({"type": "object", "properties": {"include_usage": flag}}),
        "user": _nullable({"type": "string", "minLength": 1, "maxLength": limits.max_id_chars}),
        "priority": {
            "anyOf": [{"enum": [0, None]}, {"type": "string", "maxLength": MAX_TIER_CHARS}]
        },
        "expected_tokens": _integer(1),
        "timeout_s": {
            "type": ["number", "null"],
            "exclusiveMinimum": 0,
            "maximum": limits.max_deadline_s,
        },
        "timeline": flag,
    }


def _message(limits: LimitsConfig) -> Schema:
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": _TEXT},
        "required": ["type", "text"],
    }
    parts = {"type": "array", "minItems": 1, "maxItems": limits.max_content_parts, "items": part}
    return {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [_TEXT, parts, {"type": "null"}]},
        },
        "required": ["role"],
    }


def _ids(model: ServedModel, *, low: int, high: int) -> Schema:
    token_id = {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}
    return {"type": "array", "minItems": low, "maxItems": high, "items": token_id}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _integer(low: int, high: int | None = None) -> Schema:
    schema: Schema = {"type": ["integer", "null"], "minimum": low}
    return schema if high is None else {**schema, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}
