"""Every family on the native engine against transformers in float32; lossy formats within the error of their rounding."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_texts import difference, differences, one_thread, prompt
from handed_states import check_states
from native_models import TOKENS, logits, open_native
from tiny_models import MIXTURES, TINY, tiny_model

from outrider.kernels import library
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import ModelSpec
from outrider.workers.models.opening import open_model
from outrider.workers.models.probe import written_by_transformers

# Relative to the largest logit. float32 differs by the order of its sums only.
FP32_BOUND = 1e-4
# Root mean square of the difference over that of the logits. A rounding to n bits errs by 2^-n / sqrt(3) of a value on
# average (bf16 keeps 8 bits, so 0.0023); some twenty roundings follow one another in two layers of random weights, weights
# and cache included, and their errors add up as a random walk does, by about sqrt(20).
BF16_BOUND = 0.02
# All of these are for two layers; with more the errors add up on as a random walk does.
# int8 with one scale for 128 channels errs by a step of max/127, uniformly: 0.29 * (3 sigma / 127) = 0.7% of a typical
# value, in weights and in activations of every layer; about ten times sqrt(2) of that in quadrature.
W8A8_BOUND = 0.05
# int4 has 15 steps between the least and the greatest of 128 weights (5 to 6 sigma): 0.29 * 5.5 / 15 = 11% of a weight, and
# that in each of some nine matrices, in quadrature 32%. Random weights have no redundancy that would absorb it.
W4A8_BOUND = 0.45

FAMILIES = TINY | MIXTURES
QUICK = (
    "llama-tied-biased",
    "opt-350m",
    "gemma2-caps",
    "gemma4",
    "phi3-long",
)
# Gates with matrices behind one another, weights of streams that are read behind SELECT, and scaled steps of a scan.
OF_FP32_GATES = ("axk2", "qwen4-exp", "falcon-h1")
# Models of a family that are unlike its last one.
ALSO = ("phi3", "gemma3", "gemma3n", "gemma4", "neox", "falcon-rw")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def families(quick: Collection[str] = QUICK, names: Iterable[str] = FAMILIES) -> list[object]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def one_of_each() -> list[str]:
    """The last of each family, which has the most of its own, and those that are unlike it."""
    return [*{kind: name for name, (kind, _) in FAMILIES.items()}.values(), *ALSO]


@one_thread()
@torch.no_grad()
def compare(name: str, path: Path, seed: int = 0, **changes: Any) -> None:
    model = tiny_model(name, seed, **changes)
    model.save_pretrained(path)
    expected = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    found = logits(open_native(path, "fp32", threads=1))
    distance = np.abs(found - expected).max() / np.abs(expected).max()
    assert distance < FP32_BOUND, f"{name} in fp32: logits differ by {distance:.1e} of the largest"
    layers = getattr(model.config, "num_hidden_layers", 2)
    # A state that lasts: the kernels' tests hold what is made of it to its definition in all formats.
    kinds = getattr(model.config, "layer_types", None) or getattr(model.config, "layers_block_type", None) or ()
    kept = not {"linear_attention", "hybrid"}.isdisjoint(kinds)
    # A short convolution multiplies three products with one another, where a gated layer multiplies two.
    layers += list(getattr(model.config, "layer_types", None) or []).count("conv")
    # Experts beside two attentions and two gated layers are a third.
    layers += model.config.num_layers if model.config.model_type == "longcat_flash" else 0
    for precision, two_layers in (("bf16", BF16_BOUND), ("w8a8", W8A8_BOUND), ("w4a8", W4A8_BOUND)):
        bound = two_layers * max(1.0, layers / 2) ** 0.5
        if kept and precision != "bf16":
            continue
        difference = logits(open_native(path, precision, threads=1)) - expected
        by_token = np.sqrt((difference**2).mean(axis=1) / (expected**2).mean())
        if kept or model.config.model_type == "muse_spark_text":
            # What norms and unit vectors divide by may be small, as Muse Spark's products of experts, each of which has a
            # norm: no more than twice what bf16 costs transformers.
            theirs = model.bfloat16()(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].float().numpy()
            lost = np.sqrt(((theirs - expected) ** 2).mean(axis=1) / (expected**2).mean())
            bound = max(bound, 2 * float(np.median(lost)))
        if name in MIXTURES and precision != "bf16":
            # Of random routers most tokens then go another way; the kernels' tests hold products to their definition.
            continue
        # Where two experts' scores nearly tie, a rounding sends a token, and what comes later, another way.
        distance = np.median(by_token) if name in MIXTURES or kept else np.sqrt((by_token**2).mean())
        assert distance < bound, f"{name} in {precision}: {distance:.3f}, the bound is {bound}"


@pytest.mark.parametrize("name", families(names=dict.fromkeys([*QUICK, "gemma3-bases", *one_of_each()])))
def test_the_kernels_compute_what_transformers_computes(name: str, tmp_path: Path) -> None:
    """Of each family the one with the most of its own. All of them, in random sizes: test_random_shapes."""
    compare(name, tmp_path)


@pytest.mark.one_in(30)
@pytest.mark.parametrize("name", families(one_of_each()))
def test_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Rows of 3 to 110 tokens in one batch, with candidates from their own text."""
    tiny_model(name, 3).save_pretrained(tmp_path)
    found, proposed = differences(tmp_path, 3)
    assert not found, f"{name}: {'; '.join(found)}"
    assert proposed > 10


