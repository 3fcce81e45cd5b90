"""Attention temperature by position, as in Llama 4's layers without rope: Q * (1 + scale * log(1 + floor((p + 1) /
floor))).

transformers takes the index of a token in the pass for its position p, which is wrong where a pass holds several rows. So
it is switched off in the layers, and ``hf_attention`` scales the queries by their positions in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Temperature:
    scale: float
    floor: float

    def applied(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``query`` is (1, heads, tokens, size)."""
        steps = torch.floor((positions.float() + 1.0) / self.floor)
        factors = torch.log1p(steps) * self.scale + 1.0
        return (query * factors.view(1, 1, -1, 1)).to(query.dtype)


def take_temperatures(model: PreTrainedModel) -> Mapping[torch.nn.Module, Temperature]:
    """Switches the temperature off in all layers that have one; their parameters."""
    found = {}
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) is True and not getattr(module, "use_rope", True):
            found[module] = Temperature(float(module.attn_scale), float(module.floor_scale))
            module.attn_temperature_tuning = False
    return found


def restore_temperatures(temperatures: Mapping[torch.nn.Module, Temperature]) -> None:
    for module in temperatures:
        module.attn_temperature_tuning = True
