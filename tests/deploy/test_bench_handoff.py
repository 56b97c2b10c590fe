"""What ``handoff`` makes of pairs of workers whose times are known, and one real pair."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import TYPE_CHECKING

import pytest

from cluster.config import Dtype, LimitsConfig, PoolConfig, Role, TransportKind
from cluster.errors import HandoffFailed, StartupError
from cluster.lifetime import LegTimes
from deploy.bench import handoff
from deploy.bench.cluster import bench_config
from deploy.bench.site import prompt_ids
from deploy.bench.worker_pair import worker_pair
from tests.deploy.bench_doors import make_site
from tests.factories_model import write_tiny_llama

if TYPE_CHECKING:
    from cluster.config import DeployConfig

SIZE = handoff.HandoffSize(num_tokens=40, num_bytes=3000, num_requests=4)
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4
"""K and V, 2 layers, 2 KV heads, head size 16, fp32."""


@pytest.fixture
def pairs(monkeypatch) -> list[DeployConfig]:
    """Pairs that behave as their settings would have it; returns what was started."""
    started = []

    class Pair:
        def __init__(self, config: DeployConfig) -> None:
            is_chunked = config.pools[0].chunk_tokens > 0
            streams = config.limits.stream_kv
            is_shm = config.transport is TransportKind.SHM
            self.times = LegTimes(
                queue_s=0.001,
                compute_s=0.109 if is_chunked else 0.1 if streams else 0.099,
                exposed_s=(0.004 if streams else 0.008) / (2 if is_shm else 1)
                + (0.001 if config.limits.kv_digest else 0.0),
                transfer_bytes=3000,
            )

        async def request(self, prompt: list[int]) -> LegTimes:
            assert len(prompt) == 40
            return self.times

        async def prefill(self, prompt: list[int]) -> LegTimes:
            assert len(prompt) == 40
            return LegTimes(queue_s=0.001, compute_s=0.098)

    @contextlib.asynccontextmanager
    async def fake_pair(config, model):
        started.append(config)
        yield Pair(config)

    class Raw:
        def transfer(self, times):
            return [0.002] * times

    @contextlib.contextmanager
    def fake_raw(num_bytes, sender_core, receiver_core):
        yield Raw()

    monkeypatch.setattr(handoff, "worker_pair", fake_pair)
    monkeypatch.setattr(handoff, "gloo_pair", fake_raw)
    return started


def test_every_way_of_moving_kv_is_compared_with_its_simpler_one(tmp_path, pairs):
    rows = handoff.measure(make_site(tmp_path), SIZE)

    assert {row.name for row in rows} == {"handoff"}
    gloo, shm = rows[:7], rows[7:]
    for of_transport, name, factor, limit in ((gloo, "Gloo", 1, 5), (shm, "shared memory", 2, 3)):
        assert all(name in row.what for row in of_transport)
        whole, layers, digest, chunked, prefill, same_worker, in_chunks = of_transport
        assert (whole.value, whole.reference) == (pytest.approx(8 / factor), pytest.approx(2))
        for streamed in (layers, chunked):
            assert streamed.value == pytest.approx(4 / factor)
            assert streamed.reference == pytest.approx(whole.value)
            assert str(streamed.bar) == f"value <= {limit}"
            assert streamed.holds is True
        assert digest.value - digest.reference == pytest.approx(1)
        assert digest.bar is None
        assert prefill.ratio == pytest.approx(101 / 100)
        assert str(prefill.bar) == "ratio <= 1.03"
        assert same_worker.ratio == pytest.approx(101 / 99)
        assert same_worker.bar is None
        assert in_chunks.ratio == pytest.approx(110 / 100)
        assert in_chunks.bar is None


def test_pairs_differ_in_nothing_but_what_is_compared(tmp_path, pairs):
    handoff.measure(make_site(tmp_path), SIZE)

    base = bench_config("trial.yaml")
    assert len(pairs) == 8
    seen = {
        (each.transport, each.pools[0].chunk_tokens, each.limits.stream_kv, each.limits.kv_digest)
        for each in pairs
    }
    kinds = (TransportKind.TORCH_DIST, TransportKind.SHM)
    variants = ((0, False, False), (0, True, False), (0, True, True), (128, True, False))
    assert seen == {(kind, *variant) for kind in kinds for variant in variants}
    small = [dataclasses.replace(pool, kv_tokens=2048) for pool in base.pools]
    for each in pairs:
        same = dataclasses.replace(each.pools[0], chunk_tokens=base.pools[0].chunk_tokens)
        assert [same, *each.pools[1:]] == small


def test_other_bytes_are_not_measured(tmp_path, pairs):
    size = dataclasses.replace(SIZE, num_bytes=2000)
    with pytest.raises(HandoffFailed, match="3000 bytes moved for 40 tokens, 2000 should have"):
        handoff.measure(make_site(tmp_path), size)


def make_config(model, transport: TransportKind) -> DeployConfig:
    def pool(name: str, role: Role, **fields) -> PoolConfig:
        return PoolConfig(name=name, role=role, dtype=Dtype.FP32, kv_tokens=1024, **fields)

    base = bench_config("trial.yaml")
    return dataclasses.replace(
        base,
        pools=(pool("p", Role.PREFILL, chunk_tokens=32), pool("d", Role.DECODE)),
        service_cores=(),
        transport=transport,
        limits=LimitsConfig(kv_digest=True),
        model=dataclasses.replace(base.model, path=str(model), max_model_len=512),
    )


@pytest.mark.slow
async def test_a_real_pair_moves_the_blocks_of_a_prompt_through_shared_memory(tmp_path):
    """P-13: two processes; chunks, a digest, and one link through memory."""
    model = write_tiny_llama(tmp_path / "tiny")
    async with worker_pair(make_config(model, TransportKind.AUTO), model) as pair:
        for num_tokens in (100, 16):
            times = await pair.request(prompt_ids(num_tokens, random.Random(num_tokens)))
            assert times.transfer_bytes == -(-num_tokens // 16) * BLOCK_BYTES
            assert times.exposed_s > 0
        # The same worker also computes what it hands to nobody.
        assert (await pair.prefill(prompt_ids(100, random.Random(1)))).transfer_bytes == 0


@pytest.mark.slow
async def test_a_pair_that_cannot_start_says_why(tmp_path):
    config = make_config(tmp_path, TransportKind.LOOPBACK)
    with pytest.raises(StartupError, match="a worker ended: "):
        async with worker_pair(config, tmp_path):
            pass
