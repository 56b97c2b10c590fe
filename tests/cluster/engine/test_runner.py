"""The runner's tokens against transformers' own, over every way of cutting the work."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config import Dtype
from cluster.engine import stored
from cluster.engine.batch import build_batch
from cluster.engine.plan import Plan
from cluster.engine.sequence import StoredLayers
from cluster.kv.cache import PagedCache
from cluster.model.loader import load_model
from cluster.request import SamplingParams
from tests.factories_model import write_tiny_llama
from tests.factories_runner import Driver, assert_matches, make_prompts

BORDERS = [1, 2, 15, 16, 17, 31, 32, 33, 64, 129, 300]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder, dtype=Dtype.FP32, device="cpu")


@pytest.fixture(scope="module")
def loaded_bf16(folder):
    return load_model(folder, dtype=Dtype.BF16, device="cpu")


def test_prompts_around_block_borders_alone(loaded, reference):
    for prompt in make_prompts(BORDERS):
        driver = Driver(loaded)
        driver.add(prompt)
        [output] = driver.run(20)
        assert_matches(reference, prompt, output)


@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 150])
def test_all_prompts_in_one_ragged_batch_in_chunks(loaded, reference, chunk):
    driver = Driver(loaded)
    prompts = make_prompts([length for length in BORDERS if length < 200 or chunk > 1])
    for prompt in prompts:
        driver.add(prompt)
    for prompt, output in zip(prompts, driver.run(6, chunk=chunk), strict=True):
        assert_matches(reference, prompt, output)


def test_a_chunk_that_draws_nothing_ends_with_the_last_layers_keys_and_values(loaded):
    """What follows them is computed for nobody; KV is the same, bit for bit."""
    heights = []
    last_mlp = loaded.model.model.layers[-1].mlp
    [prompt] = make_prompts([48])
    caches = []
    with_all, without = Driver(loaded), Driver(loaded)
    for driver, is_sampled in ((with_all, True), (without, False)):
        line = driver.add(prompt)
        [share] = driver.plan([line]).shares
        handle = last_mlp.register_forward_hook(lambda _m, args, _o: heights.append(args[0].shape))
        outcome = driver.runner.run(Plan((replace(share, is_sampled=is_sampled),)))
        handle.remove()
        assert len(outcome.sampled) == is_sampled
        rows = driver.cache.row_index(torch.tensor([line.block_ids]))
        caches.append(driver.cache.gather(1, rows).clone())
    assert heights == [(1, 48, 64)]
    assert caches[0].any()
    assert torch.equal(*caches)


def test_prompts_join_running_decodes(loaded, reference):
    driver = Driver(loaded)
    prompts = make_prompts([40, 5, 100, 1, 33], seed=1)
    for prompt in prompts:
        driver.add(prompt)
        driver.step(chunk=24)
        driver.step(chunk=24)
    for prompt, output in zip(prompts, driver.run(24, chunk=24), strict=True):
        assert_matches(reference, prompt, output)


def test_a_sequence_recomputed_in_other_blocks_goes_on_as_before(loaded, reference):
    driver = Driver(loaded)
    prompt = make_prompts([45])[0]
    line = driver.add(prompt)
    for _ in range(5):
        driver.step()
    line.num_computed, line.block_ids = 0, []
    [output] = driver.run(20, chunk=16)
    assert_matches(reference, prompt, output)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_sequence_moved_to_another_cache_goes_on_as_undisturbed(loaded, loaded_bf16, dtype):
    model = loaded if dtype == "fp32" else loaded_bf16
    prompt = make_prompts([77])[0]
    undisturbed, sender, receiver = Driver(model), Driver(model), Driver(model, num_blocks=32)
    undisturbed.add(prompt)
    [expected] = undisturbed.run(30)
    # STEP 1: the sender computes the prompt and the first token.
    source = sender.add(prompt)
    sender.step()
    num_bytes = len(source.block_ids) * sender.cache.layout.block_bytes
    staging = torch.empty(num_bytes, dtype=torch.uint8)
    sender.cache.export_blocks(source.block_ids, staging)
    # STEP 2: the receiver takes the bytes into blocks of other numbers.
    line = receiver.add(prompt)
    receiver.grow(line, len(prompt))
    receiver.cache.import_blocks(line.block_ids, staging)
    line.num_computed, line.output_ids = len(prompt), list(source.output_ids)
    [output] = receiver.run(30)
    assert output == expected
    returned = torch.empty_like(staging)
    undisturbed.cache.export_blocks(
        undisturbed.lines[0].block_ids[: len(source.block_ids)], returned
    )
    whole = len(prompt) // 16 * sender.cache.layout.block_bytes
    assert torch.equal(staging[:whole], returned[:whole])


@pytest.mark.parametrize("chunk", [0, 40])
def test_kv_that_left_by_layers_while_it_was_computed_is_the_same(loaded, monkeypatch, chunk):
    """Layers are as they will be when they are told of, and those behind them are not there yet."""
    monkeypatch.setattr(stored, "PART_BYTES", 1)
    monkeypatch.setattr(stored, "_MIN_BYTES", 1)
    prompt = make_prompts([77])[0]
    sender, receiver = Driver(loaded), Driver(loaded, num_blocks=32)
    source, line = sender.add(prompt), receiver.add(prompt)
    receiver.grow(line, len(prompt))
    told = []

    def move(layers: range) -> None:
        blocks = range(source.num_computed // 16, len(source.block_ids))
        num_bytes = len(blocks) * len(layers) * sender.cache.layout.layer_bytes
        staged = torch.empty(num_bytes, dtype=torch.uint8)
        sender.cache.export_blocks(source.block_ids[blocks.start :], staged, layers)
        receiver.cache.import_blocks(line.block_ids[blocks.start : blocks.stop], staged, layers)

    def on_stored(shares, num_layers) -> None:
        told.append(([share.key for share in shares], num_layers))
        move(range(num_layers))

    while not source.output_ids:
        (share,) = sender.plan([source], chunk=chunk).shares
        outcome = sender.runner.run(Plan((replace(share, stored=StoredLayers()),)), on_stored)
        move(range(1, 2))
        source.num_computed += len(share.token_ids)
        source.output_ids.extend(outcome.sampled.values())
    assert all(keys == [source.key] for keys, _ in told)
    # The step that draws the token tells of all layers, while it goes on to draw.
    assert [num_layers for _, num_layers in told] == ([1, 1, 2] if chunk else [1, 2])
    line.num_computed, line.output_ids = len(prompt), list(source.output_ids)
    undisturbed = Driver(loaded)
    undisturbed.add(prompt)
    assert receiver.run(20) == undisturbed.run(20, chunk=chunk)


def test_bf16_stays_close_to_fp32(loaded, loaded_bf16):
    prompt = make_prompts([64])[0]
    rows = []
    for model in (loaded, loaded_bf16):
        driver = Driver(model)
        batch = build_batch(driver.plan([driver.add(prompt)]), driver.cache)
        logits = model.forward(batch.input_ids_n, batch.positions_n, batch.rows_s, batch.attention)
        rows.append(logits[0].float())
    assert torch.corrcoef(torch.stack(rows))[0, 1] > 0.99


def test_seeded_draws_do_not_depend_on_neighbours(loaded):
    params = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, top_k=40, seed=11)
    prompts = make_prompts([20, 35, 3])
    alone = Driver(loaded)
    alone.add(prompts[0], params)
    together = Driver(loaded)
    for prompt, seed in zip(prompts, (11, 12, 13), strict=True):
        together.add(prompt, replace(params, seed=seed))
    assert alone.run(20)[0] == together.run(20, chunk=8)[0]


def test_nans_left_in_a_block_do_not_reach_its_next_holder(loaded, reference):
    driver = Driver(loaded)
    num_bytes = driver.cache.num_blocks * driver.cache.layout.block_bytes
    poison = torch.full((num_bytes // 4,), float("nan")).view(torch.uint8)
    driver.cache.import_blocks(range(driver.cache.num_blocks), poison)
    prompts = make_prompts([5, 16, 70])
    for prompt in prompts:
        driver.add(prompt)
    for prompt, output in zip(prompts, driver.run(20, chunk=13), strict=True):
        assert_matches(reference, prompt, output)


def test_a_step_without_a_last_token_draws_nothing(loaded):
    driver = Driver(loaded)
    line = driver.add(make_prompts([40])[0])
    driver.step(chunk=10)
    assert (line.num_computed, line.output_ids) == (10, [])


def test_decodes_of_very_different_lengths_are_not_padded_to_the_longest(loaded):
    driver = Driver(loaded, num_blocks=300)
    for prompt in make_prompts([900, 880, 20, 10, 5]):
        driver.add(prompt)
    driver.step()
    groups = build_batch(driver.plan(driver.lines), driver.cache).attention.decodes
    assert [len(group.lengths_b) for group in groups] == [2, 3]


def test_warm_up_fits_into_a_small_cache(loaded):
    Driver(loaded, num_blocks=2).runner.warm_up(num_tokens=512, num_seqs=4)


def test_a_cache_of_another_model_is_refused(loaded):
    cache = PagedCache(replace(loaded.layout(16), num_layers=1), 4, loaded.device)
    with pytest.raises(AssertionError, match="num_layers"):
        type(Driver(loaded).runner)(loaded, cache)


@pytest.mark.parametrize("kv_dtype", [Dtype.BF16, Dtype.FP16])
def test_kv_may_be_stored_in_fewer_bits_than_the_weights_have(loaded, kv_dtype):
    prompts = make_prompts([5, 33, 100])
    outputs = []
    for chunk in (0, 7):
        driver = Driver(loaded, kv_dtype=kv_dtype)
        for prompt in prompts:
            driver.add(prompt)
        outputs.append(driver.run(12, chunk=chunk))
    # The same rounded K and V, however the work is cut.
    assert outputs[0] == outputs[1]


def test_kv_may_be_stored_in_more_bits_than_the_weights_have(loaded_bf16):
    prompt, outputs = make_prompts([50])[0], []
    for kv_dtype in (Dtype.BF16, Dtype.FP32):
        driver = Driver(loaded_bf16, kv_dtype=kv_dtype)
        driver.add(prompt)
        outputs.append(driver.run(20))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("block_size", [8, 32])
def test_a_sequence_moved_to_blocks_of_another_size_goes_on_as_undisturbed(loaded, block_size):
    """P-22: a supported pair satisfies P-13."""
    prompt = make_prompts([77])[0]
    undisturbed, sender = Driver(loaded), Driver(loaded)
    receiver = Driver(loaded, block_size=block_size)
    undisturbed.add(prompt)
    [expected] = undisturbed.run(30)
    source = sender.add(prompt)
    sender.step()
    theirs = sender.cache.layout
    staging = torch.empty(len(source.block_ids) * theirs.block_bytes, dtype=torch.uint8)
    sender.cache.export_blocks(source.block_ids, staging)
    line = receiver.add(prompt)
    receiver.grow(line, len(prompt))
    receiver.cache.import_foreign(line.block_ids, range(len(prompt)), staging, theirs)
    line.num_computed, line.output_ids = len(prompt), list(source.output_ids)
    assert receiver.run(30) == [expected]


def test_the_batch_puts_longer_decodes_first_and_names_their_rows(loaded):
    driver = Driver(loaded)
    short, long, fresh = (driver.add(prompt) for prompt in make_prompts([5, 50, 20]))
    driver.step([short, long])
    plan = driver.plan(driver.lines)
    batch = build_batch(Plan(plan.shares), driver.cache)
    assert [share.key for share in batch.sampled] == [long.key, short.key, fresh.key]
    assert batch.positions_n.tolist() == [50, 5, *range(20)]
    assert batch.rows_s.tolist() == [0, 1, 21]
