"""The specification of a job: strict, frozen, and clear about what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.runner.options import JobSpec, build_spec
from outrider.workers.errors import UsageError


def message(options: dict[str, Any], file: Path | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        build_spec(options, file)
    return str(caught.value)


def test_a_spec_is_frozen() -> None:
    with pytest.raises(ValidationError):
        JobSpec(input=Path("a")).seed = 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_tokens": 0}, "--max-tokens: must be at least 1, got 0"),
        ({"temperature": -0.5}, "--temperature: must be at least 0, got -0.5"),
        ({"temperature": float("nan")}, "--temperature: must be a finite number, got nan"),
        ({"draft_deadline": float("inf")}, "--draft-deadline: must be a finite number, got inf"),
        ({"top_p": 0.0}, "--top-p: must be greater than 0, got 0.0"),
        ({"replicas": 0}, "--replicas: must be at least 1, got 0"),
        (
            {"format": "xml"},
            "--format: must be 'auto', 'jsonl', 'text', 'csv', 'parquet' or 'arrow', got 'xml'",
        ),
        ({"draft_tokens": 65}, '--draft-tokens: must be a whole number from 0 to 64, or "auto", got 65'),
        ({"draft_tokens": -1}, '--draft-tokens: must be a whole number from 0 to 64, or "auto", got -1'),
    ],
)
def test_a_bad_value_names_its_option(options: dict[str, Any], expected: str) -> None:
    assert message({"input": "a", **options}) == expected


def test_a_missing_input_is_said_so() -> None:
    assert message({"seed": 1}) == "INPUT is missing: name a file of prompts"


def test_options_go_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: a.jsonl\nmax-tokens: 7\nseed: 3\n")
    spec = build_spec({"seed": 4}, file)
    assert (spec.input, spec.max_tokens, spec.seed, spec.batch) == (Path("a.jsonl"), 7, 4, 8)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max_token: 5\n", 'FILE: unknown key "max_token"; known are address, allow_pickle, answer_tokens, batch'),
        ("input: a\nmax_tokens: 0\n", "FILE: max_tokens: must be at least 1, got 0"),
        ("- 1\n", "--config: FILE must hold keys and values"),
        ("a: [1\n", "--config: FILE is not valid YAML: while parsing a flow sequence"),
        ("a: \xff\x00", "--config: FILE is not valid YAML: unacceptable character"),
        (
            "!!python/object/apply:os.system ['true']\n",
            "--config: FILE is not valid YAML: could not determine a constructor",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    assert message({}, file).startswith(expected.replace("FILE", str(file)))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert message({}, tmp_path / "none") == f"--config: {tmp_path / 'none'} cannot be read: No such file or directory"
    assert message({}, tmp_path) == f"--config: {tmp_path} cannot be read: Is a directory"


def test_an_empty_file_is_no_options(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    assert build_spec({"input": "a"}, tmp_path / "job.yaml") == JobSpec(input=Path("a"))
