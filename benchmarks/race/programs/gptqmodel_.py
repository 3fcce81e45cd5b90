"""gptqmodel in the race: its int4 kernels for CPUs under transformers' ``generate``, with checkpoints in AWQ.

Of its kernels it takes the fastest that the processor has: its own where there is AVX-512 BF16, else those of ATen, which
without AVX-512 are slower by far in fp16 than in bf16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from protocol import Setup, serve
from quantised import awq
from transformers_ import Transformers


class GptqModel(Transformers):
    def _load(self, path: str, setup: Setup) -> Any:
        # It prints while it is imported, which must not come among the answers.
        from gptqmodel import GPTQModel

        checkpoint = str(awq(Path(path), Path(setup.work)))
        return GPTQModel.load(checkpoint, device="cpu", dtype=torch.bfloat16).model.eval()

    def _named(self) -> str:
        import gptqmodel

        kernel = type(self._target.model.layers[0].mlp.up_proj).__name__
        return f"gptqmodel {gptqmodel.__version__}, int4 (AWQ), {kernel}, "


if __name__ == "__main__":
    serve(GptqModel)
