"""A plain reference of EAGLE-3 in torch, and tiny heads with random weights in both layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCABULARY, DRAFT_VOCABULARY = 96, 203, 77
# The sizes of the head's layer, which differ from the target's except where both must be equal.
LAYER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 144,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
# The layers whose inputs the head reads, of a target with four layers.
STATES = (2, 2, 1)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def chosen_tokens(seed: int = 0, count: int = DRAFT_VOCABULARY) -> Tensor:
    """``count`` random tokens of the target's vocabulary, ascending."""
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def tiny_head(
    path: Path,
    layout: str = "published",
    seed: int = 0,
    own_embedding: bool = False,
    model_type: str = "llama",
    **changes: Any,
) -> Path:
    """Writes a head; ``changes`` are keys of its configuration. Weights are exact in bf16, so loading does not round."""
    config = {**LAYER, "draft_vocab_size": DRAFT_VOCABULARY, "eagle_aux_hidden_state_layer_ids": list(STATES), **changes}
    random = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, around: float = 0.0) -> Tensor:
        scale = 0.2 if len(shape) == 1 else shape[-1] ** -0.5
        return (around + scale * torch.randn(*shape, generator=random)).bfloat16()

    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    width, kv_width = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    states = len(STATES) * config.get("target_hidden_size", hidden)
    first = "midlayer." if layout == "published" else "layers.0."
    tensors = {
        "fc.weight": drawn(hidden, states),
        f"{first}input_layernorm.weight": drawn(hidden, around=1.0),
        f"{first}hidden_norm.weight": drawn(hidden, around=1.0),
        f"{first}post_attention_layernorm.weight": drawn(hidden, around=1.0),
        f"{first}self_attn.q_proj.weight": drawn(width, 2 * hidden),
        f"{first}self_attn.k_proj.weight": drawn(kv_width, 2 * hidden),
        f"{first}self_attn.v_proj.weight": drawn(kv_width, 2 * hidden),
        f"{first}self_attn.o_proj.weight": drawn(hidden, width),
        f"{first}mlp.gate_proj.weight": drawn(ffn, hidden),
        f"{first}mlp.up_proj.weight": drawn(ffn, hidden),
        f"{first}mlp.down_proj.weight": drawn(hidden, ffn),
        "norm.weight": drawn(hidden, around=1.0),
        "lm_head.weight": drawn(config["draft_vocab_size"], hidden) * 4,
    }
    if config["draft_vocab_size"] < VOCABULARY:
        tokens = chosen_tokens(seed, config["draft_vocab_size"])
        known = torch.zeros(VOCABULARY, dtype=torch.bool)
        known[tokens] = True
        tensors |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}
    if own_embedding:
        tensors["embed_tokens.weight"] = drawn(VOCABULARY, hidden)
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = drawn(states, around=1.0)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{place}.weight": drawn(states // 3, around=1.0) for place in range(3)}
    if model_type == "qwen3":
        tensors |= {f"{first}self_attn.{name}_norm.weight": drawn(head, around=1.0) for name in "qk"}
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(_config(config, layout, model_type), indent=1))
    return path


def _config(config: dict[str, Any], layout: str, model_type: str) -> dict[str, Any]:
    if layout == "published":
        return {**config, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "torch_dtype": "bfloat16"}
    layer = {key: value for key, value in config.items() if key in LAYER}
    return {
        **{key: value for key, value in config.items() if key not in LAYER},
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": {**layer, "model_type": model_type},
    }


