"""Layers for multi-token prediction as drafts, against transformers; and their texts against plain decoding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from built import draft_of, write
from heads_in_process import opened_draft, opened_target, pair, some_rows
from mtp import ONE, last_norm, names_of, with_mtp
from native_models import rewritten, save_tiny
from numpy.typing import NDArray
from safetensors.torch import load_file
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from outrider.kernels.builder import LAST_STATE
from outrider.kernels.native import NativeDecodeFeed, NativeFeed, NativeStopRule
from outrider.kernels.program import Format
from outrider.workers.engines.head import HeadEngine
from outrider.workers.engines.native import NativeEngine
from outrider.workers.errors import ModelError
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.families import build_mtp, build_program
from outrider.workers.models.head_pairs import has_mtp
from outrider.workers.models.model_info import find, read_model_info
from outrider.workers.models.mtp import BY_NUMBER, COPIES, LAYOUTS, model_named, model_of, mtp_layer, mtp_path
from outrider.workers.models.opening import native_supports, open_model
from outrider.workers.models.outlier_channels import norm_groups
from outrider.workers.models.preparation import prepare_pair
from outrider.workers.precisions import PRECISIONS
from outrider.workers.quantising.quantiser import Wanted, quantise

TOKENS = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32]
STATES = (LAST_STATE,)
DENSE, LATENT, RECURRENT = "qwen3-5", "deepseek-v3", "qwen3-next"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def native(path: Path, precision: str = "fp32") -> NativeEngine:
    engine = opened_target(path, precision, STATES).engine
    assert isinstance(engine, NativeEngine)
    return engine


def head(path: Path, precision: str = "fp32") -> HeadEngine:
    spec = ModelSpec(mtp_path(str(path)), "native", precision, threads=1, target=str(path))
    engine = open_model(spec).engine
    assert isinstance(engine, HeadEngine)
    return engine


def states_of(engine: NativeEngine, *parts: list[int]) -> NDArray[np.uint16]:
    """Of a row that is fed these parts."""
    row = engine.model.open(Sampling(), sum(map(len, parts)))
    answers = [engine.model.forward([NativeFeed(row, part, choose=0, states=True)])[0] for part in parts]
    engine.model.close_row(row)
    return np.concatenate([answer.states for answer in answers if answer.states is not None])


def stored_in(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def as_floats(states: NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy((states.astype(np.uint32) << 16).view(np.float32).copy())


def test_the_types_are_those_of_the_tiny_models() -> None:
    assert {tiny_config(family).model_type for family in ONE} == set(LAYOUTS)


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each not in (DENSE, LATENT))) for each in ONE]
)
@torch.no_grad()
def test_a_layer_proposes_what_it_does_in_transformers(tmp_path: Path, family: str) -> None:
    layer = with_mtp(family, tmp_path)
    states = states_of(native(tmp_path), TOKENS[:6], TOKENS[6:])
    found = last_norm(layer.target)(as_floats(states))
    wanted = layer.target(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states[-1][0]
    assert (found - wanted).abs().max() < 0.02 * wanted.abs().max(), "they are rounded to bf16"

    engine = head(tmp_path)
    row = engine.model.open(Sampling(), len(TOKENS))
    engine.model.skip(row, TOKENS[:1])
    first = engine.model.forward([NativeFeed(row, TOKENS[1:6], choose=5, logits=5, given=states[:5])])[0]
    reference, _ = layer.read(found[:5], TOKENS[1:6])
    assert np.abs(first.logits - reference.numpy()).max() < 1e-4 * float(reference.abs().max())
    feed = NativeDecodeFeed(row, TOKENS[6:], 4, given=states[5:-1])
    (chosen, _, _), *_ = engine.model.decode([feed], NativeStopRule())[0]
    assert chosen == layer.proposed(found[:-1], TOKENS[1:], 4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe", "mellum"])
@torch.no_grad()
def test_the_names_of_tensors_are_those_that_transformers_reads(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For these families it has MTP layers of its own."""
    layer = with_mtp(family, tmp_path)
    main = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    if family != "mellum":  # it knows the published models' number of layers
        behind = rf"model\.layers\.{main.config.num_hidden_layers}\."
        monkeypatch.setattr(main, "_keys_to_ignore_on_load_unexpected", [behind])
    theirs = MtpModel.from_pretrained(main)
    states = main(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states[-1][:, :-1]
    positions = torch.arange(1, len(TOKENS))[None]
    cache = MtpCache(config=main.config.get_mtp_config())
    wanted = theirs.forward_layer(0, states, positions, cache, input_ids=torch.tensor([TOKENS[1:]]))[0]
    _, found = layer.read(states[0], TOKENS[1:])
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("family", [RECURRENT, pytest.param("qwen3-5-moe", marks=pytest.mark.slow)])
def test_a_row_that_went_back_returns_the_states_of_its_new_tokens_alone(tmp_path: Path, family: str) -> None:
    """A recurrent state goes back to a snapshot, and the tokens behind that are fed again."""
    with_mtp(family, tmp_path)
    engine = native(tmp_path)
    wanted = states_of(engine, TOKENS)
    row = engine.model.open(Sampling(), len(TOKENS))
    engine.model.forward([NativeFeed(row, TOKENS, choose=0)])
    engine.model.truncate(row, 9)
    other = engine.model.open(Sampling(), 3)
    feeds = [NativeFeed(other, TOKENS[:3], choose=1, states=True), NativeFeed(row, TOKENS[9:], choose=1, states=True)]
    found = [answer.states for answer in engine.model.forward(feeds)]
    np.testing.assert_array_equal(found[0], wanted[:3])
    np.testing.assert_array_equal(found[1], wanted[9:])


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        (RECURRENT, "w4a8"),
        *(pytest.param(each, "w4a8", marks=pytest.mark.slow) for each in ONE if each != RECURRENT),
        pytest.param(LATENT, "fp32", marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_plain_decoding(tmp_path: Path, family: str, precision: str) -> None:
    with_mtp(family, tmp_path, apt=True)
    model, draft = opened_target(tmp_path, precision, STATES), opened_draft(tmp_path / "mtp", tmp_path, "w4a8")
    rows = some_rows(9)
    plain, _ = write(pair(opened_target(tmp_path, precision, ()), 4, 0, None), rows)
    assisted, verifier = write(pair(model, 4, 4, draft_of(draft, 500), 500, STATES), rows)
    assert {key: row.tokens for key, row in assisted.items()} == {key: row.tokens for key, row in plain.items()}
    assert verifier.counters.accepted > 0.2 * verifier.counters.tokens


@pytest.mark.parametrize("family", ONE)
def test_the_packed_weights_are_those_of_the_model_without_states(family: str) -> None:
    """So texts do not depend on whether states are returned, and the cache holds the weights once."""
    values = json.loads(tiny_config(family).to_json_string())
    plain, with_states = (build_program(values, Format.W4A8, states=states) for states in ((), STATES))
    assert (plain.weights, norm_groups(plain)) == (with_states.weights, norm_groups(with_states))
    assert (plain.hidden_out, with_states.hidden_out) == (0, values["hidden_size"])


@pytest.mark.parametrize(
    ("family", "bits"),
    [
        (DENSE, 4),
        *(pytest.param(each, 8, marks=pytest.mark.slow) for each in (DENSE, LATENT, RECURRENT, "nemotron-h-moe", "glm4")),
    ],
)
def test_a_quantised_model_keeps_its_layer(tmp_path: Path, family: str, bits: int) -> None:
    """Unquantised, and rounded on load: rows of a model whose layer fits well are drafted as before."""
    with_mtp(family, tmp_path / "model", apt=True)
    path, out = tmp_path / "model", tmp_path / "out"
    request = Wanted(str(path), str(out), bits, "rtn", None, (), read_model_info(str(path)).digest)
    quantise(request, lambda text: None)
    before, after = load_file(path / "model.safetensors"), stored_in(out)
    under, _, names = names_of(family, json.loads((path / "config.json").read_text()).get("num_hidden_layers", 0))
    copied = [name for name in before if name.startswith(under) and not name.endswith(COPIES)]
    assert set(names) <= set(copied)
    assert all(torch.equal(before[name], after[name]) for name in copied)
    assert has_mtp(out)
    precision = "w4a8" if bits == 4 else "w8a8"
    model, draft = opened_target(out, precision, STATES), opened_draft(out / "mtp", out, precision)
    assert isinstance(draft.engine, HeadEngine)
    formats = {weight.format for weight in draft.engine.model.program.weights if not weight.table}
    assert PRECISIONS[precision].format in formats
    assert Format.BF16 not in formats
    rows = some_rows(6)
    plain, _ = write(pair(opened_target(out, precision, ()), 4, 0, None), rows)
    assisted, verifier = write(pair(model, 4, 4, draft_of(draft, 500), 500, STATES), rows)
    assert {key: row.tokens for key, row in assisted.items()} == {key: row.tokens for key, row in plain.items()}
    assert verifier.counters.accepted > 0.2 * verifier.counters.tokens


def test_a_layer_that_cannot_be_read_is_not_copied(tmp_path: Path) -> None:
    """It would be found at the end of hours of work."""
    path, out = tmp_path / "model", tmp_path / "out"
    with_mtp(DENSE, path)
    rewritten(path, without("mtp.norm.weight"))
    quantise(Wanted(str(path), str(out), 4, "rtn", None, (), read_model_info(str(path)).digest), lambda text: None)
    assert not any(name.startswith("mtp.") for name in stored_in(out))


@pytest.mark.parametrize("family", ONE)
def test_keys_that_a_configuration_leaves_out_change_nothing(family: str) -> None:
    """Of layers by their numbers: their defaults are those of a whole model, of which the layer is no part."""
    values = json.loads(tiny_config(family).to_json_string())
    by_number = (*BY_NUMBER, "layer_types", "mlp_layer_types", "layers_block_type")
    left = {key: value for key, value in values.items() if key not in by_number}
    if family == "glm4-moe-lite":  # where the list is missing, it has one number of layers without experts
        left["first_k_dense_replace"] = 1
    said, unsaid = (build_mtp(mtp_layer(each, "config.json"), Format.BF16) for each in (values, left))
    assert said == unsaid


# How it is named


def test_mtp_below_a_model_names_its_layer(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "model")
    assert model_of(tmp_path / "model" / "mtp") == tmp_path / "model"
    assert model_of(tmp_path / "model") is None
    assert model_of(tmp_path / "none" / "mtp") is None
    assert model_named("Qwen/Qwen3.5-4B/mtp") == "Qwen/Qwen3.5-4B"
    assert model_named("owner/mtp") is None, "a model of the hub"
    assert model_named(str(tmp_path / "model" / "mtp")) == str(tmp_path / "model")
    (tmp_path / "mtp").mkdir()
    assert model_of(tmp_path / "mtp") is model_named(str(tmp_path / "mtp")) is None, "a directory of that name"
    assert model_named(f"{tmp_path}/model/mtp/") == str(tmp_path / "model")
    assert mtp_path("model/") == "model/mtp"


def test_names_below_the_home_directory_and_impossible_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_tiny("qwen3", tmp_path / "models" / "mtp")
    assert model_named("~/models/mtp") is None, "a directory of that name"
    assert model_named("~/models/mtp/mtp") == "~/models/mtp"
    with pytest.raises(ModelError, match="does not exist"):
        read_model_info(f"{tmp_path}/{'a' * 300}/mtp")


@pytest.mark.parametrize("section", [{"quant_method": "aqlm"}, {"quant_method": "gptq"}, 5])
def test_a_quantised_checkpoint_that_only_transformers_may_read_has_no_usual_draft(tmp_path: Path, section: object) -> None:
    with_mtp(DENSE, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": section}))
    assert not has_mtp(tmp_path)


# What is refused


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        read_program(Path(mtp_path(str(path))), PRECISIONS["w4a8"])
    return str(error.value)


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {each: tensor for each, tensor in tensors.items() if each != name}


def test_what_has_no_such_layer_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "qwen3")
    sentence = 'multi-token prediction (--draft mtp) is not supported for models of the type "qwen3"; those of deepseek_v3,'
    assert sentence in refusal(tmp_path / "qwen3")
    assert sentence in str(native_supports(mtp_path(str(tmp_path / "qwen3"))))
    save_tiny(DENSE, tmp_path / "plain")
    assert 'has no layer for multi-token prediction, "mtp.fc.weight" is missing' in refusal(tmp_path / "plain")
    assert native_supports(mtp_path(str(tmp_path / "plain"))) is None, "which tensors there are is asked before a start"


def test_a_layer_that_is_not_what_the_configuration_says_is_refused(tmp_path: Path) -> None:
    with_mtp(DENSE, tmp_path)
    rewritten(tmp_path, lambda tensors: tensors | {"mtp.more.weight": torch.zeros(3)})
    assert "the checkpoint holds 'mtp.more.weight', which no part of this model asks for" in refusal(tmp_path)
    read_program(tmp_path, PRECISIONS["w4a8"])
    rewritten(tmp_path, without("mtp.more.weight"))
    read_program(Path(mtp_path(str(tmp_path))), PRECISIONS["w4a8"])
    # Of several layers the first is used.
    rewritten(tmp_path, lambda tensors: tensors | {"mtp.layers.1.more.weight": torch.zeros(3)})
    read_program(Path(mtp_path(str(tmp_path))), PRECISIONS["w4a8"])
    rewritten(tmp_path, without("mtp.norm.weight"))
    assert 'lacks the weight "mtp.norm.weight"' in refusal(tmp_path)


def test_a_layer_that_cannot_be_read_is_no_draft_by_itself(tmp_path: Path) -> None:
    with_mtp(DENSE, tmp_path, vocab_size=4096)
    for file in find("pocket").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    _, draft, name, notes = prepare_pair(str(tmp_path), "auto")
    assert draft is not None
    assert (draft.family, name, notes) == ("mtp", "mtp+suffix", [])
    assert prepare_pair(str(tmp_path), "auto", native=False)[1:] == (None, "suffix", []), "where it could not run"
    rewritten(tmp_path, without("mtp.norm.weight"))
    _, draft, name, notes = prepare_pair(str(tmp_path), "auto")
    assert (draft, name) == (None, "suffix")
    assert "the usual draft cannot be used, proposing by suffix instead: " in notes[0]
    with pytest.raises(ModelError, match=r'lacks the weight "mtp\.norm\.weight"'):
        prepare_pair(str(tmp_path), "mtp")


@pytest.mark.parametrize("key", ["layer_types", "mtp_layer_types", "num_hidden_layers", "mlp_layer_types"])
@pytest.mark.parametrize("value", [5, "full_attention", {}, [], True, [[]]])
def test_odd_values_are_refused_or_change_nothing(key: str, value: object) -> None:
    for family in (DENSE, "glm4-moe-lite"):
        values = json.loads(tiny_config(family).to_json_string()) | {key: value}
        try:
            build_mtp(mtp_layer(values, "config.json"), Format.BF16)
        except ModelError as error:
            assert "config.json" in str(error)


def test_it_is_described_as_a_head_of_its_own_model(tmp_path: Path) -> None:
    with_mtp(DENSE, tmp_path)
    model, layer = read_model_info(str(tmp_path)), read_model_info(mtp_path(str(tmp_path)))
    assert (layer.head, layer.path, layer.digest) == (True, mtp_path(model.path), model.digest)
