"""The tensors of a checkpoint in safetensors as fp32, by NumPy alone: an engine's environment may have nothing else."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def tensors(source: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = struct.unpack("<Q", stream.read(8))[0]
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, stop = entry["data_offsets"]
                stream.seek(8 + length + start)
                yield name, decoded(stream.read(stop - start), entry["dtype"]).reshape(entry["shape"])


def decoded(raw: bytes, dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (np.frombuffer(raw, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, dtype={"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)
