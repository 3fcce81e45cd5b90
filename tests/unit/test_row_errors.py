"""An error in a row, foreseen or not, fails that row only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver_fakes import REQUEST
from hypothesis import given
from hypothesis import strategies as st
from test_admission import MODEL_INFO, FakeTokenizerProcess, identified

from outrider.runner.driving.partial_results import PartialResults
from outrider.runner.job import prompts, row_check
from outrider.runner.job.admission import admit
from outrider.runner.job.journal import FAILED, Journal, StoredRow
from outrider.runner.job.resolved_request import samples_of
from outrider.runner.job.source import Source
from outrider.runner.options.job import JobSpec
from outrider.runner.report.counters import JobCounters
from outrider.runner.report.latencies import Latencies
from outrider.workers.errors import InputError
from outrider.workers.messages import Harvest, RowResult, TargetCounters

GOOD = '{"id": "good", "prompt": "hello"}'


def admitted(folder: Path, lines: list[bytes], skip_bad: bool = True) -> Journal:
    path = folder / "in.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    journal = Journal(folder / "job.db")
    spec = JobSpec(input=path, skip_bad=skip_bad)
    admit(spec, Source(path), MODEL_INFO, FakeTokenizerProcess(), journal, identified)  # type: ignore[arg-type]
    return journal


def errors(journal: Journal) -> dict[str, dict[str, str]]:
    found = {entry["custom_id"]: entry["error"] for entry in map(json.loads, journal.records(FAILED))}
    journal.close()
    return found


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"id": "bad", "prompt": "x", "logit_bias": {"' + "9" * 5000 + '": 1}}', "999...\" is not a token id of tiny"),
        ('{"id": "bad", "prompt": "x", "logit_bias": {"05": 1}}', '"logit_bias": "05" is not a token id of tiny'),
        ('{"id": "bad", "prompt": "x", "logit_bias": {"٥": 1}}', '"logit_bias": "٥" is not a token id of tiny'),
        ('{"id": "bad", "prompt": "x", "logit_bias": {" 5": 1}}', '"logit_bias": " 5" is not a token id of tiny'),
        ('{"id": "bad", "prompt": "x", "logit_bias": {"+5": 1}}', '"logit_bias": "+5" is not a token id of tiny'),
        ('{"id": "bad", "prompt": "x", "logit_bias": {"5_0": 1}}', '"logit_bias": "5_0" is not a token id of tiny'),
        ('{"id": "bad", "prompt": "x", "logit_bias": {"5\\n": 1}}', "is not a token id of tiny"),
        ('{"id": "bad", "prompt": "x", "logit_bias": {"5": 1, "5": 2}}', 'the key "5" stands twice in one object'),
        ('{"id": "bad", "prompt": "x", "prompt": "y"}', 'the key "prompt" stands twice in one object; leave out one'),
        ('{"id": "bad", "prompt": "x", "seed": ' + "9" * 5000 + "}", "2: a number has too many digits"),
        ('{"id": "bad", "prompt": "x", "logit_bias": {"5": ' + "9" * 400 + "}}", '["5"] must be a number, got 99'),
        ('{"id": "bad", "prompt": [' + "9" * 4000 + "]}", "is not a token id of tiny"),
        ('{"id": "bad", "prompt": [2147483648]}', '"prompt": 2147483648 is not a token id of tiny'),
        ('{"id": "bad", "prompt": "x", "max_tokens": ' + "9" * 4000 + "}", "together more than the 20 that tiny holds"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("skip_bad", [True, False])
def test_a_row_of_the_worst_kind_is_that_rows_error(tmp_path: Path, line: str, sentence: str, skip_bad: bool) -> None:
    lines = [GOOD.encode(), line.encode(), GOOD.replace("good", "other").encode()]
    if not skip_bad:
        with pytest.raises(InputError) as caught:
            admitted(tmp_path, lines, skip_bad)
        (found,) = caught.value.lines
        assert f"{tmp_path / 'in.jsonl'}:2: " in found
        assert sentence in found
        return
    journal = admitted(tmp_path, lines)
    assert [row for row, _ in journal.pending(-1, 9)] == [0, 2]
    (error,) = errors(journal).values()
    assert sentence in error["message"]
    too_long = "together more than" in sentence
    assert error["code"] == ("context_length_exceeded" if too_long else "invalid_request")


def test_two_spellings_of_a_token_are_never_one(tmp_path: Path) -> None:
    journal = admitted(tmp_path, [b'{"prompt": "x", "logit_bias": {"5": 1, "0": 2, "99": -3}}'])
    (row,) = journal.load([0])
    assert samples_of(row)[0].sampling.logit_bias == ((0, 2.0), (5, 1.0), (99, -3.0))
    journal.close()


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("nobody has thought of this\nsecond line")


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [(prompts, "parse_simple", "read"), (prompts, "load_object", "read"), (row_check, "resolve", "admitted"),
     (row_check, "_length_problem", "admitted")],
)  # fmt: skip
def test_what_nobody_has_thought_of_names_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, what: str
) -> None:
    real: Callable[..., Any] = getattr(module, name)
    calls = iter(range(9))
    monkeypatch.setattr(module, name, lambda *given: fails() if next(calls) == 1 else real(*given))
    lines = [f'{{"id": "{name}", "prompt": "x"}}'.encode() for name in ("a", "b", "c")]
    with pytest.raises(InputError) as caught:
        admitted(tmp_path, lines, skip_bad=False)
    sentence = (
        f'{tmp_path / "in.jsonl"}:2: the row "b" could not be {what}: RuntimeError: nobody has thought of this; '
        "this is a fault of outrider, please report it"
    )
    assert caught.value.lines == [sentence]
    calls = iter(range(9))
    journal = admitted(tmp_path, lines)
    assert journal.counts().pending == 2
    assert errors(journal) == {"b": {"code": "internal_error", "message": sentence}}


def result(key: int, text: str = "x") -> RowResult:
    return RowResult(key=key, tokens=(1,), text=text, finish_reason="stop", rounds=1, proposed=0, accepted=0, seconds=1.0)


def test_a_result_that_cannot_be_written_down_is_that_rows_error(tmp_path: Path) -> None:
    """Half of a surrogate pair is no text; a record of it would stop the journal."""
    partial_results = PartialResults("m", JobCounters(), Latencies(None), "in.jsonl")
    rows = [StoredRow(number, f"id-{number}", number + 1, "completion", REQUEST, (1,)) for number in range(3)]
    partial_results.add(rows, [], 0)
    ended = [result(0), result(128, "\ud800"), result(256)]
    done, failed = partial_results.take(Harvest(ended=tuple(ended), counters=TargetCounters()), 0)
    assert [row for row, _ in done] == [0, 2]
    ((row, record),) = failed
    error = json.loads(record)["error"]
    assert (row, error["code"]) == (1, "internal_error")
    assert error["message"].startswith('in.jsonl:2: the row "id-1" could not be written down: UnicodeEncodeError: ')
    journal = Journal(tmp_path / "job.db")
    journal.fill(rows, [], {})
    journal.record(done, failed)
    assert (journal.counts().done, journal.counts().failed) == (2, 1)
    journal.close()


def test_a_model_whose_path_is_no_utf8_does_not_fail_rows() -> None:
    partial_results = PartialResults(os.fsdecode(b"m\xe4"), JobCounters(), Latencies(None))
    partial_results.add([StoredRow(0, "id", 1, "completion", REQUEST, (1,))], [], 0)
    [(_, record)], failed = partial_results.take(Harvest(ended=(result(0),), counters=TargetCounters()), 0)
    assert not failed and json.loads(record)["response"]["body"]["model"] == "m\\udce4"


def test_an_input_whose_name_is_no_utf8(tmp_path: Path) -> None:
    folder = tmp_path / b"in\xff".decode(errors="surrogateescape")
    folder.mkdir()
    ((_, error),) = errors(admitted(folder, [b"{"])).items()
    assert "in\\udcff" in error["message"]


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**50), max_value=10**50)
    | st.floats(allow_nan=False)
    | st.text(max_size=6)
    | st.sampled_from(["5", "05", "٥", "user", "text", "\x00", "\ud800", "/v1/completions", "9" * 4400]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.just("5"), inner, max_size=3),
    max_leaves=8,
)
KEYS = [
    *["id", "custom_id", "url", "method", "body", "prompt", "messages", "max_tokens", "min_tokens", "n", "seed", "stop"],
    *["logit_bias", "stop_token_ids", "logprobs", "top_logprobs", "temperature", "tools", "model", "x"],
]  # fmt: skip
rows = st.dictionaries(st.sampled_from(KEYS), anything, max_size=5)
messages = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "refusal"]), anything, max_size=4), max_size=3
)
lines = st.one_of(
    st.builds(lambda row: json.dumps(row).encode(), rows),
    st.builds(lambda row: json.dumps({"prompt": "x", **row}).encode(), rows),
    st.builds(lambda said: json.dumps({"messages": said}).encode(), messages),
    st.builds(lambda body: json.dumps({"custom_id": "c", "url": "/v1/completions", "body": body}).encode(), rows),
    st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"")),
)


@given(st.lists(lines, min_size=1, max_size=5))
def test_no_line_stops_admission(tmp_path_factory: pytest.TempPathFactory, given_lines: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    journal = admitted(folder, [GOOD.encode(), *given_lines, GOOD.replace("good", "last").encode()])
    counts = journal.counts()
    pending = [row for row, _ in journal.pending(-1, 100)]
    assert counts.rows == len(given_lines) + 2
    assert {0, counts.rows - 1} <= {*pending}
    for row in journal.load(pending):
        samples_of(row)
    for error in errors(journal).values():
        assert error["code"] == "invalid_request", error
