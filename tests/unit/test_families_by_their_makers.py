"""Families that transformers reads by other names than their makers wrote: both say the same model, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_models import TOKENS, logits, open_native, save_tiny
from quantised_models import rewritten
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_model
from torch.nn.functional import layer_norm
from transformers import AutoModelForCausalLM
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from outrider.kernels.program import Format, Kind
from outrider.workers.errors import ModelError
from outrider.workers.models.families import build_program
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.opening import check_weights


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def said_by_transformers(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tiny_config(name).to_json_string())
    return found


def renamed(config: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in config.items()}


def test_sarvam_s_own_configuration_of_latent_attention_says_the_same_model() -> None:
    """The size of what is cached as that of a head, a name of its own for yarn, other names of experts."""
    config = said_by_transformers("sarvam-mla")
    rope = dict(config.pop("rope_parameters"))
    theirs = renamed(config, {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}) | {
        "head_dim": config["kv_lora_rank"] + config["qk_rope_head_dim"],
        "q_head_dim": config["qk_head_dim"],
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope | {"type": "deepseek_yarn", "rope_type": "deepseek_yarn"},
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    assert build_program(theirs, Format.FP32) == build_program(said_by_transformers("sarvam-mla"), Format.FP32)


@pytest.mark.parametrize("name", ["sarvam-mla", "sarvam-moe"])
@pytest.mark.parametrize("change", [{"score_function": "softmax"}, {"moe_router_enable_expert_bias": False}, {"group": 3}])
def test_what_sarvam_s_models_do_not_do_is_refused(name: str, change: dict[str, Any]) -> None:
    key, value = next(iter(change.items()))
    with pytest.raises(ModelError, match=f'does not know "{key}": .?{value}'):
        build_program(said_by_transformers(name) | change, Format.BF16)


def test_sarvam_s_configuration_by_other_names_and_its_tensors_by_theirs(tmp_path: Path) -> None:
    path = save_tiny("sarvam-moe", tmp_path / "model")
    expected = logits(open_native(path, "fp32"))
    assert "model.layers.1.attention.query_key_value.weight" in load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias"}
    (path / "config.json").write_text(json.dumps(renamed(config, names)))
    rewritten(
        path, lambda tensors: {name.replace(".word_embeddings.", ".embed_tokens."): tensors[name] for name in tensors}
    )
    np.testing.assert_array_equal(logits(open_native(path, "fp32")), expected)


@pytest.mark.one_in(4)
@torch.no_grad()
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    ("name", "table", "head"),
    [
        ("biogpt", "biogpt.embed_tokens.weight", "output_projection.weight"),
        ("ettin", "model.embeddings.tok_embeddings.weight", "decoder.weight"),
    ],
)
def test_a_head_may_have_a_name_of_its_own(
    name: str, table: str, head: str, own: bool, pickled: bool, tmp_path: Path
) -> None:
    """Beside an embedding that it equals, as published, and where it differs: transformers then believes the weights."""
    path = save_tiny(name, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors[head] = tensors[table].flip(0).contiguous() if own else tensors[table].clone()
    if pickled:
        (path / "model.safetensors").unlink()
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        rewritten(path, lambda before: tensors)
    expected = AutoModelForCausalLM.from_pretrained(path).eval()(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(logits(open_native(path, "fp32")), expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
    check_weights(str(path), "hf")


@pytest.mark.parametrize("change", [{"causal_mask": False}, {"rope_scaling": {"type": "linear"}}, {"sliding_window": 9}])
def test_what_modernbert_s_decoder_does_not_do_is_refused(change: dict[str, Any]) -> None:
    build_program(said_by_transformers("ettin"), Format.BF16)
    with pytest.raises(ModelError, match=f'does not know "{next(iter(change))}"'):
        build_program(said_by_transformers("ettin") | change, Format.BF16)


@pytest.mark.parametrize(
    ("rope", "sentence"),
    [
        ({"full_attention": None}, 'layers of the type "sliding_attention" of which "rope_parameters" says nothing'),
        ({"rope_theta": 500.0}, 'layers of the type "sliding_attention" of which'),
        ({"full_attention": None, "sliding_attention": {"rope_type": "default"}}, '"rope_parameters": "sliding_attention"'),
        (
            {"full_attention": None, "sliding_attention": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}},
            "partial rotary",
        ),
    ],
)
def test_rope_of_which_compass_says_too_little_is_refused(rope: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("cohere-compass") | {"rope_parameters": rope}, Format.BF16)


@pytest.mark.parametrize("original", [96, "192", None])
def test_long_rope_of_rows_longer_than_their_original_length_is_refused_of_minicpm3(original: Any) -> None:
    """transformers then turns new keys by other frequencies than those before."""
    config = said_by_transformers("minicpm3-long")
    config["rope_parameters"]["original_max_position_embeddings"] = original
    config |= {"max_position_embeddings": 192}
    if original is None:  # the rows' own length
        build_program(config, Format.BF16)
        return
    with pytest.raises(ModelError, match=r"rows of up to 192 tokens where .original_max_position_embeddings. is"):
        build_program(config, Format.BF16)


def test_a_x_k1_s_checkpoint_has_norms_for_nothing_and_no_corrections(tmp_path: Path) -> None:
    path = save_tiny("axk1", tmp_path / "model")
    norm = "model.layers.{}.post_mlp_layernorm.weight"

    def published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert norm.format(1) in tensors
        kept = {name: value for name, value in tensors.items() if not name.endswith("e_score_correction_bias")}
        return kept | {norm.format(0): torch.ones(96)}

    rewritten(path, published)
    expected = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        wanted = expected(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(logits(open_native(path, "fp32")), wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)
    check_weights(str(path), "native")


def test_olmo_hybrid_s_convolutions_are_as_wide_as_what_they_read(tmp_path: Path) -> None:
    """As published: those of values are twice as wide, and wider still with heads of values that share those of keys."""
    sizes: dict[str, Any] = {"linear_num_key_heads": 2, "linear_key_head_dim": 24, "linear_value_head_dim": None}
    tiny_model("olmo-hybrid", **sizes).save_pretrained(tmp_path)
    names = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]

    def published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = dict(tensors)
        for layer in range(3):
            each = [name.replace(".0.", f".{layer}.") for name in names]
            taps = torch.cat([tensors[name] for name in each])
            assert len(taps) == 2 * 48 + 4 * 48
            found |= dict(zip(each, taps.split((48, 48, 192)), strict=True))
        return found

    with pytest.raises(ModelError, match=r"q_conv1d.weight. has shape \(96, 1, 4\), config.json asks for \(48, 1, 4\)"):
        open_native(tmp_path, "fp32")
    rewritten(tmp_path, published)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    found = logits(open_native(tmp_path, "fp32"))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layer_types": ["linear_attention"] * 4}, 'cannot follow "layer_types"'),
        ({"rope_parameters": {"rope_theta": 500.0, "rope_type": "longrope"}}, "does not know the rope type 'longrope'"),
    ],
)
def test_what_olmo_hybrid_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("olmo-hybrid") | change, Format.BF16)


@pytest.mark.parametrize("name", ["deepseek-v32", "glm-moe-dsa"])
def test_rows_in_which_a_token_sees_some_of_those_before_it_are_refused(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path)
    file = path / "config.json"
    config = json.loads(file.read_text())
    check_weights(str(path), "native")
    file.write_text(json.dumps(config | {"index_topk": 127}))
    sentence = r'rows of up to 128 tokens where a token sees 127 .* write "max_position_embeddings": 127 for those'
    with pytest.raises(ModelError, match=sentence):
        check_weights(str(path), "native")
    file.write_text(json.dumps(config | {"index_topk": 127, "max_position_embeddings": 127}))
    check_weights(str(path), "native")
    # What chooses them is passed over, and nothing else.
    rewritten(path, lambda tensors: tensors | {"model.layers.1.self_attn.other.weight": torch.zeros(4, 4)})
    with pytest.raises(ModelError, match=r"self_attn\.other\.weight., which no part of this model asks for"):
        check_weights(str(path), "native")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layer_types": ["full_attention"] * 3}, 'does not know "layer_types"'),
        ({"q_lora_rank": None}, 'does not know "q_lora_rank": null'),
        ({"rope_interleave": False}, 'does not know "rope_interleave": False'),
        ({"mlp_bias": True}, 'does not know "mlp_bias": True'),
    ],
)
def test_what_deepseek_v3_2_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("deepseek-v32") | change, Format.BF16)


def test_mimo_s_window_by_its_makers_count() -> None:
    config = said_by_transformers("mimo-v2-flash")
    theirs = {key: value for key, value in config.items() if key != "sliding_window"} | {"sliding_window_size": 6}
    assert build_program(theirs, Format.FP32) == build_program(config, Format.FP32)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_key_value_heads": 2}, 'does not know "num_key_value_heads": 2'),
        ({"num_hidden_layers": 4}, 'does not know "num_hidden_layers": 4'),
        ({"attention_bias": True}, 'does not know "attention_bias": True'),
    ],
)
def test_what_hrm_text_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    config = said_by_transformers("hrm-text")
    with pytest.raises(ModelError, match=sentence):
        build_program(config | change, Format.BF16)


def test_hrm_text_s_layers_are_those_of_a_stack_where_nothing_else_is_said() -> None:
    config = said_by_transformers("hrm-text")
    assert config["num_hidden_layers"] == 16
    first = config | {"num_layers_per_stack": None, "num_hidden_layers": 2, "embedding_scale": None}
    assert build_program(first | {"initializer_range": 1 / 3.0}, Format.FP32) == build_program(config, Format.FP32)


@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        ("attn_config", {"clip_qkv": None}, 'does not know "clip_qkv": null'),
        ("attn_config", {"sliding_window": 3}, 'does not know "sliding_window": 3'),
        ("ffn_config", {"moe_normalize_expert_weights": 2.0}, 'does not know "moe_normalize_expert_weights": 2.0'),
        ("ffn_config", {"ffn_act_fn": {"name": "silu", "beta": 2}}, 'does not know "ffn_act_fn"'),
        ("ffn_config", {"moe_top_k": 6}, '"moe_top_k" is 6, there are 5 experts'),
    ],
)
def test_what_dbrx_does_not_do_is_refused(part: str, change: dict[str, Any], sentence: str) -> None:
    config = said_by_transformers("dbrx")
    with pytest.raises(ModelError, match=sentence):
        build_program(config | {part: config[part] | change}, Format.BF16)


def test_a_base_of_rope_that_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    """As DBRX is published: transformers would turn by 10,000."""
    path = save_tiny("dbrx", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["attn_config"]["rope_theta"] = 500000
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match='write "rope_theta": 500000 beside "attn_config" as well'):
        read_model_info(str(path))
    (path / "config.json").write_text(json.dumps(config | {"rope_parameters": None, "rope_theta": 500000}))
    read_model_info(str(path))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_experts_per_tok": 2}, 'does not know "num_experts_per_tok": 2'),
        ({"moe_layers": "all"}, 'cannot follow "moe_layers": .all'),
        ({"no_rope_layers": [1, 0]}, r'cannot follow "no_rope_layers": \[1, 0\]'),
        ({"attention_chunk_size": None}, "in chunks of 0"),
        ({"layer_types": ["sliding_attention"] * 4}, 'cannot follow "layer_types"'),
        ({"attn_temperature_tuning": 3}, '"attn_temperature_tuning" must be true or false, got 3'),
    ],
)
def test_what_llama_4_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("llama4") | change, Format.BF16)


@pytest.mark.parametrize("change", [{}, {"attn_temperature_tuning": 4}])
def test_llama_4_s_factors_begin_a_position_before_each_step(change: dict[str, Any]) -> None:
    """log(1 + floor((position + 1) / 6)), of the layers without rope alone."""
    ops = [op for op in build_program(said_by_transformers("llama4") | change, Format.BF16).ops if op.kind is Kind.SCALE]
    assert [(op.window, op.integer) for op in ops] == [(6, 1)] * 2


def test_kimi_linear_by_its_makers_names() -> None:
    said = said_by_transformers("kimi-linear")
    written = {key: value for key, value in said.items() if not key.startswith("linear_") and key != "layer_types"}
    nested = {"head_dim": 32, "num_heads": 3, "short_conv_kernel_size": 3, "full_attn_layers": [2], "kda_layers": [1, 3, 4]}
    makers = written | {"linear_attn_config": nested, "head_dim": 72, "mla_use_nope": True, "moe_layer_freq": 1}
    found, expected = (build_program(config, Format.BF16) for config in (makers, said))
    assert found == expected
    for change, sentence in (
        ({"linear_attn_config": nested | {"gate_lower_bound": -5.0}}, '"linear_attn_config": .*gate_lower_bound'),
        (
            {"linear_attn_config": nested | {"kda_layers": [1, 2, 3, 4], "full_attn_layers": []}},
            'cannot follow "layer_types"',
        ),
        ({"mla_use_nope": False}, '"mla_use_nope": False'),
        ({"num_experts_per_tok": 1}, '"num_experts_per_token": 3 beside "num_experts_per_tok": 1'),
    ):
        with pytest.raises(ModelError, match=sentence):
            build_program(makers | change, Format.BF16)


def test_ling_3_by_its_makers_names() -> None:
    """The size of delta nets' heads as that of all heads, and much that is always so."""
    said = said_by_transformers("ling-3")
    written = {key: value for key, value in said.items() if not key.startswith("linear_") and key != "layer_types"}
    names = {"model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob"}
    names |= {"num_expert_group": "n_group", "num_experts_per_token": "num_experts_per_tok"}
    makers = renamed(written, names) | {"head_dim": 32, "rope_interleave": True, "use_mla_nope": False, "rotary_dim": 64}
    makers |= {"use_qk_norm": True, "use_qkv_bias": False, "no_kda_lora": True, "partial_rotary_factor": 0.5}
    makers |= {"gated_attention_proj_granularity_type": "head_wise", "moe_router_enable_expert_bias": True}
    makers |= {"score_function": "sigmoid", "router_dtype": "fp32", "mtp_use_kda": False}
    makers |= {"moe_shared_expert_intermediate_size": 80}
    found, expected = (build_program(config, Format.BF16) for config in (makers, said))
    assert found == expected
    for change, sentence in (
        ({"use_mla_nope": True}, '"use_mla_nope": True'),
        ({"kda_lower_bound": 1.0}, '"kda_lower_bound": 1.0'),
        ({"tie_word_embeddings": True}, '"tie_word_embeddings": True'),
        ({"moe_shared_expert_intermediate_size": 7}, '"moe_shared_expert_intermediate_size": 7'),
        ({"layer_types": ["linear_attention"] * 4}, 'cannot follow "layer_types"'),
        ({"num_experts_per_token": 1}, '"num_experts_per_token": 1 beside "num_experts_per_tok": 3'),
    ):
        with pytest.raises(ModelError, match=sentence):
            build_program(makers | change, Format.BF16)


