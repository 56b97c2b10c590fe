"""Deploy files of one comparison: derived from one base, and at equal cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster import config as deploy_config
from cluster.config import DeployConfig, Host
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


MIN_CORES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What all configurations of a comparison have in common."""

    cores: tuple[int, ...]
    """The first two are used."""
    model: str = "trial"
    host: Host = Host.RAY
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        """Refuse a machine on which nothing can be compared."""
        if len(self.cores) < MIN_CORES:
            raise ConfigError(
                f"the lab needs {MIN_CORES} cores, and this process may use {len(self.cores)}",
                field="cores",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One of the things that are compared."""

    name: str
    what: str
    deploy: DeployConfig
    link_bytes_per_s: float | None = None
    """A slower link between the workers, by the fault seam; None: as it is."""


class Draft:
    """Makes configurations of one base."""

    def __init__(self, base: Base, *, max_model_len: int = 2048) -> None:
        self._base = base
        self._max_model_len = max_model_len

    def single(self, *, scheduling: dict[str, Any] | None = None, **pool: Any) -> DeployConfig:
        """One worker with both halves on the first core, all else on the second."""
        workers = {"name": "mixed", "role": "mixed", "cores": [self._base.cores[0]], **pool}
        return self._build([workers], scheduling, service_cores=[self._base.cores[1]])

    def colocated(self, *, scheduling: dict[str, Any] | None = None, **pool: Any) -> DeployConfig:
        """Two workers with both halves, a core each; all else runs where there is room."""
        cores = list(self._base.cores[:2])
        workers = {"name": "mixed", "role": "mixed", "count": 2, "cores": cores, **pool}
        return self._build([workers], scheduling, service_cores=[])

    def disaggregated(
        self,
        *,
        prefill: dict[str, Any],
        decode: dict[str, Any],
        scheduling: dict[str, Any] | None = None,
        has_faults: bool = False,
    ) -> DeployConfig:
        """One prefill worker, on the first core with all else, and one decode worker."""
        first, second = self._base.cores[:2]
        workers = [
            {"name": "prefill", "role": "prefill", "cores": [first], **prefill},
            {"name": "decode", "role": "decode", "cores": [second], **decode},
        ]
        # A prompt that the decode worker took for itself would show nothing of the two.
        apart = {"local_prefill": "never", **(scheduling or {})}
        return self._build(workers, apart, service_cores=[first], faults={"enabled": has_faults})

    def _build(
        self,
        pools: Sequence[dict[str, Any]],
        scheduling: dict[str, Any] | None,
        *,
        service_cores: list[int],
        faults: dict[str, Any] | None = None,
    ) -> DeployConfig:
        is_inline = self._base.host is Host.INLINE
        # Configurations that share a cluster are sent the same prompts, one after another.
        each = {"dtype": self._base.dtype, "prefix_cache": False}
        return deploy_config.from_tree(
            {
                "host": self._base.host.value,
                "transport": "loopback" if is_inline else "torch_dist",
                "service_cores": service_cores,
                "model": {"path": self._base.model, "max_model_len": self._max_model_len},
                "pools": [{**each, **pool} for pool in pools],
                "scheduling": scheduling or {},
                "faults": faults or {},
            }
        )


def cores_of(deploy: DeployConfig) -> frozenset[int]:
    """Return every core that a configuration may use."""
    return frozenset(deploy.service_cores).union(*(pool.cores for pool in deploy.pools))


def check_equal_cores(configurations: Iterable[Configuration]) -> int:
    """Return how many cores each may use; raises ConfigError where they differ or are not told."""
    totals = {}
    for configuration in configurations:
        for pool in configuration.deploy.pools:
            if not pool.cores:
                raise ConfigError(
                    f"configuration {configuration.name!r}: pool {pool.name} names no cores, so "
                    "that nobody knows what it is compared with",
                    field="cores",
                )
        totals[configuration.name] = len(cores_of(configuration.deploy))
    if len(set(totals.values())) > 1:
        told = ", ".join(f"{name!r} has {total}" for name, total in totals.items())
        raise ConfigError(f"configurations are compared at equal cores: {told}", field="cores")
    return next(iter(totals.values()))
