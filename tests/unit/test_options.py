"""The options of a job: strict, frozen, and refused with the option's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.runner.options.bench import BenchSpec
from outrider.runner.options.job import JobSpec, build_spec
from outrider.runner.options.option import build_options
from outrider.runner.options.topology import TopologySpec
from outrider.workers.errors import UsageError


def message(options: dict[str, Any], file: Path | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        build_spec(options, file)
    return str(caught.value)


class Int64:
    """As numpy's: a whole number that is no int."""

    def __index__(self) -> int:
        return 3


def test_whole_numbers_may_be_of_another_kind() -> None:
    assert repr(build_spec({"input": "a", "draft_tokens": Int64()}).draft_tokens) == "3"


def test_a_file_reads_the_home_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no shell has read."""
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "c.yaml"
    file.write_text("input: ~/in.jsonl\nout: ~/job\ntemplate: ~/{text}\n")
    spec = build_spec({}, file)
    assert (spec.input, spec.out, spec.template) == (Path("/home/me/in.jsonl"), Path("/home/me/job"), "~/{text}")


def test_a_spec_is_frozen() -> None:
    with pytest.raises(ValidationError):
        JobSpec(input=Path("a")).seed = 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_tokens": 0}, "--max-tokens: must be at least 1, got 0"),
        ({"temperature": -0.5}, "--temperature: must be at least 0, got -0.5"),
        ({"temperature": float("nan")}, "--temperature: must be a finite number, got nan"),
        ({"draft_deadline": float("inf")}, "--draft-deadline: must be a finite number, got inf"),
        # Every target died of it, and all rows failed.
        ({"draft_deadline": 1e9}, "--draft-deadline: must be at most 1,000,000, got 1000000000.0"),
        ({"top_p": 0.0}, "--top-p: must be greater than 0, got 0.0"),
        ({"replicas": 0}, "--replicas: must be at least 1, got 0"),
        (
            {"format": "xml"},
            "--format: must be 'auto', 'jsonl', 'text', 'csv', 'parquet' or 'arrow', got 'xml'",
        ),
        ({"draft_tokens": 65}, '--draft-tokens: must be a whole number from 0 to 64, or "auto", got 65'),
        ({"max_tokens": True}, "--max-tokens: must be a whole number, got True"),
        ({"replicas": False}, "--replicas: must be a whole number, got False"),
        ({"temperature": True}, "--temperature: must be a number, got True"),
        ({"draft_tokens": True}, '--draft-tokens: must be a whole number from 0 to 64, or "auto", got True'),
        ({"draft_tokens": -1}, '--draft-tokens: must be a whole number from 0 to 64, or "auto", got -1'),
    ],
)
def test_a_bad_value_names_its_option(options: dict[str, Any], expected: str) -> None:
    assert message({"input": "a", **options}) == expected


def test_a_missing_input_is_said_so() -> None:
    assert message({"seed": 1}) == "INPUT is missing: name a file of prompts"


def test_options_go_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: a.jsonl\nmax-tokens: 7\nseed: 3\n")
    spec = build_spec({"seed": 4}, file)
    assert (spec.input, spec.max_tokens, spec.seed, spec.batch) == (Path("a.jsonl"), 7, 4, 8)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "max_token: 5\n",
            'FILE: unknown key "max_token"; known are address, allow_pickle, answer_tokens, assisted, batch',
        ),
        ("input: a\nmax_tokens: 0\n", "FILE: max_tokens: must be at least 1, got 0"),
        ("input: a\nassisted: 0\n", "FILE: assisted: must be true or false, got 0"),
        ("input: a\nassisted: false\ndraft: x\n", "--no-assisted runs without a draft, --draft x with one: leave out one"),
        ("input: a\njson: true\n", 'FILE: unknown key "json"; known are'),
        ("input: a\nmax-tokens: yes\n", "FILE: max_tokens: must be a whole number, got true"),
        ("input: a\nseed: 1\nseed: 2\n", '--config: FILE is not valid YAML: the key "seed" stands twice'),
        (
            "input: a\nmax-tokens: 8\nmax_tokens: 64\n",
            'FILE: the key "max_tokens" stands twice, as max-tokens and max_tokens; leave out one',
        ),
        ("- 1\n", "--config: FILE must hold keys and values"),
        ("a: [1\n", "--config: FILE is not valid YAML: while parsing a flow sequence"),
        ("a: \xff\x00", "--config: FILE is not valid YAML: unacceptable character"),
        (
            "!!python/object/apply:os.system ['true']\n",
            "--config: FILE is not valid YAML: could not determine a constructor",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    assert message({}, file).startswith(expected.replace("FILE", str(file)))


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes("input: é\n".encode("latin-1"))
    assert message({}, file) == f"--config: {file} is not UTF-8 (byte 8); convert the file to UTF-8"


def test_a_device_is_not_read_to_its_end(tmp_path: Path) -> None:
    assert message({}, Path("/dev/zero")) == "--config: /dev/zero cannot be read: it is longer than 1 MiB"


def test_switches_are_keys_as_well(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("input: a\ndo-sample: true\nassisted: false\n")
    assert (build_spec({}, file).temperature, build_spec({}, file).draft) == (1.0, "none")
    assert build_spec({"temperature": 0.5, "draft": "lookup"}, file).temperature == 0.5
    assert build_spec({"draft": "lookup"}, file).draft == "lookup"
    file.write_text("input: a\ndo_sample: false\nassisted: true\n")
    assert (build_spec({}, file).temperature, build_spec({}, file).draft) == (0.0, "auto")


def test_the_chart_of_figures_has_its_flag_as_a_key(tmp_path: Path) -> None:
    file = tmp_path / "bench.yaml"
    file.write_text("json: figures.json\n")
    assert build_options(BenchSpec, {}, file).json_file == Path("figures.json")
    file.write_text("batch: 64\n")
    with pytest.raises(UsageError, match=r"bench.yaml: batch: must be 1, got 64"):
        build_options(BenchSpec, {}, file)


def test_one_thing_says_what_the_prompt_is() -> None:
    """A job of an earlier outrider may have both, so that only a new one is refused."""
    both = build_spec({"input": "a", "prompt_column": "x", "template": "{y}"})
    with pytest.raises(UsageError, match=r"^--prompt-column and --template both say what the prompt is: leave out one$"):
        both.check_new()
    for one in ({"prompt_column": "x"}, {"template": "{y}"}, {}):
        build_spec({"input": "a", **one}).check_new()


def test_a_file_of_options_is_no_file_of_prompts() -> None:
    """A job of an earlier outrider may have been begun with one, so that only a new one is refused."""
    for name in ("job.yaml", "JOB.YML"):
        said = f"^INPUT: {name} has the name of a --config file: give it as --config {name}, or with --format text"
        with pytest.raises(UsageError, match=said):
            build_spec({"input": name}).check_new()
        build_spec({"input": name, "format": "text"}).check_new()
    build_spec({"input": "yaml"}).check_new()


@pytest.mark.parametrize("name", ["model_bytes", "draft_bytes", "kv_bytes", "draft_kv_bytes"])
def test_a_size_below_nothing_is_refused_by_its_option(name: str) -> None:
    with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')}: must be at least 0, got -5$"):
        build_options(TopologySpec, {name: -5})


@pytest.mark.parametrize("without", [{"draft": "none"}, {"draft": "lookup"}, {"draft": "suffix"}, {"draft_tokens": 0}])
@pytest.mark.parametrize(
    ("name", "value", "nothing"),
    [
        ("draft_precision", "w4a8", "auto"),
        ("draft_confidence", 0.5, 0.0),
        ("draft_shortlist", 512, 0),
        ("draft_cores", 1, None),
        ("layout", "split", "shared"),
        ("draft_deadline", 9.0, 5.0),
        ("draft_learns", False, True),
        ("runners_up", False, True),
        ("small_draft_cache", False, True),
    ],
)
def test_nothing_is_asked_of_a_draft_model_where_none_is_to_run(
    without: dict[str, Any], name: str, value: Any, nothing: Any
) -> None:
    flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
    said = message({"input": "a", name: value, **without})
    assert said == f"{flag}: no draft model runs: leave it out, or name a draft"
    build_spec({"input": "a", name: nothing, **without})
    build_spec({"input": "a", name: value, "draft": "auto"})


@pytest.mark.parametrize("draft", ["none+suffix", "none+lookup", "suffix+lookup", "lookup+suffix", "suffix+suffix"])
def test_what_proposes_without_a_model_has_no_texts_beside_it(draft: str) -> None:
    alone = draft.partition("+")[0]
    assert message({"input": "a", "draft": draft, "draft_confidence": 0.4}) == (
        f'--draft: "{draft}": + follows a model or auto; for {alone} alone write --draft {alone}'
    )


@pytest.mark.parametrize("draft", ["+suffix", "auto+lookup+suffix", "x+suffix+suffix"])
def test_texts_stand_once_and_behind_something(draft: str) -> None:
    said = f'--draft: "{draft}": + may be given once, after a model or auto, such as --draft auto+suffix'
    assert message({"input": "a", "draft": draft}) == said
    for taken in ("auto+suffix", "model+lookup", "x+suffix", "none+x"):
        assert build_spec({"input": "a", "draft": taken}).draft == taken


def test_candidates_are_counted_wherever_they_come_from() -> None:
    assert build_spec({"input": "a", "draft": "suffix", "draft_tokens": 32}).draft_tokens == 32
    too_many = message({"input": "a", "draft": "suffix", "draft_tokens": 33})
    assert too_many.startswith("--draft-tokens: suffix finds 32 candidates for a row at most, got 33; ask for 32")
    assert build_spec({"input": "a", "draft": "x+suffix", "draft_tokens": 33}).draft_tokens == 33
    said = "--draft-tokens: no draft model runs: leave it out, or name a draft"
    assert message({"input": "a", "draft": "none", "draft_tokens": 6}) == said
    assert build_spec({"input": "a", "draft": "suffix", "answer_tokens": 6}).answer_tokens == 6
    assert message({"input": "a", "draft": "none", "answer_tokens": 6}) == said.replace("draft-tokens", "answer-tokens")


@pytest.mark.parametrize("draft", ["lookup", "model", "x", "auto+lookup"])
def test_answers_are_kept_for_suffix_alone(draft: str, tmp_path: Path) -> None:
    said = "--answer-tokens: only suffix keeps answers: leave it out, or name a draft with +suffix"
    assert message({"input": "a", "draft": draft, "answer_tokens": 6}) == said
    assert message({"input": "a", "draft": draft, "answer_tokens": 0}) == said
    for keeps in ("auto", "suffix", "x+suffix"):
        assert build_spec({"input": "a", "draft": keeps, "answer_tokens": 6}).answer_tokens == 6
    file = tmp_path / "job.yaml"
    file.write_text("input: a\nanswer-tokens: 6\n")
    assert build_spec({"draft": draft}, file).answer_tokens == 1 << 21, "the command line leaves out who keeps them"


def test_a_file_for_runs_with_and_without_a_draft(tmp_path: Path) -> None:
    """The command line leaves out the draft, and with it what the file says of one."""
    file = tmp_path / "job.yaml"
    file.write_text("input: a\ndraft: x\ndraft-cores: 2\ndraft-tokens: 6\nbatch: 4\n")
    spec = build_spec({"draft": "none"}, file)
    assert (spec.draft, spec.draft_cores, spec.draft_tokens, spec.batch) == ("none", None, "auto", 4)
    spec = build_spec({"draft": "lookup"}, file)
    assert (spec.draft_cores, spec.draft_tokens) == (None, 6)
    assert build_spec({"draft": "y"}, file).draft_cores == 2
    with pytest.raises(UsageError, match="--draft-cores: no draft model runs"):
        build_spec({"draft": "none", "draft_cores": 1}, file)
    file.write_text("input: a\ndraft: none\ndraft-cores: 2\n")
    assert message({}, file) == "--draft-cores: no draft model runs: leave it out, or name a draft"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert message({}, tmp_path / "none") == f"--config: {tmp_path / 'none'} cannot be read: No such file or directory"
    assert message({}, tmp_path) == f"--config: {tmp_path} cannot be read: Is a directory"


def test_an_empty_file_is_no_options(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    assert build_spec({"input": "a"}, tmp_path / "job.yaml") == JobSpec(input=Path("a"))


def test_the_layout_that_notes_call_plain_is_asked_for_by_the_draft() -> None:
    said = message({"input": "a", "layout": "plain"})
    assert said == "--layout: must be auto, split or shared (plain is what --draft none runs as), got 'plain'"
