"""Writes mlx_fixtures.safetensors: matrices that MLX quantised in each of its modes, and its dequantised weights in fp32.

pip install 'mlx[cpu]' safetensors numpy     # 0.32.4 made what is checked in
cd tests/support && python make_mlx_fixtures.py
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import save_file

OUT = Path(__file__).with_name("mlx_fixtures.safetensors")


def main() -> None:
    mx.random.seed(0)
    tensors: dict[str, np.ndarray] = {}
    for bits in (2, 3, 4, 5, 6, 8):
        matrix = mx.random.normal((4, 128)).astype(mx.float16)
        group = 32 if bits % 2 else 64
        words, scales, biases = mx.quantize(matrix, group_size=group, bits=bits)
        wide = scales.astype(mx.float32), biases.astype(mx.float32)
        expected = mx.dequantize(words, *wide, group_size=group, bits=bits)
        parts = {"weight": words, "scales": scales, "biases": biases, "expected": expected}
        tensors |= {f"affine {bits}.{name}": np.array(part) for name, part in parts.items()}
    for mode in ("mxfp4", "nvfp4", "mxfp8"):
        matrix = mx.random.normal((4, 128))
        words, scales = mx.quantize(matrix, mode=mode)
        expected = mx.dequantize(words, scales, mode=mode, dtype=mx.float32)
        parts = {"weight": words, "scales": scales, "expected": expected}
        tensors |= {f"{mode}.{name}": np.array(part) for name, part in parts.items()}
    save_file(tensors, OUT)


if __name__ == "__main__":
    main()
