"""The server's HTTP interface: keys, host names, limits and shapes of requests; single requests, whole and streamed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import openai
import pytest
from fake_server import KEY, FakeServer, line, until
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from small_job import MODEL_INFO, FakeTokenizerProcess
from starlette.testclient import TestClient

from outrider.runner.job import results
from outrider.runner.job.journal import StoredRow
from outrider.runner.job.row_check import admit_one
from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.options.job import JobSpec
from outrider.runner.serve import single
from outrider.runner.serve.auth import keys_of, page_token, report_signature
from outrider.runner.serve.running import Progress
from outrider.workers.errors import JobError, UsageError

AUTHORISED = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def fake(tmp_path: Path) -> FakeServer:
    return FakeServer(tmp_path / "data", most_upload=1000)


@pytest.fixture
def client(fake: FakeServer) -> Iterator[TestClient]:
    fake.service.start()
    with TestClient(fake.app, base_url="http://127.0.0.1:8000", headers=AUTHORISED) as client:
        yield client
    fake.service.close(at_once=True)


PLACES = [
    ("GET", "/v1/files"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files/file-000000000000000000000000/content"),
    ("GET", "/v1/batches"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("GET", "/metrics"),
    ("GET", "/page/data"),
    ("GET", "/page/reports/batch_000000000000000000000000"),
    ("GET", "/nowhere"),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("method", "place"), PLACES)
@pytest.mark.parametrize("given", ["", "Bearer wrong", f"Bearer {KEY}x", f"Basic {KEY}", KEY])
def test_without_a_key_nothing_is_said(client: TestClient, method: str, place: str, given: str) -> None:
    answer = client.request(method, place, headers={"Authorization": given})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in answer.text


def test_the_real_client_raises_what_it_raises_at_openai(fake: FakeServer) -> None:
    with fake.client(key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.batches.list()


def test_each_answer_has_an_id_of_its_own(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes of it: refused before or behind the key, streamed, or what nobody has foreseen."""
    monkeypatch.setattr(fake.service, "list_batches", mock.Mock(side_effect=RuntimeError("unforeseen")))
    fake.service.start()
    asked: list[tuple[int, str, str, dict[str, Any]]] = [
        (200, "GET", "/health", {}),
        (200, "GET", "/v1/models", {}),
        (200, "POST", "/v1/completions", {"json": {"model": "small", "prompt": "Row"}}),
        (200, "POST", "/v1/completions", {"json": {"model": "small", "prompt": "Row", "stream": True}}),
        (400, "POST", "/v1/completions", {"content": "{"}),
        (401, "GET", "/v1/models", {"headers": {"Authorization": ""}}),
        (404, "GET", "/nowhere", {}),
        (405, "PUT", "/v1/files", {}),
        (421, "GET", "/v1/models", {"headers": {"Host": "evil.example"}}),
        (500, "GET", "/v1/batches", {}),
    ]
    names = set()
    with TestClient(
        fake.app, base_url="http://127.0.0.1:8000", headers=AUTHORISED, raise_server_exceptions=False
    ) as client:
        for status, method, place, more in asked:
            answer = client.request(method, place, **more)
            assert answer.status_code == status
            [name] = answer.headers.get_list("x-request-id")
            assert re.fullmatch("req_[0-9a-f]{32}", name)
            names.add(name)
    fake.service.close(at_once=True)
    assert len(names) == len(asked)


def test_the_real_client_shows_it(fake: FakeServer) -> None:
    with fake.client() as client:
        assert str(client.models.list()._request_id).startswith("req_")
        with pytest.raises(openai.NotFoundError) as refused:
            client.models.retrieve("none")
        assert str(refused.value.request_id).startswith("req_")


def test_each_key_of_the_file_is_one(client: TestClient) -> None:
    assert client.get("/v1/models", headers={"Authorization": "Bearer sk-other"}).status_code == 200
    assert client.get("/v1/models", headers={"Authorization": "bearer sk-other"}).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "127.0.0.1:8000",
        "localhost:9",
        "LOCALHOST",
        "[::1]:8000",
        "10.0.0.7",
        "batch.example:80",
        "Batch.example.:80",
        "localhost.",
    ],
)
def test_names_of_its_own_are_answered(client: TestClient, name: str) -> None:
    assert client.get("/health", headers={"Host": name}).status_code == 200


