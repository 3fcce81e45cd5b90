"""Types of option values that several options share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

Engine = Literal["auto", "native", "hf"]
Precision = Literal[
    "auto",
    "fp32",
    "bf16",
    "fp16",
    "w8a8",
    "w8af32",
    "w4a8",
    "w4abf16",
    "w4a8:g128",
    "w4a8:g64",
    "w4a8:g32",
    "w4abf16:g128",
    "w4abf16:g64",
    "w4abf16:g32",
]
# As --help lists them.
PRECISIONS = "fp32, bf16, fp16 (hf), w8a8, w8af32, w4a8 and w4abf16 (these two also with :g128, :g64 or :g32)"
CachePrecision = Literal["auto", "int8"]
Format = Literal["auto", "jsonl", "text"]
InputFormat = Literal["auto", "jsonl", "text", "csv", "parquet", "arrow"]
Method = Literal["auto", "rtn", "awq", "gptq", "smoothquant"]
Per = Literal["auto", "node", "socket", "machine"]
MOST_DRAFT_TOKENS = 64
MOST_SHORTLISTED = 1 << 24
NO_DRAFT = "none"
# Suffixes of configuration files; an input with one is refused unless --format is given.
CONFIG_SUFFIXES = (".yaml", ".yml")


def _named(value: object) -> object:
    """Refuse an empty name or path, and one with a NUL."""
    if isinstance(value, str | Path) and (not str(value) or "\0" in str(value)):
        raise ValueError("be a name that is not empty and holds no NUL")
    return value


def _number_or_auto(most: int) -> Callable[[object], object]:
    def read(value: object) -> object:
        if value == "auto":
            return value
        if not isinstance(value, bool):
            with suppress(TypeError):
                number = index(value)  # type: ignore[arg-type]  # numpy's whole numbers, too
                if 0 <= number <= most:
                    return number
        if isinstance(value, str) and value.isdecimal() and len(value) <= len(str(most)):
            return read(int(value))
        raise ValueError(f'be a whole number from 0 to {most:,}, or "auto"')

    return read


def _no_plain(value: object) -> object:
    """Refuse "plain", which notes and reports call the layout without a draft, but which is not a choice of --layout."""
    if value == "plain":
        raise ValueError("be auto, split or shared (plain is what --draft none runs as)")
    return value


Name = Annotated[str, BeforeValidator(_named)]
NamedPath = Annotated[Path, BeforeValidator(_named)]
DraftTokens = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto(MOST_DRAFT_TOKENS))]
Layout = Annotated[Literal["auto", "split", "shared"], BeforeValidator(_no_plain)]
Shortlist = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto(MOST_SHORTLISTED))]
