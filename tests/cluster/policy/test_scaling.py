"""How many workers each pool should have: loads and time in, targets out."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import Role
from cluster.engine.step_model import StepModel
from cluster.policy.demand import Places
from cluster.policy.load import Load, PoolLoad, from_stats, to_stats
from cluster.policy.scaling import Scaler
from tests.cluster.policy.scaled_cluster import make_config, make_pool

QUIET_S = 60.0


def pair(**prefill):
    """A prefill pool whose worker computes 1000 tokens a second, and one of 16 slots a worker."""
    prefill = {"prefill_tokens_per_s": 1000.0, **prefill}
    return make_pool("p", Role.PREFILL, **prefill), make_pool("d")


class Looks:
    """A scaler that is asked each second, and followed: workers are there at once."""

    def __init__(self, *pools, **scaling):
        self.config = make_config(*pools, **{"quiet_s": QUIET_S, **scaling})
        self.scaler = Scaler(self.config)
        self.targets = {pool.name: pool.min_count for pool in self.config.pools}
        self.now = 100.0
        self.reasons = {}

    def look(self, seconds=1, *, absent=(), **load):
        """Show this load for so long; pools by name, as their ``PoolLoad``'s fields."""
        for _ in range(seconds):
            self.now += 1.0
            pools = {
                name: PoolLoad(
                    **{"num_workers": 0 if name in absent else count, **load.get(name, {})}
                )
                for name, count in self.targets.items()
            }
            rest = {key: value for key, value in load.items() if key not in self.targets}
            decision = self.scaler.decide(Load(pools=pools, **rest), self.targets, self.now)
            self.reasons |= decision.reasons
            self.targets |= decision.targets
        return self.targets


def test_a_load_travels_as_flat_numbers():
    load = Load(pools={"a-1": PoolLoad(num_workers=2, held_tokens=7)}, waiting_tokens=5)
    stats = to_stats(load)
    assert from_stats(stats) == load
    assert all(isinstance(value, float) for value in stats.values())
    assert from_stats({**stats, "running_requests": 3.0, "b.unheard_of": 1.0}) == load


def test_prompts_that_wait_longer_than_the_target_raise_prefill():
    """2000 tokens behind others, 130 more each second: three workers of 1000 a second are 71 % in
    use, two would be over 80 %."""
    looks = Looks(*pair())
    assert looks.look(d={}, p={"queued_tokens": 700, "behind_tokens": 700})["p"] == 1
    assert looks.look(p={"queued_tokens": 2000, "behind_tokens": 2000}) == {"p": 3, "d": 1}
    assert "prefill is asked for" in looks.reasons["p"]
    patient = Looks(*pair(), ttft_target_s=10.0)
    assert patient.look(p={"queued_tokens": 2400, "behind_tokens": 2400})["p"] == 1


def test_a_long_prompt_that_nobody_waits_behind_raises_nothing():
    assert Looks(*pair()).look(5, p={"queued_tokens": 9000, "behind_tokens": 0})["p"] == 1


def test_prompts_that_come_steadily_raise_prefill_though_none_waits():
    looks = Looks(*pair())
    for second in range(30):
        looks.look(p={"computed_tokens": 1700.0 * second})
    assert looks.targets["p"] == 3  # 1700 are 71 % of 3 workers, 85 % of 2


def test_a_worker_that_leaves_takes_no_tokens_back():
    """Its count goes with it, what it computed was asked for nevertheless."""
    looks = Looks(*pair())
    for second in range(12):
        looks.look(p={"computed_tokens": 700.0 * second})
    assert looks.targets["p"] == 1
    for second in range(9):
        looks.look(p={"computed_tokens": 1700.0 * second})
    assert looks.targets["p"] == 2


def test_full_slots_raise_decode():
    looks = Looks(*pair())
    assert looks.look(d={"num_sequences": 12})["d"] == 1
    assert looks.look(d={"num_sequences": 13}) == {"p": 1, "d": 2}


def test_full_blocks_raise_decode_though_slots_are_free():
    """8 sequences of 2048 tokens fill a worker of 16384."""
    looks = Looks(*pair())
    assert looks.look(d={"num_sequences": 7, "held_tokens": 7 * 2048})["d"] == 2


