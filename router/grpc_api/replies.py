"""A call's events as messages: one for each event, or all choices in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.wire import public_v1_pb2 as pb
from router.events import Delta, Finish
from router.logprobs import ChoiceLogprobs, prompt_entries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.lifetime import LegTimes, Timeline
    from router.calls import Call, Event
    from router.logprobs import LogprobEntry
    from router.text import TextCodec
    from router.token_text import TokenTexts


class Replies:
    """Makes the messages of one call."""

    def __init__(self, call: Call, codec: TextCodec) -> None:
        self._call = call
        self._tokens = codec.tokens
        self._open: set[int] = set()
        self._num_output_tokens: dict[int, int] = {}
        self._logprobs = {
            index: ChoiceLogprobs(codec, offset=self._text_offset(index))
            for index in range(call.num_all_choices)
            if call.shows.logprobs
        }

    @property
    def is_whole(self) -> bool:
        """Whether every choice is over."""
        return len(self._num_output_tokens) == self._call.num_all_choices

    def message(self, event: Event) -> pb.GenerateResponse:
        """Return the message of an event."""
        call, index = self._call, event.index
        message = pb.GenerateResponse(request_id=call.request_id, index=index, text=event.text)
        if index not in self._open:
            self._open.add(index)
            if call.shows.echo:
                message.echo.CopyFrom(self._echo(index))
        logprobs = self._logprobs.get(index)
        if isinstance(event, Delta):
            message.token_ids.extend(event.token_ids)
            entries = logprobs.take(event) if logprobs is not None else []
        else:
            entries = logprobs.finish(event) if logprobs is not None else []
            self._end(message, event)
        message.logprobs.extend(token_logprobs(entries, self._tokens))
        return message

    def usage(self) -> pb.Usage:
        """Return the tokens of the whole call."""
        prompt, output = self._call.num_prompt_tokens, sum(self._num_output_tokens.values())
        return pb.Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            cached_tokens=self._call.num_cached_tokens,
        )

    def _end(self, message: pb.GenerateResponse, finish: Finish) -> None:
        self._num_output_tokens[finish.index] = finish.num_output_tokens
        message.finish_reason = finish.finish_reason.value
        message.num_resumed = finish.num_resumed
        if self._call.shows.timeline:
            message.timeline.CopyFrom(_timeline(finish.timeline))
        if self.is_whole:
            message.usage.CopyFrom(self.usage())

    def _echo(self, index: int) -> pb.Echo:
        prompt = self._call.prompt_of(index)
        entries = prompt_entries(prompt) if self._call.shows.logprobs else []
        logprobs = token_logprobs(entries, self._tokens)
        return pb.Echo(text=prompt.text, token_ids=prompt.ids, logprobs=logprobs)

    def _text_offset(self, index: int) -> int:
        return len(self._call.prompt_of(index).text) if self._call.shows.echo else 0


class Whole:
    """Gathers messages into one choice each."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [pb.Choice(index=index) for index in range(num_choices)]
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]

    def add(self, message: pb.GenerateResponse) -> None:
        """Add a message to its choice."""
        choice = self.choices[message.index]
        self._texts[message.index].append(message.text)
        choice.token_ids.extend(message.token_ids)
        choice.logprobs.extend(message.logprobs)
        if message.HasField("echo"):
            choice.echo.CopyFrom(message.echo)
        if message.finish_reason:
            choice.finish_reason = message.finish_reason
            choice.num_resumed = message.num_resumed
            choice.text = "".join(self._texts[message.index])
            if message.HasField("timeline"):
                choice.timeline.CopyFrom(message.timeline)


def token_logprobs(entries: Sequence[LogprobEntry], tokens: TokenTexts) -> list[pb.TokenLogprobs]:
    """Return logprob entries as messages."""
    return [
        pb.TokenLogprobs(
            token_id=entry.token_id,
            token=tokens.text_of(entry.token_id),
            token_bytes=tokens.bytes_of(entry.token_id),
            logprob=entry.logprob,
            text_offset=entry.offset,
            top=[
                pb.TopLogprob(
                    token_id=other.token_id,
                    token=tokens.text_of(other.token_id),
                    token_bytes=tokens.bytes_of(other.token_id),
                    logprob=other.logprob,
                )
                for other in entry.top
            ],
        )
        for entry in entries
    ]


def _timeline(timeline: Timeline) -> pb.Timeline:
    return pb.Timeline(
        total_s=timeline.total_s,
        first_token_s=timeline.first_token_s,
        queue_s=timeline.queue_s,
        prefill_worker=timeline.prefill_worker,
        decode_worker=timeline.decode_worker,
        reason=timeline.reason,
        prefill=_leg_times(timeline.prefill),
        decode=_leg_times(timeline.decode),
        num_attempts=timeline.num_attempts,
        num_resumed=timeline.num_resumed,
        num_redirected=timeline.num_redirected,
        num_preemptions=timeline.num_preemptions,
    )


def _leg_times(times: LegTimes) -> pb.LegTimes:
    return pb.LegTimes(
        queue_s=times.queue_s,
        compute_s=times.compute_s,
        reserve_wait_s=times.reserve_wait_s,
        transfer_s=times.transfer_s,
        exposed_s=times.exposed_s,
        transfer_bytes=times.transfer_bytes,
        num_steps=times.num_steps,
        num_computed_tokens=times.num_computed_tokens,
        num_cached_tokens=times.num_cached_tokens,
        num_preemptions=times.num_preemptions,
    )
