"""Make a big model out of a small trained one: the same function, the big model's shape and cost, nothing downloaded.

    python benchmarks/inflate.py workers/pocket/target /tmp/7b --shape 7b --noise 0.02

* Every hidden unit is repeated r times; a matrix that reads the units divides its columns by r, one that writes them
  repeats its rows. RMSNorm's mean stays as it is.
* Heads are copied until there are enough, and the copies share the output. A head grows from 64 to 128 columns by moving
  rotary pair i to pair 2i, where the frequencies agree, with queries scaled up for the other softmax scale.
* Extra layers have output projections of almost zero; extra ffn columns likewise.
* Extra vocabulary rows score far below the real ones: along the direction in which every final state looks alike. The mask
  token of a parallel draft is one of the small model's ids, and keeps it.
* Noise, relative to each matrix's own size, makes all tensors differ and decides how often a draft agrees with its target.

The result is written shard by shard: memory stays under a gigabyte whatever the shape.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from held_out import held_out_tokens
from numpy.typing import NDArray
from safetensors_writer import Recipe, write_sharded

from outrider.kernels.program import Tensor
from outrider.workers.models.checkpoint import Checkpoint, open_checkpoint
from outrider.workers.models.model_info import POCKET, find
from outrider.workers.models.packed_cache import cache_directory

Matrix = NDArray[np.float32]
NOISE_TABLE = 1 << 22
# The final states for ``padding_direction``: the number of tokens, the window, and the ridge of the least squares.
STATES, STATES_WINDOW, RIDGE = 8192, 512, 1e-3
# The values of a block, which should stay in the processor's caches until it is written.
BLOCK_VALUES = 1 << 18
# Weights that should be zero get this share of a normal matrix's noise.
FAINT = 0.02
# Far below the lowest score of a real token.
PADDING_SCORE = -40.0


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head_size: int

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + 2 * self.vocabulary * self.hidden


SHAPES = {
    "160m": Shape(768, 12, 12, 12, 3072, 32000, 64),
    "1b": Shape(2048, 22, 32, 4, 5632, 32000, 64),
    "7b": Shape(4096, 32, 32, 32, 11008, 32000, 128),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The part of the small model that each part of the large one is copied from; -1: none, its weights are almost 0."""

    small: Shape
    large: Shape
    layers: tuple[int, ...]
    """For each layer the small layer it is, or whose copy it is; see ``real``."""
    real: tuple[bool, ...]
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    columns: tuple[int, ...]
    """For each column of a head the small head's column, or -1."""

    @property
    def repeat(self) -> int:
        return self.large.hidden // self.small.hidden