@pytest.mark.parametrize(
    ("name", "renamed", "more"),
    [
        (
            "nemotron-h",
            {"layers_block_type": None},
            {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "attention_head_dim": 24, "sliding_window": None}
            | {"time_step_limit": [0.0, float("inf")], "rms_norm_eps": 1e-5, "expand": 2, "mamba_proj_bias": False},
        ),
        (
            "nemotron-h-moe",
            {"layers_block_type": None, "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv"},
            {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4, "rope_theta": 10000, "norm_eps": 1e-5},
        ),
        (
            "falcon-h1",
            {},
            {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "attn_layer_indices": None, "time_step_rank": "auto"},
        ),
        ("bamba", {"partial_rotary_factor": None}, {"attn_rotary_emb": 8, "z_loss_coefficient": 0.0}),
        (
            "mamba",
            {},
            {"d_model": 48, "d_inner": 96, "n_layer": 3, "rms_norm": True, "fused_add_norm": True, "ssm_cfg": {}}
            | {"pad_vocab_size_multiple": 8},
        ),
        ("mamba2", {}, {"norm_before_gate": True, "rms_norm": True, "time_step_scale": 1.0, "intermediate_size": 96}),
        ("granite-mamba", {"layer_types": None}, {"layer_types": ["mamba", "attention", "mamba"], "init_method": "mup"}),
    ],
)
def test_hybrids_by_their_makers_keys(name: str, renamed: dict[str, str | None], more: dict[str, Any]) -> None:
    """``renamed``: other names of keys, None for those that makers do not state."""
    said = said_by_transformers(name)
    kept = {renamed.get(key, key): value for key, value in said.items()}
    makers = {key: value for key, value in kept.items() if key is not None} | more
    assert build_program(makers, Format.BF16) == build_program(said, Format.BF16)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("nemotron-h", {"sliding_window": 9}, '"sliding_window": 9'),
        ("nemotron-h", {"attention_head_dim": 32}, '"attention_head_dim": 32'),
        ("nemotron-h", {"layers_block_type": None, "hybrid_override_pattern": "MX*"}, '"hybrid_override_pattern": .MX'),
        ("falcon-h1", {"mamba_use_mlp": False}, '"mamba_use_mlp": False'),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, '"ssm_multipliers" must be 5 numbers'),
        ("bamba", {"attn_rotary_emb": 4}, '"attn_rotary_emb": 4'),
        ("mamba", {"rms_norm": False}, '"rms_norm": False'),
        ("mamba", {"rescale_prenorm_residual": True}, '"rescale_prenorm_residual": True'),
        ("falcon-mamba", {"intermediate_size": 88}, "Mamba of 88 columns, no multiple of 16"),
        ("mamba2", {"head_dim": 32}, '"num_heads": 6 of "head_dim": 32 for 96 columns'),
        ("mamba2", {"time_step_limit": [0.01, 0.1]}, '"time_step_limit"'),
        ("bamba", {"attn_layer_indices": []}, "a model without a layer of attention"),
    ],
)
def test_what_hybrids_do_not_do_is_refused(name: str, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers(name) | change, Format.BF16)


