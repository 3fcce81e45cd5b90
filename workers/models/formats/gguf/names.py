"""GGUF's names of a family's tensors; and names for the parts of tensors that hold several matrices."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod

from outrider.workers.models.formats.gguf.architectures.architecture import Architecture, Values, of_stream
from outrider.workers.models.formats.gguf.blocks import BY_NAME
from outrider.workers.models.headers import Entry

BLOCK = re.compile(r"blk\.(\d+)\.")
EXPERT = re.compile(r"(?:(?:mlp|feed_forward|block_sparse_moe|mixer)\.)?experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
# Tensors that are stored together for all experts of a layer, or for all heads.
HEAD_NORM = re.compile(r"self_attn\.[qk]_layernorm\.norms\.(\d+)\.weight")
TOGETHER_QKV = re.compile(r"(blk\.\d+)\.attn_qkv\.(weight|bias)")
QKV = re.compile(r"attn_[qkv](\.(?:weight|bias))")
NORMS = re.compile(r"blk\.\d+\.attn_[qk]_norm\.weight")
TOGETHER = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)_exps\.(?:weight|bias)")
# Gate and up of all experts in one tensor (an option of the converter), each expert's gate before its up.
GATE_AND_UP = re.compile(r"(blk\.\d+\.ffn)_gate_up_exps\.weight")
GATE_OR_UP = re.compile(r"ffn_(?:gate|up)_exps(?=\.weight)")
# Latent attention: the matrices of all heads' keys, and of their values.
OF_HEADS = re.compile(r"blk\.\d+\.attn_[kv]_b\.weight")
# What a layer for multi-token prediction has besides a layer's usual parts.
OF_MTP = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "shared_head_norm.weight",
}
# Gemma 3n: a matrix for each stream but the first.
OF_STREAMS = re.compile(r"altup_(?:unembd_)?proj\.weight")
# Tensors whose dimensions differ between files and families (``_family_shape``): SHARED_GATE is a vector in files and a
# matrix of one row in families; CORRECTIONS the reverse; COLUMNS are matrices of one column, OF_GROUPS of one row for each
# group, both vectors in families; TAPS have two dimensions in files, TAPS_OF_PARTS four, and three in families.
SHARED_GATE = "ffn_gate_inp_shexp.weight"
CORRECTIONS = "exp_probs_b.bias"
COLUMNS = (".ssm_a", ".ssm_d")
OF_GROUPS = "ssm_norm.weight"
TAPS_OF_PARTS = ("ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight")
TAPS = ("ssm_conv1d.weight", "shortconv.conv.weight")


def part_of(architecture: Architecture, name: str) -> tuple[str, str]:
    """(number of the tensor's layer, or "" outside of layers; name after that)."""
    if not name.startswith(architecture.layers):
        return "", name
    layer, _, part = name.removeprefix(architecture.layers).partition(".")
    return layer, part


def block_of(name: str) -> int | None:
    """The number of the layer that a tensor of the file belongs to."""
    found = BLOCK.match(name)
    return None if found is None else int(found[1])


def module_of(part: str) -> str:
    """The name without ".weight" or ".bias"."""
    return part.rpartition(".")[0] if part.endswith((".weight", ".bias")) else part


def stored_name(architecture: Architecture, name: str) -> str:
    """GGUF's name of a family's tensor; the same name where GGUF has none."""
    layer, part = part_of(architecture, name)
    names = architecture.parts if layer else architecture.whole
    if layer and part in OF_MTP:
        return f"blk.{layer}.nextn.{OF_MTP[part]}"
    before = f"blk.{layer}." if layer else ""
    if layer and (expert := EXPERT.fullmatch(part)):
        return _of_expert(f"{before}ffn_{expert[2]}_exps.{expert[3]}", int(expert[1]))
    if layer and (head := HEAD_NORM.fullmatch(part)):
        return _of_head(f"{before}{names[part.rpartition('.norms.')[0]]}.weight", int(head[1]))
    if part in names:
        return before + names[part]
    module, _, ending = part.rpartition(".")
    return f"{before}{names[module]}.{ending}" if module in names else name


def seen_otherwise(tensors: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries for the parts of tensors that hold several matrices ("… of expert 3"), and entries with the dimensions that
    families have."""
    found = {}
    for name, entry in tensors.items():
        if TOGETHER.fullmatch(name) and len(entry.shape) > 1:
            kind, shape = BY_NAME[entry.type], entry.shape[1:]
            size = prod(shape) // kind.values * kind.bytes
            for expert in range(entry.shape[0]):
                found[_of_expert(name, expert)] = replace(entry, shape=shape, offset=entry.offset + expert * size)
        if (both := GATE_AND_UP.fullmatch(name)) and len(entry.shape) == 3 and entry.shape[1] % 2 == 0:
            found |= _gates_and_ups(both[1], entry)
        if NORMS.fullmatch(name) and len(entry.shape) == 2:
            kind = BY_NAME[entry.type]
            for head in range(entry.shape[0]):
                start = head * entry.shape[1] // kind.values * kind.bytes
                found[_of_head(name, head)] = replace(entry, shape=entry.shape[1:], offset=entry.offset + start)
        if OF_HEADS.fullmatch(name) and len(entry.shape) == 3:
            found[of_all_heads(name)] = replace(entry, shape=(entry.shape[0] * entry.shape[1], entry.shape[2]))
        if OF_STREAMS.fullmatch(name) and len(entry.shape) == 3:
            kind, shape = BY_NAME[entry.type], entry.shape[1:]
            size = prod(shape) // kind.values * kind.bytes
            for stream in range(entry.shape[0]):
                found[of_stream(name, stream)] = replace(entry, shape=shape, offset=entry.offset + stream * size)
        shape = _family_shape(name, entry.shape)
        if shape != entry.shape:
            found[name] = replace(entry, shape=shape)
    return found


def _gates_and_ups(before: str, entry: Entry) -> dict[str, Entry]:
    kind, shape = BY_NAME[entry.type], (entry.shape[1] // 2, entry.shape[2])
    size = prod(shape) // kind.values * kind.bytes
    return {
        _of_expert(f"{before}_{half}_exps.weight", expert): replace(
            entry, shape=shape, offset=entry.offset + (2 * expert + place) * size
        )
        for expert in range(entry.shape[0])
        for place, half in enumerate(("gate", "up"))
    }


def holder(name: str, tensors: Collection[str]) -> str:
    """The name of the file's tensor that contains the entry of this name."""
    name = name.partition(" ")[0]
    joined = (QKV.sub(r"attn_qkv\1", name), GATE_OR_UP.sub("ffn_gate_up_exps", name))
    return next((each for each in joined if name not in tensors and each in tensors), name)


def _family_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name.endswith(SHARED_GATE) and len(shape) == 1:
        return (1, *shape)
    if name.endswith(CORRECTIONS) and len(shape) == 2 and shape[0] == 1:
        return shape[1:]
    if (NORMS.fullmatch(name) or name.endswith(OF_GROUPS)) and len(shape) == 2:
        return (prod(shape),)
    if name.endswith(COLUMNS) and len(shape) > 1 and prod(shape) == max(shape):
        return (prod(shape),)
    if name.endswith(TAPS_OF_PARTS) and len(shape) == 4 and shape[0] == 1:
        return shape[1:]
    if name.endswith(TAPS) and len(shape) == 2:
        return (shape[0], 1, shape[1])
    return shape


def apart(architecture: Architecture, config: Values, tensors: Mapping[str, Entry]) -> dict[str, Entry]:
    """Separate entries for queries, keys and values, where the file has one tensor for them and the family three."""
    if "attn_q" not in architecture.parts.values() or "head_dim" not in config:
        return {}
    size, heads, kv_heads = (config[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    widths = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
    found = {}
    for name, entry in tensors.items():
        if not (together := TOGETHER_QKV.fullmatch(name)) or entry.shape[0] != sum(widths.values()):
            continue
        kind, start = BY_NAME[entry.type], entry.offset
        for part, width in widths.items():
            shape = (width, *entry.shape[1:])
            found[f"{together[1]}.attn_{part}.{together[2]}"] = replace(entry, shape=shape, offset=start)
            start += prod(shape) // kind.values * kind.bytes
    return found


def _of_expert(name: str, expert: int) -> str:
    return f"{name} of expert {expert}"


def expert_of(name: str) -> int | None:
    """The expert's number in a name of ``_of_expert``."""
    _, found, expert = name.partition(" of expert ")
    return int(expert) if found else None


def _of_head(name: str, head: int) -> str:
    return f"{name} of head {head}"


def of_all_heads(name: str) -> str:
    """The name for all rows of a tensor with a matrix for each head, concatenated by head."""
    return f"{name} of all heads"
