"""One declaration of an option, and everything that is made of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from built_once import CliRunner
from pydantic import Field

from outrider.runner.cli.arguments import MOST_CHOICES
from outrider.runner.cli.main import app
from outrider.runner.job.identity import identity, kept_identity
from outrider.runner.job.journal import Journal, StoredRow
from outrider.runner.options.bench import BenchSpec
from outrider.runner.options.job import JobSpec
from outrider.runner.options.option import Option, OptionModel, build_options, deciding, flag_of, option_of, sections
from outrider.runner.options.quality import QuantizeSpec, ScoreSpec
from outrider.runner.options.shared import Options
from outrider.runner.options.topology import TopologySpec
from outrider.runner.options.values import Precision
from outrider.workers.errors import UsageError
from outrider.workers.models.model_info import ModelInfo

COMMANDS: dict[str, type[OptionModel]] = {
    "run": JobSpec,
    "bench": BenchSpec,
    "topology": TopologySpec,
    "score": ScoreSpec,
    "quantize": QuantizeSpec,
}


def test_an_option_that_does_not_say_whether_it_decides_a_text_is_an_error() -> None:
    with pytest.raises(TypeError, match="decides_text"):
        Option(help="How loud.")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        (int, "Loud.volume needs one Option, which says its help and whether it decides a text"),
        (Annotated[int, Field(ge=0)], "Loud.volume needs one Option"),
        (Annotated[int, Option(help="", decides_text=False)], "Loud.volume says nothing for --help"),
        (
            Annotated[int, Option(help="How loud.", decides_text=False, spellings=("--seed",))],
            "Loud.volume and seed are both --seed",
        ),
    ],
)
def test_an_option_that_says_too_little_is_an_error_when_it_is_declared(annotation: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        type("Loud", (Options,), {"__annotations__": {"volume": annotation}, "volume": 3, "__module__": __name__})


def help_of(command: str) -> str:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_the_choices_of_an_option(command: str) -> None:
    shown, kind = help_of(command), COMMANDS[command]
    for name, field in kind.model_fields.items():
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        if choices and len(choices) <= MOST_CHOICES and option_of(field).on_command_line:
            assert f"{flag_of(kind, name)} {'|'.join(choices)} " in shown


def test_help_lists_every_precision() -> None:
    told = option_of(JobSpec.model_fields["precision"]).help
    named = set(re.findall(r":?\w+", told))
    assert set(get_args(Precision)) <= named | {f"{name}{group}" for name in named for group in named if group[0] == ":"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_tells_of_every_option_with_all_its_spellings_under_its_heading(command: str) -> None:
    shown, kind = help_of(command), COMMANDS[command]
    for section, names in sections(kind).items():
        assert f"{section.__doc__}: " in shown
        for name in names:
            option = option_of(kind.model_fields[name])
            if not option.on_command_line:
                assert f"{flag_of(kind, name)} " not in shown
                continue
            assert option.help in re.sub(r"(?<=\w)- (?=\w)", "-", shown), name
            switches = (each.flags[0].split("/")[0] for each in option.switches)
            for flag in (flag_of(kind, name), *option.spellings, *switches):
                assert re.search(rf"(?<![\w-]){flag}(?![\w-])", shown), flag


def test_help_of_options_imports_nothing_that_is_heavy() -> None:
    program = (
        "import sys\nfrom outrider.runner.cli.main import app\n"
        "try:\n    app(['run', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'ray', 'numpy', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_the_identity_of_a_job_has_what_it_always_had() -> None:
    model_info = ModelInfo("tiny", "/models/tiny", "llama", 20, 100, "float32", (0,), 5, "digest")
    spec = JobSpec(input=Path("in.jsonl"), out=Path("job"), seed=7, temperature=0.5, draft="none")
    assert identity(spec, model_info, "input", "native", "bf16") == {
        "input": "input",
        "format": "auto",
        "prompt_column": None,
        "template": None,
        "carry": "auto",
        "chat": False,
        "split": None,
        "skip_bad": False,
        "model": "digest",
        "engine": "native",
        "precision": "bf16",
        "cache_precision": "auto",
        "max_tokens": 128,
        "min_tokens": 0,
        "ignore_eos": False,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 7,
    }
    # What tells of the machine, of speed or of where things lie may differ between two runs of a job.
    free = set(JobSpec.model_fields) - set(deciding(JobSpec))
    assert {"out", "draft", "draft_tokens", "batch", "replicas", "devices", "address", "trace", "runners_up"} <= free


def test_an_option_that_a_job_was_begun_without_was_as_usual(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job.db")
    journal.fill([StoredRow(0, "a", 1, "completion", {}, (1,))], [], {"identity": {"seed": 3, "model": "digest"}})
    kept = kept_identity(journal)
    assert (kept["seed"], kept["model"], kept["min_tokens"], kept["skip_bad"]) == (3, "digest", 0, False)
    assert "input" not in kept, "what must be given has no usual value"
    journal.close()


def test_an_option_that_nobody_knows_is_named() -> None:
    with pytest.raises(UsageError, match='unknown option "max_token"; known are address, allow_pickle'):
        build_options(JobSpec, {"input": "a", "max_token": 3})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--per", "rack"], "--per: must be 'auto', 'node', 'socket' or 'machine', got 'rack'"),
        (["--replicas", "0"], "--replicas: must be at least 1, got 0"),
        (["--replicas", "some"], "--replicas: must be a whole number, got 'some'"),
        (["--kv-bytes", "1.5"], "--kv-bytes: must be a whole number, got '1.5'"),
    ],
)
def test_topology_says_what_is_wrong_as_run_does(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["topology", *arguments])
    assert str(done.exception) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "abc"], "--batch: must be a whole number, got 'abc'"),
        (["--batch", ""], "--batch: must be a whole number, got ''"),
        (["--temperature", "warm"], "--temperature: must be a number, got 'warm'"),
        (["--temperature", "-1"], "--temperature: must be at least 0, got -1.0"),
        (["--seed", "-1"], "--seed: must be at least 0, got -1"),
        (["--metrics-port", "http"], "--metrics-port: must be a whole number, got 'http'"),
    ],
)
def test_a_number_that_is_none_is_told_in_our_own_words(arguments: list[str], said: str) -> None:
    assert str(CliRunner().invoke(app, ["run", "in.jsonl", *arguments]).exception) == said


def test_score_and_quantize_take_what_they_read_and_nothing_else(tmp_path: Path) -> None:
    """What has no effect there is no option there."""
    model, cores = {"model", "allow_pickle"}, {"per", "wait_for_cores"}
    computed = {"engine", "precision", "cache_precision", "fast_attention", "ipex"}
    own = {"input", "format", "skip_bad", "against", "against_precision", "window", "stride", "most_tokens"}
    assert set(ScoreSpec.model_fields) == model | cores | computed | own
    own = {"out", "bits", "method", "group", "calibration", "format", "skip_bad"}
    assert set(QuantizeSpec.model_fields) == model | cores | own
    for command in (["score", "text.txt"], ["quantize"]):
        for option in ("--draft=x", "--devices=cuda:0", "--batch=2", "--start-deadline=9", "--temperature=1"):
            done = CliRunner().invoke(app, [*command, option])
            assert done.exit_code == 2 and f"No such option: {option.partition('=')[0]}" in done.output
    file = tmp_path / "score.yaml"
    file.write_text("devices: cuda:0\n")
    with pytest.raises(UsageError, match='unknown key "devices"; known are against, '):
        build_options(ScoreSpec, {"input": "x"}, file)
