"""Apertus 1 and 1.5: Llama with norms of heads and ungated feed-forward layers, whose activation (xIELU) has parameters."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import plain
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.families.skeleton import HeadNorms, Mixer, Sizes, Style, decoder, read_sizes
from outrider.workers.models.rope import read_rope

# transformers' default rope.
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def apertus1p5(config: Config, begin: Begin) -> Program:
    """The LM head may lack the tokens of pictures and sound, which are input only."""
    rows, vocabulary = config.whole("output_vocab_size", 0), config.size("vocab_size", 266752)
    if rows == vocabulary:
        rows = 0
    if rows > vocabulary or (rows and config.flag("tie_word_embeddings", False)):
        raise config.unknown(f'"output_vocab_size": {rows} of {vocabulary} tokens, or with the embedding as the head')
    return _decoder(config, begin, rows)


def apertus(config: Config, begin: Begin) -> Program:
    return _decoder(config, begin, 0)


def _decoder(config: Config, begin: Begin, head_rows: int) -> Program:
    sizes, bias = read_sizes(config, epsilon=1e-5), config.flag("attention_bias", False)
    config.only("mlp_bias", False)
    for key, always in (("qk_norm", True), ("post_norm", False)):  # of the first releases
        config.only(key, always)
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        head_norms=HeadNorms.EACH,
        first_norm="attention_layernorm",
        second_norm="feedforward_layernorm",
        ropes=[read_rope(config, sizes.head_size, sizes.context, theta=12000000.0, usual=ROPE)] * sizes.layers,
        mixer=_mixer(config, sizes),
        head_rows=head_rows,
    )
    return decoder(config, begin, sizes, style)


def _mixer(config: Config, sizes: Sizes) -> Mixer:
    prefix, hidden, ffn = "model.layers.{}.mlp.", sizes.hidden, sizes.ffn
    if config.get("hidden_act", "xielu") != "xielu":
        return plain(prefix, hidden, ffn, activation(config, "hidden_act", "xielu"), ("up_proj", "down_proj"), bias=False)

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        mlp = Linear(prefix.format(layer))
        numbers = [Tensor(f"{mlp.prefix}act_fn.{name}", (1,)) for name in ("alpha_p", "alpha_n", "beta", "eps")]
        m = builder.xielu(builder.linear(h, [mlp.weight("up_proj", ffn, hidden)]), numbers)
        return builder.linear(m, [mlp.weight("down_proj", hidden, ffn)], residual=residual)

    return mixer
