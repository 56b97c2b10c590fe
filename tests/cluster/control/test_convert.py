"""Facts survive the wire, and what no honest peer sends is named."""

import dataclasses

import pytest

from cluster.config import Role
from cluster.control import convert, convert_view, facts
from cluster.errors import EngineFault, InvalidRequest, QueueFull
from cluster.wire import control_pb2 as pb
from tests.cluster.control.factory import make_pool, make_registration, make_report, make_want

REGISTRATION = make_registration(make_pool("decode", Role.DECODE))
REPORT = make_report(
    REGISTRATION,
    "g1",
    "g2",
    unreserved_grants=("g2",),
    transfers=(
        facts.TransferSample(peer_worker_id="d", num_bytes=3, seconds=0.5, transport="shm"),
    ),
    counters={"tokens_total": 5.0},
    num_swapped=1,
    gone_prefixes=(1 << 63, 7),
    has_lost_prefixes=True,
    is_draining=True,
)
PLACED = facts.Placed(worker_id="w", incarnation="i", address="a", pool="p")


def make_grant(**changes):
    values = {
        "term": 1, "grant_id": "g", "request_id": "r", "attempt": 2, "prefill": PLACED,
        "decode": PLACED, "handoff_id": "h", "reason": "why", "predicted_s": 0.5,
    }  # fmt: skip
    return facts.Grant(**{**values, **changes})


def test_facts_survive_the_wire():
    export = facts.ExportRef(grant_id="g", worker_id="w", incarnation="i")
    wants = (
        make_want(avoid=("x", "y"), is_resent=True),
        make_want(export=export, num_preemptions=2, expected_tokens=7, priority="low", tenant="t"),
    )
    for want in wants:
        assert convert.want_from_wire(convert.want_to_wire(want)) == want
    for worker in (REGISTRATION, dataclasses.replace(REGISTRATION, pool_role=Role.MIXED)):
        assert convert.registration_from_wire(convert.registration_to_wire(worker)) == worker
    assert convert.report_from_wire(convert.report_to_wire(REPORT)) == REPORT
    for grant in (make_grant(), make_grant(prefill=None), make_grant(decode=None)):
        assert convert.grant_from_wire(convert.grant_to_wire(grant)) == grant


def test_a_view_survives_the_wire():
    worker = facts.WorkerView(
        worker=REGISTRATION,
        report=REPORT,
        health=facts.Health.ALIVE,
        report_age_s=0.5,
        num_granted=1,
    )
    link = facts.LinkView(
        prefill_worker_id="p", decode_worker_id="d", alpha_s=0.1, beta_bytes_per_s=1e9,
        num_transfers=1, num_bytes=2, last_s=0.25, transport="shm", in_flight_bytes=7,
    )  # fmt: skip
    refused = facts.RefusedWorker(
        worker_id="w", pool="p", role="decode", reason="block_size: 16 there, 8 here", age_s=1.0
    )
    view = facts.ClusterView(
        term=1, workers=(worker,), links=(link,), num_waiting=1, waiting_tokens=2, num_granted=3,
        num_routers=4, max_queue_requests=5, retry_after_s=1.5, refused=(refused,),
        counters={"grants": 3.0}, is_reconciling=True,
    )  # fmt: skip
    assert convert_view.view_from_wire(convert_view.view_to_wire(view)) == view


@pytest.mark.parametrize(
    "error",
    [QueueFull("full", retry_after_s=2.0), InvalidRequest("prompt: too long", field="prompt")],
    ids=str,
)
def test_a_reject_keeps_its_error(error):
    reject = facts.Reject(request_id="r", attempt=1, error=error)
    back = convert.reject_from_wire(convert.reject_to_wire(reject, term=3))
    assert type(back.error) is type(error)
    assert (back.error.message, back.error.field) == (error.message, error.field)
    assert back.error.retry_after_s == error.retry_after_s


def test_an_unknown_code_is_a_fault():
    assert isinstance(convert.reject_from_wire(pb.Reject(code="novel")).error, EngineFault)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 1000}, "request_id"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 1 << 30}, "num_prompt_tokens"),
        ({"max_tokens": 1 << 30}, "max_tokens"),
        ({"waited_s": float("nan")}, "waited_s"),
        ({"remaining_s": float("inf")}, "remaining_s"),
    ],
)
def test_bad_wants_are_named(changes, field):
    with pytest.raises(InvalidRequest) as caught:
        convert.want_from_wire(convert.want_to_wire(make_want(**changes)))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"role": "both"}, "role"),
        ({"layout": "x" * 5000}, "layout"),
        ({"transport": "x" * 500}, "transport"),
        ({"worker_id": ""}, "worker_id"),
        ({"step_base_s": -1.0}, "step_base_s"),
        ({"prefill_per_token_s": float("nan")}, "prefill_per_token_s"),
    ],
)
def test_bad_registrations_are_named(changes, field):
    message = convert.registration_to_wire(REGISTRATION)
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(InvalidRequest) as caught:
        convert.registration_from_wire(message)
    assert caught.value.field == field
