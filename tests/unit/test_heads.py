"""Heads on a target's hidden states: both layouts against EAGLE-3 in torch, and their texts against plain decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import constrained
import numpy as np
import pytest
import torch
from built import CURVE, Answered, InProcess, draft_of, write
from constrained import grammar
from eagle3 import DRAFT_VOCABULARY, HIDDEN, STATES, Reference, fitted, tiny_head
from family_texts import one_thread
from heads_in_process import opened_draft, opened_target, pair, some_rows
from native_models import open_native, save_tiny
from numpy.typing import NDArray
from safetensors.torch import load, save_file
from tiny_models import LLAMA, MIXTURES, TINY, tiny_config
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.kernels.library import KernelError
from outrider.kernels.native import NativeDecodeFeed, NativeFeed, NativeStopRule
from outrider.kernels.program import Format
from outrider.workers.build import build_draft, build_target
from outrider.workers.draft.head import HeadDrafter
from outrider.workers.draft.transport import DraftFailed
from outrider.workers.engines.head import HeadEngine
from outrider.workers.engines.native import NativeEngine
from outrider.workers.errors import ModelError, PairError
from outrider.workers.messages import Advance, DraftReply, DraftRequest, ModelSpec, ReplicaSpec, Row, Sampling
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.families import build_program
from outrider.workers.models.head_pairs import states_of
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.opening import OpenModel, native_supports, open_model
from outrider.workers.models.outlier_channels import norm_groups
from outrider.workers.models.preparation import prepare_pair, prepare_scoring
from outrider.workers.models.tokenizer import Tokenizer
from outrider.workers.precisions import PRECISIONS
from outrider.workers.target.held_states import MOST_HELD, HeldStates

TOKENS = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32]
STEPS = 4
NEVER = -1e30
FIXTURE = Path(__file__).parents[1] / "support" / "tiny_eagle3"


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
    engine = open_model(ModelSpec(str(path), "native", precision, threads=1, target=str(target))).engine
    assert isinstance(engine, HeadEngine)
    return engine


def some_states(count: int, seed: int = 1) -> NDArray[np.uint16]:
    """Of this many tokens, as bf16."""
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
    assert engine.skipper is None, "which tokens it skips is for the states to say"
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
    # One whose makers have left tokens out scores those that they left.
    assert engine.shorten(9) == (len(known) if len(known) < 203 else 9)


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


@pytest.mark.parametrize(("precision", "length", "skipped"), [("fp32", 15, 8), ("bf16", 400, 290), ("w4a8", 400, 77)])
def test_what_was_skipped_is_not_seen(tmp_path: Path, target: Path, precision: str, length: int, skipped: int) -> None:
    head = tiny_head(tmp_path / "head", max_position_embeddings=512)
    spec = ModelSpec(str(head), "native", precision, threads=1, target=str(target), small_cache=True)
    engine = open_model(spec).engine
    assert isinstance(engine, HeadEngine)
    states, tokens = some_states(length), [1 + index * 7 % 202 for index in range(length)]

    def choices(tokens: Sequence[int], skipped: int) -> list[Any]:
        row = engine.model.open(Sampling(), len(tokens))
        engine.model.skip(row, tokens[:skipped])
        return proposed(engine, row, tokens[skipped:], states[skipped : len(tokens)], STEPS)

    other = [(token + 50) % 203 for token in tokens[:skipped]] + tokens[skipped:]
    alone = choices(tokens, skipped)
    assert alone == choices(other, skipped)
    assert alone != choices(other, skipped - 3)
    # Blocks of the cache that another row has left are not seen either, and a fork sees what its source does.
    row = engine.model.open(Sampling(), length)
    engine.model.skip(row, other[:skipped])
    engine.model.forward([NativeFeed(row, tokens[skipped:-2], choose=0, given=states[skipped:-2])])
    forked = engine.model.fork(row, length - 2, Sampling(), length)
    assert proposed(engine, forked, tokens[-2:], states[-2:], STEPS) == alone


# States out of the target, and the way to the head


@pytest.fixture(scope="module")
@one_thread()
def fitted_pair(tmp_path_factory: pytest.TempPathFactory, target: Path) -> tuple[Path, Path]:
    """A head that is sometimes right: it has seen what the target writes behind such prompts."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    random = torch.Generator().manual_seed(3)
    prompts = torch.randint(1, 203, (24, 8), generator=random)
    texts = model.generate(prompts, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
    head = tiny_head(tmp_path_factory.mktemp("fitted"), draft_vocab_size=180)
    return target, fitted(head, model, texts.tolist())


@pytest.mark.parametrize("precision", ["fp32", "w4a8"])
@torch.no_grad()
def test_the_states_are_the_inputs_of_layers_and_change_nothing(target: Path, precision: str) -> None:
    tokens = TOKENS + TOKENS[:7]
    with_states = opened_target(target, precision, (2, 3, 1)).engine
    without = open_model(ModelSpec(str(target), "native", precision, threads=1)).engine
    assert isinstance(with_states, NativeEngine) and isinstance(without, NativeEngine)

    def fed(engine: NativeEngine, states: bool, pieces: Sequence[int]) -> tuple[Any, ...]:
        row, answers, start = engine.model.open(Sampling(), len(tokens)), [], 0
        for size in (*pieces, len(tokens) - sum(pieces)):
            part = tokens[start : start + size]
            answers.append(engine.model.forward([NativeFeed(row, part, size, size, 1, states=states)])[0])
            start += size
        found = np.concatenate([answer.states for answer in answers if answer.states is not None]) if states else None
        logits = np.concatenate([answer.logits for answer in answers])
        return logits, [answer.logprobs for answer in answers], found

    logits, logprobs, _ = fed(without, False, [])
    for pieces in ([], [5, 1, 9]):
        found, found_logprobs, states = fed(with_states, True, pieces)
        assert (found == logits).all()
        assert [each for part in found_logprobs for each in part] == [each for part in logprobs for each in part]
        if not pieces:
            whole = states
        assert (states == whole).all()
    if precision == "fp32":
        hidden = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)(
            torch.tensor([tokens]), output_hidden_states=True
        ).hidden_states
        wanted = torch.cat([hidden[layer][0] for layer in (2, 3, 1)], -1)
        # bf16 keeps 8 bits.
        assert (as_floats(whole) - wanted).abs().max() <= 0.0041 * wanted.abs().max()


