"""What the hf engine does on this machine's devices, in process and without Ray: first whether it is right, then how fast.

    python benchmarks/accelerators.py [-m MODEL] [--draft DRAFT] [--precision bf16] [--only equality] [--json FILE]

Right: tiny models of several kinds (windows, chunks, soft caps, sinks, long rope), fp32, on each device: rows of different
lengths in one pass, candidates of which some are taken back, forks; the scores of transformers' own ``generate`` there.
Fast: tokens a second by batch and by candidates a round, plain, and with the draft on the same card, on another and on the
CPU. Devices are those that torch finds (cuda, xpu, cpu); where there is no card it says what the CPU does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from built import draft_of, opened, target_of

from benchmarks.families.settings import configuration
from outrider.workers.engines.hf import HfEngine
from outrider.workers.engines.hf_rows import HfRowEngine
from outrider.workers.messages import Row
from outrider.workers.models.model_info import POCKET, POCKET_DRAFT, find
from outrider.workers.models.opening import OpenModel
from outrider.workers.models.probe import (
    CONTEXT,
    PROMPTS,
    prompt_of,
    same_after_a_fork,
    same_in_company,
    written_by_transformers,
)
from outrider.workers.models.twins import build_twin, twin_config

KINDS = ("llama", "gemma2", "gpt_oss", "llama4_text", "phi3, long rope", "qwen3_moe")
PROMPT_TOKENS, NEW_TOKENS = 128, 64


def devices() -> list[str]:
    """Cards first."""
    found = [f"{kind}:{index}" for kind in ("cuda", "xpu") for index in range(count_of(kind))]
    return [*found, "cpu"]


def count_of(kind: str) -> int:
    backend = getattr(torch, kind, None)
    return backend.device_count() if backend is not None and backend.is_available() else 0


def equality(device: str) -> Iterator[tuple[str, str]]:
    """Of each kind of model: what does not give transformers' own scores on the device; nothing where all does."""
    for kind in KINDS:
        model = build_twin(twin_config(configuration(kind))).to(device)
        texts = [written_by_transformers(model, prompt_of(length)) for length in PROMPTS]
        wrong = []
        for fused in (True, False):
            engine = HfEngine(model, CONTEXT, fused)
            name = "fused" if fused else "spelled out"
            if not same_in_company(engine, texts):
                wrong.append(f"{name}: rows side by side, candidates")
            if not same_after_a_fork(engine, texts[-1]):
                wrong.append(f"{name}: a fork")
            engine.release()
        if not same_in_company(HfRowEngine(model, CONTEXT), texts[:1]):
            wrong.append("a row alone")
        yield kind, "; ".join(wrong)


def speed(arguments: argparse.Namespace, places: list[str]) -> Iterator[dict[str, Any]]:
    """Tokens a second on the first place, plain and with the draft wherever it may be."""
    device = places[0]
    target = opened(find(arguments.model), "hf", arguments.precision, device=device)
    print(f"{arguments.model} on {device}, {arguments.precision}: {'; '.join(target.notes) or 'several rows in a pass'}")
    model_infos = [place for place in places[1:] if place != "cpu"]
    drafts = {device: "the same device"} | dict.fromkeys(model_infos[:1], "another card")
    drafts |= {} if device == "cpu" else {"cpu": "the CPU"}
    for batch in arguments.batch:
        yield {"device": device, "batch": batch, "k": 0, "draft": "", **timed(target, None, batch, 0)}
    for place, name in drafts.items():
        draft = opened(find(arguments.draft), "hf", arguments.draft_precision, device=place)
        for batch in arguments.batch:
            for k in arguments.k:
                found = timed(target, draft, batch, k)
                yield {"device": device, "batch": batch, "k": k, "draft": name, **found}


def timed(model: OpenModel, draft: OpenModel | None, batch: int, k: int) -> dict[str, float]:
    """A batch of rows from their prompts to their ends, the second time (the first call of anything is slow)."""
    random = np.random.default_rng(batch)
    prompts = random.integers(5, min(model.engine.vocabulary, 4000), size=(batch, PROMPT_TOKENS))
    for _ in range(2):
        verifier = target_of(model, batch, k, None if draft is None else draft_of(draft)).verifier
        verifier.add(Row(key, tuple(map(int, prompt)), NEW_TOKENS) for key, prompt in enumerate(prompts))
        ended, first = 0, 0.0
        started = time.perf_counter()
        while not verifier.idle:
            ended += len(verifier.round())
            first = first or time.perf_counter() - started
    seconds = time.perf_counter() - started
    assert ended == batch
    proposed, accepted = verifier.counters.proposed, verifier.counters.accepted
    return {
        "tokens_per_second": batch * NEW_TOKENS / seconds,
        "first_round_seconds": first,
        "held": accepted / proposed if proposed else 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=POCKET)
    parser.add_argument("--draft", default=POCKET_DRAFT)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--draft-precision", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--k", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--only", choices=("equality", "speed"))
    parser.add_argument("--json", type=Path, help="everything that was found, for docs")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    places = devices()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; devices: {', '.join(places)}")
    if places == ["cpu"]:
        print("no accelerator is found here: what follows is the CPU's, and says nothing of a card")
    found: dict[str, Any] = {"torch": torch.__version__, "devices": places, "equality": {}, "speed": []}
    wrong = False
    if arguments.only != "speed":
        # By default cards compute fp32 matrices with fewer bits, which is not what is asked here.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        for device in places:
            found["equality"][device] = dict(equality(device))
            for kind, why in found["equality"][device].items():
                print(f"{device}: {kind}: {why or 'right'}", flush=True)
                wrong = wrong or bool(why)
    if arguments.only != "equality":
        for line in speed(arguments, places):
            found["speed"].append(line)
            draft = f"draft on {line['draft']}, k {line['k']}, {line['held']:.0%} held" if line["draft"] else "plain"
            print(f"batch {line['batch']}: {line['tokens_per_second']:,.0f} tokens/s, {draft}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
