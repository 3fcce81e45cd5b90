"""The file that --trace writes: a Chrome trace."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.runner.report.trace import TraceFile, clock_offset
from outrider.workers.errors import UsageError
from outrider.workers.messages import Slice, Trace

Event = dict[str, Any]


def read(path: Path) -> tuple[list[Event], dict[str, int]]:
    content = json.loads(path.read_text())
    return content["traceEvents"], content["otherData"]


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["name"] == name]


def test_slices_and_events_stand_on_their_tracks(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.json")
    now = time.perf_counter_ns()
    trace.event("rows sent", 1, rows=8)
    trace.actor(
        1, "target", Trace((Slice("verify", now, now + 5_000, 8, 40), Slice("idle", now + 5_000, now + 9_500, 0, 0)))
    )
    trace.actor(1, "draft", Trace((Slice("propose", now, now + 1_000, 8, 32),)))
    trace.event("target died", 1, "target", reason="<script>")
    said = trace.close()
    assert said is not None and "3 slices" in said
    events, lost = read(tmp_path / "t.json")
    [verify], [idle], [propose] = named(events, "verify"), named(events, "idle"), named(events, "propose")
    assert (verify["ph"], verify["dur"], verify["args"]) == ("X", 5.0, {"rows": 8, "tokens fed": 40})
    assert (idle["ts"] - verify["ts"], idle["args"]) == (pytest.approx(5.0), {})
    assert propose["args"] == {"rows": 8, "candidates": 32}
    assert verify["pid"] == propose["pid"] != named(events, "rows sent")[0]["pid"]
    assert verify["tid"] == idle["tid"] != propose["tid"]
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in named(events, "thread_name")}
    assert tracks[verify["pid"], verify["tid"]] == "target"
    assert tracks[propose["pid"], propose["tid"]] == "draft"
    [died] = named(events, "target died")
    assert (died["pid"], died["tid"], died["args"]["reason"]) == (verify["pid"], verify["tid"], "<script>")
    assert lost == {"slices": 3, "cut": 0, "dropped": 0}
    assert verify["ts"] >= 0


def test_what_is_too_much_is_cut_and_said(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.json", most_slices=2, most_events=1)
    trace.actor(0, "target", Trace(tuple(Slice("verify", n, n + 1, 1, 1) for n in range(5)), dropped=7))
    trace.event("rows sent", 0)
    trace.event("rows sent", 0)
    said = trace.close()
    assert said is not None and "the first 2 slices; 3 later ones were cut, 7 were dropped" in said
    events, lost = read(tmp_path / "t.json")
    assert (len(named(events, "verify")), len(named(events, "rows sent"))) == (2, 1)
    assert lost == {"slices": 2, "cut": 3, "dropped": 7}


def test_without_a_path_nothing_is_kept_and_no_clock_is_asked() -> None:
    def ask() -> float:
        raise AssertionError("nobody wants to know")

    trace = TraceFile(None)
    trace.align(0, "target", ask)
    trace.event("start", 0)
    trace.actor(0, "target", Trace((Slice("verify", 1, 2, 1, 1),)))
    assert trace.close() is None


def test_the_trace_of_a_job_begun_anew_does_not_replace_the_one_before(tmp_path: Path) -> None:
    for number in (1, 2):
        trace = TraceFile(tmp_path / "t.json")
        trace.event(f"start {number}")
        assert trace.set_aside() is None
        assert str(trace.close()).startswith(f"{tmp_path / f't.{number}.json'} holds 0 slices")
        assert named(read(tmp_path / f"t.{number}.json")[0], f"start {number}")
    assert not (tmp_path / "t.json").exists() and TraceFile(None).set_aside() is None
    trace = TraceFile(tmp_path / "t.json")
    (tmp_path / "t.json").unlink()
    assert trace.set_aside() == f"what {tmp_path / 't.json'} holds until now will be lost: No such file or directory"


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--trace: .*nowhere/t.json cannot be written: No such file"):
        TraceFile(tmp_path / "nowhere" / "t.json")


def test_a_full_disk_ends_the_trace_and_not_the_job() -> None:
    trace = TraceFile(Path("/dev/full"))
    for _ in range(500):  # more than the file's buffer holds
        trace.event("rows sent", 0, rows=8)
        trace.actor(1, "target", Trace((Slice("verify", 1, 2, 1, 1),)))
    assert not trace.enabled, "actors need not be asked any more"
    assert trace.close() == trace.close() == "/dev/full ends early: No space left on device"


def test_clocks_of_one_host_are_one_and_others_are_measured() -> None:
    assert clock_offset(time.perf_counter) == 0
    ahead = clock_offset(lambda: time.perf_counter() + 1234.5)
    assert ahead == pytest.approx(1234.5e9, abs=1e6)


def test_the_quickest_exchange_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    pauses = iter([0.02, 0.02, 0.001, 0.02, 0.02])

    def ask() -> float:
        nonlocal now
        there = now + 50.0
        now += next(pauses)
        return there

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert clock_offset(ask) == pytest.approx(50e9 - 0.5e6)


def test_an_actor_of_another_clock_is_drawn_in_ours(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.json")
    trace.align(0, "draft", lambda: time.perf_counter() - 1000.0)
    now = time.perf_counter_ns()
    theirs = now - 1000 * 10**9
    trace.actor(0, "target", Trace((Slice("verify", now, now + 10, 1, 1),)))
    trace.actor(0, "draft", Trace((Slice("propose", theirs, theirs + 10, 1, 1),)))
    trace.close()
    events, _ = read(tmp_path / "t.json")
    assert named(events, "propose")[0]["ts"] == pytest.approx(named(events, "verify")[0]["ts"], abs=5_000)
