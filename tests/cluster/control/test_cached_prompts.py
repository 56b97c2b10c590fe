"""Issue 5: the later choices of a prompt go where the first one was prefilled."""

from dataclasses import replace

import pytest

from cluster.control.planner import Planner
from tests.cluster.control.factory import (
    grants,
    make_config,
    make_registration,
    make_report,
    make_want,
    two_pools,
)
from tests.cluster.control.story import SETTINGS

NUM_PREFILL = 12
"""More than a shortlist holds."""


def planner_of(*, has_cache: bool) -> Planner:
    prefill, decode = (replace(pool, prefix_cache=has_cache) for pool in two_pools(slots=16))
    prefill = replace(prefill, count=NUM_PREFILL)
    planner = Planner(make_config(prefill, decode), term=1, settings=SETTINGS, now=0.0)
    workers = [make_registration(prefill, index) for index in range(NUM_PREFILL)]
    for worker in [*workers, make_registration(decode)]:
        planner.register(worker, 0.0)
        planner.report(worker.worker_id, worker.incarnation, make_report(worker), 0.0)
    return planner


def placed(planner: Planner, request_id: str, cached_on: str = ""):
    want = make_want(request_id, num_prompt_tokens=100, max_tokens=4, cached_on=cached_on)
    (grant,) = grants(planner.want("router", want, 1.0))
    return grant.prefill


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_choice_goes_to_the_cache_that_has_its_prompt(has_cache):
    planner = planner_of(has_cache=has_cache)
    first = placed(planner, "c0")
    others = [placed(planner, f"other{index}") for index in range(3)]
    assert first not in others, "the least recently granted goes first"
    again = placed(planner, "c1", cached_on=first.incarnation)
    assert (again == first) is has_cache
