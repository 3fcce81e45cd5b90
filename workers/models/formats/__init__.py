"""Quantised checkpoints: one reader a format, all giving rows of the form that kernels/quantised.py defines."""
