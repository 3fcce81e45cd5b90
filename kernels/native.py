"""Load the compiled kernels and check that they speak this binding's interface."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from pathlib import Path

ABI_VERSION = 2
LIBRARY_NAME = "liboutrider_kernels.so"


class KernelsUnavailable(RuntimeError):
    """The compiled library is missing or was built for another interface; the message says which."""


def library_path() -> Path | None:
    """Where the library lies. An editable install leaves it in site-packages, away from these sources."""
    candidate = files("outrider.kernels").joinpath(LIBRARY_NAME)
    return Path(str(candidate)) if candidate.is_file() else None


def check_abi(found: int, path: Path) -> None:
    if found != ABI_VERSION:
        raise KernelsUnavailable(
            f"{path} has kernel interface {found}, this outrider needs {ABI_VERSION}: reinstall outrider"
        )


@cache
def load() -> ctypes.CDLL:
    """The library, checked once a process."""
    path = library_path()
    if path is None:
        raise KernelsUnavailable(
            f"the compiled kernels ({LIBRARY_NAME}) are not installed: reinstall outrider with a C++ compiler at hand"
        )
    library = ctypes.CDLL(str(path))
    library.outrider_abi_version.restype = ctypes.c_int32
    check_abi(library.outrider_abi_version(), path)
    return library
