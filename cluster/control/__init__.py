"""The control plane: the ledger, placement, and the streams that feed them."""
