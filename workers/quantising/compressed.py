"""Writes a rounded matrix in the compressed-tensors format, and the ``quantization_config`` for config.json.

Four bits are ``pack-quantized``: eight values of a row in an int32, the first one in the lowest bits, each stored as
value + 8; zero points likewise, along the columns of their matrix. Eight bits are ``int-quantized``: plain int8, for
activations that are quantised to int8 token by token. Readers of the format quantise all linear layers but those in
``ignore``.
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
    """The tensors that the file holds for the weight ``name``."""
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
    shifted = values.to(torch.int32) + (1 << (bits - 1))
    padded = torch.nn.functional.pad(shifted, (0, -values.shape[1] % each)).view(len(values), -1, each)
    words = torch.zeros(padded.shape[:2], dtype=torch.int32)
    for place in range(each):
        words |= padded[:, :, place] << (bits * place)
    return words


def description(form: Form, activations: bool, ignored: Sequence[str], ordered: bool) -> dict[str, Any]:
    """``quantization_config``. ``ordered``: columns were rounded in the order of their importance (GPTQ's act-order)."""
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
