"""The composition root and everything about running the product."""
