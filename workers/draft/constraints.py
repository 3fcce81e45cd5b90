"""Constrained decoding on the draft. It is optional there: while a grammar is not loaded, the draft goes on without."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from llguidance import LLTokenizer

from outrider.workers.constraints.grammars import BadConstraint
from outrider.workers.constraints.matching import Grammars, Matching
from outrider.workers.errors import first_line

logger = logging.getLogger(__name__)


class Constraints(Protocol):
    def matching(self, grammar: str, ends: Sequence[int]) -> Matching | None:
        """The state of an empty answer; None where the draft goes without a grammar."""


class LoadedInBackground:
    """The draft's tokenizer is loaded in a thread once a row needs it, since that may take longer than a target waits.

    Until then rows with a grammar are drafted without it, and the target drops candidates that do not fit.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._loading: Future[LLTokenizer] | None = None
        self._failed = False

    def matching(self, grammar: str, ends: Sequence[int]) -> Matching | None:
        if self._loading is None:
            self._loading = ThreadPoolExecutor(1, "tokenizer").submit(self._grammars.load)
        if self._failed or not self._loading.done():
            return None
        try:
            self._loading.result()
            return self._grammars.matching(grammar, ends)
        except BadConstraint:  # the target reports the error of the row
            return None
        except Exception as error:
            self._failed = True
            logger.warning("the draft goes on without constraints: %s", first_line(error))
            return None