@pytest.mark.parametrize("name", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost..", ".", ""])
def test_other_names_are_not(client: TestClient, name: str) -> None:
    """A page in a browser could give its own name this machine's address."""
    answer = client.get("/v1/models", headers={"Host": name})
    assert (answer.status_code, answer.json()["error"]["code"]) == (421, "unknown_host")


def test_health_and_the_empty_page_need_no_key(client: TestClient) -> None:
    assert client.get("/health", headers={"Authorization": ""}).json() == {"status": "ok"}
    page = client.get("/", headers={"Authorization": ""})
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_the_pages_token_opens_the_page_and_nothing_else(client: TestClient) -> None:
    page = {"Authorization": f"Bearer {page_token([KEY])}"}
    assert client.get("/page/data", headers=page).json()["batches"] == []
    assert client.get("/v1/batches", headers=page).status_code == 401
    assert client.get("/metrics", headers=page).status_code == 401


def test_a_reports_link_opens_that_report_alone(fake: FakeServer, client: TestClient) -> None:
    name = "batch_" + "1" * 24
    sign = report_signature([KEY, "sk-other"], name)
    nobody = {"Authorization": ""}
    assert client.get(f"/page/reports/{name}?sign={sign}", headers=nobody).status_code == 404
    assert client.get(f"/page/reports/batch_{'2' * 24}?sign={sign}", headers=nobody).status_code == 401
    assert client.get(f"/page/data?sign={sign}", headers=nobody).status_code == 401


def send(client: TestClient, content: bytes, purpose: str = "batch", **more: str) -> Any:
    return client.post("/v1/files", files={"file": ("rows.jsonl", content)}, data={"purpose": purpose, **more})


def test_uploads_have_a_limit_and_leave_nothing_behind(fake: FakeServer, client: TestClient) -> None:
    assert send(client, b"x" * 1000).status_code == 200
    answer = send(client, b"x" * 1001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")
    assert len(list(fake.folders.files.iterdir())) == 1


def test_what_an_upload_cannot_be_is_refused(fake: FakeServer, client: TestClient) -> None:
    assert send(client, b"row", purpose="fine-tune").json()["error"]["param"] == "purpose"
    expiring = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    assert "expires_after" in send(client, b"row", **expiring).json()["error"]["message"]
    assert send(client, b"").json()["error"]["code"] == "empty_file"
    assert send(client, b"row", **{"x" * 20000: "y"}).status_code == 400
    assert client.post("/v1/files", content=b"row").status_code == 400
    whole = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nrow\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    cut = client.post("/v1/files", content=whole, headers=kind)
    assert (cut.status_code, cut.json()["error"]["message"]) == (400, "the form ends in the middle; send it anew")
    assert list(fake.folders.files.iterdir()) == []


PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
FILE = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nrow'


def form(client: TestClient, *parts: bytes) -> Any:
    content = b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + b"--b--\r\n"
    return client.post("/v1/files", content=content, headers={"Content-Type": "multipart/form-data; boundary=b"})


NO_NAME = 'a part of the form has no name; each needs "Content-Disposition: form-data" with a name'


@pytest.mark.parametrize(
    ("parts", "sentence", "param"),
    [
        ([FILE], '"purpose" is missing; send "batch" beside the file', "purpose"),
        ([PURPOSE], '"file" is missing', "file"),
        (
            [PURPOSE, PURPOSE, FILE],
            'the form holds several parts called "purpose"; send one at a time',
            "purpose",
        ),
        ([FILE, PURPOSE, FILE], 'the form holds several parts called "file"; send one at a time', "file"),
        ([PURPOSE, FILE, b"Content-Disposition: form-data\r\n\r\nx"], NO_NAME, "file"),
        ([PURPOSE, FILE, b"X: y\r\n\r\nx"], NO_NAME, "file"),
        (
            [PURPOSE, b"Content-Transfer-Encoding: Base64\r\n" + FILE],
            '"Content-Transfer-Encoding: base64" is not supported; send what is in "file" as it is',
            "file",
        ),
    ],
)
def test_a_form_of_which_parts_are_wrong_is_told_which(
    fake: FakeServer, client: TestClient, parts: list[bytes], sentence: str, param: str
) -> None:
    answer = form(client, *parts)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["param"]) == (400, sentence, param)
    assert list(fake.folders.files.iterdir()) == []


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("filename*=UTF-8''na%C3%AFve.jsonl", "naïve.jsonl"),
        ("filename*=iso-8859-1'en'%A3.jsonl", "£.jsonl"),
        ("filename*=UTF-8''..%2F..%2Fevil", "evil"),
        ("filename*=UTF-8''a; filename=plain.jsonl", "plain.jsonl"),
        ("filename*=none", "input.jsonl"),
    ],
)
def test_a_file_has_the_name_that_its_form_says_in_either_way(client: TestClient, told: str, name: str) -> None:
    file = f'Content-Transfer-Encoding: binary\r\nContent-Disposition: form-data; name="file"; {told}\r\n\r\nrow'
    assert form(client, PURPOSE, file.encode()).json()["filename"] == name


