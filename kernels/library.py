"""Loads the compiled library, and declares its C interface: structures, functions, and statuses as exceptions.

ctypes releases Python's global interpreter lock during every call.
"""

from __future__ import annotations

import ctypes
import os
import struct
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

ABI_VERSION = 37
# Raised whenever packed weights look different; a number of its own, since packing a large model takes a minute.
PACKING_VERSION = 10
LIBRARY_NAME = "liboutrider_kernels.so"
STATUSES = ("ok", "invalid", "no memory", "cache full", "no row", "context", "unsupported", "not finite")


class KernelsUnavailable(RuntimeError):
    """The compiled library is missing, cannot be loaded or was built for another interface; the message says which."""


class KernelError(RuntimeError):
    """A call that the kernels refused; ``status`` is one of ``STATUSES``."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return self.message


class CacheFull(KernelError):
    """The cache's limit is reached; nothing was fed. Close or truncate rows and feed again."""


class SliceStructure(Structure):
    _fields_ = (("buffer", c_int32), ("offset", c_int32), ("width", c_int32))


class WeightStructure(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("format", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("group", c_int32),
        ("gated", c_int32),
        ("table", c_int32),
        ("codes", c_int32),
        ("scales", c_int32),
        ("zeros", c_int32),
        ("ordered", c_int32),
    )


class QuantisedStructure(Structure):
    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("sub_scales", c_void_p),
        ("minima", c_void_p),
        ("sub_minima", c_void_p),
        ("group", c_int32),
    )


class OpStructure(Structure):
    _fields_ = (
        ("kind", c_int32),
        ("input", SliceStructure),
        ("key", SliceStructure),
        ("value", SliceStructure),
        ("residual", SliceStructure),
        ("output", SliceStructure),
        ("weight", c_int32),
        ("bias", c_int32),
        ("activation", c_int32),
        ("integer", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_size", c_int32),
        ("window", c_int32),
        ("rotated", c_int32),
        ("longest", c_int32),
        ("epsilon", c_float),
        ("scale", c_float),
        ("cap", c_float),
    )


class ProgramStructure(Structure):
    _fields_ = (
        ("ops", POINTER(OpStructure)),
        ("weights", POINTER(WeightStructure)),
        ("buffers", POINTER(c_int32)),
        ("op_count", c_int32),
        ("weight_count", c_int32),
        ("buffer_count", c_int32),
        ("layers", c_int32),
        ("vocabulary", c_int32),
        ("context", c_int32),
        ("cache", c_int32),
    )


class OptionsStructure(Structure):
    _fields_ = (
        ("cores", POINTER(c_int32)),
        ("threads", c_int32),
        ("spin_microseconds", c_int32),
        ("cache_bytes", c_int64),
    )


class SamplingStructure(Structure):
    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("repetition_penalty", c_double),
        ("presence_penalty", c_double),
        ("frequency_penalty", c_double),
        ("seed", c_uint64),
        ("bias_tokens", POINTER(c_int32)),
        ("bias_values", POINTER(c_double)),
        ("bias_count", c_int32),
        ("top_k", c_int32),
        ("sample", c_uint32),
        ("min_tokens", c_int32),
        ("end_tokens", POINTER(c_int32)),
        ("end_count", c_int32),
    )


class BatchStructure(Structure):
    _fields_ = (
        ("feeds", c_int32),
        ("rows", c_void_p),
        ("counts", c_void_p),
        ("tokens", c_void_p),
        ("choose", c_void_p),
        ("logits", c_void_p),
        ("branches", c_void_p),
        ("branch_after", c_void_p),
        ("branch_tokens", c_void_p),
        ("chosen", c_void_p),
        ("runners_up", c_void_p),
        ("margins", c_void_p),
        ("logits_out", c_void_p),
        ("logprobs", c_void_p),
        ("logprob_tokens", c_void_p),
        ("logprob_values", c_void_p),
        ("masks", c_void_p),
        ("mask_of", c_void_p),
        ("masks_ready", c_void_p),
        ("mask_words", c_int32),
        ("states", c_void_p),
        ("states_out", c_void_p),
        ("given", c_void_p),
        ("states_in", c_void_p),
    )


