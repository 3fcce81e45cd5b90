"""Random quantised rows in every scheme that the kernels store, as the readers of checkpoints return them."""

from __future__ import annotations

import numpy as np

from outrider.kernels.quantised import Levels, QuantisedRows, Scheme, Values
from outrider.kernels.storage import BY_FACTORS, LEAST_FACTOR, MOST_FACTOR

SCHEMES = {
    "gguf Q4_0": Scheme("gguf Q4_0", 4, 32),
    "gguf Q4_1": Scheme("gguf Q4_1", 4, 32, minima=True),
    "gguf Q5_0": Scheme("gguf Q5_0", 5, 32),
    "gguf Q5_1": Scheme("gguf Q5_1", 5, 32, minima=True),
    "gguf Q8_0": Scheme("gguf Q8_0", 8, 32),
    "gguf Q2_K": Scheme("gguf Q2_K", 2, 16, minima=True, super_group=256),
    "gguf Q4_K": Scheme("gguf Q4_K", 4, 32, minima=True, super_group=256),
    "gguf Q5_K": Scheme("gguf Q5_K", 5, 32, minima=True, super_group=256),
    "gguf Q6_K": Scheme("gguf Q6_K", 6, 16, super_group=256, signed_sub_scales=True),
    "gguf IQ3_S": Scheme("gguf IQ3_S", 5, 32, scale_type="F32"),
    "gguf IQ4_XS": Scheme("gguf IQ4_XS", 4, 32, values=Values.IQ4, scale_type="F32"),
    "gguf IQ4_NL": Scheme("gguf IQ4_NL", 4, 32, values=Values.IQ4),
    "gguf TQ2_0": Scheme("gguf TQ2_0", 2, 256, symmetric=False),
    "mlx 3 bits": Scheme("mlx", 3, 32, symmetric=False, minima=True, scale_type="BF16"),
    "mlx 4 bits": Scheme("mlx", 4, 64, symmetric=False, minima=True, scale_type="BF16"),
    "mlx 5 bits": Scheme("mlx", 5, 128, symmetric=False, minima=True),
    "mlx 6 bits": Scheme("mlx", 6, 64, symmetric=False, minima=True, scale_type="BF16"),
    "mlx 8 bits": Scheme("mlx", 8, 128, symmetric=False, minima=True, scale_type="BF16"),
    "mlx 8 bits by 32": Scheme("mlx", 8, 32, symmetric=False, minima=True, scale_type="F16"),
    "rounded on load": BY_FACTORS,
    "gguf MXFP4": Scheme("gguf MXFP4", 4, 32, values=Values.E2M1, scale_type="E8M0"),
    "nvfp4": Scheme("nvfp4", 4, 16, values=Values.E2M1, scale_type="F32"),
    "pack-quantized g16": Scheme("compressed-tensors", 4, 16, scale_type="BF16"),
    "gguf IQ2_S": Scheme("gguf IQ2_S", 8, 16, scale_type="F32"),
    "awq g128": Scheme("awq", 4, 128, symmetric=False),
    "awq g64": Scheme("awq", 4, 64, symmetric=False),
    "awq g32": Scheme("awq", 4, 32, symmetric=False),
    "gptq 8 bits g32": Scheme("gptq", 8, 32, symmetric=False),
    "gptq 2 bits": Scheme("gptq", 2, 64, symmetric=False),
    "pack-quantized g32": Scheme("compressed-tensors", 4, 32, scale_type="BF16"),
    "pack-quantized g64 fp32": Scheme("compressed-tensors", 4, 64, symmetric=False, scale_type="F32"),
    "int-quantized by row": Scheme("compressed-tensors", 8, 512, scale_type="F32"),
    "pack-quantized by row": Scheme("compressed-tensors", 4, 512, scale_type="BF16"),
    "groups of 96": Scheme("gptq", 4, 96, symmetric=False),
}


