"""A small twin of a model: the same class and the same features in a few narrow layers, with random weights.

Whether an engine computes a model correctly depends on its operations, not on its size, so it is tried on a twin, in a
second. The twin keeps every kind of layer, and its windows, chunks and switches of rope are so short that a few dozen
tokens exceed all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

WIDTH, HEADS, HEAD_SIZE, INNER, RANK, STATE = 64, 4, 16, 48, 16, 8
VOCABULARY, CONTEXT = 101, 128
EXPERTS, CHOSEN_EXPERTS = 4, 2
# How many layers of each kind are kept, and the least and most in all.
OF_A_KIND, LEAST_LAYERS, MOST_LAYERS = 2, 2, 12
# Small, so that it affects a twin's small scores.
SOFT_CAP = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """A twin's window, chunk and switch of long rope, in tokens."""

    window: int = 6
    chunk: int = 8
    switch: int = 40


NEAR = Limits()

# The twin's sizes, by the keys of configurations.
SIZES: dict[str, int] = {
    name: size
    for size, names in (
        (
            WIDTH,
            """hidden_size n_embd d_model dim emb_dim embedding_dim embedding_size attention_hidden_size lru_width
            input_embedding_size output_embedding_size word_embed_proj_dim dim_model_base""",
        ),
        (2 * WIDTH, "mamba_d_ssm"),
        (
            HEADS,
            """num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads
            num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads linear_num_heads
            linear_num_value_heads""",
        ),
        (
            HEAD_SIZE,
            """head_dim swa_head_dim global_head_dim kv_channels attention_head_size d_head dim_head attention_head_dim
            qk_nope_head_dim v_head_dim swa_v_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim
            index_head_dim indexer_head_dim mamba_d_head mamba_head_dim mamba_headdim""",
        ),
        (HEAD_SIZE // 2, "qk_rope_head_dim rotary_dim"),
        (HEAD_SIZE + HEAD_SIZE // 2, "qk_head_dim"),
        (INNER, "dim_ff dff d_inner feed_forward_size n_inner ffn_hidden_size"),
        (
            RANK,
            """q_lora_rank kv_lora_rank o_lora_rank gated_norm_rank laurel_rank adapter_rank altup_rank hc_lowrank
            router_hidden_size hidden_size_per_layer_input ple_embed_dim""",
        ),
        (
            STATE,
            """mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads n_mamba_heads chunk_size
            mamba_chunk_size local_attn_chunk_length lsh_attn_chunk_length""",
        ),
        (CONTEXT, "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length"),
        (CONTEXT, "max_target_positions max_sequence_length seq_length"),
        (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
        (EXPERTS, "mamba_dt_rank time_step_rank index_block_size"),
        (
            CHOSEN_EXPERTS,
            """num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts num_shared_experts
            n_shared_experts moe_num_shared_experts n_group num_expert_group linear_num_key_heads index_topk_blocks
            o_groups kv_n_heads""",
        ),
        (1, "mamba_n_groups mamba_ngroups n_groups topk_group num_nextn_predict_layers mtp_num_hidden_layers"),
        (1, "num_kv_shared_layers"),
        # With fewer heads the index scores, which are at least 0, may all be 0: then the selected keys would be arbitrary.
        (16, "index_n_heads"),
    )
    for name in names.split()
}
WINDOWS = (
    *("sliding_window", "attention_window_size", "window_size", "local_attention", "local_attention_window_len"),
    *("sliding_window_size", "keep_window_size", "index_topk"),
)
CHUNKS = ("attention_chunk_size", "floor_scale")
SWITCHES = ("original_max_position_embeddings", "log_scaling_n_floor")
# Sizes that must be consistent with others (products, parts): a twin takes its own even where the model's are smaller.
EXACT = frozenset(
    (
        *("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_dim", "embedding_size"),
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
        *("head_dim", "swa_head_dim", "global_head_dim", "kv_channels", "attention_head_size", "d_head"),
        *("swa_num_attention_heads", "linear_num_heads", "linear_num_value_heads", "linear_num_key_heads"),
        *("mamba_d_head", "mamba_head_dim", "mamba_headdim", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
    )
)
# Keys for the number of key heads.
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "decoder_layers", "num_blocks"),
    *("encoder_layers", "num_encoder_layers"),
)
# Keys for the period of a kind of layer.
EVERY = (
    *("global_attn_every_n_layers", "attn_layer_period", "expert_layer_period", "no_rope_layer_interval"),
    *("sliding_window_pattern", "_sliding_window_pattern", "layer_group_size", "full_attention_interval"),
    *("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval", "n_layers_per_attn_res_block"),
)
# Keys that hold indices of layers.
INDICES = (
    *(
        "full_attn_idxs",
        "hybrid_layer_ids",
        "mlp_only_layers",
        "moe_layers",
        "cross_attention_layers",
        "attn_layer_indices",
    ),
    *("ple_layer_ids",),
)
# Keys of a repeated pattern of layers.
PATTERNS = ("block_types",)


def twin_config(config: PretrainedConfig, limits: Limits = NEAR) -> PretrainedConfig:
    """The configuration with the sizes of a twin."""
    sizes = {
        **SIZES,
        **dict.fromkeys(WINDOWS, limits.window),
        **dict.fromkeys(CHUNKS, limits.chunk),
        **dict.fromkeys(SWITCHES, limits.switch),
    }
    values = config.to_dict()
    # Twins are not quantised.
    values.pop("quantization_config", None)
    # HRM computes this from its other keys.
    values.pop("num_layers_per_stack", None)
    return type(config)(**_shrunk(values, sizes))


def attention_of(config: PretrainedConfig, fused: bool) -> str | None:
    """transformers' name of the attention: its default for the model (None) if ``fused``, else its own code. Falcon's own
    adds the biases of ALiBi twice, and its default adds them once, as the model's makers do."""
    return None if fused or (config.model_type == "falcon" and config.alibi) else "eager"


def build_twin(config: PretrainedConfig, seed: int = 0, fused: bool = True) -> PreTrainedModel:
    """A float32 model of a twin's configuration, with random weights and the attention that ``attention_of`` chooses."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention_of(config, fused)
        ).eval()
        give_random_weights(model)
    return model


@torch.no_grad()
def give_random_weights(model: PreTrainedModel) -> None:
    """Random weights that keep activations at their size, with no norm, bias, sink or gate at its neutral value."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or "A_log" in name or "dt_bias" in name:
            continue
        if parameter.dim() < 2:
            neutral = 1.0 if name.endswith("weight") and parameter.mean() > 0.5 else 0.0
            parameter.normal_(0.0, 0.3).add_(neutral)
        else:
            parameter.normal_(0.0, 1.5 / math.sqrt(min(parameter.shape[-2:])))


ModelSizes = Mapping[str, int]


def _shrunk(values: Mapping[str, Any], sizes: ModelSizes) -> dict[str, Any]:
    count = next((values[key] for key in LAYERS if type(values.get(key)) is int), 0)
    kept = _kept_layers(values, count)
    return {key: _smaller(key, value, values, sizes, count, kept) for key, value in values.items()}


def _kept_layers(values: Mapping[str, Any], count: int) -> list[int]:
    """Indices of layers of every kind. Kinds differ in the lists with an entry for each layer, or in those that name
    layers; and enough layers are kept for the longest period."""
    others = [value for key, value in values.items() if key not in INDICES]
    lists = [value for value in others if isinstance(value, list) and len(value) == count]
    named = [values[key] for key in INDICES if isinstance(values.get(key), list)]
    seen, kept = Counter[str](), []
    for index in range(count):
        kind = repr([each[index] for each in lists if isinstance(each[index], str | int | float)])
        kind += repr([index in each for each in named])
        if seen[kind] < OF_A_KIND:
            seen[kind] += 1
            kept.append(index)
    every = [values[key] for key in EVERY if type(values.get(key)) is int and values[key] <= MOST_LAYERS]
    every += [len(values[key]) for key in PATTERNS if isinstance(values.get(key), list)]
    least = max([LEAST_LAYERS, *every]) if not lists else LEAST_LAYERS
    kept += [index for index in range(count) if index not in kept][: max(0, least - len(kept))]
    return sorted(kept)[:MOST_LAYERS]


def _smaller(key: str, value: Any, values: Mapping[str, Any], sizes: ModelSizes, count: int, kept: Sequence[int]) -> Any:
    if isinstance(value, dict):
        if key == "per_layer_config":
            own = {kept.index(int(name)): each for name, each in value.items() if int(name) in kept}
            return {str(index): _of_layer(each, values, sizes) for index, each in own.items()}
        return _small_rope(value, values, sizes) if key in ("rope_parameters", "rope_scaling") else _shrunk(value, sizes)
    if isinstance(value, list) and key in INDICES:
        return [kept.index(index) for index in value if index in kept]
    if isinstance(value, list) and len(value) == count and count:
        return [_smaller(key, value[index], values, sizes, 0, ()) for index in kept]
    if isinstance(value, list) and key == "axial_pos_embds_dim":
        return _parts(value, WIDTH)
    if type(value) is int:
        return _small_number(key, value, values, sizes, kept)
    if type(value) is float and "softcap" in key:
        return min(value, SOFT_CAP)
    return value


def _of_layer(own: Mapping[str, Any], values: Mapping[str, Any], sizes: ModelSizes) -> dict[str, Any]:
    """The values that one layer has instead of the common ones."""
    return {key: _smaller(key, value, {**values, **own}, sizes, 0, ()) for key, value in own.items()}


def _small_number(key: str, value: int, values: Mapping[str, Any], sizes: ModelSizes, kept: Sequence[int]) -> int:
    if key in LAYERS:
        return len(kept)
    if key in KEY_HEADS:
        heads = values.get("num_attention_heads") or values.get("n_head") or 0
        return 1 if value == 1 else HEADS if value == heads else HEADS // 2
    if key.endswith("token_id"):
        return value if value < VOCABULARY else VOCABULARY - 1
    if key in ("head_dim", "swa_head_dim") and "qk_rope_head_dim" in values:
        return _latent_head(value, values)
    if key == "num_heads" and "state_size" in values:
        return STATE
    if key in ("attention_hidden_size", "attention_head_dim") and "mamba_d_state" in values:  # of two concatenated streams
        return 2 * SIZES[key]
    if key in EXACT:
        return SIZES[key]
    if key in sizes:
        return min(value, sizes[key])
    if "intermediate_size" in key or key.endswith(("ffn_dim", "ffn_hidden_size")):
        return min(value, INNER)
    if "vocab" in key and not key.endswith("divisible_by"):
        return min(value, 1) * VOCABULARY
    if "softcap" in key:
        return 2
    if key == "first_k_dense_replace":
        return min(value, 1)
    return value


def _latent_head(value: int, values: Mapping[str, Any]) -> int:
    """The head size of latent attention: "head_dim" may be that of the part with rope, without rope, or of both."""
    rotated = values["qk_rope_head_dim"]
    whole = rotated + (values.get("swa_qk_nope_head_dim") or values.get("qk_nope_head_dim") or 0)
    return {rotated: SIZES["qk_rope_head_dim"], whole: SIZES["qk_head_dim"]}.get(value, HEAD_SIZE)


def _small_rope(parameters: Mapping[str, Any], values: Mapping[str, Any], sizes: ModelSizes) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in parameters.items():
        if isinstance(value, dict):
            small[key] = _small_rope(value, values, sizes)
        elif key in sizes and type(value) is int:
            small[key] = min(value, sizes[key])
        elif key in ("short_factor", "long_factor"):
            part = parameters.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
            rotated = SIZES["qk_rope_head_dim"] if "qk_rope_head_dim" in values else int(HEAD_SIZE * part)
            pairs = rotated // 2
            small[key] = [1.0 + index * (0.1 if key == "short_factor" else 1.0) for index in range(pairs)]
        elif key.endswith("mrope_section"):
            small[key] = _parts(value, HEAD_SIZE // 2)
        else:
            small[key] = value
    return small


def _parts(sections: Sequence[int], total: int) -> list[int]:
    """The sections scaled to another total."""
    shares = [max(1, each * total // max(1, sum(sections))) for each in sections]
    shares[0] += total - sum(shares)
    return shares
