"""A cluster of scaled pools as a sum of flows, for a second at a time: enough for a policy of sums.

Prompts are computed at the sum of the rates of the prefill workers that are there; a sequence
stays in its slot for its output's steps. A worker is there ``start_s`` after it was asked for.
"""

import csv
from dataclasses import dataclass, field
from pathlib import Path

from cluster.config import DeployConfig, PoolConfig, Role, ScalingConfig, from_tree, to_tree
from cluster.policy.load import Load, PoolLoad
from cluster.policy.scaling import Scaler

RATE = {"fast": 8000.0, "slow": 4000.0}
"""Prompt tokens a second, by the first word of a prefill pool's name."""
STEP_BASE_S, STEP_PER_SEQ_S = 0.02, 0.0005
FIRST_AT = 1000.0


def make_pool(name, role=Role.DECODE, **options):
    return PoolConfig(name=name, role=role, **{"max": 6, "max_num_seqs": 16, **options})


def make_config(*pools, **scaling):
    config = DeployConfig(pools=pools, scaling=ScalingConfig(**scaling))
    return from_tree(to_tree(config))


def seconds_of(path: Path):
    """Each second's (requests, prompt tokens, output tokens) of a trace."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    rows = {int(row["second"]): row for row in csv.DictReader(lines)}
    nothing = {"requests": 0, "prompt_tokens": 0, "output_tokens": 0}
    for second in range(max(rows) + 1):
        row = rows.get(second, nothing)
        yield int(row["requests"]), int(row["prompt_tokens"]), int(row["output_tokens"])


@dataclass
class ScaledCluster:
    config: DeployConfig
    start_s: float = 20.0
    now: float = FIRST_AT
    targets: dict[str, int] = field(init=False)
    history: list[tuple[float, str, int]] = field(default_factory=list)
    """Each change: when, of which pool, by how many."""
    waits: list[float] = field(default_factory=list)
    """Predicted for whoever comes, in each second in which somebody did."""
    worker_s: float = 0.0

    def __post_init__(self):
        self.scaler = Scaler(self.config)
        self.targets = {pool.name: pool.min_count for pool in self.config.pools}
        self._ready = {pool.name: [FIRST_AT] * pool.min_count for pool in self.config.pools}
        self._computed = dict.fromkeys(self.targets, 0.0)
        self._tokens = self._requests = 0.0
        self._outputs = 27.0
        self._sequences = 0.0

    def live(self, name):
        return sum(ready <= self.now for ready in self._ready[name])

    def second(self, requests=0, prompt_tokens=0, output_tokens=0):
        """Let one pass in which so much comes."""
        self.now += 1.0
        rates = {p.name: self.live(p.name) * self._rate(p) for p in self.config.pools}
        rate = sum(rates.values())
        self._tokens += prompt_tokens
        self._requests += requests
        if requests:
            self._outputs += 0.1 * (output_tokens / requests - self._outputs)
            self.waits.append(self._tokens / rate)
        done = min(self._tokens, rate)
        share = done / self._tokens if self._tokens else 0.0
        for name, each in rates.items():
            self._computed[name] += done * each / rate
        self._sequences += self._requests * share
        self._requests *= 1.0 - share
        self._tokens -= done
        step_s = STEP_BASE_S + STEP_PER_SEQ_S * min(16.0, self._sequences)
        self._sequences *= max(0.0, 1.0 - 1.0 / max(1.0, self._outputs * step_s))
        self.worker_s += sum(self.live(name) for name in self.targets)
        self._follow(self.scaler.decide(self._load(), self.targets, self.now).targets)

    def _rate(self, pool):
        return RATE.get(pool.name.partition("-")[0], 0.0) if pool.role is Role.PREFILL else 0.0

    def _load(self):
        decode = [pool for pool in self.config.pools if pool.role is not Role.PREFILL]
        num_decode = sum(self.live(pool.name) for pool in decode) or 1
        return Load(
            pools={
                pool.name: PoolLoad(
                    num_workers=self.live(pool.name),
                    computed_tokens=self._computed[pool.name],
                    num_sequences=self._sequences * self.live(pool.name) / num_decode
                    if pool in decode
                    else 0.0,
                    held_tokens=0.0,
                    prefill_token_s=1.0 / self._rate(pool) if self._rate(pool) else 0.0,
                    step_base_s=STEP_BASE_S,
                    step_per_seq_s=STEP_PER_SEQ_S,
                )
                for pool in self.config.pools
            },
            num_waiting=self._requests,
            waiting_tokens=self._tokens,
            expected_output_tokens=self._outputs,
        )

    def _follow(self, targets):
        for name, target in targets.items():
            change = target - self.targets[name]
            if change:
                self.history.append((self.now, name, change))
            starting = [self.now + self.start_s] * max(0, change)
            self._ready[name] = (self._ready[name] + starting)[:target]
            self.targets[name] = target