def test_the_packed_weights_are_those_of_the_model_without_states(target: Path) -> None:
    values = json.loads((target / "config.json").read_text())
    plain, with_states = (build_program(values, Format.W4A8, states=states) for states in ((), (1, 2, 3)))
    assert (plain.weights, norm_groups(plain)) == (with_states.weights, norm_groups(with_states))
    assert (plain.hidden_out, with_states.hidden_out) == (0, 3 * HIDDEN)


@pytest.mark.parametrize(("precision", "drafts"), [("w4a8", "w4a8"), pytest.param("bf16", "fp32", marks=pytest.mark.slow)])
def test_texts_are_those_of_plain_decoding(fitted_pair: tuple[Path, Path], precision: str, drafts: str) -> None:
    target, head = fitted_pair
    model, draft = opened_target(target, precision), opened_draft(head, target, drafts)
    rows = some_rows(7)
    plain, _ = write(pair(model, 4, 0, None), rows)
    for batch, count, prefix_tokens in [(5, 4, 500), (3, 2, 0)]:
        assisted, verifier = write(pair(model, batch, count, draft_of(draft, prefix_tokens), prefix_tokens), rows)
        assert {key: (row.tokens, row.logprobs) for key, row in assisted.items()} == {
            key: (row.tokens, row.logprobs) for key, row in plain.items()
        }
        assert 0 < verifier.counters.accepted < verifier.counters.proposed
        assert verifier.counters.runners_up > 0
        assert verifier.counters.tokens > 1.1 * verifier.counters.row_rounds, "the head gained nothing"


