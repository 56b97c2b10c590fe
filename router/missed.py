"""A leg that its worker does not report: the start was lost, unless it is still on its way."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.errors import PdserveError

START_S = 1.0
"""How long the start of a leg may be on its way."""
REPORT_S = 0.5
"""How long after that the last view shows whether it came: workers report each second."""


@dataclass(frozen=True, slots=True)
class Missed:
    """The control plane's word of it, which comes once."""

    number: int
    """Of the grant."""
    error: PdserveError
