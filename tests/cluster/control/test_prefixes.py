"""Who is believed to have which prompts, and what comes of it: placement, order, local prefill."""

import secrets
from dataclasses import replace

import pytest

from cluster.config import LocalPrefill, Policy, PoolConfig, Role
from cluster.control.convert import want_from_wire, want_to_wire
from cluster.control.prefixes import PrefixTable
from cluster.errors import InvalidRequest
from cluster.request import MAX_PREFIX_NAMES, NO_PREFIX, PromptPrefix
from router.prefix import PrefixNames
from tests.cluster.control.factory import grants, make_want, two_pools
from tests.cluster.control.story import Story
from tests.factories import Engine

KEY = secrets.token_bytes(32)
NAMES = PrefixNames("tiny", two_pools())
CHAT = tuple(range(400))


def named(ids=CHAT, tenant="", key=KEY):
    return NAMES.of(key, tenant, tuple(ids))


def prefix(*names, stride=16):
    return PromptPrefix(stride_tokens=stride, names=names)


# ---- names


def test_a_name_stands_for_tenant_and_all_tokens_before_it():
    """P-18, S-12: another tenant, key, model or first token, and nothing has the same name."""
    names = named().names
    assert len(names) == len(set(names)) == 24, "the last token is never cached"
    assert named((*CHAT[:64], 9, *CHAT[65:])).names[:4] == names[:4]
    assert not set(named((*CHAT[:64], 9, *CHAT[65:])).names[4:]) & set(names)
    for other in (
        named(tenant="b"),
        named(key=secrets.token_bytes(32)),
        named((7, *CHAT[1:])),
        PrefixNames("other", two_pools()).of(KEY, "", CHAT),
    ):
        assert not set(other.names) & set(names)


@pytest.mark.parametrize("are_shared", [(True, True), (True, False)])
def test_tenants_share_names_only_where_all_caches_are_shared(are_shared):
    pools = [
        replace(pool, prefix_shared=is_shared)
        for pool, is_shared in zip(two_pools(), are_shared, strict=True)
    ]
    names = PrefixNames("tiny", pools)
    assert (names.of(KEY, "a", CHAT) == names.of(KEY, "b", CHAT)) is all(are_shared)


@pytest.mark.parametrize(
    ("num_tokens", "stride", "count"),
    [(16, 0, 0), (17, 16, 1), (513, 16, 32), (529, 32, 16), (100_000, 512, 32)],
)
def test_a_prompt_of_any_length_has_a_bounded_number_of_names(num_tokens, stride, count):
    found = named(range(num_tokens))
    assert (found.stride_tokens, len(found.names)) == (stride, count)
    assert count <= MAX_PREFIX_NAMES


def test_a_longer_prompt_meets_a_shorter_one_at_the_strides_they_share():
    short, long = named(range(500)), named(range(1000))
    assert set(short.names[1::2]) < set(long.names)


def test_without_a_key_or_a_prefix_cache_nothing_is_named():
    assert named(key=b"") == NO_PREFIX
    plain = (PoolConfig(name="both", role=Role.MIXED, prefix_cache=False),)
    assert PrefixNames("tiny", plain).of(KEY, "", CHAT) == NO_PREFIX


def test_names_cross_the_wire_and_too_many_do_not():
    want = make_want(num_prompt_tokens=400, prefix=named())
    assert want_from_wire(want_to_wire(want)) == want
    many_names = prefix(*range(MAX_PREFIX_NAMES + 1), stride=1)
    for bad in (prefix(*range(26)), many_names, prefix(1, stride=0)):
        with pytest.raises(InvalidRequest):
            want_from_wire(want_to_wire(make_want(num_prompt_tokens=400, prefix=bad)))


# ---- the table


def test_the_longest_known_beginning_counts():
    table = PrefixTable()
    table.learn("w0", 1000, prefix(1, 2, 3))
    table.learn("w1", 1000, prefix(1, 2, 9))
    assert table.holders(prefix(1, 2, 3, 4)) == {"w0": 48, "w1": 32}
    assert table.holders(prefix(7, 8)) == {}
    table.forget("w0")
    assert table.holders(prefix(1, 2, 3, 4)) == {"w1": 32}


