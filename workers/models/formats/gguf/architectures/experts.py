"""What metadata says of experts: how many there are, how wide, and how those of a token are chosen."""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import GATED, KNOWN
from outrider.workers.models.formats.gguf.metadata import Metadata

# llama.cpp's numbers of what is made of a router's scores.
SOFTMAX, SIGMOID = 1, 2
# Without a window: an architecture that may have one says so.
KNOWN_OF_EXPERTS = KNOWN | {
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
}
# Of what stands beside the experts.
SHARED_WIDTH = "expert_shared_feed_forward_length"
GROUP_COUNT, GROUPS_KEPT = "expert_group_count", "expert_group_used_count"
# Of a layer with experts, which themselves lie together (names.py).
ROUTER = {"mlp.gate": "ffn_gate_inp"}
CORRECTED = ROUTER | {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
# What stands beside the experts.
SHARED = {name.replace("mlp.", "mlp.shared_experts."): f"{stored}_shexp" for name, stored in GATED.items()}


def experts(metadata: Metadata) -> tuple[int, int]:
    """How many there are, and how many of them a token takes."""
    count, used = metadata.get("expert_count", int), metadata.get("expert_used_count", int)
    if not 0 < used <= count:
        metadata.refuse(f"has {count} experts, of which a token is to use {used}")
    return count, used


def check_scores(metadata: Metadata, wanted: int) -> None:
    """Where it is stated, what is made of a router's scores must be what the family makes of them."""
    if metadata.get("expert_gating_func", int, wanted) != wanted:
        metadata.refuse_value("expert_gating_func")


def scale(metadata: Metadata) -> float:
    """What the weights of the chosen are multiplied by. 0 says nothing, as to llama.cpp."""
    return metadata.get("expert_weights_scale", float, 1.0) or 1.0


def groups(metadata: Metadata) -> dict[str, Any]:
    """The groups that experts are chosen from; one or none of them is all the same."""
    count = metadata.get(GROUP_COUNT, int, 0)
    used = metadata.get(GROUPS_KEPT, int, 0)
    return {"n_group": count, "topk_group": used} if count > 1 else {"n_group": 1, "topk_group": 1}
