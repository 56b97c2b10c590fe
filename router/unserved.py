"""Fields that are refused by name: they would change the answer, or have no business here.

Every other unknown field is ignored, as clients send many that mean nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop_regex": ([],),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "structural_tag": (),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_token_strs": (False,),
    "return_hidden_states": (False,),
    "truncate_prompt_tokens": (),
}
"""What is not served, with the values that ask for nothing."""

_INTERNAL = (
    "prompt_embeds", "input_embeds", "logits_processors", "custom_logit_processor",
    "kv_transfer_params", "disagg_prefill_resp", "disaggregated_params", "disagg_request_id",
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank",
    "target_worker", "worker_id", "prefill_worker", "decode_worker", "engine_id",
    "remote_engine_id", "remote_block_ids", "remote_host", "remote_port",
    "handoff_id", "grant_id", "output_ids", "lora_path", "cache_salt",
)  # fmt: skip
"""Tensors, code, and what the parts of a cluster tell one another: never taken from a client."""


def refuse_unserved(extras: Mapping[str, object]) -> None:
    """Raise InvalidRequest for a field that is not served with its value."""
    for name in _INTERNAL:
        if extras.get(name) is not None:
            raise InvalidRequest(f"{name} is not taken from clients", field=name)
    for name in extras.keys() & _NEUTRAL.keys():
        value = extras[name]
        if value is None or any(_is_same(value, neutral) for neutral in _NEUTRAL[name]):
            continue
        raise InvalidRequest(f"{name} is not supported with this value", field=name)


def _is_same(value: object, neutral: object) -> bool:
    # 0 == False in Python, but a number asks for something and false does not.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