def test_a_name_that_stands_for_more_now_is_counted_as_that():
    table = PrefixTable()
    table.learn("w", 80, prefix(1, 2))
    table.learn("w", 80, prefix(1, stride=32))
    table.learn("w", 80, prefix(3, 4, 5))
    assert table.holders(prefix(2)) == {}, "32 + 16 + 48 tokens are too many"
    assert table.holders(prefix(1, stride=32)) == {"w": 32}


def test_no_more_is_remembered_than_the_cache_holds_the_ends_of_the_oldest_go_first():
    table = PrefixTable()
    table.learn("w", 64, prefix(1, 2, 3))
    table.learn("w", 64, prefix(5, 6))
    assert table.holders(prefix(1, 2, 3)) == {"w": 32}
    assert table.holders(prefix(5, 6)) == {"w": 32}
    table.learn("w", 64, prefix(1, 2))
    table.learn("w", 64, prefix(8))
    assert table.holders(prefix(5, 6)) == {"w": 16}, "what was used again stays"


def test_memory_is_bounded_whatever_comes(monkeypatch):
    monkeypatch.setattr("cluster.control.prefixes._MAX_REMEMBERED", 400)
    table = PrefixTable()
    for number in range(300):
        for worker in range(3):
            table.learn(f"w{worker}", 1 << 30, prefix(*range(number * 9, number * 9 + 9)))
    assert sum(len(cache.names) for cache in table._caches.values()) <= 2 * 400
    assert len(table._holders) <= 2 * 400
    for worker in range(3):
        table.forget(f"w{worker}")
    assert not table._holders


def test_what_a_worker_has_lost_counts_no_more():
    table = PrefixTable()
    table.learn("w0", 1000, prefix(1, 2, 3))
    table.learn("w1", 1000, prefix(1, 2))
    table.drop("w0", (3, 2, 77))
    assert table.holders(prefix(1, 2, 3)) == {"w1": 32, "w0": 16}
    table.drop("w0", (1,))
    table.drop("unheard of", (1, 2))
    assert table.holders(prefix(1, 2, 3)) == {"w1": 32}
    table.learn("w0", 48, prefix(1, 2, 3))
    assert table.holders(prefix(1, 2, 3))["w0"] == 48, "room that was freed is counted as free"


# ---- what comes of it


def many(**scheduling):
    """More prefill workers than a shortlist holds."""
    scheduling = {"local_prefill": LocalPrefill.NEVER, **scheduling}
    return Story(*two_pools(kv_tokens=4096, slots=32), counts={"prefill": 12}, **scheduling)


def placed(story, request_id, **changes):
    values = {"num_prompt_tokens": len(CHAT), "prefix": named(), **changes}
    (grant,) = grants(story.want(request_id, **values))
    return grant


def others_between(story, count=14):
    for index in range(count):
        story.done(placed(story, f"other{index}", prefix=NO_PREFIX))


def test_a_prompt_goes_where_most_of_it_is_cached():
    """P-18: for its own tenant; another's same prompt is placed as if nobody had it."""
    story = many()
    first = placed(story, "r0", tenant="a", prefix=named(tenant="a"))
    story.done(first)
    others_between(story)
    longer = named((*CHAT, *range(100)), tenant="a")
    again = placed(story, "r1", tenant="a", num_prompt_tokens=500, prefix=longer)
    assert again.prefill == first.prefill
    assert again.predicted_s == pytest.approx(0.116), "384 of 500 tokens are there"
    other = placed(story, "r2", tenant="b", prefix=named(tenant="b"))
    assert other.prefill != first.prefill, "the least recently granted goes first"
    assert other.predicted_s == pytest.approx(0.4)