class DecodeStructure(Structure):
    _fields_ = (
        ("feeds", c_int32),
        ("rows", c_void_p),
        ("counts", c_void_p),
        ("tokens", c_void_p),
        ("most", c_void_p),
        ("end_counts", c_void_p),
        ("ends", c_void_p),
        ("reach", c_void_p),
        ("miss_factor", c_void_p),
        ("bounds", c_void_p),
        ("usual", c_void_p),
        ("least_chance", c_double),
        ("least_reach", c_double),
        ("least_sum", c_double),
        ("spans", c_int32),
        ("stride", c_int32),
        ("guess_room", c_int32),
        ("made", c_void_p),
        ("chosen", c_void_p),
        ("runners_up", c_void_p),
        ("margins", c_void_p),
        ("passes", c_void_p),
        ("going", c_void_p),
        ("seconds", c_void_p),
        ("given", c_void_p),
        ("states_in", c_void_p),
    )


class SuffixRowsStructure(Structure):
    _fields_ = (
        ("count", c_int32),
        ("keys", c_void_p),
        ("prompts", c_void_p),
        ("gained", c_void_p),
        ("tokens", c_void_p),
        ("most", c_void_p),
        ("stride", c_int32),
        ("least_reach", c_double),
        ("made", c_void_p),
        ("candidates", c_void_p),
        ("reaches", c_void_p),
        ("from_others", c_void_p),
    )


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "outrider_number": (c_int64, (c_char_p,)),
    "outrider_message": (c_char_p, ()),
    "outrider_isa": (c_char_p, ()),
    "outrider_isa_available": (c_char_p, ()),
    "outrider_fewest_in_pairs": (c_int32, (c_int32,)),
    "outrider_sources": (c_char_p, ()),
    "outrider_memory_allocate": (c_void_p, (c_int64,)),
    "outrider_memory_free": (None, (c_void_p, c_int64)),
    "outrider_stream_read": (c_uint64, (c_void_p, c_int64, c_int32)),
    "outrider_packed_bytes": (c_int64, (POINTER(WeightStructure),)),
    "outrider_pack_rows": (c_int32, (POINTER(WeightStructure), c_int32, c_int32, c_void_p, c_int32, c_int64)),
    "outrider_pack_codes": (c_int32, (POINTER(WeightStructure), c_int32, c_int32, POINTER(QuantisedStructure))),
    "outrider_pack_order": (c_int32, (POINTER(WeightStructure), c_void_p)),
    "outrider_engine_create": (c_int32, (POINTER(ProgramStructure), POINTER(OptionsStructure), POINTER(c_void_p))),
    "outrider_engine_destroy": (None, (c_void_p,)),
    "outrider_engine_threads": (c_int32, (c_void_p, c_int32, c_void_p)),
    "outrider_engine_reserve": (c_int32, (c_void_p, c_int32, c_int32, c_int64)),
    "outrider_row_open": (c_int32, (c_void_p, POINTER(SamplingStructure), c_int32, POINTER(c_int32))),
    "outrider_row_fork": (c_int32, (c_void_p, c_int32, c_int32, POINTER(SamplingStructure), c_int32, POINTER(c_int32))),
    "outrider_row_skip": (c_int32, (c_void_p, c_int32, c_void_p, c_int32)),
    "outrider_row_truncate": (c_int32, (c_void_p, c_int32, c_int32)),
    "outrider_row_close": (c_int32, (c_void_p, c_int32)),
    "outrider_row_length": (c_int32, (c_void_p, c_int32)),
    "outrider_cache_use": (None, (c_void_p, POINTER(c_int64), POINTER(c_int64), POINTER(c_int32))),
    "outrider_forward": (c_int32, (c_void_p, POINTER(BatchStructure))),
    "outrider_experts_read": (c_int64, (c_void_p,)),
    "outrider_rank": (c_int32, (c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p)),
    "outrider_correct": (c_int32, (c_void_p, c_int32)),
    "outrider_shorten": (c_int32, (c_void_p, c_int32)),
    "outrider_learn": (c_int32, (c_void_p, c_int32, c_int32, c_void_p, c_int32, *2 * (POINTER(c_int32),))),
    "outrider_decode": (c_int32, (c_void_p, POINTER(DecodeStructure))),
    "outrider_choose": (
        c_int32,
        (
            c_void_p,
            c_int32,
            POINTER(SamplingStructure),
            c_void_p,
            *2 * (c_int32,),
            c_void_p,
            *2 * (POINTER(c_int32),),
            *2 * (c_void_p,),
        ),
    ),
    "outrider_log_probabilities": (c_int32, (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p)),
    "outrider_suffixes_create": (c_int32, (c_int64, POINTER(c_void_p))),
    "outrider_suffixes_destroy": (None, (c_void_p,)),
    "outrider_suffixes_bytes": (c_int64, (c_void_p,)),
    "outrider_suffixes_advance": (c_int32, (c_void_p, POINTER(SuffixRowsStructure))),
    "outrider_suffixes_end": (c_int32, (c_void_p, c_int64, c_void_p, c_int32)),
    "outrider_suffixes_learn": (c_int32, (c_void_p, c_void_p, c_int32)),
}


