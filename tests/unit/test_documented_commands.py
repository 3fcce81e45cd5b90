"""Every command that README.md and docs/*.md name is run by somebody, and takes the options that it is shown with.

A command is a line of a block marked ``sh``, or a span in backticks that begins with a program's name. Who runs it stands
in the tables below: a test, as ``file::test`` or ``file``, or a script. A command that stands in no table is an error, and
so is an entry that no page needs. The pages of docs/lab tell of the past and are left out.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from outrider.runner.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
# "bash" is a script, which a test runs whole.
MARKS = {"sh", "bash", "json", "yaml", "python", "text"}
AS_A_NEW_USER, CI, LAUNCHER = "tools/as_a_new_user.py", ".ci/run", "tests/cluster/test_launcher.py"
END_TO_END, FRAME, SUBMIT = "tests/ray/test_end_to_end.py", "tests/unit/test_frame.py", "tests/cluster/test_submit.py"
HERE = "tests/unit/test_documented_commands.py"

# Who runs what, by the words that a command begins with; the longest that fits counts.
RUN_BY = {
    "make help": f"{HERE}::test_make_knows_the_targets_that_documents_name",
    "make format": f"{HERE}::test_make_knows_the_targets_that_documents_name",
    "make hooks": f"{HERE}::test_make_knows_the_targets_that_documents_name",
    "make tidy": f"{HERE}::test_make_knows_the_targets_that_documents_name",
    "make coverage": f"{HERE}::test_make_knows_the_targets_that_documents_name",
    "make lint": CI,
    "make run": AS_A_NEW_USER,
    # By hand, when the kernels change: a quarter of an hour each. docs/lab has what came out.
    "make emulate": f"{HERE}::test_make_knows_the_targets_that_documents_name",
    "make sanitize": f"{HERE}::test_make_knows_the_targets_that_documents_name",
    "make sanitize-threads": f"{HERE}::test_make_knows_the_targets_that_documents_name",
    "make test": CI,
    "make test-all": CI,
    "make test-slow": f"{HERE}::test_make_knows_the_targets_that_documents_name",
    "make wheel": AS_A_NEW_USER,
    "outrider --version": AS_A_NEW_USER,
    "outrider bench": "tests/unit/test_bench.py",
    "outrider cancel": f"{SUBMIT}::test_a_job_is_sent_followed_cancelled_and_sent_again",
    "outrider COMMAND --help": f"{HERE}::test_each_command_has_help",
    "outrider doctor": "tests/unit/test_doctor.py",
    "outrider list": f"{LAUNCHER}::test_submitted_it_is_found_again",
    "outrider logs": f"{SUBMIT}::test_a_job_is_sent_followed_cancelled_and_sent_again",
    "outrider merge": "tests/unit/test_merge.py::test_what_is_merged_is_what_peft_merges",
    "outrider quantize": "tests/unit/test_quantise.py::test_the_command_makes_a_checkpoint_that_scores",
    "outrider report": "tests/unit/test_report.py",
    "outrider results": f"{END_TO_END}::test_killed_it_resumes_and_interrupted_it_drains_and_refuses_company",
    "outrider run": f"{END_TO_END}::test_two_replicas_and_suffixes_write_the_same",
    "outrider run reviews.parquet": "tests/ray/test_tables_end_to_end.py",
    "outrider retry": "tests/ray/test_tables_end_to_end.py",
    "outrider run --address auto": f"{LAUNCHER}::test_one_job_runs_on_both_hosts",
    "outrider score": "tests/unit/test_score.py::test_the_command_gives_its_object_and_nothing_else",
    "outrider serve": "tests/ray/test_serve.py::test_the_examples_of_the_docs",
    "outrider status": "tests/ray/test_inputs_end_to_end.py",
    "outrider submit": f"{LAUNCHER}::test_submitted_it_is_found_again",
    "outrider token": LAUNCHER,
    "outrider topology": "tests/unit/test_doctor.py::test_topology_and_plan_as_json",
    "outrider topology --ray-folder": "tests/cluster/test_cluster_file.py",
    "outrider topology --ray-resources": "tests/cluster/test_cluster_file.py",
    "pip install .": AS_A_NEW_USER,
    "pip install dist/outrider-*.whl": AS_A_NEW_USER,
    "python3 -m venv": AS_A_NEW_USER,
    ". .venv/bin/activate": AS_A_NEW_USER,
    "ray start": "cluster.yaml",  # whose commands tests/cluster/test_launcher.py runs, over ssh
    "ray up": LAUNCHER,
    # Scripts are their own: that they start and take these options is what is tried here.
    "python benchmarks": f"{HERE}::test_the_scripts_that_documents_name_start",
    "python stress": f"{HERE}::test_the_scripts_that_documents_name_start",
    "python tests/support": f"{HERE}::test_the_scripts_that_documents_name_start",
    "python tools": f"{HERE}::test_the_scripts_that_documents_name_start",
    "python -m benchmarks.families": "tests/unit/test_hf_families.py::test_the_command_writes_the_table_of_the_page",
    "python -m outrider": "tests/unit/test_as_a_module.py::test_it_is_called_as_it_was_called",
    "python -m benchmarks.race": "tests/unit/test_race.py::test_the_command_starts",
    "python -m benchmarks.shapes": "benchmarks/classics.py",
    "python examples/evaluation_harness.py": "tests/unit/test_evaluation_harness.py",
}
# What is spelled for the reader's machine, or belongs to the older tools.
NOT_OURS = (
    "ray attach",  # a shell on the head, for a person
    "pip install bitsandbytes accelerate",
    "pip install torchao",
    "pip install lm_eval",
    "pip install 'outrider[cluster]'",  # from an index that has outrider
    "pip install 'outrider[data]'",
    "pip install 'outrider[ipex]'",
    "pip install 'outrider[plot]'",
    "pip install 'outrider[serve]'",
    "pip install 'ray[default]'",
    "python run_assisted_generation.py",
    "apt-get install",
    "chmod",
    "numactl -m",  # half a command: a flag of numactl's
    "numactl is not installed",  # a sentence of ours
)
PROGRAMS = ("outrider", "python", "python3", "make", "pip", "ray", "numactl", "nice", "apt-get", "chmod", ".", "git")
WRAPPERS = re.compile(r"(?:[A-Z_]+=\S+ +|nice -n \d+ +|numactl(?: -[mNC] [\d-]+)+ +)+(?=\S)")
# Options of other programs that documents speak of by themselves.
OF_OTHERS = {
    "--address": "ray start",
    "--head": "ray start",
    "--labels": "ray start",
    "--metrics-export-port": "ray start",
    "--pids-limit": "docker run",
    "--resources": "ray start",
    "--temp-dir": "ray start",
}


class Command(NamedTuple):
    page: str
    text: str


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Mark and text of each block of a page."""
    for found in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", page.read_text(), re.M):
        yield found[1].strip(), found[2]


