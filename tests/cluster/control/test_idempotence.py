"""Facts and decisions that are lost, doubled, late or out of order change nothing for long."""

import asyncio

import pytest

from cluster.control.facts import TransferSample
from tests.cluster.control.conftest import until
from tests.cluster.control.factory import held_by, make_want, two_pools


class Tap:
    """Does to messages of a kind what it is told to, as often as it is told to."""

    def __init__(self):
        self.rules = {}
        self.struck = []
        self.kept = []

    def on(self, direction, kind, verb, times=1):
        self.rules[direction, kind] = [verb, times]

    def outgoing(self, kind, pass_on):
        self._strike(("out", kind), pass_on)

    def incoming(self, kind, pass_on):
        self._strike(("in", kind), pass_on)

    def _strike(self, what, pass_on):
        verb, times = self.rules.get(what, ("", 0))
        if times == 0:
            pass_on()
            return
        self.rules[what][1] -= 1
        self.struck.append((*what, verb))
        if verb == "double":
            pass_on()
            pass_on()
        elif verb == "keep":
            self.kept.append(pass_on)

    def release(self):
        kept, self.kept = self.kept, []
        for pass_on in kept:
            pass_on()


async def tapped(cluster, *pools, **timing):
    await cluster.start(*pools)
    workers = await cluster.workers()
    router = await cluster.router(**timing)
    tap = Tap()
    router.client.set_tap(tap)
    return router, tap, workers


async def all_given_back(router, num_grants=1):
    def is_over():
        view = router.client.view
        was_granted = view.counters.get("grants", 0) >= num_grants
        return was_granted and view.num_granted == view.num_waiting == 0

    await until(is_over)


async def test_a_grant_that_comes_twice_is_one(cluster):
    router, tap, _ = await tapped(cluster)
    tap.on("in", "grant", "double")
    grant = await router.client.want(make_want())
    assert tap.struck == [("in", "grant", "double")]
    assert router.client._held == {grant.grant_id}
    router.client.done(grant.grant_id, 1)
    await all_given_back(router)


async def test_a_grant_that_comes_again_after_its_end_is_given_back(cluster):
    router, tap, _ = await tapped(cluster)
    tap.on("in", "grant", "keep")
    waiting = asyncio.create_task(router.client.want(make_want()))
    await until(lambda: tap.kept)
    first = tap.kept[0]
    tap.release()
    grant = await waiting
    router.client.done(grant.grant_id, 1)
    tap.on("out", "done", "double")
    first()
    assert tap.struck[-1] == ("out", "done", "double")
    await all_given_back(router)


@pytest.mark.parametrize("resend_after_s", [0.2, 60.0], ids=["while it lives", "taken back"])
async def test_a_lost_grant_is_granted_again(cluster, resend_after_s):
    """The want is sent again, by itself or since no worker has the legs, and answered."""
    router, tap, _ = await tapped(cluster, *two_pools(slots=1), resend_after_s=resend_after_s)
    tap.on("in", "grant", "drop")
    grant = await asyncio.wait_for(router.client.want(make_want()), 10.0)
    assert tap.struck == [("in", "grant", "drop")]
    is_another = grant.grant_id.endswith("-2")
    assert is_another is (resend_after_s > 0.5)
    assert router.client.view.counters.get("grants_taken_back", 0) >= is_another
    router.client.done(grant.grant_id, 1)
    await all_given_back(router)


async def test_a_lost_want_is_sent_again(cluster):
    router, tap, _ = await tapped(cluster, resend_after_s=0.2)
    tap.on("out", "want", "drop")
    grant = await asyncio.wait_for(router.client.want(make_want()), 10.0)
    assert tap.struck == [("out", "want", "drop")]
    router.client.done(grant.grant_id, 1)
    await all_given_back(router)


async def test_a_want_that_comes_twice_gets_one_grant(cluster):
    router, tap, _ = await tapped(cluster)
    tap.on("out", "want", "double", times=5)
    grants = await asyncio.gather(*(router.client.want(make_want(f"r{i}")) for i in range(2)))
    assert tap.struck == [("out", "want", "double")] * 2
    await until(lambda: router.client.view.num_granted == 2)
    for grant in grants:
        router.client.done(grant.grant_id, 1)
    await all_given_back(router)


async def test_a_want_that_comes_after_its_cancel_is_given_back(cluster):
    router, tap, _ = await tapped(cluster)
    tap.on("out", "want", "keep")
    waiting = asyncio.create_task(router.client.want(make_want()))
    await until(lambda: tap.kept)
    waiting.cancel()
    await asyncio.wait({waiting})
    tap.release()
    after = await router.client.want(make_want("after"))
    router.client.done(after.grant_id, 1)
    await all_given_back(router, num_grants=2)


async def test_a_lost_done_holds_neither_slot_nor_memory(cluster):
    """The legs' end frees the slot; the grant itself is forgotten when no worker has it."""
    router, tap, (_, decode) = await tapped(cluster, *two_pools(slots=1))
    first = await router.client.want(make_want("r1"))
    decode.hold(first.grant_id)
    tap.on("out", "done", "drop")
    router.client.done(first.grant_id, 1)
    assert tap.struck == [("out", "done", "drop")]
    decode.hold()
    second = await asyncio.wait_for(router.client.want(make_want("r2")), 10.0)
    router.client.done(second.grant_id, 1)
    await all_given_back(router)


async def test_a_message_of_a_lost_stream_is_not_passed_on(cluster):
    router, tap, _ = await tapped(cluster)
    tap.on("in", "view", "keep")
    await until(lambda: tap.kept)
    await cluster.server.stop(0.0)
    await until(lambda: not router.client.is_connected)
    view = router.client.view
    tap.release()
    assert router.client.view is view
    await cluster.restart()
    await until(lambda: router.client.is_connected)


async def test_a_report_that_comes_late_is_dropped(cluster, caplog):
    router, _, (_, decode) = await tapped(cluster)
    tap = Tap()
    decode.client.set_tap(tap)
    tap.on("out", "report", "keep")
    decode.hold("old")
    await until(lambda: tap.kept)
    decode.hold("new")
    await until(lambda: held_by(router.client.view, "decode-0") == ("new",))
    tap.release()
    await until(lambda: "came late" in caplog.text)
    assert held_by(router.client.view, "decode-0") == ("new",)


async def test_a_report_that_comes_twice_counts_its_transfers_once(cluster):
    router, _, (prefill, _) = await tapped(cluster)
    tap = Tap()
    prefill.client.set_tap(tap)
    tap.on("out", "report", "double", times=1)
    sample = TransferSample(peer_worker_id="decode-0", num_bytes=4096, seconds=0.01)
    prefill.transfers = [sample]
    prefill.client.changed()
    await until(lambda: router.client.view.links and not prefill.transfers)
    assert tap.struck == [("out", "report", "double")]
    num_reports = prefill.num_reports
    await until(lambda: prefill.num_reports > num_reports + 2)
    assert [link.num_transfers for link in router.client.view.links] == [1]


async def test_without_a_tap_nothing_stands_between(cluster):
    router, tap, _ = await tapped(cluster)
    router.client.set_tap(None)
    tap.on("in", "grant", "drop")
    grant = await router.client.want(make_want())
    router.client.done(grant.grant_id, 1)
    assert tap.struck == []