def test_bloom_s_sizes_have_two_names() -> None:
    said = said_by_transformers("bloom")
    names = {"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    assert build_program(renamed(said, names), Format.FP32) == build_program(said, Format.FP32)
    with pytest.raises(ModelError, match='does not know "num_hidden_layers": 3'):
        build_program(said | {"num_hidden_layers": 3}, Format.FP32)


def as_its_makers_say(model: Any, attention: dict[str, Any], added: dict[str, torch.Tensor]) -> None:
    """Makes transformers' MPT compute what MPT's own code does: ALiBi or a table of positions, norms of queries and keys,
    biases."""
    decoder, width = model.transformer, model.config.d_model
    if attention.get("alibi", True):
        most = attention["alibi_bias_max"]
        decoder.build_mpt_alibi_tensor = lambda heads, length, device=None: build_mpt_alibi_tensor(heads, length, most)
    else:
        decoder.build_mpt_alibi_tensor = lambda heads, length, device=None: torch.zeros(heads, 1, length)
        table = added["transformer.wpe.weight"]
        decoder.wte.register_forward_hook(lambda module, given, made: made + table[: made.shape[1]])
    for layer, block in enumerate(decoder.blocks):
        under = f"transformer.blocks.{layer}."
        for name, module in block.named_modules():
            if f"{under}{name}.bias" in added:
                module.bias = torch.nn.Parameter(added[f"{under}{name}.bias"])
        if attention.get("qk_ln"):
            norms = [[added[f"{under}attn.{name}_ln.{kind}"] for kind in ("weight", "bias")] for name in "qk"]

            def normed(module: Any, given: Any, made: torch.Tensor, norms: Any = norms) -> torch.Tensor:
                query, key, value = made.split(width, dim=2)
                parts = [layer_norm(x, (width,), *of) for x, of in zip((query, key), norms, strict=True)]
                return torch.cat([*parts, value], dim=2)

            block.attn.Wqkv.register_forward_hook(normed)
    if "transformer.norm_f.bias" in added:
        decoder.norm_f.bias = torch.nn.Parameter(added["transformer.norm_f.bias"])


@torch.no_grad()
@pytest.mark.parametrize(
    ("attention", "biased"),
    [({"alibi_bias_max": 16}, False), ({"alibi": False, "qk_ln": True}, True)],
)
def test_mpt_s_keys_that_transformers_does_not_read(attention: dict[str, Any], biased: bool, tmp_path: Path) -> None:
    """MPT-7B-StoryWriter's slopes; SEA-LION's positions, norms and biases. The hf engine refuses both."""
    model, random = tiny_model("mpt"), torch.Generator().manual_seed(3)
    model.save_pretrained(tmp_path)
    width, sizes = 96, {"attn.Wqkv": 288, "ffn.up_proj": 384}
    added = {}
    if biased:
        layers = [f"transformer.blocks.{layer}." for layer in range(2)]
        names = ("norm_1", "norm_2", "attn.Wqkv", "attn.out_proj", "attn.q_ln", "attn.k_ln", "ffn.up_proj", "ffn.down_proj")
        added = {f"{under}{name}.bias": sizes.get(name, width) for under in layers for name in names}
        added |= {f"{under}attn.{name}_ln.weight": width for under in layers for name in "qk"}
        added = {name: 0.3 * torch.randn(size, generator=random) for name, size in added.items()}
        added["transformer.norm_f.bias"] = torch.randn(width, generator=random)
        added["transformer.wpe.weight"] = torch.randn(128, width, generator=random)
    as_its_makers_say(model, attention, added)
    expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    rewritten(tmp_path, lambda tensors: tensors | added)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attn_config"] |= attention
    (tmp_path / "config.json").write_text(json.dumps(config | {"no_bias": not biased}))
    np.testing.assert_allclose(logits(open_native(tmp_path, "fp32")), expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    key = next(iter(attention)) if not biased else "no_bias"
    with pytest.raises(ModelError, match=f'transformers does not read "{key}"'):
        check_weights(str(tmp_path), "hf")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"norm_type": "rmsnorm"}, '"norm_type": .rmsnorm.; the hf engine does not know it either'),
        ({"logit_scale": 0.5}, '"logit_scale": 0.5'),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, '"attn_type": .multiquery_attention'),
        ({"attn_config": {"prefix_lm": True}}, '"attn_config": the native engine does not know "prefix_lm": True'),
        ({"attn_config": {"clip_qkv": -1.0}}, '"clip_qkv": -1'),
        ({"attn_config": []}, '"attn_config" must be an object, got '),
    ],
)
def test_what_mpt_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("mpt") | change, Format.BF16)


