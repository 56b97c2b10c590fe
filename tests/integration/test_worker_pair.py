"""A prefill and a decode worker as real processes over Gloo; the test plays the router."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

from cluster import config as deploy_config
from cluster.clock import SystemClock
from cluster.config import (
    DeployConfig,
    Dtype,
    LimitsConfig,
    ModelConfig,
    PoolConfig,
    Role,
    TransportKind,
)
from cluster.control.server import ControlServer
from cluster.control.status import get_cluster
from cluster.errors import Cancelled, HandoffFailed, InvalidRequest, WorkerLost
from cluster.handoff import AbortCause
from cluster.request import (
    ExportWaiting,
    FinishReason,
    Leg,
    LegKey,
    LegKind,
    Peer,
    SamplingParams,
)
from cluster.rpc.client import WorkerClient
from tests.e2e.reference import NEAR_TIE, ROUNDED_TIE
from tests.e2e.reference import greedy as reference_of
from tests.factories_model import VOCAB_SIZE, write_tiny_llama

REPO = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 2 * 2 * 2 * 16 * 4
"""K and V, 2 layers, 2 KV heads, head size 16, fp32."""
NUM_TOKENS = 24
LENGTHS = (1, 15, 16, 17, 33, 200)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_config(model: Path, decode: dict | None = None, **changes) -> DeployConfig:
    """Two pools alike, but for what ``decode`` changes in the second."""

    def pool(name: str, role: Role, **fields) -> PoolConfig:
        usual = {"dtype": Dtype.FP32, "token_budget": 512, "block_size": BLOCK_SIZE}
        return PoolConfig(name=name, role=role, kv_tokens=4096, **{**usual, **fields})

    return DeployConfig(
        pools=(pool("p", Role.PREFILL), pool("d", Role.DECODE, **(decode or {}))),
        model=ModelConfig(path=str(model), max_model_len=512),
        **changes,
    )


class Router:
    """What a router keeps of its legs: tokens and ends by (worker, leg)."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, LegKey], dict[int, int]] = {}
        self.ends: dict[tuple[str, LegKey], asyncio.Future] = {}
        self.lost: asyncio.Future[tuple[Peer, str]] = asyncio.get_running_loop().create_future()
        self.waiting: asyncio.Queue[ExportWaiting] = asyncio.Queue()

    def end_of(self, worker_id: str, key: LegKey) -> asyncio.Future:
        loop = asyncio.get_running_loop()
        return self.ends.setdefault((worker_id, key), loop.create_future())

    def view_of(self, worker_id: str) -> "RouterView":
        return RouterView(self, worker_id)


@dataclasses.dataclass
class RouterView:
    router: Router
    worker_id: str

    def on_beat(self, beat):
        pass

    def on_tokens(self, tokens, ends, notices=(), prompts=()):
        for token in tokens:
            seen = self.router.tokens.setdefault((self.worker_id, token.key), {})
            assert token.output_index not in seen
            seen[token.output_index] = token.token_id
        for told in notices:
            if isinstance(told, ExportWaiting):
                self.router.waiting.put_nowait(told)
        for end in ends:
            self.router.end_of(self.worker_id, end.key).set_result(end)

    def on_worker_lost(self, peer, reason, *, is_alive=False):
        self.router.lost.set_result((peer, reason))