@pytest.mark.parametrize(
    ("shown", "bound"),
    [
        ({"num_sequences": 13}, "d 1 x 16 by slots"),
        ({"num_sequences": 7, "held_tokens": 7 * 2048}, "d 1 x 8 by KV, 2048 tokens each"),
        (
            {"num_sequences": 7, "step_base_s": 0.01, "step_per_seq_s": 0.005},
            "d 1 x 8 by steps of 50 ms",
        ),
    ],
)
def test_a_reason_says_what_bounds_the_workers(shown, bound):
    looks = Looks(*pair(), tpot_target_s=0.05)
    assert looks.look(d=shown)["d"] == 2
    assert looks.reasons["d"].endswith(bound)


def test_a_reason_says_whose_capacity_is_counted_and_how_it_is_known():
    looks = Looks(
        make_pool("new", Role.PREFILL),
        make_pool("told", Role.PREFILL, prefill_tokens_per_s=1000.0),
        make_pool("both", Role.MIXED),
        make_pool("d"),
        ttft_target_s=0.5,
    )
    looks.look(told={"behind_tokens": 9000}, both={"prefill_token_s": 0.001})
    parts = "new 1 x 1000 as others do, told 1 x 1000 as declared, both 1 x 500 as measured"
    assert looks.reasons["new"].endswith(f"18000.0 prompt tokens/s of 2500.0: {parts}")


def test_steps_longer_than_the_target_raise_decode():
    """0.01 s and 0.005 s a sequence: 8 are within 0.05 s, and 7 of them over 80 %."""
    steps = {"step_base_s": 0.01, "step_per_seq_s": 0.005, "num_sequences": 7}
    assert Looks(*pair(), tpot_target_s=0.05).look(d=steps)["d"] == 2
    assert Looks(*pair()).look(d=steps)["d"] == 1
    hopeless = Looks(*pair(), tpot_target_s=0.005)
    assert hopeless.look(d=steps)["d"] == 1, "no number of workers makes a step shorter"


def test_what_workers_have_come_to_show_is_believed_within_three_looks():
    """6 sequences are within 0.05 s now, and 40 were before."""
    looks = Looks(*pair(), tpot_target_s=0.05)
    steps = {"step_base_s": 0.01, "num_sequences": 7}
    assert looks.look(20, d={**steps, "step_per_seq_s": 0.001})["d"] == 1
    assert looks.look(3, d={**steps, "step_per_seq_s": 0.006})["d"] == 2


def test_steps_that_have_become_too_long_raise_decode_within_ten_seconds():
    """Issue 6: a worker learns it by steps of 0.6 s, and was fast before its 3 sequences came."""
    looks, model = Looks(*pair(), tpot_target_s=0.3), StepModel(0.003, 0.0003)
    for num_sequences in (1, 2, 3, 4) * 20:
        model.observe(num_sequences, 0, 0.003 + 0.0003 * num_sequences)
    passed_s = looked_s = 0.0
    for num_sequences in (1, 2, *[3] * 20):
        passed_s += 0.2 * num_sequences
        model.observe(num_sequences, 0, 0.2 * num_sequences)
        while looked_s + 1.0 <= passed_s and looks.targets["d"] == 1:
            shown = {"step_base_s": model.base_s, "step_per_seq_s": model.per_seq_s}
            looks.look(d={**shown, "num_sequences": num_sequences})
            looked_s += 1.0
    assert looks.targets["d"] == 2
    assert looked_s <= 8.0, "reports, readings and Serve need the rest"


def test_decode_is_asked_for_no_more_than_prefill_can_feed():
    """100 requests wait; prompts of 500 tokens come out at 2 a second, and stay for 2 s each."""
    steps = {"step_base_s": 0.02, "step_per_seq_s": 0.0, "num_sequences": 2}
    waiting = {"num_waiting": 100, "waiting_tokens": 50_000, "expected_output_tokens": 100}
    looks = Looks(*pair(max=1))
    assert looks.look(d=steps, **waiting) == {"p": 1, "d": 1}
    looks = Looks(*pair(max=6))
    assert looks.look(d=steps, **waiting) == {"p": 6, "d": 3}, "6 times as many come"