HY4_NAMES = (
    (".self_attn.sinks", ".self_attn.learnable_sink_param"),
    (".self_attn.gate_proj.", ".self_attn.linear_gate."),
    (".attn_hc.", ".hc_attn_layer.hc_pre.hc_"),
    (".ffn_hc.", ".hc_mlp_layer.hc_pre.hc_"),
    (".hc_head.hc_", ".hc_head.hc_pre.hc_head_"),
)


def test_hy4_by_the_names_of_its_makers(tmp_path: Path) -> None:
    """transformers writes names of its own, and reads both; gates of feed-forward layers have the usual one."""
    model = tiny_model("hy4")
    model.save_pretrained(tmp_path)
    expected = logits(open_native(tmp_path, "fp32"))

    def by_its_makers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name: tensor for name, tensor in model.state_dict().items() if "rotary_emb" not in name}
        for ours, theirs in HY4_NAMES:
            found = {name.replace(ours, theirs): tensor for name, tensor in found.items()}
        assert not found.keys() <= tensors.keys()
        return found | {"model.mtp_layers.0.enorm.weight": torch.ones(96)}

    rewritten(tmp_path, by_its_makers)
    np.testing.assert_array_equal(logits(open_native(tmp_path, "fp32")), expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_position_embeddings": 129}, 'where a token sees 128 of them ."index_topk".* "max_position_embeddings": 128'),
        ({"hc_mult": 17}, 'does not know "hc_mult": 17, more than 16 streams'),
        ({"hc_eps": -0.5}, 'does not know "hc_eps": -0.5'),
        ({"hidden_act": "gelu"}, 'does not know "hidden_act": .gelu.'),
        ({"swiglu_limit": 0.0}, '"swiglu_limit" must be greater than 0, got 0.0'),
        ({"q_lora_rank": None}, 'does not know "q_lora_rank": null'),
        ({"rope_interleave": True}, 'does not know "rope_interleave": True'),
        ({"layer_types": ["full_attention"] * 3}, 'does not know "layer_types"'),
        ({"hc_sinkhorn_iters": 20}, 'does not know "hc_sinkhorn_iters": 20'),
    ],
)
def test_what_hy4_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("hy4") | change, Format.BF16)