class Reference:
    """The head in float32 on one row, fed like the published code: the target's states for committed tokens, then its own
    outputs."""

    def __init__(self, path: Path, embedding: Tensor) -> None:
        from safetensors.torch import load_file

        config = json.loads((path / "config.json").read_text())
        self.flags = {name: config.get(name, False) for name in FLAGS}
        self.layer = config.get("transformer_layer_config", config)
        tensors = load_file(path / "model.safetensors")
        self.tensors = {
            name.replace("midlayer.", "").replace("layers.0.", ""): value.float() if value.is_floating_point() else value
            for name, value in tensors.items()
        }
        self.embedding = self.tensors.get("embed_tokens.weight", embedding.float())
        self.keys = self.values = torch.empty(self.layer["num_key_value_heads"], 0, self.layer["head_dim"])

    @property
    def tokens(self) -> Tensor:
        """The target's token of each row of ``lm_head``."""
        count = len(self.tensors["lm_head.weight"])
        return torch.arange(count) + self.tensors.get("d2t", torch.zeros(count, dtype=torch.long))

    def norm(self, name: str, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.layer["rms_norm_eps"])
        return scaled * self.tensors[f"{name}.weight"]

    def matrix(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def rotated(self, x: Tensor, first: int) -> Tensor:
        size = self.layer["head_dim"]
        inverse = 10000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(first, first + x.shape[1]).float(), inverse)
        left, right = x.chunk(2, -1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)

    def read(self, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(logits after each token, the head's output state of each token). ``states[i]`` is the target's state of the
        token before ``tokens[i]``."""
        if self.flags["norm_before_fc"]:
            states = self.norm("input_norm", states)
        if self.flags["fc_norm"]:
            states = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(states.chunk(3, -1))], -1)
        return self.step(self.matrix("fc", states), tokens)

    def step(self, hidden: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        last, left = self.features(hidden, tokens)
        return self.matrix("lm_head", last), left

    def features(self, hidden: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(the input of ``lm_head``, the head's output state) of each token."""
        heads, kv_heads = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        size, first, count = self.layer["head_dim"], self.keys.shape[1], len(tokens)
        normed = self.norm("hidden_norm", hidden)
        embedded = self.norm("input_layernorm", self.embedding[torch.tensor(tokens)])
        both = torch.cat([embedded, normed], -1)
        query, key, value = (
            self.matrix(f"self_attn.{name}_proj", both).view(count, -1, size).transpose(0, 1) for name in "qkv"
        )
        if "self_attn.q_norm.weight" in self.tensors:
            query, key = self.norm("self_attn.q_norm", query), self.norm("self_attn.k_norm", key)
        # The first token that the head reads is the row's second, since it needs the state of the token before.
        query, key = self.rotated(query, first + 1), self.rotated(key, first + 1)
        self.keys, self.values = torch.cat([self.keys, key], 1), torch.cat([self.values, value], 1)
        keys, values = (x.repeat_interleave(heads // kv_heads, 0) for x in (self.keys, self.values))
        mask = torch.full((count, first + count), -torch.inf).triu(first + 1)
        weights = (query @ keys.transpose(1, 2) * size**-0.5 + mask).softmax(-1)
        attended = self.matrix("self_attn.o_proj", (weights @ values).transpose(0, 1).reshape(count, -1))
        x = attended + (normed if self.flags["norm_before_residual"] else hidden)
        h = self.norm("post_attention_layernorm", x)
        x = x + self.matrix("mlp.down_proj", F.silu(self.matrix("mlp.gate_proj", h)) * self.matrix("mlp.up_proj", h))
        last = self.norm("norm", x)
        return last, last if self.flags["norm_output"] else x

    def forget(self, count: int) -> None:
        """Keep the keys and values of the first ``count`` tokens that were fed."""
        self.keys, self.values = self.keys[:, :count], self.values[:, :count]


@torch.no_grad()
def fitted(path: Path, target: Any, texts: Sequence[Sequence[int]], layers: Sequence[int] = STATES) -> Path:
    """Fits ``lm_head`` to the target's choices in these texts, so that the head is sometimes right."""
    from safetensors.torch import load_file

    reference, features, wanted = Reference(path, target.model.embed_tokens.weight), [], []
    for text in texts:
        output = target(torch.tensor([list(text)]), output_hidden_states=True)
        states = torch.cat([output.hidden_states[layer][0] for layer in layers], -1)
        best = output.logits[0].argmax(-1)
        reference.forget(0)
        hidden = reference.matrix("fc", states[:-1].bfloat16().float())
        for step in range(3):
            # Each step as if all of the steps before had been right: of the second on, without what lies between.
            reference.forget(0)
            features.append(reference.features(hidden, text[1 + step :]))
            wanted.append(best[1 + step :])
            hidden = features[-1][1][:-1]
    seen, tokens = torch.cat([normed for normed, _ in features]), reference.tokens
    is_it = (torch.cat(wanted)[:, None] == tokens).float()
    solved = torch.linalg.solve(seen.T @ seen + 0.1 * torch.eye(seen.shape[1]), seen.T @ is_it)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": (10 * solved.T).bfloat16().contiguous()}, path / "model.safetensors")
    return path