def test_prompts_that_find_no_place_to_decode_in_are_no_load_of_prefill():
    """All 16 slots are taken for 50 s each and no more can be had: prefill is idle, whatever
    waits. Where decode can grow, those it will hold are asked of prefill too."""
    steps = {"step_base_s": 0.5, "num_sequences": 16}
    waiting = {"num_waiting": 40, "waiting_tokens": 80_000, "expected_output_tokens": 100}
    full = Looks(*pair()[:1], make_pool("d", max=1))
    assert full.look(20, d=steps, **waiting) == {"p": 1, "d": 1}
    assert Looks(*pair()).look(d=steps, **waiting) == {"p": 6, "d": 5}
    quick = Looks(*pair()[:1], make_pool("d", max=1))
    one_each = {**waiting, "num_waiting": 2000, "expected_output_tokens": 1}
    assert quick.look(d=steps, **one_each)["p"] == 6, "whoever waits needs none"


def test_places_that_are_free_now_serve_many_short_outputs_one_after_another():
    """16 places, none taken, each free again after 0.02 s: all of 200 that wait find one within the
    target of 1 s, and their 4000 tokens are 80 % of 5 workers."""
    waiting = {"num_waiting": 200, "waiting_tokens": 4000, "expected_output_tokens": 2}
    for num_sequences in (0, 16):
        looks = Looks(*pair()[:1], make_pool("d", max=1), ttft_target_s=1.0)
        steps = {"step_base_s": 0.02, "num_sequences": num_sequences}
        assert looks.look(d=steps, **waiting)["p"] == 5
    idle = Places(capacity=16, num_taken=0, residence_s=0.02)
    assert idle.admitted(200, 0.2) == pytest.approx((16 + 160) / 200)
    assert Places(capacity=16, num_taken=16, residence_s=0.02).admitted(200, 0.2) == 0.8


def test_slots_that_wait_for_their_prompts_are_no_load_of_decode():
    """All 16 are promised to requests whose prompts come out one every 5 s: prefill is short."""
    steps = {"step_base_s": 0.02, "num_sequences": 1, "num_coming": 15}
    queue = {"queued_tokens": 75_000, "behind_tokens": 70_000}
    looks = Looks(*pair(max=1))
    assert looks.look(p=queue, d=steps, expected_output_tokens=100) == {"p": 1, "d": 1}
    there = {"step_base_s": 0.02, "num_sequences": 16}
    assert looks.look(p=queue, d=there, expected_output_tokens=100) == {"p": 1, "d": 2}


def test_the_cheapest_capacity_comes_first_and_the_dearest_goes_first():
    """`big` costs twice what `small` does, and does five times as much."""
    pools = (
        make_pool("small", Role.PREFILL, prefill_tokens_per_s=1000.0, cost_per_hour=1.0, max=3),
        make_pool("big", Role.PREFILL, prefill_tokens_per_s=5000.0, cost_per_hour=2.0, max=3),
        make_pool("d"),
    )
    looks = Looks(*pools)
    assert looks.look(small={"behind_tokens": 9000}) == {"small": 1, "big": 3, "d": 1}
    assert looks.look(small={"behind_tokens": 14000}) == {"small": 3, "big": 3, "d": 1}
    assert looks.look(int(QUIET_S) + 1, small={"behind_tokens": 9000})["small"] == 1
    assert looks.targets["big"] == 3


def test_what_a_worker_shows_counts_for_more_than_what_the_file_says():
    pools = (
        make_pool("a", Role.PREFILL, prefill_tokens_per_s=9000.0, cost_per_hour=1.0),
        make_pool("b", Role.PREFILL, prefill_tokens_per_s=2000.0, cost_per_hour=1.0),
        make_pool("d"),
    )
    load = {"num_waiting": 1, "waiting_tokens": 4500.0}
    declared = Looks(*pools, ttft_target_s=0.5)
    assert declared.look(**load)["a"] > 1
    shown = Looks(*pools, ttft_target_s=0.5)
    shown.look(**load, a={"prefill_token_s": 0.01})
    assert shown.targets["a"] == 1
    assert shown.targets["b"] > 1