def test_sizes_of_delta_nets_of_glm_5_3_in_an_object_of_their_own() -> None:
    said = said_by_transformers("glm5-next")
    nets = {"head_dim": "head_dim", "num_heads": "num_heads", "conv_kernel_dim": "short_conv_kernel_size"}
    nested = {theirs: said[f"linear_{ours}"] for ours, theirs in nets.items()} | {
        "gate_lower_bound": -3.0,
        "safe_gate": True,
    }
    makers = {key: value for key, value in said.items() if not key.startswith("linear_")} | {"linear_attn_config": nested}
    makers |= {"layer_types": [{"indexed_attention": "full_attention"}.get(kind, kind) for kind in said["layer_types"]]}
    assert build_program(makers, Format.BF16) == build_program(said, Format.BF16)
    without = makers | {"linear_attn_config": nested | {"gate_lower_bound": None, "safe_gate": False}}
    unbounded = said | {"linear_lower_bound": None}
    assert build_program(without, Format.BF16) == build_program(unbounded, Format.BF16) != build_program(said, Format.BF16)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_position_embeddings": 129}, 'where a token sees 128 of them ."index_topk".* "max_position_embeddings": 128'),
        ({"index_kpool_always_select_tail": False}, 'does not know "index_kpool_always_select_tail": False'),
        ({"linear_lower_bound": 0.5}, 'does not know "linear_lower_bound": 0.5'),
        ({"linear_attn_config": {"kda_layers": [1]}}, 'does not know "linear_attn_config"'),
        ({"qk_rope_head_dim": 8}, 'does not know "qk_rope_head_dim": 8'),
        ({"layer_types": ["linear_attention"] * 5}, 'cannot follow "layer_types"'),
        ({"q_lora_rank": None}, 'does not know "q_lora_rank": null'),
        ({"hc_magnitude": 2.0}, 'does not know "hc_magnitude": 2.0'),
    ],
)
def test_what_glm_5_3_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("glm5-next") | change, Format.BF16)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_position_embeddings": 129}, 'where a token sees 128 of them ."indexer_budget"'),
        ({"indexer_budget": None}, 'has no "indexer_budget"'),
        ({"ple_layer_ids": [1], "eos_token_id": 2}, r'does not know "ple_layer_ids": \[1\] .embeddings of n-grams.'),
        ({"hidden_act": "gelu"}, 'does not know "hidden_act": .gelu.'),
        ({"output_gate_type": "gelu"}, 'does not know "output_gate_type": .gelu.'),
        ({"layer_types": ["sliding_attention"] * 4}, 'cannot follow "layer_types"'),
    ],
)
def test_what_qwen4_exp_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("qwen4-exp") | change, Format.BF16)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_position_embeddings": 129}, 'where a token sees 128 of them ."index_topk".* "max_position_embeddings": 128'),
        ({"no_rope_layers": [1, 0]}, 'cannot follow "no_rope_layers"'),
        ({"kv_source_layers": [0, 0, 2, 3, 3, 3, 3]}, 'cannot follow "kv_source_layers"'),  # with rope, without
        ({"kv_source_layers": [0, 0, 2, 3, 3, 2, 0]}, 'cannot follow "kv_source_layers"'),  # layer 3's were kept last
        ({"kv_source_layers": [0, 0, 2, 3, 6, 2, 6]}, 'cannot follow "kv_source_layers"'),
        ({"kv_source_layers": [0, 0, 2, 1, 4, 2, 6]}, 'cannot follow "kv_source_layers"'),
        ({"q_lora_rank": 40}, 'does not know "q_lora_rank": 40'),
        ({"rope_interleave": False}, 'does not know "rope_interleave": False'),
        ({"norm_topk_prob": False}, 'does not know "norm_topk_prob": False'),
        ({"final_logit_softcapping": 0.0}, '"final_logit_softcapping" must be greater than 0, got 0.0'),
        ({"layer_types": ["full_attention"] * 7}, 'does not know "layer_types"'),
    ],
)
def test_what_mistral_large_4_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("mistral-large-4") | change, Format.BF16)


