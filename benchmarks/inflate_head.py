"""Make the head of a big target out of the head of the small one that it was inflated from: the same guesses, its cost.

    python benchmarks/inflate_head.py workers/pocket/head /tmp/7b-head --target /tmp/7b [--small workers/pocket/target]

Its one layer takes the big target's shape (see inflate.py), reads the states that come into the same layers, and chooses
from the same tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from inflate import Inflater, Shape, plan, small_shape
from safetensors_writer import Recipe, write_sharded

from outrider.workers.models.config_file import read_config
from outrider.workers.models.head_checkpoint import OFFSETS
from outrider.workers.models.heads import PUBLISHED_LAYER, head_of
from outrider.workers.models.model_info import POCKET, find

LAYERS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


class HeadInflater(Inflater):
    def __init__(self, source: Path, large: Shape, noise: float, seed: int) -> None:
        super().__init__(source, replace(large, layers=1), noise, seed)
        head = head_of(self.config, str(source / "config.json"))
        if head is None or head.first_layer != PUBLISHED_LAYER:
            raise SystemExit(f"inflate_head: {source} is no head in EAGLE-3's published layout")
        self.head = head

    def recipes(self) -> Iterator[Recipe]:
        small, hidden = self.plan.small, self.plan.small.hidden
        tokens = self.head.draft_vocabulary
        yield self._reading("lm_head.weight", "lm_head.weight", (tokens, hidden), np.arange(tokens), 1.0)
        yield self._vector("norm.weight", "norm.weight")
        for norm in NORMS:
            yield self._vector(f"{PUBLISHED_LAYER}{norm}.weight", f"{PUBLISHED_LAYER}{norm}.weight")
        # ``fc`` reads several states side by side and writes one; both are repeated.
        every = np.repeat(np.arange(hidden), self.plan.repeat)
        yield self._reading("fc.weight", "fc.weight", (hidden, self.head.states * hidden), every, 1.0)
        scale = (self.plan.large.head_size / small.head_size) ** 0.5
        for name, heads in (("q_proj", self.plan.heads), ("k_proj", self.plan.kv_heads), ("v_proj", self.plan.kv_heads)):
            rows = (small.heads if name == "q_proj" else small.kv_heads) * small.head_size
            name = f"{PUBLISHED_LAYER}self_attn.{name}.weight"
            taken = self._head_rows(heads)
            yield self._reading(name, name, (rows, 2 * hidden), taken, scale if "q_proj" in name else 1.0)
        yield self._output()
        yield from self._ffn()
        if self._checkpoint.has(OFFSETS):
            offsets = self._checkpoint.numbers(OFFSETS)
            yield Recipe(OFFSETS, offsets.shape, lambda: iter([offsets]), "I64")

    def _output(self) -> Recipe:
        name, small, large = f"{PUBLISHED_LAYER}self_attn.o_proj.weight", self.plan.small, self.plan.large
        copies = np.bincount(self.plan.heads).astype(np.float32)
        shares = np.repeat(copies[list(self.plan.heads)], large.head_size)
        taken = self._head_rows(self.plan.heads)
        return self._writing(name, name, small.heads * small.head_size, taken, shares, False)

    def _ffn(self) -> Iterator[Recipe]:
        small, large = self.plan.small.ffn, self.plan.large.ffn
        for name in ("gate_proj", "up_proj"):
            name = f"{PUBLISHED_LAYER}mlp.{name}.weight"
            yield self._reading(name, name, (small, self.plan.small.hidden), np.arange(large) % small, 1.0)
        name = f"{PUBLISHED_LAYER}mlp.down_proj.weight"
        columns = np.where(np.arange(large) < small, np.arange(large), -1)
        yield self._writing(name, name, small, columns, np.ones(large, dtype=np.float32), False)


def layers_read(head: Any, small: dict[str, Any], large: dict[str, Any]) -> list[int]:
    """The layers of the large target whose inputs correspond to the inputs of the small target's layers that the head
    reads."""
    layers = plan(small_shape(small), small_shape(large)).layers
    return [layers.index(layer) for layer in head.layers_of(small["num_hidden_layers"])]


def inflate_head(source: Path, out: Path, target: Path, small: Path, noise: float = 0.0, seed: int = 1) -> None:
    values, small_values = read_config(target), read_config(small)
    shape = small_shape(dict(values))
    inflater = HeadInflater(source, shape, noise, seed)
    out.mkdir(parents=True, exist_ok=True)
    write_sharded(out, list(inflater.recipes()))
    config = inflater.config | {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary,
        LAYERS: layers_read(inflater.head, dict(small_values), dict(values)),
        "dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="directory of a head in EAGLE-3's published layout")
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path, required=True, help="inflated from the head's own target")
    parser.add_argument("--small", type=Path, help="the head's own target [the bundled one]")
    parser.add_argument("--noise", type=float, default=0.02, help="relative to each matrix's root mean square")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    for name, path in (("source", asked.source), ("--target", asked.target), ("--small", asked.small)):
        if path is not None and not (path / "config.json").is_file():
            parser.error(f"{name}: {path} has no config.json")
    inflate_head(asked.source, asked.out, asked.target, asked.small or find(POCKET), asked.noise, asked.seed)
    print(f"{asked.out}: {json.loads((asked.out / 'config.json').read_text())[LAYERS]} are the layers that it reads")


if __name__ == "__main__":
    main()