def test_a_form_that_cannot_be_read_is_told_to_its_sender_alone(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    answer = client.post("/v1/files", content=b"--x\r\n", headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 400 and "the form cannot be read" in answer.json()["error"]["message"]
    assert caplog.records == []


def test_a_name_from_outside_is_never_a_path(fake: FakeServer, client: TestClient) -> None:
    sent = client.post("/v1/files", files={"file": ("../../evil\r\n.jsonl", b"row")}, data={"purpose": "batch"}).json()
    assert "/" not in sent["filename"]
    got = client.get(f"/v1/files/{sent['id']}/content")
    assert got.content == b"row"
    assert [path.name for path in fake.folders.files.iterdir()] == [sent["id"]]


@pytest.mark.parametrize(
    ("asked", "status", "content"),
    [
        ("bytes=0-1", 206, b"01"),
        ("Bytes=8-", 206, b"89"),
        ("bytes=-3", 206, b"789"),
        ("bytes=8-99", 206, b"89"),
        ("bytes=9-2", 200, b"0123456789"),
        ("bytes=a-b", 200, b"0123456789"),
        ("bytes=", 200, b"0123456789"),
        ("bytes=-", 200, b"0123456789"),
        ("bytes=0-1,x", 200, b"0123456789"),
        (f"bytes={'9' * 5000}-", 200, b"0123456789"),
        ("lines=1-2", 200, b"0123456789"),
        ("nonsense", 200, b"0123456789"),
        ("bytes=10-", 416, None),
        ("bytes=0-1,10-11", 200, b"0123456789"),
        ("bytes=10-11,12-", 416, None),
        ("bytes=-0", 416, None),
    ],
)
def test_a_range_that_cannot_be_read_is_ignored(client: TestClient, asked: str, status: int, content: bytes | None) -> None:
    file = send(client, b"0123456789").json()["id"]
    answer = client.get(f"/v1/files/{file}/content", headers={"Range": asked})
    assert answer.status_code == status
    if content is None:
        assert answer.headers["Content-Range"] == "bytes */10"
        assert answer.json()["error"]["code"] == "range_not_satisfiable"
        assert client.get(f"/v1/files/{file}/content", headers={"Range": asked, "If-Range": '"x"'}).status_code == 200
    else:
        assert answer.content == content


def test_errors_have_openais_shape(client: TestClient) -> None:
    for answer in (client.get("/v1/nowhere"), client.put("/v1/files"), client.post("/v1/batches", content=b"{")):
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert client.get("/v1/batches?limit=0").json()["error"]["param"] == "limit"
    twice = client.get("/v1/files?limit=2&order=asc&limit=3").json()["error"]
    assert (twice["param"], twice["message"]) == ("limit", '"limit" stands twice in the address; leave out one')
    assert client.get("/v1/files?colour=red").json()["error"]["param"] == "colour"
    assert client.get("/v1/models/nobody").status_code == 404


@pytest.mark.parametrize(
    ("method", "place", "rest"),
    [
        (
            "POST",
            "/v1/embeddings",
            "this server has /v1/batches, /v1/chat/completions, /v1/completions, /v1/files, /v1/models",
        ),
        ("POST", "/files", "there is /v1/files; end the client's base URL in /v1"),
        ("GET", "/models/small", "there is /v1/models/small; end the client's base URL in /v1"),
        ("GET", "/v1/chat/completions", "there is POST"),
        ("DELETE", "/v1/models/small", "there is GET, HEAD"),
    ],
)
def test_what_is_not_offered_is_refused_with_what_is(client: TestClient, method: str, place: str, rest: str) -> None:
    error = client.request(method, place).json()["error"]
    assert (error["message"], error["code"]) == (f"Unknown request URL: {method} {place}: {rest}", "unknown_url")


def test_models_are_listed(fake: FakeServer) -> None:
    with fake.client() as client:
        assert [model.id for model in client.models.list()] == ["small", "large"]
        assert client.models.retrieve("large").owned_by == "outrider"


def test_the_metrics_count_what_was_done(client: TestClient) -> None:
    file = send(client, (line("a") + line("fail")).encode()).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=asked).json()["id"]
    until(lambda: client.get(f"/v1/batches/{batch}").json()["status"] == "completed", "end")
    lines = client.get("/metrics").text.splitlines()
    assert 'outrider_batches{status="completed"} 1' in lines
    assert 'outrider_rows_total{outcome="completed"} 1' in lines
    assert 'outrider_rows_total{outcome="failed"} 1' in lines
    assert "outrider_accepted_total 1" in lines
    assert 'outrider_model_state{model="small",state="loaded"} 1' in lines
    assert all(line.startswith(("# HELP ", "# TYPE ", "outrider_")) for line in lines)


def test_what_another_process_takes_up_is_counted_once(fake: FakeServer, client: TestClient) -> None:
    """Its rows are the batch's, and its tokens begin anew."""
    fake.runner.at_once = False
    file = send(client, "".join(line(str(number)) for number in range(9)).encode()).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=asked).json()["id"]
    until(lambda: batch in fake.runner.jobs, "run of the batch")
    for figures in ((2, 0, 20, 8, 4, 1.0), (4, 1, 50, 20, 10, 2.0), (4, 1, 0, 0, 0, 0.0), (7, 1, 30, 12, 6, 1.0)):
        fake.runner.on_event(Progress(batch, *figures))
    until(lambda: client.get(f"/v1/batches/{batch}").json()["request_counts"]["completed"] == 7, "seven rows")
    lines = client.get("/metrics").text.splitlines()
    assert 'outrider_rows_total{outcome="completed"} 7' in lines
    assert {"outrider_tokens_total 80", "outrider_proposed_total 32", "outrider_accepted_total 16"} <= set(lines)
    [shown] = client.get("/page/data").json()["batches"]
    assert shown["tokens_per_second"] >= 0


