"""The decoder families of the native engine, one short builder each: a config becomes a program over named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.kernels.builder import Builder
from outrider.kernels.program import Activation, Format, Norm, Program, Slice, Tensor
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.rope import read_rope

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU_ERF,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


def build_program(values: Mapping[str, Any], precision: Format, group: int = 128, source: str = "config.json") -> Program:
    """The program of a config.json's content; a ModelError where the native engine cannot compute that model."""
    config = Config(values, source)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ModelError(f"the native engine does not know the family {values.get('model_type')!r}; the hf engine may")
    try:
        program = family(config, precision, group)
        config.check_all_read()
    except (ValueError, TypeError, ArithmeticError) as error:  # a value of a kind, or a size, that nobody could mean
        raise ModelError(f"{source}: the native engine cannot lay this model out: {error}") from error
    return program


def _activation(config: Config, key: str, default: str) -> Activation:
    name = config.get(key, default)
    if name not in ACTIVATIONS:
        raise ModelError(f'{config.source}: the native engine does not know the activation "{name}"; the hf engine may')
    return ACTIVATIONS[name]


@dataclass(frozen=True, slots=True)
class _Linear:
    """Names the weight and bias of the linear layers under one prefix."""

    prefix: str

    def weight(self, name: str, rows: int, columns: int) -> Tensor:
        return Tensor(f"{self.prefix}{name}.weight", (rows, columns))

    def vector(self, name: str, size: int) -> Tensor:
        return Tensor(f"{self.prefix}{name}.weight", (size,))

    def bias(self, name: str, size: int) -> Tensor:
        return Tensor(f"{self.prefix}{name}.bias", (size,))

    def biases(self, present: bool, *named: tuple[str, int]) -> tuple[Tensor, ...]:
        return tuple(self.bias(name, size) for name, size in named) if present else ()


@dataclass(frozen=True, slots=True)
class _LlamaStyle:
    """Where the families that share Llama's skeleton differ. ``windows`` has one entry a layer, 0 for no window."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    windows: Sequence[int] = ()
    kv_heads: int | None = None
    head_size: int | None = None


def _llama(config: Config, precision: Format, group: int) -> Program:
    bias = config.flag("attention_bias", False)
    style = _LlamaStyle(qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias", False))
    return _llama_style(config, precision, group, style)


def _mistral(config: Config, precision: Format, group: int) -> Program:
    window = config.window(4096)
    style = _LlamaStyle(windows=[window] * config.size("num_hidden_layers", 32), kv_heads=8)
    return _llama_style(config, precision, group, style)


def _qwen2(config: Config, precision: Format, group: int) -> Program:
    return _llama_style(config, precision, group, _LlamaStyle(qkv_bias=True, windows=_qwen_windows(config), kv_heads=32))


def _qwen3(config: Config, precision: Format, group: int) -> Program:
    bias = config.flag("attention_bias", False)
    windows = _qwen_windows(config)
    style = _LlamaStyle(qkv_bias=bias, output_bias=bias, head_norms=True, windows=windows, kv_heads=32, head_size=128)
    return _llama_style(config, precision, group, style)


def _qwen_windows(config: Config) -> list[int]:
    """Qwen's windows are off unless asked for, and then only from a certain layer on."""
    layers = config.size("num_hidden_layers", 32)
    window = config.window(4096) if config.flag("use_sliding_window", False) else 0
    config.get("sliding_window")
    first = config.number("max_window_layers", 28)
    sliding = "sliding_attention"
    types = config.get("layer_types") or [sliding if window and layer >= first else "" for layer in range(layers)]
    if len(types) != layers or not set(types) <= {sliding, "full_attention", ""}:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    return [window if kind == sliding else 0 for kind in types]


