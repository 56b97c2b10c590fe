"""Which blocks are whose, and the paged tensors that they stand for."""
