"""GPT-2, and GPT, whose norms follow the residuals. Their checkpoints store transposed matrices: [inputs, outputs]."""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Slice, Tensor
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import Heads, LayerNorm, Stack, attend, even_heads, finish
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.families.skeleton import Mixer

# What GPT's "afn" names; its "gelu" is the one by tanh.
GPT_ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


def gpt2(config: Config, begin: Begin) -> Program:
    hidden = config.size("n_embd", 768)
    ffn = config.size("n_inner", 4 * hidden)
    vocabulary, context = config.size("vocab_size", 50257), config.size("n_positions", 1024)
    count = config.size("n_head", 12)
    heads = even_heads(config, hidden, count, count)
    norm = LayerNorm(hidden, config.number("layer_norm_epsilon", 1e-5))
    function = activation(config, "activation_function", "gelu_new")
    config.only("add_cross_attention", False)
    config.get("reorder_and_upcast_attn")  # of mixed precision: scores in fp32, as they always are here
    scale = heads.size**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)

    builder = begin(vocabulary, context)
    root = Linear("transformer.")
    embedding = root.weight("wte", vocabulary, hidden)
    x = builder.positions(builder.embed(embedding), root.weight("wpe", context, hidden))
    stack = Stack("transformer.h.", config.size("n_layer", 12), norm, "ln_1", "ln_2")
    x = stack(builder, x, _attention(heads, hidden, scale, by_layer), _plain(hidden, ffn, function))
    return finish(builder, norm(builder, x, root, "ln_f"), embedding, config.flag("tie_word_embeddings", True))


def openai_gpt(config: Config, begin: Begin) -> Program:
    hidden, count = config.size("n_embd", 768), config.size("n_head", 12)
    vocabulary, context = config.size("vocab_size", 40478), config.size("n_positions", 512)
    heads, norm = even_heads(config, hidden, count, count), LayerNorm(hidden, config.number("layer_norm_epsilon", 1e-5))
    for unused in ("n_special", "predict_special_tokens"):  # of the first releases
        config.get(unused)
    name = config.get("afn", "gelu")
    if name not in GPT_ACTIVATIONS:
        raise config.unknown(f'"afn": {name!r}')

    builder, root = begin(vocabulary, context), Linear("transformer.")
    embedding = root.weight("tokens_embed", vocabulary, hidden)
    x = builder.positions(builder.embed(embedding), root.weight("positions_embed", context, hidden))
    attention = _attention(heads, hidden, heads.size**-0.5, by_layer=False)
    mixer = _plain(hidden, 4 * hidden, GPT_ACTIVATIONS[name])
    for layer in range(config.size("n_layer", 12)):
        block = Linear(f"transformer.h.{layer}.")
        x = norm(builder, attention(builder, x, layer, x), block, "ln_1")
        x = norm(builder, mixer(builder, x, layer, x), block, "ln_2")
    return finish(builder, x, embedding, config.flag("tie_word_embeddings", True))


def _attention(heads: Heads, hidden: int, scale: float, by_layer: bool) -> Mixer:
    """``by_layer``: scores are divided by the layer's number, from 1."""

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"transformer.h.{layer}.attn.")
        projections = [_transposed(under, "c_attn", 3 * hidden, hidden)], [under.bias("c_attn", 3 * hidden)]
        a = attend(builder, h, projections, heads, scale=scale / (layer + 1) if by_layer else scale)
        matrix, bias = _transposed(under, "c_proj", hidden, hidden), under.bias("c_proj", hidden)
        return builder.linear(a, [matrix], biases=[bias], residual=residual)

    return attention


def _plain(hidden: int, ffn: int, function: Activation) -> Mixer:
    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"transformer.h.{layer}.mlp.")
        first, second = _transposed(under, "c_fc", ffn, hidden), _transposed(under, "c_proj", hidden, ffn)
        m = builder.linear(h, [first], biases=[under.bias("c_fc", ffn)], activation=function)
        return builder.linear(m, [second], biases=[under.bias("c_proj", hidden)], residual=residual)

    return mixer


def _transposed(under: Linear, name: str, rows: int, columns: int) -> Tensor:
    return Tensor(f"{under.prefix}{name}.weight", (rows, columns), stored=(columns, rows))
