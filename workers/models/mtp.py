"""The layer for multi-token prediction (MTP) that some checkpoints hold behind their last one.

It reads the target's last hidden state (behind the last norm, as the LM head does) beside the embedding of the token that
was chosen from it, and predicts the token after that one. With its own output in place of the target's state it goes on for
as many tokens as are wanted: a draft that comes with the target (``--draft mtp``). Embedding and LM head are the target's.

``mtp`` below a model's path stands for this layer, as if it were a model of its own: ``mtp_path``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.kernels.program import Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.draft_names import MTP

# Stands for the target's last norm.
TARGETS_NORM = "the target's last norm"
# What is said of a model's layers by their numbers, for the MTP layer.
BY_NUMBER: dict[str, Any] = {"first_k_dense_replace": 0, "mlp_only_layers": [], "full_attention_interval": 1}
ATTENTION, SLIDING, SPARSE, DENSE = "full_attention", "sliding_attention", "sparse", "dense"
# Copies of the target's embedding and LM head, which some checkpoints hold in this layer.
COPIES = ("embed_tokens.weight", "shared_head.head.weight", "shared_head.weight")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a checkpoint has its MTP layer; {} stands for the number of the target's layers.

    ``under`` is the prefix of all its tensors. ``layers``: the prefix of the layer in a model of this layer alone, and that
    in the checkpoint; some have two layers, of attention and of experts. The projection reads the embedding and the state,
    each behind a norm of its own. ``last_norm``, too, by both names. ``renamed``: other names of a layer's parts.
    ``changes`` are of the configuration, besides that there is one layer.
    """

    under: str
    layers: tuple[tuple[str, str], ...]
    embedding_norm: str
    state_norm: str
    projection: str
    last_norm: tuple[str, str]
    renamed: tuple[tuple[str, str], ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)


FIRST, NORM = "model.layers.0.", "model.norm"


def _with_usual_names(prefix: str, last_norm: str) -> Layout:
    """That of a layer whose tensors all begin with ``prefix``."""
    return Layout(
        under=prefix,
        layers=((FIRST, prefix),),
        embedding_norm=f"{prefix}enorm",
        state_norm=f"{prefix}hnorm",
        projection=f"{prefix}eh_proj",
        last_norm=(NORM, f"{prefix}{last_norm}"),
    )


BEHIND = _with_usual_names("model.layers.{}.", "shared_head.norm")
APART = Layout(
    under="mtp.",
    layers=((FIRST, "mtp.layers.0."),),
    embedding_norm="mtp.pre_fc_norm_embedding",
    state_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    last_norm=(NORM, "mtp.norm"),
)
# In these types experts begin behind some layers without, and a layer by itself would be one of those.
WITH_EXPERTS = replace(BEHIND, changes={"first_k_dense_replace": 0})
WITH_LISTED_EXPERTS = replace(BEHIND, changes={"mlp_layer_types": [SPARSE]})
OF_QWEN = replace(APART, changes={"layer_types": [ATTENTION]})
LAYOUTS = {
    "deepseek_v3": WITH_EXPERTS,
    "deepseek_v32": WITH_EXPERTS,
    "glm4": BEHIND,
    "glm4_moe": WITH_EXPERTS,
    "glm4_moe_lite": WITH_LISTED_EXPERTS,
    "glm_moe_dsa": WITH_EXPERTS,
    "hy_v3": replace(WITH_LISTED_EXPERTS, last_norm=(NORM, "model.layers.{}.final_layernorm")),
    "mellum": replace(APART, changes={"layer_types": [SLIDING]}),
    "mimo_v2_flash": replace(
        _with_usual_names("model.mtp.layers.0.", "final_layernorm"),
        renamed=(("post_attention_layernorm.", "pre_mlp_layernorm."),),
        changes={"layer_types": [SLIDING], "mlp_layer_types": [DENSE]},
    ),
    "nemotron_h": replace(
        _with_usual_names("mtp.layers.0.", ""),
        under="mtp.",
        layers=(("backbone.layers.0.", "mtp.layers.0."), ("backbone.layers.1.", "mtp.layers.1.")),
        last_norm=("backbone.norm_f", "mtp.layers.1.final_layernorm"),
        changes={"layers_block_type": [ATTENTION, "moe"]},
    ),
    "qwen3_5_moe_text": OF_QWEN,
    "qwen3_5_text": OF_QWEN,
    "qwen3_next": OF_QWEN,
}


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """``values`` are the configuration of a model that has this layer alone; the target has ``target_layers``."""

    values: Mapping[str, Any]
    layout: Layout
    target_layers: int

    def name(self, of: str) -> str:
        """The name of a tensor of the checkpoint, by the layout's name of what it is of."""
        return f"{of}.weight".format(self.target_layers)

    def own(self, tensor: Tensor) -> Tensor:
        """The tensor of the checkpoint for one of a model that has this layer alone."""
        alone, own = self.layout.last_norm
        if tensor.name in (TARGETS_NORM, f"{alone}.weight"):
            return replace(tensor, name=self.name(alone if tensor.name == TARGETS_NORM else own))
        for first, prefix in self.layout.layers:
            if tensor.name.startswith(first):
                part = tensor.name.removeprefix(first)
                for usual, other in self.layout.renamed:
                    part = other + part.removeprefix(usual) if part.startswith(usual) else part
                return replace(tensor, name=prefix.format(self.target_layers) + part)
        return tensor

    def holds(self, name: str) -> bool:
        """Whether a tensor of the checkpoint belongs to this layer, and is no copy of one of the target's."""
        under = self.layout.under.format(self.target_layers)
        if not name.startswith(under) or name.removeprefix(under) in COPIES:
            return False
        # Of several layers the first is used.
        prefixes = tuple(prefix.format(self.target_layers) for _, prefix in self.layout.layers)
        return name.startswith(prefixes) or not name.removeprefix(under).startswith("layers.")


