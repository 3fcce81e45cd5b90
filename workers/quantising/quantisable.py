"""Checks whether a checkpoint can be quantised, and whether --out is free: without torch, before cores are waited for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from outrider.kernels.program import Format, Kind, Program
from outrider.workers.errors import ModelError, UsageError
from outrider.workers.models.families import build_program
from outrider.workers.models.files import read_json
from outrider.workers.models.formats.gguf.file import is_gguf
from outrider.workers.models.language_model import language_config, texts_below
from outrider.workers.models.model_info import weight_files
from outrider.workers.quantising.layers import layers_of, named, weights_of

USUAL_GROUP, LEAST_GROUP = 32, 8


def check_quantisable(path: Path, out: Path, bits: int, group: int | None) -> None:
    check_free(out, path)
    group_of(described_program(path)[0], bits, group)


def described_program(path: Path) -> tuple[Program, dict[str, Any]]:
    """The checkpoint's program and its configuration (of a multimodal model that of its language model, which is what
    will be written); a ModelError says why it cannot be quantised."""
    if is_gguf(path):
        raise ModelError(f"{path} is a GGUF file, which is not quantised again; give the checkpoint that it was made from")
    file = path / "config.json"
    whole = read_json(file)
    values = language_config(whole, str(file))
    if texts_below(whole) is not None:
        # A language model alone has no tokens that stand for anything else, and would compute a text with them.
        raise ModelError(
            f"{path} has tokens for what it sees and hears, which a language model by itself would take for a text's, so "
            "it cannot be quantised here; --precision w4a8 rounds it on load"
        )
    if values.get("quantization_config"):
        method = dict(values["quantization_config"]).get("quant_method", "unknown")
        raise ModelError(f"{path} is quantised already ({method}); give the checkpoint that it was made from")
    program = build_program(values, Format.W4A8, source=str(file))
    experts = named(program, (number for op in program.ops if op.kind is Kind.EXPERTS for number in weights_of(op)))
    if joined := next((source.name for source in experts if source.rows), None):
        raise ModelError(
            f'{path} has all experts of a layer in one matrix, "{joined}", which no quantised format does, so it '
            "cannot be quantised here; --precision w4a8 rounds it on load"
        )
    return program, values


def group_of(program: Program, bits: int, group: int | None) -> int:
    """The quantisation group, 0 for a whole row; a UsageError where ``group`` is not possible."""
    if bits == 8:
        if group is not None:
            raise UsageError("--group: 8 bits have one scale a row, as their readers want it; leave it out")
        return 0
    widths = {source.shape[1]: source.name for layer in reversed(layers_of(program)) for source in layer.matrices(program)}
    if group is None:
        common = math.gcd(*widths)
        group = next((size for size in range(USUAL_GROUP, LEAST_GROUP - 1, -1) if common % size == 0), None)
        if group is None:
            raise ModelError(f"no group of {LEAST_GROUP} to {USUAL_GROUP} weights divides the widths {sorted(widths)}")
    for width, name in sorted(widths.items()):
        if width % group:
            raise UsageError(f'--group: {group} does not divide the width {width:,} of "{name}"; choose one that does')
    return group


def check_free(out: Path, source: Path) -> None:
    """Refuse a path that exists, and a model without weights."""
    if out.exists() or out.is_symlink():
        raise UsageError(f"--out: {out} is there already; name a folder that is not, or remove it")
    if not weight_files(source):
        raise UsageError(f"{source} holds no weights")
