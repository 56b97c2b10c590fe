"""The one validator of both doors: from what a client gave to values that are safe to use.

Nothing here tokenises, and nothing works in proportion to a size before that size is checked.
Messages name the field and the rule, never more of the value than its type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from cluster.errors import InvalidRequest, ModelNotFound
from router.text import ChatMessage

if TYPE_CHECKING:
    from cluster.config import LimitsConfig
    from router.given import GenerateInput
    from router.served import ServedModel

_INT64 = range(-(1 << 63), 1 << 63)
_GREEDY_BELOW = 1e-5  # dividing logits by less than this overflows; the limit is the best token
_ROLES = ("system", "user", "assistant")
_MAX_MODEL_CHARS = 256

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "prompt_embeds": (),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields that would change the answer and are not served, with the values that ask for nothing.

Every other unknown field is ignored, as clients send many that mean nothing here.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A call whose every value is legal; its prompt is not tokenised yet.

    Exactly one of ``prompt``, ``messages`` and ``prompt_ids`` is set. ``max_tokens`` None fills
    the context.
    """

    prompt: str | None
    messages: tuple[ChatMessage, ...] | None
    prompt_ids: tuple[int, ...] | None
    max_tokens: int | None
    max_tokens_field: str
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    timeout_s: float
    wants_timeline: bool

    @property
    def prompt_field(self) -> str:
        """The client's name of what was given."""
        return "messages" if self.messages is not None else "prompt"


class _Prompt(TypedDict):
    prompt: str | None
    messages: tuple[ChatMessage, ...] | None
    prompt_ids: tuple[int, ...] | None


