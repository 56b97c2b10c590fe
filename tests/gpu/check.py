"""Proves the engine and the KV path on one CUDA GPU: ``python tests/gpu/check.py > check.json``.

Needs Python 3.11 or 3.12, torch >= 2.11 and transformers >= 5.17, and beside this repository
safetensors, msgpack, protobuf and PyYAML; no Ray, no network, no model files: models with random
weights are built in place. Six minutes at most, or it does not hold. Without CUDA the same parts
run on the CPU, smaller, and the JSON says so. Exit code 0: all that ran holds; 1: something does
not; 2: something that it needs is missing, too old or too new, and standard error says what.

    exact       greedy tokens of several architectures against transformers' own generate
    staging     KV of one worker's cache to another's, both in this process and on one device, over
                loopback and shared memory, also between layouts
    swap        a preempted sequence's KV to CPU memory, pinned beside a GPU, and back
    throughput  decode steps, prompts, and bytes by second from one cache to the other
"""

# ruff: noqa: E402 (run as a file, it must find its repository first)
from __future__ import annotations

import asyncio
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.gpu import floors

if __name__ == "__main__" and (lacking := floors.lacking()):
    sys.exit(floors.refuse(lacking))

import torch
import transformers

from cluster.config import Dtype
from cluster.kv.block_pool import BlockPool
from cluster.kv.cache import PagedCache
from cluster.model.loader import load_model
from cluster.transport.loopback import LoopbackTransport
from cluster.transport.shm import ShmTransport
from tests.factories_preemption import assert_undisturbed
from tests.factories_runner import GREEDY, Driver, assert_matches, make_prompts
from tests.gpu.two_workers import Export, ReceivingHalf, hand_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.model.loader import LoadedModel
    from cluster.transport.base import Transport

