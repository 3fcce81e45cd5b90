"""Which tests run where: each file that starts a Ray in one stream of CI (tools/all_tests.py), and of a list of parameters
each n-th in the fast set."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples import diagonal

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import all_tests

ROOT = all_tests.ROOT


def files_of(tests: all_tests.Tests) -> set[str]:
    """Those that its command collects of the folders whose tests start a Ray."""
    left_out = {place.removeprefix("--ignore=") for place in tests.places if place.startswith("--ignore=")}
    places = [ROOT / place for place in tests.places if not place.startswith("--ignore=")]
    assert all(place.exists() for place in places)
    files = {str(file.relative_to(ROOT)) for place in places for file in [place, *place.rglob("test_*.py")]}
    return {file for file in files - left_out if file.startswith(("tests/ray/", "tests/cluster/"))}


def test_each_file_of_jobs_and_of_hosts_runs_once() -> None:
    sets = [tests for stream in all_tests.STREAMS for tests in stream.sets]
    slow = [tests for tests in sets if tests.marks.startswith("slow") and "not ray" not in tests.marks]
    found = Counter(file for tests in slow for file in files_of(tests))
    files = [file for folder in ("ray", "cluster") for file in (ROOT / "tests" / folder).glob("test_*.py")]
    every = {str(file.relative_to(ROOT)) for file in files}
    assert found == Counter(every)


def test_streams_that_start_a_ray_are_apart_and_logs_have_names_of_their_own() -> None:
    sets = [(tests, stream) for stream in all_tests.STREAMS for tests in stream.sets]
    for tests, stream in sets:
        with_ray = "not ray" not in tests.marks and tests.places != ("tests/unit",)
        assert (stream.within is all_tests.APART) == with_ray, tests.name
    assert len({tests.name for tests, _ in sets}) == len(sets)


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (0, None, 0),
        (1, 0, 0),  # two cores were few for a deadline
        (1, 1, 1),
        (2, None, 1),  # not run to its end
        (-9, None, 1),
        (5, None, 1),  # no test at all
        (FileNotFoundError("no such Python"), None, 1),
    ],
)
def test_only_failed_tests_have_a_second_turn(
    first: int | OSError, second: int | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[bool] = []

    def run(tests: all_tests.Tests, within: Sequence[str], logs: Path, again: bool = False) -> int:
        if tests.name != "computing":
            return 0
        turns.append(again)
        found = second if again else first
        if isinstance(found, OSError):
            raise found
        assert found is not None, "this one has no second turn"
        return found

    monkeypatch.setattr(all_tests, "run", run)
    monkeypatch.setattr(all_tests, "can", lambda words: True)
    monkeypatch.setattr("threading.excepthook", lambda failure: None)
    monkeypatch.setattr(sys, "argv", ["all_tests", "--logs", str(tmp_path)])
    (old := tmp_path / "cache-computing" / "v").mkdir(parents=True)
    assert all_tests.main() == code
    assert turns == ([False] if second is None else [False, True])
    assert not old.exists()


@pytest.fixture(params=["fixture", "of", "three"])
def third(request: pytest.FixtureRequest) -> int:
    return ["fixture", "of", "three"].index(request.param)


PAIRS = [("a", 0), pytest.param("b", 1), ("c", 2)]


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize(("name", "also"), PAIRS)
def test_a_test_has_a_place_in_each_of_its_lists(
    name: str, also: int, alone: int, third: int, request: pytest.FixtureRequest
) -> None:
    """What one_in(n) goes by. By places among all combinations, one_in(2) would leave out nothing of two lists."""
    assert diagonal(request.node) == also + alone + third


@pytest.mark.parametrize("name, also", iter(PAIRS))
def test_a_list_that_is_gone_after_its_first_use_is_seen(name: str, also: int, request: pytest.FixtureRequest) -> None:
    with pytest.raises(LookupError, match="has it an iterator for a list"):
        diagonal(request.node)
