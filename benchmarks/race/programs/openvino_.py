"""OpenVINO GenAI in the race: both models exported once with optimum-intel (int4, groups of 128), continuous batching."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino_tokenizers import convert_tokenizer
from protocol import LOOKUP, Answer, Request, Setup, candidates, numbered_modes, serve, timed
from transformers import PreTrainedTokenizerFast

EXPORT = "--task text-generation-with-past --weight-format int4 --group-size 128 --ratio 1.0 --sym"
CACHE_GB = 2
# The longest that is looked for of a row's last tokens.
NGRAM = 3


class OpenVino:
    def __init__(self, setup: Setup) -> None:
        target, draft = (exported(Path(path), Path(setup.work)) for path in (setup.target, setup.draft))
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads, "PERFORMANCE_HINT": "LATENCY"}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = CACHE_GB, setup.most_rows
        # Each prompt is read each time that it comes.
        scheduler.enable_prefix_caching = False
        pipeline = openvino_genai.ContinuousBatchingPipeline
        self._plain = pipeline(str(target), scheduler, "CPU", settings)
        beside = openvino_genai.draft_model(str(draft), "CPU", **settings)
        self._assisted = pipeline(str(target), scheduler, "CPU", settings | {"draft_model": beside})
        self._lookup = pipeline(str(target), scheduler, "CPU", settings | {"prompt_lookup": True})
        self.modes = dict.fromkeys(["plain", *numbered_modes(setup.draft_tokens)], setup.most_rows)
        self.about = (
            f"OpenVINO GenAI {openvino_genai.get_version()}, ContinuousBatchingPipeline, {EXPORT}, {settings}, "
            f"cache_size={CACHE_GB} max_num_seqs={setup.most_rows} enable_prefix_caching=False, max_ngram_size={NGRAM}"
        )

    def answer(self, request: Request) -> Answer:
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in request.prompts]

        def generate(new_tokens: int) -> tuple[list[list[int]], float | None]:
            config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
            pipeline = self._plain
            if request.mode != "plain":
                pipeline, config.num_assistant_tokens = self._assisted, candidates(request.mode)
            if request.mode.startswith(LOOKUP):
                pipeline, config.max_ngram_size = self._lookup, NGRAM
            results = pipeline.generate(tensors, [config] * len(tensors))
            return [list(result.m_generation_ids[0]) for result in results], None

        return timed(generate, request.new_tokens)


def exported(source: Path, work: Path) -> Path:
    out = work / f"openvino-{source.name}"
    if not (out / "openvino_model.xml").is_file():
        command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "-m", source, *EXPORT.split(), out]
        subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
    if not (out / "openvino_tokenizer.xml").is_file():
        # The pipeline will not open without one, and optimum-cli leaves out a tokenizer of a class that it does not know.
        names = json.loads((source / "tokenizer_config.json").read_text())
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(source / "tokenizer.json"),
            **{name: names[name] for name in ("bos_token", "eos_token") if names.get(name)},
        )
        for name, model in zip(
            ("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True
        ):
            openvino.save_model(model, out / f"openvino_{name}.xml")
    return out


if __name__ == "__main__":
    serve(OpenVino)
