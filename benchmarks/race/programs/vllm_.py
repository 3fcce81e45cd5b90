"""vLLM on CPUs in the race: its ``LLM`` class. The number of candidates is fixed when one starts: an engine for each.

``kind`` is a precision and, for an assisted engine, its mode: ``w8a8``, ``w8a8 k=3``, ``int4 lookup k=3``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from protocol import LOOKUP, Answer, Request, Setup, candidates, serve, timed
from quantised import awq

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
# Its fast path for AWQ: int8 activations.
os.environ.setdefault("VLLM_CPU_INT4_W4A8", "1")
import vllm
from vllm import LLM, SamplingParams

# What is said of its environment.
SETTINGS = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_INT4_W4A8")
# The longest that is looked for of a row's last tokens.
NGRAM = 3
MAKERS = {"int4": awq, "bf16": lambda source, work: source}


class Vllm:
    def __init__(self, setup: Setup) -> None:
        precision, _, mode = setup.kind.partition(" ")
        target, draft = (made(Path(path), precision, Path(setup.work)) for path in (setup.target, setup.draft))
        options: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": setup.longest,
            "max_num_seqs": setup.most_rows,
            "enable_prefix_caching": False,
        }
        if mode:
            lookup = {"method": "ngram", "prompt_lookup_max": NGRAM, "prompt_lookup_min": 1}
            by = lookup if mode.startswith(LOOKUP) else {"method": "draft_model", "model": str(draft)}
            options["speculative_config"] = {**by, "num_speculative_tokens": candidates(mode)}
        self._engine = LLM(model=str(target), disable_log_stats=False, **options)
        self.modes = {mode or "plain": setup.most_rows}
        set_to = " ".join(f"{name}={os.environ[name]}" for name in SETTINGS)
        self.about = f"vLLM {vllm.__version__}, {precision}, {set_to}, {options}"

    def answer(self, request: Request) -> Answer:
        prompts = [{"prompt_token_ids": prompt} for prompt in request.prompts]

        def generate(new_tokens: int) -> tuple[list[list[int]], float | None]:
            before = self._drafts()
            sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
            outputs = self._engine.generate(prompts, sampling, use_tqdm=False)
            # Each draft of a row is a pass that yielded tokens of it, and so is the prompt's.
            passes = self._drafts() - before + len(prompts)
            a_round = len(prompts) * new_tokens / passes if request.mode != "plain" else 1.0
            return [list(output.outputs[0].token_ids) for output in outputs], a_round

        return timed(generate, request.new_tokens)

    def _drafts(self) -> int:
        found = [metric.value for metric in self._engine.get_metrics() if metric.name == "vllm:spec_decode_num_drafts"]
        return int(sum(found))


def made(source: Path, precision: str, work: Path) -> Path:
    if precision in MAKERS:
        return MAKERS[precision](source, work)
    out = work / f"{precision}-{source.name}"
    if not (out / "config.json").is_file():
        raise SystemExit(f"vLLM: {out} is made by outrider quantize --bits 8, before the race")
    return out


if __name__ == "__main__":
    serve(Vllm)
