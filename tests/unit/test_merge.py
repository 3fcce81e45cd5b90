"""``outrider merge`` equals PEFT's merge, in the model's own file format; what it does not support is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from built_once import CliRunner
from safetensors.torch import load_file, save_file

from outrider.runner.cli.main import app
from outrider.workers.models.formats.other_names import OTHER_HEADS
from outrider.workers.models.model_info import read_model_info

FIXTURES = Path(__file__).parents[1] / "support" / "tiny_adapter"
CASES = ("plain", "patterns", "turned")
# How far apart two numbers may be that were rounded once: PEFT adds up in 32 bits, whose last digit may move a rounding.
STEPS = {torch.float32: 2e-7, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """The directories of a model and of its adapter, which names it."""

    def make(case: str) -> tuple[Path, Path]:
        model, adapter = tmp_path / "model", tmp_path / "adapter"
        for directory in (model, adapter):
            directory.mkdir()
        shutil.copy(FIXTURES / case / "base.json", model / "config.json")
        shutil.copy(FIXTURES / case / "base.safetensors", model / "model.safetensors")
        (model / "tokenizer.json").write_text('{"of": "the model"}')
        (model / "chat_template.jinja").write_text("of the model")
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(FIXTURES / case / name, adapter / name)
        configure(adapter, base_model_name_or_path=str(model))
        return model, adapter

    return make


def configure(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def run(adapter: Path, out: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["merge", str(adapter), "-o", str(out), *more])
    error = "" if result.exception is None or isinstance(result.exception, SystemExit) else str(result.exception)
    return result.exit_code, result.output + error


@pytest.mark.parametrize("case", CASES)
def test_what_is_merged_is_what_peft_merges(case: str, place: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    model, adapter = place(case)
    result = CliRunner().invoke(app, ["merge", str(adapter), "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.exception
    said = result.output
    base, merged = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    expected = load_file(FIXTURES / case / "merged.safetensors")
    assert merged.keys() == base.keys()
    assert {name for name in base if not torch.equal(merged[name], base[name])} == expected.keys()
    for name, tensor in expected.items():
        assert merged[name].dtype == tensor.dtype
        found, wanted = merged[name].double().numpy(), tensor.double().numpy()
        # Of an embedding PEFT rounds what is added to 16 bits before it adds.
        embedding = "embed" in name
        np.testing.assert_allclose(found, wanted, rtol=STEPS[tensor.dtype], atol=2.0**-10 if embedding else 1e-8)
        if tensor.dtype != torch.float32:
            assert (found == wanted).mean() > (0.7 if embedding else 0.99)
    changed = len(expected) - (case == "patterns")
    assert f"{changed} matrices changed" in said and ("1 tensor replaced" in said) == (case == "patterns")
    assert (tmp_path / "out" / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert read_model_info(str(tmp_path / "out")).weight_bytes == read_model_info(str(model)).weight_bytes


def test_the_same_bytes_each_time_and_nothing_beside_them(
    place: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, adapter = place("plain")
    (tmp_path / "again.unfinished").mkdir()
    (tmp_path / "again.unfinished" / "left").write_text("by a run that was killed")
    for name in ("once", "again"):
        assert run(adapter, tmp_path / name)[0] == 0
    files = [sorted(file.name for file in (tmp_path / name).iterdir()) for name in ("once", "again")]
    assert files[0] == files[1] == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    once, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("once", "again"))
    assert once == again
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_model_in_several_files_keeps_them(place: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    model, adapter = place("plain")
    run(adapter, tmp_path / "whole")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    weights: dict[str, str] = {}
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, model / file)
        weights |= dict.fromkeys(part, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert run(adapter, tmp_path / "parts")[0] == 0
    found: dict[str, torch.Tensor] = {}
    for copy in (tmp_path / "parts").glob("*.safetensors"):
        found |= load_file(copy)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_tokenizer_that_the_adapter_brings_is_the_merged_models(
    place: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, adapter = place("plain")
    (adapter / "tokenizer.json").write_text('{"of": "the adapter"}')
    (adapter / "trainer_state.json").write_text("{}")
    assert run(adapter, tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"of": "the adapter"}'
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json"], "no template of another tokenizer"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "has 'use_dora': True, which is not supported"),
        ({"lora_bias": True}, "has 'lora_bias': True, which is not supported"),
        ({"bias": "all"}, "has \"bias\": 'all'; none is known"),
        ({"init_lora_weights": "pissa_niter_4"}, "has \"init_lora_weights\": 'pissa_niter_4'"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "has 'target_parameters'"),
        ({"peft_type": "IA3"}, "has \"peft_type\": 'IA3'; LORA is known"),
        ({"a_key_of_tomorrow": 3}, "has 'a_key_of_tomorrow': 3, which is not supported"),
        ({"r": 3}, "have the shapes (4, 24) and (16, 4), its rank is 3"),
        ({"lora_alpha": "8"}, "has \"lora_alpha\": '8', where a number is needed"),
        ({"rank_pattern": {"q_proj": "x"}}, "has 'q_proj': 'x', where a number is needed"),
        ({"alpha_pattern": {"(": 1}}, "has '(', which is no pattern"),
        ({"base_model_name_or_path": None}, "does not name its base model: give it with --model"),
        ({"base_model_name_or_path": "/gone"}, 'its base model is not found: the model directory "/gone" does not exist'),
    ],
)
def test_what_is_not_followed_is_refused(
    changes: dict[str, Any], said: str, place: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, adapter = place("plain")
    configure(adapter, **changes)
    code, found = run(adapter, tmp_path / "out")
    assert code != 0 and said in found
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.unfinished"))


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
HEAD = "base_model.model.lm_head.weight"
COPY = "base_model.model.model.embed_tokens.base_layer.weight"
OF_TOKENS = "model.embed_tokens.weight"


def renamed_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(COPY)
    for part in ("lora_embedding_A", "lora_embedding_B"):
        tensors[f"base_model.model.tokens.{part}"] = tensors.pop(f"base_model.model.model.embed_tokens.{part}")


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("plain", lambda each: each.pop(A), "there is lora_B alone"),
        ("plain", lambda each: each.update({A.replace("layers.0", "layers.7"): each.pop(A)}), "there is lora_B alone"),
        ("plain", lambda each: each.update({A: torch.zeros(4, 17)}), "the shape (16, 17), the model's has (16, 16)"),
        ("plain", lambda each: each.update({A: each[A].double()}), "is of type F64; F16, BF16, F32 are read"),
        (
            "plain",
            lambda each: each.update({A.removeprefix("base_"): each.pop(A)}),
            "does not begin with base_model.",
        ),
        ("plain", lambda each: each.update({A: torch.full((4, 16), float("inf"))}), "a merged weight is no finite number"),
        ("patterns", lambda each: each.update({HEAD: torch.zeros(41, 16)}), "one with added tokens"),
        ("patterns", lambda each: each.update({COPY: each[COPY] + 1}), "which is not the model's"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    case: str,
    change: Callable[[dict[str, torch.Tensor]], object],
    said: str,
    place: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    _, adapter = place(case)
    change_tensors(adapter / "adapter_model.safetensors", change)
    code, found = run(adapter, tmp_path / "out")
    assert code != 0 and said in found
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("head", OTHER_HEADS)
def test_a_head_by_another_name_is_no_tied_one(
    head: str, place: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """GPT-NeoX's, BioGPT's and ModernBERT's own heads were overlooked, and adapters of their embeddings refused."""
    model, adapter = place("patterns")
    change_tensors(model / "model.safetensors", lambda each: each.update({head: each.pop("lm_head.weight")}))
    copied = f"base_model.model.{head}"
    change_tensors(adapter / "adapter_model.safetensors", lambda each: each.update({copied: each.pop(HEAD)}))
    configure(adapter, modules_to_save=[head.removesuffix(".weight")])
    assert run(adapter, tmp_path / "out") == (0, ANY)
    merged, expected = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(FIXTURES / "patterns" / "merged.safetensors"),
    )
    assert not torch.equal(merged[OF_TOKENS], load_file(model / "model.safetensors")[OF_TOKENS])
    torch.testing.assert_close(merged[OF_TOKENS], expected[OF_TOKENS], rtol=0.0, atol=2.0**-7)
    # A layer's matrix of such a name is none.
    change_tensors(
        model / "model.safetensors", lambda each: each.update({f"model.layers.0.attention.{head}": each.pop(head)})
    )
    change_tensors(adapter / "adapter_model.safetensors", lambda each: each.pop(copied))
    assert "tied to the LM head" in run(adapter, tmp_path / "other")[1]