def test_mistral_large_4_by_transformers_names_and_without_its_factors_of_rope(tmp_path: Path) -> None:
    """transformers writes the names of its makers, whose checkpoints also have layers that guess further tokens."""
    model = tiny_model("mistral-large-4-own")
    model.save_pretrained(tmp_path)
    expected = logits(open_native(tmp_path, "fp32"))

    def by_other_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert "model.layers.0.attention.wkv_a_with_mqa.weight" in tensors
        return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # it is tied

    rewritten(tmp_path, by_other_names)
    assert (logits(open_native(tmp_path, "fp32")) == expected).all()
    rewritten(tmp_path, lambda tensors: tensors | {"mtp_dspark.layers.0.norm.weight": torch.ones(4)})
    assert (logits(open_native(tmp_path, "fp32")) == expected).all()
    rewritten(tmp_path, lambda tensors: {name: each for name, each in tensors.items() if not name.endswith("alpha")})
    with pytest.raises(ModelError, match=r'lacks the weight "model\.rotary_emb\.alpha"'):
        check_weights(str(tmp_path), "native")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1000.0])
def test_factors_of_rope_beyond_float32_are_refused(value: float, tmp_path: Path) -> None:
    """1000 gave a finite factor of another size, and NaN a warning of NumPy's before each row failed."""
    tiny_model("mistral-large-4-own").save_pretrained(tmp_path)

    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        [name] = [name for name in tensors if name.endswith("alpha")]
        return tensors | {name: tensors[name].index_fill(0, torch.tensor(1), value)}

    rewritten(tmp_path, changed)
    with pytest.raises(ModelError, match=rf'rope cannot be computed where "model\.rotary_emb\.alpha" holds {value}$'):
        check_weights(str(tmp_path), "native")


