"""``outrider doctor`` and ``outrider topology`` as a person and a program see them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from built_once import CliRunner
from sysfs_trees import accelerator, build, write
from test_model_choice import DRAFT, Willing

from outrider.runner.cli.main import app
from outrider.runner.hosts import doctor
from outrider.runner.hosts.doctor import BETTER, CHECKS, OK, WRONG, Check, MachineFiles, examine
from outrider.runner.planning.topology import read_topology
from outrider.workers.errors import PlacementError, UsageError
from outrider.workers.machine import core_leases as leases
from outrider.workers.machine import pin_check, pinning
from outrider.workers.messages import ModelSpec
from outrider.workers.models import ipex
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.model_memory import ModelMemory


def answer(*words: str) -> Any:
    done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    return json.loads(done.stdout)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MachineFiles:
    """A machine of two nodes on which everything is in order, but for what a test breaks."""
    tree = build(tmp_path, {0: [(0, 2)], 1: [(1, 3)]}, {0: 0, 1: 1})
    write(tree / "kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    write(tmp_path / "proc/cpuinfo", "processor : 0\nflags : fpu avx2 fma avx512_vnni")
    monkeypatch.setattr(leases, "default_folder", lambda: tmp_path)
    return MachineFiles(read_topology(tree), tree, tmp_path / "proc", tmp_path)


def check(files: MachineFiles, name: str) -> Check:
    return next(each for each in examine(files) if each.name == name)


def test_shared_memory_in_which_no_job_can_start_is_wrong(files: MachineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(files.shared_memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=64 << 10))
    full = check(files, "shared memory")
    assert (full.state, full.found.partition(" in ")[0]) == (WRONG, "64 KiB free")
    assert "--shm-size" in full.mend
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    read_only = check(files, "shared memory")
    assert (read_only.state, read_only.found) == (WRONG, f"{files.shared_memory} cannot be written: no job can be started")


def test_limits_under_which_no_job_runs_are_wrong(files: MachineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line was "ok" where the next command, a job, was refused at once."""
    assert check(files, "limits").state == OK
    known = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (30, 30) if limit == resource.RLIMIT_NOFILE else known(limit))
    low = check(files, "limits")
    assert low == Check(
        "limits", WRONG, "ulimit -n allows 30 open files, and a job here needs 128 at least", "ulimit -n 128"
    )


def test_a_cache_of_packed_weights_that_cannot_be_kept_is_named(
    files: MachineFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "not made yet"))
    assert check(files, "packed weights") == Check("packed weights", OK, f"kept in {tmp_path / 'not made yet'}")
    monkeypatch.setenv("OUTRIDER_CACHE_GB", "much")
    wrong = check(files, "packed weights")
    assert (wrong.state, wrong.found.partition(" is ")[0]) == (WRONG, 'OUTRIDER_CACHE_GB="much"')
    monkeypatch.setenv("OUTRIDER_CACHE_GB", "0")
    assert check(files, "packed weights").state == OK
    monkeypatch.delenv("OUTRIDER_CACHE_GB")
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "in it", tmp_path / ("long" * 100)):
        monkeypatch.setenv("OUTRIDER_CACHE", str(place))
        unkept = check(files, "packed weights")
        assert (unkept.state, unkept.found) == (BETTER, f"{place} cannot be written: each start packs them")
        assert unkept.mend


def test_every_line_has_a_state_and_every_wrong_one_a_remedy() -> None:
    found = examine()
    assert {each.state for each in found} <= {OK, BETTER, WRONG}
    assert all(each.found for each in found)
    assert all(each.mend for each in found if each.state == WRONG)
    names = {each.name for each in found}
    assert names >= {"numactl", "libnuma", "tcmalloc", "libiomp5", "huge pages", "CPU governor", "SMT", "container"}
    assert names >= {"kernels", "instruction set", "Ray", "Ray's auth", "IPEX", "accelerators"}