NUM_OUTPUTS = 16
MAX_S = 360.0
SIZE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.2, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral-window": ("MistralConfig", {"sliding_window": 24}),
    "gemma2-softcap": ("Gemma2Config", {"head_dim": 16, "sliding_window": 24}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
BIG = {
    "vocab_size": 32_000, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
LAYOUTS = [((16, "fp32"), (32, "bf16")), ((32, "bf16"), (16, "fp16")), ((16, "bf16"), (16, "bf16"))]


class Report:
    """What was found, by part and name."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.checks: list[dict[str, Any]] = []
        self.figures: dict[str, float] = {}

    def check(self, part: str, name: str, prove: Callable[[], None]) -> None:
        """Run one proof; what it raises is its result."""
        began = time.monotonic()
        try:
            prove()
            failure = None
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        self.checks.append(
            {
                "part": part,
                "name": name,
                "holds": failure is None,
                "failure": failure,
                "seconds": round(time.monotonic() - began, 3),
            }
        )

    def holds(self, seconds: float) -> bool:
        """Whether all of it does, and was found in time."""
        return seconds <= MAX_S and all(check["holds"] for check in self.checks)

    def as_json(self, seconds: float) -> str:
        """Everything, with the machine."""
        has_cuda = self.device == "cuda"
        return json.dumps(
            {
                "device": torch.cuda.get_device_name() if has_cuda else "cpu",
                "cuda": torch.version.cuda if has_cuda else None,
                "note": None if has_cuda else "no CUDA here: all parts ran on the CPU, smaller",
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                },
                "holds": self.holds(seconds),
                "seconds": round(seconds, 1),
                "checks": self.checks,
                "figures": {name: round(value, 4) for name, value in self.figures.items()},
            },
            indent=2,
        )


def write_model(
    folder: Path, config_class: str, dtype: torch.dtype = torch.float32, **fields: Any
) -> Path:
    """Write a checkpoint with random weights; same arguments, same bytes."""
    config = getattr(transformers, config_class)(**{**SIZE, **fields})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)  # the two best tokens are rarely close
    model.save_pretrained(folder)
    return folder


def check_exact(report: Report, folder: Path) -> None:
    """Prompts in chunks, in one ragged batch, against generate on the CPU in fp32."""
    for name, (config_class, fields) in FAMILIES.items():

        def prove(
            name: str = name, config_class: str = config_class, fields: dict = fields
        ) -> None:
            path = write_model(folder / name, config_class, **fields)
            reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            driver = Driver(load_model(path, dtype=Dtype.FP32, device=report.device))
            prompts = make_prompts([1, 16, 33, 100])
            for prompt in prompts:
                driver.add(prompt)
            outputs = driver.run(NUM_OUTPUTS, chunk=40)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert_matches(reference, prompt, output)

        report.check("exact", name, prove)


def transports(device: str) -> Iterator[tuple[str, tuple[Transport, Transport]]]:
    """Channels that two workers of one process and one GPU may have."""
    both = LoopbackTransport(device)
    yield "loopback", (both, both)
    yield "shm", (ShmTransport(device=device), ShmTransport(device=device))


def check_staging(report: Report, folder: Path) -> None:
    """A sequence that moves to another cache goes on as if it had stayed."""
    loaded = load_model(folder / "llama", dtype=Dtype.FP32, device=report.device)
    for transport, pair in transports(report.device):
        for theirs, ours in LAYOUTS:

            def prove(pair: Any = pair, theirs: Any = theirs, ours: Any = ours) -> None:
                move_and_go_on(loaded, pair, theirs, ours)

            report.check("staging", f"{transport} {theirs} to {ours}", prove)


def move_and_go_on(
    loaded: LoadedModel,
    pair: tuple[Transport, Transport],
    theirs: tuple[int, str],
    ours: tuple[int, str],
) -> None:
    """Prefill in one cache, decode in another."""
    prompt = make_prompts([77])[0]
    stayed, sender, receiver = (
        Driver(loaded, block_size=block_size, kv_dtype=Dtype(dtype))
        for block_size, dtype in (theirs, theirs, ours)
    )
    stayed.add(prompt)
    [expected] = stayed.run(NUM_OUTPUTS)
    source = sender.add(prompt)
    sender.step()
    line = receiver.add(prompt)
    export = Export(cache=sender.cache, block_ids=source.block_ids, num_tokens=len(prompt))
    half = ReceivingHalf(receiver.cache, scattered_pool(128), room_tokens=NUM_OUTPUTS)
    _, line.block_ids = asyncio.run(hand_over(pair, export, half))
    line.num_computed, line.output_ids = len(prompt), list(source.output_ids)
    [output] = receiver.run(NUM_OUTPUTS)
    # Rounding to fewer bits may turn a near tie later on; what moved whole must go on exactly.
    exact = theirs[1] == ours[1]
    assert output[:2] == expected[:2], f"{output} after {expected}"
    assert not exact or output == expected, f"{output}, not {expected}"


def check_swap(report: Report, folder: Path) -> None:
    """A sequence that was preempted three times goes on as if it had not been."""
    loaded = load_model(folder / "llama", dtype=Dtype.FP32, device=report.device)
    for name, swaps in (("swapped", True), ("computed again", False)):

        def prove(swaps: bool = swaps) -> None:
            memory = assert_undisturbed(loaded, GREEDY, swaps=swaps).memory
            assert memory.is_pinned == (report.device == "cuda"), "the wrong kind of memory"

        report.check("swap", name, prove)


def scattered_pool(num_blocks: int) -> BlockPool:
    """Return a pool in which every other block is taken: no two that it gives are neighbours."""
    pool = BlockPool(num_blocks)
    for number in range(num_blocks):
        pool.allocate(1, f"other-{number}")
    for number in range(0, num_blocks, 2):
        pool.release(f"other-{number}")
    return pool


def measure(report: Report, folder: Path) -> None:
    """Speed of steps and of moving KV; on a CPU with the tiny model, to see that it runs."""
    is_small = report.device == "cpu"
    path = folder / "llama"
    if not is_small:
        path = write_model(folder / "big", "LlamaConfig", torch.bfloat16, **BIG)
    num_tokens, num_seqs, num_steps = (64, 4, 8) if is_small else (1024, 32, 64)
    loaded = load_model(path, dtype=Dtype.FP32 if is_small else Dtype.BF16, device=report.device)
    num_blocks = num_seqs * ((num_tokens + num_steps) // 16 + 2)
    driver = Driver(loaded, num_blocks=num_blocks)
    prompts = make_prompts([num_tokens - 1] * num_seqs)
    for prompt in prompts[:1]:
        driver.add(prompt)
    driver.step()  # first calls cost more
    began = time.perf_counter()
    for prompt in prompts[1:]:
        driver.step([driver.add(prompt)])
    synchronize(loaded.device)
    report.figures["prefill_tokens_per_s"] = (
        (num_seqs - 1) * (num_tokens - 1) / (time.perf_counter() - began)
    )
    driver.step()
    began = time.perf_counter()
    for _ in range(num_steps - 4):
        driver.step()
    synchronize(loaded.device)
    step_s = (time.perf_counter() - began) / (num_steps - 4)
    report.figures["decode_step_ms"] = step_s * 1e3
    report.figures["decode_tokens_per_s"] = num_seqs / step_s
    table = driver.lines[0].block_ids[: driver.cache.layout.num_blocks_for(num_tokens)]
    export = Export(cache=driver.cache, block_ids=table, num_tokens=num_tokens)
    for name, pair in transports(report.device):
        for block_size in (16, 32):
            cache = PagedCache(loaded.layout(block_size), len(table), loaded.device)
            half = ReceivingHalf(cache, BlockPool(len(table)), room_tokens=0)
            seconds, _ = asyncio.run(hand_over(pair, export, half))
            num_bytes = len(table) * driver.cache.layout.block_bytes
            report.figures[f"handover_{name}_16_to_{block_size}_GiB_per_s"] = (
                num_bytes / seconds / 2**30
            )


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, where there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> int:
    """Run everything; returns the exit code."""
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False  # exactness is promised for fp32
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    report = Report(device)
    with tempfile.TemporaryDirectory(prefix="pdserve-check-") as folder:
        check_exact(report, Path(folder))
        check_staging(report, Path(folder))
        check_swap(report, Path(folder))
        report.check("throughput", "figures", lambda: measure(report, Path(folder)))
    seconds = time.monotonic() - began
    sys.stdout.write(report.as_json(seconds) + "\n")
    return 0 if report.holds(seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
