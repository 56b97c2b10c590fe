"""Turns a checkpoint into logits: knows tensors, knows no request."""
