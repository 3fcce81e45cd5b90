"""The batch server with a fake runner without models: rows are admitted as usual, and answered at once or on demand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from outrider.runner.job.directory import JOURNAL, job_lock
from outrider.runner.job.journal import FailedRow, Journal, StoredRow
from outrider.runner.job.prompts import BadRow, read_rows
from outrider.runner.job.results import error_record, result_record
from outrider.runner.job.source import Source
from outrider.runner.serve.admission_child import foreign_rows
from outrider.runner.serve.app import application
from outrider.runner.serve.model_hosts import CLOSING
from outrider.runner.serve.names import INPUT, Folders
from outrider.runner.serve.running import Admitted, Answer, BatchJob, Broken, Failure, Left, OnEvent, Progress, Refused
from outrider.runner.serve.service import Service
from outrider.runner.serve.single_rows import StreamedText, failure_of
from outrider.runner.serve.store import Store
from outrider.runner.serve.uploads import sweep
from outrider.workers.messages import RowResult

if TYPE_CHECKING:
    import openai

KEY = "sk-test"
MODELS = ("small", "large")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


class FakeRunner:
    """Answers rows without a model: at once, or (``at_once`` False) as ``do`` is called. Rows with "fail" in their id
    fail."""

    def __init__(self, on_event: OnEvent, at_once: bool = True) -> None:
        self.on_event = on_event
        self.at_once = at_once
        self.jobs: dict[str, BatchJob] = {}
        self.closed = False
        self.asked: list[Mapping[str, Any]] = []
        self.open: list[Callable[[Answer], None]] = []
        self.taken_back = 0

    def admit(self, job: BatchJob) -> None:
        if errors := list(foreign_rows(job.directory / INPUT, job.endpoint, job.model)):
            self.on_event(Refused(job.batch, errors))
            return
        rows: list[StoredRow | FailedRow] = []
        for number, row in enumerate(read_rows(Source(job.directory / INPUT))):
            stored = StoredRow(number, row.custom_id, row.line, "completion", {"n": 1}, (1, 2))
            failed = error_record(stored, row.code, row.message) if isinstance(row, BadRow) else None
            rows.append(stored if failed is None else FailedRow(stored, failed))
        with closing(Journal(job.directory / JOURNAL)) as journal:
            if not journal.filled:
                journal.fill(rows, (), {"identity": {}})
        self.on_event(Admitted(job.batch, len(rows)))

    def run(self, job: BatchJob) -> None:
        self.jobs[job.batch] = job
        if self.at_once:
            self.do(job.batch, 1 << 30)

    def do(self, batch: str, most: int) -> None:
        """Answers up to ``most`` further rows of the batch."""
        job = self.jobs[batch]
        with job_lock(job.directory), closing(Journal(job.directory / JOURNAL)) as journal:
            found = journal.pending(-1, most)
            rows = journal.load([row for row, _ in found]) if len(found) < 500 else self._all(journal)
            fails = [row for row in rows if "fail" in row.custom_id]
            done = [(row.row, result_record(row, [_result(row)], job.model)) for row in rows if row not in fails]
            journal.record(done, [(row.row, error_record(row, "invalid_request", "it fails")) for row in fails])
            counts = journal.counts()
        self.on_event(Progress(batch, counts.done, counts.failed, 3 * counts.done, 2 * counts.done, counts.done, 1.0))
        if not counts.pending:
            del self.jobs[batch]
            self.on_event(Left(batch, whole=True))

    @staticmethod
    def _all(journal: Journal) -> list[StoredRow]:
        rows: list[StoredRow] = []
        while some := journal.pending(rows[-1].row if rows else -1, 500):
            rows += journal.load([row for row, _ in some])
        return rows

    def break_down(self, batch: str) -> None:
        del self.jobs[batch]
        self.on_event(Broken(batch, "the model is gone"))

    def stop(self, batch: str) -> None:
        if self.jobs.pop(batch, None) is not None:
            self.on_event(Left(batch, whole=False))

    def ask(
        self, model: str, entry: Mapping[str, Any], streamed: bool, on_answer: Callable[[Answer], None]
    ) -> Callable[[], None]:
        self.asked.append(entry)
        chat = entry["url"].endswith("chat/completions")
        body = entry["body"]
        if body.get("prompt") == "refuse":
            on_answer(Answer(error=Failure(400, '"prompt" is not liked')))
        elif body.get("prompt") == "too long":
            on_answer(Answer(error=failure_of("context_length_exceeded", "shorten it")))
        elif body.get("prompt") in ("never", "begun"):
            self.open.append(on_answer)
            if body["prompt"] == "begun":
                on_answer(Answer([{"index": 0, "text": "one ", "reasoning": None}]))
        else:
            if body.get("tools"):
                self._call(streamed, on_answer)
                return lambda: None
            if streamed:
                on_answer(Answer([{"index": 0, "text": "one ", "reasoning": None}]))
                on_answer(Answer([{"index": 0, "text": "two", "reasoning": None}]))
            last = [{"index": 0, "text": "", "reasoning": None, "finish_reason": "stop"}] if streamed else []
            on_answer(Answer(last, record=_body(chat)))

        def take_back() -> None:
            self.taken_back += 1

        return take_back

    @staticmethod
    def _call(streamed: bool, on_answer: Callable[[Answer], None]) -> None:
        """Answers with tool calls, streamed like a model's process does: pieces of text, and the rest in the last."""
        text = f"Let me see.\n{CALL}\n{CALL}"
        row = StoredRow(0, "single", 0, "chat", {"stop": [], "tools": ["hermes", ["f"], "auto"]}, (1, 2))
        body = json.loads(result_record(row, [replace(_result(row), text=text)], "small"))["response"]["body"]
        pieces = []
        if streamed:
            stream, message = StreamedText(row), body["choices"][0]["message"]
            for length in range(4, len(text), 4):
                grown = stream.grown(text[:length])
                if grown.content:
                    on_answer(Answer([{"index": 0, "text": grown.content, "reasoning": None}]))
            rest = stream.rest(None, message["content"])
            assert rest is not None
            pieces = [{"index": 0, "text": rest.content, "reasoning": None, "tool_calls": message["tool_calls"]}]
            pieces[0]["finish_reason"] = body["choices"][0]["finish_reason"]
        on_answer(Answer(pieces, record=body))

    def refuse_requests(self) -> None:
        for on_answer in self.open:
            on_answer(Answer(error=CLOSING))

    def state(self) -> Mapping[str, str]:
        return dict.fromkeys(MODELS, "loaded")

    def close(self, at_once: bool) -> None:
        self.closed = True


