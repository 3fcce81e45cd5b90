"""Cores and memory of a worker, asked for and checked."""
