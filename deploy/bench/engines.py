"""The two engines that ``decode-step`` and ``prefill`` compare, in one process on one core.

Ours is the runner of a worker, driven with plans made by hand; the reference is the same model as
``transformers`` runs it by default, over its own growing ``DynamicCache``. Both choose the best
token and feed it to their next step. Every timed step begins with the same number of tokens in
the cache on both sides.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from cluster.config import Dtype
from cluster.engine.plan import Plan, Scheduled
from cluster.engine.runner import ModelRunner
from cluster.kv.cache import TORCH_DTYPES, PagedCache
from cluster.model.loader import load_model
from cluster.request import LegKey, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BLOCK_SIZE = 16
_GREEDY = SamplingParams(max_tokens=1 << 30, temperature=0.0)


class OurEngine:
    """A ``ModelRunner`` with a cache for ``num_seqs`` sequences of ``max_tokens`` each."""

    def __init__(self, folder: Path, *, dtype: Dtype, num_seqs: int, max_tokens: int) -> None:
        loaded = load_model(folder, dtype=dtype, device="cpu")
        layout = loaded.layout(_BLOCK_SIZE)
        self._blocks_each = layout.num_blocks_for(max_tokens)
        self._cache = PagedCache(layout, num_seqs * self._blocks_each, loaded.device)
        self._runner = ModelRunner(loaded, self._cache)
        self._num_seqs = num_seqs

    def prefill(self, prompt_ids: Sequence[int]) -> float:
        """Compute one prompt and its first token as sequence 0; returns seconds."""
        plan = Plan((self._share(0, tuple(prompt_ids), 0),))
        began = time.perf_counter()
        self._runner.run(plan)
        return time.perf_counter() - began

    def fill(self, prompt_ids: Sequence[int]) -> None:
        """Give every sequence the KV of the prompt."""
        self.prefill(prompt_ids)
        layout = self._cache.layout
        num_blocks = layout.num_blocks_for(len(prompt_ids))
        staged = torch.empty(num_blocks * layout.block_bytes, dtype=torch.uint8)
        self._cache.export_blocks(self._table(0)[:num_blocks], staged)
        for index in range(1, self._num_seqs):
            self._cache.import_blocks(self._table(index)[:num_blocks], staged)

    def decode(self, num_computed: int, num_steps: int) -> list[float]:
        """Decode all sequences from ``num_computed`` tokens on; returns seconds of each step."""
        tokens, seconds = dict.fromkeys(range(self._num_seqs), 0), []
        for step in range(num_steps):
            began = time.perf_counter()
            start = num_computed + step
            plan = Plan(tuple(self._share(i, (token,), start) for i, token in tokens.items()))
            sampled = self._runner.run(plan).sampled
            tokens = {key.choice: token for key, token in sampled.items()}
            seconds.append(time.perf_counter() - began)
        return seconds

    def _table(self, index: int) -> tuple[int, ...]:
        first = index * self._blocks_each
        return tuple(range(first, first + self._blocks_each))

    def _share(self, index: int, token_ids: tuple[int, ...], start: int) -> Scheduled:
        num_blocks = self._cache.layout.num_blocks_for(start + len(token_ids))
        return Scheduled(
            key=LegKey("bench", 0, index),
            token_ids=token_ids,
            start=start,
            block_ids=self._table(index)[:num_blocks],
            is_sampled=True,
            output_index=0,
            params=_GREEDY,
        )


class TransformersEngine:
    """The same model as transformers runs it; its attention is sdpa unless another is asked for."""

    def __init__(self, folder: Path, *, dtype: Dtype, num_seqs: int) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=TORCH_DTYPES[dtype.value],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        self._model = model.eval()
        default = self._model.config._attn_implementation
        assert default == "sdpa", f"transformers' default attention is {default}"
        self._num_seqs = num_seqs
        self._cache = DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def prefill(self, prompt_ids: Sequence[int]) -> float:
        """Compute one prompt and its first token into a cache of its own; returns seconds."""
        input_ids = torch.tensor([list(prompt_ids)])
        began = time.perf_counter()
        self._cache = DynamicCache(config=self._model.config)
        self._step(input_ids)
        return time.perf_counter() - began

    @torch.inference_mode()
    def fill(self, prompt_ids: Sequence[int]) -> None:
        """Give every sequence the KV of the prompt."""
        self.prefill(prompt_ids)
        self._cache.batch_repeat_interleave(self._num_seqs)

    @torch.inference_mode()
    def decode(self, num_computed: int, num_steps: int, attention: str) -> list[float]:
        """Decode all sequences from ``num_computed`` tokens on; returns seconds of each step."""
        self._model.set_attn_implementation(attention)
        num_surplus = self._cache.get_seq_length() - num_computed
        if num_surplus:
            self._cache.crop(-num_surplus)  # what an earlier run has added
        tokens, seconds = torch.zeros(self._num_seqs, 1, dtype=torch.long), []
        for _ in range(num_steps):
            began = time.perf_counter()
            tokens = self._step(tokens)
            seconds.append(time.perf_counter() - began)
        return seconds

    def _step(self, input_ids: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=input_ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        best: torch.Tensor = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        best.tolist()  # a server needs the ids on its host in every step, as ours does
        return best


def start(arguments: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Load both engines in this child and return what answers its parent."""
    torch.set_num_threads(1)
    folder, dtype = Path(arguments["folder"]), Dtype(arguments["dtype"])
    prompt_ids: list[int] = arguments["prompt_ids"]
    num_seqs, num_steps = arguments["num_seqs"], arguments["num_steps"]
    length = len(prompt_ids)
    ours = OurEngine(folder, dtype=dtype, num_seqs=num_seqs, max_tokens=length + num_steps)
    theirs = TransformersEngine(folder, dtype=dtype, num_seqs=num_seqs)

    def respond(message: dict[str, Any]) -> Any:
        match message["do"]:
            case "fill":
                ours.fill(prompt_ids)
                theirs.fill(prompt_ids)
                return None
            case "prefill":
                return {"ours": ours.prefill(prompt_ids), "sdpa": theirs.prefill(prompt_ids)}
            case "decode":
                return {
                    "ours": ours.decode(length, num_steps),
                    "sdpa": theirs.decode(length, num_steps, "sdpa"),
                    "eager": theirs.decode(length, num_steps, "eager"),
                }
            case other:
                raise ValueError(other)

    return respond
