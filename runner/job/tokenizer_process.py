"""The tokenizer process: loads models' configurations and tokenizers, so that the driver need not load transformers."""

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

DIED = "the process that reads models died; is there enough memory?"
UNUSABLE = (
    "the tokenizer of {} cannot be used: the process that tried it asked for more time or memory {} than any tokenizer "
    f"needs ({MOST_BYTES >> 30} GB), or died; are its files whole, and is there enough memory?"
)
TOO_MUCH = (
    "the model's tokenizer asked for more time or memory for this prompt than any tokenizer needs "
    f"({MOST_BYTES >> 30} GB), or died; leave the prompt out, or mend the tokenizer"
)
TOO_HARD = (
    f"to compile it took more time or memory than any should ({MOST_BYTES >> 30} GB), or ended the process; make it simpler"
)
# A tokenizer that fails at this prompt fails at any.
SHORT_PROMPT = "a"
# The process may also die of another cause: a prompt is blamed if it ended the process this many times.
ATTEMPTS = 2
# How often messages of the process are passed on while an answer is awaited.
MESSAGES_SECONDS = 0.2
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
# In the tokenizer process: the pipe for its messages to the driver.
_messages: Connection


class TokenizerProcessDied(JobError):
    pass


class TokenizerProcess:
    """The driver's side: calls functions in the process, and starts it again when it dies."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._messages, messages = multiprocessing.get_context("spawn").Pipe(duplex=False)
        self._pool = pool_of_one(_initialise, messages)

    def _start_again(self) -> None:
        self._pool.shutdown(wait=True)
        self._messages.close()
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            # After an error nobody waits for the answer (hashing weights takes minutes): closing the pipe ends the process.
            self._messages.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def prepare_pair(
        self, target: str, draft: str, say: Callable[[str], None] = lambda text: None, native: bool = True
    ) -> tuple[ModelInfo, ModelInfo | None, str, list[str]]:
        """Target, draft, the draft's name, and notes; ``say`` gets messages about what takes long. ``native``: whether both
        may run on the native engine."""
        return self._answer_with_messages(lambda: self._begin(_prepare_pair, target, draft, native), say)

    def prepare_scoring(
        self, model: str, against: str | None, say: Callable[[str], None] = lambda text: None
    ) -> tuple[ModelInfo, ModelInfo | None]:
        """The infos of a model and of the one that it is compared with, whose vocabularies must agree."""
        return self._answer_with_messages(lambda: self._begin(_prepare_scoring, model, against), say)

    def _answer_with_messages(self, begin: Callable[[], PendingCall[Result]], say: Callable[[str], None]) -> Result:
        """The answer; meanwhile messages are passed on. The error names a tokenizer that ended the process each time."""
        tokenizer = ""
        for _ in range(ATTEMPTS):
            try:
                answer, done = begin(), False
                while not done:
                    done = answer.done(MESSAGES_SECONDS)
                    while self._messages.poll():
                        message = self._messages.recv()
                        if isinstance(message, Path):
                            tokenizer = str(message)
                        else:
                            say(message)
                return answer()
            except TokenizerProcessDied:
                self._start_again()
        if tokenizer:
            raise ModelError(UNUSABLE.format(tokenizer, "to be loaded"))
        raise TokenizerProcessDied(DIED)

    def check_weights(self, path: str, engine: str, allow_pickle: bool, precision: str, on_accelerator: bool) -> None:
        """A ModelError if the files or the installed libraries lack what the engine needs."""
        self._ask_again(_check_weights, path, engine, allow_pickle, precision, on_accelerator)

    def memory_of(self, model: ModelSpec, rows: int, shortlist: int | None = 0) -> ModelMemory | None:
        """The memory of a model with a batch of ``rows``; None if it is not known before the model is loaded."""
        return self._ask_again(_memory_of, model, rows, shortlist)

    def check_hf_runs(self, model_info: ModelInfo, fast_attention: bool) -> None:
        """A ModelError if the hf engine cannot reproduce the model's own texts.

        If the outcome is not remembered, it is tried in another process, which may load torch, in a few seconds.
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
        """A JobChangedError if the model's files have changed since ``model_info`` was read."""
        self._ask_again(_check_unchanged, model_info.path, model_info.digest)

    def check_quantisable(self, path: str, out: str, bits: int, group: int | None) -> None:
        """A ModelError or UsageError if the model cannot be quantised like this, or not to ``out``."""
        self._ask_again(_check_quantisable, path, out, bits, group)

    def native_refuses(self, path: str) -> str | None:
        """Why the native engine cannot run the model; None if it can."""
        return self._ask_again(_native_refuses, path)

    def encode(self, path: str, prompts: list[Any]) -> list[tuple[int, ...] | str]:
        return self.begin_to_encode(path, prompts)()

    def begin_to_encode(
        self, path: str, prompts: list[Any], continued: bool = False, context: int | None = None
    ) -> Callable[[], list[tuple[int, ...] | str]]:
        """Begin to encode prompts; the returned function waits for the tokens, or for a sentence about a prompt that fails.

        Several calls may be pending; wait for them in the order in which they were begun. ``continued``: no BOS token and
        the like at the beginning. ``context``: a long prompt that is certain to have so many tokens is refused at once.
        """
        pool = self._pool
        try:
            pending = self._begin(_encode, path, prompts, continued, context)
        except TokenizerProcessDied:  # by an earlier call, whose caller starts it again
            return lambda: self._encode_again(pool, path, prompts, continued, context)

        def answer() -> list[tuple[int, ...] | str]:
            try:
                return pending()
            except TokenizerProcessDied:
                return self._encode_again(pool, path, prompts, continued, context)

        return answer

    def begin_to_compile(
        self, path: str, vocabulary: int, end: int, constraints: list[dict[str, Any]]
    ) -> Callable[[], list[tuple[str, str]]]:
        """Begin to compile constraints; the returned function waits for pairs: grammar and "", or "" and the problem.

        ``vocabulary``: how many token ids the model scores; ``end``: its end token.
        """
        try:
            pending = self._begin(_compile, path, vocabulary, end, constraints)
        except TokenizerProcessDied:  # by an earlier call, whose caller starts it again
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

    def decode(
        self,
        path: str,
        answer: tuple[int, ...],
        shown: tuple[int, ...] = (),
        prompt: tuple[int, ...] = (),
        unfinished: bool = False,
    ) -> str:
        """An answer's text as the continuation of the prompt; special tokens are left out except ``shown``.

        Of an ``unfinished`` answer without what further tokens may change, but for a character that is incomplete at its
        end.
        """
        try:
            return self._ask(_decode, path, answer, shown, prompt, unfinished)
        except TokenizerProcessDied:
            self._start_again()
            raise

    def reasoning_tags(self, path: str) -> ReasoningTags | None:
        """The tags by which the model's chat template marks reasoning; None if it does not."""
        return self._ask_of_template(_reasoning_tags, path, "for the tags of its chat template")

    def tool_form(self, path: str) -> ToolForm | None:
        """The form in which the model's chat template writes tool calls; None if it has none, or an unknown one."""
        return self._ask_of_template(_tool_form, path, "for the calls that its chat template writes")

    def _ask_of_template(self, function: Callable[[str], Result], path: str, why: str) -> Result:
        try:
            return self._ask_again(function, path)
        except TokenizerProcessDied:
            raise ModelError(UNUSABLE.format(path, why)) from None

    def _ask_again(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """Call again if the process dies: the cause may be an earlier prompt or a kill from outside."""
        for _ in range(ATTEMPTS):
            try:
                return self._ask(function, *arguments, **options)
            except TokenizerProcessDied:
                self._start_again()
        raise TokenizerProcessDied(DIED)

    def _encode_again(
        self, died: ProcessPoolExecutor, path: str, prompts: list[Any], continued: bool, context: int | None
    ) -> list[tuple[int, ...] | str]:
        """Encode the prompts after the process ``died``, one by one if one of them may have ended it."""
        if died is not self._pool:  # an earlier call ended that process
            return self.begin_to_encode(path, prompts, continued, context)()
        self._start_again()
        return [self._encode_alone(path, prompt, continued, context) for prompt in prompts]

    def _encode_alone(self, path: str, prompt: Any, continued: bool, context: int | None) -> tuple[int, ...] | str:
        for _ in range(ATTEMPTS):
            try:
                return self._ask(_encode, path, [prompt], continued, context)[0]
            except TokenizerProcessDied:
                self._start_again()
        try:
            self._ask(_encode, path, [SHORT_PROMPT], False, None)
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
    """For ``outrider topology --plan``: uses headers and configurations only; downloads, reads and tries no weights."""

    def prepare_pair(
        self, target: str, draft: str, say: Callable[[str], None] = lambda text: None, native: bool = True
    ) -> tuple[ModelInfo, ModelInfo | None, str, list[str]]:
        return self._answer_with_messages(lambda: self._begin(_prepare_pair, target, draft, native, by_headers=True), say)

    def check_hf_runs(self, model_info: ModelInfo, fast_attention: bool) -> None:
        """Not checked for a plan."""


@dataclass(frozen=True, slots=True)
class PendingCall(Generic[Result]):
    """A call in the tokenizer process; calling this object waits for its result."""

    _future: Future[Result]

    def __call__(self) -> Result:
        try:
            return self._future.result()
        except BrokenProcessPool as error:
            raise TokenizerProcessDied(DIED) from error

    def done(self, seconds: float) -> bool:
        """Whether the result arrives within ``seconds``."""
        return bool(wait([self._future], timeout=seconds).done)


def _initialise(messages: Connection) -> None:
    global _messages
    _messages = messages
    _begin_to_serve(messages)
    from outrider.workers.models.hide_torch import go_without_torch

    go_without_torch()


def _begin_to_serve(*pipes: Connection) -> None:
    # SIGPROF ends a call that takes too much CPU time; the parent may have had it ignored.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    Thread(target=end_with_the_driver, args=pipes, daemon=True).start()


def end_with_the_driver(*pipes: Connection) -> None:
    """End this process when the driver dies (a pool's worker would wait for ever) or closes its end of one of the pipes."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    wait_for([driver.sentinel, *pipes])
    os._exit(1)


def _tell_of_reading(size: int) -> None:
    from outrider.workers.models.digests import remembers

    once = "this is done once" if remembers() else "this is done each time, since the cache cannot be written"
    _messages.send(f"reading {size / 1e9:.1f} GB of weights to know them again; {once}")


# The functions below run in the tokenizer process. What they import loads transformers, so they import it when called.
def _prepare_pair(
    target: str, draft: str, native: bool, by_headers: bool = False
) -> tuple[ModelInfo, ModelInfo | None, str, list[str]]:
    from outrider.workers.models.preparation import prepare_pair

    return prepare_pair(target, draft, _tell_of_reading, lambda path: _messages.send(Path(path)), by_headers, native)


def _prepare_scoring(model: str, against: str | None) -> tuple[ModelInfo, ModelInfo | None]:
    from outrider.workers.models.preparation import prepare_scoring

    return prepare_scoring(model, against, _tell_of_reading, lambda path: _messages.send(Path(path)))


def _encode(path: str, prompts: list[Any], continued: bool, context: int | None) -> list[tuple[int, ...] | str]:
    from outrider.workers.models.preparation import encode

    return encode(path, prompts, continued, context)


def _compile(path: str, vocabulary: int, end: int, constraints: list[dict[str, Any]]) -> list[tuple[str, str]]:
    from outrider.workers.models.preparation import compile_constraints

    return compile_constraints(path, vocabulary, end, constraints)


def _decode(path: str, answer: tuple[int, ...], shown: tuple[int, ...], prompt: tuple[int, ...], unfinished: bool) -> str:
    from outrider.workers.models.preparation import decode

    return decode(path, answer, shown, prompt, unfinished)


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
    from outrider.workers.models.batching_cache import is_known

    return is_known(model_info, fast_attention)


def _try_on_hf(model_info: ModelInfo, fast_attention: bool) -> None:
    from outrider.workers.models.batching_cache import try_within_limits

    try_within_limits(model_info, fast_attention)


def _check_unchanged(path: str, digest: str) -> None:
    from outrider.workers.models.model_info import check_unchanged

    check_unchanged(path, digest)
