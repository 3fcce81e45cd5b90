"""An empty option is a variable that is not set: refused by its name, wherever text or a path is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from built_once import CliRunner

from outrider.runner.cli.main import app
from outrider.runner.options.job import build_spec
from outrider.workers.errors import UsageError

RUN = ["--out", "--model", "--draft", "--address", "--config", "--trace"]
COMMANDS = [
    *(["run", "in.jsonl", option, ""] for option in RUN),
    ["run", ""],
    *([command, ""] for command in ("status", "results", "report", "logs", "cancel", "submit", "retry")),
    *([command, "job", "-o", ""] for command in ("results", "report")),
    *(["list", "--address", ""], ["status", "job", "--address", ""], ["logs", "job", "--address", ""]),
    *(["bench", option, ""] for option in ("--model", "--draft", "--config", "--json", "--plot")),
    *(["topology", option, ""] for option in ("--sysfs", "--model", "--draft")),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_empty_option_is_named(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    option = words[-2] if words[-2].startswith("-") else ("INPUT" if words[0] in ("run", "submit") else "JOB")
    assert f"{option}" in done.output.split("Invalid value for ")[1]
    assert "must not be empty" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["input", "out", "model", "draft", "address", "trace"])
@pytest.mark.parametrize("value", ["''", '"a\\0b"'])
def test_an_empty_key_of_a_file_is_named(tmp_path: Path, key: str, value: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"{key}: {value}\n" if key == "input" else f"input: in.jsonl\n{key}: {value}\n")
    with pytest.raises(UsageError, match=f"job.yaml: {key}: must be a name that is not empty and holds no NUL, got '"):
        build_spec({}, file)
