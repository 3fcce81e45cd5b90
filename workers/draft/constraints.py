"""Constrained decoding on the draft, which may do without: what is not there yet is not waited for."""

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
        """The beginning of an answer; None where the draft goes without."""


class LoadedAside:
    """The draft's tokenizer is loaded in a thread once a row needs it, since that may take longer than a target waits.

    Until then such rows are drafted as if they might be anything, and the target leaves out what does not fit.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._loading: Future[LLTokenizer] | None = None
        self._given_up = False

    def matching(self, grammar: str, ends: Sequence[int]) -> Matching | None:
        if self._loading is None:
            self._loading = ThreadPoolExecutor(1, "tokenizer").submit(self._grammars.load)
        if self._given_up or not self._loading.done():
            return None
        try:
            self._loading.result()
            return self._grammars.matching(grammar, ends)
        except BadConstraint:  # the target says what is wrong with the row
            return None
        except Exception as error:
            self._given_up = True
            logger.warning("the draft goes on without constraints: %s", first_line(error))
            return None
