"""Checks that a model's weight files are large enough for the sizes in its configuration.

A configuration with a billion layers would otherwise be built before the first missing weight is noticed. The bounds hold
for every family, since a weight takes at least one bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.headers import Outline, quoted

# Keys of sizes. Layers may share weights, but no model has so many layers that do.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MOST_LAYERS_THAT_SHARE = 256
WIDTHS = ("hidden_size", "n_embd", "n_embed", "d_model", "dim")
# Keys for the number of rows of matrices (or of heads and experts) whose columns are the model's width.
HEIGHTS = (
    *("vocab_size", "intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "num_attention_heads"),
    *("n_head", "n_heads", "head_dim", "word_embed_proj_dim", "q_lora_rank", "kv_lora_rank"),
)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "multi_query_group_num")
# Keys of lengths in tokens, which must fit into 32 bits.
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length", "sliding_window")
LONGEST = (1 << 31) - 1


def check_fits(path: Path, config: Mapping[str, Any], outline: Outline) -> None:
    """``config`` is that of the language model."""
    source = path / "config.json"
    for key in (*LAYERS, *WIDTHS, *HEIGHTS, *HEADS, *LENGTHS):
        _check_count(source, key, config.get(key))
    most = 8 * outline.size
    width = max((config[key] for key in WIDTHS if type(config.get(key)) is int), default=1)
    for key in HEIGHTS:
        height = config.get(key)
        if type(height) is int and height * width > most:
            raise ModelError(
                f'{source}: "{key}" {height:,} at a width of {width:,} asks for more than the files hold, which have '
                f"{outline.size:,} bytes"
            )
    heads = max((config[key] for key in HEADS if type(config.get(key)) is int), default=1)
    if type(size := config.get("head_dim")) is int and heads * size * width > most:
        raise ModelError(
            f'{source}: {heads:,} heads with a "head_dim" of {size:,} ask for more weights than the files hold: they have '
            f"{outline.size:,} bytes"
        )
    layers = next((config[key] for key in LAYERS if type(config.get(key)) is int), 0)
    if layers > max(MOST_LAYERS_THAT_SHARE, outline.size if outline.tensors is None else outline.tensors):
        told = f"{outline.size:,} bytes" if outline.tensors is None else f"{outline.tensors:,} weights"
        raise ModelError(f"{source} asks for {layers:,} layers, the files hold {told}")


def _check_count(source: Path, key: str, value: object) -> None:
    """A key may also hold a list, with an entry for each layer, or null."""
    if value is None or isinstance(value, list):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f'{source}: "{key}" must be a whole number, got {quoted(value)}')
    if key in LENGTHS and value > LONGEST:
        raise ModelError(f'{source}: "{key}" must be at most {LONGEST:,}, got {quoted(value)}')
