"""OpenVINO GenAI in the race: both models exported once with optimum-intel (int4, groups of 128), then ``LLMPipeline``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Answer, Setup, candidates, serve

EXPORT = "--task text-generation-with-past --weight-format int4 --group-size 128 --ratio 1.0 --sym"


class OpenVino:
    def __init__(self, setup: Setup) -> None:
        target, draft = (exported(Path(path), Path(setup.work)) for path in (setup.target, setup.draft))
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads, "PERFORMANCE_HINT": "LATENCY"}
        self._plain = openvino_genai.LLMPipeline(str(target), "CPU", **settings)
        beside = openvino_genai.draft_model(str(draft), "CPU", **settings)
        self._assisted = openvino_genai.LLMPipeline(str(target), "CPU", draft_model=beside, **settings)
        self.modes = ["plain", *(f"k={count}" for count in setup.draft_tokens)]
        self.about = f"OpenVINO GenAI {openvino_genai.get_version()}, int4 groups of 128"

    def generate(self, mode: str, prompt: list[int], new_tokens: int) -> Answer:
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        pipeline = self._plain
        if mode != "plain":
            pipeline, config.num_assistant_tokens = self._assisted, candidates(mode)
        ids = np.array([prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = pipeline.generate(inputs, config)
        tokens = list(result.tokens[0])
        accepted = 0 if mode == "plain" else result.extended_perf_metrics.get_num_accepted_tokens()
        return Answer(tokens, len(tokens) - accepted)


def exported(source: Path, work: Path) -> Path:
    out = work / f"openvino-{source.name}"
    if not (out / "openvino_model.xml").is_file():
        command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "-m", source, *EXPORT.split(), out]
        subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
    return out


if __name__ == "__main__":
    serve(OpenVino)
