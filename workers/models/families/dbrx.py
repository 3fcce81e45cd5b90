"""DBRX: layer norms without biases, clipped queries, keys and values, and all experts' matrices stacked in three
tensors."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Program, Routing, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.experts import chosen_experts
from outrider.workers.models.families.layer_norm import Heads, LayerNorm, even_heads, finish
from outrider.workers.models.families.parts import Begin, Linear, activation
from outrider.workers.models.families.skeleton import Mixer, rotate
from outrider.workers.models.rope import Rope, read_rope

# torch's, which no configuration states.
EPSILON = 1e-5
# Keys of training, and ones that repeat others. (model_info.py refuses another base of rope here than at the top level.)
OF_ATTENTION = ("attn_pdrop", "rope_theta", "model_type")
OF_EXPERTS = ("moe_jitter_eps", "moe_loss_weight", "model_type", "hidden_size", "uniform_expert_assignment")


def dbrx(config: Config, begin: Begin) -> Program:
    for key in ("emb_pdrop", "num_key_value_heads"):  # of training; a copy of attn_config's
        config.get(key)
    config.only("tie_word_embeddings", False)
    hidden, layers = config.size("d_model", 2048), config.size("n_layers", 24)
    vocabulary, context = config.size("vocab_size", 32000), config.size("max_seq_len", 2048)
    heads, bound = _heads(config, hidden)
    rope = read_rope(config, heads.size, context)
    attention, mixer = _attention(heads, bound, rope), _experts(config, hidden)
    norm = LayerNorm(hidden, EPSILON, bias=False)
    builder, root = begin(vocabulary, context), Linear("transformer.")
    embedding = root.weight("wte", vocabulary, hidden)
    x = builder.embed(embedding)
    for layer in range(layers):
        block = Linear(f"transformer.blocks.{layer}.norm_attn_norm.")
        attended = attention(builder, norm(builder, x, block, "norm_1"), layer, x)
        x = mixer(builder, norm(builder, attended, block, "norm_2"), layer, attended)
    return finish(builder, norm(builder, x, root, "norm_f"), embedding, False)


def _part(config: Config, name: str, unused: tuple[str, ...]) -> Config:
    """The part of the configuration for attention, or for experts."""
    stated = config.get(name, {})
    if not isinstance(stated, Mapping):
        raise ModelError(f'{config.source}: "{name}" must be an object, got {stated!r}')
    part = Config(stated, f'{config.source}: "{name}"')
    for key in unused:
        part.get(key)
    return part


def _heads(config: Config, hidden: int) -> tuple[Heads, float]:
    """The heads, and the bound by which queries, keys and values are clipped."""
    part = _part(config, "attn_config", OF_ATTENTION)
    heads = even_heads(config, hidden, config.size("n_heads", 16), part.size("kv_n_heads", 1))
    if part.get("clip_qkv") is None:  # transformers breaks without
        raise part.unknown('"clip_qkv": null')
    bound = part.positive("clip_qkv", 0.0)
    part.check_all_read()
    return heads, bound


def _attention(heads: Heads, bound: float, rope: Rope) -> Mixer:
    def attention(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under, hidden = Linear(f"transformer.blocks.{layer}.norm_attn_norm.attn."), h.width
        matrix = under.weight("Wqkv", sum(heads.widths), hidden)
        qkv = builder.linear(h, [matrix], activation=Activation.CLIP, cap=bound)
        query, key, value = qkv.split(*heads.widths)
        rotate(builder, query, rope, heads.count)
        rotate(builder, key, rope, heads.kv_count)
        a = builder.attention(query, key, value, heads=heads.count, kv_heads=heads.kv_count)
        return builder.linear(a, [under.weight("out_proj", hidden, hidden)], residual=residual)

    return attention


def _experts(config: Config, hidden: int) -> Mixer:
    part = _part(config, "ffn_config", OF_EXPERTS)
    count, ffn = part.size("moe_num_experts", 4), part.size("ffn_hidden_size", 3584)
    chosen, named = chosen_experts(part, count, 1, "moe_top_k"), part.get("ffn_act_fn", {"name": "silu"})
    function = activation(Config(named, f'{part.source}: "ffn_act_fn"'), "name", "silu")
    if set(named) - {"name"}:
        raise part.unknown(f'"ffn_act_fn": {named!r}')
    # Here null is a value: weights are those of a softmax over all. They are divided by the sum of the chosen ones.
    shared = part.stated("moe_normalize_expert_weights", 1.0) is not None
    part.only("moe_normalize_expert_weights", 1.0)
    routing = Routing.SOFTMAX_CHOSEN if shared else Routing.SOFTMAX
    part.check_all_read()

    def mixer(builder: Builder, h: Slice, layer: int, residual: Slice | None) -> Slice:
        under = Linear(f"transformer.blocks.{layer}.ffn.")
        scores = builder.linear(h, [under.weight("router.layer", count, hidden)], precision=Format.FP32)
        route = builder.route(scores, chosen, routing)

        def each(name: str, transposed: bool = False) -> list[Tensor]:
            whole, shape = f"{under.prefix}experts.mlp.{name}", (count * ffn, hidden)
            starts = range(0, count * ffn, ffn)
            return [Tensor(whole, shape, ((start, start + ffn),), transposed=transposed) for start in starts]

        pairs = [list(pair) for pair in zip(each("w1"), each("v1"), strict=True)]
        m = builder.experts(h, route, pairs, gated=True, activation=function)
        products = builder.experts(m, route, [[matrix] for matrix in each("w2", transposed=True)], behind=True)
        return builder.mix(products, route, hidden, residual=residual)

    return mixer
