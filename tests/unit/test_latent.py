"""Latent attention: the layout of its cache, bits that do not depend on other rows, and refused configurations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built import draft_of, opened, target_of, write
from native_models import TOKENS, logits, open_native
from tiny_models import LATENT, tiny_model

from outrider.kernels.native import NativeFeed
from outrider.kernels.program import Cache, Format, Kind, Program
from outrider.workers.engines.native import NativeEngine
from outrider.workers.messages import ModelSpec, Row, Sampling
from outrider.workers.models.families import build_program
from outrider.workers.models.memory_of_program import memory_of_program
from outrider.workers.models.opening import open_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def save(name: str, path: Path) -> int:
    """Its vocabulary."""
    model = tiny_model(name)
    model.save_pretrained(path)
    return int(model.config.vocab_size)


def program_of(model_type: str, **sizes: Any) -> Program:
    return build_program({"model_type": model_type, **LATENT, **sizes}, Format.BF16)


@pytest.mark.parametrize(("model_type", "heads"), [("youtu", 16), ("deepseek_v3", 128)])
def test_a_token_takes_one_vector_whatever_the_number_of_heads(model_type: str, heads: int) -> None:
    """At published sizes: 576 numbers as a key, 512 of them as a value: in bf16 2,176 bytes a layer, in int8, once, 584."""
    experts = (
        {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
        if model_type == "deepseek_v3"
        else {}
    )
    program = program_of(
        model_type,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        **experts,
    )
    assert program.token_bytes == program.layers * 2176
    assert replace(program, cache=Cache.INT8).token_bytes == program.layers * (576 + 2 * 4)
    assert memory_of_program(program, 1).token == program.token_bytes
    # Each head's part of kv_b_proj multiplies its queries, the other what it has gathered.
    made = [(op.input.width, op.output.width) for op in program.ops if op.kind is Kind.HEADS]
    assert made == [(heads * 192, heads * 576), (heads * 512, heads * 128)] * program.layers


def test_heads_in_fp16_beside_integers_give_the_same_bits_everywhere() -> None:
    """Others in fp16 do not count as such."""
    program = build_program({"model_type": "youtu", **LATENT}, Format.W4A8)
    heads = next(op.weight for op in program.ops if op.kind is Kind.HEADS)
    for number, integer in ((heads, True), (heads - 1, False)):
        weights = list(program.weights)
        weights[number] = replace(weights[number], format=Format.FP16, storage=None, table=False)
        assert replace(program, weights=tuple(weights)).integer is integer


@pytest.mark.one_in(5)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "w8a8", "w4a8", "w4abf16"])
def test_neither_pieces_nor_other_rows_nor_branches_change_a_bit(precision: str, tmp_path: Path) -> None:
    save("deepseek-v3", tmp_path)
    whole = logits(open_native(tmp_path, precision, threads=1))
    engine = open_native(tmp_path, precision, threads=2)
    np.testing.assert_array_equal(whole, logits(engine, pieces=(1, 7, 2, 16)))
    model, half = engine.model, len(TOKENS) // 2
    rows = [model.open(Sampling(), len(TOKENS)) for _ in range(9)]
    # Beside rows of other lengths, then with candidates and branches behind what is in the cache.
    feeds = [NativeFeed(row, TOKENS[number : number + half], logits=half) for number, row in enumerate(rows)]
    np.testing.assert_array_equal(whole[:half], model.forward(feeds)[0].logits)
    left = TOKENS[half:]
    others = [NativeFeed(row, TOKENS[:3], choose=3, branches=((1, 5), (2, 9))) for row in rows[1:]]
    for branch in (1, 4):
        found = model.forward([NativeFeed(rows[0], left, logits=len(left), branches=((branch, 11),)), *others])[0]
        np.testing.assert_array_equal(whole[half:], found.logits)
        model.truncate(rows[0], half)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "precision"), [("deepseek-v3", "bf16"), ("youtu", "w4a8")])
def test_assisted_text_is_plain_text_whatever_the_batch(name: str, precision: str, tmp_path: Path) -> None:
    """The draft is the target in eight bits."""
    vocabulary = save(name, tmp_path)
    random = np.random.default_rng(3)
    rows = [
        Row(
            key,
            tuple(random.integers(1, vocabulary, int(random.integers(1, 40))).tolist()),
            24,
            Sampling(key % 2, seed=key),
        )
        for key in range(8)
    ]
    plain, _ = write(target_of(opened(tmp_path, "native", precision), 1, 0), rows)
    draft = draft_of(opened(tmp_path, "native", "w8a8"))
    assisted, verifier = write(target_of(opened(tmp_path, "native", precision), 5, 4, draft), rows)
    assert {key: row.tokens for key, row in assisted.items()} == {key: row.tokens for key, row in plain.items()}
    assert verifier.counters.accepted > 0 and verifier.counters.proposed > verifier.counters.accepted


def opened_with(path: Path, precision: str, cache: Cache, threads: int = 1) -> NativeEngine:
    spec = ModelSpec(str(path), "native", precision, threads=threads, cache_precision=cache.name.lower())
    opened = open_model(spec)
    assert opened.numeric_path["attention"] == "of latent vectors, kept once"
    assert opened.numeric_path["cache"] == "int8, weighed in whole numbers"
    assert isinstance(opened.engine, NativeEngine) and opened.engine.model.program.cache is cache
    return opened.engine


def test_in_8_bits_the_part_with_rope_has_a_scale_of_its_own(tmp_path: Path) -> None:
    """Keys whose part with rope is 64 times as large give the same bits, where queries' is as much smaller."""
    turned, plain, heads = LATENT["qk_rope_head_dim"], LATENT["qk_nope_head_dim"], LATENT["num_attention_heads"]
    model = tiny_model("youtu-wide")
    model.save_pretrained(tmp_path / "as it is")
    weights = model.state_dict()
    for name, tensor in weights.items():
        if name.endswith("kv_a_proj_with_mqa.weight"):
            tensor[-turned:] *= 64
        if name.endswith("q_b_proj.weight"):
            tensor.view(heads, plain + turned, -1)[:, plain:] /= 64
    model.save_pretrained(tmp_path / "scaled")
    before, found = (logits(opened_with(tmp_path / name, "fp32", Cache.INT8)) for name in ("as it is", "scaled"))
    np.testing.assert_array_equal(before, found)
    wanted = logits(open_native(tmp_path / "scaled", "fp32"))
    assert 0 < abs(found - wanted).max() < 0.02 * abs(wanted).max()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", ["bf16", "w4a8"])
