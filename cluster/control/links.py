"""What moving KV between two workers costs, learnt from real transfers.

Every pair has a fit of ``seconds = alpha + bytes / beta`` over its transfers, the newest counting
most. A fit that is not fed loses weight against the mean of its pair of pools, until after
``age_s`` only that is left: a link that once was slow is tried again, and what it shows then counts
more than what it was. A pair without transfers has the mean from the start, and a pair of pools
without transfers has the priors, so links that nobody has measured do not differ.

Nor do links that differ by chance: the scatter of transfers about their link's own fit says how far
from the mean a fit of so many transfers may lie, and one that lies nearer counts as the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.control.facts import LinkView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.control.facts import TransferSample

_DECAY = 0.85
"""Weight of the past at each new transfer."""
_PRIOR_ALPHA_S = 1e-3
_PRIOR_BYTES_PER_S = 1e9
_MIN_SPREAD = 0.05
"""Transfers whose sizes vary less than this (relative) say nothing about alpha."""
_CHANCE = 2.0
"""Standard errors within which a fit may lie off the mean by chance."""
_SCATTER_SHARE = 0.05
"""What one transfer counts in the scatter."""

WorkerPair = tuple[str, str]
"""(prefill worker, decode worker)."""
Line = tuple[float, float]
"""(alpha in s, seconds per byte)."""


@dataclass(slots=True)
class Fit:
    """Least squares over decayed sums."""

    weight: float = 0.0
    weight_sq: float = 0.0
    sum_bytes: float = 0.0
    sum_s: float = 0.0
    sum_bytes_sq: float = 0.0
    sum_bytes_s: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Take one transfer in."""
        self.weight = self.weight * _DECAY + 1.0
        self.weight_sq = self.weight_sq * _DECAY**2 + 1.0
        self.sum_bytes = self.sum_bytes * _DECAY + num_bytes
        self.sum_s = self.sum_s * _DECAY + seconds
        self.sum_bytes_sq = self.sum_bytes_sq * _DECAY + float(num_bytes) ** 2
        self.sum_bytes_s = self.sum_bytes_s * _DECAY + num_bytes * seconds

    def fade(self, share: float) -> None:
        """Let all transfers so far count for ``share`` of what they did."""
        self.weight *= share
        self.weight_sq *= share**2
        self.sum_bytes *= share
        self.sum_s *= share
        self.sum_bytes_sq *= share
        self.sum_bytes_s *= share

    @property
    def error_share(self) -> float:
        """Standard error of the fit, in those of one transfer."""
        return math.sqrt(self.weight_sq) / self.weight if self.weight > 0.0 else 1.0

    def solve(self) -> Line:
        """Return alpha and the seconds per byte, neither negative."""
        if self.weight <= 0.0 or self.sum_bytes <= 0.0:
            return _PRIOR_ALPHA_S, 1.0 / _PRIOR_BYTES_PER_S
        mean_bytes, mean_s = self.sum_bytes / self.weight, self.sum_s / self.weight
        variance = self.sum_bytes_sq / self.weight - mean_bytes**2
        if variance > (_MIN_SPREAD * mean_bytes) ** 2:
            slope = (self.sum_bytes_s / self.weight - mean_bytes * mean_s) / variance
            alpha = mean_s - slope * mean_bytes
            if slope > 0.0 and alpha >= 0.0:
                return alpha, slope
        alpha = min(_PRIOR_ALPHA_S, mean_s)
        return alpha, (mean_s - alpha) / mean_bytes


@dataclass(slots=True)
class _Link:
    pools: tuple[str, str]
    fit: Fit = field(default_factory=Fit)
    updated_at: float = 0.0
    num_transfers: int = 0
    num_bytes: int = 0
    last_s: float = 0.0
    transport: str = ""
    in_flight_bytes: int = 0


@dataclass(slots=True)
class _PoolPair:
    fit: Fit = field(default_factory=Fit)
    line: Line = (_PRIOR_ALPHA_S, 1.0 / _PRIOR_BYTES_PER_S)
    """What the fit says."""
    scatter_sq: float = 0.0
    """Mean square of how far transfers lie off their link's own fit, relative."""


_NO_TRANSFERS = _PoolPair()


