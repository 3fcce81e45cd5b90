"""Gemma 3n: several streams of hidden states (AltUp), sparse gates, and features shared with Gemma 4."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import KNOWN, Architecture, of_stream
from outrider.workers.models.formats.gguf.architectures.gemma import AROUND
from outrider.workers.models.formats.gguf.architectures.gemma4 import (
    BY_LAYER,
    SHARED,
    WHOLE_GEMMA4,
    by_layer,
    of_layers_table,
)
from outrider.workers.models.formats.gguf.architectures.sizes import biased, head_size, heads_of, rms_epsilon, rope
from outrider.workers.models.formats.gguf.architectures.windows import FULL, KNOWN_OF_WINDOWS, SLIDING, WINDOW, layer_types
from outrider.workers.models.formats.gguf.metadata import Metadata
from outrider.workers.models.headers import quoted

DEVIATIONS, STREAMS, ACTIVE = "activation_sparsity_scale", "altup.num_inputs", "altup.active_idx"
CAP = "final_logit_softcapping"
# llama.cpp knows no other number of streams.
COUNT = 4
NARROW = "blk.0.laurel_l.weight"
PARTS = AROUND | {
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
WHOLE = WHOLE_GEMMA4 | {
    f"model.{name}.{stream}.weight": of_stream(f"{stored}.weight", stream)
    for name, stored in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj"))
    for stream in range(COUNT - 1)
}


def _gemma3n(metadata: Metadata) -> dict[str, Any]:
    types = layer_types(metadata, 5)
    if metadata.get(STREAMS, int, COUNT) != COUNT:
        metadata.refuse_value(STREAMS)
    if not metadata.has_tensor(NARROW):
        metadata.refuse(f"lacks the tensor {quoted(NARROW)}")
    width = metadata.get(BY_LAYER, int)
    local = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", float, 10000.0)}
    return (
        rms_epsilon(metadata)
        | {
            "model_type": "gemma3n_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "num_hidden_layers": len(types),
            "hidden_size": metadata.get("embedding_length", int),
            "intermediate_size": by_layer(metadata, "feed_forward_length", len(types)),
            "num_attention_heads": heads_of(metadata),
            "num_key_value_heads": metadata.get("attention.head_count_kv", int),
            "head_dim": head_size(metadata),
            "max_position_embeddings": metadata.get("context_length", int),
            "attention_bias": biased(metadata),
            "num_kv_shared_layers": metadata.get(SHARED, int),
            "layer_types": types,
            "sliding_window": metadata.get(WINDOW, int),
            "rope_parameters": {FULL: rope(metadata), SLIDING: local},
            "final_logit_softcapping": metadata.get(CAP, float, 30.0),
            "altup_num_inputs": COUNT,
            "altup_active_idx": metadata.get(ACTIVE, int, 0),
            "laurel_rank": metadata.file.tensors[NARROW].shape[0],
            "hidden_size_per_layer_input": width,
        }
        | of_layers_table(metadata, width)
        | _shares(metadata, len(types))
    )


def _shares(metadata: Metadata, layers: int) -> dict[str, Any]:
    """The sparsity of the gates, from the threshold that the file states in standard deviations above the mean."""
    if not metadata.has(DEVIATIONS):
        return {}
    deviations = metadata.several(DEVIATIONS, float, layers)
    return {"activation_sparsity_pattern": [NormalDist().cdf(each) for each in deviations]}


KNOWN_OF_GEMMA3N = KNOWN | KNOWN_OF_WINDOWS | {SHARED, BY_LAYER, DEVIATIONS, STREAMS, ACTIVE, CAP}
ARCHITECTURES = {"gemma3n": Architecture(_gemma3n, KNOWN_OF_GEMMA3N, parts=PARTS, whole=WHOLE)}