def test_in_8_bits_too_nothing_beside_a_row_changes_its_bits(precision: str, tmp_path: Path) -> None:
    save("deepseek-v3", tmp_path)
    whole = logits(opened_with(tmp_path, precision, Cache.INT8))
    assert not np.array_equal(whole, logits(open_native(tmp_path, precision)))
    engine = opened_with(tmp_path, precision, Cache.INT8, threads=2)
    np.testing.assert_array_equal(whole, logits(engine, pieces=(1, 7, 2, 1)))
    model, half = engine.model, len(TOKENS) // 2
    rows = [model.open(Sampling(), len(TOKENS)) for _ in range(5)]
    model.forward([NativeFeed(row, TOKENS[number : number + half], logits=1) for number, row in enumerate(rows)])
    others = [NativeFeed(row, TOKENS[:3], choose=3, branches=((1, 5), (2, 9))) for row in rows[1:]]
    left = TOKENS[half:]
    found = model.forward([NativeFeed(rows[0], left, logits=len(left), branches=((4, 11),)), *others])[0]
    np.testing.assert_array_equal(whole[half:], found.logits)


def test_a_draft_whose_products_are_of_integers_keeps_the_vector_in_8_bits(tmp_path: Path) -> None:
    save("youtu-wide", tmp_path)
    draft = open_model(ModelSpec(str(tmp_path), "native", "w8a8", threads=1, small_cache=True))
    assert draft.engine.model.program.cache is Cache.INT8  # type: ignore[attr-defined]
