"""The hidden states that the native engine hands out to a head, beside those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from native_models import TOKENS
from tiny_models import tiny_model

from outrider.kernels import packing
from outrider.kernels.native import NativeFeed
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.opening import open_model


@torch.no_grad()
def check_states(name: str, layers: tuple[int, ...], folder: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(folder)
    states = model(input_ids=torch.tensor([TOKENS]), use_cache=False, output_hidden_states=True).hidden_states
    wanted = torch.cat([states[layer][0] for layer in layers], dim=1).numpy()
    opened = open_model(ModelSpec(str(folder), "native", "fp32", threads=1, states=layers)).engine
    assert isinstance(opened, NativeEngine)
    row = opened.model.open(Sampling(), len(TOKENS))
    [answer] = opened.model.forward([NativeFeed(row, TOKENS, states=True)])
    assert answer.states is not None
    # They cross as bf16.
    np.testing.assert_allclose(packing.from_bf16(answer.states), wanted, rtol=2**-8, atol=1e-4)
