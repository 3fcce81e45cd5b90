"""For a process that needs tokenizers but no torch: transformers imports it wherever it is, which takes 2 s and 250 MB."""

from __future__ import annotations

import os
import sys

QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_goes_without = False


def go_without_torch() -> None:
    """From now on this process imports transformers, if ever, by ``import_transformers`` first, and so without torch."""
    global _goes_without
    _goes_without = True


def import_transformers() -> None:
    """In a process that goes without torch, have transformers believe, for the life of it, that torch is not there.

    Our own code may still import it. Where one of the two is imported already, nothing is to be gained and nothing is done.
    """
    if not _goes_without or "torch" in sys.modules or "transformers" in sys.modules:
        return
    before = os.environ.get(QUIET)
    # Else it says at its import that no models can be run.
    os.environ[QUIET] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]  # what import takes for "there is no such module"
    try:
        # It looks for torch once, at its first import, and remembers.
        from transformers.utils import is_torch_available

        is_torch_available()
    finally:
        del sys.modules["torch"]
        if before is None:
            del os.environ[QUIET]
        else:
            os.environ[QUIET] = before
