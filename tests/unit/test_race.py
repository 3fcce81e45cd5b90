"""The race of engines: its arithmetic, and its talk with an engine's process."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.race import engines
from benchmarks.race.__main__ import asked_for, entries, keep, modes_of, not_run, turns
from benchmarks.race.engines import Entry, Failed, started
from benchmarks.race.programs.protocol import Answer, Request, Setup, timed, working_copy
from benchmarks.race.report import Lane, Ran, against, of_other_code, read_races, same, shown, table, write_races

ROOT = Path(__file__).resolve().parents[2]
SETUP = Setup("target", "draft", 2, "w4a8", [3], 200, 8, "work")
REQUEST = Request("plain", [[1, 2], [3, 4]], ["a", "b"], 4, False)
FAKE = """
from protocol import Answer, serve

class Fake:
    def __init__(self, setup):
        self.modes, self.about = {"plain": setup.most_rows}, f"a fake of {setup.kind}"
        print("what a library prints")

    def answer(self, request):
        if request.mode != "plain":
            raise SystemExit("no such mode")
        return Answer(2.0, 6, 1.5, [[sum(ids)] * request.new_tokens for ids in request.prompts], 1.0)

serve(Fake)
"""


def lane(engine: str, mode: str, batch: int, seconds: float, tokens: list[list[int]] | None = None) -> Lane:
    answer = Answer(seconds, batch * 96, seconds / 2, tokens, 1.0)
    return Lane(engine, mode, batch, 96, 48, 40.5, 500, [[answer]])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    (tmp_path / "fake_.py").write_text(FAKE)
    (tmp_path / "protocol.py").write_text((engines.PROGRAMS / "protocol.py").read_text())
    monkeypatch.setattr(engines, "PROGRAMS", tmp_path)
    return Entry("fake", Path(sys.executable), "fake_.py", "w4a8")


def test_an_engine_says_what_it_can_and_answers_batches(fake: Entry, tmp_path: Path) -> None:
    with started(fake, SETUP, tmp_path / "log") as running:
        assert running.modes == {"plain": 8}
        assert running.about == "a fake of w4a8"
        assert running.answer(REQUEST) == Answer(2.0, 6, 1.5, [[3] * 4, [7] * 4], 1.0)
    assert "what a library prints" in (tmp_path / "log").read_text()


def test_no_prompt_comes_twice_where_there_are_enough() -> None:
    rows = [([number], str(number)) for number in range(6)]
    requests = asked_for(rows, "plain", 2, 3, 96)
    assert [each.prompts for each in requests] == [[[0], [1]], [[2], [3]], [[4], [5]]]
    assert [each.texts for each in requests] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert not any(each.again for each in requests)
    too_many = asked_for(rows, "plain", 4, 2, 96)
    assert too_many[1].prompts == [[4], [5], [0], [1]] and all(each.again for each in too_many)


def test_modes_that_no_engine_has_are_refused() -> None:
    assert modes_of("auto+suffix,k=3,lookup k=6", [3, 6]) == ["auto+suffix", "k=3", "lookup k=6"]
    assert modes_of(None, [3]) == ["plain", "auto", "auto+suffix", "k=3", "lookup k=3"]
    for asked, wrong in (("plain,lookup", "lookup"), ("plain,k=3", "k=3")):
        with pytest.raises(SystemExit, match=f"--modes: no engine has {wrong} with these --draft-tokens"):
            modes_of(asked, [6])


class Steady:
    """A machine that gives the same at any time."""

    def now(self) -> tuple[float, int]:
        return 40.0, 500


@pytest.mark.parametrize(("asked", "seen"), [(None, ["plain"]), ("plain,auto", ["plain"]), ("auto", [])])
def test_only_the_modes_that_are_asked_for_are_run(asked: str | None, seen: list[str], fake: Entry, tmp_path: Path) -> None:
    options = argparse.Namespace(batches="2", modes=asked, draft_tokens="3", turns=1, new_tokens=4, prompt_tokens=1)
    with started(fake, SETUP, tmp_path / "log") as running:
        lanes = list(turns(running, fake, [([1], "a"), ([2], "b")], Steady(), options))  # type: ignore[arg-type]
    assert [each.mode for each in lanes] == seen


@pytest.mark.parametrize(("once", "times"), [(True, 1), (False, 2)])
def test_outrider_runs_first_and_last_or_once(once: bool, times: int) -> None:
    others = dict.fromkeys(("llamacpp", "openvino", "vllm", "gptqmodel"))
    options = argparse.Namespace(precisions=["w4a8"], only=None, once=once, **others)
    names = [entry.name for entry in entries(options)]
    assert names[0] == "outrider w4a8" and sum(name.startswith("outrider") for name in names) == times


def test_every_engine_that_a_flag_names_has_its_program() -> None:
    others = dict.fromkeys(("llamacpp", "openvino", "vllm", "gptqmodel"), Path("there"))
    options = argparse.Namespace(precisions=["w4a8"], only=None, once=True, draft_tokens="3", **others)
    found = {entry.name: entry for entry in entries(options)}
    names = ["gptqmodel int4", "llama.cpp Q4_0", "OpenVINO int4", "transformers bf16", "vLLM int4", "vLLM w8a8"]
    assert sorted(found, key=str.lower) == sorted(["outrider w4a8", *names], key=str.lower)
    assert all((engines.PROGRAMS / entry.program).is_file() for entry in found.values())


def test_an_engine_that_ends_is_said_with_its_last_words(fake: Entry, tmp_path: Path) -> None:
    with (
        started(fake, SETUP, tmp_path / "log") as running,
        pytest.raises(Failed, match=r"ended with code 1; no such mode"),
    ):
        running.answer(Request("k=3", [], [], 4, False))


def test_rates_count_prompts_or_leave_them_out() -> None:
    ours = lane("outrider w4a8", "plain", 2, 4.0)
    assert ours.rate == pytest.approx(48.0)
    assert ours.rate_of_both == pytest.approx(72.0)
    assert ours.decoding_rate == pytest.approx(96.0)


def test_the_median_turn_counts() -> None:
    ours = lane("outrider w4a8", "plain", 1, 1.0)
    ours.turns += lane("outrider w4a8", "plain", 1, 2.0).turns + lane("outrider w4a8", "plain", 1, 100.0).turns
    assert ours.rate == pytest.approx(48.0)


def test_we_are_held_against_the_best_of_the_others() -> None:
    lanes = [
        lane("outrider w4a8", "plain", 1, 2.0),
        lane("outrider w4a8", "auto", 1, 1.0),
        lane("outrider w4a8, again", "auto", 1, 0.1),
        lane("slow", "plain", 1, 8.0),
        lane("quick", "plain", 1, 16.0),
        lane("quick", "k=3", 1, 4.0),
        lane("outrider w4a8", "plain", 8, 1.0),
    ]
    alone, eight = against(lanes)
    times_each = {"slow": 8.0, "quick": 4.0}
    assert alone["rate"] == {
        "ours": 96.0,
        "with": "outrider w4a8, auto",
        "best": 24.0,
        "of": "quick, k=3",
        "times": 4.0,
        "times_each": times_each,
    }
    assert eight == {"batch": 8}


def test_a_race_is_kept_and_goes_on_with_what_has_not_ended_well(tmp_path: Path) -> None:
    entries = [Entry("vLLM int4", Path("python"), "vllm_.py", kind) for kind in ("int4", "int4 k=3")]
    ended = Ran("vLLM int4", "int4", 40.5, 500, "vLLM 1.0", 70, lanes=[lane("vLLM int4", "plain", 1, 8.0, [[1, 2]])])
    race = [ended]
    keep(race, Ran("vLLM int4", "int4 k=3", 39.0, 510, failed="no memory"))
    write_races(tmp_path / "race.json", {"one target": race, "another": []})
    kept = read_races(tmp_path / "race.json")
    assert kept == {"one target": race, "another": []}
    assert not_run(kept["one target"], entries) == entries[1:]
    assert not_run(kept["another"], entries) == entries
    assert "failed: no memory" in shown(race, "")
    keep(race, Ran("vLLM int4", "int4 k=3", 38.0, 510))
    assert [ran.kind for ran in race] == ["int4", "int4 k=3"]
    assert "failed" not in shown(race, "")


def test_lanes_of_other_code_are_named(tmp_path: Path) -> None:
    old, new = (Ran("outrider w4a8", kind, 40.5, 500, code=code) for kind, code in (("w4a8", "at 1"), ("w8a8", "at 2")))
    sentence = "outrider w4a8 (w4a8) ran with a working copy at 1, this one is at 2"
    assert of_other_code([old, new], "at 2") == [sentence]
    assert f"* {sentence}" in shown([old, new], "at 2")
    assert "this one is" not in shown([new], "at 2")
    write_races(tmp_path / "race.json", {"one": [old]})
    # What an earlier race wrote says nothing of its code.
    (tmp_path / "race.json").write_text((tmp_path / "race.json").read_text().replace(', "code": "at 1"', ""))
    kept = read_races(tmp_path / "race.json")["one"]
    assert of_other_code(kept, "at 2") == [sentence.replace("at 1", "of no commit that is known")]


def test_a_working_copy_is_its_commit_and_its_changes(tmp_path: Path) -> None:
    assert working_copy(tmp_path) == "of no commit that is known"
    file, git = tmp_path / "file", ["git", "-C", str(tmp_path), "-c", "user.name=one", "-c", "user.email=one@two.three"]
    file.write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    clean = working_copy(tmp_path)
    seen = [clean]
    for text in ("2", "3"):
        file.write_text(text)
        assert working_copy(tmp_path).startswith(f"{clean} and changes (")
        seen.append(working_copy(tmp_path))
    assert len(set(seen)) == 3, "other changes are other code"
    file.write_text("1")
    assert working_copy(tmp_path) == clean


def test_llama_cpp_is_told_with_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "llama-batched-bench"
    program.write_text("#!/bin/sh\necho version: 9")
    program.chmod(0o755)
    monkeypatch.syspath_prepend(engines.PROGRAMS)
    llamacpp = importlib.import_module("llamacpp_")
    monkeypatch.setattr(llamacpp, "convert", lambda source, out: out)
    about = llamacpp.LlamaCpp(replace(SETUP, kind=str(tmp_path))).about
    assert about.startswith("llama.cpp 9, Q4_0, head in Q8_0, its own programs, -t 2 -tb 2 (plain: -b 512 -ub 512; ")
    assert "lookup k=3: --spec-type ngram-simple --spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 3" in about


def test_texts_are_compared_with_the_own_plain_ones() -> None:
    plain = lane("engine", "plain", 2, 1.0, [[1, 2], [3, 4]])
    assisted = lane("engine", "k=3", 2, 1.0, [[1, 2], [3, 5]])
    silent = lane("silent", "plain", 2, 1.0)
    assert same(assisted, plain) == "1/2"
    assert same(silent, plain) == "-"
    assert same(assisted, None) == "-"
    cells = [[cell.strip() for cell in line.split("|")] for line in table([plain, assisted]).splitlines()]
    assert [line[2:4] + line[-4:-1] for line in cells[2:]] == [
        ["plain", "2", "2/2", "40.5", "500"],
        ["k=3", "2", "1/2", "40.5", "500"],
    ]


def test_a_library_that_tells_nothing_is_asked_twice() -> None:
    asked = []

    def generate(new_tokens: int) -> tuple[list[list[int]], float | None]:
        asked.append(new_tokens)
        return [[0] * new_tokens] * 3, 2.0

    answer = timed(generate, 5)
    assert asked == [1, 5]
    assert (answer.decoded, answer.a_round) == (12, 2.0)
    assert answer.decoding_seconds <= answer.seconds


@pytest.mark.slow
def test_the_command_starts() -> None:
    command = [sys.executable, "-m", "benchmarks.race", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "--llamacpp" in shown
