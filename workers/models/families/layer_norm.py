"""Shared by families with layer norms: attention and feed-forward, in sequence or in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Norm, Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Linear, Ranges
from outrider.workers.models.families.skeleton import Mixer, gated, rotate
from outrider.workers.models.rope import Rope


@dataclass(frozen=True, slots=True)
class Heads:
    count: int
    kv_count: int
    size: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """The widths of queries, keys and values."""
        return (self.count * self.size, self.kv_count * self.size, self.kv_count * self.size)

    @property
    def side_by_side(self) -> list[Ranges]:
        """The rows of queries, keys and values in a fused tensor with all three of one head, then those of the next."""
        starts = [[(3 * head + part) * self.size for head in range(self.count)] for part in range(3)]
        return [tuple((start, start + self.size) for start in part) for part in starts]


def even_heads(config: Config, hidden: int, count: int, kv_count: int) -> Heads:
    """Heads of size hidden / count, whatever "head_dim" says."""
    size = hidden // count
    config.only("head_dim", size)
    return Heads(count, kv_count, size)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """``plus`` is added to its weights. ``kind``: RMS in families whose norms may be RMS norms instead."""

    width: int
    epsilon: float
    bias: bool = True
    plus: float = 0.0
    kind: Norm = Norm.LAYER

    def __call__(self, builder: Builder, x: Slice, under: Linear, name: str) -> Slice:
        shift = under.bias(name, self.width) if self.bias else None
        return builder.norm(x, under.vector(name, self.width, self.plus), kind=self.kind, epsilon=self.epsilon, bias=shift)


@dataclass(frozen=True, slots=True)
class Stack:
    """Decoder layers. ``prefix`` and a layer's number name its tensors, ``first`` and ``second`` its norms.

    ``parallel``: attention and feed-forward read the same residual. Without ``second`` both read the output of ``first``.
    """

    prefix: str
    count: int
    norm: LayerNorm
    first: str
    second: str = ""
    parallel: bool = False

    def __call__(self, builder: Builder, x: Slice, attention: Mixer, mixer: Mixer) -> Slice:
        for layer in range(self.count):
            block = Linear(f"{self.prefix}{layer}.")
            h = self.norm(builder, x, block, self.first)
            attended = attention(builder, h, layer, x)
            if self.second:
                h = self.norm(builder, x if self.parallel else attended, block, self.second)
            x = mixer(builder, h, layer, attended)
        return x


def projected(
    under: Linear, names: Sequence[str], heads: Heads, columns: int, bias: bool, taken: Sequence[Ranges] = ((), (), ())
) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices and biases of queries, keys and values that are separate tensors; ``taken``: the rows that are used of
    each."""
    named = list(zip(names, heads.widths, taken, strict=True))
    matrices = [under.weight(name, rows, columns, part) for name, rows, part in named]
    return matrices, [under.bias(name, rows, part) for name, rows, part in named] if bias else []


def fused(
    under: Linear, name: str, heads: Heads, columns: int, bias: bool, taken: Sequence[Ranges]
) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices and biases of queries, keys and values that are rows of one tensor."""
    rows = sum(heads.widths)
    matrices = [under.weight(name, rows, columns, part) for part in taken]
    return matrices, [under.bias(name, rows, part) for part in taken] if bias else []


def attend(
    builder: Builder,
    h: Slice,
    projections: tuple[Sequence[Tensor], Sequence[Tensor]],
    heads: Heads,
    *,
    rope: Rope | None = None,
    norm: Callable[[Slice, str, int], None] | None = None,
    window: int = 0,
    scale: float | None = None,
    slopes: Sequence[float] = (),
    bf16_biases: bool = False,
) -> Slice:
    """Attention over ``h``. ``norm`` is called with (queries, "q", number of heads), and likewise for keys."""
    matrices, biases = projections
    query, key, value = builder.linear(h, matrices, biases=biases).split(*heads.widths)
    for part, name, count in ((query, "q", heads.count), (key, "k", heads.kv_count)):
        if norm is not None:
            norm(part, name, count)
        if rope is not None:
            rotate(builder, part, rope, count)
    return builder.attention(
        query,
        key,
        value,
        heads=heads.count,
        kv_heads=heads.kv_count,
        scale=scale,
        window=window,
        slopes=slopes,
        bf16_biases=bf16_biases,
    )


def plain(prefix: str, hidden: int, ffn: int, function: Activation, names: tuple[str, str], *, bias: bool = True) -> Mixer:
    """An ungated feed-forward layer: two matrices with an activation between them. ``prefix`` has a replacement field for
    the layer's number."""
    first, second = names

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        mlp = Linear(prefix.format(layer))
        up, down = [mlp.weight(first, ffn, hidden)], [mlp.weight(second, hidden, ffn)]
        m = builder.linear(h, up, biases=mlp.biases(bias, (first, ffn)), activation=function)
        return builder.linear(m, down, biases=mlp.biases(bias, (second, hidden)), residual=residual)

    return mixer


def gated_layer(prefix: str, hidden: int, ffn: int, function: Activation) -> Mixer:
    """Llama's gated layer: gate, up and down, without biases. ``prefix`` has a replacement field for the layer's number."""

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        mlp = Linear(prefix.format(layer))
        m = gated(builder, h, mlp, ffn, function)
        return builder.linear(m, [mlp.weight("down_proj", hidden, ffn)], residual=residual)

    return mixer


def norm_of_heads(builder: Builder, under: Linear, size: int, epsilon: float) -> Callable[[Slice, str, int], None]:
    """Layer norms of queries and keys, head by head, with the same weight and bias for all heads."""

    def norm(x: Slice, name: str, count: int) -> None:
        weight, bias = under.vector(f"{name}_layernorm", size), under.bias(f"{name}_layernorm", size)
        builder.head_norm(x, weight, heads=count, epsilon=epsilon, kind=Norm.LAYER, bias=bias)

    return norm


def finish(builder: Builder, x: Slice, embedding: Tensor, tied: bool, *, bias: bool = False, scale: float = 1.0) -> Program:
    """Computes the logits, and the choice from them. ``tied``: the LM head is the embedding."""
    root, (vocabulary, width) = Linear(""), embedding.shape
    head = embedding if tied else root.weight("lm_head", vocabulary, width)
    biases = root.biases(bias, ("lm_head", vocabulary))
    return builder.finish(builder.linear(x, [head], biases=biases, scale=scale))
