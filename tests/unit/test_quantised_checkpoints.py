"""Quantised checkpoints on the native engine: kept as they come, computed with the numbers that their codes stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.utils.match import match_targets
from gguf_models import mostly, write_gguf
from native_models import logits, open_native
from quantised_models import (
    AWQ,
    GPTQ,
    Tensors,
    block_fp8,
    compressed,
    is_linear,
    packed_small,
    rewritten,
    save_small,
    set_config,
)
from safetensors.torch import load_file
from tiny_models import tiny_model

from outrider.kernels import storage
from outrider.kernels.program import Format, Weight
from outrider.workers.engines.hf_batching import Batching
from outrider.workers.engines.native import NativeEngine
from outrider.workers.errors import ModelError
from outrider.workers.messages import ModelSpec
from outrider.workers.models import hf_loading
from outrider.workers.models.checkpoint import Checkpoint, open_checkpoint
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.formats.configuration import read_quantisation
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.opening import check_weights, native_supports, open_model
from outrider.workers.models.packed import PackedModel
from outrider.workers.precisions import PRECISIONS

INT4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def small_gguf(path: Path, type_: str, **changes: Any) -> Path:
    save_small(path, **changes)
    return write_gguf(path, path / "model.gguf", mostly(type_))


MAKERS: dict[str, Callable[[Path], Path]] = {
    "awq": lambda path: packed_small(path, "awq"),
    "gptq": lambda path: packed_small(path, "gptq"),
    "gptq, in activation order": lambda path: in_activation_order(packed_small(path, "gptq")),
    "awq, rope of neighbours": lambda path: of_ernie(packed_small(path, "awq")),
    "gptq, rope of neighbours": lambda path: of_ernie(in_activation_order(packed_small(path, "gptq"))),
    "compressed int4, rope of neighbours": lambda path: of_ernie(compressed(save_small(path), **INT4)),
    "compressed int4": lambda path: compressed(save_small(path), **INT4),
    "compressed int4, asymmetric": lambda path: compressed(save_small(path), **INT4, symmetric=False),
    "compressed int8": lambda path: compressed(
        save_small(path), format="int-quantized", num_bits=8, strategy="channel", activations=INT8
    ),
    "gguf Q8_0": lambda path: small_gguf(path, "Q8_0"),
    "gguf Q4_0": lambda path: small_gguf(path, "Q4_0"),
    "gguf Q4_1": lambda path: small_gguf(path, "Q4_1"),
    "gguf Q5_0": lambda path: small_gguf(path, "Q5_0"),
    "gguf Q5_1": lambda path: small_gguf(path, "Q5_1"),
    "gguf Q4_K": lambda path: small_gguf(path, "Q4_K", **WIDE),
    "gguf Q5_K": lambda path: small_gguf(path, "Q5_K", **WIDE),
    "gguf Q6_K": lambda path: small_gguf(path, "Q6_K", **WIDE),
    "gguf MXFP4": lambda path: small_gguf(path, "MXFP4"),
    "gguf IQ3_S": lambda path: small_gguf(path, "IQ3_S", **WIDE),
    "gguf TQ2_0": lambda path: small_gguf(path, "TQ2_0", **WIDE),
}


def of_ernie(path: Path) -> Path:
    """The same tensors as ERNIE's, whose rope wants the rows of queries and keys in another order."""
    set_config(path, model_type="ernie4_5", architectures=["Ernie4_5ForCausalLM"])
    return path


def in_activation_order(path: Path) -> Path:
    """Columns and groups shuffled together, alike for all that read the same input, as GPTQ's own tools have it."""
    orders = {64: torch.randperm(64, generator=torch.Generator().manual_seed(2)), 128: torch.randperm(128)}

    def change(tensors: Tensors) -> Tensors:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            module = name.removesuffix(".qweight")
            words = tensors[name].numpy().view(np.uint32)
            codes = (words[:, None] >> (4 * np.arange(8, dtype=np.uint32))[:, None] & 15).reshape(-1, words.shape[1])
            order = orders[len(codes)].numpy()
            shuffled = codes[order].reshape(-1, 8, words.shape[1]) << (4 * np.arange(8, dtype=np.uint32))[:, None]
            packed = np.bitwise_or.reduce(shuffled, axis=1).astype(np.uint32).view(np.int32)
            tensors[name] = torch.from_numpy(packed)
            tensors[f"{module}.g_idx"] = tensors[f"{module}.g_idx"][order]
        return tensors

    set_config(rewritten(path, change))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MAKERS[request.param](tmp_path / "model")