class Pair:
    """Two worker processes, the control plane that they report to, and a router's clients."""

    def __init__(self, control: str, processes, peers: dict[str, Peer]) -> None:
        self.control = control
        self.processes = processes
        self.peers = peers
        self.router = Router()
        self._numbers = itertools.count()
        self.clients = {
            worker_id: WorkerClient(
                peer, router_id="router", incarnation="1", events=self.router.view_of(worker_id)
            )
            for worker_id, peer in peers.items()
        }

    def legs(self, prompt_ids: list[int], **fields) -> tuple[Leg, Leg]:
        params = SamplingParams(
            **{"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, **fields}
        )
        number = next(self._numbers)
        common = {
            "key": LegKey(f"req-{number}", 0, 0),
            "prompt_ids": tuple(prompt_ids),
            "params": params,
            "remaining_s": 60.0,
            "grant_id": f"grant-{number}",
            "handoff_id": f"handoff-{number}",
        }
        return (
            Leg(kind=LegKind.PREFILL, peer=self.peers["d-0"], **common),
            Leg(kind=LegKind.DECODE, **common),
        )

    async def start(self, prefill: Leg, decode: Leg) -> None:
        await asyncio.gather(
            self.clients["p-0"].start_leg(prefill), self.clients["d-0"].start_leg(decode)
        )

    async def ends(self, key: LegKey):
        both = asyncio.gather(self.router.end_of("p-0", key), self.router.end_of("d-0", key))
        return await asyncio.wait_for(both, 30)

    async def reports(self, until) -> dict:
        """The workers' last reports, once they satisfy ``until``."""
        async with asyncio.timeout(10):
            while True:
                view = await get_cluster(self.control, timeout_s=5.0)
                reports = {view.worker.worker_id: view.report for view in view.workers}
                if until(reports):
                    return reports
                await asyncio.sleep(0.05)


async def start_worker(config_path: Path, model: Path, control: str, pool: str):
    with (config_path.parent / f"{pool}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "deploy.worker_main",
            "--config", str(config_path), "--pool", pool, "--worker-id", f"{pool}-0",
            "--model-path", str(model), "--control", control,
            stdout=asyncio.subprocess.PIPE, stderr=log, cwd=REPO,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


@contextlib.asynccontextmanager
async def running_pair(model: Path, folder: Path, config: DeployConfig | None = None):
    config = config or make_config(model)
    path = folder / "deploy.yaml"
    path.write_text(yaml.safe_dump(deploy_config.to_tree(config)))
    control = ControlServer(config, SystemClock())
    address = await control.start("127.0.0.1", 0)
    processes = {}
    try:
        for pool in ("p", "d"):
            processes[pool] = await start_worker(path, model, address, pool)
        ready = {}
        for pool, process in processes.items():
            line = await asyncio.wait_for(process.stdout.readline(), 60)
            assert line, (folder / f"{pool}.log").read_text()[-3000:]
            ready[pool] = json.loads(line)
        view = await get_cluster(address, timeout_s=5.0)
        peers = {
            worker.worker.worker_id: Peer(
                worker_id=worker.worker.worker_id,
                incarnation=worker.worker.incarnation,
                address=worker.worker.address,
            )
            for worker in view.workers
        }
        assert {p.address for p in peers.values()} == {line["address"] for line in ready.values()}
        pair = Pair(address, processes, peers)
        yield pair
        for client in pair.clients.values():
            await client.close()
        for process in processes.values():
            if process.returncode is None:
                process.terminate()
        for pool, process in processes.items():
            code = await asyncio.wait_for(process.wait(), 10)
            if code != -signal.SIGKILL:
                assert code == 0, (folder / f"{pool}.log").read_text()[-3000:]
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()
        await control.stop()


def greedy(model: Path, prompt: list[int]) -> list[int]:
    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        out = llama.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


async def test_tokens_go_through_gloo_and_equal_transformers(model, tmp_path):
    """CASES P-13, P-29: the decode worker computes no prompt; every block is moved once."""
    prompts = make_prompts()
    async with running_pair(model, tmp_path) as pair:
        legs = [pair.legs(prompt) for prompt in prompts]
        await asyncio.gather(*(pair.start(prefill, decode) for prefill, decode in legs))
        for (prefill, _), prompt in zip(legs, prompts, strict=True):
            prefill_end, decode_end = await pair.ends(prefill.key)
            assert prefill_end.error is None
            assert prefill_end.finish_reason is None
            assert decode_end.finish_reason is FinishReason.LENGTH
            first = pair.router.tokens["p-0", prefill.key]
            rest = pair.router.tokens["d-0", prefill.key]
            assert list(first) == [0]
            assert list(rest) == list(range(NUM_TOKENS))
            assert list(rest.values()) == greedy(model, prompt)
            assert first[0] == rest[0]
            num_bytes = -(-len(prompt) // BLOCK_SIZE) * BLOCK_BYTES
            times = prefill_end.times
            assert times.transfer_bytes == num_bytes
            assert 0 < times.transfer_s <= times.exposed_s + 1e-9
            assert times.reserve_wait_s > 0
            assert decode_end.times.num_computed_tokens == NUM_TOKENS - 1

        reports = await pair.reports(
            lambda reports: all(report.blocks.available == 256 for report in reports.values())
        )
        num_blocks = sum(-(-n // BLOCK_SIZE) for n in LENGTHS)
        sent, taken = reports["p-0"].counters, reports["d-0"].counters
        assert sent["transfer_bytes"] == taken["import_bytes"] == num_blocks * BLOCK_BYTES
        assert sent["transfers_started"] == sent["transfers_ok"] == taken["imports_ok"]
        assert sent["prefilled_tokens"] == sum(LENGTHS)
        assert taken["prefilled_tokens"] == 0
        assert sent["generated_tokens"] == len(prompts)
        assert taken["generated_tokens"] == len(prompts) * (NUM_TOKENS - 1)
        for report in reports.values():
            assert report.held_grants == ()
            assert report.counters["legs_received"] == len(prompts)


@pytest.mark.parametrize("kv_dtype", [Dtype.AUTO, Dtype.BF16, Dtype.FP16])
@pytest.mark.slow
async def test_pools_may_differ_in_block_size_and_kv_dtype(model, tmp_path, kv_dtype):
    """CASES P-22: a supported pair satisfies P-13; here through shared memory, digested.

    With KV of 16 bits tokens may differ where fp32 knows of a tie that rounding can turn.
    """
    config = make_config(
        model,
        {"block_size": 32, "kv_dtype": kv_dtype},
        transport=TransportKind.AUTO,
        limits=LimitsConfig(kv_digest=True),
    )
    prompts = make_prompts()
    reference = reference_of(model, prompts, NUM_TOKENS)
    near_tie = NEAR_TIE if kv_dtype is Dtype.AUTO else ROUNDED_TIE
    async with running_pair(model, tmp_path, config) as pair:
        legs = [pair.legs(prompt) for prompt in prompts]
        await asyncio.gather(*(pair.start(prefill, decode) for prefill, decode in legs))
        for number, ((prefill, _), prompt) in enumerate(zip(legs, prompts, strict=True)):
            prefill_end, decode_end = await pair.ends(prefill.key)
            assert prefill_end.error is decode_end.error is None
            tokens = pair.router.tokens["d-0", prefill.key]
            assert list(tokens) == list(range(NUM_TOKENS))
            assert reference.wrong_at(number, list(tokens.values()), near_tie) is None
            assert prefill_end.times.transfer_bytes == -(-len(prompt) // BLOCK_SIZE) * BLOCK_BYTES
            assert decode_end.times.num_computed_tokens == NUM_TOKENS - 1
        reports = await pair.reports(
            lambda reports: (
                reports["d-0"].blocks.available == 128 and reports["p-0"].blocks.available == 256
            )
        )
        assert reports["d-0"].counters["prefilled_tokens"] == 0
    log = (tmp_path / "p.log").read_text()
    assert "through shm" in log


async def test_ends_and_refusals_over_the_wire(model, tmp_path):
    """CASES P-11: a first token that is the last, bad legs, an abort in mid-decode."""
    prompt = make_prompts()[4]
    async with running_pair(model, tmp_path) as pair:
        # The first token ends the choice: the decode leg ends in silence.
        prefill, decode = pair.legs(prompt, stop_token_ids=(greedy(model, prompt)[0],))
        await pair.start(prefill, decode)
        prefill_end, decode_end = await pair.ends(prefill.key)
        assert prefill_end.finish_reason is FinishReason.STOP
        assert (decode_end.finish_reason, decode_end.error) == (None, None)

        # A leg of the wrong kind, and one that never fits.
        _, decode = pair.legs(prompt)
        await pair.clients["p-0"].start_leg(decode)
        end = await asyncio.wait_for(pair.router.end_of("p-0", decode.key), 10)
        assert isinstance(end.error, InvalidRequest)
        assert end.error.field == "kind"
        prefill, _ = pair.legs(prompt, max_tokens=500)
        await pair.clients["p-0"].start_leg(prefill)
        end = await asyncio.wait_for(pair.router.end_of("p-0", prefill.key), 10)
        assert end.error.field == "max_tokens"

        # An abort gives everything back, and the control plane hears of it.
        prefill, decode = pair.legs(prompt, max_tokens=400)
        await pair.start(prefill, decode)
        await asyncio.wait_for(pair.router.end_of("p-0", prefill.key), 10)
        await pair.clients["d-0"].abort_leg(decode.key, AbortCause.CANCELLED)
        end = await asyncio.wait_for(pair.router.end_of("d-0", decode.key), 10)
        assert end.error.code == "cancelled"
        # Its blocks may be told of before its end is.
        reports = await pair.reports(
            lambda reports: (
                all(report.blocks.available == 256 for report in reports.values())
                and reports["d-0"].counters["legs_aborted"]
            )
        )
        assert reports["d-0"].counters["legs_aborted"] == 1
        assert reports["p-0"].counters["legs_rejected"] == 2


async def test_a_killed_decode_worker_is_told_of_at_once(model, tmp_path):
    """CASES P-20: the router loses the worker; an export meant for it waits for another one."""
    prompt = make_prompts()[5]
    async with running_pair(model, tmp_path) as pair:
        prefill, decode = pair.legs(prompt)
        await pair.start(prefill, decode)
        await pair.ends(prefill.key)
        pair.processes["d"].kill()
        peer, _ = await asyncio.wait_for(pair.router.lost, 5)
        assert peer.worker_id == "d-0"
        with pytest.raises(WorkerLost):
            await pair.clients["d-0"].start_leg(decode)
        prefill, _ = pair.legs(prompt)
        await pair.clients["p-0"].start_leg(prefill)
        told = await asyncio.wait_for(pair.router.waiting.get(), 10)
        assert isinstance(told.error, WorkerLost | HandoffFailed)
        assert (told.key, told.handoff_id) == (prefill.key, prefill.handoff_id)
        await pair.clients["p-0"].abort_leg(prefill.key, AbortCause.CANCELLED)
        end = await asyncio.wait_for(pair.router.end_of("p-0", prefill.key), 10)
        assert isinstance(end.error, Cancelled)
        await pair.reports(lambda reports: reports["p-0"].blocks.available == 256)


def is_logged(log: Path, text: str) -> bool:
    return text in log.read_text()


async def until_logged(log: Path, text: str) -> None:
    for _ in range(1200):
        if is_logged(log, text):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"never logged: {text}")


async def test_a_worker_that_cannot_start_says_why(model, tmp_path):
    path = tmp_path / "deploy.yaml"
    path.write_text(yaml.safe_dump(deploy_config.to_tree(make_config(model))))
    process = await start_worker(path, model, "127.0.0.1:1", "nowhere")
    assert await asyncio.wait_for(process.wait(), 60) == 2
    assert is_logged(tmp_path / "nowhere.log", "unknown pool 'nowhere'")


async def test_sigterm_stops_a_worker_that_waits_for_the_control_plane(model, tmp_path):
    """CASES P-27: it ends by itself, although nobody ever accepted it."""
    path = tmp_path / "deploy.yaml"
    path.write_text(yaml.safe_dump(deploy_config.to_tree(make_config(model))))
    process = await start_worker(path, model, "127.0.0.1:1", "p")
    log = tmp_path / "p.log"
    await until_logged(log, "stream=report")
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert await process.stdout.read() == b""
