"""Shorthand for the facts that these tests are about."""

from cluster.config import DeployConfig, PoolConfig, Role, SchedulingConfig, from_tree, to_tree
from cluster.control.decisions import SendGrant, SendReject, WorkerDied
from cluster.control.facts import BlockCounts, Grant, Registration, Want, WorkerReport
from cluster.kv.layout import KVLayout


class FakeClock:
    def __init__(self) -> None:
        self.instant = 100.0

    def now(self) -> float:
        return self.instant


def make_config(*pools: PoolConfig, **scheduling: int) -> DeployConfig:
    config = DeployConfig(pools=pools or two_pools(), scheduling=SchedulingConfig(**scheduling))
    return from_tree(to_tree(config))


def two_pools(kv_tokens: int = 1024, slots: int = 2) -> tuple[PoolConfig, ...]:
    return (
        make_pool("prefill", Role.PREFILL, kv_tokens, slots),
        make_pool("decode", Role.DECODE, kv_tokens, slots),
    )


def make_pool(name: str, role: Role, kv_tokens: int = 1024, slots: int = 2) -> PoolConfig:
    return PoolConfig(name=name, role=role, kv_tokens=kv_tokens, max_num_seqs=slots)


def make_layout(**changes: object) -> KVLayout:
    values = {
        "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "block_size": 16,
        "dtype": "fp32", "model_fingerprint": "f",
    }  # fmt: skip
    return KVLayout(**{**values, **changes})


def make_registration(pool: PoolConfig, index: int = 0, **changes: object) -> Registration:
    values = {
        "worker_id": f"{pool.name}-{index}", "incarnation": f"{pool.name}-{index}-i",
        "pool": pool.name, "role": pool.role, "address": f"127.0.0.1:{9000 + index}",
        "num_slots": pool.max_num_seqs, "num_blocks": pool.num_blocks,
        "block_size": pool.block_size, "max_model_len": 2048,
        "layout": make_layout().describe(), "step_base_s": 0.01, "step_per_seq_s": 0.001,
        "prefill_per_token_s": 0.001, "pid": 1, "transport": "torch_dist",
        "tokenizer": "t",
    }  # fmt: skip
    return Registration(**{**values, **changes})


def make_report(registration: Registration, *held: str, **changes: object) -> WorkerReport:
    values = {"blocks": BlockCounts(free=registration.num_blocks), "held_grants": held}
    return WorkerReport(**{**values, **changes})


def make_want(request_id: str = "r", **changes: object) -> Want:
    values = {
        "request_id": request_id, "attempt": 0, "num_prompt_tokens": 32, "max_tokens": 16,
        "waited_s": 0.0, "remaining_s": 60.0,
    }  # fmt: skip
    return Want(**{**values, **changes})


def grants(decisions) -> list[Grant]:
    return [decision.grant for decision in decisions if isinstance(decision, SendGrant)]


def rejects(decisions):
    return [decision.reject for decision in decisions if isinstance(decision, SendReject)]


def deaths(decisions) -> list[str]:
    return [decision.worker_id for decision in decisions if isinstance(decision, WorkerDied)]


def held_by(view, worker_id) -> tuple[str, ...] | None:
    """The grants that a worker's last report lists; None where the worker is not there."""
    reports = {worker.worker.worker_id: worker.report for worker in view.workers}
    return reports[worker_id].held_grants if worker_id in reports else None