def dequantised(model: Path, out: Path) -> Path:
    """The plain checkpoint, in fp32, whose weights are the numbers that the codes stand for."""
    directory = model if model.is_dir() else model.parent
    plain = out / "plain"
    shutil.copytree(directory, plain)
    for file in plain.glob("*.gguf"):
        file.unlink()
    program = read_program(model, PRECISIONS["fp32"]).program
    checkpoint = open_checkpoint(model)
    tensors = {}
    for weight in program.weights:
        for source in weight.sources:
            rows = checkpoint.rows(source, 0, source.shape[0])
            bits = rows.astype(np.uint32) << 16 if rows.dtype == np.uint16 else None
            tensors[source.name] = torch.from_numpy(rows.astype(np.float32) if bits is None else bits.view(np.float32))
    set_config(plain, quantization_config=None, dtype="float32")
    return rewritten(plain, lambda _: tensors)


@pytest.mark.one_in(6)
def test_dequantised_it_computes_what_a_plain_checkpoint_of_its_numbers_does(model: Path, tmp_path: Path) -> None:
    plain = dequantised(model, tmp_path)
    wanted = logits(open_native(plain, "fp32"))
    np.testing.assert_array_equal(logits(open_native(model, "fp32")), wanted)


def gptq_of(matrix: torch.Tensor, group: int) -> tuple[Tensors, torch.Tensor]:
    """A matrix, outputs by inputs, rounded to GPTQ's first version, and the numbers that its codes stand for."""
    groups = matrix.float().unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    numbers = ((codes - zeros[..., None]) * scales.float()[..., None]).flatten(1)

    def words(values: torch.Tensor) -> torch.Tensor:
        """Eight rows' values in a word."""
        shifts = 4 * torch.arange(8)[:, None]
        return (values.long().unflatten(0, (-1, 8)) << shifts).sum(1).to(torch.uint32).view(torch.int32)

    inputs = torch.arange(matrix.shape[1])
    parts = {
        "qweight": words(codes.flatten(1).T),
        "qzeros": words(zeros - 1).T,
        "scales": scales.T,
        "g_idx": (inputs // group).int(),
    }
    return parts, numbers


def test_gptq_of_matrices_that_lie_inputs_by_outputs(tmp_path: Path) -> None:
    """GPT-2's, which GPTQ's tools turn round before they pack them."""
    tiny_model("gpt2", n_embd=64, n_inner=128, n_head=4).save_pretrained(tmp_path)
    numbers: Tensors = {}

    def packed(tensors: Tensors) -> Tensors:
        result: Tensors = {}
        for name, value in tensors.items():
            module = name.removesuffix(".weight")
            if not module.endswith(("c_attn", "c_proj", "c_fc")):
                result[name] = value
                continue
            parts, numbers[name] = gptq_of(value.T, 32)
            result |= {f"{module}.{part}": each for part, each in parts.items()}
        return result

    plain = tmp_path / "plain"
    shutil.copytree(tmp_path, plain)
    set_config(rewritten(tmp_path, packed), quantization_config=GPTQ)
    rewritten(plain, lambda tensors: tensors | {name: each.T for name, each in numbers.items()})
    assert len(numbers) >= 4
    np.testing.assert_array_equal(logits(open_native(tmp_path, "fp32")), logits(open_native(plain, "fp32")))


@pytest.mark.one_in(10)
@pytest.mark.parametrize("precision", ["w4a8", "w8af32"])
def test_codes_are_kept_and_stand_for_the_same_numbers(precision: str, model: Path) -> None:
    opened = open_model(ModelSpec(str(model), "native", precision, threads=1))
    engine = opened.engine
    assert isinstance(engine, NativeEngine) and isinstance(engine.model._keep, PackedModel)
    packed = engine.model._keep
    checkpoint = open_checkpoint(model)
    kept = 0
    for weight, address in zip(packed.program.weights, packed.addresses, strict=True):
        if weight.storage is None:
            continue
        kept += 1
        start = address - packed.memory.address
        stored = np.frombuffer(packed.memory.view, np.uint8)[start : start + storage.packed_size(weight)]
        found = storage.unpack(weight, stored)
        np.testing.assert_array_equal(found, stacked(checkpoint, weight))
    assert kept >= 4
    assert opened.numeric_path["weights"].startswith(("awq", "gptq", "compressed-tensors", "gguf"))
    assert "rounded" not in opened.notes[0]


def stacked(checkpoint: Checkpoint, weight: Weight) -> np.ndarray:
    return np.concatenate(
        [checkpoint.rows(source, start, stop) for source in weight.sources for start, stop in source.ranges]
    )


@pytest.mark.one_in(12)
# A head in fp32, which some of these checkpoints have, is rounded to bf16: each of its weights by up to 2^-9, and a logit,
# which is a sum of products of both signs, by more of what is left of it. With a head in bf16 w8af32 differs by 1e-6.
@pytest.mark.parametrize(("precision", "most"), [("w8af32", 2**-8), ("w4abf16", 0.03), ("w4a8", 0.1)])
def test_what_is_kept_computes_what_its_numbers_do_up_to_the_rounding_of_activations(
    precision: str, most: float, model: Path
) -> None:
    wanted = logits(open_native(model, "fp32"))
    found = logits(open_native(model, precision))
    assert np.abs(found - wanted).max() <= most * np.abs(wanted).max()
    # No bit depends on how the tokens are fed.
    np.testing.assert_array_equal(logits(open_native(model, precision), pieces=(1, 7, 3)), found)


def test_matrices_of_one_input_may_be_quantised_in_different_ways(tmp_path: Path) -> None:
    """GGUF's mixtures: values in more bits than queries and keys, one layer's down in others than the next."""
    save_small(tmp_path, **WIDE)
    types = {"attn_v": "Q6_K", "attn_k": "Q8_0", "ffn_down": "Q5_K", "output": "Q6_K", "token_embd": "Q4_0"}

    def choose(name: str, values: np.ndarray) -> str:
        part = name.removesuffix(".weight").rpartition(".")[2]
        return "F32" if values.ndim == 1 else types.get(part, "Q4_K")

    path = write_gguf(tmp_path, tmp_path / "model.gguf", choose)
    wanted = logits(open_native(path, "fp32"))
    found = logits(open_native(path, "w8af32"))
    assert np.abs(found - wanted).max() <= 0.002 * np.abs(wanted).max()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("type_", "precision"), [("Q2_K", "w8a8"), ("IQ2_S", "w8a8"), ("IQ1_M", "w8a8"), ("NVFP4", "w4a8")]
)
def test_gguf_types_with_scales_for_16_columns_stay_packed(type_: str, precision: str, tmp_path: Path) -> None:
    path = small_gguf(tmp_path, type_, **WIDE)
    assert read_model_info(str(path)).made_for == precision
    assert read_program(path, PRECISIONS[precision]).weights.startswith(f"gguf {type_}")
    wanted = logits(open_native(dequantised(path, tmp_path / "numbers"), "fp32"))
    np.testing.assert_array_equal(logits(open_native(path, "fp32")), wanted)
    assert np.abs(logits(open_native(path, "w8af32")) - wanted).max() <= 2e-5 * np.abs(wanted).max()