@pytest.mark.parametrize("name", families(OF_FP32_GATES, dict.fromkeys([*OF_FP32_GATES, *one_of_each()])))
def test_whole_numbers_give_the_same_bits_on_every_instruction_set(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers, gates and weights of streams, which are in fp32, included; so hosts of several kinds may share a job."""
    tiny_model(name, 1).save_pretrained(tmp_path)
    found = {}
    for isa in library.available_instruction_sets():
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        opened = open_model(ModelSpec(str(tmp_path), "native", "w4a8", threads=1))
        assert isinstance(opened.engine, NativeEngine)
        assert "instruction_set" not in opened.numeric_path
        found[isa] = logits(opened.engine)
    first = next(iter(found.values()))
    for isa, others in found.items():
        np.testing.assert_array_equal(others.view(np.int32), first.view(np.int32), isa)


@pytest.mark.one_in(3)
@one_thread()
@torch.no_grad()
@pytest.mark.parametrize("name", ["falcon-rw", "bloom", "mpt"])
def test_biases_by_distance_of_long_rows(name: str, tmp_path: Path) -> None:
    """Falcon rounds positions and their products with slopes to bf16: beyond position 256 neighbours have equal ones."""
    length = {"bloom": "seq_length", "mpt": "max_seq_len"}.get(name, "max_position_embeddings")
    model = tiny_model(name, 5, **{length: 700})
    model.save_pretrained(tmp_path)
    given = prompt(620, 0, 198)
    expected = model(input_ids=torch.tensor([given]), use_cache=False).logits[0].numpy()
    found = logits(open_native(tmp_path, "fp32"), given, (300, 1, 7))
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.slow
@one_thread()
@pytest.mark.parametrize(
    ("name", "layers"), [("mistral-large-4", (1, 3, 6)), ("muse-spark", (0, 2, 4)), ("step-3", (1, 2, 4))]
)
def test_a_head_reads_the_inputs_of_layers(name: str, layers: tuple[int, ...], tmp_path: Path) -> None:
    check_states(name, layers, tmp_path)


@pytest.mark.parametrize("place", [0, 5, 9])
def test_a_token_that_transformers_would_not_write_is_found(place: int) -> None:
    model, given = tiny_model("llama"), prompt(17, 0, 198)
    expected = written_by_transformers(model, given)
    assert not difference(model, given, expected.written)
    written = list(expected.written)
    written[place] = int(expected.scores[place].argmin())
    assert difference(model, given, written).startswith(f"of 17 tokens: token {place} is {written[place]}, not ")


def random_changes(name: str, random: np.random.Generator) -> dict[str, Any]:
    """Sizes that no kernel was written for."""
    kind, settings = FAMILIES[name]
    head_size = int(random.choice([8, 16, 24, 64, 72]))
    kv_heads = int(random.choice([1, 2, 3]))
    heads = kv_heads * int(random.choice([1, 2, 8 // kv_heads]))
    ffn, vocabulary, tied = (int(random.integers(40, 300)), int(random.integers(198, 400)), bool(random.integers(2)))
    common = dict(vocab_size=vocabulary, tie_word_embeddings=tied)
    if kind == "gpt_bigcode":
        # Unscaled scores of large heads amplify any rounding, so that no bound would say anything.
        return common | dict(n_embd=heads * head_size, n_head=heads, n_inner=ffn, scale_attn_weights=True)
    if kind == "openai-gpt":
        return common | dict(n_embd=heads * head_size, n_head=heads)
    if kind == "gpt_neox_japanese":
        return common | dict(hidden_size=heads * head_size, num_attention_heads=heads)
    if kind in ("gpt2", "gptj", "codegen"):
        heads = -(-heads // 4) * 4 if kind == "codegen" else heads  # its heads lie in four shares
        rotated = {} if kind == "gpt2" else {"rotary_dim": 8}
        return common | rotated | dict(n_embd=heads * head_size, n_head=heads, n_inner=ffn)
    if kind == "gpt_neo":
        # Their scores are not scaled: see above.
        return common | dict(hidden_size=heads * 8, num_heads=heads, intermediate_size=ffn)
    if kind == "bloom":
        return common | dict(hidden_size=heads * head_size, n_head=heads)
    if kind == "mpt":
        return common | dict(d_model=heads * head_size, n_heads=heads)
    if kind == "jamba":
        # Channels are divided into whole vectors.
        sizes = dict(hidden_size=8 * heads * int(random.integers(1, 6)), intermediate_size=ffn, num_attention_heads=heads)
        sizes |= dict(mamba_d_state=int(random.integers(5, 40)), mamba_dt_rank=int(random.integers(3, 20)))
        return common | sizes | dict(num_key_value_heads=kv_heads)
    if kind in ("mamba", "falcon_mamba"):
        inner, state = 16 * int(random.integers(2, 20)), int(random.integers(5, 40))
        sizes = dict(hidden_size=heads * head_size, intermediate_size=inner, state_size=state)
        return common | sizes | dict(time_step_rank=int(random.integers(3, 20)))
    if kind == "mamba2":
        size, groups = 16 * int(random.integers(1, 4)), int(random.choice([1, 3]))
        sizes = dict(num_heads=2 * groups, head_dim=size, n_groups=groups, hidden_size=groups * size)
        return common | sizes | dict(state_size=int(random.integers(5, 40)))
    if kind == "zamba2":
        # Twice the width is shared out among heads of whole vectors, of attention and of the scan.
        hidden = 8 * heads * int(random.integers(1, 5))
        sizes = dict(hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, n_mamba_heads=heads)
        sizes |= dict(mamba_ngroups=1, tie_word_embeddings=True)
        return common | sizes | dict(mamba_d_state=int(random.integers(5, 40)), adapter_rank=int(random.integers(5, 40)))
    if kind == "falcon":
        kv = {"num_kv_heads": kv_heads} if settings.get("new_decoder_architecture") else {}
        return common | kv | dict(hidden_size=heads * head_size, num_attention_heads=heads, ffn_hidden_size=ffn)
    if kind in ("persimmon", "biogpt", "modernbert-decoder"):
        return common | dict(hidden_size=heads * head_size, intermediate_size=ffn, num_attention_heads=heads)
    if kind in ("phi", "stablelm"):
        sizes = dict(hidden_size=heads * head_size, num_attention_heads=heads, num_key_value_heads=kv_heads)
        return common | sizes | dict(intermediate_size=ffn)
    if kind == "dbrx":
        attention = settings["attn_config"] | {"kv_n_heads": kv_heads}
        return dict(vocab_size=vocabulary, d_model=heads * head_size, n_heads=heads, attn_config=attention)
    if kind == "mimo_v2_flash":
        # Layers with a window have twice the key heads; a third of a head is a whole number of pairs.
        sizes = dict(num_attention_heads=2 * heads, num_key_value_heads=kv_heads, head_dim=int(random.choice([8, 24, 72])))
        sizes |= dict(v_head_dim=8 * int(random.integers(1, 10)), hidden_size=heads * int(random.integers(5, 40)))
        return common | sizes | dict(intermediate_size=ffn)
    if "kv_lora_rank" in settings:
        # Each of a head's parts has a size of its own.
        turned, value = int(random.choice([8, 16, 40])), int(random.integers(4, 80))
        # Long rope has a factor for each pair of columns.
        factors = settings.get("rope_parameters", {}).get("long_factor")
        turned = 2 * len(factors) if factors else turned
        common |= {"tie_word_embeddings": False} if kind == "bailing_hybrid" else {}
        common |= {"head_dim": turned} if kind == "longcat_flash" else {}
        # transformers takes neighbouring columns behind these as complex numbers.
        plain = head_size + 2 * int(random.integers(0, 4))
        ranks = dict(kv_lora_rank=8 * int(random.integers(1, 10)))
        ranks |= dict(q_lora_rank=int(random.integers(5, 40))) if settings["q_lora_rank"] else {}
        sizes = dict(num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=ffn)
        turned = turned if settings["qk_rope_head_dim"] else 0
        parts = dict(qk_rope_head_dim=turned, qk_nope_head_dim=plain, v_head_dim=value)
        return common | ranks | sizes | parts | dict(hidden_size=heads * int(random.integers(5, 40)))
    if kind == "gpt_neox":
        # A quarter of a head is a whole number of pairs.
        size = int(random.choice([8, 16, 24, 64, 72]))
        return common | dict(hidden_size=heads * size, intermediate_size=ffn, num_attention_heads=heads)
    if kind == "opt":
        return common | dict(hidden_size=heads * head_size, num_attention_heads=heads, ffn_dim=ffn)
    if kind in ("phi3", "olmoe", "phimoe"):
        # Phi's factors are one for each pair of columns, and heads share out the width.
        pairs = 8
        hidden, head_size = heads * 2 * pairs, 2 * pairs
        sizes = dict(hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads)
        return common | sizes | dict(num_key_value_heads=kv_heads)
    # Of HRM-Text every head has keys and values of its own.
    kv_heads = heads if kind == "hrm_text" else kv_heads
    if kind == "nemotron_h":
        common |= {"mamba_num_heads": 12, "mamba_head_dim": 16 * int(random.integers(1, 6))}
        common |= {"n_groups": int(random.choice([1, 3, 6])), "ssm_state_size": int(random.integers(5, 40))}
    if "mamba_d_head" in settings:
        # Four times the width is shared out among heads of whole vectors.
        size, hidden = 16 * int(random.integers(1, 4)), 24 * heads * int(random.integers(1, 3))
        inner = settings.get("mamba_d_ssm") or 4 * hidden
        size = size if inner % size == 0 else 16
        groups = int(random.choice([1, inner // size]))
        sizes = dict(mamba_d_head=size, mamba_n_heads=inner // size, mamba_n_groups=groups)
        sizes |= dict(mamba_d_state=int(random.integers(5, 40)), mamba_d_conv=int(random.choice([2, 4])))
        sizes |= dict(hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads)
        return common | sizes | dict(num_key_value_heads=kv_heads, head_dim=head_size)
    if kind == "minimax_m3_vl_text":
        common |= {"rotary_dim": head_size // 2, "index_head_dim": head_size, "index_n_heads": kv_heads}
    if kind == "step3p5":
        common |= {"num_sliding_attention_heads": 2 * heads}
    if kind == "qwen4_exp_text":
        common |= {"indexer_head_dim": head_size}
    if kind.startswith("gemma4"):
        common |= {"global_head_dim": int(random.choice([8, 40, 64])), "num_global_key_value_heads": kv_heads}
    # Helium's and BitNet's heads share out the width. Gemma 4 rounds more often in a layer, and narrow ones average less.
    least = 12 if kind.startswith("gemma4") else 5
    hidden = heads * (head_size if kind in ("helium", "bitnet") else int(random.integers(least, 40)))
    changes = common | dict(hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads)
    return changes | dict(num_key_value_heads=kv_heads, head_dim=head_size)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_random_shapes(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, 1, **random_changes(name, np.random.default_rng([1, *name.encode()])))