def test_a_pool_that_nobody_knows_is_taken_to_be_like_the_others():
    pools = (
        make_pool("a", Role.PREFILL, cost_per_hour=2.0),
        make_pool("b", Role.PREFILL, cost_per_hour=1.0, min=0),
        make_pool("d"),
    )
    looks = Looks(*pools)
    assert looks.look(a={"prefill_token_s": 0.001, "behind_tokens": 1500}) == {
        "a": 1, "b": 1, "d": 1,
    }  # fmt: skip
    blind = Looks(*pools)
    assert blind.look(a={"behind_tokens": 1500})["b"] == 0, "nobody knows what to add"


def test_a_mixed_pool_counts_for_both_roles():
    """Its worker gives half its time to prefill, and its slots to decoding."""
    mixed = make_pool("m", Role.MIXED, prefill_tokens_per_s=2000.0, max=1)
    alone = Looks(*pair())
    beside = Looks(*pair(), mixed)
    assert alone.look(p={"behind_tokens": 1500})["p"] == 2
    assert beside.look(p={"behind_tokens": 1500})["p"] == 1
    assert alone.look(d={"num_sequences": 20})["d"] == 2
    assert beside.look(d={"num_sequences": 20})["d"] == 1
    only = Looks(make_pool("m", Role.MIXED, prefill_tokens_per_s=2000.0))
    assert only.look(m={"behind_tokens": 1500})["m"] == 2
    assert only.look(m={"num_sequences": 40})["m"] == 4


def test_a_mixed_worker_stays_for_either_role():
    looks = Looks(make_pool("m", Role.MIXED, prefill_tokens_per_s=2000.0))
    looks.look(m={"behind_tokens": 2300, "num_sequences": 1})
    assert looks.targets["m"] == 3
    looks.look(int(QUIET_S) + 1, m={"num_sequences": 24})
    assert looks.targets["m"] == 3, "24 sequences are over 60 % of two workers' slots"
    looks.look(int(QUIET_S) + 1, m={"num_sequences": 3})
    assert looks.targets["m"] == 1


def test_it_goes_up_at_once_and_down_after_quiet():
    looks = Looks(*pair())
    assert looks.look(d={"num_sequences": 60})["d"] == 5
    assert looks.look(int(QUIET_S) - 1)["d"] == 5
    assert looks.look(2)["d"] == 1
    assert "at most within 60 s" in looks.reasons["d"]


def test_one_that_has_just_begun_takes_nobody_away():
    """As after a restart of Serve's controller: it remembers no load."""
    looks = Looks(*pair())
    looks.targets["d"] = 4
    assert looks.look(int(QUIET_S) - 1)["d"] == 4
    assert looks.look(2)["d"] == 1


def test_steps_that_turn_out_shorter_take_nobody_away_who_has_just_come():
    """The speed of a worker is learnt in jumps, and no load."""
    looks = Looks(*pair(), tpot_target_s=0.3)
    looks.look(int(QUIET_S))
    steps = {"num_sequences": 6, "step_base_s": 0.01}
    assert looks.look(d={**steps, "step_per_seq_s": 0.1})["d"] == 4
    steps["step_per_seq_s"] = 0.005
    assert looks.look(int(QUIET_S) - 1, d=steps)["d"] == 4
    assert looks.look(2, d=steps)["d"] == 1


def test_a_load_between_the_bounds_moves_nothing():
    """What let a worker go doesn't ask for it again."""
    looks = Looks(*pair())
    looks.look(d={"num_sequences": 60})
    for num_sequences in (9, 10, 9, 12, 10, 12) * 30:
        looks.look(d={"num_sequences": num_sequences})
    settled = looks.targets["d"]
    looks.reasons.clear()
    for num_sequences in (9, 12, 10) * 60:
        looks.look(d={"num_sequences": num_sequences})
    assert looks.reasons == {}
    assert looks.targets["d"] == settled == 2