def _result(row: StoredRow) -> RowResult:
    return RowResult(row.row * 128, (1, 2, 3), f"answer {row.custom_id}", "stop", 3, 2, 1, 0.1)


def _body(chat: bool) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": "one two"}} if chat else {"text": "one two"}
    return {
        "id": "cmpl-1",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": "small",
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    }


class QuickServer(uvicorn.Server):
    """Checks ``should_exit`` a hundred times a second instead of ten times."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.01)


class FakeServer:
    """A server on a data folder. Several in sequence on one folder are a server that was killed and started again."""

    def __init__(
        self, data: Path, at_once: bool = True, most_upload: int = 1 << 30, models: tuple[str, ...] = MODELS
    ) -> None:
        data.mkdir(mode=0o700, exist_ok=True)
        self.folders = Folders(data)
        self.folders.make()
        self.store = Store(data)
        sweep(self.store, self.folders)
        self.time = self.boot_seconds = time.time()
        self.runners: list[FakeRunner] = []

        def runner(on_event: OnEvent) -> FakeRunner:
            self.runners.append(FakeRunner(on_event, at_once))
            return self.runners[0]

        self.service = Service(self.store, self.folders, models, runner, lambda: self.time, lambda: self.boot_seconds)
        self.app = application(self.service, self.store, self.folders, [KEY, "sk-other"], ["batch.example"], most_upload)

    def pass_by(self, seconds: float) -> None:
        self.time += seconds
        self.boot_seconds += seconds

    @property
    def runner(self) -> FakeRunner:
        return self.runners[0]

    @contextmanager
    def served(self) -> Iterator[str]:
        """Serves on a port of this machine; ends like a killed server, which keeps only what was durable."""
        self.service.start()
        config = uvicorn.Config(self.app, port=0, log_level="error", access_log=False, timeout_graceful_shutdown=1)
        server = QuickServer(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join()
            self.service.close(at_once=True)

    @contextmanager
    def client(self, key: str = KEY) -> Iterator[openai.OpenAI]:
        import openai  # takes most of a second, and most files of tests ask without it

        # Without TLS the client does not read the list of certificates, which takes 20 ms.
        plain = openai.DefaultHttpxClient(verify=False)
        with (
            self.served() as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=plain) as client,
        ):
            yield client


def line(custom_id: str, **body: Any) -> str:
    row = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
    return json.dumps({**row, "body": {"model": "small", "prompt": "Row", **body}}) + "\n"


def until(come: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := come()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.01)
    return found
