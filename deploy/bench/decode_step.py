"""``decode-step``: one step of eight decoding sequences, ours against transformers.

Each sequence has 512 tokens in the cache when a run begins, on one core with one thread, in bf16.
A run is a dozen steps of each engine in turn and counts their median. The rate is sequences by
seconds of a step.
"""

from __future__ import annotations

import random
import statistics
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.config import Dtype
from deploy.bench.pinned import PinnedChild
from deploy.bench.report import Bar, Row, Run, row_of
from deploy.bench.site import prompt_ids

if TYPE_CHECKING:
    from deploy.bench.site import Site

NAME = "decode-step"
_BAR_SDPA = Bar(subject="ratio", relation=">=", limit=2.0)
_BAR_BETTER = Bar(subject="ratio", relation=">=", limit=1.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStepSize:
    """How much is measured; the default is what the bars speak of."""

    num_seqs: int = 8
    context: int = 512
    num_steps: int = 12
    num_runs: int = 5
    dtype: Dtype = Dtype.BF16


def measure(site: Site, size: DecodeStepSize | None = None) -> list[Row]:
    """Return the rows against sdpa, and against the better of sdpa and eager."""
    size = size or DecodeStepSize()
    arguments = {
        "folder": str(site.folder),
        "dtype": size.dtype.value,
        "num_seqs": size.num_seqs,
        "num_steps": size.num_steps,
        "prompt_ids": prompt_ids(size.context, random.Random(0)),
    }
    against_sdpa, against_better = [], []
    with (
        closing(site.progress(NAME, size.num_runs + 1, "run")) as bar,
        PinnedChild("deploy.bench.engines", site.core, arguments) as child,
    ):
        child.ask(do="fill")
        child.ask(do="decode")  # first calls cost more
        bar.update()
        for _ in range(size.num_runs):
            seconds = child.ask(do="decode")
            rate = {
                name: size.num_seqs / statistics.median(steps) for name, steps in seconds.items()
            }
            against_sdpa.append(Run(rate["ours"], rate["sdpa"]))
            against_better.append(Run(rate["ours"], max(rate["sdpa"], rate["eager"])))
            bar.update()
    shape = f"{size.num_seqs} sequences at context {size.context}, one core, {size.dtype.value}"
    return [
        row_of(NAME, f"{shape}, vs sdpa", "tok/s", against_sdpa, _BAR_SDPA),
        row_of(NAME, f"{shape}, vs better of sdpa, eager", "tok/s", against_better, _BAR_BETTER),
    ]
