"""How grants end: what they came to is counted, and the ledger forgets them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.control.costs import CostModel
    from cluster.control.ledger import GrantRecord, Ledger
    from cluster.control.waiting import WaitingQueue


class Ends:
    """Ends grants, however they end: none goes without having been settled."""

    def __init__(self, ledger: Ledger, queue: WaitingQueue, costs: CostModel) -> None:
        self._ledger = ledger
        self._queue = queue
        self._costs = costs

    def done(
        self, record: GrantRecord, num_output_tokens: int, whole_output_tokens: int, now: float
    ) -> None:
        """End one that its router is through with; ``whole_output_tokens`` as in the wire."""
        self._costs.note_output(whole_output_tokens)
        self._queue.note_output(record.tenant, whole_output_tokens)
        self._ledger.mark_done(record, now)
        self.forgotten(record, num_output_tokens)

    def forgotten(self, record: GrantRecord, num_output_tokens: int = 0) -> None:
        """End one; what its workers still have of it may run on."""
        has_begun = self._ledger.has_begun(record)
        self._queue.settle(record, num_output_tokens, has_begun=has_begun)
        self._ledger.remove_grant(record)

    def replaced(self, record: GrantRecord) -> None:
        """End one whose want is to get another: whatever it came to, that one is counted."""
        self._queue.settle(record, 0, has_begun=False)
        self._ledger.remove_grant(record)

    def router_lost(self, router_id: str) -> None:
        """End all of a router; their legs may run on: it needs no control plane for them."""
        for record in self._of_router(router_id):
            self.forgotten(record)

    def router_gone(self, router_id: str, now: float) -> None:
        """End all of a router that is gone for good."""
        for record in self._of_router(router_id):
            self.done(record, 0, 0, now)

    def _of_router(self, router_id: str) -> list[GrantRecord]:
        return [r for r in self._ledger.grants.values() if r.router_id == router_id]
