"""Writes checkpoints of mixtures and hybrids as GGUF files: llama.cpp's converter in short, by the gguf package's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_models import Choose, add_tokenizer, mostly, permuted, write_tensors
from numpy.typing import NDArray
from safetensors.torch import load_file

Floats = NDArray[np.float32]
Tensors = dict[str, Floats]
ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "backbone.embeddings.weight")
ENDINGS = (".weight", ".bias")
# Architectures that the gguf package lacks, with one that has the same tensors.
KNOWN_AS = {"cohere2moe": "exaone-moe", "hy_v3": "dots1", "mellum": "qwen3moe", "granite_swa": "granite"}
# Granite's fused gate and up, for whose two halves the package has one name only.
GRANITE = {"block_sparse_moe.input_linear": "exps", "shared_mlp.input_linear": "shexp"}


def convert(
    source: Path,
    out: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    choose: Choose | None = None,
    prepare: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    fuse_gate_and_up: bool = False,
    others: Mapping[str, Any] | None = None,
) -> Path:
    """``metadata``: keys after the architecture's name; ``others``: whole keys. ``prepare`` changes the tensors before they
    get GGUF's names."""
    choose = choose or mostly("F32")
    writer = gguf.GGUFWriter(str(out), architecture)
    for key, value in metadata.items():
        add(writer, f"{architecture}.{key}", value)
    for key, value in (others or {}).items():
        add(writer, key, value)
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(source / "model.safetensors").items()}
    embedding = next(name for name in tensors if name.endswith(EMBEDDINGS))
    vocabulary = len(tensors[embedding])
    add_tokenizer(writer, source, {"vocab_size": vocabulary})
    names = gguf.get_tensor_name_map(_number(architecture), metadata["block_count"])
    named = {
        names.get_name(name.replace("correction_bias", "correction.bias"), ENDINGS) or name: values
        for name, values in _together(prepare(tensors)).items()
    }
    write_tensors(writer, _fused(named) if fuse_gate_and_up else named, choose)
    return out


def _fused(tensors: Tensors) -> Tensors:
    """Concatenates gate and up of each expert."""
    found = {name: values for name, values in tensors.items() if "_gate_exps" not in name and "_up_exps" not in name}
    for name, values in tensors.items():
        if "_gate_exps" in name:
            both = [values, tensors[name.replace("_gate_exps", "_up_exps")]]
            found[name.replace("_gate_exps", "_gate_up_exps")] = np.concatenate(both, axis=1)
    return found


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {
        str: gguf.GGUFValueType.STRING,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        bool: gguf.GGUFValueType.BOOL,
        list: gguf.GGUFValueType.ARRAY,
    }
    writer.add_key_value(key, value, kinds[type(value)])


def _number(architecture: str) -> gguf.MODEL_ARCH:
    known = KNOWN_AS.get(architecture, architecture)
    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == known)


def _together(tensors: Tensors) -> Tensors:
    """Stacks the experts of a layer: one tensor each for gate, up and down."""
    found: Tensors = {}
    experts: dict[str, dict[int, Floats]] = {}
    for name, values in tensors.items():
        if expert := ONE_EXPERT.fullmatch(name):
            experts.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = values
        elif name.endswith(".experts.gate_up_proj"):
            half = values.shape[1] // 2
            found[name.replace("gate_up_proj", "gate_proj.weight")] = values[:, :half]
            found[name.replace("gate_up_proj", "up_proj.weight")] = values[:, half:]
        elif name.endswith(".experts.down_proj"):
            found[f"{name}.weight"] = values
        else:
            found[name] = values
    return found | {name: np.stack([each[number] for number in range(len(each))]) for name, each in experts.items()}


def bailing_moe_2(tensors: Tensors) -> Tensors:
    """Shifts the corrections of Sarvam's experts to a mean of zero, as the converter does."""
    found = {}
    for name, values in tensors.items():
        corrected = name.endswith(".expert_bias")
        found[f"{name}.bias" if corrected else name] = values - values.mean() if corrected else values
    return found


def flat_taps(tensors: Tensors) -> Tensors:
    """Drops the middle dimension of taps, and names the experts' corrections as a bias."""
    found = {}
    for name, values in tensors.items():
        name = name.replace("expert_bias", "expert_bias.bias")
        # The package's names of this family's experts lack the prefix "model.".
        name = name.removeprefix("model.") if ".feed_forward.experts" in name else name
        found[name] = values[:, 0] if name.endswith(("conv.conv.weight", "conv1d.weight")) else values
    return found


