"""Qwen4-Exp without n-gram embeddings: Qwen3.5's delta nets, gated attention and experts between several residual streams,
which gates of a low rank read column by column."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Norm, Program, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import mixture
from outrider.workers.models.families.latent import check_rows
from outrider.workers.models.families.mixtures import qwen_experts
from outrider.workers.models.families.parts import FULL, Begin, Linear
from outrider.workers.models.families.qwen3_next import DELTA_NET, gated_attention, gated_delta_net, read_net
from outrider.workers.models.families.skeleton import Sizes, read_sizes
from outrider.workers.models.rope import read_rope

INDEXED = "indexed_attention"
# Keys of what chooses the tokens that are seen, and of n-gram embeddings.
UNUSED = (
    *("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_compress_ratio"),
    *("ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base"),
    *("make_ngram_vocab_size_divisible_by", "seed", "split_ngram_parts", "number_of_conv_states"),
    "mtp_num_hidden_layers",
)
OUTPUT_GATES = {"silu": Activation.SILU, "sigmoid": Activation.SIGMOID}


def qwen4_exp(config: Config, begin: Begin) -> Program:
    """For rows of up to "indexer_budget" tokens: the indexer would choose all blocks of earlier tokens, so it is left
    out."""
    shared = config.size("shared_expert_intermediate_size", 512)
    sizes = read_sizes(config, kv_heads=2, head_size=256, layers=40, heads=16, ffn=shared)  # every layer is a mixture
    if config.get("ple_layer_ids"):
        raise config.unknown(f'"ple_layer_ids": {config.get("ple_layer_ids")!r} (embeddings of n-grams)', hf="does")
    for key, always in (("hidden_act", "silu"), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        config.only(key, always)
    for unused in UNUSED:
        config.get(unused)
    types = _layer_types(config, sizes.layers)
    if INDEXED in types:
        check_rows(config, sizes, "indexer_budget", None)
    config.get("indexer_budget")
    kind = config.get("output_gate_type", "silu")
    if kind not in OUTPUT_GATES:
        raise config.unknown(f'"output_gate_type": {kind!r}')
    net = replace(read_net(config), output_gate=OUTPUT_GATES[kind])
    bias, rope = config.flag("attention_bias", False), read_rope(config, sizes.head_size, sizes.context, partial=1.0)
    streams = _Streams(config.size("hc_count", 4), config.size("hc_lowrank", 320), sizes)
    mixer = mixture(sizes, qwen_experts(config, 512, 10, 512, shared, normalised=True))
    builder = begin(sizes.vocabulary, sizes.context)
    embedding = Tensor("model.embed_tokens.weight", (sizes.vocabulary, sizes.hidden))
    x = streams.begin(builder, builder.embed(embedding))
    for layer in range(sizes.layers):
        block = f"model.layers.{layer}."
        h, weights = streams.read(builder, x, Linear(f"{block}attn_hyper_connection."))
        if types[layer] == DELTA_NET:
            made = gated_delta_net(builder, h, Linear(f"{block}linear_attn."), net, sizes.epsilon, None)
        else:
            made = gated_attention(builder, h, Linear(f"{block}self_attn."), sizes, rope, bias, None)
        x = builder.blend(made, weights, vectors=1, residual=x)
        h, weights = streams.read(builder, x, Linear(f"{block}mlp_hyper_connection."))
        x = builder.blend(mixer(builder, h, layer, None), weights, vectors=1, residual=x)
    end = Linear("model.hyper_connection_mixer.")
    y = streams.mixed(builder, streams.normed(builder, x, end), end)
    tied = config.flag("tie_word_embeddings", False)
    return builder.finish(
        builder.linear(y, [embedding if tied else Tensor("lm_head.weight", (sizes.vocabulary, sizes.hidden))])
    )


@dataclass(frozen=True, slots=True)
class _Streams:
    """``count`` streams, side by side. Gates are made of all of them, by matrices of rank ``rank``."""

    count: int
    rank: int
    sizes: Sizes

    def begin(self, builder: Builder, embedded: Slice) -> Slice:
        x = builder.room(self.count * self.sizes.hidden)
        for stream in self._each(x):
            builder.scale(embedded, 1.0, output=stream)
        return x

    def read(self, builder: Builder, x: Slice, names: Linear) -> tuple[Slice, Slice]:
        """The input of a half of a layer, and the weights by which its output is added to the streams."""
        normed = self.normed(builder, x, names)
        # Like those of a router, they are in fp32.
        matrix = [names.weight("block_inject_weight", self.count, x.width)]
        weights = builder.linear(normed, matrix, activation=Activation.SIGMOID, scale=2.0, precision=Format.FP32)
        return self.mixed(builder, normed, names), weights

    def normed(self, builder: Builder, x: Slice, names: Linear) -> Slice:
        """The streams, each with a norm of its own, divided by their number, as all that reads them does."""
        normed, hidden = builder.room(x.width), self.sizes.hidden
        for number, (stream, output) in enumerate(zip(self._each(x), self._each(normed), strict=True)):
            rows = ((number * hidden, (number + 1) * hidden),)
            gain = Tensor(f"{names.prefix}hc_norm.weight", (x.width,), rows, plus=1.0)
            builder.norm(stream, gain, kind=Norm.RMS, epsilon=self.sizes.epsilon, output=output)
        return builder.scale(normed, 1.0 / self.count)

    def mixed(self, builder: Builder, normed: Slice, names: Linear) -> Slice:
        """The mean of the streams, each column times a gate."""
        down = [names.weight("input_mix_weight_down", self.rank, normed.width)]
        low = builder.linear(normed, down, activation=Activation.SILU)
        gates = builder.linear(low, [names.weight("input_mix_weight_up", normed.width, self.rank)])
        total: Slice | None = None
        for stream, gate in zip(self._each(normed), self._each(gates), strict=True):
            total = builder.gate(stream, gate, residual=total)
        assert total is not None
        return total

    def _each(self, x: Slice) -> tuple[Slice, ...]:
        return x.split(*[self.sizes.hidden] * self.count)


def _layer_types(config: Config, layers: int) -> list[str]:
    interval = config.size("full_attention_interval", 4)
    stated = config.get("layer_types") or [DELTA_NET if (layer + 1) % interval else INDEXED for layer in range(layers)]
    types = [INDEXED if kind == FULL else kind for kind in stated]
    if len(types) != layers or not set(types) <= {INDEXED, DELTA_NET}:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {stated!r}')
    return types