@torch.no_grad()
def test_what_the_formats_own_library_wrote_gives_its_logits(target: Path) -> None:
    """tests/support/make_eagle3_fixture.py made it."""
    engine = opened_head(FIXTURE, target)
    expected = load((FIXTURE / "expected.safetensors.bin").read_bytes())
    states = expected["states"].view(torch.int16).numpy().view(np.uint16)
    tokens = [7, 3, 41, 59, 26, 5, 35, 19, 9]
    row = engine.model.open(Sampling(), len(tokens))
    engine.model.skip(row, tokens[:1])
    known = np.flatnonzero(load((FIXTURE / "model.safetensors").read_bytes())["t2d"].numpy())
    first = engine.model.forward([NativeFeed(row, tokens[1:], 8, logits=8, given=states)])[0].logits[:, known]
    scale = float(expected["first"].abs().max())
    assert np.abs(first - expected["first"].numpy()).max() < 1e-4 * scale
    second = engine.model.forward([NativeFeed(row, [0], 1, logits=1)])[0].logits[0, known]
    assert np.abs(second - expected["second"].numpy()).max() < 1e-4 * scale


# What is refused


def refused(target: Path, head: Path) -> str:
    with pytest.raises((ModelError, PairError)) as error:
        states_of(read_model_info(str(target)), read_model_info(str(head)))
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_hidden_size": 64}, "it reads states of 64 numbers, the target's have 96"),
        ({"vocab_size": 300}, "it was made for 300 tokens, the target has 203"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "it reads the input of layer 4, the target has layers 0 to 3"),
        ({"eagle_aux_hidden_state_layer_ids": ["1"]}, "must be a list of layers"),
        ({"parallel_drafting": True}, 'a head that proposes in parallel ("parallel_drafting") is not supported'),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "'EagleLlamaForCausalLM' is not supported; EAGLE-3's are"),
        ({"norm_output": 1}, '"norm_output" must be true or false'),
        ({"eagle_config": {"use_aux_hidden_state": False}}, '"use_aux_hidden_state" off'),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 1]}},
            'the inputs of the layers (2, 2, 1), and that of "eagle_config" the outputs of (2, 2, 1), which are others',
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
            "it reads the input of layer 4, the target has layers 0 to 3",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, target: Path, changes: dict[str, Any], sentence: str
) -> None:
    head = tiny_head(tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | changes))
    assert sentence in refused(target, head)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [3, 0, 1]}, (3, 0, 1)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, (1, 2, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 2, 1)),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
            (1, 2),
        ),
    ],
)
def test_layers_are_named_by_their_inputs_and_in_eagle_config_by_their_outputs(
    tmp_path: Path, target: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    """As ``speculators`` has it at the top; SGLang adds 1 to the numbers there, and SpecForge reads outputs of them."""
    head = tiny_head(tmp_path / "head", **{"eagle_aux_hidden_state_layer_ids": None, **changes})
    assert states_of(read_model_info(str(target)), read_model_info(str(head))) == layers


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"speculators_model_type": "peagle"}, "a head of the kind 'peagle' is not supported"),
        ({"mask_token_id": 3}, 'a head with "mask_token_id": 3 is not supported'),
        ({"transformer_layer_config": None}, 'the head has no "transformer_layer_config"'),
    ],
)
def test_other_heads_of_speculators_are_refused_by_name(
    tmp_path: Path, target: Path, changes: dict[str, Any], sentence: str
) -> None:
    head = tiny_head(tmp_path / "head", "speculators")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | changes))
    assert sentence in refused(target, head)


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        ({"num_hidden_layers": 2}, "a head of 2 layers is not supported"),
        ({"sliding_window": 7, "use_sliding_window": True}, "a head with a sliding window is not supported"),
        ({"hidden_act": "tanh"}, 'does not know the activation "tanh"'),
        ({"is_causal": False}, 'with "is_causal": False tokens attend to later ones'),
        ({"model_type": "gemma2"}, "a head with a layer of 'gemma2' is not supported"),
    ],
)
def test_a_layer_that_is_not_known_is_refused_by_name(
    tmp_path: Path, target: Path, layer: dict[str, Any], sentence: str
) -> None:
    head = tiny_head(tmp_path / "head", "speculators")
    config = json.loads((head / "config.json").read_text())
    config["transformer_layer_config"] |= layer
    (head / "config.json").write_text(json.dumps(config))
    if "model_type" in layer:
        assert sentence in refused(target, head)
    else:
        assert sentence in str(native_supports(str(head)))


