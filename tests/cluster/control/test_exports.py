"""Exports that wait for a decode worker: before all fresh requests, and never in a circle."""

import random

import pytest

from cluster.config import LocalPrefill
from cluster.control.decisions import AbortLegs
from cluster.control.facts import BlockCounts, ExportRef
from cluster.control.planner import Planner
from cluster.errors import DeadlineExceeded, HandoffFailed
from tests.cluster.control.factory import (
    grants,
    make_config,
    make_registration,
    make_report,
    make_want,
    rejects,
    two_pools,
)
from tests.cluster.control.story import SETTINGS, Story


def export_of(grant):
    return ExportRef(
        grant_id=grant.grant_id,
        worker_id=grant.prefill.worker_id,
        incarnation=grant.prefill.incarnation,
    )


def refused(story, grant):
    """The prefill leg is there, computed and pinned; the decode leg was refused."""
    story.report(grant.prefill.worker_id, grant.grant_id, blocks=BlockCounts(free=60, held=4))
    story.report(grant.decode.worker_id, grant.grant_id, unreserved_grants=(grant.grant_id,))
    story.report(grant.decode.worker_id)


@pytest.mark.parametrize("attempt", [0, 1], ids=["the same number", "a new number"])
def test_an_export_gets_another_decode_worker_and_charges_only_that(attempt):
    story = Story(counts={"prefill": 2})
    (first,) = grants(story.want())
    refused(story, first)
    (second,) = grants(story.want(attempt=attempt, export=export_of(first)))
    assert second.prefill == first.prefill
    assert second.decode.worker_id == "decode-0"
    assert second.handoff_id not in ("", first.handoff_id)
    assert second.reason.startswith("export: ")
    assert story.entry(first.prefill.worker_id).charges.keys() == {first.grant_id}
    assert story.entry("decode-0").charges.keys() == {second.grant_id}
    assert grants(story.want(attempt=attempt, export=export_of(first))) == [second], "sent twice"


def test_the_prefill_charge_lives_until_its_leg_ends_and_both_grants_end():
    story = Story()
    (first,) = grants(story.want())
    refused(story, first)
    (second,) = grants(story.want(attempt=1, export=export_of(first)))
    story.report("prefill-0", first.grant_id)
    story.report("decode-0", second.grant_id)
    assert story.entry("prefill-0").charges.keys() == {first.grant_id}
    assert story.view().links[0].in_flight_bytes > 0
    story.report("prefill-0")
    assert story.entry("prefill-0").charges == {}
    assert story.view().links == (), "nothing is under way"
    story.done(first)
    story.done(second, 16)
    story.report("decode-0")
    assert story.view().num_granted == 0
    assert story.entry("decode-0").charges == {}


def test_bytes_count_on_one_link_at_a_time():
    """Refused twice: the links of the failed handoffs carry nothing any more."""
    story = Story(*two_pools(slots=8), counts={"decode": 3})
    (first,) = grants(story.want())
    refused(story, first)
    (second,) = grants(story.want(attempt=1, export=export_of(first)))
    (third,) = grants(story.want(attempt=2, export=export_of(first)))
    assert len({g.decode.worker_id for g in (first, second, third)}) == 3
    (link,) = story.view().links
    assert link.decode_worker_id == third.decode.worker_id


def test_exports_go_before_all_fresh_requests_and_among_themselves_in_order():
    story = Story(*two_pools(slots=2, kv_tokens=4096))
    old, young = grants(story.want("old")) + grants(story.want("young"))
    story.want("fresh", waited_s=50.0)
    held = (old.grant_id, young.grant_id)
    story.report("prefill-0", *held)
    story.report("decode-0", *held, num_running=2)
    # Both are refused, and others have come to run there meanwhile.
    story.report("decode-0", num_running=2)
    assert story.want("young", attempt=1, export=export_of(young), waited_s=1.0) == []
    assert story.want("old", attempt=1, export=export_of(old), waited_s=2.0) == []
    (next_,) = grants(story.report("decode-0", num_running=1))
    assert next_.request_id == "old"
    (next_,) = grants(story.report("decode-0", next_.grant_id))
    assert next_.request_id == "young"
    assert story.view().num_waiting == 1


