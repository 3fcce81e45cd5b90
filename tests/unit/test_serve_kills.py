"""The server killed before and after each thing that it makes durable, and started again: nothing is lost or twice."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_server import KEY, FakeServer, line, until
from starlette.testclient import TestClient

from outrider.runner.serve import batch_files, files, finalizing, service, uploads
from outrider.runner.serve.store import Store

KILLED = 9
ROWS = ["a", "fail b", "c"]


class Killer:
    """Ends this process at the moment with this number."""

    def __init__(self, moment: int) -> None:
        self._left = moment

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            os._exit(KILLED)


def armed(killer: Killer) -> None:
    """Moments: before and after each transaction of the store, each sync of a folder, each removal."""
    transaction = Store._transaction

    @contextmanager
    def counted(self: Store) -> Iterator[sqlite3.Connection]:
        killer()
        with transaction(self) as db:
            yield db
        killer()

    def around(act: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            killer()
            found = act(*given, **named)
            killer()
            return found

        return counted

    Store._transaction = counted  # type: ignore[method-assign]
    removals = ((module, "remove_directory") for module in (batch_files, files, service))
    for module, name in ((uploads, "sync_folder"), (service, "sync_folder"), (finalizing, "write_files"), *removals):
        setattr(module, name, around(getattr(module, name)))


def client_of(fake: FakeServer) -> TestClient:
    fake.service.start()
    return TestClient(fake.app, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {KEY}"})


def lived(data: Path) -> None:
    """A batch from its upload to its completion, and the deletion of all that it has left."""
    fake = FakeServer(data)
    with client_of(fake) as client:
        whole(client)
    fake.service.close()


def whole(client: TestClient) -> None:
    """What is not there yet is done, as a client does that asks again after an error."""
    batches = client.get("/v1/batches").json()["data"]
    if not batches:
        content = "".join(map(line, ROWS)).encode()
        file = client.post("/v1/files", files={"file": ("rows", content)}, data={"purpose": "batch"}).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batches = [client.post("/v1/batches", json=asked).json()]
    name = batches[0]["id"]
    until(lambda: client.get(f"/v1/batches/{name}").json()["status"] == "completed", "end of the batch")
    batch = client.get(f"/v1/batches/{name}").json()
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    for key, ids in (("output_file_id", ["a", "c"]), ("error_file_id", ["fail b"])):
        got = client.get(f"/v1/files/{batch[key]}/content")
        if got.status_code == 200:
            assert [json.loads(each)["custom_id"] for each in got.text.splitlines()] == ids
            client.delete(f"/v1/files/{batch[key]}")
    assert len(client.get("/v1/batches").json()["data"]) == 1, "a batch is there once"


def end_of(moment: int, data: Path) -> int:
    """What became of a server that is killed then."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        armed(Killer(moment))
        lived(data)
        os._exit(0)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_each_moment_it_goes_on(step: int, tmp_path: Path) -> None:
    moments = 0
    for moment in range(1, 200, step):
        data = tmp_path / str(moment)
        code = end_of(moment, data)
        assert code in (0, KILLED), f"moment {moment}"
        again = FakeServer(data)
        with client_of(again) as client:
            whole(client)
            files = [file["id"] for file in client.get("/v1/files?purpose=batch").json()["data"]]
        again.service.close()
        assert sorted(path.name for path in (data / "files").iterdir()) == sorted(files), "no file that nobody knows"
        until(lambda data=data: not any((data / "batches").iterdir()), "removal of the batch")  # type: ignore[misc]
        if code == 0:
            break
        moments += 1
    assert 20 < moments * step < 199


def test_a_killer_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_of(1, tmp_path / "data") == KILLED
    assert (tmp_path / "data" / "serve.db").exists()
