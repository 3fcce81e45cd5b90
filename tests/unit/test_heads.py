"""Heads on a target's hidden states: both layouts against EAGLE-3 in torch, and their texts against plain decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle3 import DRAFT_VOCABULARY, HIDDEN, STATES, Reference, tiny_head
from numpy.typing import NDArray
from tiny_models import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.kernels.native import NativeDecodeFeed, NativeFeed, NativeStopRule
from outrider.workers.engines.head import HeadEngine
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.opening import open_model

TOKENS = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32]
STEPS = 4
NEVER = -1e30


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("target")
    config = LlamaConfig(**(LLAMA | {"num_hidden_layers": 4}), eos_token_id=0, initializer_range=0.1)
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def opened_head(path: Path, target: Path, precision: str = "fp32") -> HeadEngine:
    engine = open_model(ModelSpec(str(path), "native", precision, threads=2, target=str(target))).engine
    assert isinstance(engine, HeadEngine)
    return engine


def some_states(count: int, seed: int = 1) -> NDArray[np.uint16]:
    """Of so many tokens, as bf16."""
    drawn = torch.randn(count, len(STATES) * HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return drawn.view(torch.int16).numpy().view(np.uint16)


def as_floats(states: NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy((states.astype(np.uint32) << 16).view(np.float32).copy())


def embedding_of(target: Path) -> torch.Tensor:
    return LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).model.embed_tokens.weight.detach()


def proposed(engine: HeadEngine, row: int, tokens: Sequence[int], states: NDArray[np.uint16], count: int) -> list[Any]:
    """Of each step (token, margin, runner-up)."""
    feed = NativeDecodeFeed(row, tokens, count, given=states)
    (chosen, margins, runners_up), *_ = engine.model.decode([feed], NativeStopRule())[0]
    return list(zip(chosen, margins, runners_up, strict=True))


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("published", {}),
        ("published", {"own_embedding": True, "draft_vocab_size": 203}),
        ("speculators", {"norm_before_residual": True, "own_embedding": True}),
        ("speculators", {"model_type": "qwen3", "fc_norm": True, "norm_output": True}),
        ("speculators", {"norm_before_fc": True}),
    ],
)
@torch.no_grad()
def test_logits_and_candidates_are_those_of_the_reference(
    tmp_path: Path, target: Path, layout: str, options: dict[str, Any]
) -> None:
    path = tiny_head(tmp_path / "head", layout, **options)
    engine, reference = opened_head(path, target), Reference(path, embedding_of(target))
    states = some_states(len(TOKENS) - 1)
    row = engine.model.open(Sampling(), len(TOKENS))
    engine.model.skip(row, TOKENS[:1])

    # The text in two pieces, and then as many steps as are proposed in a round.
    first = engine.model.forward([NativeFeed(row, TOKENS[1:6], choose=5, logits=5, given=states[:5])])[0]
    wanted, _ = reference.read(as_floats(states[:5]), TOKENS[1:6])
    known = reference.tokens.numpy()
    scale = float(wanted.abs().max())
    assert np.abs(first.logits[:, known] - wanted.numpy()).max() < 1e-4 * scale
    others = np.setdiff1d(np.arange(203), known)
    assert (first.logits[:, others] == np.float32(NEVER)).all()

    choices = proposed(engine, row, TOKENS[6:], states[5:], STEPS)
    wanted, left = reference.read(as_floats(states[5:]), TOKENS[6:])
    for token, margin, runner_up in choices:
        best, second = wanted[-1].topk(2).values.tolist()
        assert (token, runner_up) == tuple(known[wanted[-1].topk(2).indices.numpy()])
        assert margin == pytest.approx(best - second, abs=1e-4 * scale)
        wanted, left = reference.step(left[-1:], [token])
    assert len(choices) == STEPS
    assert len(known) == options.get("draft_vocab_size", DRAFT_VOCABULARY)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "w8a8", "w4a8"])
def test_a_row_is_the_same_in_whatever_batch_and_pieces(tmp_path: Path, target: Path, precision: str) -> None:
    engine = opened_head(tiny_head(tmp_path / "head"), target, precision)
    states = [some_states(len(TOKENS) - 1, seed) for seed in range(3)]
    sampling = [Sampling(), Sampling(temperature=0.8, seed=5, top_p=0.9), Sampling(temperature=1.2, seed=6, min_p=0.05)]

    def alone(index: int) -> list[Any]:
        row = engine.model.open(sampling[index], len(TOKENS))
        engine.model.skip(row, TOKENS[:1])
        engine.model.forward([NativeFeed(row, TOKENS[1:4], choose=0, given=states[index][:3])])
        return proposed(engine, row, TOKENS[4:], states[index][3:], STEPS)

    expected = [alone(index) for index in range(3)]
    rows = [engine.model.open(each, len(TOKENS)) for each in sampling]
    for row in rows:
        engine.model.skip(row, TOKENS[:1])
    feeds = [NativeDecodeFeed(row, TOKENS[1:], STEPS, given=states[index]) for index, row in enumerate(rows)]
    together, _ = engine.model.decode(feeds, NativeStopRule())
    assert [list(zip(*choices, strict=True)) for choices in together] == expected
    assert len({token for choices in expected for token, *_ in choices}) > 1


def test_what_was_skipped_is_not_seen(tmp_path: Path, target: Path) -> None:
    engine = opened_head(tiny_head(tmp_path / "head"), target)
    states = some_states(len(TOKENS))

    def choices(tokens: Sequence[int], skipped: int) -> list[Any]:
        row = engine.model.open(Sampling(), len(tokens))
        engine.model.skip(row, tokens[:skipped])
        return proposed(engine, row, tokens[skipped:], states[skipped : len(tokens)], STEPS)

    other = [(token + 50) % 203 for token in TOKENS[:8]] + TOKENS[8:]
    assert choices(TOKENS, 8) == choices(other, 8)
    assert choices(TOKENS, 6) != choices(other, 6)
