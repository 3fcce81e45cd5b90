"""A helper process that knows models and tokenizers, so that the driver itself need not load transformers."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from outrider.workers.errors import JobError, ModelError
from outrider.workers.models.cards import ModelCard
from outrider.workers.models.limits import MOST_BYTES

DIED = "the process that reads models died; is there memory enough?"
UNUSABLE = (
    "the tokenizer of {} cannot be used: the process that tried it asked for more time or memory {} than any tokenizer "
    f"needs ({MOST_BYTES >> 30} GB), or died; are its files whole, and is there memory enough?"
)
# How often what is told meanwhile is passed on.
NEWS_SECONDS = 0.2
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
# In the helper itself: where it says what takes long.
_news: Connection


class HelperDied(JobError):
    pass


class Office:
    """Answers questions about models; leaves nothing behind when closed."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._news, news = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_settle_in, initargs=(news,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def prepare_pair(
        self, target: str, draft: str, say: Callable[[str], None] = lambda text: None
    ) -> tuple[ModelCard, ModelCard | None, str, list[str]]:
        """``say`` hears what takes long while it does."""
        answer = self._begin(_prepare_pair, target, draft)
        tokenizer = ""
        while True:
            done = answer.done(NEWS_SECONDS)
            while self._news.poll():
                news = self._news.recv()
                if isinstance(news, Path):
                    tokenizer = str(news)
                else:
                    say(news)
            if done:
                break
        try:
            return answer()
        except HelperDied:
            if not tokenizer:
                raise
            raise ModelError(UNUSABLE.format(tokenizer, "to be loaded")) from None

    def check_weights(self, path: str, engine: str, allow_pickle: bool) -> None:
        """A ModelError where the files lack what the engine needs."""
        self._ask(_check_weights, path, engine, allow_pickle)

    def check_unchanged(self, card: ModelCard) -> None:
        """A JobChangedError where the files are no longer those of the card."""
        self._ask(_check_unchanged, card.path, card.digest)

    def native_refuses(self, path: str) -> str | None:
        """Why the native engine cannot run the model; None where it can."""
        return self._ask(_native_refuses, path)

    def encode(self, path: str, prompts: list[Any]) -> list[tuple[int, ...] | str]:
        return self.begin_to_encode(path, prompts)()

    def begin_to_encode(self, path: str, prompts: list[Any]) -> Callable[[], list[tuple[int, ...] | str]]:
        """What comes back waits for the tokens."""
        asked = self._begin(_encode, path, prompts)

        def answer() -> list[tuple[int, ...] | str]:
            try:
                return asked()
            except HelperDied:
                raise ModelError(UNUSABLE.format(path, f"for {len(prompts):,} prompt{'s' * (len(prompts) != 1)}")) from None

        return answer

    def _ask(
        self, function: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Answer:
        return self._begin(function, *arguments, **options)()

    def _begin(
        self, function: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Asked[Answer]:
        try:
            return Asked(self._pool.submit(function, *arguments, **options))
        except BrokenProcessPool as error:
            raise HelperDied(DIED) from error


@dataclass(frozen=True, slots=True)
class Asked(Generic[Answer]):
    """A question that is being answered. To call it is to wait for what comes back."""

    _future: Future[Answer]

    def __call__(self) -> Answer:
        try:
            return self._future.result()
        except BrokenProcessPool as error:
            raise HelperDied(DIED) from error

    def done(self, seconds: float) -> bool:
        """Whether the answer is there, within so many seconds."""
        return bool(wait([self._future], timeout=seconds).done)


def _settle_in(news: Connection) -> None:
    global _news
    _news = news
    # Ctrl-C reaches the whole group; the helper goes without the traceback that Python would print.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # What ends it where a tokenizer takes too long, whoever may have had it ignored before.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    Thread(target=_end_with_the_driver, daemon=True).start()
    from outrider.workers.models.torchless import go_without_torch

    go_without_torch()


def _end_with_the_driver() -> None:
    """Python lets a helper wait for ever for the next question of a process that was killed."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)


def _tell_of_reading(size: int) -> None:
    _news.send(f"reading {size / 1e9:.1f} GB of weights to know them again; this is done once")


# The modules behind these load transformers, so they are imported where they run.
def _prepare_pair(target: str, draft: str) -> tuple[ModelCard, ModelCard | None, str, list[str]]:
    from outrider.workers.models.preparation import prepare_pair

    return prepare_pair(target, draft, _tell_of_reading, lambda path: _news.send(Path(path)))


def _encode(path: str, prompts: list[Any]) -> list[tuple[int, ...] | str]:
    from outrider.workers.models.preparation import encode

    return encode(path, prompts)


def _native_refuses(path: str) -> str | None:
    from outrider.workers.models.opening import native_supports

    return native_supports(path)


def _check_weights(path: str, engine: str, allow_pickle: bool) -> None:
    from outrider.workers.models.opening import check_weights

    check_weights(path, engine, allow_pickle)


def _check_unchanged(path: str, digest: str) -> None:
    from outrider.workers.models.cards import check_unchanged

    check_unchanged(path, digest)