class Validator:
    """Checks calls against one model and one set of limits."""

    def __init__(self, model: ServedModel, limits: LimitsConfig, *, max_prompt_chars: int) -> None:
        self._model = model
        self._limits = limits
        self.max_prompt_chars = max_prompt_chars
        """A longer text can't fit the context, whatever its tokens."""

    def check(self, given: GenerateInput) -> Checked:
        """Return the checked call; raises InvalidRequest or ModelNotFound that names the field."""
        self._check_model(given.model)
        _refuse_unserved(given.extras)
        top_k = _int(given.top_k, "top_k", low=-1)
        temperature = _float(given.temperature, "temperature", low=0.0, high=2.0)
        return Checked(
            **self._prompt(given),
            max_tokens=_int(given.max_tokens, given.max_tokens_field, low=1),
            max_tokens_field=given.max_tokens_field,
            temperature=1.0 if temperature is None else _no_tiny(temperature),
            top_p=_top_p(given.top_p),
            # At or above the vocabulary's size there is nothing to cut off.
            top_k=0 if top_k is None or not 0 < top_k < self._model.vocab_size else top_k,
            seed=_seed(given.seed),
            stop=self._stops(given.stop),
            ignore_eos=_bool(given.ignore_eos, "ignore_eos"),
            timeout_s=self._timeout(given.timeout_s, given.call_remaining_s),
            wants_timeline=_bool(given.timeline, "timeline"),
        )

    def _check_model(self, model: object) -> None:
        if model is None or model == "":
            return
        if not isinstance(model, str):
            raise InvalidRequest("model must be a string", field="model")
        if model != self._model.name:
            shown = ascii(model[:_MAX_MODEL_CHARS])
            reason = f"the model {shown} does not exist; this is {self._model.name!r}"
            raise ModelNotFound(reason, field="model")

    def _prompt(self, given: GenerateInput) -> _Prompt:
        present = [v for v in (given.prompt, given.messages, given.prompt_ids) if v is not None]
        if len(present) != 1:
            name = "messages" if given.messages is not None else "prompt"
            raise InvalidRequest(f"{name} is missing", field=name)
        return _Prompt(
            prompt=None if given.prompt is None else self._text(given.prompt, "prompt"),
            messages=None if given.messages is None else self._messages(given.messages),
            prompt_ids=None if given.prompt_ids is None else self._ids(given.prompt_ids),
        )

    def _text(self, value: object, field: str) -> str:
        text = _string(value, field)
        if len(text) > self.max_prompt_chars:
            raise InvalidRequest(
                f"{field} is longer than {self._model.max_model_len} tokens, the context, can be",
                field=field,
            )
        return _encodable(text, field)

    def _ids(self, value: object) -> tuple[int, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise InvalidRequest("prompt must be a string or a list of token ids", field="prompt")
        if not value:
            raise InvalidRequest("prompt is empty", field="prompt")
        if len(value) >= self._model.max_model_len:
            raise InvalidRequest(
                f"prompt has {len(value)} tokens; with one to generate, the context holds "
                f"{self._model.max_model_len}",
                field="prompt",
            )
        size = self._model.vocab_size
        if not all(type(item) is int and 0 <= item < size for item in value):
            raise InvalidRequest(f"token ids are integers from 0 to {size - 1}", field="prompt")
        return tuple(value)

    def _messages(self, value: object) -> tuple[ChatMessage, ...]:
        if not isinstance(value, list):
            raise InvalidRequest("messages must be a list", field="messages")
        if not 0 < len(value) <= self._limits.max_messages:
            raise InvalidRequest(
                f"messages must hold 1 to {self._limits.max_messages} turns", field="messages"
            )
        turns = tuple(self._message(item, f"messages[{i}]") for i, item in enumerate(value))
        if sum(len(turn.content) for turn in turns) > self.max_prompt_chars:
            raise InvalidRequest(
                f"messages are longer than {self._model.max_model_len} tokens, the context, can be",
                field="messages",
            )
        return turns

    def _message(self, value: object, field: str) -> ChatMessage:
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{field} must be an object", field=field)
        role = value.get("role")
        if role not in _ROLES:
            raise InvalidRequest(
                f"{field}.role must be one of {', '.join(_ROLES)}", field=f"{field}.role"
            )
        for name in ("tool_calls", "function_call", "audio"):
            if value.get(name):
                raise InvalidRequest(f"{field}.{name} is not supported", field=f"{field}.{name}")
        content = self._text(value.get("content"), f"{field}.content")
        return ChatMessage(role=role, content=content)

    def _stops(self, value: object) -> tuple[str, ...]:
        if value is None:
            return ()
        stops = [value] if isinstance(value, str) else value
        limits = self._limits
        if not isinstance(stops, Sequence):
            raise InvalidRequest("stop must be a string or a list of strings", field="stop")
        if len(stops) > limits.max_stop_strings:
            reason = f"stop holds {limits.max_stop_strings} strings at most"
            raise InvalidRequest(reason, field="stop")
        for stop in stops:
            if not isinstance(stop, str) or not 0 < len(stop) <= limits.max_stop_chars:
                reason = f"a stop string has 1 to {limits.max_stop_chars} characters"
                raise InvalidRequest(reason, field="stop")
            _encodable(stop, "stop")
        return tuple(stops)

    def _timeout(self, value: object, call_remaining_s: float | None) -> float:
        timeout_s = _float(value, "timeout_s", low=0.0, high=self._limits.max_deadline_s)
        if timeout_s == 0:
            raise InvalidRequest("timeout_s must be above 0", field="timeout_s")
        if timeout_s is None:
            timeout_s = self._limits.default_deadline_s
        return timeout_s if call_remaining_s is None else min(timeout_s, call_remaining_s)


def _refuse_unserved(extras: Mapping[str, object]) -> None:
    for name in extras.keys() & _NEUTRAL.keys():
        value = extras[name]
        if value is None or any(_is_same(value, neutral) for neutral in _NEUTRAL[name]):
            continue
        raise InvalidRequest(f"{name} is not supported with this value", field=name)


def _is_same(value: object, neutral: object) -> bool:
    # 0 == False in Python, but "logprobs": 0 asks for something and false does not.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _string(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a string", field=field)
    return value


def _encodable(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} holds half a character", field=field) from error
    return text


def _bool(value: object, field: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequest(f"{field} must be true or false", field=field)
    return value


def _int(value: object, field: str, *, low: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{field} must be an integer", field=field)
    if not low <= value < 1 << 63:
        raise InvalidRequest(f"{field} must be at least {low}", field=field)
    return value


def _float(value: object, field: str, *, low: float, high: float) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(f"{field} must be a number", field=field)
    # Written so that NaN, which is false in every comparison, fails too.
    if not low <= value <= high:
        raise InvalidRequest(f"{field} must be from {low:g} to {high:g}", field=field)
    return float(value)


def _top_p(value: object) -> float:
    top_p = _float(value, "top_p", low=0.0, high=1.0)
    if top_p == 0:
        raise InvalidRequest("top_p must be above 0", field="top_p")
    return 1.0 if top_p is None else top_p


def _no_tiny(temperature: float) -> float:
    return 0.0 if math.fabs(temperature) < _GREEDY_BELOW else temperature


def _seed(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value not in _INT64:
        raise InvalidRequest("seed must be a 64-bit integer", field="seed")
    return value