def test_a_full_queue_takes_an_export():
    story = Story(*two_pools(slots=1), max_queue_requests=1)
    (first,) = grants(story.want("r1"))
    story.want("r2")
    refused(story, first)
    assert rejects(story.want("r1", attempt=1, export=export_of(first))) == []


def test_an_export_waits_for_a_decode_worker_as_long_as_it_is_kept():
    """Its lease is its prefill worker's, and may be longer than any wait for a replacement."""
    story = Story()
    (first,) = grants(story.want())
    refused(story, first)
    story.leave("decode-0")
    want = {"attempt": 1, "export": export_of(first), "remaining_s": 600.0}
    assert story.want(**want) == []
    assert story.want("other", attempt=1) == []
    said = []
    for _ in range(200):
        story.now += 0.5
        said += story.report("prefill-0", first.grant_id) + story.planner.tick(story.now)
    (reject,) = rejects(said)
    assert reject.request_id == "other", "that one has nothing that is kept"
    (second,) = grants(story.join(make_registration(story.config.pool("decode"))))
    assert (second.prefill, second.decode.worker_id) == (first.prefill, "decode-0")


def test_an_export_waits_no_longer_than_its_deadline_or_its_want():
    story = Story()
    firsts = [*grants(story.want("kept")), *grants(story.want("withdrawn"))]
    for first in firsts:
        refused(story, first)
    story.leave("decode-0")
    for first in firsts:
        ids = {"attempt": 1, "export": export_of(first), "remaining_s": 40.0}
        assert story.want(first.request_id, **ids) == []
    story.planner.cancel_want("withdrawn", 1, story.now)
    assert story.view().num_waiting == 1
    (reject,) = rejects(story.advance(41.0, reporting=("prefill-0",)))
    assert (reject.request_id, type(reject.error)) == ("kept", DeadlineExceeded)
    assert story.view().num_waiting == 0


@pytest.mark.parametrize("restarts", [False, True])
def test_an_export_whose_worker_is_gone_is_rejected_at_once(restarts):
    story = Story(counts={"prefill": 2})
    (first,) = grants(story.want())
    refused(story, first)
    story.leave(first.prefill.worker_id)
    if restarts:
        pool = story.config.pool("prefill")
        story.join(make_registration(pool, worker_id=first.prefill.worker_id, incarnation="second"))
    (reject,) = rejects(story.want(attempt=1, export=export_of(first)))
    assert isinstance(reject.error, HandoffFailed)
    assert reject.error.is_retryable


def test_an_export_that_waits_hears_of_its_workers_death():
    story = Story(*two_pools(slots=1))
    (first,) = grants(story.want())
    story.report("prefill-0", first.grant_id)
    story.report("decode-0", num_running=1)
    assert story.want(attempt=1, export=export_of(first)) == []
    (reject,) = rejects(story.leave("prefill-0"))
    assert isinstance(reject.error, HandoffFailed)


def test_an_export_of_a_silent_worker_waits_for_the_verdict():
    story = Story()
    (first,) = grants(story.want())
    refused(story, first)
    story.advance(2.0, reporting=("decode-0",))
    assert story.want(attempt=1, export=export_of(first)) == [], "suspected"
    (second,) = grants(story.report("prefill-0", first.grant_id))
    assert second.prefill == first.prefill


def test_a_grant_of_an_export_is_taken_back_when_its_sender_dies():
    story = Story(counts={"prefill": 2})
    (first,) = grants(story.want())
    refused(story, first)
    want = {"attempt": 1, "export": export_of(first)}
    (second,) = grants(story.want(**want))
    story.leave(first.prefill.worker_id)
    (reject,) = rejects(story.want(**want))
    assert isinstance(reject.error, HandoffFailed)
    assert story.entry(second.decode.worker_id).charges == {}