def test_the_page_names_the_families_that_return_no_states() -> None:
    """But for long rope by a row's length, which it names as such."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    [named] = re.findall(r"to return the hidden states between its layers\.(.*?)\n\n", text, re.S)
    without = set()
    for kind, name in {kind: name for name, (kind, _) in (TINY | MIXTURES).items()}.items():
        values = json.loads(tiny_config(name).to_json_string())
        try:
            build_program(values, Format.BF16, states=(1,))
        except ModelError as error:
            if "how long a row is" not in str(error):
                without.add(kind)
    assert set(re.findall(r"`([^`]+)`", named)) == without


def test_a_target_whose_states_are_not_to_be_had_is_refused(tmp_path: Path) -> None:
    path = save_tiny("opt", tmp_path / "opt")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    head = tiny_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1, 1])
    assert "whose hidden states the native engine does not return" in refused(path, head)


def changed(head: Path, **tensors: torch.Tensor | None) -> Path:
    found = load((head / "model.safetensors").read_bytes()) | tensors
    save_file({name: value for name, value in found.items() if value is not None}, head / "model.safetensors")
    return head


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"d2t": None}, 'the head has 77 tokens, and no "d2t" that says which'),
        ({"d2t": torch.zeros(76, dtype=torch.long)}, '"d2t" must name 77 different tokens of 203'),
        ({"d2t": torch.arange(77, dtype=torch.long)[76 - torch.arange(77)] * 3}, '"d2t" must name 77 different tokens'),
        ({"d2t": torch.zeros(77)}, '"d2t" must be a vector of whole numbers'),
        ({"t2d": torch.zeros(203).to(torch.float8_e4m3fn)}, '"t2d" must be a vector of whole numbers'),
        ({"t2d": torch.ones(203, dtype=torch.uint8)}, '"t2d" and "d2t" do not name the same tokens'),
        ({"t2d": torch.ones(203, dtype=torch.bool)}, '"t2d" and "d2t" do not name the same tokens'),
        ({"t2d": torch.arange(203) < 77}, '"t2d" and "d2t" do not name the same tokens'),
        ({"norm.weight": None}, 'lacks the weight "norm.weight"'),
        ({"more.weight": torch.zeros(3)}, "the checkpoint holds 'more.weight'"),
        ({"fc.weight": torch.zeros(96, 96)}, "has shape (96, 96), config.json asks for (96, 288)"),
    ],
)
def test_a_head_whose_tensors_are_not_what_it_says_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], sentence: str
) -> None:
    head = changed(tiny_head(tmp_path / "head"), **tensors)
    with pytest.raises(ModelError) as error:
        read_program(head, PRECISIONS["bf16"])
    assert sentence in str(error.value)


def test_a_head_may_come_without_t2d(tmp_path: Path) -> None:
    read_program(changed(tiny_head(tmp_path / "head"), t2d=None), PRECISIONS["bf16"])


@pytest.mark.parametrize("written", [torch.uint8, torch.int8, torch.int64])
def test_truth_values_may_be_written_as_numbers(written: torch.dtype, tmp_path: Path) -> None:
    head = tiny_head(tmp_path / "head")
    known = load((head / "model.safetensors").read_bytes())["t2d"]
    read_program(changed(head, t2d=known.to(written)), PRECISIONS["bf16"])


def test_a_narrow_head_without_an_embedding_is_refused(tmp_path: Path) -> None:
    """Before the job starts: its target's embedding does not fit."""
    head = tiny_head(tmp_path / "head", hidden_size=64, target_hidden_size=96)
    with pytest.raises(ModelError, match=r'no "embed_tokens.weight", and the target\'s embeddings are 96 wide, not 64'):
        read_program(head, PRECISIONS["bf16"])
    own = tiny_head(tmp_path / "own", hidden_size=64, target_hidden_size=96, own_embedding=True)
    read_program(own, PRECISIONS["bf16"])


