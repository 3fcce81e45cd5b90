"""Quantised checkpoints of the native engine's newer families, in the layouts in which people publish them, against
transformers on the numbers that their codes stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_texts import one_thread
from native_models import TOKENS, logits, open_native
from quantised_families import (
    LAYOUTS,
    Layout,
    fp8_by_block,
    gptq,
    quantised,
    sizes_of,
    stored,
    usual,
)
from quantised_models import GPTQ, Tensors, rewritten, set_config
from tiny_models import MIXTURES, TINY, one_by_one, tiny_model
from transformers import AutoModelForCausalLM

from outrider.kernels.program import Kind
from outrider.workers.errors import ModelError
from outrider.workers.models.laying_out import lay_out
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.opening import check_weights
from outrider.workers.precisions import PRECISIONS

DENSE = ("gemma4", "gemma4-by-layer", "ministral3", "apertus", "nanochat", "youtu-wide", "granite-hybrid", "jais2", "lfm2")
# gpt-oss' experts have biases and lie inputs by outputs, as nothing but its own MXFP4 has them.
FAMILIES = [name for name in MIXTURES if not name.startswith("gpt-oss")] + list(DENSE)
QUICK = [
    ("deepseek-v3", "fp8 by block"),
    ("glm4-moe-lite", "compressed int4"),
    ("minimax-m2", "fp8 by block"),
    ("gemma4", "compressed fp8"),
    ("gemma4-moe", "compressed int4"),
    ("ministral3", "fp8, static"),
    ("glm4-moe", "awq"),
    ("deepseek-v3", "gptq, in activation order"),
    ("hunyuan-moe", "auto-round, as gptq"),
    ("lfm2-moe", "auto-round, as awq"),
    ("ernie-moe", "compressed mxfp4"),
    ("dots1", "compressed nvfp4"),
]
# Relative to the largest logit: sums of fp32 in another order.
BOUND = 1e-5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def pairs() -> Iterator[object]:
    """Every family in three layouts, so that every layout has a seventh of the families."""
    layouts = list(LAYOUTS)
    found = [
        (name, layouts[(3 * place + more * 7) % len(layouts)]) for place, name in enumerate(FAMILIES) for more in range(3)
    ]
    for pair in dict.fromkeys([*QUICK, *found]):
        if pair[1] == "gptq, 2 bits" and not {"kv_lora_rank", "global_head_dim"}.isdisjoint((TINY | MIXTURES)[pair[0]][1]):
            continue  # sixteen rows lie in a word
        yield pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)


def made(path: Path, name: str, layout: Layout, chosen: Callable[[str], bool] = usual, **changes: Any) -> Path:
    """The checkpoint; that of its numbers lies beside it as "plain"."""
    tiny_model(name, **(sizes_of(name) | changes)).save_pretrained(path / "model")
    assert quantised(path / "model", path / "plain", layout, chosen)
    return path / "model"


@torch.inference_mode()
def expected(plain: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    one_by_one(model)
    found: np.ndarray = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    return found


def far(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def check(model: Path, *, kept: str = "w8af32") -> None:
    plain = model.with_name("plain")
    found = logits(open_native(model, "fp32"))
    with one_thread():
        assert far(found, expected(plain)) < BOUND
    np.testing.assert_array_equal(found, logits(open_native(plain, "fp32")))
    if kept == "bf16":
        # Codes of eight bits stay packed, and give the bits of their numbers in bf16.
        np.testing.assert_array_equal(logits(open_native(model, "bf16")), logits(open_native(plain, "bf16")))
    else:
        assert far(logits(open_native(model, kept)), found) < BOUND


@pytest.mark.parametrize(("name", "layout"), pairs())
def test_a_quantised_family_is_what_its_numbers_are(name: str, layout: str, tmp_path: Path) -> None:
    model = made(tmp_path, name, LAYOUTS[layout])
    floats = read_model_info(str(model)).made_for == "bf16"
    check(model, kept="bf16" if floats else "w8af32")
    weights = lay_out(model, PRECISIONS["bf16" if floats else "w8af32"]).program.weights
    if layout != "compressed nvfp4":
        assert any(weight.storage is not None for weight in weights)


def test_what_guesses_further_tokens_is_left_out_when_it_is_quantised(tmp_path: Path) -> None:
    """DeepSeek V3's layer behind the last, with a head and an embedding of its own."""
    model = made(tmp_path, "deepseek-v3", LAYOUTS["fp8 by block"])
    set_config(model, num_nextn_predict_layers=1)
    wanted = logits(open_native(model, "bf16"))

    def more(tensors: Tensors) -> Tensors:
        last = {name: value for name, value in tensors.items() if "layers.2." in name}
        behind = {name.replace("layers.2.", "layers.3."): value.clone() for name, value in last.items()}
        for name in ("embed_tokens.weight", "shared_head.head.weight"):
            behind[f"model.layers.3.{name}"] = tensors["lm_head.weight"].clone()
        parts, _ = fp8_by_block("", torch.ones(96, 192))
        return tensors | behind | {f"model.layers.3.eh_proj.{name}": part for name, part in parts.items()}

    rewritten(model, more)
    np.testing.assert_array_equal(logits(open_native(model, "bf16")), wanted)


@pytest.mark.parametrize("ordered", ["all", "some"])
def test_every_expert_has_its_own_order_of_columns(ordered: str, tmp_path: Path) -> None:
    """Or none, where the file has it so."""
    in_order, plain = gptq(4, 1, ordered=True), gptq(4, 1)

    def pack(module: str, matrix: torch.Tensor) -> Any:
        return (in_order if ordered == "all" or ".experts.2." in module else plain)(module, matrix)

    model = made(tmp_path, "qwen3-moe", Layout(pack, GPTQ | {"desc_act": True}))
    orders = {
        tuple(value.tolist())
        for name, value in stored(model).items()
        if "1.mlp.experts" in name and "gate_proj.g_idx" in name
    }
    assert len(orders) == (20 if ordered == "all" else 2)
    check(model)
    program = lay_out(model, PRECISIONS["w4abf16"]).program
    op = next(op for op in program.ops if op.kind is Kind.EXPERTS)
    assert program.weights[op.weight].ordered
    found = logits(open_native(model, "w4a8"))
    np.testing.assert_array_equal(logits(open_native(model, "w4a8", threads=2), pieces=(1, 7, 3)), found)


def test_gate_and_up_of_an_expert_in_different_orders_are_refused(tmp_path: Path) -> None:
    in_order, plain = gptq(4, 1, ordered=True), gptq(4, 1)

    def pack(module: str, matrix: torch.Tensor) -> Any:
        return (in_order if "up_proj" in module else plain)(module, matrix)

    model = made(tmp_path, "qwen2-moe-windows", Layout(pack, GPTQ), lambda module: ".experts." in module)
    with pytest.raises(ModelError, match=r"experts are quantised in different ways.*; --precision bf16 runs them"):
        check_weights(str(model), "native", precision="w4a8")
    check_weights(str(model), "native", precision="bf16")


@pytest.mark.parametrize("layout", ["gptq", "compressed int4", "fp8 by block"])
def test_a_router_and_a_head_may_be_quantised_too(layout: str, tmp_path: Path) -> None:
    def chosen(module: str) -> bool:
        return usual(module) or module.endswith(("mlp.gate", "lm_head"))

    settings = LAYOUTS[layout].settings | {"ignore": [], "modules_to_not_convert": None}
    model = made(tmp_path, "glm4-moe", Layout(LAYOUTS[layout].pack, settings), chosen, vocab_size=208)
    check(model, kept="bf16" if layout.startswith("fp8") else "w8af32")