def test_exports_waits_outlive_the_control_plane():
    """After a restart the want comes again before its prefill worker has: nobody is rejected."""
    config = make_config(*two_pools())
    planner = Planner(config, term=8, settings=SETTINGS, now=0.0)
    planner.router_joined("a", "a-1", 0.0)
    prefill = make_registration(config.pool("prefill"))
    decode = make_registration(config.pool("decode"))
    export = ExportRef(grant_id="7-1", worker_id=prefill.worker_id, incarnation=prefill.incarnation)
    again = make_want(attempt=1, export=export, is_resent=True, waited_s=1.0)
    assert planner.want("a", again, 0.1) == []
    planner.register(decode, 0.2)
    assert planner.report("decode-0", decode.incarnation, make_report(decode), 0.2) == []
    planner.register(prefill, 0.3)
    report = make_report(prefill, "7-1", blocks=BlockCounts(free=60, held=4))
    (grant,) = grants(planner.report("prefill-0", prefill.incarnation, report, 0.3))
    assert (grant.term, grant.prefill.worker_id) == (8, "prefill-0")
    assert planner.done("7-1", 1, 0.4) == [], "the old term's grant is nobody's"
    planner.check()


def test_an_export_of_a_worker_that_does_not_come_back_is_rejected_after_the_window():
    planner = Planner(make_config(*two_pools()), term=8, settings=SETTINGS, now=0.0)
    export = ExportRef(grant_id="7-1", worker_id="prefill-0", incarnation="lost")
    assert planner.want("a", make_want(attempt=1, export=export, is_resent=True), 0.1) == []
    ticks = [d for tenth in range(1, 32) for d in planner.tick(tenth / 10)]
    (reject,) = rejects(ticks)
    assert isinstance(reject.error, HandoffFailed)


class Pinned:
    """P-16's mirror: prefilled KV fills the prefill pool while the decode pool is full.

    Workers keep their own books. A decode worker refuses what it has no blocks for, although the
    ledger thought it had; its sequences grow. Exports wait without a time limit here: a circle of
    waits would never end.
    """

    NUM_BLOCKS = 12
    SLOTS = 3

    def __init__(self, seed):
        self.rng = random.Random(seed)
        pools = two_pools(kv_tokens=16 * self.NUM_BLOCKS, slots=self.SLOTS)
        self.story = Story(*pools, local_prefill=LocalPrefill.NEVER)
        self.exports = {}  # request -> (prefill grant, prompt blocks), pinned at the prefill worker
        self.decoding = {}  # grant -> [request, blocks]
        self.open = set()
        self.granted = {}  # request -> its grants, all given back at its end
        self.num_refused = self.num_redirected = self.num_ended = self.rounds_without_progress = 0

    def submit(self, index):
        prompt = self.rng.choice([20, 40, 60])
        self.open.add(f"r{index}")
        self.take(self.story.want(f"r{index}", num_prompt_tokens=prompt, max_tokens=80))

    def take(self, decisions):
        assert rejects(decisions) == []
        fresh = [g for g in grants(decisions) if not g.reason.startswith("export")]
        assert not (fresh and self.waiting_exports()), "a fresh prompt has gone before an export"
        for grant in grants(decisions):
            if grant in fresh:
                self.exports[grant.request_id] = (grant, 4)
            else:
                self.num_redirected += 1
            self.arrive(grant)

    def waiting_exports(self):
        return [w for w in self.story.planner._queue if w.want.export is not None]

    def arrive(self, grant):
        """The decode worker reserves, or refuses: then the export's want follows."""
        first, blocks = self.exports[grant.request_id]
        self.granted.setdefault(grant.request_id, []).append(grant)
        used = sum(number for _, number in self.decoding.values())
        if self.rng.random() < 0.3 or used + blocks > self.NUM_BLOCKS:
            self.num_refused += 1
            self.say()
            self.take(
                self.story.want(
                    grant.request_id,
                    attempt=grant.attempt + 1,
                    num_prompt_tokens=60,
                    max_tokens=80,
                    export=export_of(first),
                )
            )
            return
        self.decoding[grant.grant_id] = [grant.request_id, blocks]
        del self.exports[grant.request_id]
        self.say()

    def say(self):
        story = self.story
        pinned = sum(blocks for _, blocks in self.exports.values())
        held = [grant.grant_id for grant, _ in self.exports.values()]
        free = max(0, self.NUM_BLOCKS - pinned)
        self.take(story.report("prefill-0", *held, blocks=BlockCounts(free=free, held=pinned)))
        used = sum(number for _, number in self.decoding.values())
        blocks = BlockCounts(free=max(0, self.NUM_BLOCKS - used), held=used)
        running = len(self.decoding)
        self.take(story.report("decode-0", *self.decoding, num_running=running, blocks=blocks))

    def step(self):
        self.story.now += 0.05
        progress = self.num_ended + self.num_redirected
        for grant_id, sequence in list(self.decoding.items()):
            if self.rng.random() < 0.3:
                del self.decoding[grant_id]
                self.open.discard(sequence[0])
                self.num_ended += 1
                self.say()
                for grant in self.granted.pop(sequence[0]):
                    self.take(self.story.done(grant))
            elif sum(number for _, number in self.decoding.values()) < self.NUM_BLOCKS:
                sequence[1] += 1  # grows past what the ledger has charged
        self.say()
        self.take(self.story.planner.tick(self.story.now))
        self.story.planner.check()
        is_stuck = self.num_ended + self.num_redirected == progress and bool(self.exports)
        self.rounds_without_progress = self.rounds_without_progress + 1 if is_stuck else 0
        assert self.rounds_without_progress < 40, "nothing moves"


