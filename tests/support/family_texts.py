"""Compares the native engine's texts of a tiny checkpoint (a batch of rows, with candidates) with transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from native_models import open_native
from tiny_models import one_by_one
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.families.check import TIE, write
from outrider.workers.models.probe import written_by_transformers
from outrider.workers.models.twins import attention_of

LENGTHS = (3, 17, 46, 60, 85, 110)
WRITTEN = 16
# Types of rope whose angles depend on the length of the text.
BY_LENGTH = ("longrope", "dynamic")


def prompt(length: int, seed: int, vocabulary: int) -> list[int]:
    """A random part that is repeated, so that lookup proposes candidates, with other tokens in between."""
    ids = [7 + (seed * 13 + length + index * 37) % (vocabulary - 8) for index in range(7)]
    return [ids[index % 7] if index % 11 else 7 + (index * 5) % (vocabulary - 8) for index in range(length)]


def is_what_it_would_write(model: PreTrainedModel, given: list[int], written: list[int]) -> bool:
    """Whether each written token is the model's argmax: one pass instead of a pass for each token of a generation.

    False for models whose rope depends on the length of the text: in a generation earlier keys may keep other angles.
    """
    if any(f'"{kind}"' in model.config.to_json_string() for kind in BY_LENGTH):
        return False
    scores = model(input_ids=torch.tensor([given + written[:-1]]), use_cache=False).logits[0, len(given) - 1 :]
    return bool(scores.argmax(-1).tolist() == written)


def difference(model: PreTrainedModel, given: list[int], written: list[int]) -> str:
    """A sentence about the first token that differs from transformers' text; "" if none does, or two scores tie there."""
    if is_what_it_would_write(model, given, written):
        return ""
    expected = written_by_transformers(model, given, len(written))
    for place, (ours, theirs) in enumerate(zip(written, expected.written, strict=True)):
        if ours != theirs:
            scores = expected.scores[place]
            lead = float(scores[theirs] - scores[ours]) / float(scores.abs().max())
            return "" if lead < TIE else f"of {len(given)} tokens: token {place} is {ours}, not {theirs} ({lead:.1e})"
    return ""


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
@torch.inference_mode()
def differences(
    path: Path, seed: int = 0, precision: str = "fp32", reader: type[Any] = AutoModelForCausalLM
) -> tuple[list[str], int]:
    """(sentences about differing texts, number of candidates that were tried). ``reader`` is transformers' class for such
    checkpoints."""
    attention = attention_of(AutoConfig.from_pretrained(path), fused=False)
    reference = reader.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()
    # Tiny models need one thread only; on a busy machine several would wait for each other.
    one_by_one(reference)
    engine = open_native(path, precision, threads=1)
    prompts = [prompt(length, seed, engine.vocabulary) for length in LENGTHS]
    texts, (proposed, _) = write(engine, prompts)
    found = [difference(reference, given, text) for given, text in zip(prompts, texts, strict=True)]
    return [each for each in found if each], proposed
