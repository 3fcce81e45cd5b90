"""The command line, on real models and a real Ray."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import statistics
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import (
    DEADLINE,
    children_titled,
    described,
    finish,
    known,
    outrider,
    rows_done,
    start,
    targets_standing_still,
    wait_for,
    wait_for_rows,
)

from outrider.workers.draft.shared_memory_transport import CHUNK_BYTES

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Path:
    """A folder with the demo many times over, in.jsonl, and its plain job.

    On a machine with other things to do the demo itself may be done before its draft is up, or before something is killed.
    """
    folder = tmp_path_factory.mktemp("long")
    demo = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    given = [
        entry | {name: f"{entry[name]}, {time}" for name in ("id", "custom_id") if name in entry}
        for time in range(8)
        for entry in demo
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in given))
    plain = outrider("run", "in.jsonl", "-o", "job", "--draft", "none", cwd=folder)
    assert plain.returncode == 0, plain.stderr
    return folder


def test_the_demo_many_times_over_speculates_and_writes_what_plain_decoding_writes(long, tmp_path):
    options = ["--draft-tokens", "4", "--json", "--trace", "t.json"]
    done = outrider("run", long / "in.jsonl", "-o", "job", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    given = [json.loads(line) for line in (long / "in.jsonl").read_text().splitlines()]
    summary = json.loads(done.stdout)
    assert summary["rows"] == summary["done"] == len(given)
    told = described(tmp_path / "job")
    assert told["summary"]["accepted"] > 0
    assert [costs["transport"] for costs in told["costs"].values()] == ["shared memory"]
    results = tmp_path / "job" / "results.jsonl"
    assert results.read_bytes() == (long / "job" / "results.jsonl").read_bytes()
    ids = [json.loads(line)["custom_id"] for line in results.read_text().splitlines()]
    assert ids == [entry.get("id") or entry["custom_id"] for entry in given]

    check_what_is_shown(told["summary"])
    assert f"of {summary['rows']:,} done" in (tmp_path / "job" / "report.html").read_text()
    check_trace(json.loads((tmp_path / "t.json").read_text())["traceEvents"], told["summary"])


def check_what_is_shown(summary: dict[str, Any]) -> None:
    assert 1.0 < summary["tokens_per_round"] <= 5.0
    assert 0 < summary["mean_k"] <= 4.0
    assert sum(length * count for length, count in enumerate(summary["accepted_lengths"])) == summary["accepted"]
    assert sum(summary["time"].values()) == pytest.approx(1.0, abs=0.01)
    # These rows are alike, so texts find most candidates: the draft's share may be too small for its four digits.
    assert summary["draft_passes"] > 0
    assert summary["time"]["verify"] > 0
    assert sum(replica["tokens"] for replica in summary["replicas"]) == summary["tokens"]


def check_trace(events: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Slices of one track do not overlap, and the target's fill its time."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    target, draft = (tracks[track] for track in sorted(tracks))
    names = {event["name"] for event in target}
    assert names - {"change layout"} == {"idle", "decide", "ask", "waiting for draft", "verify", "commit"}
    assert {event["name"] for event in draft} <= {"propose", "draft ahead"}
    for slices in (target, draft):
        slices.sort(key=lambda event: event["ts"])
        for one, other in pairwise(slices):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01, "overlap"
    # Of most rounds, from commit to commit: between two slices the system may take the core away for as long as it likes.
    ends = [index for index, event in enumerate(target) if event["name"] == "commit"]
    filled = [share_filled(target[one : other + 1]) for one, other in pairwise(ends)]
    assert 0.85 < statistics.median(filled) <= 1.0
    assert sum(event["args"]["tokens committed"] for event in target if event["name"] == "commit") == summary["tokens"]
    # One clock for both: candidates are there before the target has them.
    waiting = [event for event in target if event["name"] == "waiting for draft"]
    proposing = [event for event in draft if event["name"] == "propose"]
    assert len(waiting) == len(proposing)
    for wait, work in zip(waiting, proposing, strict=True):
        assert work["ts"] + work["dur"] <= wait["ts"] + wait["dur"]


def share_filled(slices: list[dict[str, Any]]) -> float:
    """Of the time from the end of the first slice to that of the last."""
    first, *others = slices
    started, ended = first["ts"] + first["dur"], others[-1]["ts"] + others[-1]["dur"]
    return float(sum(event["dur"] for event in others) / (ended - started))


def test_prompts_longer_than_a_piece_of_shared_memory_reach_the_draft(tmp_path):
    """Opening these rows is one message of several pieces, and the draft's first."""
    text = " ".join(f"def f{number}(x): return x + {number}" for number in range(220))
    # What they have in common is read once, and yet told with each of them.
    rows = [{"id": f"row {number}", "prompt": f"{text}: {number}", "max_tokens": 8} for number in range(32)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The first request has the draft read everything, for longer than one may usually take on a machine that is slow today.
    speculating = ["--draft-tokens", "3", "--layout", "shared", "--draft-deadline", "100"]
    for name, options in (("plain", ["--draft", "none"]), ("assisted", speculating)):
        done = outrider("run", "long.jsonl", "-o", name, "--batch", "32", "--max-tokens", "8", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    summary = described(tmp_path / "assisted")["summary"]
    assert 2 * summary["prompt_tokens"] > CHUNK_BYTES, "a token takes two bytes at the least"
    assert summary["accepted"] > 0
    assert (tmp_path / "assisted" / "results.jsonl").read_bytes() == (tmp_path / "plain" / "results.jsonl").read_bytes()


def test_two_replicas_and_suffixes_write_the_same(undisturbed, tmp_path):
    done = outrider("run", EXAMPLES, "-o", "job", "--draft", "suffix", "--replicas", "2", "--batch", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "job" / "results.jsonl").read_bytes() == (undisturbed / "results.jsonl").read_bytes()
    summary = json.loads((tmp_path / "job" / "job.json").read_text())["summary"]
    assert summary["found"] >= summary["found_accepted"] > 0


def test_killed_amid_long_rows_they_go_on_where_they_were(tmp_path):
    rows = [
        {"prompt": "import", "max_tokens": 2000, "ignore_eos": True, "logprobs": 2, "n": 2, "temperature": 0.7},
        {"prompt": "def", "max_tokens": 2000, "ignore_eos": True, "n": 3, "temperature": 0.9, "frequency_penalty": 0.2},
        {"prompt": "class", "max_tokens": 2000, "min_tokens": 2000, "stop": ["qqqq"], "n": 3, "temperature": 0.5},
    ]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = ("run", "long.jsonl", "--precision", "w8a8")
    assert outrider(*plain, "-o", "plain", "--draft", "none", cwd=tmp_path).returncode == 0
    options, job = (*plain, "--draft-tokens", "3"), tmp_path / "job"
    process = start(*options, "-o", job, cwd=tmp_path)
    wait_for(process, lambda: tokens_kept(job) > 0, "token in the journal")
    process.kill()
    process.wait()
    kept = tokens_kept(job)
    process = start(*options, "-o", job, cwd=tmp_path)
    wait_for(process, lambda: tokens_kept(job) > kept, "token more in the journal")
    kill_one(process.pid, "ray::TargetActor")
    finish(process)
    assert (job / "results.jsonl").read_bytes() == (tmp_path / "plain" / "results.jsonl").read_bytes()
    summary = described(job)["summary"]
    assert summary["target_deaths"] == 1
    assert summary["resumed_tokens"] > kept
    assert tokens_kept(job) == 0


def tokens_kept(job: Path) -> int:
    """Of rows under way, in the journal."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{job / 'job.db'}?mode=ro", uri=True)) as journal:
        return int(journal.execute("SELECT coalesce(sum(length(tokens)), 0) / 4 FROM kept_tokens").fetchone()[0])
    return 0


def test_killed_it_resumes_and_interrupted_it_drains_and_refuses_company(undisturbed, tmp_path):
    job = tmp_path / "job"
    process = start("run", EXAMPLES, "-o", job, "--batch", "2", cwd=tmp_path)
    wait_for_rows(process, job, 3)
    process.kill()
    process.wait()
    # A draft takes no part in what follows, and takes three seconds of a processor to start.
    process = start("run", EXAMPLES, "-o", job, "--batch", "1", "--draft", "none", cwd=tmp_path)
    wait_for_rows(process, job, rows_done(job) + 1)
    with targets_standing_still(process.pid):
        company = outrider("run", EXAMPLES, "-o", job, cwd=tmp_path)
        assert company.returncode == 1
        assert f"process {process.pid} on" in company.stderr
        assert_heard_by_nobody_else(process.pid)
        # As `timeout` does it, and a terminal with another signal: to the whole process group, which Ray's are not of.
        os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    results = outrider("results", job, cwd=tmp_path)
    assert results.returncode == 0
    assert outrider("run", EXAMPLES, "-o", job, cwd=tmp_path).returncode == 0
    assert (job / "results.jsonl").read_bytes() == (undisturbed / "results.jsonl").read_bytes()


def test_a_dead_target_and_a_dead_draft_only_cost_time(long, tmp_path):
    job = tmp_path / "job"
    process = start("run", long / "in.jsonl", "-o", job, "--batch", "4", "--draft-tokens", "2", cwd=tmp_path)
    wait_for(process, lambda: (known(job, "totals") or {}).get("accepted", 0) > 0, "candidate that held")
    kill_one(process.pid, "ray::DraftActor")
    wait_for_rows(process, job, rows_done(job) + 2)
    kill_one(process.pid, "ray::TargetActor")
    finish(process)
    assert (job / "results.jsonl").read_bytes() == (long / "job" / "results.jsonl").read_bytes()
    summary = described(job)["summary"]
    assert (summary["target_deaths"], summary["draft_deaths"]) == (1, 1)


@pytest.mark.parametrize("server", ["raylet", "gcs_server"])
def test_a_killed_ray_is_started_anew_and_only_costs_time(long, tmp_path, server):
    job = tmp_path / "job"
    rows = len((long / "in.jsonl").read_text().splitlines())
    options = ("--batch", "4", "--draft-tokens", "2", "--trace", "trace.json")
    process = start("run", long / "in.jsonl", "-o", job, *options, cwd=tmp_path)
    wait_for_rows(process, job, 2)
    [victim] = [child for child in psutil.Process(process.pid).children() if child.name() == server]
    victim.kill()
    output = finish(process)
    assert "on this machine was killed by SIGKILL: it is started anew" in output
    assert f"of {rows} rows ended" in output
    assert (job / "results.jsonl").read_bytes() == (long / "job" / "results.jsonl").read_bytes()
    for trace in ("trace.1.json", "trace.json"):
        assert json.loads((tmp_path / trace).read_text())["otherData"]["slices"] > 0
    summary = described(job)["summary"]
    assert (summary["ray_deaths"], summary["target_deaths"], summary["draft_deaths"]) == (1, 0, 0)


def kill_one(ancestor: int, title: str) -> None:
    victim, *_ = children_titled(ancestor, title)
    victim.kill()


def assert_heard_by_nobody_else(ancestor: int) -> None:
    """Nothing that a local run has started listens beyond the loopback address."""
    heard = [
        (child.name(), connection.laddr.ip)
        for child in psutil.Process(ancestor).children(recursive=True)
        for connection in child.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(heard) > 3
    assert {address.removeprefix("::ffff:") for _, address in heard} == {"127.0.0.1"}, heard


def test_another_job_in_the_same_directory_is_refused_with_the_difference(undisturbed, tmp_path):
    done = outrider("run", EXAMPLES, "-o", undisturbed, "--temperature", "0.5", cwd=tmp_path)
    assert done.returncode == 1
    assert "temperature: 0.0 then, 0.5 now" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "cannot be read: No such file"),
        (b'{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n', [], 'rows.jsonl:2: the id "a" stands in line 1'),
        (b'{"prompt": "caf\xe9"}\n', [], "rows.jsonl:1: byte 16 of the line is not UTF-8"),
        (b'{"prompt": "' + b"word " * 5000 + b'"}\n', [], "tokens, and pocket holds 4096"),
        (b'{"prompt": "x"}\n', ["-m", "nobody/nothing"], "is neither a directory nor in the local cache"),
    ],
)
def test_broken_input_gets_one_clear_message(tmp_path, content, options, message):
    """One of each place that refuses; the other sentences are looked at in tests/unit."""
    if content is not None:
        (tmp_path / "rows.jsonl").write_bytes(content)
    done = outrider("run", "rows.jsonl", *options, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_benchmark_that_is_ended_says_so_and_nothing_of_ray_stays(number, tmp_path):
    """SIGTERM printed Ray's stack, SIGHUP nothing; both ended it by the signal, with Ray left to notice by itself."""
    before = signal.signal(number, signal.SIG_DFL)  # these tests may run under nohup, which the command would heed
    try:
        process = start("bench", "--new-tokens", "500", "--json", "b.json", cwd=tmp_path)
    finally:
        signal.signal(number, before)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("example 2"):
        assert line, "the benchmark ended before"
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    said = finish(process, 130)
    assert "**Incomplete: 1 of 10 examples.**" in said and "\n1 of 10 examples: " in said
    assert said.splitlines()[-1] == "stopped before all examples were measured; no file was written"
    assert "logging.cc" not in said
    assert psutil.wait_procs(children, timeout=DEADLINE)[1] == []
    assert not (tmp_path / "b.json").exists()