@pytest.mark.parametrize("seed", range(6))
def test_no_circle_of_waits_between_the_pools(seed):
    """P-16, mirror: exports go first when a slot frees, fresh ones never starve them, all end."""
    pinned = Pinned(seed)
    for index in range(60):
        pinned.submit(index)
        pinned.step()
    for _ in range(600):
        if not pinned.open:
            break
        pinned.step()
    assert not pinned.open
    assert pinned.num_refused > 10
    assert pinned.num_redirected > 5
    view = pinned.story.view()
    assert (view.num_waiting, view.num_granted, view.links) == (0, 0, ())


def test_a_report_before_a_second_redirect_does_not_end_its_transfer():
    story = Story(*two_pools(slots=8), counts={"decode": 3})
    (first,) = grants(story.want())
    refused(story, first)
    (second,) = grants(story.want(attempt=1, export=export_of(first)))
    story.report("prefill-0", first.grant_id)
    story.report(second.decode.worker_id, second.grant_id)
    story.report(second.decode.worker_id)  # refused too
    (third,) = grants(story.want(attempt=2, export=export_of(first)))
    story.report("prefill-0", first.grant_id)
    assert sum(link.in_flight_bytes for link in story.view().links) > 0
    (fourth,) = grants(story.want(attempt=3, export=export_of(first)))
    assert third.grant_id not in story.entry(third.decode.worker_id).charges
    assert fourth.grant_id in story.entry(fourth.decode.worker_id).charges


def test_the_first_grant_lives_as_long_as_those_for_its_export():
    """Its prefill leg has ended, and the request runs on."""
    story = Story(*two_pools(slots=8), counts={"decode": 2})
    (first,) = grants(story.want())
    refused(story, first)
    (second,) = grants(story.want(attempt=1, export=export_of(first)))
    story.report("prefill-0")
    for _ in range(60):
        story.now += 0.5
        for worker_id in story.workers:
            held = [second.grant_id] if worker_id == second.decode.worker_id else []
            story.report(worker_id, *held)
        story.planner.tick(story.now)
    assert story.view().num_granted == 2


def test_a_redirected_prefill_leg_that_outlives_its_grants_is_aborted():
    story = Story(*two_pools(slots=8), counts={"decode": 2})
    (first,) = grants(story.want())
    refused(story, first)
    (second,) = grants(story.want(attempt=1, export=export_of(first)))
    story.report("prefill-0", first.grant_id)
    story.done(first)
    story.done(second, 4)
    said = []
    for _ in range(10):
        story.now += 0.5
        for worker_id in story.workers:
            story.report(worker_id, *([first.grant_id] if worker_id == "prefill-0" else []))
        said += story.planner.tick(story.now)
    assert {order.grant_id for order in said if isinstance(order, AbortLegs)} == {first.grant_id}
