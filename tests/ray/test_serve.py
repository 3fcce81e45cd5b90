"""``outrider serve`` on real models and a real Ray, driven by OpenAI's client and by curl: killed, and gone on with."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from command_line import DEADLINE, OFFLINE, OUTRIDER, outrider

pytestmark = pytest.mark.slow
DOCS = Path(__file__).resolve().parents[2] / "docs" / "serve.md"
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    client: openai.OpenAI
    log: Path

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=DEADLINE)


@contextmanager
def serving(folder: Path, *options: object) -> Iterator[Server]:
    """On a free port; killed in the end if it was not ended before."""
    log = folder / "serve.log"
    with log.open("a") as said:
        process = subprocess.Popen(
            [*OUTRIDER, "serve", "--data", "batches", "--port", "0", *map(str, options)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, **OFFLINE},
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        found = re.search(r"at (http://127\.0\.0\.1:\d+)/v1$", first)
        assert found, first + log.read_text()
        key = (folder / "batches" / "api-key").read_text().strip()
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key=key, max_retries=0, timeout=DEADLINE) as client:
            yield Server(process, found[1], client, log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until(come: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE
    while not (found := come()):
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE} s"
        time.sleep(0.1)
    return found


def line(number: int, model: str = "pocket", tokens: int = 12) -> str:
    body = {"model": model, "prompt": f"def row_{number}(", "max_tokens": tokens}
    return json.dumps({"custom_id": f"row {number}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def fitting(number: int, schema: dict[str, Any]) -> str:
    row = json.loads(line(number))
    row["body"]["structured_outputs"] = {"json": schema}
    return json.dumps(row) + "\n"


def create(client: openai.OpenAI, content: str) -> str:
    file = client.files.create(file=("rows.jsonl", content.encode()), purpose="batch").id
    made = client.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
    return made.id


def completed(client: openai.OpenAI, batch: str) -> int:
    counts = client.batches.retrieve(batch).request_counts
    return 0 if counts is None else counts.completed


def ended(client: openai.OpenAI, batch: str) -> openai.types.Batch:
    until(lambda: client.batches.retrieve(batch).status in ENDED, f"end of {batch}")
    return client.batches.retrieve(batch)


def texts_of(client: openai.OpenAI, file: str | None) -> list[tuple[str, str]]:
    assert file is not None
    rows = map(json.loads, client.files.content(file).text.splitlines())
    return [(row["custom_id"], row["response"]["body"]["choices"][0]["text"]) for row in rows]


def test_killed_in_the_middle_it_completes_with_the_texts_of_a_job(tmp_path: Path) -> None:
    content = "".join(line(number) for number in range(600))
    with serving(tmp_path) as server:
        batch = create(server.client, content)
        with pytest.raises(openai.AuthenticationError):
            server.client.with_options(api_key="wrong").batches.list()
        until(lambda: completed(server.client, batch) >= 100, "hundred rows")
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
    with serving(tmp_path) as server:
        before = completed(server.client, batch)
        assert 100 <= before < 600
        # Its model's process, too.
        until(lambda: completed(server.client, batch) >= before + 100, "hundred rows more")
        [host] = [
            child for child in psutil.Process(server.process.pid).children() if "host_child" in " ".join(child.cmdline())
        ]
        host.kill()
        done = ended(server.client, batch)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 600, "completed": 600, "failed": 0}
        texts = texts_of(server.client, done.output_file_id)
        assert [name for name, _ in texts] == [f"row {number}" for number in range(600)]
        assert server.end(signal.SIGTERM) == 0
        assert "Traceback" not in server.log.read_text()
    (tmp_path / "rows.jsonl").write_text(content)
    plain = outrider("run", "rows.jsonl", "-o", "job", "--draft", "none", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    rows = [json.loads(each) for each in (tmp_path / "job" / "results.jsonl").read_text().splitlines()]
    assert texts == [(row["custom_id"], row["response"]["body"]["choices"][0]["text"]) for row in rows]


def test_batches_and_single_requests_share_a_model_that_stays_loaded(tmp_path: Path) -> None:
    rows = 10_000  # as many as the fastest machine leaves undone while eight are completed
    with serving(tmp_path) as server:
        client = server.client
        large = create(client, "".join(line(number, tokens=24) for number in range(rows)))
        until(lambda: completed(client, large) > 0, "row of the large one")
        small = create(client, "".join(line(number) for number in range(8)))
        done = ended(client, small)
        assert done.status == "completed"
        assert completed(client, large) < rows, "the small one does not wait for it"
        asked: dict[str, Any] = {"model": "pocket", "prompt": "def row_3(", "max_tokens": 12}
        whole = client.completions.create(**asked).choices[0].text
        assert whole == dict(texts_of(client, done.output_file_id))["row 3"]
        pieces = list(client.completions.create(**asked, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == whole
        assert pieces[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(**asked, temperature=-1)
        assert client.batches.cancel(large).status == "cancelling"
        cancelled = ended(client, large)
        assert cancelled.status == "cancelled"
        assert cancelled.request_counts is not None
        assert len(texts_of(client, cancelled.output_file_id)) == cancelled.request_counts.completed
        bad = ended(client, create(client, line(1) + line(1) + "{\n"))
        assert bad.status == "failed"
        assert bad.errors is not None and bad.errors.data is not None
        assert [(each.code, each.line) for each in bad.errors.data] == [("invalid_json_line", 3)]
        bad = ended(client, create(client, line(1) + line(1)))
        assert bad.errors is not None and bad.errors.data is not None
        assert [(each.code, each.line) for each in bad.errors.data] == [("duplicate_custom_id", 2)]
        endless = {"type": "object", "$ref": "#/nowhere"}
        mixed = ended(client, create(client, line(1) + line(2).replace("12", "-1") + fitting(3, endless) + fitting(4, {})))
        assert (mixed.status, mixed.errors) == ("completed", None), "a row that is wrong is its own error"
        assert [name for name, _ in texts_of(client, mixed.output_file_id)] == ["row 1", "row 4"]
        assert mixed.error_file_id is not None
        errors = {
            row["custom_id"]: row["error"]
            for row in map(json.loads, client.files.content(mixed.error_file_id).text.splitlines())
        }
        assert {name: each["code"] for name, each in errors.items()} == dict.fromkeys(("row 2", "row 3"), "invalid_request")
        assert '"max_tokens" must be' in errors["row 2"]["message"] and "cannot be compiled" in errors["row 3"]["message"]
        status = outrider("status", tmp_path / "batches" / "batches" / small, "--json")
        assert json.loads(status.stdout)["done"] == 8
        assert server.log.read_text().count("from the cache") + server.log.read_text().count("native engine") <= 4


def test_two_models_take_turns_and_a_stop_leaves_all_to_be_gone_on_with(tmp_path: Path) -> None:
    options = ("-m", "one=pocket", "-m", "two=pocket", "--turn", "1", "--draft", "lookup")
    rows = 10_000  # more than the fastest machine completes in some turns
    with serving(tmp_path, *options) as server:
        first = create(server.client, "".join(line(number, "one", 24) for number in range(rows)))
        until(lambda: completed(server.client, first) > 0, "row of the first")
        second = create(server.client, "".join(line(number, "two") for number in range(5)))
        done = ended(server.client, second)
        assert done.status == "completed"
        assert server.client.batches.retrieve(first).status == "in_progress"
        until(lambda: server.client.batches.retrieve(first).status == "in_progress", "turn of the first")
        assert server.end(signal.SIGTERM) == 0
    with serving(tmp_path, *options) as server:
        assert ended(server.client, second).status == "completed"
        before = completed(server.client, first)
        assert 0 < before < rows
        until(lambda: completed(server.client, first) > before, "row more")
        assert "Traceback" not in server.log.read_text()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl is installed: apt-get install curl")
def test_the_examples_of_the_docs(tmp_path: Path) -> None:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", DOCS.read_text(), re.M | re.S)
    with serving(tmp_path, "-m", "pocket") as server:
        port = server.url.rpartition(":")[2]
        scripts = [text.replace(":8000", f":{port}") for kind, text in found if kind == "bash"]
        typed = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(scripts)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert typed.returncode == 0, typed.stderr
        rows = [json.loads(each) for each in (tmp_path / "results.jsonl").read_text().splitlines()]
        assert [row["custom_id"] for row in rows] == ["row 1", "row 2", "row 3"]
        assert "data: [DONE]" in typed.stdout and '{"status":"ok"}' in typed.stdout
        assert 'outrider_rows_total{outcome="completed"} 3' in typed.stdout
        [program] = [text.replace(":8000", f":{port}") for kind, text in found if kind == "python"]
        ran = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert [json.loads(each) for each in ran.stdout.splitlines() if each] == rows
        # As the page has it: "outrider serve --data batches -m pocket".
        assert server.end(signal.SIGTERM) == 0
