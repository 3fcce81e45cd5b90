"""A model on our own kernels: one call is one forward pass, and its bits do not depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.kernels.native import Feeding, KernelError, NativeModel
from outrider.workers.engine import Chosen, Feed
from outrider.workers.errors import WorkerError
from outrider.workers.messages import Sampling


class NativeEngine:
    """Rows are named by the caller's numbers here and by the kernels' own below."""

    exact = True

    def __init__(self, model: NativeModel, context: int) -> None:
        self.model = model
        self.context = context
        self.vocabulary = model.program.vocabulary
        self._rows: dict[int, int] = {}

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        if row in self._rows:
            self.close(row)
        self._rows[row] = self.model.open(sampling, prompt_length)

    def length(self, row: int) -> int:
        return self.model.length(self._rows[row])

    def truncate(self, row: int, length: int) -> None:
        if length < self.length(row):
            self.model.truncate(self._rows[row], length)

    def close(self, row: int) -> None:
        self.model.close_row(self._rows.pop(row))

    def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
        try:
            answers = self.model.forward([Feeding(self._rows[feed.row], feed.tokens, feed.choose) for feed in feeds])
        except KernelError as error:
            raise WorkerError(f"the native engine could not run a pass over {len(feeds)} rows: {error}") from error
        return [Chosen(answer.tokens, answer.margins) for answer in answers]
