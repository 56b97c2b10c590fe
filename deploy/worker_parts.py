"""What a worker computes with: weights, cache and runner on the cores or GPU it was given."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging as hf_logging

from cluster.clock import Clock, SystemClock
from cluster.config import DeployConfig, LimitsConfig, PoolConfig, Preemption, TransportKind
from cluster.engine.loop import KVCopier, Runner
from cluster.engine.plan import Plan, Scheduled
from cluster.engine.runner import ModelRunner
from cluster.errors import StartupError
from cluster.kv.block_pool import BlockPool
from cluster.kv.cache import PagedCache
from cluster.kv.layout import KVLayout
from cluster.kv.prefix_index import PrefixIndex
from cluster.kv.swap_buffer import SwapBuffer
from cluster.kv.swap_memory import SwapMemory
from cluster.model.loader import load_model
from cluster.request import LegKey, SamplingParams
from cluster.transport.auto import AutoTransport
from cluster.transport.base import Transport
from cluster.transport.shm import ShmTransport
from cluster.transport.staging import TransferLimits
from cluster.transport.torch_dist import TorchDistTransport
from deploy.cores import pin_process
from deploy.heap import keep_freed_memory
from deploy.node import own_address

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

_WARM_UP_TOKENS = 512
_MEASURED_TOKENS = 128
_PREFIX_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpeed:
    """How fast a worker is before it has served anything; the control plane plans with it."""

    base_s: float
    per_seq_s: float
    prefill_per_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """A loaded model with its cache, ready to compute, and what others must know about it."""

    layout: KVLayout
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    cache: Any
    """``PagedCache``; in tests whatever exports and imports blocks."""
    runner: Runner
    speed: StepSpeed
    tokenizer: str
    """Digest of the tokenizer beside the weights."""
    transport: Transport
    pin: Callable[[], None]
    """Called on threads that compute."""
    copier: KVCopier | None = None
    """The memory of the swap buffer, where KV is swapped."""


def load_parts(
    config: DeployConfig,
    pool: PoolConfig,
    model_path: Path,
    *,
    cores: tuple[int, ...] = (),
    transport: Transport | None = None,
) -> WorkerParts:
    """Pin the process, load the weights, warm up and measure; blocks for seconds.

    Raises UnsupportedModel or StartupError with the reason.
    """
    num_threads = len(cores) or pool.cores_per_worker
    # First, so that memory and threads of the model come to be where they are used.
    pin_process(cores)
    keep_freed_memory()
    # Nobody watches a worker's terminal.
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(num_threads)
    device = torch.device(pool.device.value)
    loaded = load_model(model_path, dtype=pool.dtype, device=device)
    layout = loaded.layout(pool.block_size, pool.kv_dtype)
    cache = PagedCache(layout, pool.num_blocks, device)
    runner = ModelRunner(loaded, cache)
    max_model_len = min(config.model.max_model_len, loaded.max_model_len)
    runner.warm_up(
        num_tokens=min(_WARM_UP_TOKENS, pool.token_budget, max_model_len - 1),
        num_seqs=pool.max_num_seqs,
    )

    def pin() -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(num_threads)

    return WorkerParts(
        layout=layout,
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        eos_ids=loaded.eos_ids,
        cache=cache,
        runner=runner,
        speed=measure_speed(runner, pool, max_model_len, SystemClock()),
        tokenizer=loaded.tokenizer,
        transport=transport or _make_transport(config, pool, str(device)),
        pin=pin,
        copier=_make_copier(config, pool, cache),
    )


def measure_speed(runner: Runner, pool: PoolConfig, max_model_len: int, clock: Clock) -> StepSpeed:
    """Time one prompt and two decode steps; to be called before any block is handed out."""
    num_tokens = min(_MEASURED_TOKENS, pool.token_budget, max_model_len - 1, pool.kv_tokens - 1)
    num_blocks = num_tokens // pool.block_size + 1

    def share(choice: int, length: int, start: int) -> Scheduled:
        return Scheduled(
            key=LegKey("measure", 0, choice),
            token_ids=(0,) * length,
            start=start,
            block_ids=tuple(range(num_blocks)),
            is_sampled=True,
            output_index=0,
            params=SamplingParams(max_tokens=1, temperature=0.0),
        )

    def seconds(shares: Sequence[Scheduled]) -> float:
        best = float("inf")
        for _ in range(2):
            started = clock.now()
            runner.run(Plan(tuple(shares)))
            best = min(best, clock.now() - started)
        return best

    prompt_s = seconds([share(0, num_tokens, 0)])
    one_s = seconds([share(0, 1, num_tokens)])
    all_s = seconds([share(choice, 1, num_tokens) for choice in range(pool.max_num_seqs)])
    per_seq_s = max(0.0, all_s - one_s) / max(1, pool.max_num_seqs - 1)
    return StepSpeed(
        base_s=max(0.0, one_s - per_seq_s),
        per_seq_s=per_seq_s,
        prefill_per_token_s=prompt_s / num_tokens,
    )


def _make_copier(config: DeployConfig, pool: PoolConfig, cache: PagedCache) -> SwapMemory | None:
    if config.scheduling.preemption is not Preemption.SWAP:
        return None
    try:
        return SwapMemory(cache, pool.num_swap_slots)
    except (OSError, OverflowError, RuntimeError) as error:
        raise StartupError(
            f"pools.{pool.name}.swap_tokens: no memory for {pool.num_swap_slots} blocks of "
            f"{cache.layout.block_bytes} bytes: {error}"
        ) from error


def _make_transport(config: DeployConfig, pool: PoolConfig, device: str) -> Transport:
    kind, host = config.transport_of(pool), own_address(config)
    # Where pools differ, both ends of a link have to find out what they have in common.
    differ = len(config.transports) > 1
    match kind:
        case TransportKind.LOOPBACK:
            raise StartupError(
                "transport loopback moves KV inside one process only; use host inline, "
                "or transport auto"
            )
        case TransportKind.SHM | TransportKind.AUTO if sys.platform != "linux":
            raise StartupError(f"transport {kind.value} needs Linux; use transport torch_dist")
        case TransportKind.SHM:
            near = ShmTransport(device=device)
            return AutoTransport(device=device, near=near, kind=kind) if differ else near
        case TransportKind.TORCH_DIST | TransportKind.AUTO:
            far = TorchDistTransport(device=device, bind_host=host)
            if kind is TransportKind.AUTO or differ:
                return AutoTransport(device=device, far=far, kind=kind)
            return far


def make_block_pool(config: DeployConfig, pool: PoolConfig, layout: KVLayout) -> BlockPool:
    """Return the books of a worker's KV, empty."""
    prefix = None
    if pool.prefix_cache:
        # Nobody else names blocks of this pool, so nobody else needs to know the key.
        prefix = PrefixIndex(
            key=secrets.token_bytes(_PREFIX_KEY_BYTES),
            model_fingerprint=layout.model_fingerprint,
            block_size=pool.block_size,
            is_shared=pool.prefix_shared,
        )
    swaps = config.scheduling.preemption is Preemption.SWAP
    swap = SwapBuffer(pool.num_swap_slots) if swaps else None
    return BlockPool(pool.num_blocks, prefix, swap)


def link_limits(limits: LimitsConfig, layout: KVLayout) -> TransferLimits:
    """Return how a worker's links move blocks of its layout."""
    return TransferLimits(
        staging_bytes=max(TransferLimits().staging_bytes, layout.block_bytes),
        has_digest=limits.kv_digest,
        idle_s=limits.link_idle_s,
    )
