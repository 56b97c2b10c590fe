"""Workers that drain, and workers in another role than their pool's, as the planner sees them."""

import dataclasses

import pytest

from cluster.config import Device, Role, TransportKind
from cluster.control.admission import objection
from cluster.control.facts import ExportRef
from cluster.control.orders import give_order
from cluster.control.planner import Planner
from cluster.control.readiness import can_serve, faults, missing_roles
from cluster.control.settings import ControlSettings
from cluster.errors import InvalidRequest, NoWorker
from tests.cluster.control.conftest import until
from tests.cluster.control.factory import (
    grants,
    make_config,
    make_pool,
    make_registration,
    rejects,
    two_pools,
)
from tests.cluster.control.story import Story

TWO_OF_EACH = {"prefill": 2, "decode": 2}


def switch(story: Story, worker_id: str, role: Role):
    """Leave, and come back as another incarnation in a role."""
    present = story.workers[worker_id]
    story.report(worker_id, is_draining=True)
    story.leave(worker_id)
    heir = dataclasses.replace(
        present, incarnation=f"{worker_id}-{role.value}", role=role, pool_role=present.role
    )
    return story.join(heir)


def test_a_worker_that_drains_gets_nothing_new():
    """CASES P-27: from the report that says so, on either side; what it has it keeps."""
    story = Story(counts=TWO_OF_EACH)
    (first,) = grants(story.want("first"))
    for name in ("prefill-0", "decode-0"):
        held = [first.grant_id] if name in (first.prefill.worker_id, first.decode.worker_id) else []
        story.report(name, *held, is_draining=True)
    for number in range(2):
        (grant,) = grants(story.want(f"r{number}"))
        assert (grant.prefill.worker_id, grant.decode.worker_id) == ("prefill-1", "decode-1")
    assert story.want("waits") == [], "the others are full, and it would have room"
    assert {w.worker.worker_id for w in story.view().workers if w.report.is_draining} == {
        "prefill-0",
        "decode-0",
    }
    story.planner.check()


def test_the_last_of_a_role_that_drains_leaves_the_cluster_without():
    """CASES P-26, P-27: readiness flips at once, and fresh requests are told why."""
    story = Story()
    story.report("decode-0", is_draining=True)
    (reject,) = rejects(story.want("fresh"))
    assert isinstance(reject.error, NoWorker)
    assert (missing_roles(story.view()), can_serve(story.view())) == ((Role.DECODE,), False)
    assert faults(story.view()) == ("decode: what there is drains",)
    story.want("resumed", attempt=1)
    story.leave("decode-0")
    story.workers["decode-0"] = make_registration(two_pools()[1], incarnation="heir")
    (grant,) = grants(story.join(story.workers["decode-0"]))
    assert grant.request_id == "resumed", "who was being served had waited"


def test_an_export_of_a_worker_that_drains_finds_its_way():
    story = Story(counts={"decode": 2})
    (grant,) = grants(story.want())
    failed, other = grant.decode, {"decode-0": "decode-1", "decode-1": "decode-0"}
    story.report("prefill-0", grant.grant_id, is_draining=True)
    export = ExportRef(grant_id=grant.grant_id, worker_id="prefill-0", incarnation="prefill-0-i")
    (again,) = grants(story.want(attempt=1, export=export, avoid=(failed.incarnation,)))
    assert again.decode.worker_id == other[failed.worker_id]


def test_a_new_control_plane_places_nothing_before_it_knows_who_drains():
    """Between its registration and its first report a worker gets nothing anyway."""
    story = Story(counts={"decode": 2})
    story.planner.register(make_registration(two_pools()[1], 0, incarnation="heir"), story.now)
    story.workers["decode-0"] = make_registration(two_pools()[1], 0, incarnation="heir")
    (grant,) = grants(story.want("a"))
    assert grant.decode.worker_id == "decode-1"
    story.report("decode-0", is_draining=True)
    (grant,) = grants(story.want("b"))
    assert grant.decode.worker_id == "decode-1"


def test_orders_name_what_they_cannot_do():
    story = Story(counts=TWO_OF_EACH)

    def check(worker_id, role):
        return story.planner.take_order(worker_id, role, story.now)

    with pytest.raises(
        InvalidRequest, match="no worker is called 'x': there is decode-0, decode-1"
    ):
        check("x", None)
    with pytest.raises(InvalidRequest, match="decode-0 is a decode worker"):
        check("decode-0", Role.DECODE)
    story.report("decode-0", is_draining=True)
    with pytest.raises(InvalidRequest, match="decode-0 drains already"):
        check("decode-0", None)
    story.planner.worker_stream_lost("decode-1", "decode-1-i", story.now)
    with pytest.raises(InvalidRequest, match="decode-1 cannot be told"):
        check("decode-1", Role.PREFILL)


