"""``--metrics-port`` and ``--trace`` as their readers meet them: scraped from a running job, held to Perfetto's rules."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
OUTRIDER = [sys.executable, "-c", "from outrider.runner.cli.main import main; main()"]
# What docs/jobs.md promises, by the name of the total it has to agree with in the summary.
COUNTERS = {"tokens": "tokens", "rounds": "rounds", "proposed": "proposed", "accepted": "accepted"}
OTHERS = (
    *("row_rounds_total", "asked_total", "phase_seconds_total", "accepted_length_total", "rows_total"),
    "row_seconds_bucket",
)
GAUGES = ("k", "acceptance")
ROWS, DRAFT_TOKENS = 360, 3
SAMPLE = re.compile(r"^ray_outrider_(\w+)\{(.*)\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any], list[dict[str, Any]]]:
    """Everything scraped from a job with metrics and a trace, its summary, and the trace's events."""
    folder: Path = tmp_path_factory.mktemp("watched")
    with (folder / "rows.jsonl").open("w") as stream:
        for number in range(ROWS):
            stream.write(json.dumps({"prompt": f"def f{number}(x):", "max_tokens": 48}) + "\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculating = ["--draft-tokens", str(DRAFT_TOKENS), "--layout", "shared", "--ignore-eos"]
    options = [*speculating, "--metrics-port", str(port), "--trace", "t.json"]
    scraped = []
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*OUTRIDER, "run", "rows.jsonl", "-o", "job", *options],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ray tells its agent every ten seconds, which is half of this job.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "RAY_metrics_report_interval_ms": "500"},
        )
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                    scraped.append(answer.read().decode())
            except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError):
                pass  # not up yet, or gone already
            time.sleep(0.5)
    assert process.returncode == 0, (folder / "log").read_text()
    summary = json.loads((folder / "job" / "job.json").read_text())["summary"]
    return scraped, summary, json.loads((folder / "t.json").read_text())["traceEvents"]


def samples(text: str) -> dict[str, float]:
    """Values by name, those that differ in a label added up."""
    found: dict[str, float] = {}
    for name, labels, value in SAMPLE.findall(text):
        assert 'replica="0"' in labels
        found[name] = found.get(name, 0.0) + float(value)
    return found


def test_prometheus_finds_what_the_readme_lists_and_it_agrees_with_the_summary(watched) -> None:
    scraped, summary, _ = watched
    seen = [values for values in map(samples, scraped) if values.get("tokens_total")]
    assert len(seen) >= 3, "a job of some seconds is seen several times"
    last = seen[-1]
    # Ray's agent goes on serving the totals of an actor that is gone, but forgets its gauges two seconds after their last
    # report; on a busy machine the run takes longer than that to end.
    gauges = [values for values in seen if GAUGES[0] in values][-1:] or [{}]
    missing = [name for name in (*(f"{name}_total" for name in COUNTERS), *OTHERS) if name not in last]
    missing += [name for name in GAUGES if name not in gauges[0]]
    assert not missing, f"not served: {missing}; served: {sorted(last)}"
    for name, total in COUNTERS.items():
        values = [each.get(f"{name}_total", 0.0) for each in seen]
        assert values == sorted(values), f"{name} goes down"
        assert 0.3 * summary[total] < values[-1] <= summary[total], name
    # Rates agree from the first scrape on that the draft had a part in: how late it came up is the machine's affair.
    first = next(values for values in seen if values.get("accepted_total"))
    end = {f"{name}_total": float(summary[total]) for name, total in COUNTERS.items()}
    end["row_rounds_total"] = summary["tokens"] / summary["tokens_per_round"]
    for one, other in (("accepted_total", "proposed_total"), ("tokens_total", "row_rounds_total")):
        scraped_rate, rate = ((late[one] - first[one]) / (late[other] - first[other]) for late in (last, end))
        assert scraped_rate == pytest.approx(rate, rel=0.1), one
    # Whether there is room for some is up to the machine.
    for name in ("runners_up", "runners_up_accepted"):
        assert last.get(f"{name}_total", 0.0) <= summary[name]
        assert (f"{name}_total" in last) or summary[name] < 20
    assert last["accepted_length_total"] <= sum(summary["accepted_lengths"])
    assert 0 < last["rows_total"] <= ROWS
    # The mean of the whole job has the rounds before the draft was up in it.
    assert 0.9 * summary["mean_k"] <= gauges[0]["k"] <= DRAFT_TOKENS


def test_the_trace_keeps_the_rules_of_its_format(watched) -> None:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMh4h6I0nSsKchNAySU, as Perfetto imports it."""
    events = watched[2]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named: dict[tuple[str, int, int], str] = {}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        match event["ph"]:
            case "M":
                assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
                if event["name"].endswith("_name"):
                    named[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
            case "X":
                assert event["ts"] >= 0 and event["dur"] >= 0
                tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
            case "i":
                assert event["ts"] >= 0 and event["s"] in {"t", "p", "g"}
            case other:
                raise AssertionError(f"no such phase is written: {other}")
    assert len(tracks) == 2
    for (process, thread), slices in tracks.items():
        assert ("process_name", process, thread) in named and ("thread_name", process, thread) in named
        # Perfetto counts whole nanoseconds, and drops a slice that crosses the end of another on its track.
        whole = sorted((round(start * 1000), round(end * 1000)) for start, end in slices)
        crossing = [(one, other) for one, other in pairwise(whole) if other[0] < one[1] < other[1]]
        assert not crossing, f"{named['thread_name', process, thread]}: {crossing[:3]}"
