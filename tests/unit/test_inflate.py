"""The inflated model computes the small one's function."""

from __future__ import annotations

import fcntl
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.workers.models.mask_token import mask_token_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from eagle3 import HIDDEN, VOCABULARY, Reference, tiny_head
from inflate import Shape, inflate, made_once
from inflate_head import inflate_head

TOKENS = torch.tensor([[3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79]])
# Every ratio is a power of four where a square root is taken of it, so that bf16 holds the large weights exactly.
LARGE = Shape(hidden=128, layers=5, heads=8, kv_heads=4, ffn=96, vocabulary=300, head_size=32)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@torch.inference_mode()
def logits(path: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(input_ids=tokens).logits[0]


@pytest.mark.parametrize("large", [LARGE, pytest.param(Shape(64, 3, 16, 16, 48, 200, 8), marks=pytest.mark.slow)])
def test_the_function_stays_the_same(small: Path, tmp_path: Path, large: Shape) -> None:
    inflate(small, tmp_path / "large", large)
    wanted, found = logits(small), logits(tmp_path / "large")
    assert found.shape[1] == large.vocabulary
    torch.testing.assert_close(found[:, :200], wanted, rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["tie_word_embeddings"]) == (large.layers, False)


@pytest.mark.slow
def test_a_mask_token_stays_what_it_is(small: Path, tmp_path: Path) -> None:
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"pard_token": 199}))
    inflate(small, tmp_path / "large", LARGE)
    assert mask_token_of(tmp_path / "large") == 199
    tokens = torch.tensor([[3, 141, 59, 199, 199, 199]])
    wanted, found = logits(small, tokens), logits(tmp_path / "large", tokens)
    torch.testing.assert_close(found[:, :200], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_noise_changes_every_matrix_a_little(small: Path, tmp_path: Path) -> None:
    inflate(small, tmp_path / "large", LARGE, noise=0.01)
    wanted, found = logits(small), logits(tmp_path / "large")
    distance = ((found[:, :200] - wanted).norm() / wanted.norm()).item()
    assert 1e-4 < distance < 0.2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "large", dtype=torch.float32)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    assert all(len(torch.unique(matrix, dim=0)) == len(matrix) for matrix in matrices)


def test_heads_that_cannot_all_be_held_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot hold all of the small model's"):
        inflate(small, tmp_path / "large", Shape(64, 3, 2, 2, 48, 200, 8))


def test_heads_that_key_heads_do_not_divide_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="30 heads are no multiple of 4 key/value heads"):
        inflate(small, tmp_path / "large", Shape(64, 3, 30, 4, 48, 200, 8))


def test_a_model_is_made_once_and_an_interrupted_one_begun_anew(tmp_path: Path) -> None:
    turns: list[Path] = []

    def make(path: Path) -> None:
        turns.append(path)
        path.mkdir()
        (path / "config.json").write_text(f"{len(turns)}")
        if len(turns) == 1:
            raise KeyboardInterrupt
        (path / "tokenizer.json").touch()

    with pytest.raises(KeyboardInterrupt):
        made_once(tmp_path / "model", make)
    for _ in range(2):
        assert made_once(tmp_path / "model", make) == tmp_path / "model"
    assert len(turns) == 2
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["config.json", "tokenizer.json"]


def test_two_benchmarks_do_not_make_one_model_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second removed what the first had written so far, and both wrote into one folder."""
    waiting, made, lock = threading.Event(), list[str](), fcntl.flock

    def flock(*arguments: Any) -> None:
        if threading.current_thread() is other:
            waiting.set()
        lock(*arguments)

    def make(path: Path) -> None:
        made.append(threading.current_thread().name)
        path.mkdir()
        other.start()
        assert waiting.wait(60)
        (path / "config.json").touch()

    other = threading.Thread(target=made_once, args=(tmp_path / "models" / "model", make), name="other")
    monkeypatch.setattr(fcntl, "flock", flock)
    made_once(tmp_path / "models" / "model", make)
    other.join(60)
    assert len(made) == 1 and not other.is_alive()


@pytest.mark.parametrize("head_size", [32, 128])
@torch.inference_mode()
def test_a_head_guesses_the_same_for_the_inflated_target(tmp_path: Path, head_size: int) -> None:
    head = tiny_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    target = Shape(hidden=4 * HIDDEN, layers=10, heads=8, kv_heads=4, ffn=150, vocabulary=300, head_size=head_size)
    for name, shape in (("small", Shape(HIDDEN, 4, 4, 2, 144, VOCABULARY, 32)), ("large", target)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(llama_of(shape)))
    inflate_head(head, tmp_path / "large head", tmp_path / "large", tmp_path / "small")
    found_config = json.loads((tmp_path / "large head" / "config.json").read_text())
    assert found_config["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7], "where the small one's layers begin"
    embedding, states = torch.randn(VOCABULARY, HIDDEN), torch.randn(6, 3 * HIDDEN)
    small = Reference(head, embedding)
    large = Reference(tmp_path / "large head", embedding.repeat_interleave(4, 1))
    assert torch.equal(large.tokens, small.tokens)
    tokens = [3, 141, 59, 26, 5, 35]
    wanted, left = small.read(states, tokens)
    found, left_too = large.read(states.repeat_interleave(4, 1), tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    wanted, found = small.step(left[-1:], [7])[0], large.step(left_too[-1:], [7])[0]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def llama_of(shape: Shape) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary,
        "head_dim": shape.head_size,
    }
