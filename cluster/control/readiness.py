"""What a view says about serving: which roles lack a worker, and what a client is told of it.

A suspected worker counts as there: it is back or declared dead within 3 s. One whose engine hangs
does not, however well it reports. A decode worker can prefill, so without prefill workers, or
without a link that works, requests are served, only slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.config import Role
from cluster.control.facts import Health

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.control.facts import ClusterView, RefusedWorker, WorkerView

LINK = "link"
"""What is missing where there are links and none works."""


def missing_roles(view: ClusterView) -> tuple[Role, ...]:
    """Return the roles that no worker fills; none where mixed workers do."""
    return _lacking(w.worker.role for w in _staying(view) if w.health is not Health.STALLED)


def faults(view: ClusterView) -> tuple[str, ...]:
    """Say what is wrong with each missing role and with links; names no worker and no host."""
    there = {worker.worker.role for worker in _staying(view)}
    leaving = {worker.worker.role for worker in view.workers} - there
    told = []
    for role in missing_roles(view):
        if {role, Role.MIXED} & there:
            told.append(f"{role.value}: the engine makes no step")
        elif {role, Role.MIXED} & leaving:
            told.append(f"{role.value}: what there is drains")
        else:
            told.append(f"{role.value}: {lack([role], view.refused)}")
    num_broken, num_links = broken_links(view)
    if num_broken:
        told.append(f"{LINK}: {num_broken} of {num_links} from prefill to decode workers fail")
    return tuple(told)


def broken_links(view: ClusterView) -> tuple[int, int]:
    """Return how many of the links between workers that are there are broken, and their number."""
    there = [w for w in _staying(view) if w.health is not Health.STALLED]
    senders = [w for w in there if w.worker.role is not Role.DECODE]
    receivers = {w.worker.incarnation for w in there if w.worker.role is not Role.PREFILL}
    num_broken = sum(len(receivers.intersection(w.report.broken_links)) for w in senders)
    num_links = sum(len(receivers - {w.worker.incarnation}) for w in senders)
    return num_broken, num_links


def can_serve(view: ClusterView) -> bool:
    """Tell whether any request could be placed."""
    return Role.DECODE not in missing_roles(view)


def may_wait(view: ClusterView) -> bool:
    """Tell whether a request has something to wait for: workers, or that they come back."""
    there = _lacking(worker.worker.role for worker in _staying(view))
    return view.is_reconciling or Role.DECODE not in there


def lack(roles: Iterable[Role], refused: Iterable[RefusedWorker]) -> str:
    """Return what a client is told where no worker of ``roles`` is there: that, and why if known.

    Names a role, a field and both values; no worker and no host.
    """
    names = [role.value for role in roles]
    reasons = [r.reason for r in refused if r.role in (*names, Role.MIXED.value)]
    why = f": one was refused, {reasons[-1]}" if reasons else ""
    return f"no {' and no '.join(names)} worker{why}"


def _staying(view: ClusterView) -> list[WorkerView]:
    """Return the workers that take new work: not those that drain."""
    return [worker for worker in view.workers if not worker.report.is_draining]


def _lacking(roles: Iterable[Role]) -> tuple[Role, ...]:
    filled = set(roles)
    if Role.MIXED in filled:
        return ()
    return tuple(role for role in (Role.PREFILL, Role.DECODE) if role not in filled)