def _llama_style(config: Config, precision: Format, group: int, style: _LlamaStyle) -> Program:
    hidden, ffn = config.size("hidden_size"), config.size("intermediate_size")
    layers, heads = config.size("num_hidden_layers", 32), config.size("num_attention_heads", 32)
    kv_heads = config.size("num_key_value_heads", style.kv_heads or heads)
    head_size = config.size("head_dim", style.head_size or hidden // heads)
    vocabulary, context = config.size("vocab_size"), config.size("max_position_embeddings")
    epsilon = config.number("rms_norm_eps", 1e-6)
    activation = _activation(config, "hidden_act", "silu")
    rope = read_rope(config, head_size, context)
    width, kv_width = heads * head_size, kv_heads * head_size
    projections = (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width))

    builder = Builder(vocabulary, context, precision, group)
    embedding = Tensor("model.embed_tokens.weight", (vocabulary, hidden))
    x = builder.embed(embedding)
    for layer in range(layers):
        block = _Linear(f"model.layers.{layer}.")
        attention, mlp = _Linear(f"{block.prefix}self_attn."), _Linear(f"{block.prefix}mlp.")
        h = builder.norm(x, block.vector("input_layernorm", hidden), kind=Norm.RMS, epsilon=epsilon)
        matrices = [attention.weight(name, rows, hidden) for name, rows in projections]
        qkv = builder.linear(h, matrices, biases=attention.biases(style.qkv_bias, *projections))
        query, key, value = qkv.split(width, kv_width, kv_width)
        if style.head_norms:
            builder.head_norm(query, attention.vector("q_norm", head_size), heads=heads, epsilon=epsilon)
            builder.head_norm(key, attention.vector("k_norm", head_size), heads=kv_heads, epsilon=epsilon)
        builder.rope(query, rope.frequencies, heads=heads, factor=rope.factor)
        builder.rope(key, rope.frequencies, heads=kv_heads, factor=rope.factor)
        window = style.windows[layer] if style.windows else 0
        a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads, window=window)
        output = [attention.weight("o_proj", hidden, width)]
        x = builder.linear(a, output, biases=attention.biases(style.output_bias, ("o_proj", hidden)), residual=x)
        h = builder.norm(x, block.vector("post_attention_layernorm", hidden), kind=Norm.RMS, epsilon=epsilon)
        gate, up = mlp.weight("gate_proj", ffn, hidden), mlp.weight("up_proj", ffn, hidden)
        gate_and_up = mlp.biases(style.mlp_bias, ("gate_proj", ffn), ("up_proj", ffn))
        m = builder.gated(h, gate, up, activation, biases=gate_and_up)
        down = [mlp.weight("down_proj", hidden, ffn)]
        x = builder.linear(m, down, biases=mlp.biases(style.mlp_bias, ("down_proj", hidden)), residual=x)
    final = Tensor("model.norm.weight", (hidden,))
    x = builder.norm(x, final, kind=Norm.RMS, epsilon=epsilon)
    head = embedding if config.flag("tie_word_embeddings", False) else Tensor("lm_head.weight", (vocabulary, hidden))
    return builder.finish(builder.linear(x, [head]))


def _opt(config: Config, precision: Format, group: int) -> Program:
    hidden, ffn = config.size("hidden_size", 768), config.size("ffn_dim", 3072)
    layers, heads = config.size("num_hidden_layers", 12), config.size("num_attention_heads", 12)
    vocabulary, context = config.size("vocab_size", 50272), config.size("max_position_embeddings", 2048)
    embedded = config.size("word_embed_proj_dim", hidden)
    before, bias = config.flag("do_layer_norm_before", True), config.flag("enable_bias", True)
    config.only("layer_norm_elementwise_affine", True)
    activation = _activation(config, "activation_function", "relu")
    builder = Builder(vocabulary, context, precision, group)
    root = _Linear("model.decoder.")

    def norm(x: Slice, under: _Linear, name: str) -> Slice:
        weight, shift = under.vector(name, hidden), under.bias(name, hidden)
        return builder.norm(x, weight, kind=Norm.LAYER, epsilon=1e-5, bias=shift)

    embedding = root.weight("embed_tokens", vocabulary, embedded)
    x = builder.embed(embedding)
    if embedded != hidden:
        x = builder.linear(x, [root.weight("project_in", hidden, embedded)])
    # The first two rows of OPT's position table stood for padding.
    x = builder.positions(x, root.weight("embed_positions", context + 2, hidden), offset=2)
    for layer in range(layers):
        block = _Linear(f"model.decoder.layers.{layer}.")
        attention = _Linear(f"{block.prefix}self_attn.")
        projections = (("q_proj", hidden), ("k_proj", hidden), ("v_proj", hidden))
        h = norm(x, block, "self_attn_layer_norm") if before else x
        matrices = [attention.weight(name, rows, hidden) for name, rows in projections]
        qkv = builder.linear(h, matrices, biases=attention.biases(bias, *projections))
        query, key, value = qkv.split(hidden, hidden, hidden)
        a = builder.attention(query, key, value, heads=heads, kv_heads=heads)
        output = [attention.weight("out_proj", hidden, hidden)]
        x = builder.linear(a, output, biases=attention.biases(bias, ("out_proj", hidden)), residual=x)
        x = x if before else norm(x, block, "self_attn_layer_norm")
        h = norm(x, block, "final_layer_norm") if before else x
        first, second = [block.weight("fc1", ffn, hidden)], [block.weight("fc2", hidden, ffn)]
        m = builder.linear(h, first, biases=block.biases(bias, ("fc1", ffn)), activation=activation)
        x = builder.linear(m, second, biases=block.biases(bias, ("fc2", hidden)), residual=x)
        x = x if before else norm(x, block, "final_layer_norm")
    if before and not config.flag("_remove_final_layer_norm", False):
        x = norm(x, root, "final_layer_norm")
    if embedded != hidden:
        x = builder.linear(x, [root.weight("project_out", embedded, hidden)])
    tied = config.flag("tie_word_embeddings", True)
    return builder.finish(builder.linear(x, [embedding if tied else Tensor("lm_head.weight", (vocabulary, embedded))]))