def test_a_value_that_is_not_finite_is_told_with_its_file(tmp_path: Path, target: Path) -> None:
    head = changed(tiny_head(tmp_path / "head"), **{"norm.weight": torch.full((96,), torch.nan)})
    with pytest.raises(ModelError) as error:
        opened_head(head, target)
    assert str(error.value).startswith(f'{head / "model.safetensors"}: the weight "norm.weight" holds a value that is')


def test_a_head_is_no_target(tmp_path: Path, target: Path) -> None:
    head = tiny_head(tmp_path / "head")
    for prepare in (lambda: prepare_pair(str(head), "none"), lambda: prepare_scoring(str(head), None)):
        with pytest.raises(ModelError, match="which can only be a draft: name the model with -m"):
            prepare()
    with pytest.raises(ModelError, match="is a head on another model's hidden states"):
        build_program(json.loads((head / "config.json").read_text()), Format.BF16)
    target_info, draft_info = read_model_info("pocket"), tiny_head(tmp_path / "pocket-sized", hidden_size=256)
    with pytest.raises(PairError, match="it was made for 203 tokens, the target has 4,096"):
        prepare_pair(target_info.name, str(draft_info))


def test_states_are_not_fed_to_a_program_that_takes_none(tmp_path: Path, target: Path) -> None:
    model = open_native(target, "fp32").model
    row = model.open(Sampling(), 1)
    with pytest.raises(KernelError, match="states are wanted, but the program has none"):
        model.forward([NativeFeed(row, [1], states=True)])
    with pytest.raises(KernelError, match="states are given to a program that takes none in"):
        model.forward([NativeFeed(row, [1], given=some_states(1))])
    head = opened_head(tiny_head(tmp_path / "head"), target)
    row = head.model.open(Sampling(), 1)
    with pytest.raises(KernelError, match="none has been left for the first"):
        head.model.forward([NativeFeed(row, [1])])
    with pytest.raises(KernelError, match="cannot skip 0 tokens"):
        head.model.skip(row, [])
    with pytest.raises(KernelError, match="would hold 129 tokens"):
        head.model.skip(row, [1] * 129)


# The drafter


def asked(drafter: HeadDrafter, advance: Advance) -> tuple[int, ...]:
    return drafter.propose(DraftRequest(1, (advance,))).tokens.get(advance.key, ())


def sent(key: int, start: int, tokens: Sequence[int], states: NDArray[np.uint16], end: int, prompt: int = 15) -> Advance:
    return Advance(key, start, tuple(tokens), 4, Sampling() if start == 0 else None, prompt, states.tobytes(), end)


def test_a_row_is_drafted_as_if_all_of_it_had_been_read_at_once(tmp_path: Path, target: Path) -> None:
    """Whatever was guessed meanwhile: what is committed is read with the target's states, in any number of requests."""
    engine = opened_head(tiny_head(tmp_path / "head"), target, "w4a8")
    states = some_states(len(TOKENS) - 1)
    whole = asked(HeadDrafter(engine, {0}), sent(1, 0, TOKENS, states, 14))
    assert len(whole) == 4
    drafter = HeadDrafter(engine, {0})
    asked(drafter, sent(2, 0, TOKENS[:6], states[:5], 5, 6))
    asked(drafter, sent(2, 6, TOKENS[6:9], states[5:8], 8, 6))
    assert asked(drafter, sent(2, 9, TOKENS[9:], states[8:], 14, 6)) == whole
    # Two more whose states are late, as behind a runner-up: guessed on, and read anew when the states are here.
    asked(drafter, sent(3, 0, TOKENS[:6], states[:5], 5, 6))
    assert len(asked(drafter, sent(3, 6, TOKENS[6:10], states[5:7], 7, 6))) == 4
    assert asked(drafter, sent(3, 10, TOKENS[10:], states[7:], 14, 6)) == whole


