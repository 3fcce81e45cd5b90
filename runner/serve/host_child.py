"""A process that keeps one model and its draft loaded, and does the rows of all batches that it is given, in turn.

It hears of batches and single requests from the server, and ends with it: what is written of rows under way stands in their
journals, and whoever takes the batches up next goes on there.
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
from outrider.runner.job.admission import admit_one
from outrider.runner.job.damage import without_advice
from outrider.runner.job.directory import JOURNAL
from outrider.runner.job.identity import identity
from outrider.runner.job.journal import StoredRow
from outrider.runner.job.tokenizer_process import TokenizerProcess, TokenizerProcessDied
from outrider.runner.model_choice import placement_request_of
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import build_options
from outrider.runner.prepare_job import drops_first_space, prepare_models
from outrider.runner.printable import printable
from outrider.runner.process_exit import end
from outrider.runner.serve.link import Line, Message, server_line
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
# Batches at once, each of which keeps files open; the others wait in the order in which they came.
MOST_JOBS = 64
# The process of a server that was killed may still be letting go of a job.
HELD_SECONDS = 60.0
AGAIN_SECONDS = 0.5
# What is under way when the server has died may take so long to be put away.
PATIENCE_SECONDS = 20.0


def main(descriptor: int) -> None:
    streams.prepare()
    line = server_line(descriptor)
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
class _Wanted:
    """A batch that is to be taken up."""

    batch: str
    directory: Path
    since: float
    again: float = 0.0


class _Host:
    def __init__(self, asked: Mapping[str, Any], line: Line) -> None:
        self._spec = build_options(JobSpec, asked["options"])
        self._name: str = asked["name"]
        self._line = line
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wanted: list[_Wanted] = []
        self._told: dict[str, tuple[float, Progress]] = {}
        self._notes = 0
        self._up = 0
        self._working = threading.Event()
        # What knows the tokenizer, asked by one thread alone.
        self._texts = ThreadPoolExecutor(1, "texts")
        self._streams: dict[tuple[str, int], StreamedText] = {}
        self._numbers = itertools.count()
        threading.Thread(target=self._listen, name="server", daemon=True).start()

    def run(self) -> None:
        spec, say = self._spec, self._say
        with TokenizerProcess() as tokenizer_process:
            self._tokenizer_process = tokenizer_process
            models = prepare_models(spec, tokenizer_process, say)
            # Clients know it by the name that it is served by.
            self._models = models = replace(models, target=replace(models.target, name=self._name))
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

    def done(self) -> None:
        self._texts.shutdown(wait=False, cancel_futures=True)
        self._line.send({"closed": True})

    # What the server says, heard in a thread of its own

    def _listen(self) -> None:
        while (message := self._line.receive()) is not None:
            self._hear(message)
        self._stop_at_once()

    def _hear(self, message: Message) -> None:
        match message:
            case {"run": batch, "directory": directory}:
                wanted = _Wanted(batch, Path(directory), time.monotonic())
                self._inbox.put(lambda: self._wanted.append(wanted))
            case {"stop": batch}:
                self._inbox.put(lambda: self._stop(batch))
            case {"ask": request, "entry": entry, "streamed": streamed}:
                # It waits for the model to be there, and for what was asked before.
                self._inbox.put(lambda: self._ask(request, entry, streamed))
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

    # What is done between two ticks of the driver

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

    def _take_up(self, wanted: _Wanted, now: float) -> None:
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
            # No other start of this version could go on with it.
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
        """Told amid something else, so that what follows from it comes later."""
        self._inbox.put(lambda: self._break(job, error))

    def _break(self, job: Job, error: OutriderError) -> None:
        if job.number not in self._jobs.jobs:
            return  # it was stopped meanwhile
        self._driver.withdraw(job)
        with suppress(OutriderError):  # of the same journal; the first is told
            self._jobs.leave(job)
        self._told.pop(job.batch, None)
        self._give_up(job.batch, job.directory, error)

    def _give_up(self, batch: str, directory: Path, error: OutriderError) -> None:
        """For now, where it may yet go on: here in a while, or with another start of the server."""
        if isinstance(error, NoSpaceError):
            now = time.monotonic()
            self._wanted.append(_Wanted(batch, directory, now, now + FREED_SECONDS))
            self._say(f"{batch}: {error}; this is tried again")
        else:
            self._line.send({"waits": batch, "sentence": printable(_what_it_waits_for(batch, error))})

    def _say(self, text: str) -> None:
        self._line.send({"note": printable(text)})

    # Single requests; what needs the tokenizer runs in the thread of texts

    def _ask(self, request: str, entry: dict[str, Any], streamed: bool) -> None:
        self._texts.submit(self._or_refuse, request, lambda: self._admit(request, entry, streamed))

    def _take_back(self, request: str) -> None:
        # Behind its admission, where that is still to come.
        self._texts.submit(lambda: self._inbox.put(lambda: self._driver.withdraw_single(request)))

    def _admit(self, request: str, entry: dict[str, Any], streamed: bool) -> None:
        row = admit_one(entry, next(self._numbers), self._spec, self._models.target, self._tokenizer_process)
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
            answer, prompt = stream.shown_tokens(tokens), row.stored.prompt[-ANCHOR:]
            text = self._tokenizer_process.decode(self._models.target.path, answer, stream.shown, prompt)
        except TokenizerProcessDied:
            return  # what it would have told comes with the end
        grown = stream.grown(text)
        if grown.reasoning or grown.content:
            piece = {"index": sample, "text": grown.content, "reasoning": grown.reasoning}
            self._line.send({"answer": row.request, "pieces": [piece]})

    def _tell_record(self, row: SingleRow, record: dict[str, Any]) -> None:
        self._texts.submit(self._or_refuse, row.request, lambda: self._tell_end(row, record))

    def _tell_end(self, row: SingleRow, record: dict[str, Any]) -> None:
        if record["error"] is not None:
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
                said = "the text that was streamed is not the text of the answer; ask again without stream"
                self._line.send({"answer": row.request, "error": Failure(500, said)})
                return
            pieces.append({"index": choice["index"], "text": rest.content, "reasoning": rest.reasoning})
            pieces[-1]["finish_reason"] = choice["finish_reason"]
            if "tool_calls" in message:
                pieces[-1]["tool_calls"] = message["tool_calls"]
        self._line.send({"answer": row.request, "pieces": pieces, "record": body})

    def _or_refuse(self, request: str, act: Callable[[], None]) -> None:
        """Whoever waits for an answer gets one."""
        try:
            act()
        except Exception as error:
            said = str(error) if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"
            told = shown_to_clients(said, self._models.target.path, self._name)
            self._line.send({"answer": request, "error": Failure(500, told)})


def _what_it_waits_for(batch: str, error: OutriderError) -> str:
    """Its journal may be mended, and hold rows that are done: to fail it is for nobody but its client."""
    if isinstance(error, JobChangedError):
        return str(error)
    then = f"put back a copy of {JOURNAL}" if isinstance(error, JobDamagedError) else "see to that"
    return f"{batch} waits: {without_advice(error)}; {then} and start outrider serve again, or cancel the batch"


def _raise_stop() -> None:
    raise StopAtOnceError
