"""A Llama checkpoint as a GGUF file: what llama.cpp reads. Needs NumPy and the gguf package only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoint import tensors
from gguf.quants import quantize
from numpy.typing import NDArray

# The first name of each is transformers', the second llama.cpp's.
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def convert(source: Path, out: Path) -> Path:
    """Matrices in Q4_0, the head in Q8_0 (as llama.cpp's own Q4_0 files keep it finer), norms in F32."""
    if out.is_file():
        return out
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] != "llama":
        raise SystemExit(f"llama.cpp: {source} is of the family {config['model_type']}; this conversion knows llama only")
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(str(partial), "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_words(writer, json.loads((source / "tokenizer.json").read_text()), config["eos_token_id"])
    for name, values in tensors(source):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleaved(values, heads if "q_proj" in name else kv_heads)
        if values.ndim == 1:
            kind, data = gguf.GGMLQuantizationType.F32, values
        else:
            head = name == "lm_head.weight"
            kind = gguf.GGMLQuantizationType.Q8_0 if head else gguf.GGMLQuantizationType.Q4_0
            data = quantize(values, kind)
        writer.add_tensor(renamed(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)
    return out


def add_words(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], end: int) -> None:
    """The pocket pair's tokenizer, which cuts text as GPT-2's does."""
    model = tokenizer["model"]
    special = {entry["id"] for entry in tokenizer["added_tokens"]}
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([control if number in special else normal for number in range(len(words))])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def renamed(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    if name == "lm_head.weight":
        return "output.weight"
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[rest.removesuffix('.weight')]}.weight"


def interleaved(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp rotates neighbouring columns, transformers the two halves of a head."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
