"""The language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, which are Qwen2, Qwen3 and Qwen3-MoE.

The vision parts are separate files (mmproj), which are not needed for texts.
"""

from __future__ import annotations

from typing import Any

from outrider.workers.models.formats.gguf.architectures.architecture import Architecture
from outrider.workers.models.formats.gguf.architectures.left_out import SECTIONS, check_sections
from outrider.workers.models.formats.gguf.architectures.llama import ARCHITECTURES as DENSE
from outrider.workers.models.formats.gguf.architectures.mixtures import ARCHITECTURES as MIXTURES
from outrider.workers.models.formats.gguf.metadata import Metadata

# The key of the number of layers that get features of an image as well (deepstack).
DEEPSTACK = "n_deepstack_layers"


def _of_texts(architecture: Architecture) -> Architecture:
    def config(metadata: Metadata) -> dict[str, Any]:
        check_sections(metadata)
        return architecture.config(metadata)

    return Architecture(config, architecture.known | {SECTIONS, DEEPSTACK}, parts=architecture.parts)


ARCHITECTURES = {
    "qwen2vl": _of_texts(DENSE["qwen2"]),
    "qwen3vl": _of_texts(DENSE["qwen3"]),
    "qwen3vlmoe": _of_texts(MIXTURES["qwen3moe"]),
}
