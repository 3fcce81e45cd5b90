"""The metadata of experts: their number and width, and the routing."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import GATED, KNOWN
from outrider.workers.models.formats.gguf.metadata import Metadata

# llama.cpp's numbers of the functions that turn a router's logits into scores.
SOFTMAX, SIGMOID = 1, 2
# The keys of windows are not among them: architectures that may have windows add these.
KNOWN_OF_EXPERTS = KNOWN | {
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
}
# The width of the shared expert.
SHARED_WIDTH = "expert_shared_feed_forward_length"
GROUP_COUNT, GROUPS_KEPT = "expert_group_count", "expert_group_used_count"
# The router. (The experts themselves are in one tensor: names.py.)
ROUTER = {"mlp.gate": "ffn_gate_inp"}
CORRECTED = ROUTER | {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
# The shared expert.
SHARED = {name.replace("mlp.", "mlp.shared_experts."): f"{stored}_shexp" for name, stored in GATED.items()}


def experts(metadata: Metadata) -> tuple[int, int]:
    """(number of experts, number chosen for a token)."""
    count, used = metadata.get("expert_count", int), metadata.get("expert_used_count", int)
    if not 0 < used <= count:
        metadata.refuse(f"has {count} experts, of which a token is to use {used}")
    return count, used


def check_scores(metadata: Metadata, wanted: int) -> None:
    """Refuse a function of the router's scores that is not the family's."""
    if metadata.get("expert_gating_func", int, wanted) != wanted:
        metadata.refuse_value("expert_gating_func")


def scale(metadata: Metadata) -> float:
    """The factor of the chosen experts' weights. 0 stands for none, as in llama.cpp."""
    return metadata.get("expert_weights_scale", float, 1.0) or 1.0


def groups(metadata: Metadata) -> dict[str, Any]:
    """The groups of experts for group-limited routing; one group is the same as none."""
    count = metadata.get(GROUP_COUNT, int, 0)
    used = metadata.get(GROUPS_KEPT, int, 0)
    return {"n_group": count, "topk_group": used} if count > 1 else {"n_group": 1, "topk_group": 1}
