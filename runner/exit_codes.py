"""Exit codes of ``outrider run`` that do not come from an ``OutriderError``, which has its own (``exit_code``)."""

from __future__ import annotations

ALL_DONE, SOME_FAILED, INTERRUPTED = 0, 3, 130
