"""Readers of quantised checkpoints, one for each format; all return ``QuantisedRows`` (kernels/quantised.py)."""
