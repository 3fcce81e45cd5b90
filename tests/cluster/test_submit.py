"""``submit``, ``status``, ``logs``, ``cancel`` and ``list``, as a user types them on the head of a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import rows_done, targets_standing_still
from raylets import Raylets

pytestmark = pytest.mark.slow

DEADLINE = 200


class Head:
    """A shell on the cluster's head."""

    def __init__(self, raylets: Raylets, folder: Path) -> None:
        self.raylets = raylets
        self.folder = folder
        self.rows = folder / "rows.jsonl"
        prompts = (f"def f{number}(x):" for number in range(60))
        lines = [{"prompt": prompt, "max_tokens": 120, "seed": 1} for prompt in prompts]
        self.rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
        # The programs of this environment, wherever the tests' interpreter is from.
        self.program = folder / "outrider"
        text = 'from outrider.runner.cli.main import main\nif __name__ == "__main__":\n    main()\n'
        self.program.write_text(f"#!{sys.executable}\n{text}")
        self.program.chmod(0o755)

    def outrider(self, command: str, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.program), command, *map(str, arguments), "--address", self.raylets.dashboard],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            env=self.raylets.environment,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        return done

    def status(self, job: object) -> dict[str, object]:
        return dict(json.loads(self.outrider("status", job, "--json").stdout))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    folder = tmp_path_factory.mktemp("head")
    with Raylets(1, dashboard=True) as raylets:
        yield Head(raylets, folder)


def test_a_job_is_sent_followed_cancelled_and_sent_again(head: Head) -> None:
    (head.folder / "job.yaml").write_text("input: rows.jsonl\ndraft: none\nbatch: 2\n")
    submitted = head.outrider("submit", "job.yaml", "--json")
    told = json.loads(submitted.stdout)
    job = head.folder / "rows-job"
    assert told["job"] == str(job)
    assert head.status(told["id"])["running"] is True
    twice = head.outrider("submit", "job.yaml", code=1)
    assert f"{job} is being run as {told['id']}" in twice.stderr
    deadline = time.monotonic() + DEADLINE
    while not rows_done(job):
        assert time.monotonic() < deadline, head.outrider("logs", "rows-job").stdout
        time.sleep(0.02)
    with targets_standing_still(os.getpid()):
        assert head.status("rows-job")["done"]
        cancelled = head.outrider("cancel", "rows-job")
    assert "finishes the rows under way and stops" in cancelled.stderr
    followed = head.outrider("logs", "-f", "rows-job", code=130).stdout
    assert "60 rows accepted" in followed
    assert "rows to go; the same command goes on with them" in followed
    half = head.status("rows-job")
    assert half["state"] == "stopped"
    assert 0 < int(str(half["done"])) < 60

    again = head.outrider("submit", "job.yaml", "--follow")
    assert "resuming" in again.stdout
    whole = head.status("rows-job")
    assert (whole["state"], whole["done"], whole["attempt"]) == ("succeeded", 60, 2)
    assert whole["id"] != told["id"]
    assert len((job / "results.jsonl").read_text().splitlines()) == 60
    listed = json.loads(head.outrider("list", "--json").stdout)
    assert [(each["state"], each["attempt"]) for each in listed] == [("stopped", 1), ("succeeded", 2)]
    assert "is succeeded already" in head.outrider("cancel", "rows-job").stderr
    # The plain status of a directory asks the journal, and needs no cluster.
    plain = subprocess.run([str(head.program), "status", str(job)], capture_output=True, text=True, check=False)
    assert "60 done" in plain.stdout


def test_an_input_that_the_driver_does_not_see_is_said_at_once(head: Head) -> None:
    refused = head.outrider("submit", "/nowhere/rows.jsonl", "-o", "other", code=1)
    assert "has failed on the driver's host: /nowhere/rows.jsonl cannot be read: No such file" in refused.stderr


def test_what_is_wrong_is_said_before_anything_is_sent(head: Head) -> None:
    assert "--max-tokens" in head.outrider("submit", "rows.jsonl", "--max-tokens", "0", code=2).stderr
    assert "No such option" in head.outrider("submit", "rows.jsonl", "--colour", "red", code=2).stderr
    assert "knows no job nothing" in head.outrider("logs", "nothing", code=2).stderr
    elsewhere = subprocess.run(
        [str(head.program), "list", "--address", "127.0.0.1:9"],
        capture_output=True,
        text=True,
        env=head.raylets.environment,
        check=False,
    )
    assert elsewhere.returncode == 1
    assert "no job server of Ray answers at http://127.0.0.1:9" in elsewhere.stderr