def test_codes_that_the_kernels_have_no_storage_for_run_dequantised(tmp_path: Path) -> None:
    path = compressed(save_small(tmp_path), **INT4 | {"group_size": 16, "symmetric": False})
    with pytest.raises(ModelError, match=r"cannot be kept in .*groups of 16: .*--precision bf16 runs it"):
        read_program(path, PRECISIONS["w4a8"])
    assert read_program(path, PRECISIONS["bf16"]).weights.startswith("dequantised from compressed-tensors pack-quantized")
    wanted = logits(open_native(dequantised(path, tmp_path / "numbers"), "fp32"))
    np.testing.assert_array_equal(logits(open_native(path, "fp32")), wanted)


def test_what_the_checkpoint_leaves_unquantised_is_not_rounded(tmp_path: Path) -> None:
    path = packed_small(tmp_path, "awq")
    head = next(
        weight
        for weight in read_program(path, PRECISIONS["w4a8"]).program.weights
        if weight.sources and "lm_head" in weight.sources[0].name
    )
    assert head.format is Format.FP16
    bf16 = compressed(save_small(tmp_path / "other"), **INT4)
    formats = {
        weight.sources[0].name: weight.format
        for weight in read_program(bf16, PRECISIONS["w4a8"]).program.weights
        if weight.sources
    }
    assert formats["lm_head.weight"] is formats["model.embed_tokens.weight"] is Format.BF16


