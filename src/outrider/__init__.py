"""Outrider: batch jobs for assisted generation, one process per model, every process pinned."""

__version__ = "0.1.0"
