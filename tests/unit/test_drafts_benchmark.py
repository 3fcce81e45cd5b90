"""benchmarks/drafts.py: its figures from recorded turns; with each kind of draft it writes the texts of plain decoding."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from outrider.workers.messages import TargetCounters

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import drafts


def test_figures_are_sums_over_turns() -> None:
    counted = TargetCounters(rounds=10, row_rounds=20, tokens=50, draft_passes=5, asking_rows=20, asked=60, draft_skipped=7)
    turns = [drafts.Turn(40, 2.0, 45.0, 2.0, 0.1, 3.0, counted), drafts.Turn(20, 1.0, 30.0, 1.0, 0.3, 1.0, counted)]
    found = drafts.figures(turns, 10.0)
    assert (found["tokens/s"], found["times plain"], found["of what was forecast"]) == (20.0, 2.0, 0.8)
    assert (found["tokens a round"], found["ms of draft a round"]) == (2.5, 20.0)
    assert (found["draft passes a round"], found["mean k"]) == (0.5, 3.0)
    assert (found["with prompts"], found["unread"]) == (25.0, 14)


@pytest.mark.slow
def test_every_kind_of_draft_is_raced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "drafts.py --drafts pocket-draft pocket-parallel pocket-head suffix pocket-draft:whole --rows 1 --tokens 16 "
        "--turns 2 --draft-tokens 3 --temperatures 0 0.8 --threads 1 --batch 2 --prompt-tokens 20"
    )
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as ended:
        drafts.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ended.value.code == 0 and all(each["same texts"] for each in told["batches"])
    [batch] = told["batches"]
    race = batch["race"]
    names = ["plain", "pocket-draft, k=3", "pocket-parallel, k=3", "pocket-head, k=3", "suffix, k=3"]
    names.append("pocket-draft:whole, k=3")
    assert list(race) == names
    by_model = [race[name] for name in names[1:4]]
    assert all(
        each["accepted"][0] > 0 and each["tokens a round"] > 1 and each["ms of draft a round"] > 0 for each in by_model
    )
    assert race[names[2]]["draft passes a round"] <= 1.0 < race[names[1]]["draft passes a round"]
