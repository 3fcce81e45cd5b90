"""A Llama checkpoint in AWQ's int4, rounded to nearest: what vLLM's fastest int4 on CPUs reads. Needs NumPy alone."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint import tensors
from numpy.typing import NDArray

GROUP = 128
# Of eight neighbouring outputs, which one the four bits at 4i hold.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
TYPES = {"float16": "F16", "float32": "F32", "int32": "I32"}


def awq(source: Path, work: Path) -> Path:
    out = work / f"awq-{source.name}"
    if (out / "config.json").is_file():
        return out
    out.mkdir(parents=True, exist_ok=True)
    content: dict[str, NDArray[Any]] = {}
    for name, values in tensors(source):
        if ".layers." in name and values.ndim == 2:
            codes, zeros, scales = rounded(values)
            base = name.removesuffix(".weight")
            content |= {f"{base}.qweight": packed(codes), f"{base}.qzeros": packed(zeros), f"{base}.scales": scales}
        else:
            content[name] = values.astype(np.float16)
    write(out / "model.safetensors", content)
    for file in source.glob("*.json"):
        # config.json comes last, since it says that all else is there.
        if file.name != "config.json" and not file.name.endswith("index.json"):
            shutil.copy(file, out / file.name)
    config = json.loads((source / "config.json").read_text())
    config["dtype"] = "float16"
    config["quantization_config"] = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


def rounded(values: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float16]]:
    """Codes [inputs, outputs], zero points and scales [groups, outputs] of a matrix [outputs, inputs]."""
    groups = values.T.reshape(-1, GROUP, values.shape[0])
    low, high = np.minimum(groups.min(axis=1), 0), np.maximum(groups.max(axis=1), 0)
    scales = np.maximum((high - low) / 15, 1e-8).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, 15).astype(np.int32)
    codes = np.rint(groups / scales.astype(np.float32)[:, None]) + zeros[:, None]
    return np.clip(codes, 0, 15).astype(np.int32).reshape(values.shape[1], -1), zeros, scales


def packed(codes: NDArray[np.int32]) -> NDArray[np.int32]:
    eights = codes.reshape(len(codes), -1, 8)[:, :, ORDER].astype(np.uint32)
    words = np.zeros(eights.shape[:2], np.uint32)
    for place in range(8):
        words |= eights[:, :, place] << np.uint32(4 * place)
    return words.view(np.int32)


def write(path: Path, content: dict[str, NDArray[Any]]) -> None:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, values in content.items():
        header[name] = {
            "dtype": TYPES[str(values.dtype)],
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in content.values():
            file.write(np.ascontiguousarray(values).tobytes())
