"""The package: light imports, no clash with other packages, a library that matches its binding, working builds."""

from __future__ import annotations

import importlib.util
import logging
import os
import resource
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from outrider.kernels import library
from outrider.runner import process_exit
from outrider.runner.cli.ending import exit_code_of, interrupt_on_signals
from outrider.runner.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "transformers", "numpy", "pydantic", "outrider.runner.driving.driver")

HELP = """
import sys
from outrider.runner.cli.main import main
sys.argv = ["outrider", "--help"]
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
print(",".join(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


def python(*arguments: str, cwd: Path = ROOT, path: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **more}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_help_imports_nothing_heavy() -> None:
    done = python("-c", HELP.format(heavy=HEAVY))
    assert done.returncode == 0, done.stderr
    assert "run" in done.stdout
    assert done.stderr.strip() == ""


def test_help_takes_less_than_half_a_second() -> None:
    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    def once() -> float:
        before = used()
        done = subprocess.run([Path(sys.executable).with_name("outrider"), "--help"], capture_output=True, check=True)
        assert b"Usage" in done.stdout
        return used() - before

    # Of the processor: the machine may be busy.
    times: list[float] = []
    while len(times) < 8 and min(times, default=9.9) >= 0.5:
        times.append(once())
    assert min(times) < 0.5, times


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--version"], 0, "outrider 0."),
        (["run"], 2, "outrider: INPUT is missing: name a file of prompts"),
        (["run", "none.jsonl"], 2, "outrider: none.jsonl cannot be read: No such file or directory"),
        (["run", ".", "--batch", "0"], 2, "outrider: --batch: must be at least 1, got 0"),
        (["run", ".", "--draft-tokens=--5"], 2, "outrider: --draft-tokens: "),
        (["run", "."], 2, "outrider: . is a directory without Parquet files, and no saved dataset; give"),
        (["run", ".", "--config", "none.yaml"], 2, "outrider: --config: none.yaml cannot be read"),
        (["status", "."], 2, "outrider: . is not a job directory: it has no job.db"),
        (["results", "."], 2, "outrider: . is not a job directory: it has no job.db"),
        (["run", "--no-such-option"], 2, "No such option"),
        (["dance"], 2, "No such command"),
    ],
)
def test_usage_errors_are_sentences(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert ended.value.code == code, printed
    assert said in printed.out + printed.err
    assert list(tmp_path.iterdir()) == []


# Each ending has a copy of one process, which has imported what they all need: a second of the processor.
ENDINGS = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
import outrider.runner.options.job as config
import outrider.runner.run_job
from outrider.runner.cli.main import main
for how in sys.argv[1:]:
    if child := os.fork():
        print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        continue
    for descriptor in (1, 2):
        os.dup2(os.open(f"{how}.{descriptor}", os.O_CREAT | os.O_WRONLY), descriptor)
    if how != "usage":
        # SIGINT itself may be ignored where the tests run: a shell's background jobs inherit that.
        number = getattr(signal, how, None)
        config.build_spec = lambda *_: signal.raise_signal(number) if number else signal.default_int_handler(2, None)
    sys.argv = ["outrider", "run", "none.jsonl"]
    main()
"""


def test_endings_have_a_sentence_and_a_code_and_no_traceback(tmp_path: Path) -> None:
    endings = dict.fromkeys(("SIGTERM", "SIGHUP", "interrupt"), (130, "stopped; the same command resumes the job\n"))
    endings["usage"] = (2, "outrider: none.jsonl cannot be read: No such file or directory\n")
    done = python("-c", ENDINGS, *endings, cwd=tmp_path)
    found = {}
    for line in done.stdout.splitlines():
        how, code = line.split()
        assert (tmp_path / f"{how}.1").read_text() == "", how
        found[how] = (int(code), (tmp_path / f"{how}.2").read_text())
    assert found == endings, done


