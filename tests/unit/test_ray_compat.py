"""Uses of Ray's internals: all in one module, present in the installed Ray, and refused with a sentence where missing."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import services, worker
from ray.core.generated import common_pb2
from ray.job_config import JobConfig

from outrider.runner.hosts import doctor, ray_start
from outrider.runner.hosts.ray_start import joined_ray, local_ray
from outrider.workers import ray_compat
from outrider.workers.errors import JobError, RayUnsupportedError

ROOT = Path(__file__).resolve().parents[2]
ALL = (
    ray_compat.APART,
    ray_compat.LOOPBACK,
    ray_compat.SMALLER,
    ray_compat.NO_DASHBOARD,
    ray_compat.NO_METRICS,
    ray_compat.OWN_LIBRARIES,
    ray_compat.COMMAND_LINE,
    *ray_compat.QUIET,
)
PRIVATE = re.compile(r"ray\._|ray\.experimental|ray\.internal|_raylet|_global_node|global_worker|core_worker")

SPEAKS_OF_RAY = re.compile(rf"\bray\b|{PRIVATE.pattern}")


def uses(source: str) -> Iterator[str]:
    """What a module imports or reaches for of Ray's private parts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value.strip():
            names = [node.value] if node.value.startswith(("ray.", "_")) else []
        else:
            continue
        yield from (name for name in names if PRIVATE.search(name))


def test_one_module_knows_the_private_parts_of_ray() -> None:
    sources = {path: path.read_text() for folder in ("runner", "workers") for path in (ROOT / folder).rglob("*.py")}
    # Parsing takes most of the time.
    found = {path.name for path, source in sources.items() if SPEAKS_OF_RAY.search(source) and any(uses(source))}
    assert found == {"ray_compat.py"}


@pytest.mark.parametrize(
    "source",
    ["import ray._private.worker", "from ray._raylet import GcsClient", "def f(ray):\n  return ray._private.services.x",
     "getattr(ray, '_global_node')", "from ray.experimental.channel import x"],
)  # fmt: skip
def test_a_private_use_is_seen(source: str) -> None:
    assert list(uses(source))


def test_the_ray_that_is_installed_has_all_of_them() -> None:
    before = [ray_compat.find(change.module, change.name, change.purpose) for change in ALL]
    with ray_compat.replaced(*ALL):
        assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
        assert ray._private.utils.get_dashboard_dependency_error()
    assert [ray_compat.find(change.module, change.name, change.purpose) for change in ALL] == before


@pytest.mark.parametrize("change", ALL, ids=lambda change: change.name)
def test_a_ray_without_one_of_them_is_not_started(change: ray_compat.Replacement, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: Any) -> None:
        raise AssertionError("Ray was started without what keeps it safe")

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
    module, _, inner = change.name.rpartition(".")
    holder = ray_compat.find(change.module, module, "") if module else sys.modules[change.module]
    monkeypatch.delattr(holder, inner)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr("outrider.runner.hosts.ray_start.abandon", lambda: None)
    sentence = (
        f"^Ray {re.escape(ray.__version__)} has no {re.escape(change.module)}.{re.escape(change.name)}, which outrider "
        rf"needs to .+: install one that it knows, pip install 'ray>={ray_compat.OLDEST},<{ray_compat.BELOW}'$"
    )
    with pytest.raises(RayUnsupportedError, match=sentence), local_ray(1, {}):
        raise AssertionError("it was taken for safe")


def test_workers_are_not_told_of_the_drivers_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a file numpy.py in one of them, none came up."""
    job = JobConfig(_py_driver_sys_path=["/where/the/program/lies"])
    with ray_compat.replaced(ray_compat.OWN_LIBRARIES):
        job._py_driver_sys_path.append(str(Path.cwd()))
        told = common_pb2.JobConfig.FromString(job._serialize())
    assert not told.py_driver_sys_path
    other = JobConfig(_py_driver_sys_path=["/a"])
    assert common_pb2.JobConfig.FromString(other._serialize()).py_driver_sys_path == ["/a"], "it has not been put back"
    del other._py_driver_sys_path
    with (
        ray_compat.replaced(ray_compat.OWN_LIBRARIES),
        pytest.raises(RayUnsupportedError, match=r"no ray\.job_config\.JobConfig\._py_driver_sys_path, which"),
    ):
        other._serialize()


def test_a_command_line_that_is_not_utf8_reaches_ray_in_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path may hold any bytes. Ray did not start where one stood on the command line."""
    monkeypatch.setattr("ray._private.utils.get_entrypoint_name", lambda: "outrider run in.jsonl -o \udcff")
    with ray_compat.replaced(ray_compat.COMMAND_LINE):
        assert ray._private.utils.get_entrypoint_name() == "outrider run in.jsonl -o \\udcff"