def library_path() -> Path | None:
    """The path of the library; an editable install has it in site-packages, not beside these sources.

    OUTRIDER_LIBRARY names another build of it, such as one with sanitizers.
    """
    if named := os.environ.get("OUTRIDER_LIBRARY"):
        return Path(named)
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
    try:
        _check_length(path)
        library = ctypes.CDLL(str(path))
        library.outrider_abi_version.restype = c_int32
        check_abi(library.outrider_abi_version(), path)
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"the compiled kernels cannot be loaded: {error}; reinstall outrider") from error
    return library


def _check_length(path: Path) -> None:
    """Refuse a truncated ELF file (a full disk leaves one), since loading it may end the process with SIGBUS."""
    with path.open("rb") as file:
        header = file.read(64)
        there = os.fstat(file.fileno()).st_size
    if len(header) < 64 or not header.startswith(b"\x7fELF\x02\x01"):  # 64 bits, little endian
        return
    # The section table is at the end of the file.
    (table,) = struct.unpack_from("<Q", header, 0x28)
    entry_size, entries = struct.unpack_from("<HH", header, 0x3A)
    if there < (needed := table + entry_size * entries):
        raise OSError(f"{path}: {there} bytes are left of {needed}")


def why_unusable() -> str | None:
    """Why the library cannot be used here; None where it can."""
    try:
        load()
    except KernelsUnavailable as error:
        return str(error)
    return None


def instruction_set() -> str:
    """The instruction set in use; refuses an OUTRIDER_ISA that this machine lacks."""
    name: bytes | None = load().outrider_isa()
    if name is None:
        raise KernelError("unsupported", message())
    return name.decode()


def float_instruction_set() -> str:
    """The instruction set as far as it changes the rounding of floats: sets that differ only in integer products count as
    one."""
    name = instruction_set()
    return "avx512bf16" if name == "avx512pairs" else name


def fewest_in_pairs(scales: int) -> int:
    """The least number of tokens for which this machine multiplies four-bit codes with such scales in pairs of channels; 0:
    never."""
    try:
        return int(load().outrider_fewest_in_pairs(scales))
    except KernelsUnavailable:  # reported where the native engine is opened
        return 0


def available_instruction_sets() -> tuple[str, ...]:
    """All instruction sets that this machine can run, best first."""
    names: bytes = load().outrider_isa_available()
    return tuple(names.decode().split())


def sources() -> str:
    """A digest of the sources that the library was built from."""
    digest: bytes = load().outrider_sources()
    return digest.decode()


def message() -> str:
    text: bytes = load().outrider_message()
    return text.decode(errors="replace")


def check(status: int) -> None:
    if status:
        name = STATUSES[status]
        raise (CacheFull if name == "cache full" else KernelError)(name, message())
