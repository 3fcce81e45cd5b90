"""compressed-tensors: how a rounded matrix lies in the file, and what config.json says of it.

Four bits are ``pack-quantized``: eight values in an int32, the lowest bits first along a row, each moved up by 8 so that
none is negative; zero points likewise, along the rows. Eight bits are ``int-quantized``: int8 as it is, for activations
that are made int8 token by token. Readers of the format find layers by class and name: all linear ones that are not to be
ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.workers.quantising.grids import Form, Rounded

WORD_BITS = 32
METHOD = "compressed-tensors"
PACKED, INTEGER = "pack-quantized", "int-quantized"


def tensors_of(name: str, rounded: Rounded) -> dict[str, Tensor]:
    """What stands in the file for the weight ``name``."""
    prefix, form = name.removesuffix("weight"), rounded.form
    scales = rounded.grid.scales.to(form.scale_type)
    if form.bits == 8:
        return {f"{prefix}weight": rounded.values, f"{prefix}weight_scale": scales}
    found = {
        f"{prefix}weight_packed": pack(rounded.values, form.bits),
        f"{prefix}weight_scale": scales,
        f"{prefix}weight_shape": torch.tensor(rounded.values.shape),
    }
    if not form.symmetric:
        zeros = pack(rounded.grid.zeros.to(torch.int8).T, form.bits).T.contiguous()
        found[f"{prefix}weight_zero_point"] = zeros
    return found


def pack(values: Tensor, bits: int) -> Tensor:
    """Signed values [rows, columns] as int32 [rows, words]; the last word is filled up with zero bits."""
    each = WORD_BITS // bits
    moved = values.to(torch.int32) + (1 << (bits - 1))
    padded = torch.nn.functional.pad(moved, (0, -values.shape[1] % each)).view(len(values), -1, each)
    words = torch.zeros(padded.shape[:2], dtype=torch.int32)
    for place in range(each):
        words |= padded[:, :, place] << (bits * place)
    return words


def description(form: Form, activations: bool, ignored: Sequence[str], ordered: bool) -> dict[str, Any]:
    """``quantization_config``. ``ordered``: columns were rounded in the order of their weight."""
    weights: dict[str, Any] = {"num_bits": form.bits, "type": "int", "symmetric": form.symmetric, "dynamic": False}
    weights |= (
        {"strategy": "group", "group_size": form.group} if form.group else {"strategy": "channel", "group_size": None}
    )
    if ordered:
        weights["actorder"] = "weight"
    inputs = (
        {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"} if activations else None
    )
    name = INTEGER if activations else PACKED
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": name,
    }
    return {
        "quant_method": METHOD,
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