@pytest.mark.parametrize("begin", [lambda folder: ray_start._start(folder, 1, {}, None),
                                   lambda folder: joined_ray("127.0.0.1:9").__enter__()],
                         ids=["own", "cluster"])  # fmt: skip
def test_neither_those_of_an_own_ray_nor_those_of_a_cluster(
    begin: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
    told: list[Any] = []

    def init(**_: Any) -> None:
        told.append(common_pb2.JobConfig.FromString(JobConfig(_py_driver_sys_path=["/a"])._serialize()))
        raise KeyboardInterrupt

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(ray_start, "answers_within", lambda address, seconds: True)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path)
    assert [list(each.py_driver_sys_path) for each in told] == [[]]


def test_a_ray_whose_servers_cannot_be_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(all_processes={"raylet": []}))
    with pytest.raises(RayUnsupportedError, match="_global_node: 'gcs_server', which outrider needs to notice"):
        ray_compat.own_node()
    monkeypatch.delattr(worker, "_global_node")
    with pytest.raises(RayUnsupportedError, match=r"_global_node, which outrider needs to notice that Ray has died"):
        ray_compat.own_node()


@pytest.mark.parametrize(
    "part",
    ["ray.experimental.channel.shared_memory_channel.BufferedSharedMemoryChannel",
     "ray._private.serialization.RawSerializedObject"],
)  # fmt: skip
def test_without_shared_memory_the_part_that_lacks_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.global_worker, "core_worker", SimpleNamespace(get_objects=None), raising=False)
    with pytest.raises(RayUnsupportedError, match=r"has no core_worker\.experimental_channel_put_serialized, which"):
        ray_compat.channels()
    monkeypatch.delattr(part)
    with pytest.raises(RayUnsupportedError, match=f"has no {re.escape(part)}, which outrider needs to pass requests"):
        ray_compat.channels()


def test_the_range_of_rays_is_declared_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["cluster"], *extras["test"]]
    bounds = f">={ray_compat.OLDEST},<{ray_compat.BELOW}"
    assert [each for each in named if each.startswith("ray")] == [f"ray{bounds}", *[f"ray[default]{bounds}"] * 2]
    assert f"OLDEST_RAY := {ray_compat.OLDEST}" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(
    ("version", "state"), [("2.51.9", doctor.WRONG), ("2.52.0", doctor.OK), ("2.60.3", doctor.OK), ("2.61.0", doctor.WRONG)]
)
def test_doctor_knows_the_range(version: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda _: version)
    [check] = [each for each in doctor._ray(SimpleNamespace()) if each.name == "Ray"]  # type: ignore[arg-type]
    assert check.state == state
    assert state == doctor.OK or check.mend == f"pip install 'ray>={ray_compat.OLDEST},<{ray_compat.BELOW}'"


def test_the_longest_path_of_a_socket_is_what_ray_makes() -> None:
    # As Ray's own code names a session; that a real one fits is for the test that starts a Ray.
    assert ray_compat.longest_below_folder() == len("session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")


def test_a_raylet_is_known_by_its_command() -> None:
    assert ray_compat.session_folder_of(["/x/raylet", "--node_id=1", "--session_dir=/tmp/ray/s"]) == Path("/tmp/ray/s")
    assert ray_compat.session_folder_of(["/x/sleep", "--session_dir=/tmp/ray/s"]) is None
    assert ray_compat.session_folder_of([]) is None


def test_interrupted_amid_rays_import_nothing_imports_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What such an import leaves behind cannot be imported: that was a traceback in place of the interrupt's sentence."""
    monkeypatch.delitem(sys.modules, "ray")

    def refuse(name: str) -> Any:
        raise AttributeError(f"partially initialized module: {name}")

    monkeypatch.setattr(ray_compat.importlib, "import_module", refuse)
    ray_compat.forget_at_exit()


def test_a_ray_of_the_jobs_own_is_asked_for_nothing_of_a_submitted_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ray_start.OF_A_SUBMITTED_JOB, "{}")
    seen: list[bool] = []

    def init(**_: Any) -> None:
        seen.append(ray_start.OF_A_SUBMITTED_JOB in os.environ)
        raise KeyboardInterrupt

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(KeyboardInterrupt):
        ray_start._start(tmp_path, 1, {}, None)
    assert seen == [False]


@pytest.mark.parametrize("folder", ["Bob's", "a\\b"])
def test_an_environment_whose_path_ray_misreads_is_refused_at_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited half a minute for servers that never came up, three times."""
    monkeypatch.setattr(sys, "executable", f"/home/{folder}/bin/python")
    with (
        pytest.raises(JobError, match=r"^Ray cannot be started from /home/.*/bin/python, since it misreads"),
        local_ray(1, {}),
    ):
        pass
