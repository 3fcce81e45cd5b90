"""Imports transformers without torch, for processes that only need tokenizers: torch would take 2 s and 250 MB."""

from __future__ import annotations

import os
import sys

QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_goes_without = False


def go_without_torch() -> None:
    """Declare that this process needs no torch: a later ``import_transformers`` hides it."""
    global _goes_without
    _goes_without = True


def import_transformers() -> None:
    """In a process that goes without torch, import transformers so that it finds no torch, for the rest of the process.

    Our own code may still import torch. Nothing is done where torch or transformers is imported already.
    """
    if not _goes_without or "torch" in sys.modules or "transformers" in sys.modules:
        return
    before = os.environ.get(QUIET)
    # Suppresses the warning at import that no models can be run.
    os.environ[QUIET] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]  # import raises ModuleNotFoundError for it
    try:
        # transformers looks for torch once, and remembers the result.
        from transformers.utils import is_torch_available

        is_torch_available()
    finally:
        del sys.modules["torch"]
        if before is None:
            del os.environ[QUIET]
        else:
            os.environ[QUIET] = before
