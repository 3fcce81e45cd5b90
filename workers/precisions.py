"""The native engine's precisions by the names that people ask for them with."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kernels.program import SMALLEST_ASYMMETRIC_GROUP, Format


@dataclass(frozen=True, slots=True)
class Precision:
    """How matrices are stored. ``group`` is the quantisation group: this many channels share a scale (0: the format's
    own)."""

    format: Format
    group: int = 0


PRECISIONS = {
    "fp32": Precision(Format.FP32),
    "bf16": Precision(Format.BF16),
    "w8a8": Precision(Format.W8A8),
    "w8af32": Precision(Format.W8AF32),
    "w4a8": Precision(Format.W4A8),
    "w4abf16": Precision(Format.W4ABF16),
    **{
        f"{name}:g{group}": Precision(format, group)
        for name, format in (("w4a8", Format.W4A8), ("w4abf16", Format.W4ABF16))
        for group in (128, 64, 32)
    },
}


def arithmetic(precision: str) -> str:
    """A precision's name without the group."""
    return precision.partition(":")[0]


def rounding(precision: Precision) -> str:
    """How floating-point matrices are rounded on load, for job.json; empty where they are not."""
    if not precision.format.integer:
        return ""
    if precision.format in (Format.W8A8, Format.W8AF32):
        return "rounded to nearest on load (rtn), 8 bits, groups of 128"
    if precision.group:
        scales = ", scales in bf16" if precision.group == SMALLEST_ASYMMETRIC_GROUP else ""
        return f"rounded to nearest on load (rtn), 4 bits, groups of {precision.group}{scales}"
    return "rounded to nearest on load (rtn), scales searched for, 4 bits, groups of 32"