def spans(page: Path) -> Iterator[str]:
    """What stands in backticks, a line's end in it taken as a space."""
    text = re.sub(r"^```.*\n(?:.*\n)*?```$", "", page.read_text(), flags=re.M)
    for found in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        yield " ".join(found[1].replace("\\|", "|").split())


def pieces(line: str) -> Iterator[str]:
    """The commands of a line of shell, without comments and what is done with their output."""
    line = re.sub(r"(^|\s)#.*", "", line)
    for part in re.split(r"&&|;", line):
        if bare := WRAPPERS.sub("", re.split(r" [|>] ", part)[0].strip(), count=1):
            yield bare


@cache
def commands() -> list[Command]:
    found = []
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        found += [Command(name, inner) for inner in re.findall(r"\$\((outrider [^)]+)\)", page.read_text())]
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for mark, text in blocks(page):
            if mark == "sh":
                found += [Command(name, piece) for line in text.replace("\\\n", " ").splitlines() for piece in pieces(line)]
        for span in spans(page):
            bare = WRAPPERS.sub("", span, count=1)
            words = bare.split()
            if len(words) > 1 and words[0] in PROGRAMS:
                found.append(Command(name, bare))
    return found


def runner_of(command: str) -> str | None:
    """The entry of RUN_BY that this command falls under."""
    fitting = [key for key in RUN_BY if command == key or command.startswith((f"{key} ", f"{key}/"))]
    return max(fitting, key=len, default=None)


