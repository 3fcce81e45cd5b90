"""BitNet: Llama with squared ReLU, and a norm before each projection that leads back into the residual.

Its published checkpoints say in quantization_config that every linear layer rounds what it reads to int8, with one scale
for a whole token. The kernels have a scale for every 128 channels, so that these are left to the hf engine
(formats/configuration.py); what has no such section is computed as it stands there.
"""

from __future__ import annotations

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Slice
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import Heads, attend, projected
from outrider.workers.models.families.parts import Begin, Linear, activation, rms_norm
from outrider.workers.models.families.skeleton import Mixer, Sizes, Style, decoder, gated, read_sizes
from outrider.workers.models.rope import Rope, read_rope


def bitnet(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=5, epsilon=1e-5, layers=30, ffn=6912, heads=20)
    # The norm after attention has the hidden size.
    config.only("head_dim", sizes.hidden // sizes.heads)
    rope = read_rope(config, sizes.head_size, sizes.context, theta=500000.0)
    function, bias = activation(config, "hidden_act", "relu2"), config.flag("attention_bias", False)
    style = Style(attention=_attention(sizes, rope, bias), mixer=_mixer(sizes, function))
    return decoder(config, begin, sizes, style)


def _attention(sizes: Sizes, rope: Rope, bias: bool) -> Mixer:
    heads, hidden = Heads(sizes.heads, sizes.kv_heads, sizes.head_size), sizes.hidden

    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"model.layers.{layer}.self_attn.")
        projections = projected(under, ("q_proj", "k_proj", "v_proj"), heads, hidden, bias)
        a = rms_norm(builder, attend(builder, h, projections, heads, rope=rope), under, "attn_sub_norm", sizes.epsilon)
        output, shift = under.weight("o_proj", hidden, a.width), under.biases(bias, ("o_proj", hidden))
        return builder.linear(a, [output], biases=shift, residual=residual)

    return attention


def _mixer(sizes: Sizes, function: Activation) -> Mixer:
    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        mlp = Linear(f"model.layers.{layer}.mlp.")
        m = rms_norm(builder, gated(builder, h, mlp, sizes.ffn, function), mlp, "ffn_sub_norm", sizes.epsilon)
        return builder.linear(m, [mlp.weight("down_proj", sizes.hidden, sizes.ffn)], residual=residual)

    return mixer