def test_a_row_begins_where_its_states_begin(tmp_path: Path, target: Path) -> None:
    engine = opened_head(tiny_head(tmp_path / "head"), target, "w4a8")
    states = some_states(len(TOKENS) - 1)
    drafter = HeadDrafter(engine, {0}, prefix_tokens=500)
    late = asked(drafter, sent(1, 0, TOKENS, states[6:], 14))
    row = engine.model.open(Sampling(), 15)
    engine.model.skip(row, TOKENS[:7])
    assert list(late) == [token for token, *_ in proposed(engine, row, TOKENS[7:], states[6:], 4)]
    # Nothing to begin with, and a gap in the middle.
    assert asked(drafter, sent(2, 0, TOKENS, states[:0], 14)) == ()
    asked(drafter, sent(3, 0, TOKENS[:6], states[:5], 5, 6))
    assert asked(drafter, sent(3, 6, TOKENS[6:], states[6:], 14, 6)) == late
    assert not drafter.draft_ahead()


def test_prompts_that_begin_alike_are_read_once(tmp_path: Path, target: Path) -> None:
    engine = opened_head(tiny_head(tmp_path / "head"), target, "w4a8")
    tokens = [*range(20, 60), *TOKENS]
    states = some_states(len(tokens) - 1)
    alone = asked(HeadDrafter(engine, {0}), sent(1, 0, tokens, states, len(tokens) - 1, len(tokens)))
    drafter = HeadDrafter(engine, {0}, prefix_tokens=500)
    asked(drafter, sent(2, 0, tokens[:45], states[:44], 44, 45))
    # The target has read the first 40 for another row, and sends no states of them.
    assert asked(drafter, sent(3, 0, tokens, states[40:], len(tokens) - 1, len(tokens))) == alone


def test_a_text_longer_than_the_head_holds_is_not_drafted(tmp_path: Path, target: Path) -> None:
    drafter = HeadDrafter(opened_head(tiny_head(tmp_path / "head"), target), {0})
    tokens = [1 + index % 200 for index in range(140)]
    assert asked(drafter, sent(1, 0, tokens, some_states(10), 139)) == ()
    assert asked(drafter, sent(1, 140, [5], some_states(1), 140)) == ()


class Unreliable(InProcess):
    """A way to drafts that fail, and are gone now and then: each is asked ``asks`` times, a third of them in vain."""

    def __init__(self, head: OpenModel, asks: int) -> None:
        super().__init__(draft_of(head, 500).drafter)
        self._head, self._asks, self._asked = head, asks, 0

    def ask(self, request: DraftRequest) -> Answered:
        self._asked += 1
        if self._asked % self._asks == 0:
            self._drafter = draft_of(self._head, 500).drafter
        answer = super().ask(request)
        if self._asked % 3 == 0:
            answer = Failing(answer.reply)
        return answer


class Failing(Answered):
    def take(self) -> DraftReply:
        raise DraftFailed("it has forgotten why")


@pytest.mark.slow
def test_a_head_that_fails_and_dies_changes_no_text(fitted_pair: tuple[Path, Path]) -> None:
    """What it was sent is sent to nobody again: rows go on from the states that are new."""
    target, head = fitted_pair
    model, draft = opened_target(target, "w4a8"), opened_draft(head, target, "w4a8")
    rows = [replace(row, resumed=(5, 6, 7) if row.key % 3 == 0 else ()) for row in some_rows(10)]
    plain, _ = write(pair(model, 4, 0, None), rows)
    built = pair(model, 4, 3, draft_of(draft), 500)
    built.link.attach(Unreliable(draft, 10))
    assisted, verifier = write(built, rows)
    assert {key: row.tokens for key, row in assisted.items()} == {key: row.tokens for key, row in plain.items()}
    assert verifier.counters.accepted > 0
    assert verifier.counters.plain_rounds > 3


