"""A model's process: keeps one model and its draft loaded, and does the rows of all batches that the server sends, in turn.

It ends with the server. The journals have the tokens of rows in progress, from which the next process continues.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from outrider.runner import streams
from outrider.runner.hosts.this_machine import local_host
from outrider.runner.job.damage import without_advice
from outrider.runner.job.directory import JOURNAL
from outrider.runner.job.identity import identity
from outrider.runner.job.journal import StoredRow
from outrider.runner.job.row_check import admit_one
from outrider.runner.job.tokenizer_process import TokenizerProcess, TokenizerProcessDied
from outrider.runner.model_choice import placement_request_of
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import build_options
from outrider.runner.prepare_job import drops_first_space, prepare_models
from outrider.runner.printable import printable
from outrider.runner.process_exit import end
from outrider.runner.serve.link import Link, Message, server_link
from outrider.runner.serve.long_texts import LongTexts, is_long
from outrider.runner.serve.names import shown_to_clients
from outrider.runner.serve.running import FREED_SECONDS, Failure, Progress, StopAtOnceError
from outrider.runner.serve.single_rows import SingleRow, SingleRows, StreamedText, failure_of
from outrider.workers.errors import (
    JobChangedError,
    JobDamagedError,
    JobHeldError,
    NoSpaceError,
    OldAnswersError,
    OutriderError,
    UsageError,
)
from outrider.workers.models.text_after import ANCHOR

if TYPE_CHECKING:
    from outrider.runner.serve.shared_jobs import Job

TELL_SECONDS = 0.5
# Batches in progress at once, since each keeps files open; further ones wait in order of arrival.
MOST_JOBS = 64
# How long, and how often, the lock of a batch is tried for that a process of a killed server may still hold.
HELD_SECONDS = 60.0
AGAIN_SECONDS = 0.5
# When the server has died, the driver has this long to save the rows in progress.
PATIENCE_SECONDS = 20.0


def main(descriptor: int) -> None:
    streams.prepare()
    line = server_link(descriptor)
    asked = line.receive()
    assert asked is not None
    host = _Host(asked, line)
    code = 0
    try:
        host.run()
    except StopAtOnceError:
        pass
    except OutriderError as error:
        line.send({"error": printable(error), "hopeless": isinstance(error, UsageError)})
        code = error.exit_code
    host.done()
    end(code)


@dataclass(slots=True)
class _QueuedBatch:
    """A batch that waits to be opened."""

    batch: str
    directory: Path
    since: float
    again: float = 0.0


class _Host:
    def __init__(self, asked: Mapping[str, Any], line: Link) -> None:
        self._spec = build_options(JobSpec, asked["options"])
        self._name: str = asked["name"]
        self._line = line
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wanted: list[_QueuedBatch] = []
        self._told: dict[str, tuple[float, Progress]] = {}
        self._notes = 0
        self._up = 0
        self._working = threading.Event()
        # The one thread that calls the tokenizer process (``LongTexts`` has one more of each).
        self._texts = ThreadPoolExecutor(1, "texts")
        self._streams: dict[tuple[str, int], StreamedText] = {}
        self._numbers = itertools.count()
        threading.Thread(target=self._listen, name="server", daemon=True).start()

    def run(self) -> None:
        spec, say = self._spec, self._say
        with TokenizerProcess() as tokenizer_process, TokenizerProcess() as second:
            self._tokenizer_process = tokenizer_process
            models = prepare_models(spec, tokenizer_process, say)
            # Messages to clients name the model as it is served.
            self._models = models = replace(models, target=replace(models.target, name=self._name))
            self._long_texts = LongTexts(second, models.target)
            template = models.replica_template(spec, 0)
            asking = partial(placement_request_of, spec, template.movable)
            options = (spec.wait_for_cores, say, spec.metrics_port, spec.start_deadline)
            with local_host(template, models.memory.sizes(spec.batch), asking, *options) as (hosts, plans):
                # Ray reads its settings when it is first imported, so nothing that imports it may come before it starts.
                from outrider.runner.serve.shared_driver import SharedDriver
                from outrider.runner.serve.shared_jobs import SharedJobs

                single = SingleRows(self._name, self._tell_tokens, self._tell_record)
                jobs = SharedJobs(self._name, len(plans), hosts.host, single, self._found_broken)
                self._jobs = jobs
                self._driver = SharedDriver(
                    jobs, plans, spec.start_deadline, hosts, spec.wait_for_cores, self._inbox, self._after_tick
                )
                self._working.set()
                try:
                    self._driver.run()
                finally:
                    self._working.clear()
                    self._texts.shutdown(wait=True, cancel_futures=True)
                    self._long_texts.close()

    def done(self) -> None:
        self._texts.shutdown(wait=False, cancel_futures=True)
        self._line.send({"closed": True})

    # Messages of the server, read in a thread of their own

    def _listen(self) -> None:
        while (message := self._line.receive()) is not None:
            self._handle(message)
        self._stop_at_once()

    def _handle(self, message: Message) -> None:
        match message:
            case {"run": batch, "directory": directory}:
                wanted = _QueuedBatch(batch, Path(directory), time.monotonic())
                self._inbox.put(lambda: self._wanted.append(wanted))
            case {"stop": batch}:
                self._inbox.put(lambda: self._stop(batch))
            case {"ask": request, "entry": entry, "streamed": streamed}:
                # Through the inbox, so that it waits until the model is loaded, and keeps its place.
                long = is_long(entry)
                self._inbox.put(lambda: self._ask(request, entry, streamed, long))
            case {"take_back": request}:
                self._inbox.put(lambda: self._take_back(request))
            case {"close": "drain"} if self._working.is_set():
                self._inbox.put(lambda: self._driver.drain())
            case {"close": _}:
                self._stop_at_once()

    def _stop_at_once(self) -> None:
        if not self._working.is_set():
            os._exit(0)
        self._inbox.put(_raise_stop)
        time.sleep(PATIENCE_SECONDS)
        os._exit(1)

    # Done between two turns of the driver's loop

    def _after_tick(self) -> None:
        now = time.monotonic()
        if self._driver.counters.replicas_up != self._up:
            self._up = self._driver.counters.replicas_up
            self._line.send({"up": self._up})
        for note in self._jobs.counters.notes[self._notes :]:
            self._say(f"note: {note}")
        self._notes = len(self._jobs.counters.notes)
        if self._jobs.path is not None:
            for wanted in [each for each in self._wanted if now >= each.again]:
                if len(self._jobs.jobs) < MOST_JOBS:
                    self._take_up(wanted, now)
        for job in list(self._jobs.jobs.values()):
            self._tell_progress(job, now)
            if job.whole and not job.broken:
                self._leave(job, whole=True)

    def _take_up(self, wanted: _QueuedBatch, now: float) -> None:
        models, spec = self._models, self._spec
        chosen = models.target_model
        asked = partial(identity, spec, models.target, engine=chosen.engine, precision=chosen.precision)
        try:
            job = self._jobs.open(wanted.batch, wanted.directory, asked, self._drops_first_space)
        except JobHeldError as error:
            wanted.again = now + AGAIN_SECONDS
            if now - wanted.since < HELD_SECONDS:
                return
            self._give_up(wanted.batch, wanted.directory, error)
        except OldAnswersError as error:
            # Restarting this version would not help, so the batch fails.
            self._line.send({"broken": wanted.batch, "sentence": printable(error)})
        except OutriderError as error:
            self._give_up(wanted.batch, wanted.directory, error)
        else:
            self._tell_progress(job, now)
            self._driver.offer()
        self._wanted.remove(wanted)

    def _drops_first_space(self) -> bool:
        path = self._models.target.path
        return self._texts.submit(drops_first_space, self._tokenizer_process, path).result()

    def _tell_progress(self, job: Job, now: float) -> None:
        counters = job.record.counters
        figures = (counters.done, counters.failed, counters.tokens, counters.proposed, counters.accepted)
        progress = Progress(job.batch, *figures, round(counters.seconds, 3))
        told, last = self._told.get(job.batch, (0.0, None))
        ended = job.whole and (last is None or last.done + last.failed < progress.done + progress.failed)
        if last is None or ended or (now - told >= TELL_SECONDS and progress != last):
            self._told[job.batch] = now, progress
            self._line.send({"progress": job.batch, "figures": [*figures, progress.seconds]})

    def _leave(self, job: Job, whole: bool) -> None:
        self._told.pop(job.batch, None)
        try:
            self._jobs.leave(job)
        except OutriderError as error:
            if whole:
                self._give_up(job.batch, job.directory, error)
            else:
                told = shown_to_clients(error, job.directory, job.directory.name)
                self._line.send({"broken": job.batch, "sentence": told})
        else:
            self._line.send({"left": job.batch, "whole": whole})

    def _stop(self, batch: str) -> None:
        if any(each.batch == batch for each in self._wanted):
            self._wanted = [each for each in self._wanted if each.batch != batch]
            self._line.send({"left": batch, "whole": False})
        for job in [job for job in self._jobs.jobs.values() if job.batch == batch]:
            self._driver.withdraw(job)
            self._leave(job, whole=False)

    def _found_broken(self, job: Job, error: OutriderError) -> None:
        """Called in the middle of another operation, so the job is closed later, by the inbox."""
        self._inbox.put(lambda: self._break(job, error))

    def _break(self, job: Job, error: OutriderError) -> None:
        if job.number not in self._jobs.jobs:
            return  # stopped in the meantime
        self._driver.withdraw(job)
        with suppress(OutriderError):  # the same journal fails again; the first error is reported
            self._jobs.leave(job)
        self._told.pop(job.batch, None)
        self._give_up(job.batch, job.directory, error)

    def _give_up(self, batch: str, directory: Path, error: OutriderError) -> None:
        """Put the batch aside: try again later if the disk is full, else wait until the server is restarted."""
        if isinstance(error, NoSpaceError):
            now = time.monotonic()
            self._wanted.append(_QueuedBatch(batch, directory, now, now + FREED_SECONDS))
            self._say(f"{batch}: {error}; this is tried again")
        else:
            self._line.send({"waits": batch, "sentence": printable(_what_it_waits_for(batch, error))})

    def _say(self, text: str) -> None:
        self._line.send({"note": printable(text)})

    # Single requests; the tokenizer process is called in the thread of ``_texts``, the second one in ``_long_texts``

    def _ask(self, request: str, entry: dict[str, Any], streamed: bool, long: bool) -> None:
        def admit(tokenizer_process: Callable[[], TokenizerProcess]) -> None:
            self._or_refuse(request, lambda: self._admit(request, entry, streamed, tokenizer_process()))

        if long:
            self._long_texts.submit(request, admit)
        else:
            self._texts.submit(admit, lambda: self._tokenizer_process)

    def _take_back(self, request: str) -> None:
        def withdraw() -> None:
            self._inbox.put(lambda: self._withdraw(request))

        # Through the same thread, so that it comes after the request's admission.
        if not self._long_texts.take_back(request, withdraw):
            self._texts.submit(withdraw)

    def _withdraw(self, request: str) -> None:
        self._driver.withdraw_single(request)
        # Behind the last tokens of the row that were told.
        self._texts.submit(self._forget_streams, request)

    def _forget_streams(self, request: str) -> None:
        for key in [key for key in self._streams if key[0] == request]:
            del self._streams[key]

    def _admit(self, request: str, entry: dict[str, Any], streamed: bool, tokenizer_process: TokenizerProcess) -> None:
        row = admit_one(entry, next(self._numbers), self._spec, self._models.target, tokenizer_process)
        if not isinstance(row, StoredRow):
            self._line.send({"answer": request, "error": failure_of(row.code, row.message)})
            return
        single = SingleRow(request, row, streamed)

        def add() -> None:
            self._jobs.single.add(single)
            self._driver.offer()

        self._inbox.put(add)

    def _tell_tokens(self, row: SingleRow, sample: int, tokens: tuple[int, ...]) -> None:
        self._texts.submit(self._or_refuse, row.request, lambda: self._tell_text(row, sample, tokens))

    def _tell_text(self, row: SingleRow, sample: int, tokens: tuple[int, ...]) -> None:
        stream = self._streams.setdefault((row.request, sample), StreamedText(row.stored))
        try:
            # Of a row that ignores them, too, the model's end tokens are never shown.
            target = self._models.target
            answer = tuple(token for token in stream.shown_tokens(tokens) if token not in target.end_tokens)
            prompt = row.stored.prompt[-ANCHOR:]
            text = self._tokenizer_process.decode(target.path, answer, stream.shown, prompt, unfinished=True)
        except TokenizerProcessDied:
            return  # the text comes with a later piece, or at the end
        grown = stream.grown(text)
        if grown.reasoning or grown.content:
            piece = {"index": sample, "text": grown.content, "reasoning": grown.reasoning}
            self._line.send({"answer": row.request, "pieces": [piece]})

    def _tell_record(self, row: SingleRow, record: dict[str, Any]) -> None:
        self._texts.submit(self._or_refuse, row.request, lambda: self._tell_end(row, record))

    def _tell_end(self, row: SingleRow, record: dict[str, Any]) -> None:
        if record["error"] is not None:
            self._forget_streams(row.request)
            failure = failure_of(record["error"]["code"], record["error"]["message"])
            self._line.send({"answer": row.request, "error": failure})
            return
        body = record["response"]["body"]
        pieces = []
        for choice in body["choices"] if row.streamed else ():
            stream = self._streams.pop((row.request, choice["index"]), None) or StreamedText(row.stored)
            message = choice.get("message", {})
            rest = stream.rest(message.get("reasoning_content"), message.get("content", choice.get("text")) or "")
            if rest is None:
                self._forget_streams(row.request)
                said = "the text that was streamed is not the text of the answer; ask again without stream"
                self._line.send({"answer": row.request, "error": Failure(500, said)})
                return
            pieces.append({"index": choice["index"], "text": rest.content, "reasoning": rest.reasoning})
            pieces[-1]["finish_reason"] = choice["finish_reason"]
            if "tool_calls" in message:
                pieces[-1]["tool_calls"] = message["tool_calls"]
        self._line.send({"answer": row.request, "pieces": pieces, "record": body})

    def _or_refuse(self, request: str, act: Callable[[], None]) -> None:
        """Run ``act``; if it raises, answer the request with that error, so that its client does not wait for ever."""
        try:
            act()
        except Exception as error:
            said = str(error) if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"
            told = shown_to_clients(said, self._models.target.path, self._name)
            self._line.send({"answer": request, "error": Failure(500, told)})


def _what_it_waits_for(batch: str, error: OutriderError) -> str:
    """What a batch waits for. It is not failed: its journal may be restored, and may hold finished rows."""
    if isinstance(error, JobChangedError):
        return str(error)
    then = f"put back a copy of {JOURNAL}" if isinstance(error, JobDamagedError) else "see to that"
    return f"{batch} waits: {without_advice(error)}; {then} and start outrider serve again, or cancel the batch"


def _raise_stop() -> None:
    raise StopAtOnceError
