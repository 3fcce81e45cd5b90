"""transformers in the race: ``generate``, with ``assistant_model`` where assisted, which takes one row at a time."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from protocol import Answer, Request, Setup, candidates, serve, timed
from transformers import AutoModelForCausalLM

# Every answer has the asked length, and every round the asked number of candidates.
SETTINGS = {
    "eos_token_id": None,
    "pad_token_id": 0,
    "do_sample": False,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}


class Transformers:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        transformers.logging.set_verbosity_error()
        self._target, self._draft = self._load(setup.target), self._load(setup.draft)
        self._passes = 0
        self._target.register_forward_pre_hook(self._count)
        self.modes = {"plain": setup.most_rows, **{f"k={count}": 1 for count in setup.draft_tokens}}
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.about = f"{versions}, bf16, sdpa attention, {setup.threads} threads, {SETTINGS}"

    def _load(self, path: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        settings = model.generation_config
        for name, value in SETTINGS.items():
            setattr(settings, name, value)
        return model

    def _count(self, *_: Any) -> None:
        self._passes += 1

    @torch.inference_mode()
    def answer(self, request: Request) -> Answer:
        ids = torch.tensor(request.prompts)
        self._draft.generation_config.num_assistant_tokens = candidates(request.mode) or 1

        def generate(new_tokens: int) -> tuple[list[list[int]], float | None]:
            self._passes = 0
            output = self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                assistant_model=self._draft if request.mode != "plain" else None,
            )
            return output[:, ids.shape[1] :].tolist(), new_tokens / self._passes

        return timed(generate, request.new_tokens)


if __name__ == "__main__":
    serve(Transformers)
