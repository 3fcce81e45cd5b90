"""What Gemma 3n and 4 share: late layers that read the keys and values of earlier ones, an embedding for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.kernels.builder import Builder
from outrider.kernels.program import Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.gemma import root
from outrider.workers.models.families.layer_norm import Heads
from outrider.workers.models.families.parts import Linear
from outrider.workers.models.families.skeleton import Sizes, rotate
from outrider.workers.models.rope import Rope


def inputs_of_layers(builder: Builder, x: Slice, sizes: Sizes, width: int, table: int) -> Slice:
    """The per-layer inputs of all layers, concatenated: from the token's row of a table, and from its embedding.

    Tokens beyond the table take its first row.
    """
    model, whole = Linear("model."), sizes.layers * width
    rows = ((0, table), *((0, 1),) * (sizes.vocabulary - table)) if table < sizes.vocabulary else ()
    said = builder.embed(model.weight("embed_tokens_per_layer", table, whole, rows), root(builder, width))
    projection = [model.weight("per_layer_model_projection", whole, sizes.hidden)]
    given = builder.linear(x, projection, scale=sizes.hidden**-0.5)
    weight = model.vector("per_layer_projection_norm", width)
    builder.head_norm(given, weight, heads=sizes.layers, epsilon=sizes.epsilon, residual=said)
    return builder.scale(given, 2.0**-0.5)


def first_that_shares(config: Config, types: Sequence[str], usual: int) -> int:
    """The first of the last layers, which share keys and values of earlier ones; ``usual`` is the default number of
    them."""
    count = config.whole("num_kv_shared_layers", usual)
    first = len(types) - count
    if not set(types[max(first, 0) :]) <= set(types[: max(first, 0)]) or first < 0:
        raise ModelError(
            f'{config.source}: "num_kv_shared_layers" is {count} of {len(types)}: some of them have no '
            "layer of their type before them whose keys and values they could read"
        )
    return first


@dataclass
class SharedAttention:
    """``heads``, ``windows`` and ``ropes`` by layer. Layers from ``shared`` on compute only queries, and attend to the keys
    and values of the last earlier layer of their type. ``of_keys``: types of layers whose values are the keys before their
    norm.
    """

    sizes: Sizes
    types: Sequence[str]
    heads: Sequence[Heads]
    windows: Sequence[int]
    ropes: Sequence[Rope]
    shared: int
    of_keys: Sequence[str]
    bias: bool

    def __post_init__(self) -> None:
        self._stored: dict[str, tuple[Slice, Slice]] = {}

    def stores(self, layer: int) -> bool:
        return layer < self.shared

    def __call__(self, builder: Builder, h: Slice, layer: int) -> Slice:
        under = Linear(f"model.layers.{layer}.self_attn.")
        heads, kind = self.heads[layer], self.types[layer]
        width, kv_width, _ = heads.widths
        named = [("q_proj", width)]
        if self.stores(layer):
            named += [("k_proj", kv_width)] + ([] if kind in self.of_keys else [("v_proj", kv_width)])
        matrices = [under.weight(name, rows, h.width) for name, rows in named]
        made = builder.linear(h, matrices, biases=under.biases(self.bias, *named))
        query = made.part(0, width)
        self._normalise(builder, query, heads.count, under.vector("q_norm", heads.size), self.ropes[layer])
        if self.stores(layer):
            key, value = made.part(width, kv_width), builder.room(kv_width)
            before = key if kind in self.of_keys else made.part(width + kv_width, kv_width)
            builder.head_norm(before, None, heads=heads.kv_count, epsilon=self.sizes.epsilon, output=value)
            self._normalise(builder, key, heads.kv_count, under.vector("k_norm", heads.size), self.ropes[layer])
            self._stored[kind] = key, value
        key, value = self._stored[kind]
        window = self.windows[layer]
        a = builder.attention(query, key, value, heads=heads.count, kv_heads=heads.kv_count, scale=1.0, window=window)
        biases = under.biases(self.bias, ("o_proj", h.width))
        return builder.linear(a, [under.weight("o_proj", h.width, width)], biases=biases)

    def _normalise(self, builder: Builder, x: Slice, heads: int, weight: Tensor, rope: Rope) -> None:
        builder.head_norm(x, weight, heads=heads, epsilon=self.sizes.epsilon)
        rotate(builder, x, rope, heads)
