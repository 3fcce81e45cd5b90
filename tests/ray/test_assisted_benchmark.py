"""The pure parts of the benchmarks of assisted jobs and of their equality."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import assisted
import classics
import equality
import job_runs


def ran(folder: Path, text: str = "same", **summary: Any) -> job_runs.Ran:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text(text)
    rounds = {"shared": {"rounds": 10, "seconds": 2.0, "tokens": 30, "forecast_seconds": 1.0, "forecast_tokens": 40.0}}
    rounds["shared"] |= {"tried": 0, "accepted": 0}
    return job_runs.Ran(folder, {"summary": summary, "costs": {"0": {"rounds": rounds}}})


def replica(tokens: int, seconds: float, idle: float = 0.0) -> dict[str, Any]:
    time = {"verify": 0.8 - idle, "draft": 0.1, "hop": 0.06, "idle": idle, "other": 0.04}
    return {"tokens": tokens, "seconds": seconds, "time": time}


def assisted_summary(tokens: int, seconds: float) -> dict[str, Any]:
    one = replica(tokens, seconds)
    return {"replicas": [one], "accepted_lengths": [1, 0, 3], "runners_up_accepted": 1, "mean_k": 2.0, "time": one["time"]}


def test_prompts_of_several_files_take_turns(tmp_path: Path) -> None:
    left, right = tmp_path / "left.jsonl", tmp_path / "right.jsonl"
    left.write_text('{"prompt": "a"}\n{"messages": []}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    right.write_text('{"prompt": "x"}\n')
    assert job_runs.prompts_of([left, right]) == ["a", "x", "b", "c"]


def test_rows_are_greedy_and_sampled_in_turn_and_have_ids_of_their_own() -> None:
    rows = list(job_runs.rows_of(["a", "b", "c"], 7, job_runs.TEMPERATURES))
    assert [row["temperature"] for row in rows] == [0.0, 0.8, 0.0, 0.8, 0.0, 0.8, 0.0]
    assert [row["prompt"] for row in rows] == ["a", "b", "c", "a", "b", "c", "a"]
    assert len({row["id"] for row in rows}) == 7


def test_descendants_are_found_with_their_command_lines() -> None:
    waiting = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
    child = subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        # Until it runs it may have no command line yet.
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        assert any(
            "sys.stdin.read" in command for number, command in job_runs.descendants(os.getpid()) if number == child.pid
        )
    finally:
        child.communicate()


def test_tokens_a_round_are_those_of_rounds_with_candidates() -> None:
    lengths = [10, 0, 10]
    assert assisted.tokens_a_round(lengths, 0) == 2.0
    assert assisted.tokens_a_round([0] * 17, 0) == 1.0


def test_speed_counts_the_time_with_rows_only(tmp_path: Path) -> None:
    both = ran(tmp_path, replicas=[replica(100, 10.0, idle=0.5), replica(100, 10.0, idle=0.5)])
    assert assisted.speed(both) == 20.0


def test_the_speed_after_the_first_tokens_of_each_row(tmp_path: Path) -> None:
    """Rows of six tokens: two slow ones, then two rounds of two tokens. A second of each round is no pass."""
    moments = [(10.0, 1), (20.0, 1), (21.0, 2), (22.0, 2)] * 2
    clock, events = 0.0, []
    for step, tokens in moments:
        passing = {"ts": clock, "dur": (step - 1) * 1e6, "args": {"tokens fed": 1 + (step > 21)}}
        events.append({"ph": "X", "name": "verify", **passing})
        clock += step * 1e6
        events.append({"ph": "X", "name": "commit", "ts": clock - 5, "dur": 5, "args": {"tokens committed": tokens}})
    events.append({"ph": "X", "name": "ask", "ts": 0, "dur": 5, "args": {}})
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [*reversed(events)]}))
    stretches = assisted.stretches_after(trace, 6, 2)
    assert [each.rate for each in stretches] == pytest.approx([4 / 43] * 2)
    # The passes take 20 s over one token and 21 over two, of which one second is the candidate's fault.
    assert [(each.alone, each.longer) for each in stretches] == [((20.0,), (21.0,))] * 2
    assert [each.beside_ms for each in stretches] == pytest.approx([3000 / 4] * 2)
    assert assisted.stretches_after(trace, 6, 5) == [], "the last round of a row brings the fifth and the sixth"


def test_what_a_draft_costs_behind_the_first_tokens_is_told_turn_by_turn() -> None:
    plain = [[assisted.Stretch(10, seconds, (0.9 * seconds,))] for seconds in (1.0, 2.0, 4.0)]
    with_draft = [[assisted.Stretch(10, seconds, (0.88 * seconds,))] for seconds in (1.25, 2.0, 8.0)]
    found = assisted.after(plain, with_draft, 50)
    assert found["of each turn"] == [0.8, 1.0, 0.5]
    assert found["times after them"] == 0.8
    assert found["ms a token in no pass"] == [20.0, 24.0]
    assert found["which costs"] == pytest.approx(4.0 / 200.0)
    assert "more --tokens" in assisted.after(plain, [[], [], []], 50)["tokens/s after 50"]


def test_times_are_those_of_the_turns_and_the_rest_is_a_middling_runs_own(tmp_path: Path) -> None:
    plain = [ran(tmp_path / f"p{at}", replicas=[replica(100, seconds)]) for at, seconds in enumerate((10.0, 20.0, 10.0))]
    with_draft = [
        ran(tmp_path / f"a{number}", **assisted_summary(100, seconds)) for number, seconds in enumerate((2.0, 5.0, 4.0))
    ]
    found = assisted.figures(plain, with_draft)
    assert (found["plain tokens/s"], found["assisted tokens/s"], found["times"]) == (10.0, 25.0, 4.0)
    assert found["times of each turn"] == [5.0, 4.0, 2.5]
    assert found["tokens a round"] == 2.75
    assert found["in no forward pass"] == pytest.approx(0.1)
    assert found["same bytes"]
    assert found["times in rounds alone"] == 1.0
    assert found["forecasts"]["shared"].startswith("100.00 ms forecast, 200.00 taken; 4.00 tokens forecast, 3.00 gained")
    assert found["rate, of the forecasts"] == (3.0 / 200.0) / (4.0 / 100.0)
    (with_draft[2].directory / "results.jsonl").write_text("other")
    assert not assisted.figures(plain, with_draft)["same bytes"]


def test_the_speedup_by_cost_curves() -> None:
    verify, draft = {"1": 1.0, "4": 1.0, "8": 2.0}, {"step": {"1": 0.125, "4": 1.0}, "hop": {"1": 0.125}}
    assert assisted.expected_times(verify, draft, 1, 1.0, 3) == 4 / 1.5
    assert assisted.expected_times(verify, draft, 1, 1.0, None) >= 4 / 1.5
    assert assisted.expected_times(verify, draft, 1, 0.0, None) == 1.0
    assert assisted.expected_times(verify, draft, 4, 1.0, 1) == 2 * 1.0 / (2.0 + 1.125)


def test_what_was_reached_of_the_speedup_by_curves(tmp_path: Path) -> None:
    plain, with_draft = ran(tmp_path / "p"), ran(tmp_path / "a")
    idle, at_work = {"1": 1.0, "2": 1.0, "3": 2.0}, {"1": 1.0, "2": 1.5, "3": 3.0}
    for each, curve in ((plain, idle), (with_draft, at_work)):
        each.told["costs"]["0"] |= {"verify": curve, "verify_at_start": curve}
    with_draft.told["costs"]["0"]["draft"] = {"shared": {"step": {"1": 0.0}, "hop": {"1": 0.0}}}
    with_draft.told["costs"]["0"]["rounds"]["shared"] |= {"tried": 10, "accepted": 5}
    with_draft.told["costs"]["0"]["rounds"]["shared"]["seconds"] /= 1.2
    nothing_tried = ran(tmp_path / "n")
    nothing_tried.told["costs"]["0"]["draft"] = {}
    found = assisted.against_curves([plain] * 2, [with_draft, nothing_tried], 1, 1, None)
    assert found == {
        "times by curves at work": pytest.approx(1.2),
        "of that gain, at work": pytest.approx(1.0),
        "times by curves idle": pytest.approx(1.8),
        "of that gain, idle": pytest.approx(0.25),
    }
    assert assisted.against_curves([plain], [with_draft], 1, 1, 0.5)["times by curves idle"] == pytest.approx(1.5)
    assert set(assisted.against_curves([plain], [nothing_tried], 1, None, None).values()) == {None}


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"same bytes": False}, False),
        ({"accepted": 0}, False),
        ({"deaths counted": 3}, False),
        ({"killed": 0, "deaths counted": 0}, False),
        ({"killed": 0, "resumed": True}, True),  # killed before the job went on
        ({"killed": 0, "deaths counted": 0, "resumed": True}, False),
        ({"killed": 3, "resumed": True}, False),  # one went uncounted
    ],
)
def test_a_case_is_good_if_it_speculated_and_nothing_differs(change: dict[str, Any], good: bool) -> None:
    case = equality.Case("drafts killed", (), equality.DRAFTS)
    line = {"same bytes": True, "accepted": 5, "killed": 2, "deaths counted": 2, "resumed": False}
    assert equality.is_good(case, line | change) is good


@pytest.mark.parametrize("kind", [equality.DRAFTS, equality.TARGETS])
def test_those_of_a_kind_are_killed_whenever_so_many_more_rows_have_ended(tmp_path: Path, kind: str) -> None:
    counters: list[int] = []
    killed: list[int] = []
    actor, other = ("Draft", "Target") if kind == equality.DRAFTS else ("Target", "Draft")
    living = [(7, f"ray::{actor}Actor.propose"), (8, f"ray::{other}Actor.harvest")]
    killer = equality.Killer(
        100,
        320,
        kind,
        list_processes=lambda process: living,
        done=lambda job: counters[-1],
        kill=lambda number, signal: killed.append(number),
    )
    process = argparse.Namespace(pid=1)
    for done in (50, 99, 100, 150, 199, 210):
        counters.append(done)
        killer.watch(process, tmp_path)  # type: ignore[arg-type]
    assert (killed, killer.killed) == ([7, 7], 2)
    living.clear()
    for done in (300, 310):
        counters.append(done)
        killer.watch(process, tmp_path)  # type: ignore[arg-type]
    assert killer.killed == 2, "it waits for the next one"
    living.append((9, f"ray::{actor}Actor"))
    killer.watch(process, tmp_path)  # type: ignore[arg-type]
    assert killed == [7, 7, 9]
    counters.append(320)
    killer._next = 320
    killer.watch(process, tmp_path)  # type: ignore[arg-type]
    assert killer.killed == 3, "the job is over"


PRINTED = """note: something
| Example# | Prompt Length (tokens) | New Tokens Generated | Total Time (s) | Prefill Phase (ms) | Time/Token (ms) \
| Tokens/Sec | Accepted (%) | Tokens/Round | Peak Memory (GB) |
|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
| 1 | 14 | 30 | 0.02158 | 1.332 | 0.6982 | 1432.3494 | - | 1.00 | 0.375 |
| 2 | 12 | 30 | 0.02999 | 1.331 | 0.9883 | 1011.8107 | 100.0 | 1.04 | 0.375 |
"""


def test_every_line_of_the_older_tools_is_one_whose_models_can_be_laid() -> None:
    lines = classics.lines_of((Path(__file__).resolve().parents[2] / "docs" / "older-tools.md").read_text())
    assert len(lines) == 10
    assert all(" outrider bench " in f" {line}" for line in lines)
    assert lines[3].startswith(lines[2]) and lines[3].endswith("--top_p 0.95")
    systems = [[system.name for system in classics.systems_of(line)] for line in lines]
    assert systems[0] == ["facebook/opt-6.7b"]
    assert systems[4] == ["codellama/CodeLlama-7b-hf", "amd/AMD-Llama-135m-code"]
    assert systems[6] == ["facebook/opt-13b", "facebook/opt-125m"], "the options of numactl are not those of outrider"
    assert systems[7] == ["facebook/opt-13b", "facebook/opt-350m"]


def test_a_printed_table_is_read_and_its_arithmetic_held_to_its_digits() -> None:
    examples = classics.examples_in(PRINTED)
    assert [example.tokens for example in examples] == [30, 30]
    assert "| 2 | 1222.08 (1011.81 to 1432.35) | 1 to 1 | 100.0 | 1.02 |" in classics.median_row("x", examples, 0.5)
    with pytest.raises(ValueError, match=r"are not 1000 / 0\.6982 ms"):
        classics.examples_in(PRINTED.replace("1432.3494", "1432.5494"))
    with pytest.raises(ValueError, match=r"0\.02168 s are not 1\.332 ms"):
        classics.examples_in(PRINTED.replace("0.02158", "0.02168"))
    with pytest.raises(ValueError, match="no table with the columns"):
        classics.examples_in(PRINTED.replace("Tokens/Sec", "Tokens/s"))
