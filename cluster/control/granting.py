"""Makes grants of choices: their ids, their words, and what the ledger keeps of them."""

from __future__ import annotations

import itertools
import logging
import secrets
from typing import TYPE_CHECKING

from cluster.control.decisions import SendGrant
from cluster.control.facts import Grant, Placed
from cluster.control.ledger import GrantRecord
from cluster.control.local_prefill import Why

if TYPE_CHECKING:
    from collections import Counter

    from cluster.control.costs import Choice, CostModel
    from cluster.control.ledger import Ledger
    from cluster.control.placement import Placement
    from cluster.control.waiting import Waiting
    from cluster.control.worker_entry import WorkerEntry

logger = logging.getLogger(__name__)


class Granter:
    """Enters grants in the ledger."""

    def __init__(
        self,
        *,
        term: int,
        ledger: Ledger,
        placement: Placement,
        costs: CostModel,
        counts: Counter[str],
    ) -> None:
        self._term = term
        self._ledger = ledger
        self._placement = placement
        self._costs = costs
        self._counts = counts
        self._orders = itertools.count(1)

    def grant(
        self, waiting: Waiting, choice: Choice, now: float, counted_tokens: float = 0.0
    ) -> SendGrant:
        """Charge the workers of a choice and say so.

        ``counted_tokens``: output tokens that were counted as its tenant's already.
        """
        want, route, order = waiting.want, choice.route, next(self._orders)
        grant_id = f"{self._term:x}-{order}"
        grant = Grant(
            term=self._term,
            grant_id=grant_id,
            request_id=want.request_id,
            attempt=want.attempt,
            prefill=_placed(route.prefill),
            decode=_placed(route.decode),
            handoff_id=_handoff_id(grant_id) if route.pools is not None else "",
            reason=choice.reason,
            predicted_s=choice.first_token_s,
        )
        record = GrantRecord(
            grant=grant,
            router_id=waiting.router_id,
            charges=self._placement.charges(route, want),
            pools=route.pools,
            transfer_bytes=self._costs.transfer_bytes(route, want),
            tenant=want.tenant,
            counted_tokens=counted_tokens,
            export_grant_id=want.export.grant_id if want.export is not None else "",
        )
        self._ledger.add_grant(record, order, now)
        self._costs.learn_prompt(route, want)
        self._counts["grants"] += 1
        self._counts["grants_of_exports"] += route.is_export
        for why in Why:
            self._counts[f"grants_local_{why.value}"] += choice.why_local == why.value
        logger.info("request=%s/%d grant=%s %s", *waiting.key, grant_id, choice.reason)
        return SendGrant(router_id=waiting.router_id, grant=grant)


def _handoff_id(grant_id: str) -> str:
    """Return a name that only those know who were told it: it opens a reservation to a writer."""
    return f"h-{grant_id}-{secrets.token_hex(8)}"


def _placed(entry: WorkerEntry | None) -> Placed | None:
    if entry is None:
        return None
    registration = entry.registration
    return Placed(
        worker_id=registration.worker_id,
        incarnation=registration.incarnation,
        address=registration.address,
        pool=registration.pool,
    )
