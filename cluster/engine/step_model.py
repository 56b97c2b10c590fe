"""How fast this worker steps, learnt from the steps it made."""

from __future__ import annotations

_DECAY = 0.98
"""Weight that a step keeps with every later one: about the last 50 steps count,"""
_MEMORY_S = 3.0
"""or those of so many seconds, where that is fewer: what steps take is soon known of slow ones."""
_SLOWEST = 10.0
"""Times its prediction, a step counts at most, unless the one before took longer too: a worker
that was stopped for half a minute is not slow afterwards, and would get no work to show it."""


class StepModel:
    """Predicts the seconds of a step from its sequences and prompt tokens.

    Steps of decodes only fit ``base + per_seq * num_decodes`` by least squares with exponential
    forgetting. What a step with prompt tokens takes beyond that is the prompt's share, kept as
    seconds per token. All three are what they were made with until a step told otherwise, and
    never negative.
    """

    def __init__(
        self, base_s: float = 0.0, per_seq_s: float = 0.0, prefill_per_token_s: float = 0.0
    ) -> None:
        self.base_s = base_s
        """Seconds of a decode step, whatever its size."""
        self.per_seq_s = per_seq_s
        """Seconds that each decoding sequence adds."""
        self.prefill_per_token_s = prefill_per_token_s
        """Seconds that each prompt token adds."""
        # Weighted sums over decode steps: weight, n, n*n, t, n*t. Over prompts: tokens, seconds.
        self._w = self._n = self._nn = self._t = self._nt = 0.0
        self._prompt_tokens = self._prompt_s = 0.0
        # Whether the last step with prompt tokens took too long, and the last without.
        self._was_odd = {True: False, False: False}
        self._before_s = 0.0
        """What the last decode step took."""

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from one step; one in which the process stood still counts as a slow one."""
        took_s, seconds = seconds, self._believed(num_decodes, num_prefill_tokens, seconds)
        if num_prefill_tokens:
            decode_s = self.predict(num_decodes, 0) if num_decodes else 0.0
            self._prompt_tokens = self._prompt_tokens * _DECAY + num_prefill_tokens
            self._prompt_s = self._prompt_s * _DECAY + max(0.0, seconds - decode_s)
            self.prefill_per_token_s = self._prompt_s / self._prompt_tokens
        elif num_decodes:
            keep = self._kept(took_s)
            self._w = self._w * keep + 1.0
            self._n = self._n * keep + num_decodes
            self._nn = self._nn * keep + num_decodes * num_decodes
            self._t = self._t * keep + seconds
            self._nt = self._nt * keep + num_decodes * seconds
            self._fit()

    def predict(self, num_decodes: int, num_prefill_tokens: int) -> float:
        """Return the expected seconds of such a step."""
        decode_s = self.base_s + self.per_seq_s * num_decodes if num_decodes else 0.0
        return decode_s + self.prefill_per_token_s * num_prefill_tokens

    def _believed(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> float:
        """Return what a step counts as."""
        most_s = _SLOWEST * self.predict(num_decodes, num_prefill_tokens)
        kind = num_prefill_tokens > 0
        was_odd, self._was_odd[kind] = self._was_odd[kind], 0.0 < most_s < seconds
        return most_s if self._was_odd[kind] and not was_odd else seconds

    def _kept(self, took_s: float) -> float:
        """Return what past decode steps keep of their weight after one that took so long."""
        # Two in a row say what steps take now: a single slow one must not end the past.
        pace_s, self._before_s = min(took_s, self._before_s), took_s
        if not self._w or not pace_s:
            return _DECAY
        return min(_DECAY, _MEMORY_S / pace_s / self._w)

    def _fit(self) -> None:
        mean_n, mean_t = self._n / self._w, self._t / self._w
        spread = self._nn / self._w - mean_n * mean_n
        if spread > 0.05:
            slope = (self._nt / self._w - mean_n * mean_t) / spread
            # A slope above the mean would make the base negative.
            self.per_seq_s = min(max(0.0, slope), mean_t / mean_n)
        else:
            # All steps of one size say nothing about the slope: keep it, follow the level.
            self.per_seq_s = min(self.per_seq_s, mean_t / mean_n)
        self.base_s = max(0.0, mean_t - self.per_seq_s * mean_n)