def mtp_path(model: str) -> str:
    """The path, or name, of a model's MTP layer."""
    return f"{model.rstrip('/')}/{MTP}"


def model_named(name: str) -> str | None:
    """The name of the model whose MTP layer is named so; None where the name is that of a model, such as OWNER/mtp."""
    name = name.rstrip("/")
    model = name.removesuffix(f"/{MTP}")
    if model == name or _exists(name):
        return None
    return model if "/" in model or _exists(model) else None


def _exists(name: str) -> bool:
    """False also for what can be no path."""
    return os.path.lexists(os.path.expanduser(name))  # noqa: PTH111  (Path.expanduser raises where a home is unknown)


def model_of(path: str | Path) -> Path | None:
    """The model whose MTP layer is meant; None where the path is that of a model."""
    path = Path(path)
    return path.parent if path.name == MTP and path.parent.exists() and not path.exists() else None


def mtp_layer(values: Mapping[str, Any], source: str) -> MtpLayer:
    """The MTP layer of a configuration, which its checkpoint may lack. Of several such layers only the first is used."""
    kind = str(values.get("model_type"))
    layout = LAYOUTS.get(kind)
    if layout is None:
        raise ModelError(
            f'{source}: multi-token prediction (--draft mtp) is not supported for models of the type "{kind}"; those of '
            f"{', '.join(LAYOUTS)} are"
        )
    count = values.get("num_hidden_layers")
    if type(count) is not int and "{}" in layout.under:
        raise ModelError(f'{source} does not say how many layers there are: "num_hidden_layers"')
    return MtpLayer(_of_one_layer(values, layout), layout, count if type(count) is int else 0)


def _of_one_layer(values: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The configuration with the MTP layer as the only one."""
    changed = dict(values) | {"num_hidden_layers": len(layout.layers)}
    # transformers has lists of types for MTP layers; without, a layer has attention over all tokens, and experts.
    types = _listed(values, "layer_types")
    usual = BY_NUMBER | {"layer_types": [ATTENTION] if ATTENTION in types else types[-1:], "mlp_layer_types": [SPARSE]}
    changed |= {key: value for key, value in usual.items() if values.get(key) is not None} | dict(layout.changes)
    for key in ("layer_types", "mlp_layer_types"):
        if stated := _listed(values, f"mtp_{key}"):
            changed[key] = stated[: len(layout.layers)]
    return changed


def _listed(values: Mapping[str, Any], key: str) -> list[Any]:
    """The list under a key; empty where it is none, which the family refuses."""
    found = values.get(key)
    return found if isinstance(found, list) else []
