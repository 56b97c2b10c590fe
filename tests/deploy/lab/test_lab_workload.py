"""What is asked, and of whom: the same for the same seed, and at equal cores."""

import itertools
import random
from dataclasses import replace

import pytest

from cluster.config import Batching, LocalPrefill, Policy
from cluster.errors import ConfigError
from deploy.lab import ready
from deploy.lab.configurations import Base, Configuration, Draft, check_equal_cores, cores_of
from deploy.lab.workload import poisson, prompt, traffic_of

BASE = Base(cores=(0, 1))


def on(name):
    return {each.name: each for each in ready.comparison(name).configurations(BASE)}


@pytest.mark.parametrize("name", ready.NAMES)
def test_a_seed_says_all_that_is_asked(name):
    workload = ready.comparison(name).workload

    assert traffic_of(workload, 3) == traffic_of(workload, 3)
    assert traffic_of(workload, 3).asks


def test_poisson_arrivals_depend_on_the_seed_and_keep_their_rate():
    many = poisson(random.Random(1), rate_per_s=4.0, count=4000)

    assert many == sorted(many)
    assert many[-1] == pytest.approx(1000, rel=0.1)
    assert poisson(random.Random(2), rate_per_s=4.0, count=4000) != many


def test_no_two_calls_and_no_two_runs_share_a_prompt():
    prompts = [
        tuple(prompt(32, seed=0, run=run, call=f"open-{i}")) for run in range(3) for i in range(20)
    ]

    assert len(set(prompts)) == len(prompts)
    assert prompts[0] == tuple(prompt(32, seed=0, run=0, call="open-0"))
    assert {len(each) for each in prompts} == {32}


def test_the_eight_of_the_issue_come_at_once_behind_one_that_runs():
    arrivals = traffic_of(ready.comparison("batches").workload, 0).arrivals

    lengths = [arrival.ask.max_tokens for arrival in arrivals[1:9]]
    assert sorted(lengths) == [60] * 6 + [360] * 2
    assert arrivals[8].at_s - arrivals[1].at_s < 0.1


def test_prompts_of_2048_tokens_come_every_8_s():
    arrivals = traffic_of(ready.comparison("interference").workload, 0).arrivals

    at_s = [a.at_s for a in arrivals if a.ask.num_prompt_tokens == 2048]
    assert [after - before for before, after in itertools.pairwise(at_s)] == [8.0]


@pytest.mark.parametrize("name", ["starvation", "interference", "window", "bandwidth"])
def test_a_scale_shortens_the_time_and_asks_as_much(name):
    whole, part = (ready.comparison(name, scale).workload for scale in (1.0, 0.25))
    ours, theirs = (traffic_of(each, 0) for each in (part, whole))

    assert [a.ask for a in ours.arrivals] == [a.ask for a in theirs.arrivals]
    assert [a.at_s for a in ours.arrivals] == pytest.approx([a.at_s / 4 for a in theirs.arrivals])
    assert [each.until_s for each in ours.loops] == [each.until_s / 4 for each in theirs.loops]
    assert part.arrivals != whole.arrivals, "and it is told so"


def test_a_scale_shortens_what_a_long_one_waits_for_too():
    scaled = {each.name: each for each in ready.comparison("starvation", 0.25).configurations(BASE)}

    assert scaled["sjf-aging"].deploy.scheduling.aging_s == 1.25
    assert (
        scaled["sjf"].deploy.scheduling.aging_s == on("starvation")["sjf"].deploy.scheduling.aging_s
    )


@pytest.mark.parametrize("name", ready.NAMES)
def test_what_is_compared_has_equal_cores(name):
    assert check_equal_cores(ready.comparison(name).configurations(BASE)) == 2


def test_the_configurations_are_what_they_are_called():
    batches, order, aging = on("batches"), on("order"), on("starvation")
    assert [batches[n].deploy.pools[0].batching for n in ("static", "dynamic", "continuous")] == [
        Batching.STATIC, Batching.DYNAMIC, Batching.CONTINUOUS,
    ]  # fmt: skip
    assert [each.deploy.scheduling.policy for each in order.values()] == [
        Policy.FCFS, Policy.SJF, Policy.PRIORITY,
    ]  # fmt: skip
    assert aging["sjf-aging"].deploy.scheduling.aging_s < aging["sjf"].deploy.scheduling.aging_s

    beside = on("interference")
    unchunked = beside["unchunked"].deploy.pools[0]
    assert unchunked.chunk_tokens == 0
    assert unchunked.token_budget >= 2048 + unchunked.max_num_seqs, "the prompt goes in one step"
    assert beside["chunked"].deploy.pools[0].chunk_tokens == 512
    assert [pool.role.value for pool in beside["disaggregated"].deploy.pools] == [
        "prefill", "decode",
    ]  # fmt: skip
    assert beside["disaggregated"].deploy.scheduling.local_prefill is LocalPrefill.NEVER


def test_slower_links_are_played_on_one_cluster():
    configurations = tuple(on("bandwidth").values())

    groups = ready.by_cluster(configurations)

    assert [len(group) for group in groups] == [1, len(configurations) - 1]
    assert all(each.deploy.faults.enabled for each in groups[1])
    assert not any(pool.prefix_cache for each in groups[1] for pool in each.deploy.pools)
    rates = [each.link_bytes_per_s for each in groups[1][1:]]
    assert rates == sorted(rates, reverse=True)


def test_unequal_cores_are_refused_with_both_numbers():
    draft = Draft(BASE)
    narrow = replace(draft.single(), service_cores=())
    pair = [
        Configuration(name="both", what="", deploy=draft.colocated()),
        Configuration(name="one", what="", deploy=narrow),
    ]

    assert len(cores_of(narrow)) == 1
    with pytest.raises(ConfigError, match=r"equal cores: 'both' has 2, 'one' has 1"):
        check_equal_cores(pair)


def test_a_pool_that_may_run_anywhere_is_refused():
    deploy = Draft(BASE).colocated()
    loose = replace(deploy, pools=(replace(deploy.pools[0], cores=()),))

    with pytest.raises(ConfigError, match="pool mixed names no cores"):
        check_equal_cores([Configuration(name="loose", what="", deploy=loose)])


def test_a_machine_of_one_core_has_nothing_to_compare():
    with pytest.raises(ConfigError, match="needs 2 cores, and this process may use 1"):
        Base(cores=(0,))


def test_an_unknown_workload_or_configuration_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'batch'; did you mean 'batches'\?"):
        ready.comparison("batch")
    with pytest.raises(ConfigError, match=r"'contiuous'; did you mean 'continuous'\?"):
        ready.chosen(tuple(on("batches").values()), ["contiuous"])
