"""When a running step tells of its layers: in few large parts, and with little left to its end."""

import pytest

from cluster.engine import stored
from cluster.engine.plan import Outcome, Plan, Scheduled, StepEvents
from cluster.engine.sequence import StoredLayers
from cluster.kv.layout import KVLayout
from tests.factories import make_key, make_params

LAYOUT = KVLayout(
    num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bf16", model_fingerprint="m"
)
"""That of the trial model: 23,040 bytes a token."""


def make_share(num_tokens: int, *, request_id: str = "r", is_last: bool = True, watched=True):
    return Scheduled(
        key=make_key(request_id), token_ids=(1,) * num_tokens, start=32,
        block_ids=tuple(range(64)), is_sampled=is_last, output_index=0, params=make_params(),
        stored=StoredLayers() if watched else None,
    )  # fmt: skip


def told_at(share: Scheduled) -> list[int]:
    return sorted(stored.shares_by_layers(Plan((share,)), LAYOUT))


@pytest.mark.parametrize(
    ("num_tokens", "is_last", "expected"),
    [
        (1, True, []),
        (45, True, []),
        (46, True, [29, 30]),
        (512, True, [29, 30]),
        (512, False, []),
        (1024, True, [14, 29, 30]),
        (128, False, []),
        (2048, False, [6, 12, 18, 24]),
    ],
)
def test_parts_are_large_and_the_rest_is_small(num_tokens, is_last, expected):
    """A chunk with others behind it ends with its step: nobody waits for that."""
    assert told_at(make_share(num_tokens, is_last=is_last)) == expected


def test_a_model_of_few_layers_is_told_of_at_most_once_a_layer():
    layout = KVLayout(
        num_layers=2, num_kv_heads=64, head_dim=1024, block_size=16, dtype="fp32",
        model_fingerprint="m",
    )  # fmt: skip
    assert sorted(stored.shares_by_layers(Plan((make_share(4096),)), layout)) == [1, 2]


def test_only_shares_with_a_part_worth_sending_are_told_of():
    long, short = make_share(512), make_share(20, request_id="short")
    mine = make_share(512, request_id="local", watched=False)
    by_layers = stored.shares_by_layers(Plan((long, short, mine)), LAYOUT)
    assert by_layers == dict.fromkeys((29, 30), (long,))


class Runner:
    """Stores two thirds of the layers of all shares that ask."""

    def __init__(self) -> None:
        self.num_watched = 0

    def run(self, plan: Plan, on_stored=None) -> Outcome:
        if on_stored is not None:
            self.num_watched += 1
            on_stored(tuple(share for share in plan.shares if share.stored is not None), 20)
        return Outcome({})


def test_what_is_told_can_be_read_at_that_moment():
    share, other = make_share(512), make_share(512, request_id="other", watched=False)
    heard = []
    stored.run(
        Runner(), Plan((share, other)), lambda events: heard.append((events, share.stored.so_far))
    )
    assert heard == [(StepEvents(stored=(share.key,)), (32 + 512, 20))]


def test_a_step_that_nobody_waits_for_is_not_watched():
    runner, heard = Runner(), []
    stored.run(runner, Plan((make_share(512, watched=False),)), heard.append)
    assert (runner.num_watched, heard) == (0, [])
