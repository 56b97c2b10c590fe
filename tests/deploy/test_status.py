"""`pdserve status`: what an operator sees of the cluster."""

import dataclasses
import itertools
import json

import pytest

from cluster.config import Role
from cluster.control import facts
from cluster.control.facts import BlockCounts, ClusterView, Health, LinkView, WorkerView
from cluster.errors import NoWorker, StartupError
from deploy import status
from tests.cluster.control.factory import make_config, make_pool, make_registration, make_report

DECODE = make_registration(make_pool("decode", Role.DECODE), worker_id="decode-0")
BLOCKS = BlockCounts(free=30, cached=20, held=10, importing=3, fenced=1)
LINK = LinkView(
    prefill_worker_id="prefill-0", decode_worker_id="decode-0", alpha_s=0.0012,
    beta_bytes_per_s=2.0 * 2**30, num_transfers=7, num_bytes=3 << 20, last_s=0.004,
    transport="shm", in_flight_bytes=1 << 20,
)  # fmt: skip
REFUSED = facts.RefusedWorker(
    worker_id="decode-1", pool="decode", role="decode",
    reason="layout.num_layers: 2 at the other workers, 3 at this one", age_s=12.4,
)  # fmt: skip


def make_view(**changes):
    worker = WorkerView(
        worker=DECODE,
        report=make_report(DECODE, num_running=1, num_waiting=4, queued_tokens=99, blocks=BLOCKS),
        health=Health.SUSPECTED,
        report_age_s=1.7,
        num_granted=0,
    )
    values = {
        "term": 1, "workers": (worker,), "links": (LINK,), "num_waiting": 5, "waiting_tokens": 60,
        "num_granted": 3, "num_routers": 2, "max_queue_requests": 256, "retry_after_s": 1.0,
    }  # fmt: skip
    return ClusterView(**{**values, **changes})


def cells(text, name):
    """The cells of the row that begins with ``name``, by its table's head."""
    for part in text.split("\n\n"):
        head, *rows = part.splitlines()
        for row in rows:
            if row.startswith(name):
                starts = [i for i, c in enumerate(head) if c != " " and head[i - 2 : i].isspace()]
                bounds = [0, *starts, len(row) + 1]
                pairs = itertools.pairwise(bounds)
                return {head[a:b].strip(): row[a:b].strip() for a, b in pairs}
    raise AssertionError(f"{name} is not in:\n{text}")


def test_a_worker_is_shown_with_its_blocks_by_state():
    row = cells(status.render(make_view()), "decode-0")
    assert (row["role"], row["health"], row["slots"]) == ("decode", "suspected", "1/2")
    shown = [row[state] for state in ("free", "cached", "held", "importing", "fenced")]
    assert shown == ["30", "20", "10", "3", "1"]
    assert (row["waiting"], row["queued"]) == ("4", "99")
    assert row["transport"] == "torch_dist", "as configured, before anything has moved"


def test_a_worker_that_drains_is_shown_so():
    (worker,) = make_view().workers
    report = dataclasses.replace(worker.report, is_draining=True)
    view = make_view(workers=(dataclasses.replace(worker, report=report),))
    assert cells(status.render(view), "decode-0")["health"] == "draining"


def test_a_link_is_shown_with_what_moves_its_bytes_and_how_fast():
    row = cells(status.render(make_view()), "prefill-0 -> decode-0")
    assert (row["transport"], row["alpha"], row["beta"]) == ("shm", "1.20 ms", "2.00 GiB/s")
    assert (row["in flight"], row["moved"], row["transfers"]) == ("1.0 MiB", "3.0 MiB", "7")


def test_a_refused_worker_is_shown_with_the_reason():
    """P-22: the field's name and both values."""
    text = status.render(make_view(refused=(REFUSED,)))
    row = cells(text, "decode-1")
    assert row == {
        "refused": "decode-1",
        "pool": "decode",
        "tried": "12 s ago",
        "reason": REFUSED.reason,
    }
    assert "refused" not in status.render(make_view())


@pytest.mark.parametrize("is_json", [True, False])
def test_show_asks_the_control_plane(monkeypatch, capsys, is_json):
    async def answer(address, timeout_s, token):
        return make_view(refused=(REFUSED,))

    monkeypatch.setattr(status, "get_cluster", answer)
    assert status.show(make_config(), is_json=is_json) == 0
    out = capsys.readouterr().out
    if is_json:
        shown = json.loads(out)
        assert shown["refused"][0]["reason"] == REFUSED.reason
        assert shown["links"][0]["transport"] == "shm"
        assert shown["workers"][0]["worker"]["role"] == "decode"
    else:
        assert "queue: 5/256 requests" in out


def test_no_control_plane_is_said_with_a_remedy(monkeypatch):
    async def nobody(address, timeout_s, token):
        raise NoWorker(f"no control plane answers at {address}", stage="status")

    monkeypatch.setattr(status, "get_cluster", nobody)
    with pytest.raises(StartupError, match="no control plane answers"):
        status.show(make_config(), is_json=False)
