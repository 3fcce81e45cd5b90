"""Hypothesis draws the same examples on every run, so that a test which passes here passes there."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("outrider", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("outrider")
