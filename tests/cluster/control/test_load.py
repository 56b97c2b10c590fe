"""What scaling is told: sums by pool, of the workers that take work."""

from cluster.config import Role
from cluster.control.facts import BlockCounts
from cluster.control.planner import Planner
from cluster.control.settings import ControlSettings
from cluster.policy.load import PoolLoad
from tests.cluster.control.factory import make_config, make_pool, make_report, make_want
from tests.cluster.control.factory import make_registration as register

PREFILL = make_pool("p", Role.PREFILL, slots=4)
DECODE = make_pool("d", Role.DECODE, slots=2)


def planner_of(*workers, now=100.0):
    """A control plane that has these workers, each a pool, an index and what it reports."""
    planner = Planner(make_config(PREFILL, DECODE), term=1, settings=ControlSettings(), now=now)
    for pool, index, report in workers:
        registration = register(pool, index)
        planner.register(registration, now)
        planner.report(
            registration.worker_id, registration.incarnation,
            make_report(registration, **report), now,
        )  # fmt: skip
    return planner


def test_sums_are_by_pool():
    half = BlockCounts(free=24, held=30, cached=10)
    load = planner_of(
        (PREFILL, 0, {"queued_tokens": 50, "counters": {"prefilled_tokens": 700.0}}),
        (PREFILL, 1, {"queued_tokens": 20, "counters": {"prefilled_tokens": 300.0}}),
        (DECODE, 0, {"num_running": 2, "num_waiting": 1, "blocks": half}),
    ).load()
    assert (load.pool("p").num_workers, load.pool("d").num_workers) == (2, 1)
    assert load.pool("p").queued_tokens == 70
    assert load.pool("d").num_sequences == 3
    assert load.pool("d").held_tokens == 30 * DECODE.block_size
    assert abs(load.pool("d").step_base_s - 0.01) < 1e-9
    assert abs(load.pool("d").step_per_seq_s - 0.001) < 1e-9
    assert load.pool("nobody") == PoolLoad()


def test_what_is_granted_is_coming_and_what_has_no_worker_waits():
    """Two slots: the third request waits for one, and of the other two one prompt is behind."""
    planner = planner_of((PREFILL, 0, {}), (DECODE, 0, {}))
    for index in range(3):
        planner.want("router", make_want(f"r{index}", num_prompt_tokens=40), 100.0)
    load = planner.load()
    assert (load.num_waiting, load.waiting_tokens) == (1, 40)
    assert (load.pool("p").queued_tokens, load.pool("p").behind_tokens) == (80, 40)
    assert (load.pool("d").num_sequences, load.pool("d").num_coming) == (0, 2)
    assert load.pool("d").held_tokens > 0


def test_a_worker_that_drains_is_no_capacity():
    load = planner_of((DECODE, 0, {"is_draining": True}), (DECODE, 1, {"num_running": 1})).load()
    assert (load.pool("d").num_workers, load.pool("d").num_sequences) == (1, 1)


def test_what_was_computed_counts_once_whoever_comes_and_goes():
    """A worker that comes back with all that it ever computed is no burst of arrivals."""
    planner = planner_of((PREFILL, 0, {"counters": {"prefilled_tokens": 10_000.0}}))
    registration = register(PREFILL, 0)
    who = (registration.worker_id, registration.incarnation)

    def computed(count: float) -> float:
        report = make_report(registration, counters={"prefilled_tokens": count})
        planner.report(*who, report, 101.0)
        return planner.load().pool("p").computed_tokens

    assert planner.load().pool("p").computed_tokens == 0.0
    assert computed(10_300.0) == 300.0
    planner.worker_left(*who, "stopping", 101.0)
    assert planner.load().pool("p").computed_tokens == 300.0
    planner.register(registration, 101.0)
    assert computed(10_400.0) == 300.0
    assert computed(10_450.0) == 350.0
