"""Sequences start behind what is known of their prompts, and nothing else changes for them.

The fake runner compares the whole history of every share with what its blocks hold, so a block
that was written by two, or found by whom it doesn't belong to, fails at the step that reads it.
"""

import pytest

from cluster.errors import Cancelled
from cluster.kv.block_pool import BlockCounts
from cluster.request import PromptPrefix
from tests.factories import (
    BLOCK_SIZE,
    Engine,
    expected_tokens,
    make_key,
    make_params,
    make_prefix_index,
    make_prompt,
    make_sequence,
)

K = 5
"""Blocks of the prompt whose edges are tried."""
PROMPT = make_prompt(K * BLOCK_SIZE + 10, "shared")


@pytest.fixture
def make_engine():
    engines = []

    def make(**settings) -> Engine:
        engines.append(Engine(has_prefix_cache=True, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.assert_idle()
        assert engine.pool.counts().held == 0


def serve(engine: Engine, name: str, prompt_ids, **fields):
    """Run one sequence to its end and check its tokens; returns its end."""
    sequence = engine.add(name, prompt_ids=tuple(prompt_ids), max_tokens=3, **fields)
    engine.run_to_end()
    assert engine.tokens(sequence) == expected_tokens(name, 3)
    end = engine.end(sequence)
    assert end.num_cached_tokens + end.num_computed_tokens == len(prompt_ids) + 2
    return end


class TestEdges:
    @pytest.mark.parametrize("chunk_tokens", [0, 3])
    @pytest.mark.parametrize("extra", [-1, 0, 1])
    def test_a_repeated_prompt_computes_its_last_block_only(self, make_engine, extra, chunk_tokens):
        """P-17: k x BS and k x BS +- 1 tokens, three times; a draw always has its logits."""
        engine = make_engine(chunk_tokens=chunk_tokens)
        prompt = PROMPT[: K * BLOCK_SIZE + extra]
        expected = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        cached = [serve(engine, f"r{i}", prompt).num_cached_tokens for i in range(3)]
        assert cached == [0, expected, expected]
        assert expected < len(prompt)

    @pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE])
    def test_a_prompt_within_one_block_is_computed_whole(self, make_engine, num_tokens):
        """P-17: a whole block is no prefix of itself."""
        engine = make_engine()
        ends = [serve(engine, f"r{i}", PROMPT[:num_tokens]) for i in range(2)]
        assert [end.num_cached_tokens for end in ends] == [0, 0]

    def test_one_more_token_finds_the_whole_of_a_full_prompt(self, make_engine):
        engine = make_engine()
        serve(engine, "a", PROMPT[: K * BLOCK_SIZE])
        end = serve(engine, "b", PROMPT[: K * BLOCK_SIZE + 1])
        assert end.num_cached_tokens == K * BLOCK_SIZE

    @pytest.mark.parametrize(
        ("changed", "num_blocks"),
        [(0, 0), (BLOCK_SIZE - 1, 0), (BLOCK_SIZE, 1), (K * BLOCK_SIZE - 1, K - 1)],
    )
    def test_a_changed_token_hides_its_block_and_all_behind_it(
        self, make_engine, changed, num_blocks
    ):
        """P-17: with another first token nothing is found, with another last one all but that."""
        engine = make_engine()
        prompt = list(PROMPT[: K * BLOCK_SIZE])
        serve(engine, "a", prompt)
        prompt[changed] += 1
        assert serve(engine, "b", prompt).num_cached_tokens == num_blocks * BLOCK_SIZE

    def test_an_answer_is_part_of_the_next_turns_prefix(self, make_engine):
        engine = make_engine()
        first = engine.add("a", prompt_ids=PROMPT[:6], max_tokens=7)
        engine.run_to_end()
        turn = (*PROMPT[:6], *engine.tokens(first), 7, 8, 9)
        # The last token drawn was never computed: 12 of 13.
        assert serve(engine, "b", turn).num_cached_tokens == 12

    def test_only_computed_tokens_are_found(self, make_engine):
        engine = make_engine(chunk_tokens=6)
        first = engine.add("a", prompt_ids=PROMPT[:20], max_tokens=2)
        engine.step()
        engine.step()
        second = engine.add("b", prompt_ids=PROMPT[:20], max_tokens=2)
        engine.step()
        assert second.num_cached_tokens == 12
        engine.run_to_end()
        assert engine.tokens(first) == expected_tokens("a", 2)
        assert engine.tokens(second) == expected_tokens("b", 2)


