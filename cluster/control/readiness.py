"""What a view says about serving: which roles lack a worker, and what a client is told of it.

A suspected worker counts as there: it is back or declared dead within 3 s. A decode worker can
prefill, so without prefill workers requests are served, only slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.control.facts import ClusterView, RefusedWorker


def missing_roles(view: ClusterView) -> tuple[Role, ...]:
    """Return the roles that no worker has; none where mixed workers are there."""
    roles = {worker.worker.role for worker in view.workers}
    if Role.MIXED in roles:
        return ()
    return tuple(role for role in (Role.PREFILL, Role.DECODE) if role not in roles)


def can_serve(view: ClusterView) -> bool:
    """Tell whether any request could be placed."""
    return Role.DECODE not in missing_roles(view)


def may_wait(view: ClusterView) -> bool:
    """Tell whether a request has something to wait for: workers, or that they come back."""
    return view.is_reconciling or can_serve(view)


def lack(roles: Iterable[Role], refused: Iterable[RefusedWorker]) -> str:
    """Return what a client is told where no worker of ``roles`` is there: that, and why if known.

    Names a role, a field and both values; no worker and no host.
    """
    names = [role.value for role in roles]
    reasons = [r.reason for r in refused if r.role in (*names, Role.MIXED.value)]
    why = f": one was refused, {reasons[-1]}" if reasons else ""
    return f"no {' and no '.join(names)} worker{why}"