# Single requests


def test_a_completion_and_a_chat(fake: FakeServer) -> None:
    with fake.client() as client:
        answer = client.completions.create(model="small", prompt="Row", max_tokens=3)
        assert (answer.choices[0].text, answer.model) == ("one two", "small")
        assert answer.created > 0
        chat = client.chat.completions.create(model="large", messages=[{"role": "user", "content": "Hello"}])
        assert chat.choices[0].message.content == "one two"
    asked = fake.runner.asked
    assert [each["url"] for each in asked] == ["/v1/completions", "/v1/chat/completions"]
    assert asked[0]["body"] == {"model": "small", "prompt": "Row", "max_tokens": 3}


def test_requests_without_a_seed_draw_anew_and_with_one_again(fake: FakeServer, client: TestClient) -> None:
    """However often the model's process has been started: what it counts begins at 0 each time."""
    for body in ({}, {}, {"seed": 7}, {"seed": 7}):
        client.post("/v1/completions", json={"model": "small", "prompt": [1, 2], **body})
    spec, helper = JobSpec(input=Path("-")), cast(TokenizerProcess, FakeTokenizerProcess())
    rows = [admit_one(dict(entry), 0, spec, MODEL_INFO, helper) for entry in fake.runner.asked]
    stored = [row for row in rows if isinstance(row, StoredRow)]
    seeds = [row.request["seed"] for row in stored]
    assert len(set(seeds[:2])) == 2 and seeds[2:] == [7, 7]
    assert len({json.loads(results.error_record(row, "code", "message"))["id"] for row in stored}) == 4