# A vocabulary, widths and a depth in which matrices, head and embedding have about the shares of a model of 1 to 8 billion.
IN_PROPORTION = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 2048,
}


def random_words(path: Path, kind: str) -> Path:
    """Weights of no meaning, in the form that AWQ or GPTQ has in groups of 128; all else in fp16."""

    def change(tensors: Tensors) -> Tensors:
        changed: Tensors = {}
        for name, value in tensors.items():
            if not is_linear(name):
                changed[name] = value.half()
                continue
            module, (rows, columns) = name.removesuffix(".weight"), value.shape
            shape = (columns, rows // 8) if kind == "awq" else (columns // 8, rows)
            words = {"qweight": shape, "qzeros": (columns // 128, rows // 8)}
            changed |= {f"{module}.{part}": torch.randint(-(1 << 31), 1 << 31, at).int() for part, at in words.items()}
            changed[f"{module}.scales"] = torch.full((columns // 128, rows), 0.01).half()
            if kind == "gptq":
                changed[f"{module}.g_idx"] = (torch.arange(columns) // 128).int()
        return changed

    rewritten(save_small(path, **IN_PROPORTION), change)
    set_config(path, dtype="float16", quantization_config=(AWQ if kind == "awq" else GPTQ) | {"group_size": 128})
    return path


REALISTIC: dict[str, Callable[[Path], Path]] = {
    "awq": lambda path: random_words(path, "awq"),
    "gptq": lambda path: random_words(path, "gptq"),
    "awq, rope of neighbours": lambda path: of_ernie(packed_small(path, "awq")),
    "gptq, rope of neighbours": lambda path: of_ernie(in_activation_order(packed_small(path, "gptq"))),
    "compressed int4, rope of neighbours": lambda path: of_ernie(compressed(save_small(path), **INT4)),
    "compressed int4": lambda path: compressed(save_small(path, **IN_PROPORTION), **INT4),
    "compressed int4, asymmetric": lambda path: compressed(save_small(path, **IN_PROPORTION), **INT4, symmetric=False),
    "fp8 by block": lambda path: block_fp8(save_small(path, **IN_PROPORTION), 128),
    "fp8 by row": lambda path: compressed(
        save_small(path, **IN_PROPORTION), format="float-quantized", num_bits=8, type="float", strategy="channel"
    ),
    "compressed int8": lambda path: compressed(
        save_small(path, **IN_PROPORTION), format="int-quantized", num_bits=8, strategy="channel", activations=INT8
    ),
    **{
        f"gguf {type_}": lambda path, type_=type_: small_gguf(path, type_, **IN_PROPORTION)  # type: ignore[misc]
        for type_ in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
    },
    "gguf Q4_K, head and embedding one": lambda path: small_gguf(path, "Q4_K", **IN_PROPORTION, tie_word_embeddings=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REALISTIC)
def test_it_takes_a_tenth_more_memory_than_its_file_at_most(name: str, tmp_path: Path) -> None:
    path = REALISTIC[name](tmp_path / "model")
    engine = open_native(path, "bf16" if name.startswith("fp8") else "w4a8")
    assert isinstance(engine.model._keep, PackedModel)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    entries = sum(file.stat().st_size for file in files)
    if path.suffix == ".gguf":
        # The tokenizer is in there as well.
        entries = sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
    assert engine.model._keep.size <= 1.1 * entries, f"{engine.model._keep.size / entries:.3f} times the file"


MADE_FOR = {
    "awq": "w4abf16",
    "gptq": "w4abf16",
    "compressed int4": "w4abf16",
    "compressed int8": "w8a8",
    "gguf Q8_0": "w8a8",
    "gguf Q4_0": "w4a8",
    "gguf IQ3_S": "w8a8",
}


@pytest.mark.parametrize("name", MADE_FOR)
def test_a_checkpoint_says_what_it_was_made_for(name: str, tmp_path: Path) -> None:
    assert read_model_info(str(MAKERS[name](tmp_path / "model"))).made_for == MADE_FOR[name]


def test_fp8_stays_packed_in_bf16_and_runs_dequantised_in_fp32(tmp_path: Path) -> None:
    path = block_fp8(save_small(tmp_path / "model"))
    assert read_model_info(str(path)).made_for == "bf16"
    with pytest.raises(ModelError, match=r"q_proj.* cannot be kept in its own format: fp8.*--precision bf16"):
        check_weights(str(path), "native", precision="w8af32")
    opened = open_model(ModelSpec(str(path), "native", "fp32", threads=1))
    assert opened.numeric_path["weights"].startswith("dequantised from fp8")
    wanted = dequantised(path, tmp_path)
    np.testing.assert_array_equal(logits(opened.engine), logits(open_native(wanted, "fp32")))  # type: ignore[arg-type]
    opened = open_model(ModelSpec(str(path), "native", "bf16", threads=1))
    assert opened.numeric_path["weights"].startswith("fp8, 8 bits, groups of 32")
    np.testing.assert_array_equal(logits(opened.engine), logits(open_native(wanted, "bf16")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scale", "activations"), [("weight_scale_inv", "activation_scale"), ("weight_scale", "input_scale")]
)
def test_fp8_may_have_one_scale_for_a_matrix(scale: str, activations: str, tmp_path: Path) -> None:
    """Mistral's, and what AutoFP8 writes."""
    path = save_small(tmp_path / "model")

    def change(found: Tensors) -> Tensors:
        for name in filter(is_linear, list(found)):
            largest, module = found[name].abs().max().float() / 448, name.removesuffix("weight")
            found[name] = (found[name] / largest).to(torch.float8_e4m3fn)
            found |= {f"{module}{scale}": largest, f"{module}{activations}": torch.tensor(0.02)}
        return found

    set_config(rewritten(path, change), quantization_config={"quant_method": "fp8", "activation_scheme": "static"})
    stored = load_file(path / "model.safetensors")
    plain = tmp_path / "plain"
    shutil.copytree(path, plain)
    set_config(plain, quantization_config=None, dtype="float32")
    rewritten(
        plain,
        lambda found: {
            name: value.float() * stored[f"{name.removesuffix('weight')}{scale}"] if is_linear(name) else value
            for name, value in found.items()
            if not name.endswith("_scale") and not name.endswith("_scale_inv")
        },
    )
    np.testing.assert_array_equal(logits(open_native(path, "fp32")), logits(open_native(plain, "fp32")))
    module = "model.layers.0.self_attn.q_proj"
    both = rewritten(
        path, lambda found: found | {f"{module}.{each}": torch.tensor(1.0) for each in ("weight_scale", "weight_scale_inv")}
    )
    assert 'is there twice, as "weight_scale_inv" and as "weight_scale"' in refused(both)


def test_what_cannot_be_computed_in_a_precision_is_said_in_a_sentence(tmp_path: Path) -> None:
    """On the hf engine, where each library computes with its codes as it does."""
    path = save_small(tmp_path / "model")
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    settings = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    set_config(path, quantization_config=settings | {"config_groups": groups, "ignore": ["lm_head"]})

    def change(found: Tensors) -> Tensors:
        for name in filter(is_linear, list(found)):
            (rows, columns), module = found.pop(name).shape, name.removesuffix("weight")
            found[f"{module}weight_packed"] = torch.full((rows, columns // 2), 0x22, dtype=torch.uint8)
            found[f"{module}weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
            found[f"{module}weight_global_scale"] = torch.ones(1)
        return found

    rewritten(path, change)
    with pytest.raises(ModelError, match=r"is quantised and cannot be computed in fp32 \(.+\); choose another precision"):
        open_model(ModelSpec(str(path), "hf", "fp32", threads=1))


def test_fp8_that_is_no_number_is_refused_by_name_in_bf16(tmp_path: Path) -> None:
    path = block_fp8(save_small(tmp_path / "model"))
    name = "model.layers.0.self_attn.q_proj.weight"

    def change(found: Tensors) -> Tensors:
        found[name].view(torch.uint8)[3, 5] = 0xFF
        return found

    rewritten(path, change)
    with pytest.raises(ModelError, match=r"q_proj.*not a finite number"):
        open_model(ModelSpec(str(path), "native", "bf16", threads=1))


def refused(path: Path, engine: str = "native") -> str:
    with pytest.raises(ModelError) as error:
        read_model_info(str(path))
        check_weights(str(path), engine, precision="w4a8")
    assert "\n" not in str(error.value)
    return str(error.value)


def changed(path: Path, **tensors: torch.Tensor | None) -> Path:
    """Other tensors; None takes one away. Dots of names are written as two underscores."""

    def change(found: Tensors) -> Tensors:
        given = {name.replace("__", "."): value for name, value in tensors.items()}
        return {name: value for name, value in (found | given).items() if value is not None}

    return rewritten(path, change)


UP = "model__layers__0__mlp__up_proj__"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"version": "gemv"}, "only gemm is read"),
        ({"version": "marlin"}, "only gemm is read"),
        ({"checkpoint_format": "gemv"}, "only gemm is read"),
        ({"bits": 3}, '"bits": 3; 4 is known'),
        ({"group_size": 48}, "groups of 48 do not divide"),
        ({"group_size": 64}, "qzeros' (awq) has shape (2, 8), (1, 8) is asked for"),
        ({"group_size": 0}, "groups of 0 do not divide"),
        ({"group_size": "large"}, "a whole number is needed"),
        ({"zero_point": False}, "zero points other than 8"),
        ({"quant_method": "hqq"}, "\"quant_method\" 'hqq': of quantised checkpoints"),
        ({"modules_to_not_convert": ["mlp"]}, "names it among the layers that are not"),
    ],
)
def test_awq_settings_that_are_not_honoured_are_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = packed_small(tmp_path, "awq", **settings)
    if settings == {"zero_point": False}:
        with pytest.raises(ModelError, match=said):
            open_native(path, "w4a8")
        return
    assert said in refused(path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"checkpoint_format": "marlin"}, "gptq and gptq_v2 are"),
        ({"is_marlin_format": True}, "layout of marlin"),
        ({"bits": 5}, '"bits": 5; 2, 3, 4, 8 are known'),
        ({"bits": 8}, "qweight' (gptq) has shape"),
        ({"dynamic": {"-:.*up_proj": {}}}, '"dynamic" in quantization_config says that it is not'),
        ({"dynamic": {"+:(": {}}}, "which is no pattern"),
        ({"group_size": 7}, "groups of 7 do not divide"),
        ({"rotation": "hadamard"}, '"rotation", which is not known here'),
    ],
)
def test_gptq_settings_that_are_not_honoured_are_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refused(packed_small(tmp_path, "gptq", **settings))


def test_a_gptq_order_that_gives_groups_different_sizes_is_refused(tmp_path: Path) -> None:
    path = changed(packed_small(tmp_path, "gptq"), **{f"{UP}g_idx": torch.zeros(64, dtype=torch.int32)})
    assert "does not give each group 32 columns" in refused(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"transform_config": {"config_groups": {"u": {}}}}, '"transform_config", which is not known here'),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, '"sparsity_config"'),
        ({"format": "marlin-24"}, "the format 'marlin-24'"),
        ({"quantization_status": "frozen"}, "\"quantization_status\": 'frozen'; compressed is known"),
        ({"ignore": ["re:.*mlp.*"]}, '"ignore" in quantization_config says that it is not'),
        ({"ignore": ["re:("]}, "which is no pattern"),
        ({"config_groups": {}}, 'has no "config_groups"'),
        (
            {"config_groups": {"a": {"targets": ["re:.*q_proj"], "weights": INT4}}},
            "no target in quantization_config names it",
        ),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": INT4 | {"group_size": 24}}}}, "groups of 24 do not"),
        ({"config_groups": {"a": {"targets": ["Linear"], "weights": INT4 | {"num_bits": 1}}}}, '"num_bits": 1; 2 to 8'),
    ],
)
def test_compressed_tensors_settings_that_are_not_honoured_are_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = compressed(save_small(tmp_path), **INT4)
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    set_config(path, quantization_config=settings | change)
    assert said in refused(path)