def test_step_3_7_s_own_configuration_says_the_same_model() -> None:
    """Lists that go on with layers for further tokens, rope layer by layer, other names, the layers with experts in a
    string."""
    said = said_by_transformers("step-3")
    types = {"full_attention": (10000.0, 0.5), "sliding_attention": (500.0, 1.0)}
    layers = [*said["layer_types"], "sliding_attention"]
    names = {"num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts"}
    makers = renamed(said, names | {"num_experts_per_tok": "moe_top_k"}) | {
        "num_nextn_predict_layers": 1,
        "layer_types": layers,
        "swiglu_limits": [*said["swiglu_limits"], 0],
        "swiglu_limits_shared": [*said["swiglu_limits_shared"], 0.0],
        "rope_theta": [types[kind][0] for kind in layers],
        "partial_rotary_factors": [types[kind][1] for kind in layers],
        "moe_layers_enum": "1,3,4,5",
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 8, "head_dim": 16},
    }
    for derived in ("rope_parameters", "mlp_layer_types", "num_sliding_attention_heads", "per_layer_config"):
        del makers[derived]
    assert build_program(makers, Format.BF16) == build_program(said, Format.BF16)
    longer = makers | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    both = {kind: dict(rope) for kind, rope in said["rope_parameters"].items()}
    both["full_attention"] |= longer["rope_scaling"]
    assert build_program(longer, Format.BF16) == build_program(said | {"rope_parameters": both}, Format.BF16)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"swiglu_limits": [0, -1.0, 0, 0, 0]}, 'does not know "swiglu_limits"'),
        ({"swiglu_limits_shared": [0, 0, 0]}, 'does not know "swiglu_limits_shared" with 3 elements for 5 layers'),
        ({"per_layer_config": {"1": {"num_attention_heads": 4}}}, 'does not know "per_layer_config"'),
        ({"gating": "per-element"}, 'does not know "gating": .per-element.'),
        ({"use_bidirectional_attention": True}, 'does not know "use_bidirectional_attention": True'),
        ({"moe_top_k": 2}, 'does not know "moe_top_k": 2 beside "num_experts_per_tok": 3'),
        ({"sliding_window": None}, 'without a "sliding_window"'),
        ({"rope_parameters": {"rope_type": "default"}}, 'does not know "rope_parameters"'),
        ({"rope_parameters": None, "rope_theta": [1e4, 500.0, 1e3, 500.0, 1e4]}, 'does not know "rope_theta"'),
        (
            {"num_sliding_attention_heads": None, "attention_other_setting": {"num_attention_groups": 4}},
            'does not know "attention_other_setting" with "num_attention_groups": 4',
        ),
        ({"mlp_layer_types": None, "moe_layers_enum": "one"}, 'does not know "moe_layers_enum": .one.'),
    ],
)
def test_what_step_3_7_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("step-3") | change, Format.BF16)


def test_step_3_7_by_the_names_of_its_makers(tmp_path: Path) -> None:
    """All gates of a layer's experts are one tensor, and so are the other matrices; a layer for further tokens follows."""
    model = tiny_model("step-3")
    model.save_pretrained(tmp_path)
    expected = logits(open_native(tmp_path, "fp32"))

    def by_its_makers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            if name.endswith("experts.gate_up_proj"):
                gate, up = tensor.chunk(2, dim=1)
                under = name.replace("mlp.experts.gate_up_proj", "moe.")
                found |= {f"{under}gate_proj.weight": gate, f"{under}up_proj.weight": up}
                continue
            name = name.replace("mlp.experts.down_proj", "moe.down_proj.weight").replace(
                ".mlp.gate.weight", ".moe.gate.weight"
            )
            name = name.replace(".mlp.gate.e_score_correction_bias", ".moe.router_bias")
            found[name.replace(".mlp.shared_experts.", ".share_expert.")] = tensor
        return found | {"model.layers.5.eh_proj.weight": torch.ones(4, 4)}

    rewritten(tmp_path, by_its_makers)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    assert (logits(open_native(tmp_path, "fp32")) == expected).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"moe_topk": 6}, 'does not know "moe_topk": 6 with 5 experts that compute something'),
        ({"zero_expert_type": "zero"}, 'does not know "zero_expert_type": .zero.'),
        ({"router_bias": True}, 'does not know "router_bias": True'),
        ({"mla_scale_q_lora": False}, 'does not know "mla_scale_q_lora": False'),
        ({"q_lora_rank": None}, 'does not know "q_lora_rank": null'),
        ({"num_hidden_layers": 3}, 'does not know "num_hidden_layers": 3'),
        ({"num_key_value_heads": 2}, 'does not know "num_key_value_heads": 2'),
        ({"head_dim": 16}, 'does not know "head_dim": 16'),
        ({"norm_topk_prob": True}, 'does not know "norm_topk_prob": True'),
    ],
)
def test_what_longcat_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("longcat") | change, Format.BF16)


def test_experts_of_longcat_that_compute_nothing_have_tensors_or_none(tmp_path: Path) -> None:
    """transformers writes gates of them, which it does not use; its makers do not."""
    save_tiny("longcat", tmp_path)
    expected = logits(open_native(tmp_path, "fp32"))

    def without(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name: each for name, each in tensors.items() if not any(f"experts.{e}." in name for e in (5, 6, 7))}
        assert len(found) == len(tensors) - 2 * 3 * 2
        return found | {"model.mtp.norm.weight": torch.ones(4)}

    rewritten(tmp_path, without)
    assert (logits(open_native(tmp_path, "fp32")) == expected).all()
    rewritten(tmp_path, lambda tensors: tensors | {"model.layers.0.mlp.experts.8.gate_proj.weight": torch.ones(40, 96)})
    with pytest.raises(ModelError, match=r"which no part of this model asks for"):
        check_weights(str(tmp_path), "native")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layer_rope_theta": [1.0]}, 'cannot follow "layer_rope_theta"'),
        ({"residual_gate_temperature": 0.0}, '"residual_gate_temperature" must be greater than 0, got 0.0'),
        ({"qk_scale_factor": -1.0}, '"qk_scale_factor" must be greater than 0, got -1.0'),
        ({"num_experts_per_tok": 8}, '"num_experts_per_tok" is 8, there are 7 experts'),
        ({"mlp_layer_types": ["sparse"]}, 'cannot follow "mlp_layer_types"'),
        ({"sliding_window": None}, 'without a "sliding_window"'),
        ({"n_shared_experts": 1}, 'does not know "n_shared_experts": 1'),
    ],
)
def test_what_muse_spark_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("muse-spark") | change, Format.BF16)


