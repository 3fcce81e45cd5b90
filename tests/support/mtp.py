"""Tiny models with a layer for multi-token prediction, and that layer in transformers: a model of this one layer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import Tensor

# By family: the changes of its tiny model's configuration that leave the MTP layer alone.
ONE: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"first_k_dense_replace": 0},
    "deepseek-v32": {"first_k_dense_replace": 0},
    "glm-moe-dsa": {"first_k_dense_replace": 0},
    "glm4": {},
    "glm4-moe": {"first_k_dense_replace": 0},
    "glm4-moe-lite": {"mlp_layer_types": ["sparse"]},
    "hy3": {"mlp_layer_types": ["sparse"]},
    "mellum": {"mlp_layer_types": ["sparse"], "layer_types": ["sliding_attention"]},
    "mimo-v2-flash": {"mlp_layer_types": ["dense"], "layer_types": ["sliding_attention"]},
    "nemotron-h-moe": {"layers_block_type": ["full_attention", "moe"], "num_hidden_layers": 2},
    "qwen3-next": {"mlp_only_layers": [], "layer_types": ["full_attention"]},
    "qwen3-5": {"layer_types": ["full_attention"]},
    "qwen3-5-moe": {"layer_types": ["full_attention"]},
}


def names_of(family: str, layers: int) -> tuple[str, dict[str, str], tuple[str, ...]]:
    """Of the checkpoint: the prefix of all tensors of the MTP layer, the prefixes of its layers by those that they have in
    a model of this layer alone, and the names of the two norms, the projection and the last norm."""
    if family == "nemotron-h-moe":
        prefixes = {f"backbone.layers.{layer}.": f"mtp.layers.{layer}." for layer in range(2)}
        names = ("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm")
        return "mtp.", prefixes, tuple(f"mtp.layers.{name}.weight" for name in names)
    if family == "mellum" or family.startswith("qwen"):
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        return "mtp.", {"model.layers.0.": "mtp.layers.0."}, tuple(f"mtp.{name}.weight" for name in names)
    under = "model.mtp.layers.0." if family == "mimo-v2-flash" else f"model.layers.{layers}."
    last = "final_layernorm" if family in ("mimo-v2-flash", "hy3") else "shared_head.norm"
    names = ("enorm", "hnorm", "eh_proj", last)
    return under, {"model.layers.0.": under}, tuple(f"{under}{name}.weight" for name in names)


def last_norm(model: Any) -> Any:
    return model.model.norm if hasattr(model.model, "norm") else model.model.norm_f


class Layer:
    """An MTP layer in float32 on one row: ``alone`` is a model that has it as its only layer."""

    def __init__(self, family: str, target: Any, seed: int, changes: Mapping[str, Any]) -> None:
        self.alone = tiny_model(family, seed, **{**changes, "num_hidden_layers": 1, **ONE[family]})
        self.target, hidden = target, target.config.hidden_size
        random = torch.Generator().manual_seed(seed)
        self.norms = [0.2 * torch.randn(hidden, generator=random) + 1.0 for _ in range(2)]
        self.projection = torch.randn(hidden, 2 * hidden, generator=random) * hidden**-0.5
        with torch.no_grad():
            self.alone.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight)
            self.alone.lm_head.weight.copy_(target.lm_head.weight)
            last_norm(self.alone).weight.copy_(last_norm(target).weight + 0.1)

    @property
    def epsilon(self) -> float:
        norm = last_norm(self.alone)
        value: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        return value

    @torch.no_grad()
    def read(self, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(logits, the layer's own state) of each token. ``states[i]`` is the state of the token before ``tokens[i]``."""
        embedded = self.target.get_input_embeddings()(torch.tensor(list(tokens)))
        parts = [
            norm * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
            for norm, x in zip(self.norms, (embedded, states), strict=True)
        ]
        x = torch.cat(parts, -1) @ self.projection.T
        output = self.alone(inputs_embeds=x[None], output_hidden_states=True, use_cache=False)
        return output.logits[0], output.hidden_states[-1][0]

    @torch.no_grad()
    def proposed(self, states: Tensor, tokens: Sequence[int], count: int) -> list[int]:
        """What the layer proposes behind these tokens, with its own states from the last one on."""
        chosen: list[int] = []
        for _ in range(count):
            logits, own = self.read(states, [*tokens, *chosen])
            chosen.append(int(logits[-1].argmax()))
            states = torch.cat([states, own[-1:]])
        return chosen


def with_mtp(family: str, path: Path, seed: int = 0, apt: bool = False, **changes: Any) -> Layer:
    """Saves a tiny model with an MTP layer; ``changes`` are of its configuration.

    ``apt``: what the model chooses depends mostly on the last token, and so does what the layer proposes, which is
    therefore often right.
    """
    target = tiny_model(family, seed, **changes)
    layer = Layer(family, target, seed + 1, changes)
    if apt:
        _make_apt(target, layer)
    target.save_pretrained(path)
    tensors = load_file(path / "model.safetensors") | _stored(family, layer, path / "alone")
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    key = "mtp_num_hidden_layers" if family.startswith("qwen") else "num_nextn_predict_layers"
    counted = {} if family == "mimo-v2-flash" else {key: 1}  # published checkpoints of MiMo do not say so
    (path / "config.json").write_text(json.dumps(config | counted, indent=1))
    return layer


def _stored(family: str, layer: Layer, folder: Path) -> dict[str, Tensor]:
    """The MTP layer's tensors by their names in the checkpoint."""
    layer.alone.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    shutil.rmtree(folder)
    under, prefixes, names = names_of(family, layer.target.config.num_hidden_layers)
    # Norms of Qwen's families multiply by 1 + w.
    plus = 1.0 if family.startswith("qwen") else 0.0
    last = next(stored[name] for name in ("model.norm.weight", "backbone.norm_f.weight") if name in stored)
    own = dict(zip(names, (*(norm - plus for norm in layer.norms), layer.projection, last), strict=True))
    for first, prefix in prefixes.items():
        for name, value in stored.items():
            if name.startswith(first):
                part = name.removeprefix(first)
                own[prefix + (_of_mimo(part) if family == "mimo-v2-flash" else part)] = value
    if under.startswith("model.layers."):  # published checkpoints have copies
        own[f"{under}embed_tokens.weight"] = layer.target.get_input_embeddings().weight.detach().clone()
        own[f"{under}shared_head.head.weight"] = layer.target.lm_head.weight.detach().clone()
    return own


def _of_mimo(name: str) -> str:
    return name.replace("post_attention_layernorm", "pre_mlp_layernorm")


@torch.no_grad()
def _make_apt(target: Any, layer: Layer) -> None:
    for model in (target, layer.alone):
        for name, parameter in model.named_parameters():
            leads_back = any(part in name for part in ("o_proj", "down_proj", "out_proj", "fc2_latent_proj"))
            if "layers." in name and parameter.dim() > 1 and leads_back:
                parameter.mul_(0.01)
    hidden = target.config.hidden_size
    layer.norms = [torch.ones(hidden), torch.ones(hidden)]
    layer.projection = torch.cat([torch.eye(hidden), 0.01 * layer.projection[:, hidden:]], 1)
    last_norm(layer.alone).weight.copy_(last_norm(target).weight)
