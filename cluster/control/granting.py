"""Makes grants of choices: their ids, their words, and what the ledger keeps of them."""

from __future__ import annotations

import itertools
import logging
import secrets
from typing import TYPE_CHECKING

from cluster.control.decisions import SendGrant
from cluster.control.facts import Grant
from cluster.control.ledger import NOTHING_COUNTED, Counted, GrantRecord
from cluster.control.local_prefill import Why
from cluster.control.worker_entry import Charge

if TYPE_CHECKING:
    from collections import Counter

    from cluster.control.costs import Choice, CostModel, Route
    from cluster.control.facts import Want
    from cluster.control.ledger import Ledger
    from cluster.control.needs import NeedsRule
    from cluster.control.waiting import Waiting
    from cluster.policy.order import Ordering

logger = logging.getLogger(__name__)


class Granter:
    """Enters grants in the ledger."""

    def __init__(
        self,
        *,
        term: int,
        ledger: Ledger,
        rule: NeedsRule,
        costs: CostModel,
        counts: Counter[str],
        ordering: Ordering,
    ) -> None:
        self._term = term
        self._ordering = ordering
        self._ledger = ledger
        self._rule = rule
        self._costs = costs
        self._counts = counts
        for why in Why:
            counts[f"grants_local_{why.value}"] += 0
        self._orders = itertools.count(1)

    def grant(
        self, waiting: Waiting, choice: Choice, now: float, counted: Counted = NOTHING_COUNTED
    ) -> SendGrant:
        """Charge the workers of a choice and say so.

        ``counted``: what was counted as its tenant's already.
        """
        want, route, order = waiting.want, choice.route, next(self._orders)
        grant_id, pools = f"{self._term:x}-{order}", route.pools
        grant = Grant(
            term=self._term,
            grant_id=grant_id,
            request_id=want.request_id,
            attempt=want.attempt,
            prefill=None if route.prefill is None else route.prefill.placed,
            decode=None if route.decode is None else route.decode.placed,
            handoff_id="" if pools is None else _handoff_id(grant_id),
            reason=choice.reason,
            predicted_s=choice.first_token_s,
        )
        record = GrantRecord(
            grant=grant,
            router_id=waiting.router_id,
            charges=self._charges(
                route, want, is_firm=self._ordering.has_aged(waiting.ticket.arrived, now)
            ),
            pools=pools,
            transfer_bytes=self._costs.transfer_bytes(route, want),
            tenant=want.tenant,
            tier=waiting.ticket.tier,
            counted=counted,
            export_grant_id=want.export.grant_id if want.export is not None else "",
        )
        self._ledger.add_grant(record, order, now)
        self._costs.learn_prompt(route, want)
        self._counts["grants"] += 1
        self._counts["grants_of_exports"] += route.is_export
        if choice.why_local:
            self._counts[f"grants_local_{choice.why_local}"] += 1
        logger.info("request=%s/%d grant=%s %s", *waiting.key, grant_id, choice.reason)
        return SendGrant(router_id=waiting.router_id, grant=grant)

    def _charges(self, route: Route, want: Want, *, is_firm: bool) -> dict[str, Charge]:
        """Return what a grant of this route takes on each of its workers."""
        charges, tier = {}, self._rule.tier(want)
        if route.prefill is not None and not route.is_export:
            charges[route.prefill.worker_id] = Charge(
                blocks=route.prefill.blocks_for(want.num_prompt_tokens),
                prompt_tokens=want.num_prompt_tokens,
                tier=tier,
                is_firm=is_firm,
            )
        if route.decode is not None:
            is_local = route.prefill is None
            charges[route.decode.worker_id] = Charge(
                blocks=route.decode.blocks_for(self._rule.decode_tokens(want)),
                prompt_tokens=want.num_prompt_tokens if is_local else 0,
                tier=tier,
                is_firm=is_firm,
            )
        return charges


def _handoff_id(grant_id: str) -> str:
    """Return a name that only those know who were told it: it opens a reservation to a writer."""
    return f"h-{grant_id}-{secrets.token_hex(8)}"
