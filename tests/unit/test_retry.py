"""Failed rows once more: put back in one step, their errors kept until something takes their place."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from built_once import CliRunner
from small_job import FakeTokenizerProcess
from test_admission import MODEL_INFO
from test_carried_columns import admitted, answer

import outrider
from outrider.runner import run_job
from outrider.runner.cli.main import app
from outrider.runner.job.directory import describe
from outrider.runner.job.journal import DONE, FAILED, Counts, Journal
from outrider.runner.job.records import ended_rows
from outrider.runner.job.results import error_record, write_results
from outrider.runner.options.job import JobSpec, build_spec
from outrider.runner.prepare_job import _description, prepare
from outrider.runner.report.status import status_of
from outrider.runner.retry import GIVEN_ANEW, retry_spec
from outrider.workers.errors import JobChangedError, JobError, UsageError


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Five rows: two done, two that failed while they ran, and one that was wrong in the input."""
    lines = [
        '{"id": "a", "prompt": "x"}',
        '{"id": "b", "prompt": "y"}',
        '{"id": "bad"}',
        '{"prompt": "z"}',
        '{"prompt": "w"}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    made = admitted(tmp_path / "job", tmp_path / "in.jsonl", skip_bad=True)
    answer(made, frozenset({1, 4}))
    return made


def errors_in(journal: Journal) -> list[str]:
    write_results(journal, journal.path.parent)
    return [json.loads(line)["custom_id"] for line in (journal.path.parent / "errors.jsonl").read_text().splitlines()]


def test_failed_rows_wait_again_and_their_errors_stay(journal: Journal) -> None:
    journal.count_attempt([1])
    before = list(journal.whole_records(FAILED))
    assert journal.put_back_failed() == 2
    assert journal.counts() == Counts(rows=5, done=2, failed=1)
    assert journal.pending(-1, 10) == [(1, 0), (4, 0)], "with all their attempts"
    assert journal.waiting_again() == 2
    assert list(journal.whole_records(FAILED)) == before
    assert errors_in(journal) == ["b", "bad", "5"]
    assert journal.check() == [], "nothing of this is damage"
    assert journal.put_back_failed() == 0, "again changes nothing"
    assert list(journal.whole_records(FAILED)) == before


def test_a_record_takes_the_place_of_the_error(journal: Journal) -> None:
    journal.put_back_failed()
    answer(journal, frozenset({4}))
    assert journal.counts() == Counts(rows=5, done=3, failed=2)
    assert journal.waiting_again() == 0
    assert [row for row, _ in journal.whole_records(DONE)] == [0, 1, 3]
    assert [row for row, _ in journal.whole_records(FAILED)] == [2, 4]
    assert [record.id for _, record in ended_rows(journal, (DONE, FAILED))] == ["a", "b", "bad", "4", "5"]


def test_portions_of_errors_have_those_that_wait(journal: Journal) -> None:
    journal.put_back_failed()
    assert [row for row, _ in journal.records_after(FAILED, -1, 2)] == [1, 2]
    assert [row for row, _ in journal.records_after(FAILED, 2, 2)] == [4]


def test_rows_with_the_id_of_another_are_not_run(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n')
    journal = admitted(tmp_path / "job", tmp_path / "in.jsonl", skip_bad=True)
    assert journal.counts() == Counts(2, 0, 1)
    assert journal.put_back_failed() == 0


def test_status_groups_failures_and_tells_what_waits(journal: Journal) -> None:
    lines = list(status_of(journal).lines(running=False))
    assert lines == [
        "failed:",
        "  2 × row 1 died (replica_died: b, 5)",
        f'  1 × {journal.path.parent.parent / "in.jsonl"}:3: "prompt" is missing (invalid_request: bad)',
    ]
    journal.put_back_failed()
    journal.set_meta("account", {"pace": [[0, 3, 0, 0], [100, 203, 5000, 20000]]})
    journal.set_meta("totals", {"proposed": 10, "accepted": 5, "read_again": 30, "prompt_tokens": 300})
    status = status_of(journal)
    assert list(status.lines(running=True))[:3] == [
        "2.0 rows/s, 50 tok/s, prompts 200 tok/s, 50% accepted, about 1 s left (by the 200 rows of the last 1 min 40 s)",
        "read twice: 30 tokens of prompts and answers (10% of all that was read)",
        "to be run again: 2 rows that had failed",
    ]
    told = status.as_dict()
    assert (told["waiting_again"], told["rows_per_second"], told["seconds_left"]) == (2, 2.0, 1.0)
    assert told["speed_rests_on"] == {"rows": 200, "seconds": 100.0}
    assert [(kind["rows"], kind["code"]) for kind in told["failures"]] == [(2, "replica_died"), (1, "invalid_request")]
    json.dumps(told)


def test_status_leaves_no_failed_row_out(tmp_path: Path) -> None:
    """Of more kinds than it shows, the rare ones stand together."""
    words = [chr(97 + number) for number in range(13)] + ["a"] * 5
    lines = [json.dumps({"id": f"r{number}", "prompt": "x"}) for number in range(len(words))]
    (tmp_path / "in.jsonl").write_text("".join(f"{line}\n" for line in lines))
    journal = admitted(tmp_path / "job", tmp_path / "in.jsonl", skip_bad=True)
    rows = journal.load(range(len(words)))
    journal.record([], [(row.row, error_record(row, "replica_died", word)) for row, word in zip(rows, words, strict=True)])
    status = status_of(journal)
    assert [(kind.code, kind.rows) for kind in status.failures] == [
        ("replica_died", 6), *[("replica_died", 1)] * 9, ("others", 3)
    ]  # fmt: skip
    assert list(status.lines(running=False))[-1] == "  3 × 3 other kinds (others: r10, r11, r12)"
    assert sum(kind["rows"] for kind in status.as_dict()["failures"]) == len(words)
    journal.close()


def test_a_death_in_the_middle_leaves_all_as_it_was(journal: Journal) -> None:
    before = (journal.counts(), list(journal.whole_records(FAILED)))
    path = journal.path
    journal.close()
    if (child := os.fork()) == 0:
        dying = Journal(path)
        # Amid the transaction: errors are copied, records are gone, and the rows still failed.
        dying._db.set_trace_callback(lambda statement: os._exit(7) if statement.startswith("UPDATE") else None)
        dying.put_back_failed()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    again = Journal(path)
    assert (again.counts(), list(again.whole_records(FAILED))) == before
    assert again.waiting_again() == 0
    again.close()


# Options


@pytest.mark.parametrize("words", [["JOB", "--batch", "4"], ["--batch", "4", "JOB"], ["--json", "JOB", "--batch=4"]])
def test_the_command_takes_options_before_the_job_and_behind_it(
    journal: Journal, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, asked = described(journal), list[tuple[JobSpec, bool]]()
    monkeypatch.setattr(run_job, "run", lambda spec, as_json, retry_failed: asked.append((spec, as_json)) or 0)
    done = CliRunner().invoke(app, ["retry", *(str(directory) if word == "JOB" else word for word in words)])
    assert done.exit_code == 0, done.output
    [(spec, as_json)] = asked
    assert (spec.out, spec.batch, as_json) == (directory, 4, "--json" in words)


def test_the_command_names_what_is_missing() -> None:
    assert (
        str(CliRunner().invoke(app, ["retry", "--batch", "4"]).exception) == "JOB is missing: name the directory of a job"
    )
    assert "retry JOB [OPTIONS OF RUN]" in CliRunner().invoke(app, ["retry", "--help"]).output


def test_the_command_takes_no_file_of_options(journal: Journal) -> None:
    directory = described(journal)
    done = CliRunner().invoke(app, ["retry", str(directory), "--config", "x.yaml"])
    assert isinstance(done.exception, UsageError) and "takes the job's own options" in str(done.exception)


def described(journal: Journal, **options: Any) -> Path:
    directory = journal.path.parent
    spec = JobSpec(input=directory.parent / "in.jsonl", out=Path("elsewhere"), skip_bad=True, **options)
    describe(directory, journal, {"spec": spec.model_dump(mode="json")})
    journal.close()
    return directory


def test_a_job_is_run_again_as_it_was_run(journal: Journal) -> None:
    directory = described(journal, max_tokens=5, batch=3, seed=9)
    spec = retry_spec(directory, {"batch": 4})
    assert (spec.out, spec.max_tokens, spec.batch, spec.seed, spec.skip_bad) == (directory, 5, 4, 9, True)


def test_models_are_found_from_another_working_directory(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = JobSpec(input=Path("in.jsonl"), model="target", draft="draft+lookup")
    described_as = _description(spec, MODEL_INFO, None, "draft", {})
    describe(journal.path.parent, journal, described_as)
    journal.close()
    assert (retry_spec(Path("job"), {}).model, retry_spec(Path("job"), {}).draft) == ("target", "draft+lookup")
    monkeypatch.chdir(tmp_path / "other")
    elsewhere = retry_spec(tmp_path / "job", {})
    assert (elsewhere.model, elsewhere.draft) == (str(tmp_path / "target"), f"{tmp_path / 'draft'}+lookup")
    assert retry_spec(tmp_path / "job", {"draft": "none"}).draft == "none"


def test_a_draft_that_is_left_out_takes_with_it_what_was_said_of_it(journal: Journal) -> None:
    """Also where an earlier outrider took both."""
    directory = described(journal, draft="x", draft_cores=1, draft_tokens=6, layout="split")
    spec = retry_spec(directory, {"draft": "none"})
    assert (spec.draft, spec.draft_cores, spec.draft_tokens, spec.layout) == ("none", None, "auto", "auto")
    assert retry_spec(directory, {}).draft_cores == 1
    with pytest.raises(UsageError, match="--draft-cores: no draft model runs"):
        retry_spec(directory, {"draft": "none", "draft_cores": 1})


def test_a_job_that_was_begun_with_two_prompts_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier outrider took both, and the template was the prompt."""
    (tmp_path / "in.jsonl").write_text('{"q": "x"}\n')
    directory, display = tmp_path / "job", mock.Mock()
    both = {"prompt_column": "q", "template": "Q: {q}", "engine": "hf", "draft": "none"}
    spec = build_spec({"input": tmp_path / "in.jsonl", "out": directory, **both})

    def prepared(spec: JobSpec, again: bool = False) -> list[int]:
        """How many tokens each prompt has."""
        job = prepare(spec, directory, display, again, FakeTokenizerProcess())  # type: ignore[arg-type]
        with closing(job.journal) as journal:
            return [len(row.prompt) for row in journal.load([0])]

    said = r"^--prompt-column and --template both say what the prompt is: leave out one$"
    with pytest.raises(UsageError, match=said):
        run_job.run_job(spec, display)
    assert not directory.exists(), "before any model is looked for"
    directory.mkdir()
    with pytest.raises(UsageError, match=said):
        prepared(spec)
    with monkeypatch.context() as earlier:
        earlier.setattr(JobSpec, "check_new", lambda self: None)
        assert prepared(spec) == [len("Q: x")]
    assert prepared(spec) == [len("Q: x")]
    assert prepared(retry_spec(directory, {}), again=True) == [len("Q: x")]
    with pytest.raises(JobChangedError, match=r"\(temperature: .*\); run it as it was begun$"):  # retry has no --out
        prepared(retry_spec(directory, {"temperature": 0.5}), again=True)
    for one in ("prompt_column", "template"):
        alone = build_spec({"input": tmp_path / "in.jsonl", "out": directory, **both, one: None})
        with pytest.raises(
            JobChangedError, match="holds a job that was begun with an input, model or parameter other than now"
        ):
            prepared(alone)


def test_what_a_directory_says_runs_nothing(journal: Journal) -> None:
    """It may come from somebody else."""
    directory = described(
        journal, on_end="touch /tmp/x", allow_pickle=True, address="10.0.0.1:1", metrics_port=99, trace=Path("t")
    )
    spec = retry_spec(directory, {})
    for name in GIVEN_ANEW - {"out"}:
        assert getattr(spec, name) == JobSpec.model_fields[name].default, name
    assert retry_spec(directory, {"on_end": "true"}).on_end == "true"


def test_what_cannot_be_run_again(journal: Journal, tmp_path: Path) -> None:
    directory = journal.path.parent
    with pytest.raises(JobError, match="does not say how the job was run"):
        retry_spec(directory, {})
    described(journal)
    with pytest.raises(UsageError, match="retry takes a job as it is; leave out its input and --out"):
        retry_spec(directory, {"out": tmp_path})
    with pytest.raises(UsageError, match="is not a job directory"):
        outrider.open(directory).retry.__func__(outrider.runner.api.Job(tmp_path))  # type: ignore[attr-defined]
