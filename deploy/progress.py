"""Progress of work that a person waits for."""

from __future__ import annotations

from typing import Protocol

from tqdm import tqdm


class Bar(Protocol):
    """One bar; tqdm's own is one."""

    def update(self, n: float = 1) -> object:
        """Move on by ``n`` units."""
        ...

    def close(self) -> object:
        """End the bar; idempotent."""
        ...


class Progress(Protocol):
    """Makes bars."""

    def __call__(self, what: str, total: int, unit: str) -> Bar:
        """Start a bar for ``total`` units of ``what``; ``unit`` is ``B`` for bytes."""
        ...


def show(what: str, total: int, unit: str) -> Bar:
    """Start a bar on standard error."""
    is_bytes = unit == "B"
    bar: Bar = tqdm(
        total=total, desc=what, unit=unit, unit_scale=is_bytes, mininterval=0.2, dynamic_ncols=True
    )
    return bar