@pytest.mark.parametrize(
    ("eight_bits", "four_bits"),
    [
        (["re:.*mlp.*", "re:.*self_attn.*"], ["re:.*_proj"]),
        (["Linear", "re:model.*"], ["re:.*_proj"]),
        (["Linear"], ["Linear"]),
    ],
)
def test_a_layer_that_several_groups_name_is_of_the_one_that_the_library_takes(
    eight_bits: list[str], four_bits: list[str], tmp_path: Path
) -> None:
    groups = {"a": {"targets": eight_bits, "weights": INT4 | {"num_bits": 8}}, "b": {"targets": four_bits, "weights": INT4}}
    taken = {target: name for name, group in groups.items() for target in group["targets"]}
    first = match_targets("model.layers.0.mlp.down_proj", torch.nn.Linear(1, 1), taken)[0]
    assert taken[first] == "b", "the library's own reading"
    path = compressed(save_small(tmp_path), **INT4)
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    set_config(path, quantization_config=settings | {"config_groups": groups})
    check_weights(str(path), "native", precision="w4a8")


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("part", ["SCB", "qweight", "weight_scale_inv", "weight_packed"])
def test_scales_without_a_quantization_config_are_refused(engine: str, part: str, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj." + part
    path = rewritten(save_small(tmp_path), lambda tensors: tensors | {name: torch.ones(128)})
    assert f"the checkpoint holds {name!r}, as quantised ones do" in refused(path, engine)


def test_scales_that_no_library_takes_for_itself_are_refused_on_the_hf_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_loading, "batching_of", lambda path, fused: Batching(True))
    path = rewritten(
        save_small(tmp_path / "model"),
        lambda found: found | {f"{name}_scale": torch.ones(1) for name in found if is_linear(name)},
    )
    set_config(path, quantization_config={"quant_method": "another"})
    with pytest.raises(ModelError, match=r"down_proj\.weight_scale' and 6 more, which no part of this model asks for"):
        open_model(ModelSpec(str(path), "hf", "fp32", threads=1))