def test_what_waits_for_workers_that_start_asks_for_no_more():
    """A queue grows while they load their weights; what comes meanwhile still counts."""
    looks = Looks(*pair())
    assert looks.look(p={"queued_tokens": 1500, "behind_tokens": 1500})["p"] == 2
    for second in range(20):
        waits = 1500.0 + 300.0 * second
        looks.look(p={"num_workers": 1, "queued_tokens": waits, "behind_tokens": waits})
    assert looks.targets["p"] == 2
    for second in range(20):
        waits = 10_000.0 + 3000.0 * second
        looks.look(p={"num_workers": 1, "queued_tokens": waits, "behind_tokens": waits})
    assert looks.targets["p"] > 3


def fixed_beside_scaled(**scaling):
    rate = {"prefill_tokens_per_s": 1000.0}
    fixed = make_pool("f", Role.PREFILL, max=0, count=2, **rate)
    scaled = make_pool("p", Role.PREFILL, max=4, **rate)
    return Looks(fixed, scaled, make_pool("d"), ttft_target_s=1.0, **scaling)


@pytest.mark.parametrize("left", [2, 1, 0])
def test_what_waits_where_a_worker_was_lost_asks_for_more_at_once(left):
    """Whoever was there and is gone is not one that starts; its work is there still."""
    looks = fixed_beside_scaled()
    looks.look(5)
    looks.look(f={"num_workers": left})
    queue = {"queued_tokens": 9000.0, "behind_tokens": 9000.0}
    assert looks.look(p=queue, f={"num_workers": left})["p"] == 4


def test_a_lost_worker_is_no_capacity_until_another_has_come():
    """900 tokens a second are 30 % of three workers, and 90 % of the one that is left."""
    looks = fixed_beside_scaled(quiet_s=10.0)
    came, lost = {"computed_tokens": 0.0}, {"num_workers": 0}
    for _ in range(30):
        came["computed_tokens"] += 900.0
        looks.look(p=came)
    assert looks.targets["p"] == 1
    came["computed_tokens"] += 900.0
    assert looks.look(p=came, f=lost)["p"] == 2
    for _ in range(20):
        came["computed_tokens"] += 900.0
        looks.look(p=came, f=lost)
    assert looks.targets["p"] == 2
    looks.look(30)
    assert looks.targets["p"] == 1


def test_what_waits_for_whoever_comes_in_a_lost_ones_place_asks_once():
    """The worker asked for in its place starts: what waits for that asks for no other."""
    looks = Looks(*pair())
    looks.look(3, p={"queued_tokens": 900, "behind_tokens": 0})
    looks.look(p={"num_workers": 0})
    queue = {"queued_tokens": 1500.0, "behind_tokens": 1500.0, "num_workers": 0}
    assert looks.look(p=queue)["p"] == 3
    for second in range(20):
        waits = 1500.0 + 100.0 * second
        looks.look(p={"num_workers": 0, "queued_tokens": waits, "behind_tokens": waits})
    assert looks.targets["p"] == 3


def test_a_pool_whose_workers_never_come_is_passed_over():
    """Its hardware is sold out: the dearer pool is taken, and the cheap one not asked for more."""
    pools = (
        make_pool("p", Role.PREFILL, prefill_tokens_per_s=1000.0),
        make_pool("cheap", cost_per_hour=1.0, min=0),
        make_pool("dear", cost_per_hour=5.0),
    )
    looks = Looks(*pools, start_s=30.0)
    busy = {"dear": {"num_sequences": 30}, "absent": ("cheap",)}
    assert looks.look(30, **busy) == {"p": 1, "cheap": 2, "dear": 1}
    assert looks.look(3, **busy) == {"p": 1, "cheap": 2, "dear": 3}
    assert looks.look(20, dear={"num_sequences": 30}) == {"p": 1, "cheap": 2, "dear": 3}
    looks.look(int(QUIET_S) + 2, dear={"num_sequences": 20})
    assert looks.targets == {"p": 1, "cheap": 2, "dear": 1}


def test_a_pool_of_a_fixed_size_counts_and_stays():
    fixed = make_pool("fixed", max=0, count=3)
    looks = Looks(*pair(), fixed)
    assert looks.look(d={"num_sequences": 50})["d"] == 1
    assert looks.look(d={"num_sequences": 60})["d"] == 2
    assert "fixed" not in looks.scaler.decide(Load(), looks.targets, looks.now + 1).targets


