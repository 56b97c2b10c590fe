"""Calls whose every value is legal; nothing is tokenised yet."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.request import SamplingParams
from router.messages import Chat
from router.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A call whose every value is legal; its prompts are not tokenised yet."""

    prompts: tuple[Prompt, ...]
    """Empty for a chat."""
    chat: Chat | None
    num_choices: int
    """Of each prompt."""
    max_tokens: int | None
    """None fills the context; 0, with ``echo`` only, scores the prompt and generates nothing."""
    max_tokens_field: str
    params: SamplingParams
    """All but ``max_tokens`` and, where the client gave none, the seed."""
    has_seed: bool
    is_echoed: bool
    expected_tokens: int | None
    priority: str
    """Name of a tier, which may not exist; empty: the caller's usual one."""
    timeout_s: float
    wants_timeline: bool
    client_request_id: str

    @property
    def prompt_field(self) -> str:
        """The client's name of what was given."""
        return "messages" if self.chat is not None else "prompt"

    @property
    def num_chars(self) -> int:
        """Characters of all texts, to be tokenised."""
        if self.chat is not None:
            return sum(turn.num_chars for turn in self.chat.messages)
        return sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str))

    @property
    def num_all_choices(self) -> int:
        """Choices of all prompts together."""
        return max(1, len(self.prompts)) * self.num_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedText:
    """A text or chat to be tokenised."""

    source: str | Chat
    has_special_tokens: bool