def test_memory_that_others_use_is_what_a_plan_counts_on(files: MachineFiles) -> None:
    assert check(files, "memory").state == BETTER
    there = sum(node.memory_bytes or 0 for node in files.topology.nodes)
    for free, state in ((there * 6 // 10, OK), (there * 4 // 10, BETTER)):
        write(files.proc / "meminfo", f"MemTotal: {there // 1024} kB\nMemAvailable:   {free // 1024} kB")
        found = check(files, "memory")
        assert (found.state, bool(found.mend)) == (state, state != OK)
        assert found.found.startswith(f"{free / 1e9:.1f} GB free of {there / 1e9:.1f}")


def test_devices_that_cannot_be_told_apart(files: MachineFiles) -> None:
    refused = 'CUDA_VISIBLE_DEVICES names "MIG-0" by UUID, which is a part of a device; give numbers'
    found = check(replace(files, topology=replace(files.topology, accelerators_refused=refused)), "accelerators")
    assert found == Check("accelerators", BETTER, refused.partition("; ")[0], "give numbers")


def test_no_numactl(files: MachineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert check(files, "numactl").state == BETTER
    assert "apt-get install numactl" in check(files, "numactl").mend


def test_a_numactl_that_may_not_bind(files: MachineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(pinning, "_attempt", lambda command, _: "not permitted" if "--membind=0" in command else None)
    found = check(files, "numactl")
    assert found.state == BETTER
    assert "not permitted" in found.found
    assert "SYS_NICE" in found.mend


def test_no_libnuma(files: MachineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_check, "libnuma", lambda: None)
    assert check(files, "libnuma").mend == "sudo apt-get install libnuma1"


def test_huge_pages(files: MachineFiles) -> None:
    assert check(files, "huge pages").state == OK
    write(files.sys / "kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    assert check(files, "huge pages").found == "switched off: weights lie in pages of 4 KiB"
    (files.sys / "kernel/mm/transparent_hugepage/enabled").unlink()
    assert check(files, "huge pages").found.startswith("not known: ")
    (files.sys / "kernel/mm/transparent_hugepage").rmdir()
    assert check(files, "huge pages").found.startswith("this kernel has no transparent huge pages")
    (files.sys / "kernel/mm").rmdir()
    assert check(files, "huge pages").found.startswith("not known: ")


def test_governor(files: MachineFiles) -> None:
    assert check(files, "CPU governor").state == OK
    for cpu, governor in ((0, "performance"), (1, "powersave")):
        write(files.sys / f"devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", governor)
    found = check(files, "CPU governor")
    assert (found.state, found.found) == (BETTER, "performance, powersave")
    assert "cpupower" in found.mend


def test_numa_balancing(files: MachineFiles) -> None:
    write(files.proc / "sys/kernel/numa_balancing", "1")
    assert check(files, "NUMA balancing").mend == "sudo sysctl kernel.numa_balancing=0"


def test_instruction_sets(files: MachineFiles) -> None:
    assert check(files, "instruction set").found == "AVX-512 VNNI, AVX2"
    write(files.proc / "cpuinfo", "flags : fpu")
    assert check(files, "instruction set").state == BETTER


def test_missing_kernels_are_no_error(files: MachineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.kernels import library

    monkeypatch.setattr(library, "library_path", lambda: None)
    found = check(files, "kernels")
    assert found.state == BETTER
    assert "hf engine" in found.found


def test_kernels_of_another_interface_are(files: MachineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.kernels import library

    def refuse() -> None:
        raise library.KernelsUnavailable("has kernel interface 7, this outrider needs 1")

    monkeypatch.setattr(library, "library_path", lambda: Path("x.so"))
    monkeypatch.setattr(library, "load", refuse)
    found = check(files, "kernels")
    assert (found.state, found.mend) == (
        WRONG,
        "pip install . in the checkout, with a C++ compiler at hand, or a wheel",
    )


def test_an_instruction_set_that_is_not_there_is_no_fault_of_the_kernels(
    files: MachineFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.kernels import library

    said = "OUTRIDER_ISA=avx512 is not an instruction set of this machine, which has: avx2 generic"

    def refuse() -> str:
        raise library.KernelError("unsupported", said)

    monkeypatch.setattr(library, "library_path", lambda: Path("x.so"))
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(library, "instruction_set", refuse)
    assert check(files, "kernels") == Check("kernels", WRONG, said, "unset OUTRIDER_ISA, or name one of those")


def test_open_clusters_are_wrong(files: MachineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setattr(Path, "home", lambda: files.shared_memory)
    assert check(files, "Ray's auth").state == WRONG
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert check(files, "Ray's auth").mend == "outrider token", "which does not print it"


def test_a_token_is_set_where_its_file_holds_one(
    files: MachineFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    found = f"RAY_AUTH_TOKEN_PATH names {tmp_path / 'token'}, which holds no token; a cluster (--address) needs one"
    assert check(files, "Ray's auth") == Check("Ray's auth", BETTER, found, "outrider token")
    (tmp_path / "token").write_text("secret")
    assert check(files, "Ray's auth").state == OK


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that other users get to, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize(("mode", "state"), [(0o777, WRONG), (0o755, WRONG), (0o750, WRONG), (0o700, OK)])
def test_a_ray_whose_folder_is_open_to_others_is_wrong(files: MachineFiles, reachable: Path, mode: int, state: str) -> None:
    session = reachable / "ray" / "session_1"
    session.mkdir(parents=True)
    (reachable / "ray").chmod(mode)
    words = ("/x/raylet", "--raylet_socket_name=s", f"--session_dir={session}", "")
    for node in ("4711", "4712"):
        (files.proc / node).mkdir()
        (files.proc / node / "cmdline").write_text("\0".join(words))
    [found] = [each for each in examine(files) if each.name == "Ray's folder"]
    assert found.state == state
    if state == WRONG:
        assert f"Ray's folder {reachable}/ray is open to other users of the host" in found.found
        assert found.mend.startswith(f"chmod 700 {reachable}/ray, and later ray start --temp-dir=")
    else:
        assert found.found == f"{reachable}/ray is closed to other users"


def test_held_cores_are_named(files: MachineFiles, tmp_path: Path) -> None:
    with leases.claim(["1"], folder=tmp_path):
        assert "core 1 is held by process" in check(files, "cores").found


def test_a_check_that_fails_is_a_line(files: MachineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def _broken_thing(_: MachineFiles) -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(doctor, "CHECKS", (*CHECKS, _broken_thing))
    assert check(files, "broken thing") == Check("broken thing", BETTER, "could not be looked at: no such luck")


def test_ipex_is_reported_as_it_is(files: MachineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = importlib.metadata.version("torch").split("+")[0]
    said = {None: "not installed; neither engine needs it", torch: f"{torch}: models of the hf engine go through it"}
    for version, found in said.items():
        monkeypatch.setattr(ipex, "version", lambda version=version: version)
        assert check(files, "IPEX").found.startswith(found)
    monkeypatch.setattr(ipex, "version", lambda: "1.13.0")
    other = check(files, "IPEX")
    assert (other.state, other.found[:58]) == (BETTER, "not used: intel-extension-for-pytorch 1.13.0 is made for t")


def test_doctor_on_this_machine() -> None:
    checks = answer("doctor")
    assert set(checks[0]) == {"name", "state", "found", "mend"}
    done = CliRunner().invoke(app, ["doctor"])
    assert "numactl" in done.stdout


def test_topology_and_plan_as_json(xeon: Path) -> None:
    sizes = ("--model-bytes", "4000000000", "--draft-bytes", "100000000")
    found = answer("topology", "--sysfs", str(xeon), "--plan", "--layout", "split", *sizes)
    assert found["nodes"][1] == {
        "id": 1,
        "socket": 0,
        "cores": [[cpu, cpu + 112] for cpu in range(14, 28)],
        "memory_bytes": 64 << 30,
    }
    assert found["actors"][2] == {
        "role": "target",
        "replica": 1,
        "host": xeon.parent.name,
        "cores": list(range(15, 28)),
        "memory_nodes": [1],
        "device": "cpu",
    }
    assert "actors" not in answer("topology", "--sysfs", str(xeon))


class WillingProcess(Willing):
    """Knows a draft for every target, and one family that the native engine refuses."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def native_refuses(self, path: str) -> str | None:
        return "it cannot" if path == "/models/strange" else None

    def memory_of(self, model: ModelSpec, rows: int, shortlist: int | None = 0) -> ModelMemory | None:
        weights = DRAFT.weight_bytes if model.path == DRAFT.path else 1 << 30
        weights = weights // 4 if model.precision == "w4a8" else weights
        return None if model.engine == "hf" else ModelMemory(weights, 1 << 20, 0, 6144, 256)

    def prepare_pair(
        self, target: str, draft: str, say: Callable[[str], None], native: bool = True
    ) -> tuple[ModelInfo, ModelInfo | None, str, list[str]]:
        found = replace(DRAFT, name=target, path=f"/models/{target}", weight_bytes=1 << 30)
        if draft in ("none", "lookup", "suffix"):
            return found, None, draft, []
        return found, DRAFT, draft, []


@pytest.mark.parametrize(
    ("words", "cores"),
    [
        # They can be moved, so that both get all cores, and how they share them is found out.
        (["-m", "known"], {"target": [0, 1, 2, 3], "draft": [0, 1, 2, 3]}),
        (["-m", "known", "--draft", "model"], {"target": [0, 1, 2, 3], "draft": [0, 1, 2, 3]}),
        (["--model-bytes", "9", "--draft-bytes", "9"], {"target": [0, 1, 2, 3], "draft": [0, 1, 2, 3]}),
        (["-m", "known", "--draft-cores", "1"], {"target": [1, 2, 3], "draft": [0]}),
        (["-m", "strange"], {"target": [1, 2, 3], "draft": [0]}),
        (["-m", "known", "--draft", "none"], {"target": [0, 1, 2, 3]}),
        (["-m", "known", "--draft", "suffix"], {"target": [0, 1, 2, 3]}),
        (["--model-bytes", "9"], {"target": [0, 1, 2, 3]}),
    ],
)
def test_the_plan_is_that_of_a_run(
    words: list[str], cores: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.runner.job.tokenizer_process.PlanningProcess", WillingProcess)
    tree = build(tmp_path, {0: [(0,), (1,), (2,), (3,)]})
    found = answer("topology", "--sysfs", str(tree), "--plan", *words)
    assert {actor["role"]: actor["cores"] for actor in found["actors"]} == cores


def test_a_plan_is_for_the_precision_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte in bf16 fits beside a draft only where it is rounded."""
    monkeypatch.setattr("outrider.runner.job.tokenizer_process.PlanningProcess", WillingProcess)
    tree = build(tmp_path, {0: [(0,)]}, memory={0: 1 << 30})
    words = ["topology", "--sysfs", str(tree), "-m", "known", "--draft", "none"]
    assert isinstance(CliRunner().invoke(app, words).exception, PlacementError)
    assert answer(*words, "--precision", "w4a8")["actors"]


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (
            ["-m", "known"],
            ["256 tokens of each row are counted; each further one takes 6.0 KiB (target) + 6.0 KiB (draft)"],
        ),
        (
            ["-m", "known", "--draft", "none"],
            ["256 tokens of each row are counted; each further one takes 6.0 KiB (target)"],
        ),
        (["-m", "strange", "--draft", "none"], ["the rows' KV cache is not counted"]),
        (["-m", "strange"], ["the rows' KV cache is not counted beside 6.0 KiB a token (draft)"]),
        (["-m", "known", "--kv-bytes", "9"], []),
        (["--model-bytes", "9"], []),
    ],
)
def test_a_plan_says_what_its_memory_leaves_out(
    words: list[str], notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.runner.job.tokenizer_process.PlanningProcess", WillingProcess)
    found = answer("topology", "--sysfs", str(build(tmp_path, {0: [(0,), (1,)]})), "--plan", *words)
    assert found["notes"] == [f"{note}; --kv-bytes sets what is counted" for note in notes]


def test_a_plan_counts_processes_and_the_first_tokens_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte of weights, 8 rows of 256 tokens at 6 KiB each: 13 MB. Beside it 0.1 GB for the process."""
    monkeypatch.setattr("outrider.runner.job.tokenizer_process.PlanningProcess", WillingProcess)
    words = ["topology", "-m", "known", "--draft", "none", "--sysfs"]

    def refusal(memory: int, *more: str) -> str:
        tree = build(tmp_path / f"{memory}{len(more)}", {0: [(0,)]}, memory={0: memory})
        return str(CliRunner().invoke(app, [*words, str(tree), *more]).exception)

    assert refusal(1_400_000 * 1024) == (
        "target 1.07 GB + KV cache 0.01 GB + processes 0.10 GB = 1.19 GB a replica does not fit the machine, which has "
        "1.43 GB, 0.30 GB of it for Ray and the driver; a smaller precision needs less"
    )
    assert refusal(1_500_000 * 1024) == "None"
    said = refusal(1_400_000 * 1024, "--kv-bytes", "0")
    assert said.startswith("target 1.07 GB + processes 0.10 GB = 1.18 GB a replica does not fit"), "a size of 0 counts, too"


def test_a_refused_plan_still_shows_the_machine(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0,)]})
    words = ["topology", "--sysfs", str(tree), "--plan", "--model-bytes", "900000000000", "--json"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, PlacementError)
    found = json.loads(done.stdout)
    assert found["actors"] == []
    assert found["refused"] == str(done.exception)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--plan"], UsageError),
        (["--sysfs", "/nowhere"], PlacementError),
        (["--model-bytes", "9", "--draft", "lookup"], UsageError),
        (["--model-bytes", "9", "--draft-cores", "1"], UsageError),
        (["-m", "pocket", "--model-bytes", "9"], UsageError),
        (["-m", "pocket", "--draft-bytes", "9"], UsageError),
    ],
)
def test_misuse_is_a_sentence(words: list[str], error: type[Exception]) -> None:
    done = CliRunner().invoke(app, ["topology", *words])
    assert isinstance(done.exception, error)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--ray-labels", "--ray-resources", "--plan"],
            "--ray-resources prints what ray start takes, and nothing else: leave out --ray-labels and --plan",
        ),
        (["--ray-folder", "--json"], "--ray-folder prints what ray start takes, and nothing else: leave out --json"),
        (
            ["--ray-folder", "--sysfs", "."],
            "--ray-folder is a folder of this machine, --sysfs another machine's: leave out one",
        ),
        (["--replicas", "2"], "--replicas is about a plan: ask for one with --plan and -m MODEL, or leave it out"),
        (["--draft", "none", "--json"], "--draft is about a plan: ask for one with --plan and -m MODEL, or leave it out"),
        (["--ray-labels", "-m", "pocket"], "--model is about a plan, which --ray-labels does not print: leave it out"),
    ],
)
def test_an_option_that_is_not_read_is_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["topology", *words])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == said


def test_ray_labels_of_another_machine_are_its_own(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0,), (1,)]})
    for core in (0, 1):
        write(tree / f"devices/system/cpu/cpu{core}/topology/physical_package_id", str(core))
    done = CliRunner().invoke(app, ["topology", "--sysfs", str(tree), "--ray-labels"])
    assert done.stdout.strip() == "outrider/sockets=2,outrider/nodes-per-socket=1"


def test_the_drawing_shows_who_sits_where(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0,), (2,)], 1: [(1,), (3,)], 4: []}, {0: 0, 1: 1, 4: 0})
    accelerator(tree, "0000:3a:00.0", "0x10de", "0x030200", 1)
    sizes = ["--model-bytes", "1000000000", "--draft-bytes", "100000000"]
    words = ["topology", "--sysfs", str(tree), "--plan", "--layout", "split", *sizes]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "node 4 · socket 0 · memory only" in done.stdout
    assert "T0" in done.stdout
    assert "d1" in done.stdout
    assert "cuda:0" in done.stdout


def test_ray_resources(tmp_path: Path) -> None:
    tree = build(tmp_path, {0: [(0, 2)], 1: [(1, 3)]})
    done = CliRunner().invoke(app, ["topology", "--sysfs", str(tree), "--ray-resources"])
    assert json.loads(done.stdout) == {"numa0": 1.0, "numa1": 1.0}
