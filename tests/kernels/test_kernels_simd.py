"""The vectors under the kernels: each implementation gives the same bits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.kernels import library

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parents[1] / "support"
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-uninitialized", "-static")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")


def hashed(folder: Path, header: str, *flags: str, compiler: str = "c++", emulator: tuple[str, ...] = ()) -> str:
    program = folder / "check"
    named = f'-DSIMD_HEADER="{HERE.parents[1]}/kernels/src/{header}"'
    subprocess.run([compiler, *FLAGS, *flags, named, str(HERE / "simd_check.cpp"), "-o", str(program)], check=True)
    return subprocess.run([*emulator, str(program)], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def generic(tmp_path_factory: pytest.TempPathFactory) -> str:
    return hashed(tmp_path_factory.mktemp("generic"), "simd_generic.h")


def test_without_a_processors_own_instructions(generic: str, tmp_path: Path) -> None:
    assert hashed(tmp_path, "simd_generic.h", "-U__SSE2__", "-U__aarch64__") == generic


@pytest.mark.parametrize(
    ("unit", "header", "flags"), [("avx2", "simd_avx2.h", AVX2), ("avx512vnni", "simd_avx512.h", AVX512)]
)
def test_with_longer_vectors(generic: str, tmp_path: Path, unit: str, header: str, flags: tuple[str, ...]) -> None:
    if unit not in library.available_instruction_sets():
        pytest.skip(f"this machine has no {unit}")
    assert hashed(tmp_path, header, *flags) == generic


# What CMake's OUTRIDER_EMULATE does with the unit of AVX-512. Those of BF16 add in another order than the generic one.
def test_with_emulated_vectors(generic: str, tmp_path: Path) -> None:
    if "avx2" not in library.available_instruction_sets():
        pytest.skip("this machine has no avx2")
    emulated = ("-include", str(HERE.parents[1] / "kernels/emulation/avx512.h"), "-Wno-psabi")
    assert hashed(tmp_path, "simd_avx512.h", *AVX2, *emulated) == generic


def test_on_arm(generic: str, tmp_path: Path) -> None:
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if not shutil.which(compiler) or not shutil.which(emulator):
        pytest.skip(f"{compiler} and {emulator} are not here (Debian: g++-aarch64-linux-gnu, qemu-user)")
    assert hashed(tmp_path, "simd_generic.h", compiler=compiler, emulator=(emulator,)) == generic