def heads_apart(heads: int, plain: int) -> Callable[[Tensors], Tensors]:
    """Splits kv_b_proj of latent attention by head into k_b_proj, transposed, and v_b_proj."""

    def prepare(tensors: Tensors) -> Tensors:
        found = {}
        for name, values in tensors.items():
            if name.endswith("kv_b_proj.weight"):
                keys, rest = np.split(values.reshape(heads, -1, values.shape[1]), [plain], axis=1)
                found[name.replace("kv_b_proj", "k_b_proj")] = keys.swapaxes(1, 2)
                found[name.replace("kv_b_proj", "v_b_proj")] = rest
            else:
                found[name] = values
        return found

    return prepare


def hy_v3(tensors: Tensors) -> Tensors:
    """Names the tensors for which the package has no names."""
    found = {}
    for name, values in tensors.items():
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if name.endswith(".mlp.expert_bias"):
            name = f"blk.{layer}.exp_probs_b"
        elif name.endswith("router.gate.weight"):
            name = f"blk.{layer}.ffn_gate_inp.weight"
        elif ".shared_mlp." in name:
            name = f"blk.{layer}.ffn_{name.split('.')[-2].removesuffix('_proj')}_shexp.weight"
        elif ".self_attn.q_norm" in name or ".self_attn.k_norm" in name:
            name = f"blk.{layer}.attn_{name.split('.')[-2]}.weight"
        found[name] = values
    return found


# Names for Granite with windows, whose gate and up stay one tensor.
SWA = {
    "self_attn.sinks": "attn_sinks",
    "block_sparse_moe.router.weight": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "shared_mlp.input_linear.weight": "ffn_up_shexp",
    "shared_mlp.output_linear.weight": "ffn_down_shexp",
}


def granite_swa(heads: int, kv_heads: int) -> Callable[[Tensors], Tensors]:
    def prepare(tensors: Tensors) -> Tensors:
        found = {}
        for name, values in tensors.items():
            layer, _, part = name.removeprefix("model.layers.").partition(".")
            found[f"blk.{layer}.{SWA[part]}.weight" if part in SWA else name] = values
        return granite(heads, kv_heads)(found)

    return prepare


def granite(heads: int, kv_heads: int) -> Callable[[Tensors], Tensors]:
    def prepare(tensors: Tensors) -> Tensors:
        found = {}
        for name, values in tensors.items():
            part = next((ending for part, ending in GRANITE.items() if part in name), None)
            if part is not None:
                layer, half = name.split(".")[2], values.shape[-2] // 2
                found[f"blk.{layer}.ffn_gate_{part}.weight"] = values[..., :half, :]
                found[f"blk.{layer}.ffn_up_{part}.weight"] = values[..., half:, :]
            elif "q_proj" in name or "k_proj" in name:
                found[name] = permuted(values, heads if "q_proj" in name else kv_heads)
            else:
                found[name] = values
        return found

    return prepare


