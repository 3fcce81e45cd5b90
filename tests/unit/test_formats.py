"""Readers of quantised checkpoints against the formats' own libraries: bit for bit after dequantising.

format_fixtures.safetensors holds random words and what auto-round's own layers make of them (make_format_fixtures.py);
compressed-tensors and gguf are asked here.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from gguf_models import SCALES
from numpy.typing import NDArray
from quantised_models import block_fp8, compressed, packed_small, save_small
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from outrider.kernels.program import Tensor
from outrider.kernels.quantised import natural_order
from outrider.workers.errors import ModelError
from outrider.workers.models.checkpoint import open_checkpoint
from outrider.workers.models.formats.configuration import read_quantisation
from outrider.workers.models.formats.gguf.blocks import BY_NAME
from outrider.workers.models.formats.matrix import Matrix
from outrider.workers.models.formats.raw import RawTensors, unpacked
from outrider.workers.models.headers import read_header

FIXTURES = Path(__file__).parents[1] / "support" / "format_fixtures.safetensors"
INPUTS, OUTPUTS, GROUP = 128, 32, 32


def dequantised(matrix: Matrix, *cuts: int) -> NDArray[np.float32]:
    """All rows, read in pieces that end at the cuts."""
    ends = [0, *cuts, matrix.shape[0]]
    rows = [matrix.rows(start, stop).dequantise() for start, stop in pairwise(ends)]
    return natural_order(np.concatenate(rows), matrix.order)


def fixture_matrix(name: str, tmp_path: Path, settings: dict[str, Any]) -> tuple[Matrix, NDArray[np.float16]]:
    parts = {
        key.removeprefix(f"{name}."): value for key, value in load_file(FIXTURES).items() if key.startswith(f"{name}.")
    }
    expected = parts.pop("expected")
    save_file({f"layer.{part}": value for part, value in parts.items()}, tmp_path / "model.safetensors")
    quantisation = read_quantisation({"quantization_config": settings}, "config.json")
    assert quantisation is not None
    raw = RawTensors(read_header(tmp_path / "model.safetensors"))
    matrix = quantisation.matrix(raw, "layer", (OUTPUTS, INPUTS))
    assert matrix is not None
    assert set(matrix.parts) == {f"layer.{part}" for part in parts}
    return matrix, expected


def test_awq_is_what_its_library_makes_of_it(tmp_path: Path) -> None:
    matrix, expected = fixture_matrix("awq", tmp_path, {"quant_method": "awq", "bits": 4, "group_size": GROUP})
    np.testing.assert_array_equal(dequantised(matrix, 3, 17).astype(np.float16), expected.T)


@pytest.mark.parametrize("name", ["v1-4", "v2-4", "v1-8", "v2-8", "v1-4-ordered", "v2-8-ordered"])
def test_gptq_is_what_its_library_makes_of_it(name: str, tmp_path: Path) -> None:
    version, bits, *_ = name.split("-")
    settings = {
        "quant_method": "gptq",
        "bits": int(bits),
        "group_size": GROUP,
        "sym": False,
        "desc_act": name.endswith("ordered"),
        "checkpoint_format": "gptq" if version == "v1" else "gptq_v2",
    }
    matrix, expected = fixture_matrix(f"gptq-{name}", tmp_path, settings)
    assert matrix.scheme.ordered == name.endswith("ordered")
    np.testing.assert_array_equal(dequantised(matrix, 5).astype(np.float16), expected.T)


def test_the_one_that_gptq_takes_from_zero_points_is_given_back_to_whole_words(tmp_path: Path) -> None:
    """As gptqmodel does: a zero point of 0 has borrowed from its neighbour."""
    zeros = np.array([[0, 3, 0, 0, 8, 15, 1, 2] * 4] * (INPUTS // GROUP))
    whole = (zeros.reshape(-1, 4, 8).astype(np.uint64) << (4 * np.arange(8, dtype=np.uint64))).sum(axis=2)
    stored = ((whole - 0x11111111) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    parts = {key.removeprefix("gptq-v1-4."): value for key, value in load_file(FIXTURES).items()}
    keep = {f"layer.{part}": parts[part] for part in ("qweight", "scales", "g_idx")}
    save_file(keep | {"layer.qzeros": stored}, tmp_path / "model.safetensors")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
    quantisation = read_quantisation({"quantization_config": settings}, "config.json")
    assert quantisation is not None
    matrix = quantisation.matrix(RawTensors(read_header(tmp_path / "model.safetensors")), "layer", (OUTPUTS, INPUTS))
    assert matrix is not None
    np.testing.assert_array_equal(matrix.rows(0, OUTPUTS).zeros, zeros.T)


@pytest.mark.parametrize("bits", range(2, 9))
def test_numbers_of_any_width_are_unpacked(bits: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (3, 50), dtype=torch.int8)
    found = unpacked(pack_to_int32(values, bits).numpy(), bits, 50)
    np.testing.assert_array_equal(found.astype(np.int16) - (1 << (bits - 1)), values.numpy())


INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
COMPRESSED: dict[str, dict[str, Any]] = {
    "int4 by group": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
    "int4 by group, asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    "int4 by row": {"num_bits": 4, "strategy": "channel", "symmetric": True},
    "int8 by row, asymmetric": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "int8 by group": {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": True},
    "int3 by group": {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": True},
    "int8 as it is": {
        "format": "int-quantized",
        "num_bits": 8,
        "strategy": "channel",
        "symmetric": True,
        "activations": INT8,
    },
    "int8 for everything": {"format": "int-quantized", "num_bits": 8, "strategy": "tensor", "symmetric": True},
    "fp8 by row": {"format": "float-quantized", "num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 for everything": {"format": "float-quantized", "num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8 by block": {
        "format": "float-quantized",
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [32, 32],
    },
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_is_what_its_library_makes_of_it(name: str, tmp_path: Path) -> None:
    settings = dict(COMPRESSED[name])
    path = compressed(save_small(tmp_path), **settings)
    settings.pop("activations", None)
    compressor = BaseCompressor.get_value_from_registry(settings.pop("format", "pack-quantized"))
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**settings))
    tensors = load_torch(path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    modules = {key.rpartition(".")[0] for key in tensors if key.endswith("_scale")}
    assert len(modules) == 7
    for module in modules:
        parts = {key.rpartition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{module}.")}
        expected = compressor.decompress(parts, scheme)["weight"]
        matrix = checkpoint.matrix(Tensor(f"{module}.weight", tuple(expected.shape)))
        assert matrix is not None
        # The library rounds the product to the scales' type.
        found = torch.from_numpy(dequantised(matrix, 7)).to(torch.bfloat16)
        assert torch.equal(found, expected.to(torch.bfloat16))


def test_compressed_tensors_in_activation_order(tmp_path: Path) -> None:
    """What older versions of the library wrote: the group of every column."""
    path = compressed(save_small(tmp_path), num_bits=4, strategy="group", group_size=32, symmetric=True)
    tensors = load_torch(path / "model.safetensors")
    module = "model.layers.0.mlp.down_proj"
    groups = (torch.arange(128, dtype=torch.int32) // 32)[torch.randperm(128, generator=torch.Generator().manual_seed(1))]
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    codes = unpack_from_int32(tensors[f"{module}.weight_packed"], 4, torch.Size((64, 128)))
    expected = codes * tensors[f"{module}.weight_scale"][:, groups.long()].float()
    torch_save(path, tensors | {f"{module}.weight_g_idx": groups})
    matrix = open_checkpoint(path).matrix(Tensor(f"{module}.weight", (64, 128)))
    assert matrix is not None and matrix.scheme.ordered
    np.testing.assert_array_equal(dequantised(matrix), expected.numpy())


def torch_save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file as save

    save(tensors, path / "model.safetensors")


def test_fp8_by_block(tmp_path: Path) -> None:
    path = block_fp8(save_small(tmp_path))
    tensors = load_torch(path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    for name in (name for name in tensors if name.endswith("_proj.weight")):
        scales = tensors[f"{name}_scale_inv"].repeat_interleave(32, 0).repeat_interleave(32, 1)
        matrix = checkpoint.matrix(Tensor(name, tuple(tensors[name].shape)))
        assert matrix is not None
        np.testing.assert_array_equal(dequantised(matrix, 31), (tensors[name].float() * scales).numpy())


@pytest.mark.parametrize("name", [name for name, kind in BY_NAME.items() if kind.unpack is not None])
def test_gguf_blocks_are_what_the_library_makes_of_them(name: str) -> None:
    kind = BY_NAME[name]
    assert kind.scheme is not None and kind.unpack is not None
    packed = np.random.default_rng(0).integers(0, 256, (40, 3, kind.bytes), np.uint8)
    halves = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "MXFP4": (), **SCALES}.get(name, (0, 2))
    for at in halves:
        # No infinities, no numbers that are none.
        packed[..., at + 1] &= 0xBB
    if name == "MXFP4":
        packed[..., 0] %= 250
    if name == "IQ1_M":
        packed[..., 55] &= 0xBF
    if name == "NVFP4":
        # Of e4m3's 127 the package makes nan, and llama.cpp's own code 0, as is done here.
        packed[..., :4] &= 0x77
    packed[1] = 0
    rows = kind.unpack(kind.scheme, packed)
    np.testing.assert_array_equal(rows.dequantise(), _by_the_library(name, packed))


def _by_the_library(name: str, packed: np.ndarray) -> np.ndarray:
    kind = BY_NAME[name]
    if name in ("Q1_0", "Q2_0"):
        # Which the package does not read: signs, and two bits less one.
        codes = packed[..., 2:, None] >> np.arange(0, 8, 8 * (kind.bytes - 2) // kind.values, dtype=np.uint8)
        values = 2.0 * (codes & 1) - 1 if name == "Q1_0" else (codes & 3) - 1.0
        scales = np.ascontiguousarray(packed[..., :2]).view(np.float16).astype(np.float32)
        found: np.ndarray = (values.reshape(*packed.shape[:2], -1).astype(np.float32) * scales).reshape(len(packed), -1)
        return found
    type_ = getattr(gguf.GGMLQuantizationType, name)
    assert (kind.values, kind.bytes) == gguf.GGML_QUANT_SIZES[type_]
    return np.asarray(gguf.dequantize(packed.reshape(len(packed), -1), type_))


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = packed_small(tmp_path, "awq")
    tensors = load_torch(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.scales"][1, 2] = float("inf")
    torch_save(path, tensors)
    matrix = open_checkpoint(path).matrix(Tensor("model.layers.0.mlp.up_proj.weight", (128, 64)))
    assert matrix is not None
    with pytest.raises(ModelError, match=r"up_proj\.scales' \(awq\) holds a scale that is not a finite number"):
        matrix.rows(0, 1)
