"""Files and batches through OpenAI's own client, over a runner without models; and restarts of a killed server."""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import openai
import pytest
from fake_server import FakeRunner, FakeServer, line, until

from outrider.runner.job import results
from outrider.runner.job.directory import JOURNAL
from outrider.runner.job.journal import Journal
from outrider.runner.serve import batch_files, finalizing, reserve, service, unwritten_files
from outrider.runner.serve.names import INPUT, new_file_id
from outrider.runner.serve.reserve import Reserve
from outrider.runner.serve.running import Broken
from outrider.runner.serve.store import File, Store
from outrider.workers.errors import JobError, NoSpaceError

ENDED = ("completed", "failed", "expired", "cancelled")


def upload(client: openai.OpenAI, content: str, name: str = "rows.jsonl") -> str:
    return client.files.create(file=(name, content.encode()), purpose="batch").id


def create(client: openai.OpenAI, content: str, **more: Any) -> openai.types.Batch:
    file = upload(client, content)
    asked: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h", **more}
    return client.batches.create(input_file_id=file, **asked)


def ended(client: openai.OpenAI, batch: str) -> openai.types.Batch:
    def look() -> openai.types.Batch | None:
        found = client.batches.retrieve(batch)
        return found if found.status in ENDED else None

    found: openai.types.Batch = until(look, "end of the batch")
    return found


def rows_of(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(each) for each in client.files.content(file).text.splitlines()]


def test_a_batch_is_uploaded_run_and_fetched(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "data").client() as client:
        batch = create(client, line("a") + line("fail b") + line("c"), metadata={"who": "me"})
        assert batch.status == "validating"
        assert (batch.object, batch.endpoint, batch.metadata) == ("batch", "/v1/completions", {"who": "me"})
        done = ended(client, batch.id)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
        assert batch.usage is None
        rows = rows_of(client, done.output_file_id)
        each = [row["response"]["body"]["usage"] for row in rows]
        told = [sum(usage[f"{kind}_tokens"] for usage in each) for kind in ("prompt", "completion")]
        assert min(told) > 0
        assert done.usage is not None
        assert [done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens] == [*told, sum(told)]
        assert (done.usage.input_tokens_details.cached_tokens, done.usage.output_tokens_details.reasoning_tokens) == (
            None,
            None,
        )
        moments = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
        assert list(moments) == sorted(each or 0 for each in moments)
        assert done.expires_at == done.created_at + 24 * 3600
        assert [row["custom_id"] for row in rows_of(client, done.output_file_id)] == ["a", "c"]
        [failed] = rows_of(client, done.error_file_id)
        assert (failed["custom_id"], failed["error"]["code"]) == ("fail b", "invalid_request")
        assert done.output_file_id is not None
        file = client.files.retrieve(done.output_file_id)
        assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        assert file.bytes == len(client.files.content(file.id).content)


def test_without_failures_there_is_no_error_file(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "data").client() as client:
        assert ended(client, create(client, line("a")).id).error_file_id is None


def test_batches_and_files_are_listed_in_pages(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "data").client() as client:
        ids = [create(client, line("a")).id for _ in range(5)]
        first = client.batches.list(limit=2)
        assert [each.id for each in first.data] == ids[:-3:-1]
        assert first.has_more
        assert [each.id for each in client.batches.list(limit=2)] == ids[::-1], "the client turns the pages"
        for each in ids:
            ended(client, each)
        uploaded = [each.id for each in client.files.list(purpose="batch", order="asc", limit=3)]
        assert len(uploaded) == 5
        assert [each.id for each in client.files.list(purpose="batch", limit=2)] == uploaded[::-1]
        assert len(list(client.files.list(purpose="batch_output"))) == 5
        assert len(list(client.files.list())) == 10


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[openai.OpenAI, Path]]:
    """A server for what is refused, and its folder: to end one takes longer than to ask."""
    data = tmp_path_factory.mktemp("shared") / "data"
    with FakeServer(data).client() as client:
        yield client, data