@pytest.mark.parametrize("name", ["p", "d"])
def test_a_floor_and_a_ceiling_hold(name):
    looks = Looks(*pair(min=2, max=3))
    much = {"behind_tokens": 1e9, "num_sequences": 1e9}
    looks.look(5, **{name: much})
    assert looks.targets[name] == looks.config.pool(name).max
    looks.targets[name] = 99
    assert looks.look(**{name: much})[name] == looks.config.pool(name).max
    looks.look(int(QUIET_S) + 2)
    assert looks.targets[name] == looks.config.pool(name).min


numbers = st.integers(0, 200)
loads = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=40)
sizes = st.tuples(st.integers(0, 3), st.integers(1, 6))


few = settings(max_examples=25, deadline=None)


def heterogeneous(bounds):
    """Five pools, two of each role and a mixed one; the second of each costs more."""
    names = {"p1": Role.PREFILL, "p2": Role.PREFILL, "m": Role.MIXED}
    names |= {"d1": Role.DECODE, "d2": Role.DECODE}
    pools = []
    for index, (name, (low, room)) in enumerate(zip(names, bounds, strict=True)):
        low = max(1, low) if name in ("p1", "d1") else low
        pools.append(
            make_pool(
                name, names[name], min=low, max=low + room, cost_per_hour=1.0 + index % 3,
                max_num_seqs=8 + 4 * index, prefill_tokens_per_s=500.0 * (1 + index),
            )
        )  # fmt: skip
    return pools


def shown(load):
    waiting, sequences, behind = load
    return {
        "p1": {"behind_tokens": 100.0 * behind},
        "d1": {"num_sequences": sequences},
        "num_waiting": waiting, "waiting_tokens": 50.0 * waiting, "expected_output_tokens": 20.0,
    }  # fmt: skip


@few
@given(bounds=st.tuples(*[sizes] * 5), course=loads)
def test_targets_are_within_their_bounds_whatever_comes(bounds, course):
    looks = Looks(*heterogeneous(bounds), quiet_s=3.0)
    for load in course:
        looks.look(**shown(load))
        for pool in looks.config.pools:
            assert pool.min <= looks.targets[pool.name] <= pool.max


@few
@given(bounds=st.tuples(*[sizes] * 5), course=loads, more=st.tuples(numbers, numbers, numbers))
def test_more_load_never_asks_for_fewer_workers(bounds, course, more):
    """With the same past, and of each pool: capacity is only ever added in the same order. (How
    long sequences stay is not known here: those that fill all of decoding would spare prefill.)"""
    less_of, more_of = (Looks(*heterogeneous(bounds), quiet_s=3.0) for _ in range(2))
    for load in course:
        less_of.look(**shown(load))
        more_of.look(**shown(load))
    last = course[-1]
    less_of.look(**shown(last))
    more_of.look(**shown([a + b for a, b in zip(last, more, strict=True)]))
    assert all(more_of.targets[name] >= count for name, count in less_of.targets.items())


@few
@given(bounds=st.tuples(*[sizes] * 5), course=loads, last=st.tuples(numbers, numbers, numbers))
def test_a_load_that_stands_still_settles(bounds, course, last):
    looks = Looks(*heterogeneous(bounds), quiet_s=3.0)
    for load in course:
        looks.look(**shown(load))
    looks.look(16, **shown(last))  # what came counts for 10 s, its peak for 3 more
    settled = dict(looks.targets)
    assert looks.look(8, **shown(last)) == settled


@few
@given(course=loads)
def test_nobody_leaves_sooner_than_quiet_after_anybody_of_its_role_came(course):
    looks = Looks(*pair(), quiet_s=7.0)
    came = dict.fromkeys(looks.targets, -math.inf)
    for load in course:
        before = dict(looks.targets)
        looks.look(p={"behind_tokens": 100.0 * load[2]}, d={"num_sequences": load[1]})
        for name, count in looks.targets.items():
            if count > before[name]:
                came[name] = looks.now
            assert count >= before[name] or looks.now - came[name] > 7.0