def test_streams_end_as_openais_do(fake: FakeServer) -> None:
    with fake.client() as client:
        events = list(client.completions.create(model="small", prompt="Row", stream=True))
        assert "".join(event.choices[0].text for event in events) == "one two"
        assert [event.choices[0].finish_reason for event in events] == [None, None, "stop"]
        messages: Any = [{"role": "user", "content": "Hello"}]
        options: Any = {"include_usage": True}
        chat = list(client.chat.completions.create(model="small", messages=messages, stream=True, stream_options=options))
        said = [event.choices[0].delta for event in chat if event.choices]
        assert [delta.content for delta in said] == ["one ", "two", None]
        assert [delta.role for delta in said] == ["assistant", None, None]
        assert chat[-1].usage is not None and chat[-1].usage.total_tokens == 5


def test_a_chat_calls_tools_as_openais_client_reads_them(fake: FakeServer) -> None:
    with fake.client() as client:
        tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        asked: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "tools": tools}
        whole = client.chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content == "Let me see."
        calls = whole.message.tool_calls
        assert calls is not None and len(calls) == 2
        assert [type(call) for call in calls] == [ChatCompletionMessageFunctionToolCall] * 2
        assert [call.function.arguments for call in calls if call.type == "function"] == ['{"a": "é"}'] * 2
        pieces = list(client.chat.completions.create(**asked, stream=True))
        assert [piece.choices[0].finish_reason for piece in pieces][-2:] == [None, "tool_calls"]
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Let me see."
        # The client's own helper puts the pieces together.
        with client.chat.completions.stream(**asked) as stream:
            put_together = stream.get_final_completion().choices[0]
        assert put_together.finish_reason == "tool_calls" and put_together.message.tool_calls is not None
        told = [(call.id, call.function.name, call.function.arguments) for call in put_together.message.tool_calls]
        assert told == [(call.id, call.function.name, call.function.arguments) for call in calls if call.type == "function"]


