"""Queries that are scaled by how far along in its row a token is, as in Llama 4's layers without rope.

transformers counts the tokens of the pass for that, which is the position in a row only where a pass holds one row. So the
layers are told to leave it out, and the attention does it, by the positions.
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
        """To (1, heads, tokens, size)."""
        steps = torch.floor((positions.float() + 1.0) / self.floor)
        factors = torch.log1p(steps) * self.scale + 1.0
        return (query * factors.view(1, 1, -1, 1)).to(query.dtype)


def take_temperatures(model: PreTrainedModel) -> Mapping[torch.nn.Module, Temperature]:
    """The layers that scale their queries, which they do no more."""
    found = {}
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) is True and not getattr(module, "use_rope", True):
            found[module] = Temperature(float(module.attn_scale), float(module.floor_scale))
            module.attn_temperature_tuning = False
    return found


def give_back(temperatures: Mapping[torch.nn.Module, Temperature]) -> None:
    for module in temperatures:
        module.attn_temperature_tuning = True