@cache
def options_of(path: Path) -> set[str]:
    """Whatever stands in a script and those beside it that it imports, as a word that may be an option."""
    texts = [path.read_text()]
    names = re.findall(r"^(?:from|import) (?:\w+\.)*(\w+)", texts[0], re.M)
    texts += [(path.parent / f"{name}.py").read_text() for name in names if (path.parent / f"{name}.py").exists()]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    said = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    # Options that are made from the fields of a class.
    said |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return {f"--{word.removeprefix('--').replace('_', '-')}" for word in said if re.fullmatch(r"[\w-]+", word)}


# The command line as a tree of commands. Which classes these are (Click's or Typer's own) depends on Typer's version.
OUTRIDER: Any = typer.main.get_command(app)


def flags(command: Any) -> set[str]:
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def all_flags() -> set[str]:
    return {flag for command in [OUTRIDER, *OUTRIDER.commands.values()] for flag in flags(command)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_block_says_what_it_is(page: Path) -> None:
    marks = [mark for mark, _ in blocks(page)]
    assert set(marks) <= MARKS, f"{page.name}: a block begins with ``` and one of {sorted(MARKS)}"
    assert page.read_text().count("\n```") == 2 * len(marks), "a block does not end"


def test_each_command_is_run_by_somebody() -> None:
    assert len(commands()) > 60
    nobody = [each for each in commands() if not each.text.startswith(NOT_OURS) and runner_of(each.text) is None]
    assert nobody == [], "name who runs them in RUN_BY"
    used = {runner_of(each.text) for each in commands()}
    assert RUN_BY.keys() - used == set(), "no page names these commands any more"


def test_who_runs_them_does_so() -> None:
    """It has the command as it is typed, or its subcommand as a word by itself, and all that follows."""
    wrong = []
    for command, who in RUN_BY.items():
        text, (program, *words) = source(who), command.split()
        called = any(each in text for each in (f"{program} {words[0]}", f'"{program}", "{words[0]}"', f'"{words[0]}"'))
        if not who.startswith(HERE) and not (called and all(word in text for word in words[1:])):
            wrong.append(f"{command}: not in {who}")
    assert wrong == []


def source(who: str) -> str:
    """The text of a test, or of a script; the new user types what README.md has."""
    file, _, test = who.partition("::")
    text = (ROOT / file).read_text()
    if who == AS_A_NEW_USER:
        return text + "\n".join(block for mark, block in blocks(ROOT / "README.md") if mark == "sh")
    if not test:
        return text
    [found] = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef) and each.name == test]
    return ast.get_source_segment(text, found) or ""


def test_outrider_takes_the_options_that_it_is_shown_with() -> None:
    shown = [each for each in commands() if each.text.startswith("outrider ")]
    assert len(shown) > 40
    wrong = {(each.page, each.text): said for each in shown if (said := complaint(each.text)) is not None}
    assert wrong == {}


def complaint(command: str) -> str | None:
    """What outrider has against a command, but for whether its files are there; None if nothing."""
    words = shlex.split(command.replace("…", " "))[1:]
    if words[0].startswith("-") or words[0] == "COMMAND":
        words = [word for word in words if word not in ("COMMAND", "--version", "--help")]
        return f"unknown: {words}" if words else None
    if words[0] not in OUTRIDER.commands:
        return "there is no such command"
    called, run = OUTRIDER.commands[words[0]], OUTRIDER.commands["run"]
    known = flags(called) | (flags(run) if words[0] in ("submit", "retry") else set())
    given = {found.partition("=")[0] for found in re.findall(r"(?<!\S)\[?(--?[a-zA-Z][\w-]*)", " ".join(words))}
    if given - known:
        return f"unknown: {given - known}"
    if re.search(r"[\[\]|…]", command) or len(words) == 1:
        return None  # a pattern, or the bare name
    try:
        parsed = called.make_context(words[0], [word for word in words[1:] if word != "--help"])
        if words[0] in ("submit", "retry"):  # the rest is run's
            run.make_context("run", list(parsed.args))
    except Exception as error:  # Click's, or Typer's own
        return f"{type(error).__name__}: {error}"
    return None


