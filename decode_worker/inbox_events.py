"""What an inbox tells whoever owns its legs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cluster.errors import PdserveError
    from cluster.handoff import AbortCause
    from cluster.request import TokenLogprobs
    from cluster.rpc.legs import OpenLeg


class InboxEvents(Protocol):
    """Who owns the legs."""

    def on_imported(
        self, opened: OpenLeg, output_ids: tuple[int, ...], logprobs: TokenLogprobs | None
    ) -> None:
        """A leg's KV is whole and held under its key.

        ``output_ids`` are the tokens so far, ``logprobs`` those of the last one.
        """
        ...

    def on_gave_way(self, opened: OpenLeg) -> None:
        """A leg loses its blocks to a higher tier; its handoff is over next."""
        ...

    def on_handoff_over(
        self, opened: OpenLeg, cause: AbortCause, error: PdserveError | None
    ) -> None:
        """A leg's handoff was aborted from outside; its blocks are free."""
        ...
