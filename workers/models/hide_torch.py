"""For a process that needs tokenizers but no torch: transformers imports it wherever it is, which takes 2 s and 250 MB."""

from __future__ import annotations

import os
import sys

QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def hide_torch() -> None:
    """Have transformers believe, for the life of this process, that torch is not there. Our own code may still import it.

    Where one of the two is imported already, nothing is to be gained and nothing is done.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
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
