"""CASES P-26: which links a prefill worker calls broken."""

from prefill_worker.broken_links import BrokenLinks


def test_failures_that_lie_apart_make_a_broken_link():
    links = BrokenLinks()
    for now in (0.0, 0.1, 0.9):
        links.failed("d0", now)
    assert links.names(0.9) == (), "they all went down with the one link"
    links.failed("d1", 1.5)
    links.failed("d0", 1.5)
    assert links.names(1.5) == ("d0",)
    links.worked("d0")
    links.failed("d0", 2.0)
    assert links.names(2.0) == (), "it has worked in between"


def test_what_is_not_tried_any_more_is_forgotten():
    links = BrokenLinks()
    links.failed("d0", 0.0)
    links.failed("d0", 5.0)
    assert links.names(64.0) == ("d0",)
    assert links.names(66.0) == ()
    links.failed("d0", 66.0)
    assert links.names(66.0) == ()
