"""A copy of a model that computes the same function but has outlier channels, as OPT-6.7b and similar models do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

FACTOR = 50.0
CHANNELS = 4


def with_outliers(source: Path, out: Path, factor: float = FACTOR, channels: int = CHANNELS, seed: int = 3) -> Path:
    """Multiplies a few channels of every norm's weight by ``factor``, and divides the columns that read them by it.

    So the residual stream is unchanged, and the inputs of linear layers, which int8 must represent, have outliers. Saved in
    float32, so that nothing is rounded again.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if model.config.model_type not in ("llama", "mistral", "qwen2", "qwen3"):
        raise SystemExit(f"outliers: do not know the norms of {model.config.model_type}")
    chosen = np.random.default_rng(seed).choice(model.config.hidden_size, size=channels, replace=False).tolist()
    with torch.no_grad():
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            readers = {
                block.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
                block.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
            }
            for norm, linears in readers.items():
                norm.weight[chosen] *= factor
                for linear in linears:
                    linear.weight[:, chosen] /= factor
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
    return out