class LinkTable:
    """The estimates of all pairs that have had a transfer or have one under way."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._links: dict[WorkerPair, _Link] = {}
        self._means: dict[tuple[str, str], _PoolPair] = {}

    def observe(
        self, pair: WorkerPair, pools: tuple[str, str], sample: TransferSample, now: float
    ) -> None:
        """Learn from one transfer."""
        link = self._link(pair, pools)
        mean = self._means.setdefault(pools, _PoolPair())
        if link.num_transfers > 1:
            alpha_s, s_per_byte = link.fit.solve()
            expected_s = alpha_s + sample.num_bytes * s_per_byte
            # A link that has changed is no scatter: it counts as a little of it at most.
            off = min(1.0, abs(sample.seconds - expected_s) / max(expected_s, 1e-9))
            mean.scatter_sq += _SCATTER_SHARE * (off**2 - mean.scatter_sq)
        link.fit.fade(self._own_share(link, now))
        link.fit.add(sample.num_bytes, sample.seconds)
        link.updated_at = now
        link.num_transfers += 1
        link.num_bytes += sample.num_bytes
        link.last_s = sample.seconds
        link.transport = sample.transport
        mean.fit.add(sample.num_bytes, sample.seconds)
        mean.line = mean.fit.solve()

    def started(self, pair: WorkerPair, pools: tuple[str, str], num_bytes: int) -> None:
        """Count bytes that a grant will move over this link."""
        self._link(pair, pools).in_flight_bytes += num_bytes

    def ended(self, pair: WorkerPair, num_bytes: int) -> None:
        """Stop counting them, moved or not."""
        link = self._links.get(pair)
        if link is not None:
            link.in_flight_bytes = max(0, link.in_flight_bytes - num_bytes)

    def predict_s(
        self, pair: WorkerPair, pools: tuple[str, str], num_bytes: int, now: float
    ) -> float:
        """Predict a transfer that starts behind what is under way on the link."""
        mean = self._means.get(pools, _NO_TRANSFERS)
        link = self._links.get(pair)
        if link is None:
            alpha_s, s_per_byte = mean.line
            return alpha_s + num_bytes * s_per_byte
        behind = num_bytes + link.in_flight_bytes
        mean_s = _seconds(mean.line, behind)
        if link.num_transfers == 0:
            return mean_s
        own_s = _seconds(self._estimate(pair, pools, now), behind)
        chance_s = _CHANCE * math.sqrt(mean.scatter_sq) * link.fit.error_share * mean_s
        return mean_s if abs(own_s - mean_s) <= chance_s else own_s

    def forget(self, worker_id: str) -> None:
        """Drop every link of a worker; what it taught about its pool stays."""
        self._links = {pair: link for pair, link in self._links.items() if worker_id not in pair}

    def view(self, now: float) -> tuple[LinkView, ...]:
        """Show the links that have had a transfer or have one under way."""
        return tuple(self._shown(now))

    def _shown(self, now: float) -> Iterable[LinkView]:
        for pair, link in sorted(self._links.items()):
            if link.num_transfers == 0 and link.in_flight_bytes == 0:
                continue
            alpha_s, s_per_byte = self._estimate(pair, link.pools, now)
            yield LinkView(
                prefill_worker_id=pair[0],
                decode_worker_id=pair[1],
                alpha_s=alpha_s,
                beta_bytes_per_s=1.0 / s_per_byte if s_per_byte > 0.0 else 0.0,
                num_transfers=link.num_transfers,
                num_bytes=link.num_bytes,
                last_s=link.last_s,
                transport=link.transport,
                in_flight_bytes=link.in_flight_bytes,
            )

    def _link(self, pair: WorkerPair, pools: tuple[str, str]) -> _Link:
        link = self._links.get(pair)
        if link is None:
            link = self._links[pair] = _Link(pools=pools)
        return link

    def _own_share(self, link: _Link, now: float) -> float:
        return max(0.0, 1.0 - (now - link.updated_at) / self._age_s)

    def _estimate(self, pair: WorkerPair, pools: tuple[str, str], now: float) -> Line:
        mean_alpha_s, mean_slope = self._means.get(pools, _NO_TRANSFERS).line
        link = self._links.get(pair)
        if link is None or link.num_transfers == 0:
            return mean_alpha_s, mean_slope
        own = self._own_share(link, now)
        alpha_s, slope = link.fit.solve()
        return (
            own * alpha_s + (1.0 - own) * mean_alpha_s,
            own * slope + (1.0 - own) * mean_slope,
        )


def _seconds(line: Line, num_bytes: int) -> float:
    alpha_s, s_per_byte = line
    return alpha_s + num_bytes * s_per_byte
