"""A block's name says everything its KV depends on, and nothing else."""

import struct

import pytest

from cluster.kv.prefix_index import PrefixIndex
from tests.factories import BLOCK_SIZE, make_prefix_index

KEY = b"0123456789abcdef"
IDS = list(range(100, 100 + 3 * BLOCK_SIZE))


def names(index: PrefixIndex, token_ids=IDS, tenant: str = "a") -> list[bytes]:
    digests: list[bytes] = []
    index.extend(digests, tenant, token_ids)
    return digests


def test_each_full_block_has_one_name_and_a_partly_filled_one_has_none():
    index = make_prefix_index()
    assert [len(names(index, IDS[:n])) for n in (0, 3, 4, 5, 8, 11, 12)] == [0, 0, 1, 1, 2, 2, 3]


def test_names_do_not_depend_on_how_they_were_asked_for():
    index = make_prefix_index()
    digests = names(index, IDS[:BLOCK_SIZE])
    index.extend(digests, "a", IDS[BLOCK_SIZE:])
    assert digests == names(index)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_changed_token_renames_its_block_and_all_behind_it(changed):
    index = make_prefix_index()
    other = list(IDS)
    other[changed * BLOCK_SIZE] += 1
    is_same = [a == b for a, b in zip(names(index), names(index, other), strict=True)]
    assert is_same == [block < changed for block in range(3)]


def test_tenant_model_block_size_and_key_all_take_part():
    """P-18, S-12: none of them can be traded for another, so no two cases share a name."""
    kinds = [
        (KEY, "model", BLOCK_SIZE, "a"),
        (KEY, "model", BLOCK_SIZE, "b"),
        (KEY, "model", BLOCK_SIZE, ""),
        (KEY, "modela", BLOCK_SIZE, ""),
        (KEY, "mode", BLOCK_SIZE, "la"),
        (KEY, "lamodel", BLOCK_SIZE, ""),
        (KEY, "model", 2, "a"),
        (KEY + b"g", "model", BLOCK_SIZE, "a"),
    ]
    found = set()
    for key, model, block_size, tenant in kinds:
        index = PrefixIndex(key=key, model_fingerprint=model, block_size=block_size)
        found.update(names(index, tenant=tenant))
    assert len(found) == 7 * 3 + 6


def test_a_tenant_named_like_anothers_digest_finds_nothing_of_it():
    """P-18: what a tenant may choose freely cannot stand for the chain of another."""
    index = make_prefix_index()
    theirs = names(index)
    for salt in (theirs[0].hex(), "a\0", "a" + "\0" * 24, struct.pack("<Q", 1).decode()):
        assert not set(names(index, tenant=salt)) & set(theirs)


def test_tenants_share_names_where_that_is_configured():
    """And still nobody who has another key, model or block size."""
    index = PrefixIndex(key=KEY, model_fingerprint="m", block_size=BLOCK_SIZE, is_shared=True)
    assert names(index, tenant="a") == names(index, tenant="b") == names(index, tenant="")
    other = PrefixIndex(key=KEY, model_fingerprint="n", block_size=BLOCK_SIZE, is_shared=True)
    assert not set(names(index)) & set(names(other))


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 65])
def test_a_weak_key_is_refused(key):
    with pytest.raises(ValueError, match="16 to 64 bytes"):
        PrefixIndex(key=key, model_fingerprint="m", block_size=4)


def test_the_longest_known_beginning_is_found():
    index = make_prefix_index()
    first, second, third = names(index)
    index.put(first, 7)
    index.put(third, 9)
    assert index.find([first, second, third]) == [7]
    index.put(second, 8)
    assert index.find([first, second, third]) == [7, 8, 9]
    index.forget(7)
    index.forget(7)
    assert index.find([first, second, third]) == []
    assert 7 not in index
    assert (len(index), index.block_ids()) == (2, {8, 9})


def test_the_same_kv_is_found_in_one_block_and_a_block_has_one_name():
    index = make_prefix_index()
    first, second, _ = names(index)
    index.put(first, 7)
    index.put(first, 8)
    index.put(second, 7)
    assert index.find([first]) == [7]
    assert index.find([second]) == []
    assert 8 not in index


# ---- the control plane's names


def named(index: PrefixIndex, *numbers: int) -> list[bytes]:
    """Three blocks, of which those with a number get a name."""
    digests = names(index)
    for block_id, digest in enumerate(digests):
        index.put(digest, block_id)
    for digest, number in zip(digests, numbers, strict=False):
        index.name(digest, number)
    return digests


def test_what_is_forgotten_is_told_once_by_its_name():
    index = make_prefix_index()
    digests = named(index, 11, 12)
    assert index.take_gone() == ((), False)
    index.forget(1)
    index.forget(2)
    assert index.take_gone() == ((12,), False)
    assert index.take_gone() == ((), False)
    index.miss((11, 12, 13))
    index.put(digests[1], 5)
    index.name(digests[1], 12)
    assert index.take_gone() == ((13,), False), "12 is there again before anybody was told"


def test_a_block_has_the_name_that_it_was_given_last():
    """A control plane that starts again names everything anew."""
    index = make_prefix_index()
    digests = named(index, 11)
    index.name(digests[0], 21)
    assert index.take_gone() == ((11,), False)
    index.forget(0)
    assert index.take_gone() == ((21,), False)
    index.name(digests[0], 21)
    assert index.take_gone() == ((21,), False), "nothing has this digest any more"


def test_names_that_nobody_asks_for_are_bounded_and_the_loss_is_told(monkeypatch):
    monkeypatch.setattr("cluster.kv.prefix_index._MAX_GONE", 10)
    monkeypatch.setattr("cluster.kv.prefix_index._MAX_TOLD", 4)
    index = make_prefix_index()
    index.miss(range(10))
    assert index.take_gone() == ((0, 1, 2, 3), False)
    index.miss(range(20, 25))
    assert index.take_gone() == ((24,), True)
    assert index.take_gone() == ((), False)


def test_a_name_that_two_tenants_share_is_of_the_block_named_last():
    """Routers and workers may not agree for a while on what a pool shares."""
    index = make_prefix_index()
    first, second = names(index, tenant="a")[0], names(index, tenant="b")[0]
    index.put(first, 1)
    index.put(second, 2)
    index.name(first, 7)
    index.name(second, 7)
    index.forget(2)
    index.forget(1)
    assert index.take_gone() == ((7,), False)