def test_an_interrupt_while_the_command_line_is_imported_is_no_traceback(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from outrider.runner.cli.command import main\n"
        "main()"
    )
    done = python("-c", program, "run", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_what_helper_processes_import_again_is_not_the_command_line(tmp_path: Path) -> None:
    program = "import sys\nimport outrider.runner.cli.command\nprint('typer' in sys.modules, 'pydantic' in sys.modules)"
    assert python("-c", program, cwd=tmp_path).stdout == "False False\n"


@pytest.fixture
def hang_ups() -> Iterator[None]:
    """The terminal closes, as by default."""
    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_terminal_that_closes_interrupts_once(hang_ups: None) -> None:
    interrupt_on_signals()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)  # the shell tells, too


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_that_is_told_twice_is_one(
    hang_ups: None, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `timeout` tells it, and a wrapper under a terminal: the second is not to disturb how the first ends it."""
    interrupt_on_signals()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    signal.raise_signal(number)
    monkeypatch.setattr(process_exit, "REPEATED_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_an_interrupt_that_python_only_reports_comes_again(
    hang_ups: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the hooks of a fork: the handler raises where nobody can catch it."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    interrupt_on_signals()
    with pytest.raises(KeyboardInterrupt):
        Finalized()
        signal.sigtimedwait([signal.SIGUSR1], 30)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not hasattr(logging, "_releaseLock"), reason="this Python's hook cannot be interrupted")
def test_an_interrupt_in_a_fork_keeps_no_other_thread_from_logging(hang_ups: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    interrupt_on_signals()
    logging._acquireLock()  # type: ignore[attr-defined]
    found = SimpleNamespace(exc_type=KeyboardInterrupt, object=logging._releaseLock)  # type: ignore[attr-defined]
    logs = threading.Thread(target=logging.getLogger, args=("a logger that is new",), daemon=True)
    with pytest.raises(KeyboardInterrupt):
        sys.unraisablehook(cast("sys.UnraisableHookArgs", found))
        signal.sigtimedwait([signal.SIGUSR1], 30)
    logs.start()
    logs.join(5)
    assert not logs.is_alive()


def test_a_job_that_is_left_is_not_disturbed_on_its_way_out(hang_ups: None, capsys: pytest.CaptureFixture[str]) -> None:
    def leave() -> int:
        raise KeyboardInterrupt

    interrupt_on_signals()
    assert exit_code_of(leave) == 130
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(number)
    assert capsys.readouterr().err == "stopped; the same command resumes the job\n"


def test_under_nohup_a_terminal_may_close(hang_ups: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt_on_signals()
    signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


TRANSFORMERS = """
import transformers, sys
from transformers import AutoModelForCausalLM, LlamaForCausalLM
ours = [name for name, module in sys.modules.items() if "kernels" in name.split(".")[0] and module is not None
        and str(getattr(module, "__file__", "")).startswith({root!r})]
print("ours:", ours, "theirs:", getattr(sys.modules.get("kernels"), "MARK", None))
import kernels as found
print("found:", getattr(found, "MARK", None))
"""


@pytest.mark.slow  # torch is loaded, twice
@pytest.mark.parametrize("present", [False, True])
def test_transformers_and_a_distribution_called_kernels(tmp_path: Path, present: bool) -> None:
    """transformers asks for Hugging Face's ``kernels``; from the repository's root that must never find ours."""
    if present:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text(
            "MARK = 'theirs'\ndef __getattr__(name):\n    return type(name, (), {'__init__': lambda self, *a, **k: None})\n"
        )
        information = tmp_path / "kernels-0.12.1.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.12.1\n")
        (information / "RECORD").write_text("kernels/__init__.py,,\n")
    elif importlib.util.find_spec("kernels") is not None and getattr(importlib.util.find_spec("kernels"), "origin", None):
        pytest.skip("a distribution called kernels is installed here")
    done = python("-c", TRANSFORMERS.format(root=str(ROOT)), path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "ours: []" in done.stdout
    # Without theirs, a bare "import kernels" finds at most a folder without code.
    assert f"found: {'theirs' if present else None}" in done.stdout


def test_the_library_loads_and_speaks_the_bindings_interface() -> None:
    assert library.load().outrider_abi_version() == library.ABI_VERSION


def test_a_library_of_another_interface_is_refused() -> None:
    with pytest.raises(library.KernelsUnavailable) as caught:
        library.check_abi(library.ABI_VERSION + 1, Path("/x/lib.so"))
    assert str(caught.value) == (
        f"/x/lib.so has kernel interface {library.ABI_VERSION + 1}, this outrider needs {library.ABI_VERSION}: "
        "reinstall outrider"
    )


def test_a_missing_library_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library_path", lambda: None)
    with pytest.raises(library.KernelsUnavailable, match="are not installed: reinstall outrider with a C"):
        library.load.__wrapped__()


def refusal(monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
    monkeypatch.setattr(library, "library_path", lambda: path)
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    return library.why_unusable() or ""


@pytest.mark.parametrize("content", [None, b"", b"no library", b"\x7fELF\x02\x01" + bytes(100)])
def test_a_file_that_is_no_library_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    path = tmp_path / "kernels.so"
    if content is not None:
        path.write_bytes(content)
    said = refusal(monkeypatch, path)
    assert said.startswith("the compiled kernels cannot be loaded: ")
    assert str(path) in said
    assert said.endswith("; reinstall outrider")


def test_a_library_that_was_cut_short_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To load one may end the process with SIGBUS."""
    whole = library.library_path()
    assert whole is not None
    path = tmp_path / "kernels.so"
    content = whole.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    monkeypatch.setattr(library.ctypes, "CDLL", None)
    assert f"{path}: {len(content) // 2} bytes are left of " in refusal(monkeypatch, path)


def test_another_library_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(str(importlib.import_module("safetensors._safetensors_rust").__file__))
    said = refusal(monkeypatch, path)
    assert said == (
        f"the compiled kernels cannot be loaded: {path}: undefined symbol: outrider_abi_version; reinstall outrider"
    )


def test_a_library_that_lacks_a_function_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    path = library.library_path()
    assert path is not None
    assert library.why_unusable() is None
    monkeypatch.setitem(library.SIGNATURES, "outrider_unheard_of", (None, ()))
    assert refusal(monkeypatch, path).endswith("undefined symbol: outrider_unheard_of; reinstall outrider")


def test_the_header_and_the_binding_agree() -> None:
    header = (ROOT / "kernels" / "include" / "outrider_kernels.h").read_text()
    assert f"#define OUTRIDER_ABI {library.ABI_VERSION}\n" in header


def sources_of_kernels() -> list[Path]:
    """All that a compiler reads, and CMake's lists."""
    return [path for path in (ROOT / "kernels").rglob("*") if path.suffix in (".cpp", ".h", ".inc", ".txt")]


def objects_built_here() -> Path | None:
    """Where this checkout's own build has the objects of the kernels, if they are newer than all their sources."""
    newest = max(path.stat().st_mtime for path in sources_of_kernels())
    sources = ROOT / "kernels" / "src"
    names = {f"{path.relative_to(sources)}.o" for path in sources.rglob("*.cpp")}
    for folder in ROOT.glob("build/py3-none-*/kernels/CMakeFiles/outrider_kernels.dir/src"):
        objects = list(folder.rglob("*.o"))
        there = {str(path.relative_to(folder)) for path in objects}
        if there == names and min(path.stat().st_mtime for path in objects) > newest:
            return folder
    return None


def quick_compiler(folder: Path) -> Path:
    """What CMake is to start its compiler with: no test asks how fast the wheel is, so nothing is optimised, and objects
    are those that were built here of the same sources. One is compiled all the same: the sdist's CMake lists can do it."""
    launcher = folder / "quick_compiler"
    launcher.write_text(
        "#!/bin/sh\n"
        f"built='{objects_built_here() or ''}'\n"
        'for word; do case "$word" in */src/api.cpp.o) ;; */src/*.cpp.o) object=$word ;; esac; done\n'
        'if [ -n "$built" ] && [ -n "$object" ]; then exec cp "$built/${object##*/src/}" "$object"; fi\n'
        'exec "$@" -O0\n'
    )
    launcher.chmod(0o755)
    return launcher


def files_in(sdist: Path) -> dict[str, bytes]:
    """By their names behind the folder that all of them lie in."""
    with tarfile.open(sdist) as archive:
        opened = ((member.name.partition("/")[2], archive.extractfile(member)) for member in archive if member.isfile())
        return {name: file.read() for name, file in opened if file is not None}


@pytest.mark.slow
@pytest.mark.build
@pytest.mark.timeout(1800)  # a compile of everything, behind every other test on two cores
def test_wheel_and_sdist_build_and_the_wheel_works_elsewhere(tmp_path: Path) -> None:
    """The wheel is built from the sdist, so the sdist is whole as well."""
    built = tmp_path / "dist"
    launcher = quick_compiler(tmp_path)
    done = python(
        "-m", "build", "--no-isolation", "--outdir", str(built), str(ROOT), CMAKE_CXX_COMPILER_LAUNCHER=str(launcher)
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (plain,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    # Else what was built here of these would show nothing of the sdist.
    sources = sources_of_kernels()
    assert len(sources) > 50
    packed = files_in(sdist)
    changed = [name for path in sources if packed.get(name := str(path.relative_to(ROOT))) != path.read_bytes()]
    assert not changed, "they are not in the sdist as they are here"
    tools = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    repair = ("-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", str(tmp_path / "many"), str(plain))
    done = subprocess.run([sys.executable, *repair], env=os.environ | tools, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "many").glob("outrider-*-py3-none-manylinux_2_*_x86_64.whl")
    site = tmp_path / "site"
    done = python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    assert done.returncode == 0, done.stderr
    program = (
        "import outrider.kernels.native, outrider.workers.engines, outrider.runner.driving.schedule\n"
        "from outrider.kernels import library\n"
        "library.load()\n"
        "print(library.library_path(), outrider.runner.driving.schedule.__file__)\n"
    )
    # -S keeps this environment's editable install out; its other packages come back by path, behind the wheel's.
    packages = next(entry for entry in sys.path if entry.endswith("site-packages"))
    done = python("-S", "-c", program, cwd=tmp_path, path=f"{site}{os.pathsep}{packages}")
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(site)) for path in done.stdout.split())
    done = python("-S", str(site / "bin" / "outrider"), "--help", cwd=tmp_path, path=f"{site}{os.pathsep}{packages}")
    assert done.returncode == 0, done.stderr
    assert "resume" in done.stdout
    assert not list(site.rglob("*.cpp")), "sources do not belong in the wheel"