def test_a_cached_prompt_does_not_wait_for_its_cache_longer_than_it_saves():
    """384 ms are saved; so many tokens of others before it cost more than that."""
    story = many()
    first = placed(story, "r0")
    story.done(first)
    others_between(story)
    story.report(first.prefill.worker_id, queued_tokens=300)
    again = placed(story, "r1")
    assert again.prefill == first.prefill
    story.done(again)
    story.report(first.prefill.worker_id, queued_tokens=500)
    assert placed(story, "r2").prefill != first.prefill


def test_a_worker_that_restarts_has_nothing():
    story = many()
    first = placed(story, "r0")
    worker = story.workers[first.prefill.worker_id]
    story.done(first)
    story.leave(first.prefill.worker_id)
    story.join(worker)
    others_between(story)
    assert placed(story, "r1").predicted_s == pytest.approx(0.4)


def test_a_chat_that_a_decode_worker_has_goes_on_there():
    """Its KV came by the first handoff; of 400 tokens 16 are left, and nothing is moved."""
    story = Story(*two_pools(kv_tokens=4096, slots=8))
    first = placed(story, "r0")
    assert first.prefill is not None
    story.beat()
    story.report("prefill-0", queued_tokens=500)
    again = placed(story, "r1")
    assert (again.prefill, again.decode.worker_id) == (None, "decode-0")
    assert again.reason.startswith("local, cached: ")
    assert story.view().counters["grants_local_cached"] == 1
    assert placed(story, "another", prefix=NO_PREFIX).prefill is not None


def test_placement_stops_counting_what_a_worker_has_evicted():
    """A cache is filled by others until a prompt's end is gone, and then all of it."""
    story = many()
    first = placed(story, "r0")
    worker_id = first.prefill.worker_id
    engine = Engine(num_blocks=120, has_prefix_cache=True)  # 480 tokens
    engine.add("r0", prompt_ids=CHAT, max_tokens=1, prefix=named())
    engine.run_to_end()
    story.done(first)

    def evict(request_id, num_tokens):
        engine.add(request_id, num_prompt_tokens=num_tokens, max_tokens=1)
        engine.run_to_end()
        gone, has_lost = engine.pool.prefix.take_gone()
        assert not has_lost
        story.report(worker_id, gone_prefixes=gone)
        assert story.entry(worker_id).report.gone_prefixes == (), "no client is shown names"
        return story.planner._ledger.prefixes.holders(named()).get(worker_id, 0)

    assert evict("small", 40) == 384
    assert evict("middling", 200) == 240, "the end goes first, in blocks of the worker's size"
    others_between(story)
    again = placed(story, "r1")
    assert again.prefill.worker_id == worker_id
    assert again.predicted_s == pytest.approx(0.16), "160 tokens are to be computed"
    story.done(again)
    engine.add("r1", prompt_ids=CHAT, max_tokens=1, prefix=named())
    engine.run_to_end()
    assert evict("huge", 470) == 0
    others_between(story)
    after = placed(story, "r2")
    assert after.prefill.worker_id != worker_id, "the least recently granted goes first"
    assert after.predicted_s == pytest.approx(0.4)


@pytest.mark.parametrize("how", ["lost count", "another stream"])
def test_of_a_worker_that_lost_count_nothing_is_believed(how):
    """Names may have been lost with a stream that broke, too: the same incarnation, but no news."""
    story = many()
    first = placed(story, "r0")
    worker = story.workers[first.prefill.worker_id]
    story.done(first)
    if how == "lost count":
        story.report(worker.worker_id, has_lost_prefixes=True)
    else:
        story.join(worker)
    others_between(story)
    assert placed(story, "r1").predicted_s == pytest.approx(0.4)


def test_the_least_uncached_work_goes_first():
    never = LocalPrefill.NEVER
    story = Story(*two_pools(slots=1), policy=Policy.SJF, local_prefill=never)
    running = placed(story, "cached", max_tokens=4)
    story.want("short", num_prompt_tokens=100, max_tokens=4)
    story.want("long", num_prompt_tokens=len(CHAT), max_tokens=4, prefix=named())
    story.report("prefill-0")
    story.report("decode-0", running.grant_id)
    story.done(running)
    (next_one,) = grants(story.report("decode-0"))
    assert next_one.request_id == "long", "16 tokens are left of it"
