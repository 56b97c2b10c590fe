"""The proof after a start: one streamed request over HTTP, and where its time went.

Where that was short enough to be computed where it is decoded, a longer one proves the handoff.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from cluster.config import LocalPrefill, Role
from cluster.errors import StartupError
from deploy.client import KEY_VARIABLE, authorization
from deploy.doors import http_client, http_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.config import DeployConfig

QUESTION = "What is the capital of France?"
_TRIAL_ANSWER = "Paris"
_MAX_TOKENS = 48
_LONGER_TOKENS_OUT = 2
"""Of the longer prompt: the second comes from the decode worker."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the proof's request brought."""

    text: str
    finish_reason: str | None
    timeline: dict[str, Any] | None


def prove(config: DeployConfig) -> str:
    """Stream the answer to ``QUESTION`` to the terminal with its timeline; returns the text.

    Raises StartupError where the cluster does not answer as it should: no text, no timeline, no
    handoff between two pools, or a trial model that doesn't know the capital of France.
    """
    sys.stdout.write(f"> {QUESTION}\n")
    answer = _ask(config, _question(), is_shown=True)
    sys.stdout.write("\n\n")
    if answer.timeline is not None:
        sys.stdout.write(f"{timeline_text(answer.timeline)}\n\n")
    sys.stdout.flush()
    lack = what_lacks(config, answer)
    if not lack and _was_local(answer) and _hands_over(config):
        lack = _missing_handoff(config, _ask(config, _longer_prompt(config), is_shown=False))
    if lack:
        raise StartupError(f"the proof failed: {lack}")
    return answer.text


def check_key(config: DeployConfig) -> None:
    """Raise StartupError where the doors need a key and the proof has none to show."""
    if (config.auth.keys_file or config.auth.keys_env) and not authorization():
        raise StartupError(
            f"the deploy file asks for API keys (auth): set {KEY_VARIABLE} to one of them, for the "
            "request that proves the start"
        )


def what_lacks(config: DeployConfig, answer: Answer) -> str:
    """Say what an answer proves to be wrong with the cluster; empty: nothing."""
    if answer.finish_reason is None:
        return "the stream ended without a finish_reason"
    if not answer.text.strip():
        return "the answer has no text"
    if answer.timeline is None:
        return "the stream ended without its timeline"
    if config.model.path == "trial" and _TRIAL_ANSWER not in answer.text:
        return f"the trial model's answer doesn't name {_TRIAL_ANSWER}"
    # The reason of a placement says why a prompt was computed where it is decoded.
    return "" if _was_local(answer) else _missing_handoff(config, answer)


def _was_local(answer: Answer) -> bool:
    timeline = answer.timeline or {}
    return bool(timeline) and timeline["prefill_worker"] == timeline["decode_worker"]


def _missing_handoff(config: DeployConfig, answer: Answer) -> str:
    if any(pool.role is Role.MIXED for pool in config.pools):
        return ""  # a mixed worker may do both halves itself
    timeline = answer.timeline
    if timeline is None:
        return "the stream ended without its timeline"
    if timeline["decode"]["num_steps"] == 0:
        return ""  # the answer was whole with its first token
    if timeline["prefill"]["transfer_bytes"] == 0:
        return "no KV went from the prefill to the decode worker"
    return ""


def _question() -> dict[str, dict[str, Any]]:
    """Return the question as a chat, and as a plain prompt for a model that knows no chats."""
    options = {"max_tokens": _MAX_TOKENS}
    return {
        "chat/completions": {"messages": [{"role": "user", "content": QUESTION}], **options},
        "completions": {"prompt": QUESTION, **options},
    }


def _hands_over(config: DeployConfig) -> bool:
    """Whether there are prompts that no decode worker computes by itself, and they fit."""
    rule = config.scheduling
    fits = config.model.max_model_len >= _num_longer_tokens(config) + _LONGER_TOKENS_OUT
    return rule.local_prefill is LocalPrefill.AUTO and fits


def _num_longer_tokens(config: DeployConfig) -> int:
    return config.scheduling.local_prefill_tokens + 1


def _longer_prompt(config: DeployConfig) -> dict[str, dict[str, Any]]:
    ids = [1 + number % 50 for number in range(_num_longer_tokens(config))]
    options = {"max_tokens": _LONGER_TOKENS_OUT, "ignore_eos": True}
    return {"completions": {"prompt": ids, **options}}


def _ask(config: DeployConfig, asks: dict[str, dict[str, Any]], *, is_shown: bool) -> Answer:
    text, finish_reason, timeline = "", None, None
    for event in _events(config, asks):
        if "error" in event:
            raise StartupError(f"the proof failed: {event['error']['message']}")
        for choice in event["choices"]:
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            text += piece or ""
            finish_reason = choice["finish_reason"] or finish_reason
            if is_shown:
                sys.stdout.write(piece or "")
                sys.stdout.flush()
        timeline = event.get("pdserve", {}).get("timeline") or timeline
    return Answer(text=text, finish_reason=finish_reason, timeline=timeline)


def _events(config: DeployConfig, asks: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Ask at the first path that the model can answer at."""
    options = {
        "model": config.model.name,
        "temperature": 0,
        "stream": True,
        "timeline": True,
    }
    base, reason = f"{http_url(config)}/v1", ""
    with http_client(config, timeout_s=_TIMEOUT_S, **authorization()) as client:
        for path, ask in asks.items():
            try:
                with client.stream("POST", f"{base}/{path}", json=options | ask) as response:
                    if response.status_code == httpx.codes.OK:
                        yield from _parsed(response)
                        return
                    if response.status_code == httpx.codes.UNAUTHORIZED:
                        raise StartupError(f"the proof failed: {KEY_VARIABLE} is none of the keys")
                    reason = response.read().decode()
            except httpx.HTTPError as error:
                raise StartupError(f"the proof failed: {error!r}") from error
            if "no chat template" not in reason:
                break
    raise StartupError(f"the proof failed: {reason}")


def _parsed(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def timeline_text(timeline: dict[str, Any]) -> str:
    """Return a response's timeline as aligned lines."""
    prefill, decode = timeline["prefill"], timeline["decode"]
    rows = [
        ("placement", f"{timeline['prefill_worker']} -> {timeline['decode_worker']}"),
        ("reason", timeline["reason"]),
        ("queue", _ms(timeline["queue_s"])),
        ("prefill", f"{_ms(prefill['compute_s'])} after {_ms(prefill['queue_s'])} in its queue"),
        ("first token", _ms(timeline["first_token_s"])),
        ("reserve wait", _ms(prefill["reserve_wait_s"])),
        ("transfer", f"{_ms(prefill['transfer_s'])} for {prefill['transfer_bytes']:,} bytes"),
        ("exposed", _ms(prefill["exposed_s"])),
        ("decode", f"{_ms(decode['compute_s'])} in {decode['num_steps']} steps"),
        ("total", _ms(timeline["total_s"])),
    ]
    return "\n".join(f"  {name:<13} {value}" for name, value in rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
