"""Alternative names of tensors in published checkpoints. Builders ask for transformers' names, or the most common ones."""

from __future__ import annotations

HEAD = "lm_head.weight"
# Other names of the LM head: GPT-NeoX's, BioGPT's, ModernBERT's.
OTHER_HEADS = ("embed_out.weight", "output_projection.weight", "decoder.weight")
HEADS = (HEAD, *OTHER_HEADS)
# (part of the name that builders ask for, the same part in the family's own checkpoints).
OTHERS = (
    (".mlp.gate.moe_statics.", ".mlp.moe_statics."),  # ERNIE 4.5
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),  # K-EXAONE
    (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"),  # Sarvam
    (".mlp.gate.e_score_correction_bias", ".moe.router.expert_bias"),  # Kolibri
    (".post_self_attn_layernorm.", ".post_attn_norm."),
    (".post_mlp_layernorm.", ".post_ffn_norm."),
    (".mlp.gate.e_score_correction_bias", ".mlp.experts.e_score_correction_bias"),  # Laguna
    (".mlp.shared_experts.", ".mlp.shared_expert."),
    ("backbone.embeddings.", "backbone.embedding."),  # older Mambas
    ("model.embed_tokens.", "model.word_embeddings."),
    (".self_attn.sinks", ".self_attn.softmax_offset"),  # Flint
    (".self_attn.sinks", ".self_attn.attention_sink_bias"),  # MiMo-V2-Flash
    (".self_attn.sinks", ".self_attn.learnable_sink_param"),  # Hy4
    (".gate_proj.", ".linear_gate."),
    # Hy4's makers' names, and those that transformers writes.
    (".attn_hc.", ".hc_attn_layer.hc_pre.hc_"),
    (".attn_hc.", ".hc_pre.hc_attn_layer.hc_"),
    (".ffn_hc.", ".hc_mlp_layer.hc_pre.hc_"),
    (".ffn_hc.", ".hc_pre.hc_mlp_layer.hc_"),
    (".attn_hc.", ".hc_attn_"),  # GLM-5.3-Flash
    (".ffn_hc.", ".hc_ffn_"),
    (".hc_head.hc_", ".hc_head.hc_pre.hc_head_"),
    (".hc_head.hc_", ".hc_head.hc_head_"),
    (".hc_head.hc_", ".hc_pre.hc_head.hc_head_"),
    (".self_attn.qkv_proj.", ".attention.query_key_value."),
    (".self_attn.q_norm.", ".attention.query_layernorm."),
    (".self_attn.k_norm.", ".attention.key_layernorm."),
    (".self_attn.o_proj.", ".attention.dense."),
    (".self_attn.", ".attention."),  # Ling 3
    (".self_attn.gate_proj.", ".self_attn.g_proj."),  # LFM3
    (".self_attn.q_gate_proj.", ".self_attn.q_b_proj."),  # A.X-K2
    (".W_down.", ".mlp.fc1."),
    (".W_up.", ".mlp.fc2."),
    (".linear_attn.norm.", ".linear_attn.out_norm."),  # Lara 4 Mini
    (".input_layernorm.", ".attention_layer_norm."),  # OLMo Hybrid
    (".post_attention_layernorm.", ".feedforward_layer_norm."),
    (".mlp.gate.weight", ".mlp.router.gate.weight"),  # Hy3
    (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
    (".mlp.shared_experts.", ".mlp.shared_mlp."),
    (".mlp.e_score_correction_bias", ".block_sparse_moe.e_score_correction_bias"),  # MiniMax-M2
    (".mlp.gate.e_score_correction_bias", ".block_sparse_moe.e_score_correction_bias"),  # MiniMax M3
    (".mlp.router.weight", ".block_sparse_moe.gate.weight"),  # Phi-3.5-MoE
    (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),  # Granite
    (".mlp.gate.weight", ".block_sparse_moe.gate.weight"),  # Mixtral
    (".mlp.", ".block_sparse_moe."),  # Kimi Linear
    (".mlp.gate.weight", ".moe.gate.weight"),  # Step 3.7
    (".mlp.gate.e_score_correction_bias", ".moe.router_bias"),
    (".mlp.shared_experts.", ".share_expert."),
)
# Mixtral's names of an expert's matrices.
MATRICES = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def names_of(name: str) -> tuple[str, ...]:
    """The name itself, the name in a checkpoint of the bare decoder, and alternatives."""
    if name == HEAD:
        return HEADS
    found = [name, name.split(".", 1)[1]]
    if ".experts." in name:
        mixtral = name.replace(".mlp.", ".block_sparse_moe.")
        for ours, theirs in MATRICES:
            mixtral = mixtral.replace(f".{ours}.", f".{theirs}.")
        found.append(mixtral)
    return (*found, *(name.replace(ours, theirs) for ours, theirs in OTHERS if ours in name))
