"""Registration against the deploy file and the peers: what may differ, and how refusals show."""

import dataclasses

import pytest

from cluster.config import Dtype, PoolConfig, Role, TransportKind
from cluster.control.facts import BlockCounts
from cluster.control.readiness import can_serve, missing_roles
from cluster.errors import NoWorker, StartupError
from tests.cluster.control.factory import (
    grants,
    make_layout,
    make_pool,
    make_registration,
    rejects,
    two_pools,
)
from tests.cluster.control.story import SETTINGS, Story


def pool(name, role, **changes):
    values = {"kv_tokens": 1024, "max_num_seqs": 8, **changes}
    return PoolConfig(name=name, role=role, **values)


def registration(pool_config, index=0, **layout):
    values = {"block_size": pool_config.block_size, **layout}
    return make_registration(pool_config, index, layout=make_layout(**values).describe())


def refusal(story, stranger):
    with pytest.raises(StartupError) as caught:
        story.planner.register(stranger, story.now)
    return caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": "decoder"}, "did you mean 'decode'"),
        ({"role": Role.PREFILL}, "role: decode in the deploy file, prefill at the worker"),
        ({"transport": "loopback"}, "transport: torch_dist in the deploy file, loopback at the"),
        ({"num_slots": 3}, "max_num_seqs: 2 in the deploy file, 3 at the worker"),
        ({"num_blocks": 9}, "num_blocks: 64 in the deploy file, 9 at the worker"),
        ({"block_size": 8}, "block_size: 16 in the deploy file, 8 at the worker"),
        ({"max_model_len": 4096}, "max_model_len: 1 to 2048 in the deploy file, 4096 at the"),
        (
            {"layout": make_layout(block_size=8).describe()},
            "layout.block_size: 16 in the deploy file, 8 at the worker",
        ),
        (
            {"layout": make_layout(num_shards=2).describe()},
            "layout.num_shards: 1 in the deploy file, 2 at the worker",
        ),
        (
            {"layout": make_layout(shard_index=1).describe()},
            "layout.shard_index: 0 in the deploy file, 1 at the worker",
        ),
        ({"layout": ""}, "layout: not the fields"),
        ({"layout": make_layout().describe().replace("fp32", "int3")}, "layout.dtype: not one of"),
    ],
)
def test_a_worker_that_its_pool_does_not_describe_is_refused(changes, message):
    """P-22: with the field's name and both values."""
    story = Story()
    stranger = make_registration(story.config.pool("decode"), worker_id="w", incarnation="w1")
    assert message in refusal(story, dataclasses.replace(stranger, **changes))
    assert len(story.view().workers) == 2


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [
        ("num_layers", 2, 3),
        ("num_kv_heads", 1, 2),
        ("head_dim", 8, 16),
        ("model_fingerprint", "f", "g"),
    ],
)
def test_what_no_conversion_bridges_must_agree_between_pools(field, ours, theirs):
    """P-22."""
    story = Story(counts={"decode": 0})
    stranger = registration(story.config.pool("decode"), **{field: theirs})
    message = refusal(story, stranger)
    assert message == f"layout.{field}: {ours} at the other workers, {theirs} at this one"


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim"])
def test_whoever_comes_first_is_held_to_the_models_shape(field):
    """P-22: it is not the right ones, who come later, that are refused."""
    shape = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8}
    settings = dataclasses.replace(SETTINGS, model_layout=shape)
    story = Story(counts={"prefill": 0, "decode": 0}, settings=settings)
    prefill, decode = (story.config.pool(name) for name in ("prefill", "decode"))
    message = refusal(story, registration(prefill, **{field: 16}))
    assert message == f"layout.{field}: {shape[field]} in the model's config.json, 16 at the worker"
    assert [refused.reason for refused in story.view().refused] == [message]
    story.join(registration(prefill, index=1))
    story.join(registration(decode))
    assert len(story.view().workers) == 2


@pytest.mark.parametrize(
    ("field", "ours", "theirs"), [("tokenizer", "abc", "def"), ("max_model_len", 2048, 1024)]
)
def test_what_any_worker_must_do_alike(field, ours, theirs):
    """P-22: token ids and the longest context mean the same on every worker."""
    story = Story(counts={"prefill": 0, "decode": 0})
    story.join(make_registration(story.config.pool("prefill"), **{field: ours}))
    stranger = make_registration(story.config.pool("decode"), **{field: theirs})
    message = refusal(story, stranger)
    assert message == f"{field}: {ours} at the other workers, {theirs} at this one"


