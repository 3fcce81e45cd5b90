"""Refuses tensors of a checkpoint that the program does not use: they may be a part of the model that is not
implemented."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.other_names import HEADS
from outrider.workers.models.headers import quoted

# The ends of names that only quantised checkpoints have.
OF_QUANTISED = ("qweight", "qzeros", "weight_packed", "weight_scale_inv", "weight_scale", "SCB", "absmax", "quant_map")
# Buffers saved by older versions of transformers, which follow from the configuration.
HARMLESS = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|attn\.(bias|masked_bias|causal_mask)|attention\.(bias|masked_bias)|"
    r"embed_positions\._float_tensor|decoder\.version|position_ids)"
)
# Static scales of activations, keys and values are not used: the kernels compute a scale for each token, or none.
OF_ACTIVATIONS = re.compile(
    r".*\.(input_scale|input_global_scale|activation_scale|output_scale|input_zero_point|[kqv]_scale|[kqv]_zero_point)"
)


def check_plain(names: Iterable[str]) -> None:
    """Refuse tensors of a quantised checkpoint where there is no ``quantization_config``."""
    for name in names:
        if name.rpartition(".")[2] in OF_QUANTISED:
            raise ModelError(
                f"the checkpoint holds {quoted(name)}, as quantised ones do, and its config.json has no "
                "quantization_config that says how: put back the config.json that belongs to it"
            )


# Multi-token prediction layers (Qwen3-Next, ERNIE), which do not affect the next token.
OF_MTP = re.compile(r"(.*\.)?mtp[._].+")


def of_mtp(name: str, values: Mapping[str, Any]) -> bool:
    return OF_MTP.fullmatch(name) is not None


LAYER = re.compile(r"model\.layers\.(\d+)\..+")


def of_further_layer(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the tensor belongs to a multi-token prediction layer after the last one (GLM-4.5)."""
    layers, more = values.get("num_hidden_layers"), values.get("num_nextn_predict_layers")
    found = LAYER.fullmatch(name)
    return found is not None and type(layers) is int and type(more) is int and layers <= int(found[1]) < layers + more


# By transformers' names or GGUF's.
OF_KEYS_AND_VALUES = re.compile(
    r"(?:model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)|blk\.(\d+)\.attn_[kv](?:_norm)?)\..+"
)


def of_shared_keys(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the tensor is of keys or values in a layer that shares those of an earlier one. Published checkpoints of
    Gemma 3n and 4 have such tensors, which transformers ignores as well."""
    layers, shared = values.get("num_hidden_layers"), values.get("num_kv_shared_layers")
    found = OF_KEYS_AND_VALUES.fullmatch(name)
    if found is None or type(layers) is not int or type(shared) is not int:
        return False
    return layers - shared <= int(found[1] or found[2]) < layers


WITH_INDEXERS = (
    *("axk2", "deepseek_v32", "glm5_next_text", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text", "minimax_m3_vl_text"),
    *("mistral_large4_text", "qwen4_exp_text"),
)


def of_indexers(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the tensor is of an indexer of sparse attention (DeepSeek V3.2, GLM-5, A.X-K2, Hy4, MiniMax M3), which
    chooses the tokens that a token attends to. Rows here are so short that it would choose all tokens."""
    kind = values.get("model_type")
    if kind == "minimax_m3_vl_text" and ".self_attn.index_" in name:  # by the names of its makers
        return True
    return kind in WITH_INDEXERS and ".self_attn.indexer." in name


OF_PICTURES = re.compile(r"model\.layers\.\d+\.mlp\.(?:experts\.(\d+)\..+|gate\.weight_1)")


def of_vision_experts(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the tensor is of ERNIE 4.5 VL's experts for pictures, which follow those for texts, or of their router."""
    found, count = OF_PICTURES.fullmatch(name), values.get("moe_num_experts", 64)
    if found is None or values.get("model_type") != "ernie4_5_vl_moe_text" or type(count) is not int:
        return False
    return found[1] is None or count <= int(found[1]) < 2 * count


OF_EXPERTS = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.(?:gate|up)_proj\..+")


def of_idle_experts(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the tensor is of an expert of LongCat-Flash that computes nothing, for which transformers has room."""
    found, count, idle = OF_EXPERTS.fullmatch(name), values.get("n_routed_experts"), values.get("zero_expert_num")
    if found is None or values.get("model_type") != "longcat_flash" or type(count) is not int or type(idle) is not int:
        return False
    return count <= int(found[1]) < count + idle


def of_cross_attention(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the tensor is of a layer of Llama 3.2 Vision that attends to pictures, of which a text has none."""
    found, layers = LAYER.fullmatch(name), values.get("cross_attention_layers")
    if found is None or values.get("model_type") != "mllama_text_model" or not isinstance(layers, list):
        return False
    return int(found[1]) in layers


def refuse_unexpected(names: Iterable[str], quantised: bool) -> None:
    """Refuse a checkpoint with tensors of these names, which no part of the model asks for, unless they are harmless. An LM
    head is: it is left over only where it equals the embedding (tied_head.py)."""
    unexpected = sorted(
        name
        for name in names
        if not HARMLESS.fullmatch(name) and name not in HEADS and not (quantised and OF_ACTIVATIONS.fullmatch(name))
    )
    if unexpected:
        more = f" and {len(unexpected) - 1:,} more" if len(unexpected) > 1 else ""
        raise ModelError(
            f"the checkpoint holds {quoted(unexpected[0])}{more}, which no part of this model asks for: its config.json "
            "belongs to another model, or to a variant that is not known here"
        )