def test_held_states_follow_each_other() -> None:
    held = HeldStates()
    one = some_states(10)
    assert held.take() == (b"", 0)
    held.add(0, one[:4])
    held.add(4, one[4:7])
    assert held.take() == (one[:7].tobytes(), 7)
    held.add(7, one[7:8])
    held.add(9, one[9:])
    assert held.take() == (one[9:].tobytes(), 10), "behind a gap"
    many = some_states(3 * MOST_HELD // 2)
    held.add(10, many[:MOST_HELD])
    held.add(10 + MOST_HELD, many[MOST_HELD:])
    states, end = held.take()
    assert end == 10 + len(many)
    assert many.tobytes().endswith(states)
    assert MOST_HELD <= len(states) // many[0].nbytes < 2 * MOST_HELD


# The bundled head


@pytest.mark.slow
def test_the_pocket_head_gains_tokens_a_round() -> None:
    target, head = read_model_info("pocket"), read_model_info("pocket-head")
    assert sum(file.stat().st_size for file in Path(head.path).iterdir()) < 4 << 20
    layers = states_of(target, head)
    assert layers == (2, 4, 5)
    model = open_model(ModelSpec(target.path, "native", "w4a8", threads=1, states=layers))
    draft = open_model(ModelSpec(head.path, "native", "w4a8", threads=1, target=target.path))
    assert draft.end_tokens == model.end_tokens == target.end_tokens
    tokenizer = Tokenizer(target.path)
    lines = (Path(__file__).parents[2] / "examples" / "prompts.jsonl").read_text().splitlines()[:8]
    prompts = [tuple(tokenizer.encode(json.loads(line)["prompt"])) for line in lines]
    rows = [Row(key, prompt, 32, Sampling(temperature=0.7 * (key % 2), seed=key)) for key, prompt in enumerate(prompts)]
    plain, _ = write(pair(model, 8, 0, None), rows)
    assisted, verifier = write(pair(model, 8, 4, draft_of(draft)), rows)
    assert {key: row.tokens for key, row in assisted.items()} == {key: row.tokens for key, row in plain.items()}
    assert verifier.counters.tokens > 1.6 * verifier.counters.row_rounds


def counted(draft: OpenModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An element for each pass of the draft's model from now on."""
    assert isinstance(draft.engine, HeadEngine)
    model, made = draft.engine.model, list[int]()
    forward, decode = model.forward, model.decode

    def counted_forward(*arguments: Any) -> Any:
        made.append(1)
        return forward(*arguments)

    def counted_decode(*arguments: Any) -> Any:
        choices, steps = decode(*arguments)
        made.extend([1] * len(steps))
        return choices, steps

    monkeypatch.setattr(model, "forward", counted_forward)
    monkeypatch.setattr(model, "decode", counted_decode)
    return made


def test_rows_under_constraints_are_drafted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What must come next has no states yet: the head reads it one token at a time, and again when they are here."""
    target, head = read_model_info("pocket"), read_model_info("pocket-head")
    layers = states_of(target, head)
    model = open_model(ModelSpec(target.path, "native", "w4a8", threads=1, states=layers))
    draft = open_model(ModelSpec(head.path, "native", "w4a8", threads=1, target=target.path))
    rows = [
        Row(key, (5 + key, 70, 9), 40, Sampling(temperature=0.8 * (key % 2), seed=key, grammar=grammar(name)))
        for key, name in enumerate(("record", "regex", "grammar", "record"))
    ]
    texts = []
    made = counted(draft, monkeypatch)
    for count in (0, 4):
        spec = ModelSpec("", "native", "", states=layers if count else ())
        built = build_target(spec, ReplicaSpec(4, count, count > 0), model, constrained.tokenizer(), CURVE)
        drafting = build_draft(ModelSpec("", "native", ""), ReplicaSpec(4, None), draft, constrained.AtOnce(draft))
        built.link.attach(InProcess(drafting.drafter))
        results, verifier = write(built, rows)
        texts.append({key: row.text for key, row in results.items()})
    assert texts[0] == texts[1]
    assert len(texts[0]) == 4
    assert verifier.counters.forced_tokens > 0
    assert verifier.counters.accepted > 10
    assert verifier.counters.draft_passes == len(made), "what is forced takes passes of the head one by one"