def test_tensors_that_nobody_asked_for_are_refused(tmp_path: Path) -> None:
    path = rewritten(save_small(tmp_path), lambda tensors: tensors | {"model.layers.0.adapter.weight": torch.ones(2)})
    assert "'model.layers.0.adapter.weight', which no part of this model asks for" in refused(path)
    more = rewritten(path, lambda tensors: tensors | {"model.layers.1.mlp.up_proj.weight": torch.ones(2)})
    assert "'model.layers.0.adapter.weight' and 1 more" in refused(more)


def test_buffers_that_follow_from_the_configuration_may_be_there(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    check_weights(str(rewritten(save_small(tmp_path), lambda tensors: tensors | {name: torch.ones(2)})), "native")


def test_both_forms_of_a_layer_are_refused(tmp_path: Path) -> None:
    path = changed(packed_small(tmp_path, "awq"), **{f"{UP}weight": torch.ones(128, 64)})
    assert 'is there twice, as "qweight" and as "weight"' in refused(path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    assert 'up_proj\' (awq) lacks its "scales"' in refused(changed(packed_small(tmp_path, "awq"), **{f"{UP}scales": None}))


def test_gate_and_up_of_different_kinds_are_refused(tmp_path: Path) -> None:
    save_small(tmp_path, **WIDE)
    path = write_gguf(
        tmp_path,
        tmp_path / "model.gguf",
        lambda name, values: "F32" if values.ndim == 1 else "Q8_0" if "ffn_up" in name else "Q4_K",
    )
    assert "gate_proj.weight and model.layers.0.mlp.up_proj.weight are quantised in different ways" in refused(path)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "(.*)*x", ".*.*.*.*.*x", "(?:(?:a{1,99}){1,99})x", "(a|b.*?)+?"])