def plan(small: Shape, large: Shape) -> Plan:
    def refuse(condition: bool, sentence: str) -> None:
        if condition:
            raise SystemExit(f"inflate: {sentence}")

    refuse(large.hidden % small.hidden != 0, f"{large.hidden} hidden units are no multiple of {small.hidden}")
    refuse(large.head_size % small.head_size != 0, f"heads of {large.head_size} are no multiple of {small.head_size}")
    refuse(large.layers < small.layers, f"{large.layers} layers are fewer than {small.layers}")
    refuse(large.heads % large.kv_heads != 0, f"{large.heads} heads are no multiple of {large.kv_heads} key/value heads")
    refuse(large.ffn < small.ffn or large.vocabulary < small.vocabulary, "ffn and vocabulary cannot shrink")
    # KV heads are repeated in turn, and the query heads of each are distributed in turn over its copies.
    group, small_group = large.heads // large.kv_heads, small.heads // small.kv_heads
    kv_heads = tuple(index % small.kv_heads for index in range(large.kv_heads))
    heads = tuple(
        kv * small_group + (index // small.kv_heads * group + place) % small_group
        for index, kv in enumerate(kv_heads)
        for place in range(group)
    )
    refuse(
        set(heads) != set(range(small.heads)), f"{large.heads}/{large.kv_heads} heads cannot hold all of the small model's"
    )
    first = [index * large.layers // small.layers for index in range(small.layers)]
    layers = tuple(max(number for number, start in enumerate(first) if start <= index) for index in range(large.layers))
    factor, half, small_half = large.head_size // small.head_size, large.head_size // 2, small.head_size // 2
    columns = [-1] * large.head_size
    for pair in range(small_half):
        columns[factor * pair], columns[half + factor * pair] = pair, small_half + pair
    return Plan(small, large, layers, tuple(i in first for i in range(large.layers)), heads, kv_heads, tuple(columns))


class Inflater:
    """Makes the rows of each large tensor from the small model, noise included."""

    def __init__(
        self, source: Path, large: Shape, noise: float, seed: int, tied: bool = False, biased: bool = False
    ) -> None:
        """``tied``: the embedding is the head too. ``biased``: queries, keys and values have biases, of zero."""
        self.source = source
        self.tied = tied
        self.biased = biased
        self.config: dict[str, Any] = json.loads((source / "config.json").read_text())
        if self.config["model_type"] != "llama":
            raise SystemExit(f"inflate: {source} is of the family {self.config['model_type']}, only llama can be inflated")
        self.plan = plan(small_shape(self.config), large)
        self.noise = noise
        self.generator = np.random.default_rng(seed)
        self.table: Matrix = self.generator.standard_normal(NOISE_TABLE, dtype=np.float32)
        self._checkpoint: Checkpoint = open_checkpoint(source)

    def read(self, name: str, *shape: int) -> Matrix:
        tensor = Tensor(name, shape)
        self._checkpoint.check(tensor)
        rows = self._checkpoint.rows(tensor, 0, shape[0])
        return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows.astype(np.float32)

    def recipes(self) -> Iterator[Recipe]:
        """Every tensor of the large model: its name, its shape, and its rows on demand."""
        small, large = self.plan.small, self.plan.large
        embedding = "model.embed_tokens.weight"
        head = embedding if self.config.get("tie_word_embeddings", False) else "lm_head.weight"
        padding = padding_direction(self.source) * -PADDING_SCORE
        if self.tied and head != embedding:
            raise SystemExit(f"inflate: {self.source} has a head of its own, so the large model cannot share one")
        if self.tied:
            # A tied head cannot be divided by the repetition, so the norm before it is.
            yield self._table(embedding, embedding, fill=padding, divided=False)
            yield self._vector("model.norm.weight", "model.norm.weight", 1.0 / self.plan.repeat)
        else:
            yield self._table(embedding, embedding, fill=None, divided=False)
            yield self._table("lm_head.weight", head, fill=padding, divided=True)
            yield self._vector("model.norm.weight", "model.norm.weight")
        for layer, origin in enumerate(self.plan.layers):
            to, of = f"model.layers.{layer}.", f"model.layers.{origin}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield self._vector(f"{to}{name}.weight", f"{of}{name}.weight")
            widths = {"q_proj": self.plan.heads, "k_proj": self.plan.kv_heads, "v_proj": self.plan.kv_heads}
            for name, heads in widths.items():
                count = small.heads if name == "q_proj" else small.kv_heads
                scale = (large.head_size / small.head_size) ** 0.5 if name == "q_proj" else 1.0
                suffix = f"self_attn.{name}.weight"
                shape = (count * small.head_size, small.hidden)
                yield self._reading(to + suffix, of + suffix, shape, self._head_rows(heads), scale)
                if self.biased:
                    yield _zeros(f"{to}self_attn.{name}.bias", len(heads) * large.head_size)
            faint = not self.plan.real[layer]
            suffix, width = "self_attn.o_proj.weight", small.heads * small.head_size
            share = np.bincount(self.plan.heads).astype(np.float32)
            shares = np.repeat(share[list(self.plan.heads)], large.head_size)
            yield self._writing(to + suffix, of + suffix, width, self._head_rows(self.plan.heads), shares, faint)
            rows = np.concatenate([np.arange(small.ffn), np.arange(large.ffn - small.ffn) % small.ffn])
            for name in ("gate_proj", "up_proj"):
                suffix = f"mlp.{name}.weight"
                yield self._reading(to + suffix, of + suffix, (small.ffn, small.hidden), rows, 1.0)
            columns = np.where(np.arange(large.ffn) < small.ffn, np.arange(large.ffn), -1)
            suffix = "mlp.down_proj.weight"
            yield self._writing(to + suffix, of + suffix, small.ffn, columns, np.ones(large.ffn, dtype=np.float32), faint)

    def _head_rows(self, heads: tuple[int, ...]) -> NDArray[np.int64]:
        """The small model's row for each row of the projection to these heads."""
        size = self.plan.small.head_size
        return np.array([head * size + column if column >= 0 else -1 for head in heads for column in self.plan.columns])

    def _vector(self, name: str, origin: str, scale: float = 1.0) -> Recipe:
        def rows() -> Iterator[Matrix]:
            yield np.repeat(self.read(origin, self.plan.small.hidden), self.plan.repeat) * np.float32(scale)

        return Recipe(name, (self.plan.large.hidden,), rows)

    def _reading(self, name: str, origin: str, shape: tuple[int, int], taken: NDArray[Any], scale: float) -> Recipe:
        """A matrix that reads the repeated hidden units."""
        repeat = self.plan.repeat

        def rows() -> Iterator[Matrix]:
            small = self.read(origin, *shape) * np.float32(scale / repeat)
            return self._noisy(np.vstack([small, np.zeros((1, shape[1]), np.float32)]), taken, repeat, _rms(small))

        return Recipe(name, (len(taken), shape[1] * repeat), rows)

    def _writing(self, name: str, origin: str, width: int, taken: NDArray[Any], shares: Matrix, faint: bool) -> Recipe:
        """A matrix that writes the repeated hidden units; each column is shared among the copies of what it reads."""
        hidden = self.plan.small.hidden

        def rows() -> Iterator[Matrix]:
            small = self.read(origin, hidden, width)
            # A column of zeros, which index -1 takes.
            wide = np.hstack([small, np.zeros((hidden, 1), np.float32)])[:, taken] / shares
            size = _rms(small / shares.max()) * (FAINT if faint else 1.0)
            quiet = np.where(taken < 0, np.float32(FAINT), np.float32(1.0))
            wide = np.zeros_like(wide) if faint else wide
            return self._noisy(wide, np.repeat(np.arange(hidden), self.plan.repeat), 1, size * quiet)

        return Recipe(name, (self.plan.large.hidden, len(taken)), rows)

    def _table(self, name: str, origin: str, fill: Matrix | None, divided: bool) -> Recipe:
        """Embedding, or head (``divided`` by the repetition); ``fill`` is the row of ids beyond the small vocabulary."""
        small, large = self.plan.small, self.plan.large

        def rows() -> Iterator[Matrix]:
            table = self.read(origin, small.vocabulary, small.hidden)
            last = table[:1] if fill is None else fill[None]
            scale = np.float32(1.0 / self.plan.repeat if divided else 1.0)
            taken = np.minimum(np.arange(large.vocabulary), small.vocabulary)
            return self._noisy(np.vstack([table, last]) * scale, taken, self.plan.repeat, _rms(table) * scale)

        return Recipe(name, (large.vocabulary, large.hidden), rows)

    def _noisy(self, small: Matrix, taken: NDArray[Any], repeat: int, size: Any) -> Iterator[Matrix]:
        """Blocks of the rows ``taken`` from the small matrix, every column repeated, noise of that size added."""
        wide = np.ascontiguousarray(np.repeat(small, repeat, axis=1))
        width, amount = wide.shape[1], self.noise * size
        count = max(1, BLOCK_VALUES // width)
        for start in range(0, len(taken), count):
            rows = taken[start : start + count]
            if not self.noise:
                yield wide[rows]
                continue
            block = np.empty((len(rows), width), dtype=np.float32)
            offsets = self.generator.integers(0, NOISE_TABLE - width, size=len(rows))
            for into, row, offset in zip(block, rows, offsets, strict=True):
                np.multiply(self.table[offset : offset + width], amount, out=into)
                into += wide[row]
            yield block


def _zeros(name: str, size: int) -> Recipe:
    def rows() -> Iterator[Matrix]:
        yield np.zeros(size, dtype=np.float32)

    return Recipe(name, (size,), rows)


def _rms(matrix: Matrix) -> np.float32:
    return np.float32(np.sqrt(np.mean(matrix.astype(np.float64) ** 2)))


def small_shape(config: dict[str, Any]) -> Shape:
    heads = config["num_attention_heads"]
    return Shape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
    )


def inflate(source: Path, out: Path, shape: Shape, noise: float = 0.0, seed: int = 1) -> None:
    out.mkdir(parents=True, exist_ok=True)
    inflater = Inflater(source, shape, noise, seed)
    write_sharded(out, list(inflater.recipes()))
    config = inflater.config | {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
    if (source / "tokenizer.json").is_file():
        extend_tokenizer(source / "tokenizer.json", out / "tokenizer.json", shape.vocabulary)


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """The model's directory as ``make`` fills it, unless it is there already. An interrupted one is begun anew, one that
    another benchmark is making is waited for."""
    if (path / "config.json").is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "config.json").is_file():
            print(f"making {path}", file=sys.stderr, flush=True)
            partial = path.with_name(f"{path.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
    return path


def model_directory(shape: str) -> Path:
    """The bundled target in this shape, in outrider's cache."""
    path = cache_directory() / "benchmarks" / shape
    return made_once(path, lambda partial: inflate(find(POCKET), partial, SHAPES[shape], noise=0.02))


def extend_tokenizer(source: Path, out: Path, vocabulary: int) -> None:
    """Adds names for the new ids. No merge leads to them, so no text is encoded with them."""
    content = json.loads(source.read_text(encoding="utf-8"))
    known = content["model"]["vocab"]
    for number in range(len(known), vocabulary):
        known[f"<|unused{number}|>"] = number
    out.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def padding_direction(path: Path) -> NDArray[np.float32]:
    """A vector whose product with every final state is about -1: the row of a token that never wins.

    Least squares over real text; without a tokenizer (a model of random weights) any row will do.
    """
    import torch
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(path, dtype=torch.float32)
    if (path / "tokenizer.json").is_file():
        tokens = held_out_tokens(path, STATES)
    else:
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, STATES).tolist()
    with torch.inference_mode():
        windows = torch.tensor(tokens[: len(tokens) // STATES_WINDOW * STATES_WINDOW]).view(-1, STATES_WINDOW)
        states = torch.cat([model(input_ids=window[None]).last_hidden_state[0] for window in windows]).double().numpy()
    normal = states.T @ states / len(states)
    ridge = RIDGE * np.trace(normal) / len(normal) * np.eye(len(normal))
    row = np.linalg.solve(normal + ridge, -states.mean(axis=0))
    return row.astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="directory of a small trained llama")
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--noise", type=float, default=0.02, help="relative to each matrix's root mean square")
    parser.add_argument("--seed", type=int, default=1)
    for field in ("hidden", "layers", "heads", "kv-heads", "ffn", "vocabulary", "head-size"):
        parser.add_argument(f"--{field}", type=int, help="instead of the shape's")
    arguments = parser.parse_args()
    stated = {name: getattr(arguments, name) for name in Shape.__slots__}
    shape = replace(SHAPES[arguments.shape], **{name: value for name, value in stated.items() if value is not None})
    inflate(arguments.source, arguments.out, shape, arguments.noise, arguments.seed)
    print(f"{arguments.out}: {shape.parameters / 1e9:.2f} billion parameters, {shape}")


if __name__ == "__main__":
    main()