def test_pools_may_differ_in_block_size_and_dtype_but_not_their_own_workers():
    """P-22: each pool's own. Dtype AUTO is what its first worker found."""
    prefill = pool("prefill", Role.PREFILL, block_size=32)
    decode = pool("decode", Role.DECODE, block_size=16)
    story = Story(prefill, decode, counts={"prefill": 0, "decode": 0})
    story.join(registration(prefill, dtype="bf16"))
    story.join(registration(decode, dtype="fp32"))
    assert len(grants(story.want())) == 1
    message = refusal(story, registration(decode, 1, dtype="fp16"))
    assert message == "layout.dtype: fp32 at other workers of pool decode, fp16 at this one"


def test_a_stated_kv_dtype_is_checked():
    decode = pool("decode", Role.DECODE, dtype=Dtype.FP32, kv_dtype=Dtype.BF16)
    story = Story(pool("prefill", Role.PREFILL), decode, counts={"decode": 0})
    message = refusal(story, registration(decode, dtype="fp32"))
    assert message == "layout.dtype: bf16 in the deploy file, fp32 at the worker"
    story.join(registration(decode, dtype="bf16"))


def test_a_pool_with_a_transport_of_its_own_is_held_to_it():
    decode = pool("decode", Role.DECODE, transport=TransportKind.AUTO)
    story = Story(pool("prefill", Role.PREFILL), decode, counts={"decode": 0})
    message = refusal(story, registration(decode))
    assert message == "transport: auto in the deploy file, torch_dist at the worker"


def test_charges_bytes_and_room_go_by_each_workers_own_blocks():
    """100 tokens: 4 blocks of 32 there, 164 of the first tokens in 11 blocks of 16 here."""
    prefill = pool("prefill", Role.PREFILL, block_size=32)
    decode = pool("decode", Role.DECODE, block_size=16)
    story = Story(prefill, decode, counts={"prefill": 0, "decode": 0})
    sender = registration(prefill, dtype="bf16")
    story.join(sender)
    story.join(registration(decode, dtype="fp32"))
    (grant,) = grants(story.want(num_prompt_tokens=100, max_tokens=200))
    assert story.entry("prefill-0").charges[grant.grant_id].blocks == 4
    assert story.entry("decode-0").charges[grant.grant_id].blocks == 11
    (link,) = story.view().links
    assert link.in_flight_bytes == 4 * make_layout(block_size=32, dtype="bf16").block_bytes


def test_cached_blocks_are_room_and_fenced_ones_are_not():
    story = Story(*two_pools(kv_tokens=256, slots=8))
    full = BlockCounts(free=0, held=2, cached=4, fenced=10)
    story.report("decode-0", blocks=full)
    assert story.entry("decode-0").num_blocks_free == 4
    assert story.want("r1", num_prompt_tokens=64) == [], "5 blocks, 4 may be had"
    (grant,) = grants(story.report("decode-0", blocks=BlockCounts(held=2, free=1, cached=13)))
    assert grant.request_id == "r1"


def test_a_refusal_is_shown_until_its_worker_joins():
    story = Story(counts={"decode": 0})
    decode = story.config.pool("decode")
    story.now += 1.0
    refusal(story, registration(decode, num_layers=3))
    story.now += 2.0
    (shown,) = story.view().refused
    assert (shown.worker_id, shown.pool, shown.role) == ("decode-0", "decode", "decode")
    assert shown.reason == "layout.num_layers: 2 at the other workers, 3 at this one"
    assert shown.age_s == pytest.approx(2.0)
    assert story.view().counters["registrations_refused"] == 1
    story.join(registration(decode))
    assert story.view().refused == ()


def test_refusals_are_few_and_forgotten():
    story = Story(counts={"decode": 0})
    decode = story.config.pool("decode")
    for index in range(100):
        refusal(story, registration(decode, index, num_layers=3))
    shown = story.view().refused
    assert (len(shown), shown[-1].worker_id) == (64, "decode-99")
    story.now += SETTINGS.refused_keep_s + 1.0
    assert story.view().refused == ()


def test_a_client_is_told_why_no_pair_is_left():
    """P-22: role, field and both values; no worker, no host."""
    story = Story(counts={"decode": 0})
    refusal(story, registration(story.config.pool("decode"), num_layers=3))
    (reject,) = rejects(story.want())
    assert isinstance(reject.error, NoWorker)
    expected = (
        "no decode worker: one was refused, "
        "layout.num_layers: 2 at the other workers, 3 at this one"
    )
    assert reject.error.message == expected


def test_a_view_says_which_roles_lack_a_worker():
    story = Story()
    assert missing_roles(story.view()) == ()
    story.leave("prefill-0")
    assert (missing_roles(story.view()), can_serve(story.view())) == ((Role.PREFILL,), True)
    story.leave("decode-0")
    assert missing_roles(story.view()) == (Role.PREFILL, Role.DECODE)
    assert not can_serve(story.view())
    assert missing_roles(Story(make_pool("both", Role.MIXED)).view()) == ()
