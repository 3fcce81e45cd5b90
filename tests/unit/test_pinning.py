"""The command line that pins, its fallbacks, and the proof inside a real worker."""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider.workers.errors import PlacementError
from outrider.workers.machine import pinning
from outrider.workers.machine.pin_check import PinningReport, check_pinning, memory_policy, nodes_of, pages_by_node
from outrider.workers.machine.pinning import Launch, Pin, environment_of, probe

CPU = min(os.sched_getaffinity(0))
ONE = Pin((CPU,), (0,), 1)
needs_numactl = pytest.mark.skipif(shutil.which("numactl") is None, reason="numactl is not installed")


def refusing(*words: str) -> pinning.Runner:
    """A host on which every command with one of these words fails."""

    def run(command: Sequence[str], environment: dict[str, str]) -> str | None:
        hit = [word for word in words if any(part.startswith(word) for part in command)]
        return f"set_mempolicy: Operation not permitted ({hit[0]})" if hit else None

    return run


@pytest.fixture
def with_numactl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning.shutil, "which", lambda name: f"/usr/bin/{name}")


def test_the_line_that_is_asked_for(with_numactl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launch = probe(Pin((2, 4, 6), (0, 1), 3), refusing())
    assert launch.level == "membind"
    assert launch.warnings == ()
    assert launch.line == ("/usr/bin/numactl", "--physcpubind=2,4,6", "--membind=0,1")
    environment = launch.runtime_env()
    assert shlex.split(environment["py_executable"]) == [*launch.line, sys.executable]
    assert environment["env_vars"]["OMP_NUM_THREADS"] == "3"
    assert environment["env_vars"]["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    assert environment["env_vars"]["KMP_BLOCKTIME"] == "1"


@pytest.mark.parametrize(
    ("refused", "level", "options", "warning"),
    [
        (("--membind",), "preferred", ("--physcpubind=2", "--preferred=1"), "memory is preferred on node 1, not bound"),
        (("--membind", "--preferred"), "cores", ("--physcpubind=2",), "cores are bound, memory is not"),
        (("--physcpubind",), "affinity", (), "cores are set by the worker itself"),
    ],
)
def test_each_step_down_is_one_warning(
    with_numactl: None, refused: tuple[str, ...], level: str, options: tuple[str, ...], warning: str
) -> None:
    launch = probe(Pin((2,), (1,), 1), refusing(*refused))
    assert launch.level == level
    assert launch.line[1:] == options
    assert len(launch.warnings) == 1
    assert warning in launch.warnings[0]
    assert "Operation not permitted" in launch.warnings[0]
    assert launch.runtime_env()["py_executable"].endswith(sys.executable)


def test_without_numactl_the_worker_pins_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning.shutil, "which", lambda name: None if name == "numactl" else f"/usr/bin/{name}")
    launch = probe(ONE, refusing())
    assert launch.level == "affinity"
    assert launch.warnings == (pinning.NO_NUMACTL,)
    assert launch.runtime_env({"A": "1"})["py_executable"] == sys.executable
    assert launch.runtime_env({"A": "1"})["env_vars"]["A"] == "1"


@pytest.mark.parametrize("cores", [(True,), ("1; rm -rf /",), (-1,), (1 << 20,), ()])
def test_only_checked_integers_reach_the_line(cores: tuple[Any, ...]) -> None:
    with pytest.raises(PlacementError):
        Pin(cores, (0,), 1)


@pytest.mark.parametrize("device", ["cuda", "cuda:0;", "tpu:1", "cuda:-1"])
def test_only_known_devices(device: str) -> None:
    with pytest.raises(PlacementError, match="a device is"):
        Pin((0,), (0,), 1, device)


def test_a_python_with_a_blank_in_its_path_is_quoted() -> None:
    launch = Launch(ONE, "cores", ("numactl", "--physcpubind=0"), "/home/a b/python")
    assert launch.command == "numactl --physcpubind=0 '/home/a b/python'"


def test_an_accelerator_is_chosen_by_the_plan_and_not_by_ray() -> None:
    pin = Pin((0,), (0,), 1, "cuda:1", "3")
    environment = environment_of(pin, [])
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert pin.local_device == "cuda:0"


def test_preloads_are_added_to_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/a.so /b.so")
    assert environment_of(ONE, ["/t.so"])["LD_PRELOAD"] == "/t.so:/a.so:/b.so"


def test_a_library_that_cannot_be_preloaded_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libtcmalloc.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(pinning, "find_library", lambda name: str(broken) if name == "tcmalloc" else None)
    launch = probe(ONE)
    assert "LD_PRELOAD" not in launch.environment
    assert any("tcmalloc is not preloaded" in warning for warning in launch.warnings)


@pytest.fixture
def failing_numactl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A numactl on the PATH that refuses to bind memory, as in a container without the right to."""
    script = tmp_path / "numactl"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--membind*|*--preferred*) echo "set_mempolicy: Operation not permitted" >&2; exit 1;; esac\n'
        'shift; exec "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_a_numactl_that_fails_is_found_out(failing_numactl: None) -> None:
    launch = probe(ONE)
    assert launch.level == "cores"
    assert "set_mempolicy: Operation not permitted" in launch.warnings[0]


def in_a_process(launch: Launch, before: str = "") -> PinningReport:
    """What a worker would find, started as Ray would start it but without Ray."""
    code = (
        f"import pickle, sys\n{before}\n"
        "from outrider.workers.machine.pin_check import pin_process\n"
        "launch = pickle.load(sys.stdin.buffer)\n"
        "sys.stdout.buffer.write(pickle.dumps(pin_process(launch)))"
    )
    done = subprocess.run(
        [*launch.line, sys.executable, "-c", code],
        input=pickle.dumps(launch),
        env=os.environ | launch.environment,
        capture_output=True,
        check=True,
    )
    found: PinningReport = pickle.loads(done.stdout)
    return found


@needs_numactl
def test_asked_is_got() -> None:
    launch = probe(ONE)
    pinned = in_a_process(launch)
    assert pinned.cores == (CPU,)
    assert pinned.threads == 1
    assert set(pinned.libraries) == set(filter(None, launch.environment.get("LD_PRELOAD", "").split(":")))
    if launch.level == "membind":
        assert (pinned.memory_policy, pinned.memory_nodes) == ("bind", (0,))
        assert pinned.differences == ()
    assert pinned.record()["asked"]["cores"] == (CPU,)


def test_the_worker_pins_all_its_threads_itself_where_nothing_else_does() -> None:
    launch = Launch(ONE, "affinity", (), sys.executable, {"OMP_NUM_THREADS": "1"})
    early = "import threading\nstop = threading.Event()\nthreading.Thread(target=stop.wait, daemon=True).start()"
    pinned = in_a_process(launch, early)
    assert pinned.cores == (CPU,)
    assert not any("threads of the process" in difference for difference in pinned.differences)


def test_every_difference_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("sys.modules", {name: module for name, module in sys.modules.items() if name != "torch"})
    (tmp_path / "numa_maps").write_text(
        "7f00 bind:1 anon=90000 dirty=90000 N0=90000 N1=10 kernelpagesize_kB=4\n"
        "7f01 bind:1 file=/usr/lib/x mapped=6 N0=600000 kernelpagesize_kB=4\n"
        "7f02 bind:1 huge anon=1 N1=2 kernelpagesize_kB=2048\n"
    )
    pin = Pin((900,), (1,), 2, "cuda:0", "5")
    launch = Launch(pin, "cores", ("numactl",), "python", {"LD_PRELOAD": "/none.so"}, ("memory is not bound",))
    monkeypatch.setattr("outrider.workers.machine.pin_check.nodes_of", lambda address, length: {0: 3, 1: 1})
    pinned = check_pinning(launch, [(0, 1)], 4, tmp_path)
    assert pinned.pages == {0: 90000 * 4096, 1: 10 * 4096 + 2 * 2048 * 1024}
    text = "\n".join(pinned.differences)
    assert "asked for cores 900, got" in text
    assert "asked for memory bound to node 1, got" in text
    assert "asked for 2 threads, OpenMP got 3" in text
    assert "asked for 2 threads, the kernels got 4" in text
    assert "75% of the weights' pages lie on node 0" in text
    assert "asked for /none.so to be preloaded" in text
    assert "asked for CUDA device 5, CUDA_VISIBLE_DEVICES is 0" in text
    assert "0.37 GB of 0.37 GB lie on node 0" in text
    assert pinned.warnings == ("memory is not bound",)


def test_the_policy_is_read_without_libnuma_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("outrider.workers.machine.pin_check.libnuma", lambda: None)
    (tmp_path / "numa_maps").write_text("555b802e9000 bind:0-1,4 file=/usr/bin/head mapped=2 N0=2\n")
    assert memory_policy(tmp_path) == ("bind", (0, 1, 4))
    assert memory_policy(tmp_path / "none") == ("unknown", ())
    assert nodes_of(4096, 4096) == {}


def test_pages_lie_somewhere() -> None:
    if not pages_by_node():
        pytest.skip("this kernel shows no numa_maps")
    buffer = bytearray(b"x" * (1 << 20))
    import ctypes

    where = nodes_of(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer))
    if not where:
        pytest.skip("libnuma is not installed, or move_pages is not allowed here")
    assert sum(where.values()) > 200


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Any]:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def started(ray: Any, launch: Launch) -> tuple[PinningReport, str]:
    """An actor under the launch's environment, and what the kernel says of its process from outside."""

    class Worker:
        def __init__(self, launch: Launch) -> None:
            from outrider.workers.machine.pin_check import pin_process

            self.pinned = pin_process(launch)

        def proof(self) -> PinningReport:
            return self.pinned

    actor = ray.remote(Worker).options(num_cpus=0, runtime_env=launch.runtime_env()).remote(launch)
    pinned: PinningReport = ray.get(actor.proof.remote(), timeout=60.0)
    status = Path(f"/proc/{pinned.pid}/status").read_text()
    ray.kill(actor)
    return pinned, dict(line.split(":\t", 1) for line in status.splitlines())["Cpus_allowed_list"]


@pytest.mark.slow
@pytest.mark.ray
@needs_numactl
def test_an_actor_of_ray_sits_where_it_was_put(ray_here: Any) -> None:
    for cpu in sorted(os.sched_getaffinity(0))[:2]:
        launch = probe(Pin((cpu,), (0,), 1))
        pinned, seen_from_outside = started(ray_here, launch)
        assert seen_from_outside == str(cpu)
        assert pinned.cores == (cpu,)
        assert launch.level != "membind" or pinned.differences == ()


@pytest.mark.slow
@pytest.mark.ray
def test_an_actor_of_ray_without_numactl(ray_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning.shutil, "which", lambda name: None)
    launch = probe(ONE)
    assert launch.level == "affinity"
    pinned, seen_from_outside = started(ray_here, launch)
    assert seen_from_outside == str(CPU)
    assert not any("cores" in difference for difference in pinned.differences)


@pytest.mark.slow
@pytest.mark.ray
def test_ray_never_says_that_a_line_is_bad(ray_here: Any) -> None:
    """The reason for the probe and for the deadline: were this to change, both could go."""
    launch = Launch(ONE, "cores", ("numactl", "--no-such-option"), sys.executable)
    actor = ray_here.remote(type("Idle", (), {"ready": lambda self: True}))
    ready = actor.options(num_cpus=0, runtime_env=launch.runtime_env()).remote().ready.remote()
    with pytest.raises(ray_here.exceptions.GetTimeoutError):
        ray_here.get(ready, timeout=5.0)
    assert "numactl --no-such-option" in str(launch.not_up("the draft of replica 1", 5.0))


def test_what_a_user_has_set_for_openmp_is_kept_or_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    monkeypatch.setenv("KMP_BLOCKTIME", "200")
    monkeypatch.setenv("KMP_AFFINITY", "none")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launch = probe(Pin((0,), (), 1), run=lambda command, environment: None)
    assert (launch.environment["KMP_BLOCKTIME"], launch.environment["KMP_AFFINITY"]) == ("200", "none")
    assert launch.environment["OMP_NUM_THREADS"] == "1"
    assert any(warning.startswith("OMP_NUM_THREADS=7 is replaced by 1") for warning in launch.warnings)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert not any("OMP" in warning for warning in probe(Pin((0,), (), 1), run=lambda *_: None).warnings)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_thread_that_keeps_to_a_core_of_its_own_has_not_lost_the_others() -> None:
    """As the kernels' first thread does: it is the one that asks."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    launch = Launch(Pin(cores, (), len(cores)), "cores", (), "python", {}, ())

    def checked() -> PinningReport:
        os.sched_setaffinity(0, cores[:1])
        return check_pinning(launch)

    with ThreadPoolExecutor(1) as pool:
        pinned = pool.submit(checked).result()
    assert pinned.cores == cores
    assert not any("asked for cores" in difference for difference in pinned.differences)
