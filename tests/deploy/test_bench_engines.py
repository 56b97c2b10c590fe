"""Both engines of the one-core benchmarks, on a tiny model in a real child."""

import os

import pytest

from cluster.config import Dtype
from deploy.bench import decode_step, prefill
from tests.deploy.bench_doors import make_site
from tests.factories_model import write_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
def test_decode_step_measures_ours_and_both_references(tiny):
    size = decode_step.DecodeStepSize(
        num_seqs=2, context=40, num_steps=2, num_runs=3, dtype=Dtype.FP32
    )

    rows = decode_step.measure(make_site(tiny, max(os.sched_getaffinity(0))), size)

    assert [row.name for row in rows] == ["decode-step"] * 2
    assert [str(row.bar) for row in rows] == ["ratio >= 2", "ratio >= 1.4"]
    assert rows[0].value == rows[1].value > 0
    # The better of two references is no slower than one of them.
    assert rows[1].reference >= rows[0].reference > 0


def test_prefill_is_tokens_by_second_without_the_first_calls(monkeypatch, tmp_path):
    class Child:
        """Its first calls are slow, as real ones are."""

        def __init__(self, *_arguments: object) -> None:
            self._slow = iter([9.0])

        def __enter__(self) -> "Child":
            return self

        def __exit__(self, *_error: object) -> None: ...

        def ask(self, **_message: str) -> dict[str, float]:
            seconds = next(self._slow, 0.5)
            return {"ours": seconds, "sdpa": 2 * seconds}

    monkeypatch.setattr(prefill, "PinnedChild", Child)

    (row,) = prefill.measure(make_site(tmp_path))

    assert (row.name, row.unit, str(row.bar)) == ("prefill", "tok/s", "ratio >= 0.97")
    assert (row.value, row.reference, row.ratio) == (1024.0, 512.0, 2.0)
    assert row.holds is True