def mamba(groups: int, before: Callable[[Tensors], Tensors] = lambda tensors: tensors) -> Callable[[Tensors], Tensors]:
    """Stores -exp(A_log), A_log and D as matrices of one column, and norms as matrices with a row for each group."""

    def prepare(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, values in flat_taps(before(tensors)).items():
            if name.endswith(".A_log"):
                values = -np.exp(values)[:, None]
            elif name.endswith((".mamba.D", ".mixer.D")):
                values = values[:, None]
            elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
                values = values.reshape(groups, -1)
            if ".mixer.experts." in name:
                name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
            found[name.replace("dt_bias", "dt_proj.bias")] = values
        return found

    return prepare


def mamba1(tensors: Tensors) -> Tensors:
    """Drops the middle dimension of taps, and stores -exp(A_log). (Of Mamba 1 it and D have no further dimension.)"""
    found = {}
    for name, values in tensors.items():
        values = values[:, 0] if name.endswith("conv1d.weight") else values
        found[name] = -np.exp(values) if name.endswith(".A_log") else values
    return found


def kimi_linear(heads: int, plain: int) -> Callable[[Tensors], Tensors]:
    """Stores taps in four dimensions and -exp(A_log), gives experts the usual names, and splits kv_b_proj by head."""

    def prepare(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, values in heads_apart(heads, plain)(tensors).items():
            if name.endswith("_conv1d.weight"):
                values = values[None]
            elif name.endswith(".A_log"):
                values = -np.exp(values)
            name = name.replace(".block_sparse_moe.", ".mlp.").replace("dt_bias", "dt_proj.bias")
            for theirs, usual in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                name = name.replace(f".{theirs}.", f".{usual}.")
            found[name] = values
        return found

    return prepare


def granite_alone(heads: int, kv_heads: int) -> Callable[[Tensors], Tensors]:
    """Names Granite's shared expert as the feed-forward layer, for models without experts."""

    def prepare(tensors: Tensors) -> Tensors:
        found = granite(heads, kv_heads)(tensors)
        names = {name: name.replace("_shexp", "").replace("shared_mlp.output_linear", "mlp.down_proj") for name in found}
        return {names[name]: values for name, values in found.items()}

    return prepare


def falcon_h1(config: Mapping[str, Any]) -> Callable[[Tensors], Tensors]:
    """Multiplies Falcon H1's multipliers into its matrices."""
    inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    widths = (inner, inner, shared, shared, config["mamba_n_heads"])
    of_rows = np.repeat(config["ssm_multipliers"], widths) * config["ssm_in_multiplier"]
    read, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors: dict[str, Any] = {
        "in_proj.weight": of_rows[:, None],
        "mamba.out_proj.weight": config["ssm_out_multiplier"],
        "q_proj.weight": read,
        "k_proj.weight": read * config["key_multiplier"],
        "v_proj.weight": read,
        "o_proj.weight": config["attention_out_multiplier"],
        "gate_proj.weight": gate,
        "down_proj.weight": down,
        "lm_head.weight": config["lm_head_multiplier"],
        "embed_tokens.weight": config["embedding_multiplier"],
    }

    def prepare(tensors: Tensors) -> Tensors:
        found = {}
        for name, values in tensors.items():
            factor = next((factor for ending, factor in factors.items() if name.endswith(ending)), 1.0)
            found[name] = (values * factor).astype(np.float32)
        return found

    return prepare


def delta_nets(config: Mapping[str, Any], reordered: bool) -> Callable[[Tensors], Tensors]:
    """Stores norms as 1 + w and -exp(A_log), splits Qwen3-Next's projections, and permutes Qwen3.5's value heads."""
    keys, key_size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values_, value_size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    each, before = values_ // keys, 2 * keys * key_size

    def tiled(tensor: Floats, size: int) -> Floats:
        shape = tensor.shape
        return tensor.reshape(keys, each, size, *shape[1:]).swapaxes(0, 1).reshape(shape) if reordered else tensor

    def behind(tensor: Floats) -> Floats:
        return np.concatenate([tensor[:before], tiled(tensor[before:], value_size)])

    changes: dict[str, Callable[[Floats], Floats]] = {
        "in_proj_qkv.weight": behind,
        "conv1d.weight": behind,
        "in_proj_z.weight": lambda tensor: tiled(tensor, value_size),
        "in_proj_a.weight": lambda tensor: tiled(tensor, 1),
        "in_proj_b.weight": lambda tensor: tiled(tensor, 1),
        "A_log": lambda tensor: tiled(-np.exp(tensor), 1),
        "dt_proj.bias": lambda tensor: tiled(tensor, 1),
        "linear_attn.out_proj.weight": lambda tensor: tiled(tensor.T, value_size).T,
    }

    def prepare(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, values in flat_taps(tensors).items():
            name = name.replace("dt_bias", "dt_proj.bias")
            change = next((change for ending, change in changes.items() if name.endswith(ending)), None)
            if change is not None:
                found[name] = change(values)
            elif name.endswith("in_proj_qkvz.weight"):
                layer, width = name.split(".")[2], each * value_size
                heads = np.split(values.reshape(keys, -1, values.shape[1]), np.cumsum([key_size, key_size, width]), axis=1)
                query, key, value, z = (part.reshape(-1, values.shape[1]) for part in heads)
                found[f"blk.{layer}.attn_qkv.weight"] = np.concatenate([query, key, value])
                found[f"blk.{layer}.attn_gate.weight"] = z
            else:
                centred = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
                found[name] = values + np.float32(1) if centred else values
        return found

    return prepare
