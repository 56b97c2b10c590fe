"""Which node each worker fits on, and the reason where none does."""

import dataclasses

import pytest

from cluster.config import PoolConfig, Role
from deploy.fit import Node, fit, needs


def node(name, gpus=0, kind="", cpus=8.0, **labels):
    resources = {"CPU": cpus, "GPU": float(gpus)}
    if kind:
        resources[f"accelerator_type:{kind}"] = 1.0
    return Node(name=name, address=name, resources=resources, labels=labels)


def pool(name, count=1, **options):
    return PoolConfig(name=name, role=Role.MIXED, count=count, **options)


def gpu(name, kind="", count=1, share=1.0, **options):
    return pool(name, count, accelerator_type=kind, gpus_per_worker=share, **options)


def test_each_pool_gets_nodes_of_its_kind():
    nodes = [node("a", 2, "H100"), node("b", 4, "L40S")]
    found = fit([gpu("p", "H100", 2), gpu("d", "L40S", 3)], nodes)
    assert found.problems == ()
    assert found.placed == {"p": {"a": 2}, "d": {"b": 3}}


def test_who_takes_any_gpu_leaves_the_scarce_ones():
    """Whichever comes first in the file: `any` fits only where `picky` can't be."""
    nodes = [node("a", 1, "H100"), node("b", 1, "L40S")]
    pools = [gpu("any"), gpu("picky", "H100")]
    for order in (pools, pools[::-1]):
        assert fit(order, nodes).placed == {"any": {"b": 1}, "picky": {"a": 1}}


def test_pools_that_overlap_are_tried_in_several_orders():
    nodes = [node("a", 1, x="1", y="1"), node("b", 1, y="1", z="1"), node("c", 1, z="1", x="1")]
    pools = [gpu(f"p{key}", node_labels={key: "1"}) for key in "xyz"]
    assert fit(pools, nodes).problems == ()


def test_a_scaled_pool_is_refused_for_its_fewest_and_told_for_its_most():
    nodes = [node("a", 2, "H100")]
    scaled = PoolConfig(
        name="p", role=Role.MIXED, min=2, max=4, accelerator_type="H100", gpus_per_worker=1.0
    )
    found = fit([scaled], nodes)
    assert (found.problems, found.placed) == ((), {"p": {"a": 2}})
    assert "2 of 4 workers fit" in found.at_most[0]
    assert fit([scaled], [node("a", 4, "H100")]).at_most == ()
    assert "1 of 2 workers fit" in fit([scaled], [node("a", 1, "H100")]).problems[0]


def test_parts_of_a_gpu_are_parts_of_one():
    nodes = [node("a", 2, "L4")]
    assert fit([gpu("p", "L4", 4, share=0.5)], nodes).problems == ()
    assert "2 of 3 workers fit" in fit([gpu("p", "L4", 3, share=0.6)], nodes).problems[0]
    whole = [gpu("whole", "L4"), gpu("parts", "L4", 2, share=0.5)]
    assert fit(whole, nodes).problems == ()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (gpu("p", "H200"), "pool p: no node has H200; there is H100, L40S"),
        (gpu("p", "H100", node_labels={"zone": "b"}), "no node with H100 has the labels zone=b"),
        (pool("p", node_labels={"zone": "c"}), "pool p: no node has the labels zone=c"),
        (gpu("p", "H100", 3), "pool p: 2 of 3 workers fit; each needs 1 GPU, H100"),
        (pool("p", cpus_per_worker=9.0), "0 of 1 workers fit; each needs 9 CPU"),
    ],
)
def test_the_pool_and_the_reason_are_named(asked, reason):
    nodes = [node("a", 2, "H100", zone="a"), node("b", 2, "L40S", zone="b")]
    (problem,) = fit([asked], nodes).problems
    assert reason in problem


def test_a_machine_without_gpus_says_so():
    (problem,) = fit([gpu("p", "H100")], [node("a")]).problems
    assert "there is no accelerator on 1 nodes" in problem


def test_pools_that_fit_alone_may_not_fit_together():
    nodes = [node("a", 2, "H100")]
    problems = fit([gpu("p", "H100"), gpu("d", "H100", 2)], nodes).problems
    assert len(problems) == 1
    assert "beside what other pools take" in problems[0]


def test_what_others_use_has_no_room():
    """Issue 6, point 1: on a Ray that several apps share."""
    idle = node("a", 2, "H100", cpus=4.0)
    busy = dataclasses.replace(idle, used={"GPU": 1.0, "CPU": 3.0})
    asks = [gpu("p", "H100", 2, cpus_per_worker=1.0)]
    assert fit(asks, [idle]).problems == ()
    (problem,) = fit(asks, [busy]).problems
    assert problem.startswith("pool p: 1 of 2 workers fit")
    assert "1 GPU and 1 CPU" in problem
    assert problem.endswith("; other apps use 1 GPU and 3 CPU of them")
    assert fit(asks, [busy, node("b", 1, "H100")]).placed == {"p": {"a": 1, "b": 1}}


@pytest.mark.parametrize(("used", "num_halves"), [(0.0, 4), (0.5, 3), (0.6, 2), (2.0, 0), (3.0, 0)])
def test_of_a_gpu_that_others_use_in_part_the_rest_is_one_piece(used, num_halves):
    shared = dataclasses.replace(node("a", 2, "L4"), used={"GPU": used})
    found = fit([gpu("p", "L4", 9, share=0.5)], [shared])
    assert sum(found.placed["p"].values()) == num_halves


def test_what_is_pinned_by_us_needs_nothing_of_ray():
    assert needs(pool("p", cores=(0,))) == ""
    assert fit([pool("p", 4)], [node("a", cpus=0.0)]).problems == ()
