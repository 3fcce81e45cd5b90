"""What the hf engine does on this machine's devices, in process and without Ray: first whether it is right, then how fast.

    python benchmarks/accelerators.py [-m MODEL] [--drafts DRAFT suffix] [--precision bf16] [--only equality] [--json FILE]

Right: tiny models of several kinds (windows, chunks, soft caps, sinks, long rope), fp32, on each device: rows of different
lengths in one pass, candidates of which some are taken back, forks; the scores of transformers' own ``generate`` there.
Fast: tokens a second (prompts included) by batch and by candidates a round, plain, and with each draft on the same card, on
another and, by the native engine, on the CPU; how many texts differ from plain ones, and how many choices lay within
rounding of another. Devices are those that torch finds (cuda, xpu, cpu); where there is no card it says what the CPU does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from built import draft_of, opened, target_of
from job_runs import EXAMPLES, prompts_of

from benchmarks.families.settings import configuration
from outrider.workers.engines.hf import HfEngine
from outrider.workers.engines.hf_rows import HfRowEngine
from outrider.workers.errors import ModelError
from outrider.workers.messages import Row, RowResult
from outrider.workers.models.mask_token import mask_token_of
from outrider.workers.models.model_info import POCKET, POCKET_DRAFT, POCKET_PARALLEL, find
from outrider.workers.models.opening import OpenModel
from outrider.workers.models.probe import (
    CONTEXT,
    PROMPTS,
    agrees_after_a_fork,
    agrees_in_shared_passes,
    find_batching,
    prompt_of,
    written_by_transformers,
)
from outrider.workers.models.tokenizer import Tokenizer
from outrider.workers.models.twins import build_twin, twin_config

KINDS = ("llama", "gemma2", "gpt_oss", "llama4_text", "phi3, long rope", "qwen3_moe")
PROMPT_TOKENS, NEW_TOKENS = 128, 64
ROWS_A_PLACE = 2
SUFFIX, ANSWER_TOKENS = "suffix", 200_000


def devices() -> list[str]:
    """The devices that torch finds, the CPU last."""
    found = [f"{kind}:{index}" for kind in ("cuda", "xpu") for index in range(count_of(kind))]
    return [*found, "cpu"]


def count_of(kind: str) -> int:
    backend = getattr(torch, kind, None)
    return backend.device_count() if backend is not None and backend.is_available() else 0


def equality(device: str) -> Iterator[tuple[str, str]]:
    """For each kind of model, what gives other scores than transformers' own on the device; "" if nothing does.

    Only ways of running a model that this version of transformers supports are tried.
    """
    for kind in KINDS:
        try:
            batching = find_batching(configuration(kind))
        except ModelError as error:
            print(f"{kind} is refused with this transformers: {error}")
            continue
        model = build_twin(twin_config(configuration(kind))).to(device)
        texts = [written_by_transformers(model, prompt_of(length)) for length in PROMPTS]
        wrong = []
        for fused in (True, False) if batching.ragged else ():
            engine = HfEngine(model, CONTEXT, fused)
            name = "fused" if fused else "spelled out"
            if not agrees_in_shared_passes(engine, texts):
                wrong.append(f"{name}: rows side by side, candidates")
            if not agrees_after_a_fork(engine, texts[-1]):
                wrong.append(f"{name}: a fork")
            engine.release()
        if not agrees_in_shared_passes(HfRowEngine(model, CONTEXT, batching.feeding), texts[:1]):
            wrong.append("a row alone")
        yield kind, "; ".join(wrong)


def speed(arguments: argparse.Namespace, places: list[str]) -> Iterator[dict[str, Any]]:
    """Tokens a second on the first place: plain, and with each draft on the same device, on another and on the CPU."""
    device, path = places[0], find(arguments.model)
    target = opened(path, "hf", arguments.precision, device=device)
    print(f"{arguments.model} on {device}, {arguments.precision}: {'; '.join(target.notes) or 'several rows in a pass'}")
    tokenizer = Tokenizer(path)
    prompts = [tuple(tokenizer.encode(text))[:PROMPT_TOKENS] for text in prompts_of([arguments.prompts])]
    plain = {}
    for batch in arguments.batch:
        plain[batch], found = timed(target, None, batch, 0, prompts)
        yield {"batch": batch, "k": 0, "draft": "plain", **found}
    for name in arguments.drafts:
        for place, draft in opened_everywhere(name, arguments.draft_precision, places):
            for batch, k in itertools.product(arguments.batch, arguments.k):
                said, found = timed(target, draft, batch, k, prompts, suffix=name == SUFFIX)
                differ = sum(said[key] != text for key, text in plain[batch].items())
                yield {"batch": batch, "k": k, "draft": f"{name} {place}".strip(), "rows that differ": differ, **found}


def opened_everywhere(
    name: str, precision: str, places: list[str]
) -> Iterator[tuple[str, tuple[OpenModel, int | None] | None]]:
    """The draft on each possible place: the same card, another card, and the CPU, where the native engine runs it."""
    if name == SUFFIX:
        yield "", None
        return
    path = find(name)
    cards = [place for place in places if place != "cpu"]
    for card, said in zip(cards, ("on the same card", "on another"), strict=False):
        yield said, (opened(path, "hf", precision, device=card), mask_token_of(path))
    yield "on the CPU", (opened(path, "native", "w4a8", len(os.sched_getaffinity(0))), mask_token_of(path))


def timed(
    model: OpenModel,
    draft: tuple[OpenModel, int | None] | None,
    batch: int,
    k: int,
    prompts: Sequence[tuple[int, ...]],
    suffix: bool = False,
) -> tuple[dict[int, tuple[int, ...]], dict[str, float]]:
    """Runs rows to their ends, after a first batch that does not count (first calls are slow): texts and figures."""
    count = ROWS_A_PLACE * batch
    for first in (count, 0):
        built = None if draft is None else draft_of(draft[0], mask_token=draft[1])
        verifier = target_of(model, batch, k, built, answer_tokens=ANSWER_TOKENS if suffix else None).verifier
        rows = [Row(key, prompts[(first + key) % len(prompts)], NEW_TOKENS) for key in range(count)]
        verifier.add(rows)
        ended: dict[int, tuple[int, ...]] = {}
        started = time.perf_counter()
        while not verifier.idle:
            ended.update({each.key: each.tokens for each in verifier.round() if isinstance(each, RowResult)})
        seconds = time.perf_counter() - started
    assert len(ended) == len(rows)
    counted = verifier.counters
    return ended, {
        "tokens_per_second": counted.tokens / seconds,
        "tokens_a_round": counted.tokens / counted.row_rounds,
        "accepted": counted.accepted / counted.proposed if counted.proposed else 0.0,
        "near_ties": counted.near_ties,
    }


def shown(line: dict[str, Any]) -> str:
    said = f"batch {line['batch']}, {line['draft']}, k {line['k']}: {line['tokens_per_second']:,.0f} tokens/s"
    said += f", {line['tokens_a_round']:.2f} a round, {line['accepted']:.0%} accepted, {line['near_ties']} near ties"
    return said + (f", {line['rows that differ']} rows differ from plain" if line.get("rows that differ") else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=POCKET)
    parser.add_argument("--drafts", nargs="*", default=[POCKET_DRAFT, POCKET_PARALLEL, SUFFIX], help="models, and suffix")
    parser.add_argument("--prompts", type=Path, default=EXAMPLES, help="JSON lines with a prompt each")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--draft-precision", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--k", type=int, nargs="+", default=[4, 8])
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
        # By default cards multiply fp32 matrices with fewer bits (TF32), which would not test equality.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        for device in places:
            found["equality"][device] = dict(equality(device))
            for kind, why in found["equality"][device].items():
                print(f"{device}: {kind}: {why or 'right'}", flush=True)
                wrong = wrong or bool(why)
    if arguments.only != "equality":
        for line in speed(arguments, places):
            found["speed"].append(line)
            print(shown(line), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
