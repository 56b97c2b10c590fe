"""Moves block bytes between two workers."""
