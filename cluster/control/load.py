"""What scaling goes by, from the ledger; workers that leave or serve in another role count not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.control.facts import Health
from cluster.policy.load import Load, PoolLoad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config import PoolConfig
    from cluster.control.costs import CostModel
    from cluster.control.ledger import Ledger
    from cluster.control.waiting import WaitingQueue
    from cluster.control.worker_entry import WorkerEntry


def load_of(
    pools: Sequence[PoolConfig], ledger: Ledger, costs: CostModel, queue: WaitingQueue
) -> Load:
    """Return the load now."""
    return Load(
        pools={
            pool.name: _of_pool(_serving(pool, ledger), costs, ledger.prefilled_tokens[pool.name])
            for pool in pools
        },
        num_waiting=len(queue),
        waiting_tokens=queue.num_tokens,
        expected_output_tokens=costs.expected_output_tokens,
    )


def _serving(pool: PoolConfig, ledger: Ledger) -> list[WorkerEntry]:
    return [
        entry
        for entry in ledger.workers.values()
        if (entry.registration.pool, entry.registration.role) == (pool.name, pool.role)
        and entry.health is not Health.STALLED
        and not entry.report.is_draining
    ]


def _of_pool(entries: Sequence[WorkerEntry], costs: CostModel, computed_tokens: float) -> PoolLoad:
    if not entries:
        return PoolLoad(computed_tokens=computed_tokens)
    speeds = [(costs.speeds(entry, 0), costs.speeds(entry, 1)) for entry in entries]
    count = len(entries)
    return PoolLoad(
        num_workers=count,
        queued_tokens=sum(entry.run_ahead_tokens for entry in entries),
        behind_tokens=sum(_behind(entry) for entry in entries),
        computed_tokens=computed_tokens,
        num_sequences=sum(_num_present(entry) for entry in entries),
        num_coming=sum(entry.num_slots_used - _num_present(entry) for entry in entries),
        held_tokens=sum(
            (entry.registration.num_blocks - entry.num_blocks_free) * entry.registration.block_size
            for entry in entries
        ),
        prefill_token_s=sum(empty[0] for empty, _ in speeds) / count,
        step_base_s=sum(empty[1] for empty, _ in speeds) / count,
        step_per_seq_s=sum(one[1] - empty[1] for empty, one in speeds) / count,
    )


def _num_present(entry: WorkerEntry) -> int:
    return entry.report.num_running + entry.report.num_waiting


def _behind(entry: WorkerEntry) -> int:
    """Return the prompt tokens that are not of the prompt that it computes now: the largest."""
    largest = max((charge.prompt_tokens for charge in entry.charges.values()), default=0)
    return max(0, entry.run_ahead_tokens - largest)
