"""How many bytes a model's weights take, from the sizes of its files."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from outrider.workers.errors import ModelError

# The first kind that is there counts: many checkpoints ship the same weights twice.
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.bin")


def weights_bytes(model: str) -> int:
    """For a local directory, or for ``pocket`` and ``pocket-draft``, the bundled pair."""
    if model in ("pocket", "pocket-draft"):
        folder = Path(str(files("outrider.workers"))) / "pocket" / ("draft" if model == "pocket-draft" else "target")
    else:
        folder = Path(model)
    for pattern in WEIGHT_FILES:
        if found := list(folder.glob(pattern)):
            return sum(path.stat().st_size for path in found)
    raise ModelError(f'"{model}" is no local directory with weights: give its size with --model-bytes or --draft-bytes')
