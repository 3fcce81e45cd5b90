"""The tree of errors: every class pickles, and the picture in the docstring is the truth."""

from __future__ import annotations

import errno
import inspect
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outrider
from outrider.workers import errors
from outrider.workers.errors import InputError, JobError, OutriderError, RayLostError, UsageError

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, OutriderError)]


def drawn_tree() -> dict[str, str | None]:
    """Each class of the docstring's picture with the class that it hangs from."""
    parents: dict[str, str | None] = {}
    stack: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([\s│├└─]*)(\w+Error)\b", line)
        if match:
            depth = len(match[1])
            stack = [entry for entry in stack if entry[0] < depth]
            parents[match[2]] = stack[-1][1] if stack else None
            stack.append((depth, match[2]))
    return parents


def test_the_drawn_tree_is_complete_and_right() -> None:
    real = {cls.__name__: None if cls is OutriderError else cls.__bases__[0].__name__ for cls in CLASSES}
    assert drawn_tree() == real


def test_a_sentence_with_a_path_that_is_no_utf8_can_be_encoded() -> None:
    """Ray, which cannot send others, ended the actor that raised it."""
    error = JobError(f"{os.fsdecode(b'm' + bytes([0xE4]))} cannot be loaded")
    assert str(pickle.loads(pickle.dumps(error))).encode() == b"m\\udce4 cannot be loaded"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_survive_a_pickle(cls: type[OutriderError]) -> None:
    error = cls("one sentence", ["a:1: first", "a:2: second"])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert copy.args == error.args
    assert str(copy) == "one sentence"
    assert copy.exit_code == cls.exit_code


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_exit_codes_are_the_designs(cls: type[OutriderError]) -> None:
    other = 130 if cls is errors.JobStoppedError else 1
    assert cls.exit_code == (2 if issubclass(cls, errors.UsageError) else other)


def test_lines_of_an_input_error() -> None:
    assert InputError("two rows are wrong", ["a:1: x", "a:2: y"]).lines == ["a:1: x", "a:2: y"]
    assert InputError("none named").lines == []


def test_an_error_without_words_still_has_a_name() -> None:
    assert str(errors.JobError()) == "JobError"


@pytest.mark.parametrize(
    ("said", "kind"), [("The current node timed out during startup.", RayLostError), ("The disk is full.", JobError)]
)
def test_a_ray_that_does_not_come_up_is_one_sentence(
    said: str, kind: type[JobError], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from outrider.runner.hosts.ray_start import local_ray

    def failing(**_: object) -> None:
        raise Exception(f"{said}\nMore of it.")  # as Ray does

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(ray, "init", failing)
    sentence = f"^Ray could not be started on this machine: {said.rstrip('.')}$"
    with pytest.raises(JobError, match=sentence) as caught, local_ray(1, {}):
        raise AssertionError("it did not come up")
    assert type(caught.value) is kind


@pytest.mark.parametrize(("number", "said"), [(errno.ENETUNREACH, "interface is down"), (errno.EMFILE, "it was asked for")])
def test_a_loopback_interface_that_is_down_is_said_before_ray_waits_for_it(
    number: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from outrider.runner.hosts.ray_start import local_ray

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    def init(**_: object) -> None:
        raise JobError("it was asked for")

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(JobError, match=said), local_ray(1, {}):
        raise AssertionError("it did not come up")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("command", ["run /a/file", "score /a/file -m pocket"])
def test_a_working_directory_that_is_gone_is_one_sentence(command: str, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    program = "from outrider.runner.cli.main import main; main()"
    begin = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec {sys.executable} -P -c '{program}' {command}"
    done = subprocess.run(["bash", "-c", begin], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == "outrider: the working directory no longer exists: cd to one that does"
    assert "Traceback" not in done.stderr


def test_from_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a FileNotFoundError that named no file."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in (lambda: outrider.run(["a"], out=tmp_path / "job"), lambda: outrider.open("job")):
        with pytest.raises(UsageError, match=r"^the working directory no longer exists: cd to one that does$"):
            call()
