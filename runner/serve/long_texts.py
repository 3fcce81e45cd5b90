"""Single requests with long texts are admitted in a thread of their own, which has a tokenizer process of its own, so that
other requests need not wait for them. Encoding a megabyte takes a second; of the slowest tokenizers, ten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.workers.models.model_info import ModelInfo

# Shorter texts are encoded in a tenth of a second.
LONG_CHARACTERS = 100_000


class LongTexts:
    """Admits requests one after the other. Its methods are called by one thread, the driver's."""

    def __init__(self, tokenizer_process: TokenizerProcess, target: ModelInfo) -> None:
        """``tokenizer_process`` starts with the first request, if any comes."""
        self._tokenizer_process = tokenizer_process
        self._target = target
        self._unchanged = False
        self._thread = ThreadPoolExecutor(1, "long texts")
        self._pending: dict[str, Future[None]] = {}

    def submit(self, request: str, admit: Callable[[Callable[[], TokenizerProcess]], None]) -> None:
        """``admit`` is called with a function that gives the tokenizer process, or raises a JobChangedError."""
        self._pending = {name: pending for name, pending in self._pending.items() if not pending.done()}
        self._pending[request] = self._thread.submit(admit, self._checked_process)

    def _checked_process(self) -> TokenizerProcess:
        # The process reads the tokenizer's files anew, and the model was loaded long ago.
        if not self._unchanged:
            self._tokenizer_process.check_unchanged(self._target)
            self._unchanged = True
        return self._tokenizer_process

    def take_back(self, request: str, withdraw: Callable[[], None]) -> bool:
        """Leave out a request that has not begun, or call ``withdraw`` after its admission; False if none is pending."""
        if (pending := self._pending.pop(request, None)) is None:
            return False
        if not pending.cancel():
            pending.add_done_callback(lambda _: withdraw())
        return True

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


def is_long(entry: Mapping[str, Any]) -> bool:
    """Whether the texts of a request take longer to be encoded than others should wait."""
    return _characters(entry) > LONG_CHARACTERS


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    # A prompt may be a list of token ids, which are checked one by one.
    return sum(1 + _characters(each) for each in value) if isinstance(value, list) else 0