class TestIsolation:
    def test_a_tenant_finds_its_own_only(self, make_engine):
        """P-18: A's second finds A's first, B's first finds nothing, and B's second its own."""
        engine = make_engine()
        tenants = ["a", "a", "b", "a", "b", "", ""]
        found = [
            serve(engine, f"r{i}", PROMPT[:21], tenant=tenant).num_cached_tokens
            for i, tenant in enumerate(tenants)
        ]
        assert found == [0, 20, 0, 20, 20, 0, 20]

    def test_sampling_does_not_split_the_cache(self, make_engine):
        """P-18: KV depends on tokens, not on how the next one is drawn."""
        engine = make_engine()
        serve(engine, "a", PROMPT[:21])
        params = make_params(3, temperature=0.7, seed=5)
        assert serve(engine, "b", PROMPT[:21], params=params).num_cached_tokens == 20

    def test_models_do_not_share(self):
        engine = Engine(has_prefix_cache=True)
        other = make_prefix_index(model_fingerprint="another")
        serve(engine, "a", PROMPT[:20])
        digests: list[bytes] = []
        other.extend(digests, "", PROMPT[:20])
        assert engine.pool.prefix.find(digests) == []

    def test_whoever_wants_its_prompts_logprobs_computes_every_position(self, make_engine):
        """P-07, P-17: a hit would skip what was asked for; others find what it computed."""
        engine = make_engine()
        params = make_params(3, prompt_logprobs=True)
        serve(engine, "a", PROMPT[:21])
        assert serve(engine, "b", PROMPT[:21], params=params).num_cached_tokens == 0
        engine = make_engine()
        serve(engine, "a", PROMPT[:21], params=params)
        assert serve(engine, "b", PROMPT[:21]).num_cached_tokens == 20

    def test_without_an_index_nothing_is_found(self):
        engine = Engine()
        assert [serve(engine, f"r{i}", PROMPT[:21]).num_cached_tokens for i in "ab"] == [0, 0]
        assert engine.pool.counts().cached == 0


