"""From a checked call to requests: tokenised, measured against the cluster, named, seeded.

Tokenising runs in a thread of its own; everything else here is arithmetic.
"""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.errors import InvalidRequest
from cluster.request import Request, SamplingParams
from router.calls import CallPlan, CallPrompt, Shows
from router.events import Accepted
from router.stream_text import ChoiceText, Detokenizer
from router.text import Encoded

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from cluster.clock import Clock
    from cluster.control.capacity import Capacity
    from cluster.policy.tiers import Tiers
    from router.checked import Checked, CheckedText
    from router.events import Counter
    from router.given import Caller
    from router.prompts import Prompt
    from router.text import TextCodec

    T = TypeVar("T")

_SEED_BITS = 64


class Intake:
    """Makes plans of checked calls."""

    def __init__(
        self,
        codec: TextCodec,
        capacity: Capacity,
        clock: Clock,
        *,
        max_prompt_chars: int,
        tiers: Tiers,
    ) -> None:
        self._codec = codec
        self._capacity = capacity
        self._clock = clock
        self._tiers = tiers
        # A template adds to each turn; what it adds counts as well.
        self._max_chat_chars = 2 * max_prompt_chars
        # Tokenising releases the interpreter lock; one thread keeps order and bounds the work.
        self._tokenising = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    def close(self) -> None:
        """Tokenise no more; idempotent."""
        self._tokenising.shutdown(wait=False, cancel_futures=True)

    async def plan(self, checked: Checked, caller: Caller, accepted: float) -> CallPlan:
        """Return a call that can be started; raises InvalidRequest where it can't fit, or asks for
        a tier that it may not have."""
        priority = self._tiers.allowed(
            checked.priority, default=caller.tier, ceiling=caller.ceiling
        )
        prompts = await self._prompts(checked)
        params = [self._params(checked, len(prompt.ids)) for prompt in prompts]
        request_id = secrets.token_hex(16)
        deadline = accepted + checked.timeout_s

        def accept(index: int, counter: Counter, cached_on: str) -> Accepted:
            number, choice = divmod(index, checked.num_choices)
            # The first choice tells a prompt's logprobs for all: the others may have it cached.
            asks = params[number].prompt_logprobs and choice == 0
            request = Request(
                request_id=f"{request_id}-{index}" if index else request_id,
                prompt_ids=prompts[number].ids,
                params=replace(params[number], prompt_logprobs=asks),
                deadline=deadline,
                choice=choice,
                tenant=caller.tenant,
                expected_tokens=checked.expected_tokens,
                priority=priority,
            )
            return Accepted(
                request=request,
                accepted=accepted,
                text=self._text(request.params),
                wants_timeline=checked.wants_timeline,
                counter=counter,
                cached_on=cached_on,
            )

        return CallPlan(
            request_id=request_id,
            client_request_id=checked.client_request_id,
            caller=caller,
            prompts=prompts,
            num_choices=checked.num_choices,
            shows=Shows(
                timeline=checked.wants_timeline,
                logprobs=checked.params.num_logprobs is not None,
                echo=checked.is_echoed,
            ),
            remaining_s=deadline - self._clock.now(),
            accepted=accept,
        )

    async def tokenise(self, checked: CheckedText) -> tuple[int, ...]:
        """Return the ids of a text or a chat."""

        def encode() -> tuple[int, ...]:
            if isinstance(checked.source, str):
                has_special_tokens = checked.has_special_tokens
                return self._codec.encode(checked.source, has_special_tokens=has_special_tokens).ids
            return self._codec.encode_chat(checked.source, max_chars=self._max_chat_chars)

        return await self._off_loop(encode)

    async def detokenise(self, ids: tuple[int, ...]) -> str:
        """Return the text of ids."""
        return await self._off_loop(lambda: self._codec.decode(ids))

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenising, work)

    async def _prompts(self, checked: Checked) -> tuple[CallPrompt, ...]:
        if checked.chat is None and not checked.is_echoed:
            ids = [prompt for prompt in checked.prompts if not isinstance(prompt, str)]
            if len(ids) == len(checked.prompts):
                return tuple(CallPrompt(ids=prompt) for prompt in ids)
        return await self._off_loop(lambda: self._encode(checked))

    def _encode(self, checked: Checked) -> tuple[CallPrompt, ...]:
        if checked.chat is not None:
            ids = self._codec.encode_chat(checked.chat, max_chars=self._max_chat_chars)
            return (CallPrompt(ids=ids),)
        return tuple(self._prompt(prompt, checked) for prompt in checked.prompts)

    def _prompt(self, prompt: Prompt, checked: Checked) -> CallPrompt:
        encoded = self._codec.encode(prompt) if isinstance(prompt, str) else Encoded(prompt, ())
        if not checked.is_echoed:
            return CallPrompt(ids=encoded.ids)
        if isinstance(prompt, str):
            return CallPrompt(ids=encoded.ids, text=prompt, offsets=encoded.offsets)
        detokenizer = Detokenizer(self._codec.decode, self._codec.hidden_ids)
        text, offsets = "", []
        for token_id in encoded.ids:
            offsets.append(len(text))
            text += detokenizer.push(token_id)
        return CallPrompt(ids=encoded.ids, text=text + detokenizer.flush(), offsets=tuple(offsets))

    def _text(self, params: SamplingParams) -> ChoiceText:
        detokenizer = Detokenizer(self._codec.decode, self._codec.hidden_ids)
        return ChoiceText(detokenizer, params.stop, min_tokens=params.min_tokens)

    def _params(self, checked: Checked, num_prompt_tokens: int) -> SamplingParams:
        seed = checked.params.seed if checked.has_seed else secrets.randbits(_SEED_BITS)
        max_tokens = self._max_tokens(checked, num_prompt_tokens)
        if checked.params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {checked.params.min_tokens}, but {max_tokens} can come at most",
                field="min_tokens",
            )
        return replace(checked.params, max_tokens=max_tokens, seed=seed)

    def _max_tokens(self, checked: Checked, num_prompt_tokens: int) -> int:
        """Return the output tokens to make; raises InvalidRequest where they can't fit."""
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", field=checked.prompt_field)
        room = self._capacity.max_output_tokens(num_prompt_tokens)
        if room == 0:
            raise InvalidRequest(
                f"the prompt has {num_prompt_tokens} tokens; with one to generate, the context "
                f"holds {self._capacity.max_prompt_tokens}",
                field=checked.prompt_field,
            )
        if checked.max_tokens is None:
            return room
        if checked.max_tokens > room:
            raise InvalidRequest(
                f"{checked.max_tokens_field} is {checked.max_tokens}, but {num_prompt_tokens} "
                f"prompt tokens leave room for {room}",
                field=checked.max_tokens_field,
            )
        return checked.max_tokens