BAD = [
    ("{not json\n", "invalid_json_line", 1),
    (line("a") + '{"custom_id": "b"}\n', "missing_required_parameter", 2),
    (line("a") + line("b").replace("completions", "embeddings"), "invalid_url", 2),
    (line("a") + line("b", model="large"), "mismatched_model", 2),
    (line("a", model="nobody"), "model_not_found", 1),
    ("\n" + line("a", model="nobody"), "model_not_found", 2),
    (line("a") + '{"custom_id": "b", "method": "GET", "url": "/v1/completions", "body": {}}\n', "invalid_request", 2),
    (line("a") + "\n" + line("b"), "invalid_request", 2),
    (line("a", model="\ud800"), "model_not_found", 1),
    ("[" * 100_000 + "\n", "invalid_json_line", 1),
]


@pytest.mark.parametrize(("content", "code", "number"), BAD, ids=[code for _, code, _ in BAD])
def test_bad_input_fails_the_batch_and_says_where(
    shared: tuple[openai.OpenAI, Path], content: str, code: str, number: int
) -> None:
    client, data = shared
    failed = ended(client, create(client, content).id)
    assert failed.status == "failed"
    assert failed.failed_at
    assert failed.errors is not None and failed.errors.data is not None
    assert (failed.errors.data[0].code, failed.errors.data[0].line) == (code, number)
    assert failed.output_file_id is None
    until(lambda: not any((data / "batches").iterdir()), "removal of what is left of it")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": "/v1/embeddings"}, "endpoint"),
    ({"completion_window": "soon"}, "completion_window"),
    ({"completion_window": "0h"}, "completion_window"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"metadata": {"key": "x" * 513}}, "metadata"),
    ({"extra_body": {"output_expires_after": {"anchor": "created_at", "seconds": 9}}}, "output_expires_after"),
]


@pytest.mark.parametrize(("asked", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_what_a_batch_cannot_be_is_refused_by_name(
    shared: tuple[openai.OpenAI, Path], asked: dict[str, Any], param: str
) -> None:
    client, _ = shared
    before = client.batches.list().data
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, line("a"), **asked)
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")
    assert client.batches.list().data == before


@pytest.mark.parametrize("name", ["file-1", "../../../etc/passwd", "..%2f..%2fserve.db", "file-" + "0" * 24, "api-key"])
def test_ids_that_are_none_of_ours_are_not_found(shared: tuple[openai.OpenAI, Path], name: str) -> None:
    client, _ = shared
    for ask in (client.files.retrieve, client.files.content, client.files.delete, client.batches.retrieve):
        with pytest.raises(openai.NotFoundError):
            ask(name)
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel(name)
    with pytest.raises(openai.BadRequestError):
        client.batches.create(input_file_id=name, endpoint="/v1/completions", completion_window="24h")


def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    fake = FakeServer(tmp_path / "data", at_once=False)
    with fake.client() as client:
        batch = create(client, "".join(line(str(number)) for number in range(6)))
        until(lambda: batch.id in fake.runner.jobs, "run of the batch")
        fake.runner.do(batch.id, 2)
        cancelling = client.batches.cancel(batch.id)
        assert cancelling.cancelling_at
        done = ended(client, batch.id)
        assert done.status == "cancelled"
        assert done.cancelled_at
        assert done.request_counts is not None
        assert (done.request_counts.total, done.request_counts.completed) == (6, 2)
        assert len(rows_of(client, done.output_file_id)) == 2
        errors = rows_of(client, done.error_file_id)
        assert [row["custom_id"] for row in errors] == list("2345")
        assert {row["error"]["code"] for row in errors} == {"batch_cancelled"}
        assert [row["response"] for row in errors] == [None] * 4
        assert done.request_counts.failed == 4
        assert done.usage is not None
        assert done.usage.input_tokens == 2 * 2, "of rows that are done alone"
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)


