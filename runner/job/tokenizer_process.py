"""A process that knows models and tokenizers, so that the driver itself need not load transformers."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from outrider.runner.pool_of_one import pool_of_one
from outrider.workers.constraints.tool_forms import ToolForm
from outrider.workers.errors import JobError, ModelError
from outrider.workers.messages import ModelSpec
from outrider.workers.models.limits import MOST_BYTES
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.model_memory import ModelMemory
from outrider.workers.models.reasoning import ReasoningTags

DIED = "the process that reads models died; is there memory enough?"
UNUSABLE = (
    "the tokenizer of {} cannot be used: the process that tried it asked for more time or memory {} than any tokenizer "
    f"needs ({MOST_BYTES >> 30} GB), or died; are its files whole, and is there memory enough?"
)
TOO_MUCH = (
    "the model's tokenizer asked for more time or memory for this prompt than any tokenizer needs "
    f"({MOST_BYTES >> 30} GB), or died; leave the prompt out, or mend the tokenizer"
)
TOO_HARD = (
    f"to compile it took more time or memory than any should ({MOST_BYTES >> 30} GB), or ended the process; make it simpler"
)
# A tokenizer that fails at this fails at everything.
SHORT_PROMPT = "a"
# A process may also die of something else: a prompt is at fault when it was there every time.
ATTEMPTS = 2
# How often what is told meanwhile is passed on.
NEWS_SECONDS = 0.2
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# In that process: where it says what takes long.
_news: Connection


class TokenizerProcessDied(JobError):
    pass


class TokenizerProcess:
    """Answers questions about models; leaves nothing behind when closed."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._news, news = multiprocessing.get_context("spawn").Pipe(duplex=False)
        self._pool = pool_of_one(_initialise, news)

    def _start_again(self) -> None:
        self._pool.shutdown(wait=True)
        self._news.close()
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            # It may read weights for minutes, to know them again, and nobody wants the answer any more.
            self._news.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def prepare_pair(
        self, target: str, draft: str, say: Callable[[str], None] = lambda text: None
    ) -> tuple[ModelInfo, ModelInfo | None, str, list[str]]:
        """``say`` hears what takes long while it does."""
        return self._heard(lambda: self._begin(_prepare_pair, target, draft), say)

    def prepare_scoring(
        self, model: str, against: str | None, say: Callable[[str], None] = lambda text: None
    ) -> tuple[ModelInfo, ModelInfo | None]:
        """The cards of a model and of what it is held against, which must know the same tokens."""
        return self._heard(lambda: self._begin(_prepare_scoring, model, against), say)

    def _heard(self, begin: Callable[[], PendingCall[Result]], say: Callable[[str], None]) -> Result:
        """The answer, with what is told meanwhile passed on; a tokenizer that is the helper's end each time is named."""
        tokenizer = ""
        for _ in range(ATTEMPTS):
            try:
                answer, done = begin(), False
                while not done:
                    done = answer.done(NEWS_SECONDS)
                    while self._news.poll():
                        news = self._news.recv()
                        if isinstance(news, Path):
                            tokenizer = str(news)
                        else:
                            say(news)
                return answer()
            except TokenizerProcessDied:
                self._start_again()
        if tokenizer:
            raise ModelError(UNUSABLE.format(tokenizer, "to be loaded"))
        raise TokenizerProcessDied(DIED)

    def check_weights(self, path: str, engine: str, allow_pickle: bool, precision: str, on_accelerator: bool) -> None:
        """A ModelError where the files, or the libraries here, lack what the engine needs."""
        self._ask_again(_check_weights, path, engine, allow_pickle, precision, on_accelerator)

    def memory_of(self, model: ModelSpec, rows: int, shortlist: int | None = 0) -> ModelMemory | None:
        """What memory a model takes that works on so many rows; None where that is not known before it is open."""
        return self._ask_again(_memory_of, model, rows, shortlist)

    def check_hf_runs(self, model_info: ModelInfo, fast_attention: bool) -> None:
        """A ModelError where the hf engine does not give the model's own text.

        What is not remembered is tried out in a process of its own, for a few seconds: this one goes without torch.
        """
        if self._ask_again(_hf_is_known, model_info, fast_attention):
            return
        with pool_of_one(_begin_to_serve) as pool:
            try:
                pool.submit(_try_on_hf, model_info, fast_attention).result()
            except BrokenProcessPool as error:
                raise ModelError(
                    f"{model_info.name} ({model_info.family}) cannot be run by the hf engine: a small model of its kind "
                    "took more time or memory than any should, or ended its process; is its config.json whole?"
                ) from error

    def check_unchanged(self, model_info: ModelInfo) -> None:
        """A JobChangedError where the files are no longer those that it describes."""
        self._ask_again(_check_unchanged, model_info.path, model_info.digest)

    def check_quantisable(self, path: str, out: str, bits: int, group: int | None) -> None:
        """A ModelError or UsageError where no smaller checkpoint can be made of it, or not there, or not like this."""
        self._ask_again(_check_quantisable, path, out, bits, group)

    def native_refuses(self, path: str) -> str | None:
        """Why the native engine cannot run the model; None where it can."""
        return self._ask_again(_native_refuses, path)

    def encode(self, path: str, prompts: list[Any]) -> list[tuple[int, ...] | str]:
        return self.begin_to_encode(path, prompts)()

    def begin_to_encode(
        self, path: str, prompts: list[Any], continued: bool = False
    ) -> Callable[[], list[tuple[int, ...] | str]]:
        """What comes back waits for the tokens. A prompt that ends the process is answered by a sentence.

        Several may be begun; they are to be waited for in the order in which they began. Texts that are ``continued`` ones
        get no tokens that stand at the beginning of a text.
        """
        pool = self._pool
        try:
            pending = self._begin(_encode, path, prompts, continued)
        except TokenizerProcessDied:  # of what was asked before, which is waited for before
            return lambda: self._encode_again(pool, path, prompts, continued)

        def answer() -> list[tuple[int, ...] | str]:
            try:
                return pending()
            except TokenizerProcessDied:
                return self._encode_again(pool, path, prompts, continued)

        return answer

    def begin_to_compile(
        self, path: str, vocabulary: int, end: int, constraints: list[dict[str, Any]]
    ) -> Callable[[], list[tuple[str, str]]]:
        """What comes back waits for each constraint's grammar, or "" and what is wrong with it.

        ``vocabulary`` and ``end`` are the model's: how many ids it scores, and the one that ends a text.
        """
        try:
            pending = self._begin(_compile, path, vocabulary, end, constraints)
        except TokenizerProcessDied:  # of what was asked before, which is waited for before
            return lambda: [self._compile_alone(path, vocabulary, end, each) for each in constraints]

        def answer() -> list[tuple[str, str]]:
            try:
                return pending()
            except TokenizerProcessDied:
                return [self._compile_alone(path, vocabulary, end, each) for each in constraints]

        return answer

    def _compile_alone(self, path: str, vocabulary: int, end: int, constraint: dict[str, Any]) -> tuple[str, str]:
        for _ in range(ATTEMPTS):
            try:
                return self._ask(_compile, path, vocabulary, end, [constraint])[0]
            except TokenizerProcessDied:
                self._start_again()
        return "", TOO_HARD

    def decode(self, path: str, answer: tuple[int, ...], shown: tuple[int, ...] = (), prompt: tuple[int, ...] = ()) -> str:
        """An answer's text as it goes on behind the prompt, with the special tokens that are ``shown``."""
        try:
            return self._ask(_decode, path, answer, shown, prompt)
        except TokenizerProcessDied:
            self._start_again()
            raise

    def reasoning_tags(self, path: str) -> ReasoningTags | None:
        """How the model's chat template tells thoughts from the answer; None where it does not."""
        return self._ask_of_template(_reasoning_tags, path, "for the tags of its chat template")

    def tool_form(self, path: str) -> ToolForm | None:
        """How the model's chat template writes calls of tools; None where it writes none, or in no form that is known."""
        return self._ask_of_template(_tool_form, path, "for the calls that its chat template writes")

    def _ask_of_template(self, function: Callable[[str], Result], path: str, why: str) -> Result:
        try:
            return self._ask_again(function, path)
        except TokenizerProcessDied:
            raise ModelError(UNUSABLE.format(path, why)) from None

    def _ask_again(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """What ends the process may be none of this: a prompt that was to be encoded before, or somebody's kill."""
        for _ in range(ATTEMPTS):
            try:
                return self._ask(function, *arguments, **options)
            except TokenizerProcessDied:
                self._start_again()
        raise TokenizerProcessDied(DIED)

    def _encode_again(
        self, died: ProcessPoolExecutor, path: str, prompts: list[Any], continued: bool
    ) -> list[tuple[int, ...] | str]:
        """``died`` is the process that was asked first."""
        if died is not self._pool:  # these only waited behind what ended it
            return self.begin_to_encode(path, prompts, continued)()
        self._start_again()
        return [self._encode_alone(path, prompt, continued) for prompt in prompts]

    def _encode_alone(self, path: str, prompt: Any, continued: bool) -> tuple[int, ...] | str:
        for _ in range(ATTEMPTS):
            try:
                return self._ask(_encode, path, [prompt], continued)[0]
            except TokenizerProcessDied:
                self._start_again()
        try:
            self._ask(_encode, path, [SHORT_PROMPT], False)
        except TokenizerProcessDied:
            raise ModelError(UNUSABLE.format(path, "for a prompt of one letter")) from None
        return TOO_MUCH

    def _ask(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        return self._begin(function, *arguments, **options)()

    def _begin(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> PendingCall[Result]:
        try:
            return PendingCall(self._pool.submit(function, *arguments, **options))
        except BrokenProcessPool as error:
            raise TokenizerProcessDied(DIED) from error


class PlanningProcess(TokenizerProcess):
    """Answers as a plan needs it, by headers and configurations: nothing is fetched, no weight is read, none is tried."""

    def prepare_pair(
        self, target: str, draft: str, say: Callable[[str], None] = lambda text: None
    ) -> tuple[ModelInfo, ModelInfo | None, str, list[str]]:
        return self._heard(lambda: self._begin(_prepare_pair, target, draft, by_headers=True), say)

    def check_hf_runs(self, model_info: ModelInfo, fast_attention: bool) -> None:
        """A run tries it."""


@dataclass(frozen=True, slots=True)
class PendingCall(Generic[Result]):
    """A question that is being answered. To call it is to wait for what comes back."""

    _future: Future[Result]

    def __call__(self) -> Result:
        try:
            return self._future.result()
        except BrokenProcessPool as error:
            raise TokenizerProcessDied(DIED) from error

    def done(self, seconds: float) -> bool:
        """Whether the answer is there, within so many seconds."""
        return bool(wait([self._future], timeout=seconds).done)


def _initialise(news: Connection) -> None:
    global _news
    _news = news
    _begin_to_serve(news)
    from outrider.workers.models.hide_torch import go_without_torch

    go_without_torch()


def _begin_to_serve(*hears: Connection) -> None:
    # What ends it where a tokenizer takes too long, whoever may have had it ignored before.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    Thread(target=end_with_the_driver, args=hears, daemon=True).start()


def end_with_the_driver(*hears: Connection) -> None:
    """Python lets a helper wait for ever for the next question of a process that was killed.

    ``hears``: what the driver closes at its end where it gives up, which makes it ready here.
    """
    driver = multiprocessing.parent_process()
    assert driver is not None
    wait_for([driver.sentinel, *hears])
    os._exit(1)


def _tell_of_reading(size: int) -> None:
    from outrider.workers.models.digests import remembers

    once = "this is done once" if remembers() else "this is done each time, since the cache cannot be written"
    _news.send(f"reading {size / 1e9:.1f} GB of weights to know them again; {once}")


# The modules behind these load transformers, so they are imported where they run.
def _prepare_pair(target: str, draft: str, by_headers: bool = False) -> tuple[ModelInfo, ModelInfo | None, str, list[str]]:
    from outrider.workers.models.preparation import prepare_pair

    return prepare_pair(target, draft, _tell_of_reading, lambda path: _news.send(Path(path)), by_headers)


def _prepare_scoring(model: str, against: str | None) -> tuple[ModelInfo, ModelInfo | None]:
    from outrider.workers.models.preparation import prepare_scoring

    return prepare_scoring(model, against, _tell_of_reading, lambda path: _news.send(Path(path)))


def _encode(path: str, prompts: list[Any], continued: bool) -> list[tuple[int, ...] | str]:
    from outrider.workers.models.preparation import encode

    return encode(path, prompts, continued)


def _compile(path: str, vocabulary: int, end: int, constraints: list[dict[str, Any]]) -> list[tuple[str, str]]:
    from outrider.workers.models.preparation import compile_constraints

    return compile_constraints(path, vocabulary, end, constraints)


def _decode(path: str, answer: tuple[int, ...], shown: tuple[int, ...], prompt: tuple[int, ...]) -> str:
    from outrider.workers.models.preparation import decode

    return decode(path, answer, shown, prompt)


def _tool_form(path: str) -> ToolForm | None:
    from outrider.workers.models.preparation import tool_form

    return tool_form(path)


def _reasoning_tags(path: str) -> ReasoningTags | None:
    from outrider.workers.models.preparation import reasoning_tags

    return reasoning_tags(path)


def _native_refuses(path: str) -> str | None:
    from outrider.workers.models.opening import native_supports

    return native_supports(path)


def _check_quantisable(path: str, out: str, bits: int, group: int | None) -> None:
    from outrider.workers.quantising.quantisable import check_quantisable

    check_quantisable(Path(path), Path(out), bits, group)


def _check_weights(path: str, engine: str, allow_pickle: bool, precision: str, on_accelerator: bool) -> None:
    from outrider.workers.models.opening import check_weights

    check_weights(path, engine, allow_pickle, precision, on_accelerator)


def _memory_of(model: ModelSpec, rows: int, shortlist: int | None) -> ModelMemory | None:
    from outrider.workers.models.memory_of_program import memory_of

    return memory_of(model, rows, shortlist)


def _hf_is_known(model_info: ModelInfo, fast_attention: bool) -> bool:
    from outrider.workers.models.way_cache import is_known

    return is_known(model_info, fast_attention)


def _try_on_hf(model_info: ModelInfo, fast_attention: bool) -> None:
    from outrider.workers.models.way_cache import try_within_limits

    try_within_limits(model_info, fast_attention)


def _check_unchanged(path: str, digest: str) -> None:
    from outrider.workers.models.model_info import check_unchanged

    check_unchanged(path, digest)