@pytest.mark.parametrize("seen", [7, 8])
def test_minimax_m3_by_the_names_of_its_makers(seen: int, tmp_path: Path) -> None:
    """Rows of 128 tokens, of which a token sees 7 or 8 blocks of 16; their experts are one by one, gate and up apart."""
    path = save_tiny("minimax-m3", tmp_path)
    expected = logits(open_native(path, "fp32"))
    file = path / "config.json"
    config = json.loads(file.read_text())
    for key in [key for key in config if key.startswith("index_")] + ["layer_types", "mlp_layer_types"]:
        del config[key]
    sparse = {"sparse_num_index_heads": 2, "sparse_index_dim": 24, "sparse_block_size": 16, "sparse_topk_blocks": seen}
    config |= {"sparse_attention_config": sparse | {"sparse_attention_freq": [0, 1, 1]}, "moe_layer_freq": [0, 1, 1]}
    file.write_text(json.dumps(config | {"hidden_act": "swigluoai"}))

    def by_its_makers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            theirs = name.replace(".indexer.", ".index_").replace(".gate.e_score_", ".e_score_")
            theirs = theirs.replace(".mlp.", ".mlp." if ".layers.0." in name else ".block_sparse_moe.")
            experts, _, part = theirs.rpartition(".")
            names = ("w2",) if part == "down_proj" else ("w1", "w3")
            if tensor.dim() == 3:
                for number, matrix in enumerate(tensor):
                    halves = zip(names, matrix.chunk(len(names)), strict=True)
                    found |= {f"{experts}.{number}.{each}.weight": half.contiguous() for each, half in halves}
            elif theirs.endswith(".gate_up_proj.weight"):
                for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                    found[theirs.replace("gate_up_proj", f"{part}_proj")] = half.contiguous()
            else:
                found[theirs] = tensor
        return found

    rewritten(path, by_its_makers)
    if seen == 7:
        sentence = r'rows of up to 128 tokens where a token sees 7 blocks of 16.* write "max_position_embeddings": 112 for'
        with pytest.raises(ModelError, match=sentence):
            check_weights(str(path), "native")
        file.write_text(json.dumps(config | {"max_position_embeddings": 112}))
    np.testing.assert_array_equal(logits(open_native(path, "fp32")), expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rotary_dim": 24}, 'does not know "rotary_dim": 24'),
        ({"scoring_func": "softmax"}, 'does not know "scoring_func": .softmax.'),
        ({"layer_types": ["sliding_attention"] * 3}, 'cannot follow "layer_types"'),
        ({"sparse_attention_config": [1]}, 'does not know "sparse_attention_config"'),
    ],
)
def test_what_minimax_m3_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("minimax-m3") | change, Format.BF16)


def test_a_x_k2_by_both_names(tmp_path: Path) -> None:
    """Its makers call gates behind norms, and queries with their gates, otherwise than transformers' modules."""
    path = save_tiny("axk2", tmp_path / "model")
    expected, tensors = logits(open_native(path, "fp32")), load_file(path / "model.safetensors")
    names = {".W_down.": ".mlp.fc1.", ".W_up.": ".mlp.fc2.", ".q_b_proj.": ".q_gate_proj."}
    for theirs, own in names.items():
        assert any(theirs in name for name in tensors) and not any(own in name for name in tensors)

    def by_transformers(before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for theirs, own in names.items():
            before = {name.replace(theirs, own): tensor for name, tensor in before.items()}
        return before

    rewritten(path, by_transformers)
    np.testing.assert_array_equal(logits(open_native(path, "fp32")), expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n_group": None}, 'does not know one of "n_group" and "topk_group" without the other'),
        ({"q_lora_rank": None}, 'does not know "q_lora_rank": null'),
        ({"index_topk": 64}, 'write "max_position_embeddings": 64 for those'),
        ({"layer_types": ["full_attention"] * 2}, 'does not know "layer_types"'),
    ],
)
def test_what_a_x_k2_does_not_do_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_program(said_by_transformers("axk2") | change, Format.BF16)


def test_which_layers_of_a_x_k2_have_experts_may_be_said_by_numbers() -> None:
    config = {key: value for key, value in said_by_transformers("axk2").items() if key != "mlp_layer_types"}
    sparse = build_program(config | {"first_k_dense_replace": 0, "moe_layer_freq": 1}, Format.FP32)
    assert sparse == build_program(config | {"mlp_layer_types": ["sparse", "sparse"]}, Format.FP32)
    assert sparse != build_program(config, Format.FP32)
    assert build_program(config, Format.FP32) == build_program(said_by_transformers("axk2"), Format.FP32)


def test_lara_s_checkpoints_are_by_its_makers_names(tmp_path: Path) -> None:
    """transformers' own writes them so, too."""
    tensors = load_file(save_tiny("lara", tmp_path / "model") / "model.safetensors")
    first = {name.removeprefix("model.layers.0.linear_attn.") for name in tensors if ".layers.0.linear_attn." in name}
    assert first == {"A_log", "conv1d.weight", "dt_bias", "in_proj.weight", "out_norm.weight", "out_proj.weight"}