def test_a_batch_whose_first_row_takes_long_to_read_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of zeros, compressed, takes minutes."""
    reading, read, model_of = Event(), Event(), service.batch_requests.model_of

    def slowly(path: Path, models: Sequence[str]) -> Any:
        reading.set()
        assert read.wait(60)
        return model_of(path, models)

    fake = FakeServer(tmp_path / "data", at_once=False)
    with fake.client() as client:
        batch = create(client, line("a"))
        with monkeypatch.context() as patched, ThreadPoolExecutor(1) as other:
            patched.setattr(service.batch_requests, "model_of", slowly)
            slow = other.submit(create, client, line("b"))
            assert reading.wait(60)
            try:
                assert ended(client.with_options(timeout=20.0), client.batches.cancel(batch.id, timeout=20.0).id)
            finally:
                read.set()
            assert slow.result().status == "validating"


def test_a_batch_whose_window_is_over_expires_with_an_error_for_each_row(tmp_path: Path) -> None:
    fake = FakeServer(tmp_path / "data", at_once=False)
    with fake.client() as client:
        batch = create(client, "".join(line(str(number)) for number in range(5)), completion_window="1h")
        until(lambda: batch.id in fake.runner.jobs, "run of the batch")
        fake.runner.do(batch.id, 2)
        fake.pass_by(3601)
        done = ended(client, batch.id)
        assert done.status == "expired"
        assert len(rows_of(client, done.output_file_id)) == 2
        assert {row["error"]["code"] for row in rows_of(client, done.error_file_id)} == {"batch_expired"}
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 5, "completed": 2, "failed": 3}


@pytest.mark.parametrize("hours", [-48, 48])
def test_a_clock_that_is_set_makes_a_window_neither_shorter_nor_longer(tmp_path: Path, hours: int) -> None:
    fake = FakeServer(tmp_path / "data", at_once=False)
    name = created(fake)
    fake.service.handle_events()
    fake.service.tick()
    fake.time += hours * 3600
    fake.pass_by(3599)
    fake.service.tick()
    assert status_of(fake, name) == "in_progress" and fake.store.unended()[0].ending is None
    fake.pass_by(1)
    fake.service.tick()
    assert fake.store.unended()[0].ending == "expired"
    fake.service.close()


def test_a_batch_that_cannot_be_run_fails_with_what_it_has(tmp_path: Path) -> None:
    fake = FakeServer(tmp_path / "data", at_once=False)
    with fake.client() as client:
        batch = create(client, line("a") + line("b"))
        until(lambda: batch.id in fake.runner.jobs, "run of the batch")
        fake.runner.do(batch.id, 1)
        fake.runner.break_down(batch.id)
        done = ended(client, batch.id)
        assert done.status == "failed"
        assert done.errors is not None and done.errors.data is not None
        assert done.errors.data[0].message == "the model is gone"
        assert len(rows_of(client, done.output_file_id)) == 1
        [lost] = rows_of(client, done.error_file_id)
        assert (lost["custom_id"], lost["error"]["code"]) == ("b", "batch_failed")
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 2, "completed": 1, "failed": 1}


def test_deleted_files_are_gone_and_the_batchs_journal_with_the_last(tmp_path: Path) -> None:
    fake = FakeServer(tmp_path / "data")
    with fake.client() as client:
        batch = create(client, line("a") + line("fail"))
        client.files.delete(batch.input_file_id)
        done = ended(client, batch.id)
        assert done.status == "completed", "the batch has its own"
        assert done.output_file_id is not None and done.error_file_id is not None
        directory = tmp_path / "data" / "batches" / batch.id
        assert client.files.delete(done.output_file_id).deleted
        assert not (directory / "results.jsonl").exists()
        with pytest.raises(openai.NotFoundError):
            client.files.content(done.output_file_id)
        assert directory.exists()
        client.files.delete(done.error_file_id)
        assert not directory.exists()
        assert client.batches.retrieve(batch.id).status == "completed"
        assert list((tmp_path / "data" / "files").iterdir()) == []


def test_files_are_deleted_as_they_are_listed(tmp_path: Path) -> None:
    with FakeServer(tmp_path / "data").client() as client:
        sent = {upload(client, line("a")) for _ in range(5)}
        deleted = []
        for file in client.files.list(limit=2):
            client.files.delete(file.id)
            deleted.append(file.id)
        assert len(deleted) == 5 and set(deleted) == sent


# What the runner tells, handled when the test says so


def created(fake: FakeServer, content: str = line("a")) -> str:
    """A batch that the runner has admitted, and of which nobody has heard yet."""
    file = File(new_file_id(), 0, len(content), "rows.jsonl", "batch")
    fake.folders.file(file.id).write_text(content)
    fake.store.add_file(file)
    asked = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "1h"}
    name: str = fake.service.create(asked)["id"]
    return name


def status_of(fake: FakeServer, name: str) -> str:
    batch = fake.store.batch(name)
    assert batch is not None
    return batch.status


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
def test_a_batch_that_is_ended_as_its_check_ends_is_ended(tmp_path: Path, ending: str) -> None:
    fake = FakeServer(tmp_path / "data")
    name = created(fake)
    if ending == "cancelled":
        assert fake.service.cancel(name)["status"] == "cancelling"
    else:
        fake.pass_by(3601)
        fake.service.tick()
    fake.service.handle_events()
    until(lambda: status_of(fake, name) == ending, ending)
    assert fake.runner.jobs == {}
    if ending == "expired":
        batch = fake.service.retrieve(name)
        assert batch["error_file_id"] is not None and batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    fake.service.close()


def test_a_check_that_was_ended_on_purpose_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeRunner, "admit", lambda self, job: None)
    fake = FakeServer(tmp_path / "data")
    stopped, broken = created(fake), created(fake)
    fake.service.cancel(stopped)
    for name in (stopped, broken):
        fake.runner.on_event(Broken(name, "its rows could not be checked: its process was killed by signal 9"))
    fake.service.handle_events()
    until(lambda: [status_of(fake, name) for name in (stopped, broken)] == ["cancelled", "failed"], "end of both")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [broken]
    fake.service.close()


class Short:
    """A disk that is full until it is freed: something that writes, or removes, fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        self.tries, self.freed = 0, False
        change, unlink = Store.change, Path.unlink

        def changed(store: Store, *given: Any) -> Any:
            self.try_it(JobError(f"{store.path} cannot be used: database or disk is full"))
            return change(store, *given)

        def unlinked(path: Path, **given: Any) -> None:
            if path.name == INPUT:
                self.try_it(OSError(errno.EROFS, "Read-only file system"))
            unlink(path, **given)

        monkeypatch.setattr(Store, "change", changed if what == "change" else change)
        monkeypatch.setattr(Path, "unlink", unlinked if what == "unlink" else unlink)

    def try_it(self, error: Exception) -> None:
        if not self.freed:
            self.tries += 1
            raise error


