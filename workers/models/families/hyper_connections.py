"""Hyper-connections: each half of a decoder layer reads a weighted sum of several residual streams, and what it computes is
added to each of them by a weight of its own. The weights follow from all streams of a token."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kernels.builder import Builder
from outrider.kernels.program import Format, Norm, Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import Begin, Linear, rms_norm
from outrider.workers.models.families.skeleton import Mixer, Sizes

# CONNECT's limit (kMostStreams of the kernels).
MOST_STREAMS = 16


@dataclass(frozen=True, slots=True)
class Connections:
    """``count`` streams, side by side. ``most``, ``least`` and ``rounds`` are ``Builder.connect``'s.

    ``mixed``: streams are also replaced by weighted sums of all. ``head``: at the end they are read by weights; otherwise
    their mean is taken.
    """

    count: int
    epsilon: float
    norm_epsilon: float
    most: float
    least: float
    rounds: int = 1
    mixed: bool = False
    head: bool = False

    def weights(self, builder: Builder, x: Slice, named: tuple[str, str, str], parts: int) -> Slice:
        """``named``: the names of the matrix, of the factors and of the biases. Like a router's, the matrix is in fp32."""
        matrix, factors, biases = named
        rows = sum((self.count, self.count, self.count**2)[:parts])
        h = builder.norm(x, None, kind=Norm.RMS, epsilon=self.norm_epsilon)
        logits = builder.linear(h, [Tensor(matrix, (rows, x.width))], precision=Format.FP32)
        return builder.connect(
            logits,
            Tensor(factors, (parts,)),
            Tensor(biases, (rows,)),
            streams=self.count,
            epsilon=self.epsilon,
            most=self.most,
            least=self.least,
            rounds=self.rounds,
        )


def read_streams(config: Config) -> tuple[int, float]:
    """The number of streams, and the epsilon of their weights."""
    count, epsilon = config.size("hc_mult", 4), config.number("hc_eps", 1e-6)
    if count > MOST_STREAMS:
        raise config.unknown(f'"hc_mult": {count}, more than {MOST_STREAMS} streams', hf="does")
    if epsilon < 0.0:
        raise config.unknown(f'"hc_eps": {epsilon!r}', hf="does")
    return count, epsilon


def connected_decoder(
    config: Config, begin: Begin, sizes: Sizes, connections: Connections, attention: Mixer, mixer: Mixer
) -> Program:
    """A decoder whose layers have the norms of Llama's, and hyper-connections in place of residuals."""
    builder, count, hidden = begin(sizes.vocabulary, sizes.context), connections.count, sizes.hidden
    embedding = Tensor("model.embed_tokens.weight", (sizes.vocabulary, hidden))
    embedded, x = builder.embed(embedding), builder.room(count * hidden)
    for stream in x.split(*[hidden] * count):
        builder.scale(embedded, 1.0, output=stream)
    halves = (("attn_hc", "input_layernorm", attention), ("ffn_hc", "post_attention_layernorm", mixer))
    for layer in range(sizes.layers):
        block = Linear(f"model.layers.{layer}.")
        for name, norm, compute in halves:
            named = [f"{block.prefix}{name}.{part}" for part in ("fn", "scale", "base")]
            weights = connections.weights(builder, x, (named[0], named[1], named[2]), 3 if connections.mixed else 2)
            h = builder.blend(x, weights.part(0, count), vectors=count)
            made = compute(builder, rms_norm(builder, h, block, norm, sizes.epsilon), layer, None)
            if connections.mixed:
                x = builder.blend(x, weights.part(2 * count, count**2), vectors=count)
            x = builder.blend(made, weights.part(count, count), vectors=1, residual=x)
    x = rms_norm(builder, _end(builder, x, connections), Linear("model."), "norm", sizes.epsilon)
    tied = config.flag("tie_word_embeddings", False)
    head = embedding if tied else Tensor("lm_head.weight", (sizes.vocabulary, hidden))
    return builder.finish(builder.linear(x, [head]))


def _end(builder: Builder, x: Slice, connections: Connections) -> Slice:
    count = connections.count
    if connections.head:
        under = "model.hc_head.hc_"
        return builder.blend(
            x, connections.weights(builder, x, (f"{under}fn", f"{under}scale", f"{under}base"), 1), vectors=count
        )
    total, *others = x.split(*[x.width // count] * count)
    for stream in others:
        total = builder.scale(stream, 1.0, residual=total)
    return builder.scale(total, 1.0 / count)
