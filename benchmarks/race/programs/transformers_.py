"""transformers in the race: ``generate``, with ``assistant_model`` or prompt lookup where assisted: one row at a time."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from protocol import LOOKUP, Answer, Request, Setup, candidates, numbered_modes, serve, timed
from transformers import AutoModelForCausalLM

# Every answer has the asked length, and every round the asked number of candidates.
SETTINGS = {
    "eos_token_id": None,
    "pad_token_id": 0,
    "do_sample": False,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}
# The longest that is looked for of a row's last tokens.
NGRAM = 3


class Transformers:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        transformers.logging.set_verbosity_error()
        self._target, self._draft = (self._set(self._load(path, setup)) for path in (setup.target, setup.draft))
        self._passes = 0
        self._target.register_forward_pre_hook(self._count)
        self.modes = {"plain": setup.most_rows, **dict.fromkeys(numbered_modes(setup.draft_tokens), 1)}
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        attention = f"{self._target.config._attn_implementation} attention"
        how = f"{attention}, {setup.threads} threads, {SETTINGS}, max_matching_ngram_size={NGRAM}"
        self.about = f"{self._named()}{versions}, bf16, {how}"

    def _load(self, path: str, setup: Setup) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    def _named(self) -> str:
        """What else runs its matrices, for ``about``."""
        return ""

    def _set(self, model: Any) -> Any:
        for name, value in SETTINGS.items():
            setattr(model.generation_config, name, value)
        return model

    def _count(self, *_: Any) -> None:
        self._passes += 1

    @torch.inference_mode()
    def answer(self, request: Request) -> Answer:
        ids = torch.tensor(request.prompts)
        by: dict[str, Any] = {}
        if request.mode.startswith(LOOKUP):
            by = {"prompt_lookup_num_tokens": candidates(request.mode), "max_matching_ngram_size": NGRAM}
        elif request.mode != "plain":
            self._draft.generation_config.num_assistant_tokens = candidates(request.mode)
            by = {"assistant_model": self._draft}

        def generate(new_tokens: int) -> tuple[list[list[int]], float | None]:
            self._passes = 0
            mask = torch.ones_like(ids)
            output = self._target.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **by)
            return output[:, ids.shape[1] :].tolist(), new_tokens / self._passes

        return timed(generate, request.new_tokens)


if __name__ == "__main__":
    serve(Transformers)