def test_an_option_that_is_spoken_of_is_an_option_of_some_command() -> None:
    scripts = {flag for script in [*scripts_named(), *modules_named()] for flag in options_of(ROOT / script)}
    known = all_flags() | OF_OTHERS.keys() | scripts
    spoken = {
        (page.name, found)
        for page in PAGES
        for span in spans(page)
        if span.startswith("-")
        for found in re.findall(r"--[a-z][\w-]*", span)
    }
    assert len(spoken) > 50
    assert {each for each in spoken if each[1] not in known} == set()


def test_every_option_stands_on_some_page_that_tells_what_it_is_for() -> None:
    told = "\n".join(page.read_text() for page in PAGES if page.name != "troubleshooting.md")
    # By one of its spellings; one that is on by default by what switches it off.
    options = [
        (name, [flag for flag in (*each.opts, *each.secondary_opts) if flag.startswith("--")])
        for name, command in OUTRIDER.commands.items()
        for each in command.params
        if each.param_type_name == "option"
    ]
    assert len(options) > 150
    known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", told))
    assert [(name, flags) for name, flags in options if not known & set(flags)] == []


def scripts_named() -> list[str]:
    found = {words[1] for each in commands() if (words := each.text.split())[0] == "python" and words[1].endswith(".py")}
    return sorted(script for script in found if (ROOT / script).exists())


def modules_named() -> list[str]:
    modules = {words[2] for each in commands() if (words := each.text.split())[:2] == ["python", "-m"]}
    paths = (f"{module.replace('.', '/')}/__main__.py" for module in modules)
    return sorted(path for path in paths if (ROOT / path).exists())


def test_scripts_take_the_options_that_they_are_shown_with() -> None:
    wrong = []
    for command in commands():
        words = command.text.split()
        # The command's own options are tried above.
        if words[0] != "python" or command.text.startswith(NOT_OURS) or words[1:3] == ["-m", "outrider"]:
            continue
        module = words[1] == "-m"
        path = ROOT / words[2].replace(".", "/") / "__main__.py" if module else ROOT / words[1]
        assert path.exists(), command
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        wrong += [(command, flag) for flag in given - options_of(path)]
    assert wrong == []


# What a script needs that is not installed for the tests.
NEEDED = {"examples/evaluation_harness.py": "lm_eval"}


# Each script in a copy of a process that has loaded what most of them load first, for seconds.
STARTER = """
import os, runpy, sys
import ray, transformers.modeling_utils
import outrider.workers.actors, outrider.workers.build, outrider.workers.models.opening
for script in sys.argv[1:]:
    if os.fork() == 0:
        sys.path[0], sys.argv = os.path.dirname(script), [script, "--help"]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            sys.stdout.flush()
            # Without taking all that apart again.
            os._exit(ended.code or 0)
        sys.exit("it went on without a word of help")
    print("=" * 9, script, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.slow
def test_the_scripts_that_documents_name_start() -> None:
    scripts = [str(ROOT / name) for name in scripts_named() if name not in NEEDED or find_spec(NEEDED[name])]
    done = subprocess.run(
        [sys.executable, "-c", STARTER, *scripts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    ended = re.findall(r"^={9} (\S+) (-?\d+)$", done.stdout, re.M)
    assert ended == [(script, "0") for script in scripts], done.stdout + done.stderr
    assert done.stdout.count("usage: ") >= len(scripts) > 15


def test_make_knows_the_targets_that_documents_name() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = {line.split()[0] for line in listed.splitlines() if line.strip()}
    named = {words[1] for each in commands() if (words := each.text.split())[0] == "make"}
    assert named - targets == set()
    done = subprocess.run(["make", "--dry-run", *sorted(named)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(OUTRIDER.commands))
def test_each_command_has_help(name: str) -> None:
    command = OUTRIDER.commands[name]
    assert (command.help or "").strip()
    assert [each.name for each in command.params if each.param_type_name == "option" and not each.help] == []
