"""benchmarks/replay.py: its recording of the bundled pair, and equal figures from the same command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import replay
from job_runs import EXAMPLES

from outrider.workers.models.model_info import find


def test_rows_are_recorded_once_and_replayed_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft, recorded = find("pocket"), find("pocket-draft"), tmp_path / "rows.json"
    made = f"--target {target} --draft {draft} --prompts {EXAMPLES} --rows 2 --prompt-tokens 12 --tokens 24 --threads 1"

    def told(words: str) -> dict[str, dict[str, float]]:
        monkeypatch.setattr(sys, "argv", ["replay.py", "--recorded", str(recorded), *words.split()])
        replay.main()
        found: dict[str, dict[str, float]] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return {name: figures for name, figures in found.items() if name != "asked"}

    first = told(f"{made} --draft-tokens auto 0 3")
    assert first["0"]["tokens a row and round"] == 1.0
    assert first["0"]["ms a round"] == 21.0, "the pass over one token alone"
    assert first["3"]["tokens a row and round"] > 1.3
    rows = json.loads(recorded.read_text())
    assert [(len(row["text"]), row["prompt"], len(row["guesses"])) for row in rows] == [(12 + 24 + 1, 12, 24)] * 2
    assert told("--draft-tokens auto 0 3") == first
    assert told("--draft-tokens 3 --step 0 --hop 0 --read 0 --passes 1:1,2:1,64:1")["3"]["ms a round"] == 1.0
    live = told(f"--live --suffix --draft {draft} --threads 1 --draft-tokens auto 0 3")
    assert live["0"] == first["0"] and live["3"]["tokens a row and round"] > 1.3
    assert told(f"--live --suffix --draft {draft} --threads 1 --draft-tokens auto 0 3") == live
    with pytest.raises(SystemExit):
        told("--live")
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", ["replay.py", "--recorded", str(tmp_path / "none")])
        replay.main()