def test_a_second_order_before_the_first_is_reported_is_refused():
    """It would reach a worker that drains, which can follow one only."""
    story = Story(counts=TWO_OF_EACH)
    first = story.planner.take_order("decode-0", Role.MIXED, story.now)
    for role in (None, Role.MIXED, Role.PREFILL):
        with pytest.raises(InvalidRequest, match="decode-0 drains already"):
            story.planner.take_order("decode-0", role, story.now)
    assert story.planner.take_order("decode-1", None, story.now).worker_id == "decode-1"
    switch(story, "decode-0", Role.MIXED)
    second = story.planner.take_order("decode-0", Role.DECODE, story.now)
    assert second.incarnation != first.incarnation


def test_an_order_that_never_reached_its_worker_may_be_given_again():
    """What is cut off takes it along; the same incarnation is back, and goes on serving."""
    story = Story(counts=TWO_OF_EACH)
    story.planner.take_order("decode-0", None, story.now)
    story.advance(3.0, reporting=story.workers)
    assert story.planner.take_order("decode-0", None, story.now).worker_id == "decode-0"


def test_a_worker_of_a_scaled_pool_keeps_its_role():
    """What scaling goes by is how many serve in the pool's role."""
    scaled = dataclasses.replace(make_pool("p", Role.PREFILL), min=1, max=3)
    config = make_config(scaled, make_pool("d", Role.DECODE))
    planner = Planner(config, term=1, settings=ControlSettings(), now=0.0)
    registration = make_registration(scaled)
    planner.register(registration, 0.0)
    with pytest.raises(InvalidRequest, match="pool p has a min and a max"):
        planner.take_order(registration.worker_id, Role.MIXED, 0.0)
    assert planner.take_order(registration.worker_id, None, 0.0).pool == "p"


def test_a_role_that_a_pool_does_not_fit_is_refused_with_the_key():
    """Two mixed workers may share a GPU; NCCL could not connect them as a pair."""
    shared = dataclasses.replace(
        make_pool("both", Role.MIXED), device=Device.CUDA, gpus_per_worker=0.5
    )
    story = Story(shared, counts={"both": 2})
    with pytest.raises(InvalidRequest, match=r"role prefill: pools\.both\.gpus_per_worker: NCCL"):
        story.planner.take_order("both-0", Role.PREFILL, story.now)
    told = make_registration(shared, 0, role=Role.PREFILL, pool_role=Role.MIXED)
    assert "gpus_per_worker" in objection(story.config, told, [], {})
    free = dataclasses.replace(story.config, transport=TransportKind.AUTO)
    assert objection(free, dataclasses.replace(told, transport="auto"), [], {}) is None


def test_a_pool_s_role_is_still_the_deploy_files():
    """CASES P-22: a worker that believes in another file is refused, whatever it serves as."""
    pool = two_pools()[0]
    wrong = make_registration(pool, role=Role.PREFILL, pool_role=Role.DECODE)
    story = Story()
    assert objection(story.config, wrong, [], {}) == (
        "role: prefill in the deploy file, decode at the worker"
    )


def test_a_worker_in_another_role_serves_in_it():
    """A pool's other workers go on as they are."""
    story = Story(counts=TWO_OF_EACH)
    switch(story, "decode-0", Role.PREFILL)
    seen = [grants(story.want(f"r{number}"))[0] for number in range(2)]
    assert {grant.decode.worker_id for grant in seen} == {"decode-1"}
    assert "decode-0" in {grant.prefill.worker_id for grant in seen}
    story.planner.check()


def test_mixed_workers_stand_in_where_a_pool_has_nobody_of_its_role_left():
    story = Story()
    switch(story, "decode-0", Role.MIXED)
    (grant,) = grants(story.want("r"))
    assert grant.decode.worker_id == "decode-0"
    assert missing_roles(story.view()) == ()
    story.leave("decode-0")
    (reject,) = rejects(story.want("nobody"))
    assert isinstance(reject.error, NoWorker)


def test_workers_of_a_mixed_pool_become_a_pair():
    story = Story(make_pool("both", Role.MIXED, slots=4), counts={"both": 2})
    switch(story, "both-0", Role.PREFILL)
    switch(story, "both-1", Role.DECODE)
    (grant,) = grants(story.want("r"))
    assert (grant.prefill.worker_id, grant.decode.worker_id) == ("both-0", "both-1")


async def test_an_order_reaches_its_worker(cluster):
    await cluster.start()
    prefill, decode = await cluster.workers()
    ask = {"timeout_s": 5.0}
    assert await give_order(cluster.address, "decode-0", None, **ask) == "decode-0-i"
    await until(lambda: decode.orders == [None])
    await give_order(cluster.address, "prefill-0", Role.MIXED, **ask)
    await until(lambda: prefill.orders == [Role.MIXED])
    with pytest.raises(InvalidRequest, match="no worker is called 'decode-7'"):
        await give_order(cluster.address, "decode-7", None, **ask)
    await cluster.server.stop()
    with pytest.raises(NoWorker, match="no control plane answers"):
        await give_order(cluster.address, "decode-0", None, **ask)
