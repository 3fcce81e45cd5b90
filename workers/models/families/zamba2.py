"""Zamba2: Mamba 2 in each layer, in front of some of them a block of attention and a gated layer, which share weights.

Such a block reads the residual and the embeddings side by side. Its output is added to what the layer's Mamba reads, not to
the residual. What a block adds to its shared weights in one layer are adapters, products of two narrow matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Program, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.layer_norm import Heads, finish
from outrider.workers.models.families.mamba2 import MAMBA, OLDER_NAMES, Mamba, check_steps, mamba_layer
from outrider.workers.models.families.parts import Begin, Linear, activation, rms_norm
from outrider.workers.models.families.skeleton import rotate
from outrider.workers.models.rope import Rope, read_rope

HYBRID = "hybrid"
# The epsilon of the norm of a scan's output; configurations state that of the other norms.
EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class Block:
    """``rank`` is that of the adapters. ``adapted``: queries, keys and values have some, as gate and up always do."""

    heads: Heads
    ffn: int
    rank: int
    adapted: bool
    bias: bool
    epsilon: float
    function: Activation
    rope: Rope | None


def zamba2(config: Config, begin: Begin) -> Program:
    hidden, layers = config.size("hidden_size", 2560), config.size("num_hidden_layers", 54)
    vocabulary, context = config.size("vocab_size", 32000), config.size("max_position_embeddings", 4096)
    epsilon, bias = config.number("rms_norm_eps", 1e-5), config.flag("add_bias_linear", False)
    hybrid = _hybrid_layers(config, layers)
    block, mamba = _block(config, hidden, context, epsilon, bias), _mamba(config, hidden, bias)
    # Layers with a block use the first ``blocks`` of them in turn, by the names of the layers that have them first.
    blocks = config.size("num_mem_blocks", 1)

    builder, root = begin(vocabulary, context), Linear("model.")
    embedding = root.weight("embed_tokens", vocabulary, hidden)
    embedded = x = builder.embed(embedding)
    for layer in range(layers):
        names, read = Linear(f"model.layers.{layer}."), x
        if layer in hybrid:
            place = hybrid.index(layer)
            under = Linear(f"model.layers.{hybrid[place % blocks]}.shared_transformer.")
            made = _shared(builder, x, embedded, under, block, place)
            read = builder.linear(made, [names.weight("linear", hidden, hidden)], residual=x)
            names = Linear(f"{names.prefix}mamba_decoder.")
        h = rms_norm(builder, read, names, "input_layernorm", epsilon)
        x = mamba_layer(builder, h, Linear(f"{names.prefix}mamba."), mamba, x)
    x = rms_norm(builder, x, root, "final_layernorm", epsilon)
    # Where it is false, transformers does not share the blocks' weights either.
    config.only("tie_word_embeddings", True)
    return finish(builder, x, embedding, tied=True)


def _hybrid_layers(config: Config, layers: int) -> list[int]:
    key = "layers_block_type"
    stated = config.get(key) or config.get("layer_types")
    if stated is None:
        raise ModelError(f'{config.source} has no "{key}"')
    config.only("layer_types", stated)
    kinds = [OLDER_NAMES.get(kind, kind) for kind in stated]
    if len(kinds) != layers or not set(kinds) <= {MAMBA, HYBRID}:
        raise ModelError(f'{config.source}: the native engine cannot follow "{key}": {stated!r}')
    if HYBRID not in kinds:
        raise config.unknown("a model without a layer of attention")
    found = [layer for layer, kind in enumerate(kinds) if kind == HYBRID]
    config.only("hybrid_layer_ids", found)
    return found


def _block(config: Config, hidden: int, context: int, epsilon: float, bias: bool) -> Block:
    count = config.size("num_attention_heads", 32)
    heads = Heads(count, config.size("num_key_value_heads", count), 2 * hidden // count)
    adapted = config.flag("use_shared_attention_adapter", False)
    # What follows from other keys, and cannot differ from it.
    derived = {"attention_hidden_size": 2 * hidden, "attention_head_dim": heads.size, "head_dim": heads.size}
    derived |= {"kv_channels": hidden // count, "num_query_groups": count}
    for key, value in derived.items():
        config.only(key, value)
    if adapted and heads.kv_count != count:
        raise config.unknown(f"adapters of {heads.kv_count} key heads beside {count} heads")
    config.only("use_long_context", False)
    rope = None
    if config.flag("use_mem_rope", False):
        rope = read_rope(config, heads.size, context)
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.get(key)
    ffn = config.size("intermediate_size", 4 * hidden)
    config.only("ffn_hidden_size", ffn)
    function, rank = activation(config, "hidden_act", "gelu"), config.size("adapter_rank", 128)
    return Block(heads, ffn, rank, adapted, bias, epsilon, function, rope)


def _mamba(config: Config, hidden: int, bias: bool) -> Mamba:
    inner, heads = config.size("mamba_expand", 2) * hidden, config.size("n_mamba_heads", 8)
    if inner % heads:
        raise config.unknown(f'"n_mamba_heads": {heads} of {inner} columns')
    config.only("mamba_headdim", inner // heads)
    config.only("use_conv_bias", True)
    # transformers applies "time_step_min" in passes over several tokens only, and the model's makers in none.
    check_steps(config)
    config.get("use_mem_eff_path")
    return Mamba(
        heads=heads,
        head_size=inner // heads,
        groups=config.size("mamba_ngroups", 1),
        state=config.size("mamba_d_state", 64),
        taps=config.size("mamba_d_conv", 4),
        conv_bias=True,
        bias=bias,
        epsilon=EPSILON,
    )


def _shared(builder: Builder, x: Slice, embedded: Slice, under: Linear, block: Block, place: int) -> Slice:
    """The output of the shared weights ``under`` with the adapters of the ``place``-th layer that has a block."""
    hidden = x.width
    both = builder.room(2 * hidden)
    for first, part in ((0, x), (hidden, embedded)):
        builder.scale(part, 1.0, output=both.part(first, hidden))
    h = rms_norm(builder, both, under, "input_layernorm", block.epsilon)
    attention, heads = Linear(f"{under.prefix}self_attn."), block.heads
    parts = []
    for name, width in zip("qkv", heads.widths, strict=True):
        adapter = f"linear_{name}_adapter_list.{place}." if block.adapted else ""
        weight = attention.weight(f"{name}_proj", width, h.width)
        parts.append(_adapted(builder, h, weight, attention, adapter, block.rank))
    query, key, value = parts
    if block.rope is not None:
        rotate(builder, query, block.rope, heads.count)
        rotate(builder, key, block.rope, heads.kv_count)
    scale = (heads.size / 2) ** -0.5
    a = builder.attention(query, key, value, heads=heads.count, kv_heads=heads.kv_count, scale=scale)
    a = builder.linear(a, [attention.weight("o_proj", hidden, a.width)])
    h = rms_norm(builder, a, under, "pre_ff_layernorm", block.epsilon)
    mlp, rows = Linear(f"{under.prefix}feed_forward."), 2 * block.ffn
    biases, adapter = mlp.biases(block.bias, ("gate_up_proj", rows)), f"gate_up_proj_adapter_list.{place}."
    weight = mlp.weight("gate_up_proj", rows, hidden)
    gate, up = _adapted(builder, h, weight, mlp, adapter, block.rank, biases).split(block.ffn, block.ffn)
    m = builder.gate(up, gate, activation=block.function)
    biases = mlp.biases(block.bias, ("down_proj", hidden))
    return builder.linear(m, [mlp.weight("down_proj", hidden, block.ffn)], biases=biases)


def _adapted(
    builder: Builder, h: Slice, weight: Tensor, names: Linear, adapter: str, rank: int, biases: tuple[Tensor, ...] = ()
) -> Slice:
    """The product with ``weight``, plus that with the two matrices of the ``adapter`` ("": there is none)."""
    if not adapter:
        return builder.linear(h, [weight], biases=biases)
    narrow = builder.linear(h, [names.weight(f"{adapter}0", rank, h.width)])
    added = builder.linear(narrow, [names.weight(f"{adapter}1", weight.count, rank)])
    return builder.linear(h, [weight], biases=biases, residual=added)