def _gpt_bigcode(config: Config, precision: Format, group: int) -> Program:
    hidden = config.size("n_embd", 768)
    ffn = config.size("n_inner", 4 * hidden)
    layers, heads = config.size("n_layer", 12), config.size("n_head", 12)
    vocabulary, context = config.size("vocab_size", 50257), config.size("n_positions", 1024)
    epsilon = config.number("layer_norm_epsilon", 1e-5)
    activation = _activation(config, "activation_function", "gelu_pytorch_tanh")
    head_size = hidden // heads
    kv_heads = 1 if config.flag("multi_query", True) else heads
    config.only("num_key_value_heads", kv_heads)
    config.only("add_cross_attention", False)
    scale = None if config.flag("scale_attn_weights", True) else 1.0
    widths = (hidden, kv_heads * head_size, kv_heads * head_size)
    # With one key head c_attn is queries, key, value; otherwise each head's query, key and value lie side by side.
    parts: list[tuple[tuple[int, int], ...]] = [()]
    if kv_heads > 1:
        starts = [[3 * head * head_size + part * head_size for head in range(heads)] for part in range(3)]
        parts = [tuple((start, start + head_size) for start in part) for part in starts]
    builder = Builder(vocabulary, context, precision, group)
    root = _Linear("transformer.")

    def norm(x: Slice, under: _Linear, name: str) -> Slice:
        weight, shift = under.vector(name, hidden), under.bias(name, hidden)
        return builder.norm(x, weight, kind=Norm.LAYER, epsilon=epsilon, bias=shift)

    embedding = root.weight("wte", vocabulary, hidden)
    x = builder.positions(builder.embed(embedding), root.weight("wpe", context, hidden))
    for layer in range(layers):
        block = _Linear(f"transformer.h.{layer}.")
        c_attn, rows = f"{block.prefix}attn.c_attn", sum(widths)
        matrices = [Tensor(f"{c_attn}.weight", (rows, hidden), part) for part in parts]
        biases = [Tensor(f"{c_attn}.bias", (rows,), part) for part in parts]
        query, key, value = builder.linear(norm(x, block, "ln_1"), matrices, biases=biases).split(*widths)
        a = builder.attention(query, key, value, heads=heads, kv_heads=kv_heads, scale=scale)
        output = [block.weight("attn.c_proj", hidden, hidden)]
        x = builder.linear(a, output, biases=[block.bias("attn.c_proj", hidden)], residual=x)
        first, second = [block.weight("mlp.c_fc", ffn, hidden)], [block.weight("mlp.c_proj", hidden, ffn)]
        h = norm(x, block, "ln_2")
        m = builder.linear(h, first, biases=[block.bias("mlp.c_fc", ffn)], activation=activation)
        x = builder.linear(m, second, biases=[block.bias("mlp.c_proj", hidden)], residual=x)
    x = norm(x, root, "ln_f")
    tied = config.flag("tie_word_embeddings", True)
    return builder.finish(builder.linear(x, [embedding if tied else Tensor("lm_head.weight", (vocabulary, hidden))]))


FAMILIES: dict[str, Callable[[Config, Format, int], Program]] = {
    "gpt_bigcode": _gpt_bigcode,
    "llama": _llama,
    "mistral": _mistral,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
