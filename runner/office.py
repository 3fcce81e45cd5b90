"""A helper process that knows models and tokenizers, so that the driver itself need not load transformers."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from threading import Thread
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from outrider.workers.errors import JobError
from outrider.workers.models.cards import ModelCard

DIED = "the process that reads models died; is there memory enough?"
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Office:
    """Answers questions about models; leaves nothing behind when closed."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_settle_in,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def prepare_pair(self, target: str, draft: str) -> tuple[ModelCard, ModelCard | None, str, list[str]]:
        return self._ask(_prepare_pair, target, draft)

    def native_refuses(self, path: str) -> str | None:
        """Why the native engine cannot run the model; None where it can."""
        return self._ask(_native_refuses, path)

    def encode(self, path: str, prompts: list[Any]) -> list[tuple[int, ...] | str]:
        return self.begin_to_encode(path, prompts)()

    def begin_to_encode(self, path: str, prompts: list[Any]) -> Callable[[], list[tuple[int, ...] | str]]:
        """What comes back waits for the tokens."""
        return self._begin(_encode, path, prompts)

    def _ask(
        self, function: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Answer:
        return self._begin(function, *arguments, **options)()

    def _begin(
        self, function: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Callable[[], Answer]:
        def answer() -> Answer:
            try:
                return future.result()
            except BrokenProcessPool as error:
                raise JobError(DIED) from error

        try:
            future = self._pool.submit(function, *arguments, **options)
        except BrokenProcessPool as error:
            raise JobError(DIED) from error
        return answer


def _settle_in() -> None:
    # Ctrl-C reaches the whole group; the helper goes without the traceback that Python would print.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_end_with_the_driver, daemon=True).start()
    from outrider.workers.models.torchless import go_without_torch

    go_without_torch()


def _end_with_the_driver() -> None:
    """Python lets a helper wait for ever for the next question of a process that was killed."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)


# The modules behind these load transformers, so they are imported where they run.
def _prepare_pair(target: str, draft: str) -> tuple[ModelCard, ModelCard | None, str, list[str]]:
    from outrider.workers.models.preparation import prepare_pair

    return prepare_pair(target, draft)


def _encode(path: str, prompts: list[Any]) -> list[tuple[int, ...] | str]:
    from outrider.workers.models.preparation import encode

    return encode(path, prompts)


def _native_refuses(path: str) -> str | None:
    from outrider.workers.models.opening import native_supports

    return native_supports(path)
