"""The small parts of a link: its thread and its rendezvous."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster.rpc.link_thread import LinkThread
from cluster.rpc.rendezvous import StreamRendezvous
from cluster.transport.base import PeerLost, TransferTimeout

LONG_S = 10.0


async def test_jobs_run_in_order_on_one_thread():
    thread, ran = LinkThread("t"), []
    jobs = [
        thread.submit(lambda index=index: ran.append((index, threading.get_ident())))
        for index in range(50)
    ]
    await asyncio.gather(*jobs)
    assert [index for index, _ in ran] == list(range(50))
    assert len({ident for _, ident in ran}) == 1
    assert ran[0][1] != threading.get_ident()
    thread.stop_after(lambda: ran.append("last"))
    await asyncio.wait_for(thread.ended, LONG_S)
    assert ran[-1] == "last"


async def test_a_failing_job_is_its_callers_news_only():
    thread = LinkThread("t")

    def fail() -> None:
        raise ValueError("no")

    unheard, heard = thread.submit(fail), thread.submit(fail)
    with pytest.raises(ValueError, match="no"):
        await heard
    assert await thread.submit(lambda: 5) == 5
    assert unheard.done()
    thread.stop_after(lambda: None)
    await thread.ended


async def test_a_cancelled_job_still_runs_and_disturbs_nobody():
    thread, may_run, ran = LinkThread("t"), threading.Event(), threading.Event()

    def job() -> None:
        assert may_run.wait(LONG_S)
        ran.set()

    cancelled = thread.submit(job)
    cancelled.cancel()
    may_run.set()
    await thread.submit(lambda: None)
    assert ran.is_set()
    thread.stop_after(lambda: None)
    await thread.ended


def test_a_rendezvous_publishes_what_is_set_and_hands_out_what_is_delivered():
    published = []
    rendezvous = StreamRendezvous(lambda key, value: published.append((key, value)))
    rendezvous.set("mine", b"1")
    rendezvous.deliver("theirs", b"2")
    assert published == [("mine", b"1")]
    assert rendezvous.get("theirs", LONG_S) == b"2"


def test_a_rendezvous_ends_with_its_stream():
    rendezvous = StreamRendezvous(lambda key, value: None)
    with pytest.raises(TransferTimeout):
        rendezvous.get("k", 0.01)
    waiting = threading.Timer(0.05, rendezvous.fail, ("stream gone",))
    waiting.start()
    with pytest.raises(PeerLost, match="stream gone"):
        rendezvous.get("k", LONG_S)
    waiting.join()


def test_a_rendezvous_takes_only_so_much():
    rendezvous = StreamRendezvous(lambda key, value: None)
    with pytest.raises(PeerLost, match="too big"):
        rendezvous.deliver("k", b"x" * (1 << 17))
    with pytest.raises(PeerLost, match="too big"):
        rendezvous.deliver("k" * 1000, b"x")
    for index in range(64):
        rendezvous.deliver(f"k{index}", b"x")
    with pytest.raises(PeerLost, match="too many"):
        rendezvous.deliver("k64", b"x")