def test_a_pattern_that_could_be_matched_for_ever_is_refused(pattern: str) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {f"-:{pattern}": {}}}
    with pytest.raises(ModelError, match="could take for ever to match"):
        read_quantisation({"quantization_config": settings}, "config.json")


@pytest.mark.parametrize("pattern", [r".*\.(18|19)\..*(gate|up)_proj$", r"model\.layers\.\d+\.mlp\..*", "lm_head"])
def test_patterns_that_checkpoints_have_are_taken(pattern: str) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {f"+:{pattern}": {"bits": 8}}}
    assert read_quantisation({"quantization_config": settings}, "config.json") is not None


def test_the_native_engine_supports_what_comes_quantised(tmp_path: Path) -> None:
    assert native_supports(str(packed_small(tmp_path, "awq"))) is None


def test_biases_of_zeros_beside_gptqs_codes_say_nothing(tmp_path: Path) -> None:
    """AutoGPTQ wrote them for layers that have none; others are a part of the model that config.json knows nothing of."""
    path = packed_small(tmp_path, "gptq")
    rows = read_program(path, PRECISIONS["w4abf16"])
    zeros = torch.zeros(128, dtype=torch.float16)
    changed(path, **{f"{UP}bias": zeros})
    assert read_program(path, PRECISIONS["w4abf16"]) == rows
    changed(path, **{f"{UP}bias": zeros + 0.5})
    assert "up_proj.bias', which no part of this model asks for" in refused(path)