class TestSharing:
    def test_many_read_the_same_blocks_at_a_time_and_write_only_their_own(self, make_engine):
        engine = make_engine(num_blocks=40)
        serve(engine, "first", PROMPT[:20])
        sequences = [
            engine.add(f"r{i}", prompt_ids=(*PROMPT[:20], i), max_tokens=9) for i in range(6)
        ]
        engine.step()
        assert engine.pool.counts().held == 5 + 6
        own = [set(sequence.block_ids[5:]) for sequence in sequences]
        assert len(set().union(*own)) == sum(map(len, own))
        for _ in range(8):
            engine.step()
            engine.pool.check()
        for i, sequence in enumerate(sequences):
            assert engine.tokens(sequence) == expected_tokens(f"r{i}", 9)

    def test_no_share_ever_writes_a_block_of_two(self, make_engine):
        """Nothing is copied on write, for what is shared is full and lies behind every write."""
        engine = make_engine(num_blocks=24, max_num_seqs=6, chunk_tokens=5)

        def check(plan) -> None:
            for share in plan.shares:
                for block_id in share.block_ids[share.start // BLOCK_SIZE :]:
                    assert engine.pool._num_holders[block_id] == 1
                    assert block_id not in engine.pool.prefix

        engine.runner.on_run = check
        for i in range(30):
            engine.add(f"r{i}", prompt_ids=(*PROMPT[: 5 + i % 16], i % 3), max_tokens=1 + i % 9)
            engine.step()
        engine.run_to_end()
        assert engine.scheduler.num_cached_tokens > 100

    def test_shared_blocks_leave_room_for_more_sequences(self, make_engine):
        """Two that would not fit beside one another do when they share their prompts."""
        engine = make_engine(num_blocks=8)
        serve(engine, "first", PROMPT[:21])
        for name in ("a", "b"):
            engine.add(name, prompt_ids=PROMPT[:21], max_tokens=2)
        engine.step()
        assert engine.scheduler.num_running == 2
        assert engine.pool.counts() == BlockCounts(free=1, held=7, importing=0)
        engine.run_to_end()

    def test_an_abort_takes_nothing_from_the_others(self, make_engine):
        engine = make_engine()
        serve(engine, "first", PROMPT[:20])
        stays = engine.add("stays", prompt_ids=PROMPT[:21], max_tokens=9)
        leaves = engine.add("leaves", prompt_ids=PROMPT[:21], max_tokens=9)
        engine.step()
        engine.step(before_commit=lambda: engine.abort(leaves))
        engine.pool.check()
        assert engine.pool.counts().held == 6
        engine.run_to_end()
        assert engine.tokens(stays) == expected_tokens("stays", 9)

    def test_an_aborted_step_makes_nothing_findable(self, make_engine):
        engine = make_engine()
        sequence = engine.add("a", prompt_ids=PROMPT[:21], max_tokens=9)
        engine.step(before_commit=lambda: engine.abort(sequence))
        assert engine.pool.counts().cached == 0
        assert serve(engine, "b", PROMPT[:21]).num_cached_tokens == 0

    def test_a_failed_step_makes_nothing_findable(self, make_engine):
        engine = make_engine()
        engine.add("a", prompt_ids=PROMPT[:21], max_tokens=9)
        engine.plan()
        engine.scheduler.abort_all(Cancelled("broken"), engine.clock.now())
        assert len(engine.pool.prefix) == 0
        engine.step()

    def test_an_export_goes_on_reading_what_others_found(self, make_engine):
        engine = make_engine()
        exported = engine.add("a", prompt_ids=PROMPT[:21], max_tokens=9, hands_over_at=1)
        engine.run_to_end()
        engine.pool.rename(exported.key, ("export", "h"))
        assert serve(engine, "b", PROMPT[:21]).num_cached_tokens == 20
        assert engine.pool.counts() == BlockCounts(free=94, held=6, importing=0)
        engine.pool.release(("export", "h"))
        assert engine.pool.counts() == BlockCounts(free=95, held=0, importing=0, cached=5)

    def test_imported_kv_is_found_too(self, make_engine):
        """P-17: on the decode half; what a handoff brought serves a local prefill."""
        engine = make_engine()
        imported = engine.add_imported("i", num_prompt_tokens=21, max_tokens=3)
        engine.run_to_end()
        assert engine.end(imported).num_cached_tokens == 0
        assert serve(engine, "l", make_prompt(21, "i")).num_cached_tokens == 20

    def test_an_import_that_computes_its_last_token_again_writes_into_no_findable_block(
        self, make_engine
    ):
        engine = make_engine()
        engine.pool.allocate(2, make_key("i"))
        sequence = make_sequence("i", num_prompt_tokens=8, num_computed_tokens=8, max_tokens=1)
        engine.runner.imported(sequence, engine.pool.blocks_of(sequence.key))
        engine.scheduler.add(sequence)
        assert sequence.num_tokens_left == 1
        assert engine.pool.prefix.block_ids() == set(sequence.block_ids[:1])
        engine.run_to_end()
        assert engine.tokens(sequence) == expected_tokens("i", 1)


class TestPreemption:
    def test_the_preempted_find_what_is_left_of_their_kv(self, make_engine):
        """P-15: the same tokens as undisturbed, and less to compute again."""
        engine, cold = (
            make_engine(num_blocks=7, chunk_tokens=5),
            Engine(num_blocks=7, chunk_tokens=5),
        )
        for world in (engine, cold):
            for name in ("old", "young"):
                sequence = world.add(name, num_prompt_tokens=7, max_tokens=12)
            world.run_to_end()
            assert world.tokens(sequence) == expected_tokens("young", 12)
            assert world.end(sequence).num_preemptions > 0
            assert world.scheduler.num_prefilled_tokens == 14
            assert world.scheduler.num_cached_tokens == 0
        computed, recomputed = (
            sum(end.num_computed_tokens for end in world.log.ends.values())
            for world in (engine, cold)
        )
        assert computed < recomputed

    def test_a_victim_frees_only_what_nobody_else_holds(self, make_engine):
        engine = make_engine(num_blocks=9)
        serve(engine, "first", PROMPT[:20])
        old = engine.add("old", prompt_ids=PROMPT[:21], max_tokens=12)
        young = engine.add("young", prompt_ids=PROMPT[:21], max_tokens=12)
        while not young.num_preemptions:
            assert engine.step() is not None
            engine.pool.check()
        assert engine.pool.blocks_of(old.key)[:5] == tuple(old.block_ids[:5])
        engine.run_to_end()
        assert engine.tokens(old) == expected_tokens("old", 12)
        assert engine.tokens(young) == expected_tokens("young", 12)

    def test_a_deadline_in_the_queue_holds_no_prefix(self, make_engine):
        engine = make_engine(max_num_seqs=1)
        serve(engine, "first", PROMPT[:20])
        engine.add("a", prompt_ids=PROMPT[:21], max_tokens=5)
        engine.add("b", prompt_ids=PROMPT[:21], deadline=engine.clock.now() + 0.015)
        engine.run_to_end()


def test_what_waits_for_blocks_is_named_once(monkeypatch):
    """A prompt that is looked up at every step while it waits is not hashed at every step."""
    engine = Engine(num_blocks=10, has_prefix_cache=True)
    made = []
    digest = engine.pool.prefix._digest
    monkeypatch.setattr(engine.pool.prefix, "_digest", lambda *a: made.append(a) or digest(*a))
    engine.pool.allocate(8, ("export", "h"))
    engine.add("a", num_prompt_tokens=20, max_tokens=2)
    for _ in range(5):
        assert engine.step() is None
    assert len(made) == 1 + 4
    engine.pool.release(("export", "h"))
    engine.run_to_end()
    assert len(made) == 1 + 5


def gone(engine):
    return sorted(engine.pool.prefix.take_gone()[0])


def test_the_control_plane_is_told_by_its_names_what_is_cached_no_more():
    """A name stands for two blocks; the end of a prompt goes first."""
    engine = Engine(num_blocks=10, chunk_tokens=4, has_prefix_cache=True)
    prefix = PromptPrefix(stride_tokens=2 * BLOCK_SIZE, names=(1, 2, 3))
    serve(engine, "a", PROMPT[:25], prefix=prefix)
    engine.pool.allocate(5, ("export", "h"))
    assert gone(engine) == [3]
    serve(engine, "b", PROMPT[:17], prefix=prefix)
    engine.pool.allocate(2, ("export", "i"))
    assert gone(engine) == [2]
    engine.pool.release(("export", "h"))
    engine.pool.release(("export", "i"))


def test_what_was_never_computed_has_no_name_and_what_is_computed_again_has_it_again():
    engine = Engine(num_blocks=9, chunk_tokens=8, has_prefix_cache=True)
    prefix = PromptPrefix(stride_tokens=2 * BLOCK_SIZE, names=(1, 2))
    sequence = engine.add("a", prompt_ids=PROMPT[:20], max_tokens=8, prefix=prefix)
    engine.step()
    engine.pool.prefix.miss(prefix.names)
    assert gone(engine) == [2], "it is still to come"
    while not sequence.output_ids:
        engine.step()
    engine.pool.prefix.miss(prefix.names)
    assert gone(engine) == []
    engine.scheduler._preempt(sequence)
    engine.pool.release(sequence.key)
    engine.pool.allocate(9, ("export", "h"))
    assert gone(engine) == [1, 2]
    engine.pool.release(("export", "h"))
    engine.run_to_end()
    engine.pool.prefix.miss(prefix.names)
    assert gone(engine) == []


@pytest.mark.parametrize("stride", [6, 2 * BLOCK_SIZE])
def test_names_at_other_places_than_block_edges_are_left_alone(stride):
    """Pools without a cache have no say in the stride."""
    engine = Engine(has_prefix_cache=True)
    prefix = PromptPrefix(stride_tokens=stride, names=(1,))
    serve(engine, "a", PROMPT[:20], prefix=prefix)
    engine.pool.prefix.miss(prefix.names)
    assert gone(engine) == ([1] if stride == 6 else [])