WRONG: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "nobody", "prompt": "Row"}, 404, "model"),
    ({"prompt": "Row"}, 400, "model"),
    ({"model": "small", "prompt": "refuse"}, 400, None),
    ({"model": "small", "prompt": "refuse", "stream": True}, 400, None),
    ({"model": "small", "prompt": "Row", "stream": "yes"}, 400, "stream"),
    ({"model": "small", "prompt": "Row", "stream": True, "logprobs": 1}, 400, "logprobs"),
    ({"model": "small", "prompt": "Row", "stream": True, "logprobs": 0}, 400, "logprobs"),
    ({"model": "small", "prompt": "Row", "stream": True, "echo": True}, 400, "echo"),
    ({"model": "small", "prompt": "Row", "stream": True, "logprobs": None, "echo": False}, 200, None),
    ({"model": "small", "prompt": "Row", "logprobs": 0}, 200, None),
    ({"model": "small", "prompt": "Row", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (
        {"model": "small", "prompt": "Row", "stream": True, "stream_options": {"include_usage": "yes"}},
        400,
        "stream_options",
    ),
    ({"model": "small", "prompt": "Row", "stream": True, "stream_options": {"include_usage": None}}, 200, None),
    ({"model": "small", "prompt": "Row", "stream": True, "stream_options": {"include_obfuscation": False}}, 200, None),
    (
        {"model": "small", "prompt": "Row", "stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        "stream_options",
    ),
]


@pytest.mark.parametrize(("body", "status", "param"), WRONG)
def test_what_cannot_be_answered_is_refused(
    client: TestClient, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["param"] == param


def test_too_long_a_prompt_has_the_code_that_clients_know(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"model": "small", "prompt": "too long"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_streams_have_ids_of_their_own(client: TestClient) -> None:
    asked = {"model": "small", "prompt": "Row", "stream": True}
    answers = [client.post("/v1/completions", json=asked).text for _ in range(20)]
    assert len({json.loads(answer.partition("\n")[0][6:])["id"] for answer in answers}) == len(answers)


@pytest.mark.parametrize("place", ["/v1/completions", "/v1/chat/completions", "/v1/batches", "/v1/files"])
def test_a_client_that_goes_amid_its_request_is_no_stumble(fake: FakeServer, place: str) -> None:
    headers = {**AUTHORISED, "Host": "127.0.0.1", "Content-Type": "multipart/form-data; boundary=b"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": place,
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    said = [{"type": "http.request", "body": b"--b", "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return said.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(fake.app(scope, receive, send))
    assert [message.get("status") for message in sent] == [400, None]
    assert said == [] and list(fake.folders.files.iterdir()) == []


@pytest.mark.parametrize("prompt", ["never", "begun"])
def test_a_row_that_nobody_waits_for_is_taken_back(fake: FakeServer, monkeypatch: pytest.MonkeyPatch, prompt: str) -> None:
    monkeypatch.setattr(single, "LOOK_SECONDS", 0.05)
    with fake.client() as client:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.2).completions.create(model="small", prompt=prompt)
        until(lambda: fake.runner.taken_back == 1, "taking back")


# The keys


def test_a_key_is_made_once_for_its_user_alone(tmp_path: Path) -> None:
    path, [key] = keys_of(None, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(key) > 40
    assert keys_of(None, tmp_path) == (path, [key])


def test_a_key_that_a_full_disk_left_empty_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "api-key").touch(0o600)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(JobError, match=r"api-key cannot be written: No space left on device$"):
            keys_of(None, tmp_path)
    path, [key] = keys_of(None, tmp_path)
    assert key.startswith("sk-") and path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    path.chmod(0o640)
    with pytest.raises(UsageError, match="--data: other users can read or write"):
        keys_of(None, tmp_path)


def test_a_mark_that_an_editor_put_before_the_first_key_is_no_part_of_it(tmp_path: Path) -> None:
    own = tmp_path / "keys"
    own.write_bytes(b"\xef\xbb\xbfsk-one\r\nsk-two\r\n")
    own.chmod(0o600)
    assert keys_of(own, tmp_path) == (own, ["sk-one", "sk-two"])


def test_key_files_that_others_may_read_or_that_are_empty_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\ntwo \n")
    file.chmod(0o640)
    with pytest.raises(UsageError, match="other users can read or write"):
        keys_of(file, tmp_path)
    file.chmod(0o600)
    assert keys_of(file, tmp_path)[1] == ["one", "two"]
    file.write_text("\n")
    with pytest.raises(UsageError, match="holds no key"):
        keys_of(file, tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        keys_of(tmp_path / "nothing", tmp_path)


@pytest.mark.parametrize("place", ["/", "/v1/files/", "/v1/batches/"])
def test_an_address_that_is_long_is_not_repeated_whole(client: TestClient, place: str) -> None:
    answer = client.get(place + "x" * 5000)
    assert answer.status_code == 404
    assert len(answer.json()["error"]["message"]) < 300


def test_a_value_that_is_long_is_not_repeated_whole(client: TestClient) -> None:
    long = "x" * 5000
    batch = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    answers = [
        client.get(f"/v1/models/{long}"),
        client.get("/v1/files", params={"order": long}),
        client.get("/v1/files", params={"limit": long}),
        client.get("/v1/batches", params={long: "1"}),
        client.post("/v1/completions", json={"model": long, "prompt": "Row"}),
        client.post("/v1/completions", json={"model": [long], "prompt": "Row"}),
        client.post("/v1/batches", json={**batch, "input_file_id": long}),
        client.post("/v1/batches", json={**batch, long: 1}),
        client.post("/v1/batches", json={**batch, "completion_window": long}),
        client.post("/v1/batches", content="{}", headers={"Content-Encoding": long}),
        send(client, b"Row", purpose=long),
        send(client, b"Row", **{long: "1"}),
        form(client, *[f'Content-Disposition: form-data; name="{long}"\r\n\r\n1'.encode()] * 2),
    ]
    for number, answer in enumerate(answers):
        assert answer.status_code in (400, 404, 415) and len(answer.text) < 400, (number, answer.text)


def test_keys_are_no_device_that_has_no_end(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--api-key-file: /dev/zero cannot be read: it is longer than 1 MiB$"):
        keys_of(Path("/dev/zero"), tmp_path)


def test_the_page_lists_batches_with_their_reports(client: TestClient) -> None:
    file = send(client, line("a").encode()).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=asked).json()["id"]
    until(lambda: client.get(f"/v1/batches/{batch}").json()["status"] == "completed", "end")
    [shown] = client.get("/page/data").json()["batches"]
    assert (shown["id"], shown["status"], shown["completed"], shown["total"]) == (batch, "completed", 1, 1)
    report = client.get(shown["report"], headers={"Authorization": ""})
    assert report.status_code == 200
    assert "sandbox" in report.headers["content-security-policy"]
    assert "<html" in report.text


def test_nothing_of_a_data_directory_is_for_others(fake: FakeServer, client: TestClient) -> None:
    before = os.umask(0o077)
    try:
        send(client, line("a").encode())
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o077 == 0 for path in fake.folders.files.iterdir())
    assert fake.folders.files.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"a": "\\ud800"}', r"half of a surrogate pair (\ud800) is not a character"),
        ("[" * 100_000, "lists and objects are nested too deeply, by more than 200 levels"),
        ('{"a": NaN}', "NaN is not a JSON value"),
        ('{"digits": 1' + "0" * 5000 + "}", "a number has too many digits"),
        ("{", "Expecting property name enclosed in double quotes at column 2"),
        ('{"a": 1,\n "b": "c', "Unterminated string starting at line 2, column 7"),
        (b"\xff", "byte 1 is not UTF-8"),
        ("", "Expecting value at column 1"),
    ],
)
def test_what_is_no_text_is_no_request(client: TestClient, body: str | bytes, why: str) -> None:
    for place in ("/v1/batches", "/v1/completions"):
        answer = client.post(place, content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_json")
        assert error["message"] == f"the request is not valid JSON: {why}"


def test_what_is_nested_too_deeply_is_not_handed_on(fake: FakeServer, client: TestClient) -> None:
    """What can just be read is too deep for what stands around it on its way."""
    for levels, refused in ((199, False), (200, True), (490, True), (990, True)):
        nested = '{"a":' * levels + "1" + "}" * levels
        answer = client.post("/v1/completions", content=f'{{"model": "small", "response_format": {nested}}}')
        assert ("nested too deeply" in answer.text) is refused
    assert len(fake.runner.asked) == 1


def test_a_key_that_stands_twice_is_refused_by_name(client: TestClient) -> None:
    for place in ("/v1/batches", "/v1/completions"):
        error = client.post(place, content='{"model": "small", "seed": 1, "seed": 2}').json()["error"]
        assert (error["code"], 'the key "seed" stands twice' in error["message"]) == ("invalid_json", True)


def test_what_comes_compressed_is_refused_as_that(client: TestClient) -> None:
    for place in ("/v1/batches", "/v1/completions", "/v1/files"):
        answer = client.post(place, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (415, "Content-Encoding")


def test_another_method_is_told_which_there_are(client: TestClient) -> None:
    answer = client.put("/v1/files")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, HEAD, POST")


def test_what_the_server_stumbles_over_stands_in_its_own_output(
    fake: FakeServer, client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = f"{fake.store.path} cannot be used: database or disk is full"
    monkeypatch.setattr(fake.service, "list_batches", mock.Mock(side_effect=JobError(said)))
    answer = client.get("/v1/batches")
    assert answer.status_code == 500 and str(fake.store.path) not in answer.text
    assert said in caplog.text


def test_a_batch_for_which_there_is_no_space_leaves_nothing(fake: FakeServer, client: TestClient) -> None:
    file = send(client, line("a").encode()).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    [pages] = fake.store._db.execute("PRAGMA page_count").fetchone()
    fake.store._db.execute(f"PRAGMA max_page_count = {pages}")
    asked["metadata"] = {str(number): "x" * 512 for number in range(16)}
    answer = client.post("/v1/batches", json=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "no_space")
    assert list(fake.folders.batches.iterdir()) == []


def test_json_is_told_in_errors_as_text(client: TestClient) -> None:
    answer = client.post("/v1/batches", json=[1])
    assert json.loads(answer.text)["error"]["message"] == "send an object (application/json)"
