"""What the engine's tests run: engines and loops that clean up, and a tiny Llama, transformers' own
and ours."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config import Dtype
from cluster.engine.runner import ModelRunner
from cluster.kv.cache import PagedCache
from cluster.kv.swap_memory import SwapMemory
from cluster.model.loader import load_model
from tests.cluster.engine.loop_world import WAIT_S, World
from tests.factories import BLOCK_SIZE, Engine
from tests.factories_model import write_tiny_llama


class RealRunner(ModelRunner):
    """For engines stepped by hand, which tell their fake runner what comes."""

    def expect(self, sequence):
        """Real tensors need no forewarning."""


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """More of them only wait for one another, with matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_reference(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny_loaded(tiny_folder):
    return load_model(tiny_folder, dtype=Dtype.FP32, device="cpu")


@pytest.fixture(scope="session")
def make_model_engine(tiny_loaded):
    """Engines stepped by hand, with real tensors under them."""

    def make(*, num_blocks=200, swap_slots=0, **options):
        cache = PagedCache(tiny_loaded.layout(BLOCK_SIZE), num_blocks, tiny_loaded.device)
        return Engine(
            num_blocks=num_blocks, runner=RealRunner(tiny_loaded, cache), swap_slots=swap_slots,
            copier=SwapMemory(cache, swap_slots) if swap_slots else None, **options,
        )  # fmt: skip

    return make


@pytest.fixture
def make_engine():
    engines = []

    def make(**settings) -> Engine:
        engines.append(Engine(**settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.pool.check()
        assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
        assert engine.pool.counts().held == 0


@pytest.fixture
def make_world():
    worlds = []

    def make(**settings) -> World:
        worlds.append(World(**settings))
        return worlds[-1]

    yield make
    for world in worlds:
        world.loop.stop(WAIT_S)
        world.pool.check()
        assert world.pool.counts().held == 0
        swap = world.pool.swap
        assert swap is None or swap.num_free == swap.num_slots
        assert world.scheduler.num_running == world.scheduler.num_waiting == 0