@pytest.mark.parametrize("what", ["change", "unlink"])
def test_what_cannot_be_written_now_is_written_later(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "TICK_SECONDS", 0.01)
    fake = FakeServer(tmp_path / "data")
    fake.service.start()
    short = Short(monkeypatch, what)
    name = created(fake)
    until(lambda: short.tries > 3, "tries")
    [said] = {record.getMessage() for record in caplog.records}
    assert said.startswith(f"{name}: ") and said.endswith("; this is tried again") and len(caplog.records) == 1
    short.freed = True
    until(lambda: status_of(fake, name) == "completed", "end of the batch")
    fake.service.close()


def test_one_batch_that_cannot_go_on_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, held = Path.unlink, list[Path]()

    def unlinked(path: Path, **given: Any) -> None:
        if path.name == INPUT:
            held.append(path)
            if path == held[0]:
                raise OSError(errno.EPERM, "Operation not permitted")
        unlink(path, **given)

    monkeypatch.setattr(service, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(Path, "unlink", unlinked)
    fake = FakeServer(tmp_path / "data")
    fake.service.start()
    first = created(fake)
    until(lambda: len(held) > 1, "another try")
    second = created(fake)
    until(lambda: status_of(fake, second) == "completed", "end of the second batch")
    assert status_of(fake, first) == "in_progress"
    fake.service.close()
    monkeypatch.undo()
    with FakeServer(tmp_path / "data").client() as client:
        assert ended(client, first).status == "completed", "the next start goes on"


# A server that ends at each of these moments, and one that comes after it


def test_what_was_admitted_goes_on(tmp_path: Path) -> None:
    fake = FakeServer(tmp_path / "data", at_once=False)
    with fake.client() as client:
        batch = create(client, "".join(line(str(number)) for number in range(6)))
        until(lambda: batch.id in fake.runner.jobs, "run of the batch")
        fake.runner.do(batch.id, 4)
    with FakeServer(tmp_path / "data").client() as client:
        done = ended(client, batch.id)
        assert done.status == "completed"
        assert [row["custom_id"] for row in rows_of(client, done.output_file_id)] == list("012345")


def test_what_was_to_be_checked_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr(FakeRunner, "admit", lambda self, job: None)
        with FakeServer(tmp_path / "data").client() as client:
            batch = create(client, line("a"))
    with FakeServer(tmp_path / "data").client() as client:
        assert ended(client, batch.id).status == "completed"


@pytest.mark.parametrize("ending", ["completed", pytest.param("cancelled", marks=pytest.mark.slow)])
def test_files_that_were_not_written_are_written(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr("outrider.runner.serve.finalizing.Finalizer._write_files", _killed)
        fake = FakeServer(tmp_path / "data", at_once=False)
        with fake.client() as client:
            batch = create(client, line("a") + line("b"))
            until(lambda: batch.id in fake.runner.jobs, "run of the batch")
            fake.runner.do(batch.id, 2 if ending == "completed" else 1)
            if ending == "cancelled":
                client.batches.cancel(batch.id)
            status = {"completed": "finalizing", "cancelled": "cancelling"}[ending]
            until(lambda: client.batches.retrieve(batch.id).status == status, status)
    with FakeServer(tmp_path / "data").client() as client:
        done = ended(client, batch.id)
        assert done.status == ending
        assert len(rows_of(client, done.output_file_id)) == (2 if ending == "completed" else 1)


def _killed(service: object, name: str) -> None:
    """As if the server had ended before."""


def test_what_a_killed_upload_or_deletion_has_left_is_ended(tmp_path: Path) -> None:
    fake = FakeServer(tmp_path / "data")
    files = tmp_path / "data" / "files"
    kept, deleted = new_file_id(), new_file_id()
    fake.store.add_file(File(kept, 0, 4, "rows.jsonl", "batch"))
    for name, content in ((kept, "told"), (deleted, "told of no more"), (new_file_id(), "half")):
        (files / f".upload-{name}").write_text(content)
    (tmp_path / "data" / "batches" / "batch_000000000000000000000000").mkdir()
    fake.service.close()
    with FakeServer(tmp_path / "data").client() as client:
        assert [path.name for path in files.iterdir()] == [kept]
        assert client.files.content(kept).text == "told"
        assert list((tmp_path / "data" / "batches").iterdir()) == []


def test_a_deletion_that_cannot_be_written_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(tmp_path / "data").client() as client:
        kept = upload(client, line("a"))
        with monkeypatch.context() as full:
            full.setattr(Store, "remove_file", mock.Mock(side_effect=JobError("database or disk is full")))
            with pytest.raises(openai.InternalServerError):
                client.files.delete(kept)
        assert client.files.content(kept).text == line("a")
        client.files.delete(kept)
        assert list((tmp_path / "data" / "files").iterdir()) == []


def test_on_a_full_disk_files_are_deleted_and_batches_cancelled_in_the_room_that_is_kept_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full where what is kept is there, and for uploads."""
    fake = FakeServer(tmp_path / "data", at_once=False)
    kept = tmp_path / "data" / "reserve"
    transaction = Store._transaction

    @contextmanager
    def full(self: Store) -> Iterator[sqlite3.Connection]:
        if kept.exists():
            raise NoSpaceError("database or disk is full")
        with transaction(self) as db:
            yield db

    with fake.client() as client:
        file, name = upload(client, line("a")), created(fake)
        until(lambda: name in fake.runner.jobs, "batch that runs")
        assert kept.stat().st_size == reserve.BYTES
        monkeypatch.setattr(Store, "_transaction", full)
        monkeypatch.setattr(fake.service, "tick", lambda: None)
        client.files.delete(file)
        assert kept.stat().st_size == reserve.BYTES, "for the next time"
        assert client.batches.cancel(name).status == "cancelling"
        monkeypatch.setattr(Store, "_transaction", transaction)
        until(lambda: status_of(fake, name) == "cancelled", "end of the batch")


def _full(*given: object, **more: object) -> None:
    raise NoSpaceError("job.db cannot be used: database or disk is full")


@pytest.mark.parametrize("done", [0, 2])
def test_a_batch_that_is_cancelled_on_a_full_disk_ends_and_keeps_what_it_has(
    tmp_path: Path, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for what the batch's journal would have to take in, and for files where the reserve is there."""
    monkeypatch.setattr(finalizing, "FREED_SECONDS", 0.01)
    monkeypatch.setattr(service, "TICK_SECONDS", 0.01)
    fake = FakeServer(tmp_path / "data", at_once=False)
    kept, write = tmp_path / "data" / "reserve", batch_files.write_results

    def written(*given: Any) -> Any:
        return _full() if kept.exists() else write(*given)

    with fake.client() as client:
        batch = create(client, "".join(line(str(number)) for number in range(6)))
        until(lambda: batch.id in fake.runner.jobs, "run of the batch")
        fake.runner.do(batch.id, done)
        monkeypatch.setattr(Journal, "record", _full)
        monkeypatch.setattr(batch_files, "write_results", written)
        client.batches.cancel(batch.id)
        found = ended(client, batch.id)
        assert found.status == "cancelled" and found.error_file_id is None
        assert found.errors is not None and found.errors.data is not None
        assert (found.errors.data[0].code, found.errors.data[0].message) == ("no_space", finalizing.WAS_FULL)
        assert found.request_counts is not None and found.request_counts.completed == done
        if done:
            assert [row["custom_id"] for row in rows_of(client, found.output_file_id)] == ["0", "1"]
            assert found.output_file_id is not None
            client.files.delete(found.output_file_id)
        until(lambda: not fake.folders.batch(batch.id).exists(), "space that is free again")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("fits", "journal_is_full"), [(0, True), (1, True), (1, False)])
def test_of_a_batch_that_is_cancelled_on_a_full_disk_what_finds_no_room_is_read_from_its_journal(
    tmp_path: Path, fits: int, journal_is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished rows are more than the reserve: the results, or the errors behind them, find no room in any try."""
    monkeypatch.setattr(finalizing, "FREED_SECONDS", 0.01)
    monkeypatch.setattr(service, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(unwritten_files, "ROWS_AT_ONCE", 2)
    fake = FakeServer(tmp_path / "data", at_once=False)
    write = results.write_atomically

    def written(path: Path, lines: Any) -> None:
        if path.name not in ("results.jsonl", "errors.jsonl")[:fits]:
            _full()
        write(path, lines)

    with fake.client() as client:
        batch = create(client, line("0") + line("fail 1") + "".join(line(str(number)) for number in range(2, 9)))
        until(lambda: batch.id in fake.runner.jobs, "run of the batch")
        fake.runner.do(batch.id, 6)
        if journal_is_full:
            monkeypatch.setattr(Journal, "record", _full)
        monkeypatch.setattr(results, "write_atomically", written)
        client.batches.cancel(batch.id)
        found = ended(client, batch.id)
        assert found.status == "cancelled"
        told = (found.errors.data if found.errors is not None else None) or ()
        assert [each.message for each in told] == [finalizing.WAS_FULL] * journal_is_full
        folder = fake.folders.batch(batch.id)
        assert not (folder / "results.jsonl").exists() and not (folder / "errors.jsonl").exists()
        assert [row["custom_id"] for row in rows_of(client, found.output_file_id)] == ["0", "2", "3", "4", "5"]
        assert [row["custom_id"] for row in rows_of(client, found.error_file_id)] == ["fail 1"] + ["6", "7", "8"] * (
            not journal_is_full
        )
        assert found.output_file_id is not None and found.error_file_id is not None
        for name in (found.output_file_id, found.error_file_id):
            assert client.files.retrieve(name).bytes == len(client.files.content(name).content)
        client.files.delete(found.output_file_id)
        assert rows_of(client, found.error_file_id)
        client.files.delete(found.error_file_id)
        until(lambda: not folder.exists(), "space that is free again")


def test_a_batch_whose_files_find_no_space_says_so_until_they_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finalizing, "FREED_SECONDS", 0.01)
    monkeypatch.setattr(service, "TICK_SECONDS", 0.01)
    fake = FakeServer(tmp_path / "data", at_once=False)

    def told(name: str) -> list[str | None]:
        errors = client.batches.retrieve(name).errors
        return [each.message for each in (errors.data if errors is not None else None) or ()]

    with fake.client() as client:
        name = create(client, line("a") + line("b")).id
        until(lambda: name in fake.runner.jobs, "run of the batch")
        with monkeypatch.context() as full:
            full.setattr(batch_files, "write_results", _full)
            fake.runner.do(name, 2)
            until(partial(told, name), "word of the full disk")
            assert told(name) == [finalizing.FULL] and client.batches.retrieve(name).status == "finalizing"
        found = ended(client, name)
        assert found.errors is None and found.error_file_id is None
        assert len(rows_of(client, found.output_file_id)) == 2


def test_what_is_kept_for_deletions_takes_what_room_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, given = Reserve(tmp_path), iter([b"x" * reserve.AT_ONCE] * 3)

    def some(size: int) -> bytes:
        if (found := next(given, None)) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return found

    with monkeypatch.context() as short:
        short.setattr(reserve.os, "urandom", some)
        kept.fill()
    assert (tmp_path / "reserve").stat().st_size == 3 * reserve.AT_ONCE
    kept.fill()
    kept.fill()
    assert (tmp_path / "reserve").stat().st_size == reserve.BYTES
    with pytest.raises(NoSpaceError):
        kept.even_if_full(mock.Mock(side_effect=NoSpaceError("full")))


# What somebody else has put into the data directory, or taken from it


def test_what_others_keep_beside_files_and_batches_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tmp_path / "data"
    with FakeServer(data).client() as client:
        done = ended(client, create(client, line("a")).id)
    unknown = "file-000000000000000000000000"
    (data / "files" / unknown).write_text("of a later serve.db")
    for folder in (data / "files" / "lost+found", data / "files" / "2026", data / "batches" / "archive"):
        folder.mkdir()
    (data / "batches" / "archive" / done.id).mkdir()
    (data / "batches" / "archive" / done.id / "results.jsonl").write_text("kept")
    mine = data / "batches" / "batch_000000000000000000000000"
    mine.mkdir()
    (mine / "results.jsonl").write_text("kept")
    before = sorted(data.glob("*/**/*"))
    with FakeServer(data).client() as client:
        assert rows_of(client, done.output_file_id)
    assert sorted(data.glob("*/**/*")) == before
    [said] = [record.getMessage() for record in caplog.records]
    assert said == (
        f"{data}/files holds files that {data}/serve.db does not know (1, such as {unknown}): "
        "put back a copy of it that does, or remove them"
    )


@pytest.mark.parametrize(("how", "left"), [("is empty", "files"), ("is not there", "files"), ("is not there", "batches")])
def test_without_what_an_earlier_server_knew_nothing_of_it_is_deleted(tmp_path: Path, how: str, left: str) -> None:
    data = tmp_path / "data"
    with FakeServer(data).client() as client:
        batch = create(client, line("a"))
        ended(client, batch.id)
        if left == "batches":
            client.files.delete(batch.input_file_id)
    for path in data.glob("serve.db*"):
        path.unlink()
    if how == "is empty":
        (data / "serve.db").touch()
    before = sorted(data.rglob("*"))
    said = rf"serve.db {how}, and {data}/{left} holds files or batches that it listed: put back a copy of it, or name"
    with pytest.raises(JobError, match=said):
        FakeServer(data)
    assert sorted(data.rglob("*")) == before


def test_rows_that_are_done_are_deleted_by_their_client_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A batch that an earlier server failed, since its journal was not there for one start."""
    fake = FakeServer(tmp_path / "data", at_once=False)
    with fake.client() as client:
        batch = create(client, line("a") + line("b"))
        until(lambda: batch.id in fake.runner.jobs, "run of the batch")
        fake.runner.do(batch.id, 1)
    fake = FakeServer(tmp_path / "data")
    fake.store.change(batch.id, lambda batch: setattr(batch, "status", "failed"))
    with fake.client() as client:
        assert client.batches.retrieve(batch.id).status == "failed"
    directory = fake.folders.batch(batch.id)
    with closing(Journal(directory / JOURNAL, read_only=True)) as journal:
        assert journal.counts().done == 1
    assert f"outrider results {directory} writes them" in caplog.text


def half_done(data: Path) -> str:
    """A batch with one row done and one to do, of a server that has ended."""
    fake = FakeServer(data, at_once=False)
    with fake.client() as client:
        batch = create(client, line("a") + line("b"))
        until(lambda: batch.id in fake.runner.jobs, "run of the batch")
        fake.runner.do(batch.id, 1)
    return batch.id


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_start_without_the_batches_folder_loses_no_row(tmp_path: Path, cancelled: bool) -> None:
    data = tmp_path / "data"
    name = half_done(data)
    (data / "batches").rename(tmp_path / "aside")
    with FakeServer(data, at_once=False).client() as client:
        assert client.batches.retrieve(name).status == "in_progress"
        if cancelled:
            client.batches.cancel(name)
            done = ended(client, name)
            assert done.status == "cancelled" and done.errors is not None and done.errors.data is not None
            assert done.errors.data[0].message == f"{name}/job.db is not there, or empty"
    (data / "batches").rmdir()
    (tmp_path / "aside").rename(data / "batches")
    with FakeServer(data).client() as client:
        done = ended(client, name)
        assert done.status == ("cancelled" if cancelled else "completed")
        assert cancelled or len(rows_of(client, done.output_file_id)) == 2
    with closing(Journal(data / "batches" / name / JOURNAL, read_only=True)) as journal:
        assert journal.counts().done == (1 if cancelled else 2)


def test_a_batch_whose_input_is_not_there_waits_to_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    with monkeypatch.context() as without:
        without.setattr(FakeRunner, "admit", lambda self, job: None)
        with FakeServer(data).client() as client:
            batch, cancelled = create(client, line("a")), create(client, line("b"))
    (data / "batches").rename(tmp_path / "aside")
    with FakeServer(data).client() as client:
        assert client.batches.retrieve(batch.id).status == "validating"
        client.batches.cancel(cancelled.id)
        assert ended(client, cancelled.id).status == "cancelled"
    wanted = "input.jsonl is not there; put back a copy of it and start outrider serve again, or cancel the batch"
    assert caplog.text.count(wanted) == 2
    (data / "batches").rmdir()
    (tmp_path / "aside").rename(data / "batches")
    with FakeServer(data).client() as client:
        assert ended(client, batch.id).status == "completed"


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_files_that_cannot_be_written_without_a_journal_are_written_when_it_is_back(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finalizing, "FREED_SECONDS", 0.01)
    monkeypatch.setattr(service, "TICK_SECONDS", 0.01)
    fake = FakeServer(tmp_path / "data", at_once=False)
    with fake.client() as client:
        waits, cancelled = create(client, line("a") + line("b")), create(client, line("c"))
        journals = [fake.folders.batch(each.id) / JOURNAL for each in (waits, cancelled)]
        until(lambda: len(fake.runner.jobs) == 2, "run of the batches")
        fake.runner.do(waits.id, 1)
        for journal in journals:
            journal.rename(tmp_path / f"{journal.parent.name}.db")
            if how == "damaged":
                journal.write_bytes(b"no database" * 1000)
        fake.pass_by(24 * 3600)
        until(lambda: caplog.text.count("waits: ") == 2, "word of it")
        tries = mock.Mock(side_effect=finalizing.Finalizer._write_files)
        monkeypatch.setattr(finalizing.Finalizer, "_write_files", lambda self, name: tries(self, name))
        until(lambda: tries.call_count > 4, "further tries")
        assert caplog.text.count("waits: ") == 2, "it is told once"
        assert client.batches.retrieve(waits.id).status == "in_progress"
        client.batches.cancel(cancelled.id)
        assert ended(client, cancelled.id).status == "cancelled"
        (tmp_path / f"{waits.id}.db").rename(journals[0])
        done = ended(client, waits.id)
        assert done.status == "expired"
        assert len(rows_of(client, done.output_file_id)) == len(rows_of(client, done.error_file_id)) == 1
    assert journals[1].parent.exists() == (how == "damaged"), "what may be mended stays"


def test_a_batch_of_a_model_that_is_served_no_more_waits_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeServer(tmp_path / "data", at_once=False)
    with fake.client() as client:
        batch, cancelled = create(client, line("a")), create(client, line("b"))
        until(lambda: {batch.id, cancelled.id} == set(fake.runner.jobs), "run of the batches")
    with FakeServer(tmp_path / "data", models=("other",)).client() as client:
        client.batches.cancel(cancelled.id)
        assert ended(client, cancelled.id).status == "cancelled"
        assert client.batches.retrieve(batch.id).status == "in_progress"
    assert f'{batch.id} waits: the model "small" is not served any more' in caplog.text
    with FakeServer(tmp_path / "data").client() as client:
        assert ended(client, batch.id).status == "completed"


@pytest.mark.slow
def test_many_rows_end_once_each(tmp_path: Path) -> None:
    """Killed three times on its way."""
    name = ""
    for least in (0, 200, 400):
        fake = FakeServer(tmp_path / "data", at_once=False)
        with fake.client() as client:
            name = name or create(client, "".join(line(f"row {number}") for number in range(600))).id
            until(partial(_runs, fake, name), "run of the batch")
            counts = client.batches.retrieve(name).request_counts
            assert counts is not None and counts.completed == least, "what was done is known from the start"
            fake.runner.do(name, 200)
    with FakeServer(tmp_path / "data").client() as client:
        rows = rows_of(client, ended(client, name).output_file_id)
        assert [row["custom_id"] for row in rows] == [f"row {number}" for number in range(600)]


def _runs(fake: FakeServer, name: str) -> bool:
    return name in fake.runner.jobs
