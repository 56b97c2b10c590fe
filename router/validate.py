"""The one validator of both doors: from what a client gave to values that are safe to use.

Nothing here tokenises, and nothing works in proportion to a size before that size is checked.
Messages name the field and the rule, never more of the value than its type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cluster.errors import InvalidRequest, ModelNotFound
from cluster.request import SamplingParams
from router import values
from router.checked import Checked, CheckedText
from router.messages import MessageCheck
from router.prompts import PromptCheck
from router.unserved import refuse_unserved

if TYPE_CHECKING:
    from cluster.config import LimitsConfig
    from router.given import GenerateInput, TokenizeInput
    from router.messages import Chat
    from router.prompts import Prompt
    from router.served import ServedModel

_GREEDY_BELOW = 1e-5  # dividing logits by less than this overflows; the limit is the best token
_MAX_MODEL_CHARS = 256
_SEEDS = 1 << 64

MAX_PROMPT_LOGPROBS = 5
"""Best tokens that OpenAI's completions tell at most."""


class Validator:
    """Checks calls against one model and one set of limits."""

    def __init__(self, model: ServedModel, limits: LimitsConfig, *, max_prompt_chars: int) -> None:
        self._model = model
        self._limits = limits
        self._prompts = PromptCheck(
            model, max_prompts=limits.max_prompts, max_chars=max_prompt_chars
        )
        self._messages = MessageCheck(
            limits, max_chars=max_prompt_chars, max_model_len=model.max_model_len
        )
        self.max_prompt_chars = max_prompt_chars
        """A longer text can't fit the context, whatever its tokens."""

    def check(self, given: GenerateInput) -> Checked:
        """Return the checked call; raises InvalidRequest or ModelNotFound that names the field."""
        self._check_model(given.model)
        refuse_unserved(given.extras)
        values.short_string(given.user, "user", max_chars=self._limits.max_id_chars)
        prompts, chat = self._sources(given)
        _check_special_tokens(given.extras, is_chat=chat is not None)
        num_choices = self._num_choices(given, num_prompts=max(1, len(prompts)))
        is_echoed = values.boolean(given.echo, "echo")
        if is_echoed and chat is not None:
            raise InvalidRequest("echo is for prompts, not for a chat", field="echo")
        max_tokens, max_tokens_field = _max_tokens(given, is_echoed=is_echoed)
        return Checked(
            prompts=prompts,
            chat=chat,
            num_choices=num_choices,
            max_tokens=max_tokens,
            max_tokens_field=max_tokens_field,
            params=self._params(given, is_chat=chat is not None, is_echoed=is_echoed),
            has_seed=given.seed is not None,
            is_echoed=is_echoed,
            expected_tokens=values.integer(given.expected_tokens, "expected_tokens", low=1),
            priority=_priority(given.priority),
            timeout_s=self._timeout(given.timeout_s, given.call_remaining_s),
            wants_timeline=values.boolean(given.timeline, "timeline"),
            client_request_id=self.client_request_id(given.client_request_id),
        )

    def check_text(self, given: TokenizeInput) -> CheckedText:
        """Return what is to be tokenised; raises as ``check`` does."""
        self._check_model(given.model)
        refuse_unserved(given.extras)
        if (given.prompt is None) == (given.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        with_special = given.add_special_tokens
        has_special_tokens = with_special is None or values.boolean(
            with_special, "add_special_tokens"
        )
        source: str | Chat
        if given.messages is not None:
            if with_special:
                name = "add_special_tokens"
                raise InvalidRequest(f"{name} is for a prompt, not for a chat", field=name)
            source = self._messages.chat(given.messages, given.tools, None)
        else:
            source = self._prompts.text(given.prompt, "prompt")
        return CheckedText(source=source, has_special_tokens=has_special_tokens)

    def check_tokens(self, model: object, tokens: object) -> tuple[int, ...]:
        """Return ids to be turned into text."""
        self._check_model(model)
        if tokens is None:
            raise InvalidRequest("tokens is missing", field="tokens")
        size, high = self._model.vocab_size, self._model.max_model_len
        return values.token_ids(tokens, "tokens", vocab_size=size, max_ids=high)

    def client_request_id(self, value: object) -> str:
        """Return the id that a client gave its call; empty where it gave none."""
        field = "client_request_id"
        checked = values.short_string(value, field, max_chars=self._limits.max_id_chars) or ""
        if not checked.isascii() or not checked.isprintable():
            raise InvalidRequest(f"{field} must be printable ASCII", field=field)
        return checked

    def _check_model(self, model: object) -> None:
        if model is None or model == "":
            return
        if not isinstance(model, str):
            raise InvalidRequest("model must be a string", field="model")
        if model != self._model.name:
            shown = ascii(model[:_MAX_MODEL_CHARS])
            reason = f"the model {shown} does not exist; this is {self._model.name!r}"
            raise ModelNotFound(reason, field="model")

    def _sources(self, given: GenerateInput) -> tuple[tuple[Prompt, ...], Chat | None]:
        if given.messages is not None and given.prompt is None:
            return (), self._messages.chat(given.messages, given.tools, given.tool_choice)
        if given.prompt is None or given.messages is not None:
            raise InvalidRequest("prompt is missing, or stands beside messages", field="prompt")
        for name in ("tools", "tool_choice"):
            if getattr(given, name) not in (None, [], "none", "auto"):
                raise InvalidRequest(f"{name} is for a chat, not for a prompt", field=name)
        return self._prompts.prompts(given.prompt), None

    def _num_choices(self, given: GenerateInput, *, num_prompts: int) -> int:
        num_choices = values.integer(given.n, "n", low=1, high=self._limits.max_n)
        if num_choices is None:
            num_choices = 1
        if num_choices * num_prompts > self._limits.max_choices:
            raise InvalidRequest(
                f"n times the number of prompts is {self._limits.max_choices} at most", field="n"
            )
        best_of = given.extras.get("best_of")
        if best_of is not None and (isinstance(best_of, bool) or best_of != num_choices):
            raise InvalidRequest("best_of is not supported", field="best_of")
        return num_choices

    def _params(self, given: GenerateInput, *, is_chat: bool, is_echoed: bool) -> SamplingParams:
        top_k = values.integer(given.top_k, "top_k", low=-1)
        size, limits = self._model.vocab_size, self._limits
        temperature = values.number(given.temperature, "temperature", low=0.0, high=2.0)
        seed = values.integer(given.seed, "seed", low=values.INT64[0])
        num_logprobs = self._num_logprobs(given, is_chat=is_chat)
        return SamplingParams(
            max_tokens=0,
            temperature=1.0 if temperature is None else _no_tiny(temperature),
            top_p=_top_p(given.top_p),
            # At or above the vocabulary's size there is nothing to cut off.
            top_k=0 if top_k is None or not 0 < top_k < size else top_k,
            min_p=values.number(given.min_p, "min_p", low=0.0, high=1.0) or 0.0,
            seed=0 if seed is None else seed % _SEEDS,
            stop=self._stops(given.stop),
            stop_token_ids=values.token_ids(
                given.stop_token_ids,
                "stop_token_ids",
                vocab_size=size,
                max_ids=limits.max_stop_token_ids,
            ),
            ignore_eos=values.boolean(given.ignore_eos, "ignore_eos"),
            min_tokens=values.integer(given.min_tokens, "min_tokens", low=0) or 0,
            presence_penalty=_penalty(given.presence_penalty, "presence_penalty"),
            frequency_penalty=_penalty(given.frequency_penalty, "frequency_penalty"),
            repetition_penalty=_repetition_penalty(given.repetition_penalty),
            logit_bias=values.logit_bias(
                given.logit_bias, vocab_size=size, max_entries=limits.max_logit_bias
            ),
            num_logprobs=num_logprobs,
            prompt_logprobs=is_echoed and num_logprobs is not None,
        )

    def _num_logprobs(self, given: GenerateInput, *, is_chat: bool) -> int | None:
        top = values.integer(
            given.top_logprobs, "top_logprobs", low=0, high=self._limits.max_logprobs
        )
        if is_chat:
            if values.boolean(given.logprobs, "logprobs"):
                return top or 0
            if top is not None:
                raise InvalidRequest("top_logprobs needs logprobs", field="top_logprobs")
            return None
        if top is not None:
            raise InvalidRequest(
                "top_logprobs is for a chat; a prompt takes logprobs", field="top_logprobs"
            )
        if given.logprobs is False:  # what a client sends that knows chats only
            return None
        high = min(MAX_PROMPT_LOGPROBS, self._limits.max_logprobs)
        return values.integer(given.logprobs, "logprobs", low=0, high=high)

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
            values.encodable(stop, "stop")
        return tuple(stops)

    def _timeout(self, value: object, call_remaining_s: float | None) -> float:
        timeout_s = values.number(value, "timeout_s", low=0.0, high=self._limits.max_deadline_s)
        if timeout_s == 0:
            raise InvalidRequest("timeout_s must be above 0", field="timeout_s")
        if timeout_s is None:
            timeout_s = self._limits.default_deadline_s
        return timeout_s if call_remaining_s is None else min(timeout_s, call_remaining_s)


def _max_tokens(given: GenerateInput, *, is_echoed: bool) -> tuple[int | None, str]:
    """Return the limit and the client's name for it; two that differ are a mistake."""
    low = 0 if is_echoed else 1
    limits = {
        name: values.integer(getattr(given, name), name, low=low)
        for name in ("max_tokens", "max_completion_tokens")
    }
    old, new = limits["max_tokens"], limits["max_completion_tokens"]
    if new is None:
        return old, "max_tokens"
    if old is not None and old != new:
        name = "max_completion_tokens"
        raise InvalidRequest(f"max_tokens and {name} differ", field=name)
    return new, "max_completion_tokens"


def _priority(value: object) -> str:
    """Return the tier that was asked for, which may not exist; "" where it is the usual one."""
    if value is None or (type(value) is int and value == 0):
        return ""
    if not isinstance(value, str):
        raise InvalidRequest("priority must be the name of a tier, or 0", field="priority")
    return "" if value == "default" else value


def _check_special_tokens(extras: Mapping[str, object], *, is_chat: bool) -> None:
    """Refuse what is not done: a prompt gets the model's own, a chat those of its template."""
    name = "add_special_tokens"
    if extras.get(name) not in (None, not is_chat):
        raise InvalidRequest(f"{name} is not supported with this value", field=name)


def _top_p(value: object) -> float:
    top_p = values.number(value, "top_p", low=0.0, high=1.0)
    if top_p == 0:
        raise InvalidRequest("top_p must be above 0", field="top_p")
    return 1.0 if top_p is None else top_p


def _penalty(value: object, field: str) -> float:
    return values.number(value, field, low=-2.0, high=2.0) or 0.0


def _repetition_penalty(value: object) -> float:
    # Logits are divided by it: near 0 they would overflow.
    penalty = values.number(value, "repetition_penalty", low=0.1, high=2.0)
    return 1.0 if penalty is None else penalty


def _no_tiny(temperature: float) -> float:
    return 0.0 if math.fabs(temperature) < _GREEDY_BELOW else temperature