def test_models_into_which_nothing_is_merged(place: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    model, adapter = place("patterns")
    assert "is there already" in run(adapter, model)[1]
    without_out = CliRunner().invoke(app, ["merge", str(adapter)])
    assert "--out is missing" in str(without_out.exception)
    assert "has no adapter_config.json: name the directory of a LoRA" in run(model, tmp_path / "out")[1]
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    assert "is quantised, and adapters are merged into unquantised weights only" in run(adapter, tmp_path / "out")[1]
    (model / "config.json").write_text(json.dumps(config))
    change_tensors(model / "model.safetensors", lambda each: each.pop("lm_head.weight"))
    change_tensors(adapter / "adapter_model.safetensors", lambda each: each.pop(HEAD))
    assert "tied to the LM head" in run(adapter, tmp_path / "out")[1]
    # By whatever name: what PEFT adds to an embedding shows in how it keeps it.
    change_tensors(model / "model.safetensors", lambda each: each.update({"tokens.weight": each.pop(OF_TOKENS)}))
    change_tensors(adapter / "adapter_model.safetensors", renamed_embedding)
    assert "tied to the LM head" in run(adapter, tmp_path / "out")[1]
    (model / "model.safetensors").unlink()
    assert "holds no safetensors" in run(adapter, tmp_path / "out")[1]
