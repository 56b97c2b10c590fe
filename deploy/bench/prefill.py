"""``prefill``: one prompt of 512 tokens up to its first token, ours against transformers.

One core, one thread, bf16, the whole prompt in one step; both keep the KV. A run is one prompt by
each engine.
"""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import Dtype
from deploy.bench.pinned import PinnedChild
from deploy.bench.report import Bar, Row, Run, row_of
from deploy.bench.site import prompt_ids

if TYPE_CHECKING:
    from deploy.bench.site import Site

NAME = "prefill"
_BAR = Bar(subject="ratio", relation=">=", limit=0.97)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSize:
    """How much is measured; the default is what the bar speaks of."""

    num_tokens: int = 512
    num_runs: int = 7
    dtype: Dtype = Dtype.BF16


def measure(site: Site, size: PrefillSize | None = None) -> list[Row]:
    """Return the one row: tokens by second."""
    size = size or PrefillSize()
    arguments = {
        "folder": str(site.folder),
        "dtype": size.dtype.value,
        "num_seqs": 1,
        "num_steps": 1,
        "prompt_ids": prompt_ids(size.num_tokens, random.Random(0)),
    }
    runs = []
    with (
        closing(site.progress(NAME, size.num_runs + 1, "run")) as bar,
        PinnedChild("deploy.bench.engines", site.core, arguments) as child,
    ):
        child.ask(do="prefill")  # first calls cost more
        bar.update()
        for _ in range(size.num_runs):
            seconds = child.ask(do="prefill")
            runs.append(Run(size.num_tokens / seconds["ours"], size.num_tokens / seconds["sdpa"]))
            bar.update()
    what = f"{size.num_tokens} tokens, one core, {size.dtype.value}, vs sdpa"
    return [row_of(NAME, what, "tok/s", runs, _BAR)]
