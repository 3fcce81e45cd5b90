"""Llama and the families that differ from it in what their configuration says.

Mistral and Ministral, Qwen 2 and 3, InternLM 3, IQuest-Coder, SmolLM 3, Seed-OSS, CWM, Hunyuan.
"""

from __future__ import annotations

from outrider.kernels.program import Program
from outrider.workers.errors import ModelError
from outrider.workers.models.configuration import Config
from outrider.workers.models.families.parts import FULL, SLIDING, Begin, layer_types, windows
from outrider.workers.models.families.skeleton import HeadNorms, Sizes, Style, decoder, read_sizes
from outrider.workers.models.rope import read_rope


def llama(config: Config, begin: Begin) -> Program:
    return decoder(config, begin, read_sizes(config), _biased(config))


def mllama(config: Config, begin: Begin) -> Program:
    """The language model of Llama 3.2 Vision: its layers of cross-attention do nothing where there is no picture, and its
    table has tokens more than the head (language_model.py)."""
    sizes = read_sizes(config, kv_heads=8, epsilon=1e-5, layers=40)
    key = "cross_attention_layers"
    crossing = config.get(key, list(range(3, 40, 5)))
    if not isinstance(crossing, list) or not set(crossing) < set(range(sizes.layers)):
        raise ModelError(f'{config.source}: the native engine cannot follow "{key}": {crossing!r}')
    rope = read_rope(config, sizes.head_size, sizes.context, theta=500000.0)
    rows = config.size("output_vocab_size", sizes.vocabulary)
    return decoder(config, begin, sizes, Style(ropes=[rope] * sizes.layers, head_rows=rows, left_out=crossing))


def _biased(config: Config) -> Style:
    bias = config.flag("attention_bias", False)
    return Style(qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias", False))


def mistral(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8)
    return decoder(config, begin, sizes, Style(windows=[config.window(4096)] * sizes.layers))


def ministral(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8)
    window = config.window(4096)
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if window else FULL)
    return decoder(config, begin, sizes, Style(windows=windows(config, types, window)))


def internlm3(config: Config, begin: Begin) -> Program:
    """Llama under other names; transformers knows one flag for all biases, and no other use was published."""
    bias = config.flag("qkv_bias", config.flag("attention_bias", False))
    config.only("bias", bias)
    config.only("mlp_bias", bias)
    sizes = read_sizes(config, kv_heads=2, head_size=128, epsilon=1e-5, layers=48)
    return decoder(config, begin, sizes, Style(qkv_bias=bias, output_bias=bias, mlp_bias=bias))


def iquestcoder(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, head_size=128, epsilon=1e-5, layers=80, heads=40)
    return decoder(config, begin, sizes, _biased(config))


def qwen2(config: Config, begin: Begin) -> Program:
    return decoder(config, begin, read_sizes(config, kv_heads=32), Style(qkv_bias=True, windows=qwen_windows(config)))


def qwen3(config: Config, begin: Begin) -> Program:
    bias = config.flag("attention_bias", False)
    style = Style(qkv_bias=bias, output_bias=bias, head_norms=HeadNorms.EACH, windows=qwen_windows(config))
    return decoder(config, begin, read_sizes(config, kv_heads=32, head_size=128), style)


def qwen_windows(config: Config) -> list[int]:
    """Qwen's windows: only with "use_sliding_window", and then from layer "max_window_layers" on."""
    layers = config.size("num_hidden_layers", 32)
    window = config.window(4096) if config.flag("use_sliding_window", False) else 0
    config.get("sliding_window")
    first = config.number("max_window_layers", 28)
    types = config.get("layer_types") or [SLIDING if window and layer >= first else "" for layer in range(layers)]
    if len(types) != layers or not set(types) <= {SLIDING, FULL, ""}:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    return windows(config, types, window)


def smollm3(config: Config, begin: Begin) -> Program:
    """Llama, with layers that have no rope."""
    sizes = read_sizes(config, kv_heads=4)
    interval = config.size("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(sizes.layers)]
    if len(rotated) < sizes.layers or not set(rotated) <= {0, 1}:
        raise ModelError(f'{config.source}: the native engine cannot follow "no_rope_layers": {rotated!r}')
    config.get("max_window_layers")  # Qwen's, and not used
    window = config.window(None)
    sliding = config.flag("use_sliding_window", False) and window
    types = config.get("layer_types") or [SLIDING if sliding and not rotates else FULL for rotates in rotated]
    if len(types) < sizes.layers or not set(types) <= {SLIDING, FULL}:
        raise ModelError(f'{config.source}: the native engine cannot follow "layer_types": {types!r}')
    rope = read_rope(config, sizes.head_size, sizes.context, theta=2000000.0)
    bias = config.flag("attention_bias", False)
    style = Style(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        windows=windows(config, types, window),
        ropes=[rope if rotates else None for rotates in rotated],
        tied=True,
    )
    return decoder(config, begin, sizes, style)


def seed_oss(config: Config, begin: Begin) -> Program:
    config.get("residual_dropout")  # of training only
    style = Style(
        qkv_bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )
    return decoder(config, begin, read_sizes(config, kv_heads=8, head_size=128, layers=64, heads=80), style)


# What transformers takes where a configuration of CWM has no rope.
CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def cwm(config: Config, begin: Begin) -> Program:
    sizes = read_sizes(config, kv_heads=8, head_size=128, epsilon=1e-5, layers=64, heads=48)
    types = layer_types(config, sizes.layers, lambda layer: SLIDING if layer % 4 else FULL)
    rope = read_rope(config, sizes.head_size, sizes.context, theta=1000000.0, usual=CWM_ROPE)
    style = Style(
        mlp_bias=config.flag("mlp_bias", False),
        windows=windows(config, types, config.window(8192)),
        ropes=[rope] * sizes.layers,
    )
    return decoder(config, begin, sizes, style)


# Of Hunyuan: other names of tokens, and what only a classifier reads.
HUNYUAN_UNUSED = """
eod_token_id pad_id im_start_id im_end_id im_newline_id mask_init_id text_start_id text_end_id org_vocab_size
cla_share_factor dense_list class_num pool_type
"""


def hunyuan(config: Config, begin: Begin) -> Program:
    """Llama with norms of heads after rope, whose base may be scaled."""
    sizes = read_sizes(config, epsilon=1e-5)
    return decoder(config, begin, sizes, hunyuan_style(config, sizes))


def hunyuan_style(config: Config, sizes: Sizes) -> Style:
    config.only("attention_head_dim", sizes.head_size)
    config.only("norm_type", "rms")
    config.only("use_qk_norm", True)
    for key in HUNYUAN_UNUSED.split():
        config.get(key)
    bias = config.flag("attention_bias", False)
    return Style(
        qkv_bias=bias,
        output_bias=bias,
        head_norms=HeadNorms.TURNED,
        head_norm_names=("query_layernorm", "key_layernorm"),
        ropes=[read_rope(config, sizes.head_size, sizes.context, fixed_alpha=True)] * sizes.layers,
    )