def random_rows(scheme: Scheme, rows: int, columns: int, seed: int = 0) -> QuantisedRows:
    """Weights are of the size columns^-0.5, so that activations stay near one."""
    generator = np.random.default_rng(seed)
    groups = -(-columns // scheme.group)
    codes = generator.integers(0, 1 << scheme.bits, (rows, columns)).astype(np.uint8)
    size = columns**-0.5 / (1 << scheme.bits - 1)
    scales = (generator.uniform(0.5, 1.5, (rows, groups)) * size).astype(np.float32)
    if scheme.group == 32 and not scheme.super_group and scheme.values is Values.INTEGER:
        scales *= generator.choice([-1, 1], scales.shape)
    if scheme.scale_type == "E8M0":
        scales = np.exp2(np.round(np.log2(abs(scales) * 4))).astype(np.float32)
    elif scheme.scale_type == "BF16":
        scales = (scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    elif scheme.scale_type == "F16":
        scales = scales.astype(np.float16).astype(np.float32)
    zeros = np.zeros((rows, groups), np.uint8)
    if scheme.values is Values.INTEGER and not scheme.minima:
        zeros += 1 << (scheme.bits - 1)
        if not scheme.symmetric:
            # In GPTQ's version 1 (stored zero point + 1) a zero point may be 2^bits, one more than the largest code.
            zeros = generator.integers(0, (1 << scheme.bits) + (scheme.bits < 8), zeros.shape).astype(np.uint8)
    if not scheme.super_group and scheme.minima:
        minima = abs(scales) * generator.uniform(0, 1 << scheme.bits, scales.shape).astype(np.float32)
        minima = minima.astype(np.float16).astype(np.float32)
        return QuantisedRows(scheme, codes, scales, zeros, np.where(scales < 0, -minima, minima))
    if not scheme.super_group:
        return QuantisedRows(scheme, codes, scales, zeros)
    supers = -(-columns // scheme.super_group)
    if scheme == BY_FACTORS:
        repeat = lambda values: np.repeat(values, 4, axis=1)[:, :groups]  # noqa: E731
        super_scales = (generator.uniform(0.5, 1.5, (rows, supers)) * size / 17 * 2).astype(np.float32)
        super_scales = (super_scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        factors = generator.integers(LEAST_FACTOR, MOST_FACTOR + 1, (rows, groups)).astype(np.int16)
        # Offsets are near the mean of the factor times a code, so that weights have a mean near zero.
        offsets = np.rint(factors * generator.uniform(0, 15, factors.shape)).astype(np.int16)
        scales, minima = repeat(super_scales) * factors, repeat(super_scales) * offsets
        return QuantisedRows(scheme, codes, scales, zeros, minima, Levels(super_scales, factors, sub_minima=offsets))
    most = 128 if scheme.signed_sub_scales else 16 if scheme.bits == 2 else 64
    low = -most if scheme.signed_sub_scales else 0
    half = lambda values: values.astype(np.float16).astype(np.float32)  # noqa: E731
    super_scales = half(generator.uniform(0.5, 1.5, (rows, supers)) * size / most * 2)
    subs = generator.integers(low, most, (rows, groups)).astype(np.int16)
    repeat = lambda values: np.repeat(values, scheme.super_group // scheme.group, axis=1)[:, :groups]  # noqa: E731
    scales = repeat(super_scales) * subs
    if not scheme.minima:
        return QuantisedRows(scheme, codes, scales, zeros, levels=Levels(super_scales, subs))
    # Weights have a mean near zero.
    super_minima = half(super_scales * (1 << scheme.bits) / 2)
    sub_minima = generator.integers(0, most, (rows, groups)).astype(np.int16)
    minima = (repeat(super_minima) * sub_minima).astype(np.float32)
    return QuantisedRows(scheme, codes, scales, zeros, minima, Levels(super_scales, subs, super_minima, sub_minima))
