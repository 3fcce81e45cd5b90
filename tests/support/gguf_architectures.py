"""GGUF files of dense architectures, written as llama.cpp's converter writes them.

Names of tensors and keys are from the gguf package; changes of values and of the order of rows are the converter's code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_models import Choose, add_tokenizer, permuted, write_tensors
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.distributions import Normal

Values = NDArray[np.float32]
Tensors = dict[str, Values]
Config = dict[str, Any]


def _permute(tensors: Tensors, config: Config) -> Tensors:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in tensors.items():
        for part, count in heads.items():
            if part in name:
                tensors[name] = permuted(values, count)
    return tensors


def _permute_norms(tensors: Tensors, config: Config) -> Tensors:
    for name, values in tensors.items():
        if "query_layernorm" in name or "key_layernorm" in name:
            tensors[name] = permuted(values, 1)
    return tensors


def _plus_one(tensors: Tensors, config: Config) -> Tensors:
    return {name: values + np.float32(1) if name.endswith("norm.weight") else values for name, values in tensors.items()}


def _turned(tensors: Tensors, config: Config) -> Tensors:
    endings = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {name: values.T if name.endswith(endings) else values for name, values in tensors.items()}


def _neox(tensors: Tensors, config: Config) -> Tensors:
    heads = config["num_attention_heads"] if "num_attention_heads" in config else config["n_head"]
    for name, values in tensors.items():
        if "query_key_value" in name:
            each = values.reshape(heads, 3, -1, *values.shape[1:])
            tensors[name] = np.concatenate([each[:, part].reshape(-1, *values.shape[1:]) for part in range(3)])
    return tensors


def _without_prefix(tensors: Tensors, config: Config) -> Tensors:
    return {name.removeprefix("transformer."): values for name, values in tensors.items()}


def _falcon(tensors: Tensors, config: Config) -> Tensors:
    heads, groups = config["num_attention_heads"], _falcon_groups(config)
    size = config["hidden_size"] // heads
    for name, values in tensors.items():
        if "query_key_value" in name:
            each = values.reshape(groups, heads // groups + 2, size, -1)
            parts = (each[:, :-2], each[:, [-2]], each[:, [-1]])
            tensors[name] = np.concatenate([part.reshape(-1, values.shape[1]) for part in parts])
    return tensors


def _falcon_groups(config: Config) -> int:
    return 1 if config["multi_query"] and not config["new_decoder_architecture"] else int(config["num_kv_heads"])


def _stacked_norms(tensors: Tensors, config: Config) -> Tensors:
    heads: dict[str, dict[int, Values]] = {}
    for name in [name for name in tensors if ".norms." in name]:
        module, _, head = name.removesuffix(".weight").rpartition(".norms.")
        heads.setdefault(module, {})[int(head)] = tensors.pop(name)
    return tensors | {f"{module}.weight": np.stack([each[i] for i in range(len(each))]) for module, each in heads.items()}


def _with_long_factors(tensors: Tensors, config: Config) -> Tensors:
    found = {}
    for kind in ("short", "long"):
        if factors := config["rope_parameters"].get(f"{kind}_factor"):
            found[f"rope_factors_{kind}.weight"] = np.array(factors, np.float32)
    return tensors | found


def _shared_apart(tensors: Tensors, config: Config) -> Tensors:
    for name in [name for name in tensors if "shared_mlp" in name]:
        values, layer = tensors.pop(name), name.split("shared_mlp")[0]
        if "input_linear" in name:
            tensors[f"{layer}mlp.gate_proj.weight"], tensors[f"{layer}mlp.up_proj.weight"] = np.split(values, 2)
        else:
            tensors[f"{layer}mlp.down_proj.weight"] = values
    return tensors


def _partial(size: int, config: Config) -> int:
    return int(size * config["rope_parameters"].get("partial_rotary_factor", 1.0))


INTEGER = gguf.GGUFValueType.UINT32
KINDS = {
    int: INTEGER,
    float: gguf.GGUFValueType.FLOAT32,
    bool: gguf.GGUFValueType.BOOL,
    str: gguf.GGUFValueType.STRING,
    list: gguf.GGUFValueType.ARRAY,
}
SHORT = (("num_attention_heads", "n_head", "n_heads"), ("hidden_size", "n_embd", "d_model"))
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def _common(writer: gguf.GGUFWriter, config: Config) -> int:
    """Writes the keys of all architectures; returns the size of a head."""
    heads, width = (int(next(config[name] for name in names if name in config)) for names in SHORT)
    writer.add_context_length(next((config[name] for name in LENGTHS if name in config), width))
    writer.add_embedding_length(width)
    writer.add_block_count(layers_of(config))
    ffn = [config[name] for name in ("intermediate_size", "n_inner", "ffn_hidden_size") if name in config]
    writer.add_feed_forward_length(ffn[0] if ffn else 4 * width)
    writer.add_head_count(heads)
    if (kv_heads := config.get("num_key_value_heads")) is not None:
        writer.add_head_count_kv(kv_heads)
    if (epsilon := config.get("rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(epsilon)
    for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if key in config:
            writer.add_layer_norm_eps(config[key])
            if config["model_type"] == "exaone":
                writer.add_layer_norm_rms_eps(config[key])
    size = int(config.get("head_dim") or width // heads)
    if config.get("head_dim"):
        writer.add_key_length(size)
        writer.add_value_length(size)
    rope: Config = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(_partial(size, {"rope_parameters": rope}))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    return size


def layers_of(config: Config) -> int:
    return int(next(config[name] for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if name in config))


def _gemma2(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _gemma3(writer: gguf.GGUFWriter, config: Config) -> None:
    if cap := config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(cap)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])


def _gemma3n(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    deviations = Normal(0, 1).icdf(torch.tensor(config["activation_sparsity_pattern"], dtype=torch.float32))
    writer.add_activation_sparsity_scale(deviations.tolist())
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    _gemma3(writer, config)


def _stacked_streams(tensors: Tensors, config: Config) -> Tensors:
    for name in ("model.altup_projections", "model.altup_unembed_projections"):
        streams = [tensors.pop(f"{name}.{stream}.weight") for stream in range(config["altup_num_inputs"] - 1)]
        tensors[f"{name}.weight"] = np.stack(streams)
    for name in [name for name in tensors if name.endswith("_scale")]:
        tensors[f"{name}.weight"] = tensors.pop(name)
    return tensors


def _gemma4(writer: gguf.GGUFWriter, config: Config) -> None:
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    full = config["per_layer_config"][str(sliding.index(False))]
    size, shared = full["head_dim"], config["num_kv_shared_layers"]
    for name in ("attention.key_length", "attention.value_length"):
        writer.kv_data[0].pop(f"gemma4.{name}", None)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(size)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    kv_heads, kv_full = config["num_key_value_heads"], full.get("num_key_value_heads")
    if kv_full is not None:
        writer.add_head_count_kv([kv_heads if each else kv_full for each in sliding])
    ffn, own = config["intermediate_size"], len(sliding) - shared
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([ffn if layer < own else 2 * ffn for layer in range(len(sliding))])
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    _gemma3(writer, config)


# The gguf package has no names for these: they are from the converter's code.
SCALES = {"layer_scalar": "", "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def _proportional(tensors: Tensors, config: Config) -> Tensors:
    """Adds the divisors of rope's frequencies in full-attention layers: 1 for the part of a head that is rotated, else
    1e30."""
    full = config["layer_types"].index("full_attention")
    size = config["per_layer_config"][str(full)]["head_dim"]
    turned = int(size * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    for ending, stored in SCALES.items():
        for name in [name for name in tensors if name.endswith(f".{ending}")]:
            layer = name.split(".")[2]
            tensors[f"{name}.weight" if ending == "layer_scalar" else f"blk.{layer}.{stored}"] = tensors.pop(name)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[f"{name}.weight"] = tensors.pop(name)
    return tensors | {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (size // 2 - turned), np.float32)}


def _phi3(writer: gguf.GGUFWriter, config: Config) -> None:
    original, longest = config["original_max_position_embeddings"], config["max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config["sliding_window"] or 0)
    if config["rope_parameters"].get("long_factor"):
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(longest / original) / np.log(original))))


def _granite(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] == "granitemoehybrid":
        # Granite 4 without recurrent layers.
        writer.add_head_count_kv([config["num_key_value_heads"]] * config["num_hidden_layers"])
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
        writer.add_rope_scaling_finetuned(True)


def _minicpm(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _cohere(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)


def _windows(writer: gguf.GGUFWriter, config: Config) -> None:
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _parallel(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_parallel_residual(config["use_parallel_residual"])


def _falcon_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_tensor_data_layout("jploski")
    writer.add_head_count_kv(_falcon_groups(config))


def _mpt(writer: gguf.GGUFWriter, config: Config) -> None:
    attention = config["attn_config"]
    if attention["clip_qkv"] is not None:
        writer.add_clamp_kqv(attention["clip_qkv"])
    writer.add_max_alibi_bias(float(attention["alibi_bias_max"]) if attention["alibi"] else 0.0)


def _no_scaling(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _olmo(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_layer_norm_eps(1e-5)


def _mistral3(writer: gguf.GGUFWriter, config: Config) -> None:
    rope = config["rope_parameters"]
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def nothing_more(writer: gguf.GGUFWriter, config: Config) -> None:
    pass


@dataclass(frozen=True)
class Written:
    keys: Callable[[gguf.GGUFWriter, Config], None] = nothing_more
    steps: tuple[Callable[[Tensors, Config], Tensors], ...] = field(default=())


WRITTEN: dict[str, Written] = {
    "gemma": Written(steps=(_plus_one,)),
    "gemma2": Written(_gemma2, (_plus_one,)),
    "gemma3": Written(_gemma3, (_plus_one,)),
    "gemma3n": Written(_gemma3n, (_stacked_streams,)),
    "gemma4": Written(_gemma4, (_proportional,)),
    "phi2": Written(),
    "phi3": Written(_phi3, (_with_long_factors,)),
    "granite": Written(_granite, (_permute, _shared_apart)),
    "minicpm": Written(_minicpm, (_permute,)),
    "maincoder": Written(steps=(_permute, _permute_norms)),
    "glm4": Written(),
    "chatglm": Written(),
    "ernie4_5": Written(),
    "command-r": Written(_cohere),
    "cohere2": Written(_cohere),
    "olmo": Written(_olmo, steps=(_permute,)),
    "olmo2": Written(_windows),
    "smollm3": Written(steps=(_permute,)),
    "arcee": Written(steps=(_permute,)),
    "mistral3": Written(_mistral3, steps=(_permute,)),
    "internlm2": Written(steps=(_permute,)),
    "seed_oss": Written(),
    "hunyuan-dense": Written(),
    "exaone": Written(),
    "exaone4": Written(_windows),
    "starcoder2": Written(),
    "stablelm": Written(_parallel, (_stacked_norms,)),
    "jais2": Written(),
    "nemotron": Written(_no_scaling, (_plus_one,)),
    "gpt2": Written(steps=(_turned,)),
    "gptneox": Written(_parallel, (_neox,)),
    "falcon": Written(_falcon_keys, (_falcon,)),
    "bloom": Written(steps=(_neox, _without_prefix)),
    "mpt": Written(_mpt),
}


def write_architecture(
    source: Path, out: Path, architecture: str, choose: Choose, fused: bool = False, **more: Any
) -> Path:
    """``fused``: queries, keys and values as one tensor (an option of the converter). ``more`` are metadata keys."""
    config: Config = json.loads((source / "config.json").read_text())
    written = WRITTEN[architecture]
    writer = gguf.GGUFWriter(str(out), architecture)
    _common(writer, config)
    written.keys(writer, config)
    add_tokenizer(writer, source, config)
    for key, value in more.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        writer.kv_data[0].pop(name, None)
        writer.add_key_value(name, value, KINDS[type(value)], INTEGER if isinstance(value, list) else None)
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(source / "model.safetensors").items()}
    for step in written.steps:
        tensors = step(tensors, config)
    stored = named(tensors, architecture, layers_of(config))
    write_tensors(writer, together(stored) if fused else stored, choose)
    return out


def named(tensors: Tensors, architecture: str, layers: int) -> Tensors:
    number = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, layers)
    found = {}
    for name, values in tensors.items():
        stored = name if name.startswith(("rope_", "blk.")) else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, f"{architecture} has no name for {name}"
        found[stored] = values
    return found


def together(tensors: Tensors) -> Tensors:
    """Concatenates the queries, keys and values of each layer to one tensor."""
    found = dict(tensors)
    for name in tensors:
        if ".attn_q." in name:
            parts = [found.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            found[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    return found
