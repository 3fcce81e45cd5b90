"""vLLM on CPUs in the race: two engines, since the number of candidates is fixed when one starts."""

from __future__ import annotations

import os

from protocol import Answer, Setup, candidates, serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
import vllm
from vllm import LLM, SamplingParams


class Vllm:
    def __init__(self, setup: Setup) -> None:
        os.environ["OMP_NUM_THREADS"] = str(setup.threads)
        common = dict(
            model=setup.target, dtype="bfloat16", max_model_len=setup.longest, max_num_seqs=1, disable_log_stats=False
        )
        self._engines = {"plain": LLM(**common)}
        for count in setup.draft_tokens[:1]:
            speculative = {"method": "draft_model", "model": setup.draft, "num_speculative_tokens": count}
            self._engines[f"k={count}"] = LLM(**common, speculative_config=speculative)
        self.modes = list(self._engines)
        self.about = f"vLLM {vllm.__version__}, bf16"

    def generate(self, mode: str, prompt: list[int], new_tokens: int) -> Answer:
        engine = self._engines[mode]
        before = self._drafts(mode)
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        [output] = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        # Each draft is one pass of the target, and so is the prompt.
        return Answer(tokens, self._drafts(mode) - before + 1 if candidates(mode) else len(tokens))

    def _drafts(self, mode: str) -> int:
        found = [m.value for m in self._engines[mode].get_metrics() if m.name == "vllm:spec_decode_num_drafts"]
        return int(sum(found))


if __name__ == "__main__":
    serve(Vllm)
