"""The hf engine on small random models: ragged batches where the model can, one row at a time where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.families.settings import configuration
from outrider.workers.engines.corrections import Corrections, KeptChoice
from outrider.workers.engines.engine import Engine, Feed
from outrider.workers.engines.hf import HfEngine
from outrider.workers.engines.hf_batching import RowFeeding
from outrider.workers.engines.hf_rows import HfRowEngine
from outrider.workers.errors import ModelError
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models import hf_loading
from outrider.workers.models.hf_loading import load_hf
from outrider.workers.models.opening import check_weights, open_model
from outrider.workers.models.probe import close, prompt_of, written_by_transformers
from outrider.workers.models.twins import NEAR, build_twin, twin_config

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=101, max_position_embeddings=64)
GPT = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=101, n_positions=64)
RAGGED = {
    "llama": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2},
    "mistral": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 5},
    "qwen2": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 4},
    "qwen3": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16},
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "gpt_bigcode": {**GPT, "multi_query": True},
    "gpt2": GPT,
    "gpt_neox": {**SMALL, "intermediate_size": 48},
}
# Their attention does what the ragged path does not know (biases by distance, capped scores), or is not replaceable.
ROW_BY_ROW = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 101, "seq_length": 64},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 101, "max_seq_len": 64},
}
PROMPT = [5, 17, 3, 99, 42, 8, 23, 61, 77, 2, 31]
WRITTEN = 12


def save(folder: Path, family: str, settings: dict) -> Path:
    torch.manual_seed(3)
    # Random weights of the usual size make every token alike; larger ones give every position a clear best.
    config = AutoConfig.for_model(family, **settings, initializer_range=0.3, eos_token_id=None, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return folder


def greedy_by_transformers(folder: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(WRITTEN):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def greedy_in_company(engine: Engine) -> list[int]:
    """Row 0 is written beside a row of other length; every other step verifies a wrong guess that is taken back."""
    engine.open(0, Sampling(), len(PROMPT))
    engine.open(1, Sampling(), 3)
    engine.feed([Feed(0, PROMPT[:4], 0)])
    first, _ = engine.feed([Feed(0, PROMPT[4:], 1), Feed(1, [7, 8, 9], 1)])
    written = list(first.tokens)
    while len(written) < WRITTEN:
        guess = [(written[-1] + 1) % 101] if len(written) % 2 else []
        length = engine.length(0)
        _, chosen = engine.feed([Feed(1, [len(written)], 1), Feed(0, [written[-1], *guess], 1 + len(guess))])
        engine.truncate(0, length + 1)
        written.append(chosen.tokens[0])
    for row in (0, 1):
        engine.close(row)
    return written


@pytest.mark.one_in(8)
@pytest.mark.parametrize("family", RAGGED)
def test_a_family_feeds_raggedly_and_writes_what_transformers_writes(tmp_path, family):
    folder = save(tmp_path, family, RAGGED[family])
    engine, _, notes = load_hf(ModelSpec(str(folder), "hf", "fp32"))
    assert isinstance(engine, HfEngine), notes
    assert greedy_in_company(engine) == greedy_by_transformers(folder)


def test_a_job_on_a_card_says_that_its_attention_is_not_cudnns(tmp_path, monkeypatch):
    """One that was begun when it was has other bits."""
    folder = save(tmp_path, "llama", RAGGED["llama"])
    on_the_cpu = load_hf(ModelSpec(str(folder), "hf", "fp32"))
    monkeypatch.setattr(hf_loading, "load_hf", lambda spec: on_the_cpu)
    said = {device: open_model(ModelSpec(str(folder), "hf", "fp32", device)).numeric_path for device in ("cpu", "cuda:0")}
    assert "attention" not in said["cpu"]
    assert said["cuda:0"]["attention"] == "without cuDNN"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("family", RAGGED)
def test_a_family_writes_the_same_on_a_card(tmp_path, family):
    """Without cuDNN's attention, which makes a plan for every length that a row comes to."""
    folder = save(tmp_path, family, RAGGED[family])
    engine, _, notes = load_hf(ModelSpec(str(folder), "hf", "fp32", "cuda:0"))
    assert isinstance(engine, HfEngine), notes
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert greedy_in_company(engine) == greedy_by_transformers(folder)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ROW_BY_ROW)
def test_other_families_run_row_by_row_and_say_so(tmp_path, family):
    folder = save(tmp_path, family, ROW_BY_ROW[family])
    engine, _, notes = load_hf(ModelSpec(str(folder), "hf", "fp32"))
    assert isinstance(engine, HfRowEngine)
    assert "rows run one at a time" in notes[0]
    assert greedy_in_company(engine) == greedy_by_transformers(folder)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llama", "mistral", "bloom"])
def test_a_fork_goes_on_from_where_it_left_its_source(tmp_path, family):
    folder = save(tmp_path, family, {**RAGGED, **ROW_BY_ROW}[family])
    engine, _, _ = load_hf(ModelSpec(str(folder), "hf", "fp32"))
    assert engine.forks == (family in RAGGED)
    engine.open(0, Sampling(), len(PROMPT))
    engine.feed([Feed(0, PROMPT[:8], 0)])
    for row, length in ((1, 8), (2, 5), (3, 1)):
        engine.fork(row, 0, length, Sampling(), len(PROMPT))
        assert engine.length(row) == length
    engine.feed([Feed(2, [9, 9, 9], 0)])
    engine.close(2)
    choices = [engine.feed([Feed(row, PROMPT[engine.length(row) :], 1)])[0].tokens for row in (0, 1, 3)]
    assert choices == [greedy_by_transformers(folder)[:1]] * 3


def test_a_model_with_a_state_runs_one_row_at_a_time_and_says_why(tmp_path):
    """It says nothing of how long a row may be, since it has no positions."""
    folder = save(tmp_path, "mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 101, "state_size": 8})
    engine, model_info, notes = load_hf(ModelSpec(str(folder), "hf", "fp32"))
    assert model_info.context >= 1 << 20
    assert isinstance(engine, HfRowEngine) and engine.feeding is RowFeeding.STEPPED
    assert "because it keeps a recurrent state" in notes[0]
    assert greedy_in_company(engine) == greedy_by_transformers(folder)


def test_a_model_whose_tokens_look_ahead_is_refused_before_its_weights_are_read(tmp_path):
    folder = save(tmp_path, "bert", {**SMALL, "intermediate_size": 48})
    (folder / "model.safetensors").write_bytes(safe_nothing(folder / "model.safetensors"))
    with pytest.raises(ModelError, match=r"\(bert\) cannot be run by the hf engine: its tokens attend to later ones"):
        load_hf(ModelSpec(str(folder), "hf", "fp32"))


def safe_nothing(file: Path) -> bytes:
    """The header alone says what there is; the numbers are gone."""
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    return whole[:start] + bytes([255]) * (len(whole) - start)


@pytest.mark.parametrize("family", ["phi3, long rope", "llama, long rope"])
def test_a_row_crosses_the_switch_of_its_rope_and_comes_back(family):
    """As with candidates beyond the switch that do not hold: each score is that of transformers' own text, every time."""
    model = build_twin(twin_config(configuration(family)))
    text = written_by_transformers(model, prompt_of(NEAR.switch - 3))
    engine = HfEngine(model, 100)
    assert engine._switch is not None and engine._switch.anew == family.startswith("phi3")
    engine.open(0, Sampling(), len(text.prompt))
    close(engine.logits([Feed(0, text.prompt, 1)]), text.scores[:1])
    for count in (1, 3, 5, 9, 4, 2, 9):
        fed = text.written[:count]
        assert close(engine.logits([Feed(0, fed, count)]), text.scores[1 : 1 + count]), count
        engine.truncate(0, len(text.prompt))
    # A fork goes on by itself, on either side.
    engine.feed([Feed(0, text.written[:9], 0)])
    for length in (5, len(text.prompt), len(text.prompt) + 2, len(text.prompt) + 8):
        engine.fork(1, 0, length, Sampling(), len(text.prompt))
        rest = [*text.prompt, *text.written[:9]][length:]
        assert close(engine.logits([Feed(1, rest, 1)]), text.scores[9:10]), length


def test_weights_that_transformers_does_not_find_are_refused_beforehand(tmp_path: Path) -> None:
    folder = save(tmp_path / "shards", "llama", RAGGED["llama"])
    check_weights(str(folder), "hf")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    check_weights(str(folder), "native")
    with pytest.raises(
        ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json, which the hf"
    ):
        check_weights(str(folder), "hf")


def test_weights_that_are_missing_or_not_numbers_are_named(tmp_path):
    folder = save(tmp_path / "nan", "llama", RAGGED["llama"])
    weights = load_file(folder / "model.safetensors")
    broken = {**weights, "model.norm.weight": torch.full((32,), float("nan"))}
    save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r'"model\.norm\.weight" holds a value that is not a number'):
        load_hf(ModelSpec(str(folder), "hf", "fp32"))
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r'lacks 1 of its weights, first "model\.layers\.1\.mlp\.up_proj\.weight"'):
        load_hf(ModelSpec(str(folder), "hf", "fp32"))


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "wide", "llama", RAGGED["llama"])
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:-1].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r'first "model\.layers\.1\.mlp\.up_proj\.weight" \(47 × 32, not 48 × 32\)'):
        load_hf(ModelSpec(str(folder), "hf", "fp32"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("named", ["flash_attention_2", "somebody/kernel", {"": "somebody/kernel"}, "nonsense"])
def test_kernels_that_a_configuration_names_are_not_looked_for(named: object, tmp_path: Path) -> None:
    """transformers would fetch them from the model hub, as code, or fail where they are not."""
    folder = save(tmp_path / "model", "llama", RAGGED["llama"])
    config = json.loads((folder / "config.json").read_text())
    for key in ("_attn_implementation", "attn_implementation", "experts_implementation", "_experts_implementation"):
        (folder / "config.json").write_text(json.dumps(config | {key: named}))
        engine, _, _ = load_hf(ModelSpec(str(folder), "hf", "fp32"))
        assert isinstance(engine, HfEngine)
        assert (engine.own_attention, engine.model.config._experts_implementation) == ("sdpa", "eager"), key


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("set_to", "expected"), [(None, "NO"), ("YES", "YES")])
def test_kernels_are_not_fetched_from_the_model_hub_unless_somebody_asks_for_it(set_to: str | None, expected: str) -> None:
    asked = {} if set_to is None else {"USE_HUB_KERNELS": set_to}
    environment = {name: value for name, value in os.environ.items() if name != "USE_HUB_KERNELS"} | asked
    program = (
        "import outrider.workers.models.opening, sys; early = 'transformers' in sys.modules; "
        "import os; print(early, os.environ['USE_HUB_KERNELS'])"
    )
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", expected]


def test_weights_whose_sum_is_too_large_for_fp16_are_sound_and_those_that_are_too_large_are_told(tmp_path: Path) -> None:
    folder = save(tmp_path / "half", "llama", RAGGED["llama"])
    weights = {name: weight.half() for name, weight in load_file(folder / "model.safetensors").items()}
    wide = {**weights, "model.layers.0.mlp.up_proj.weight": torch.full((48, 32), 60.0).half()}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    load_hf(ModelSpec(str(folder), "hf", "fp16"))
    wide = {**weights, "model.layers.0.mlp.up_proj.weight": torch.full((48, 32), 1e5)}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r'up_proj\.weight" holds a value that is too large for fp16; choose bf16'):
        load_hf(ModelSpec(str(folder), "hf", "fp16"))


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_model_whose_scores_are_not_numbers_in_fp16_is_refused(tmp_path: Path, family: str) -> None:
    folder = save(tmp_path / family, family, {**RAGGED, **ROW_BY_ROW}[family])
    weights = load_file(folder / "model.safetensors")
    widened = {name: weight * (3e3 if "mlp" in name and weight.dim() > 1 else 1.0) for name, weight in weights.items()}
    save_file(widened, folder / "model.safetensors", metadata={"format": "pt"})
    load_hf(ModelSpec(str(folder), "hf", "bf16"))
    with pytest.raises(ModelError, match="gives scores that are not numbers in fp16; choose another precision, bf16 or"):
        load_hf(ModelSpec(str(folder), "hf", "fp16"))


def test_a_bin_checkpoint_is_read_without_running_it(tmp_path):
    folder = save(tmp_path / "safe", "opt", RAGGED["opt"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    engine, _, _ = load_hf(ModelSpec(str(pickled), "hf", "fp32"))
    assert greedy_in_company(engine) == greedy_by_transformers(folder)

    class Trap:
        def __reduce__(self):
            return (print, ("this must not run",))

    torch.save({"model.decoder.embed_tokens.weight": Trap()}, pickled / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"more than weights|cannot be loaded"):
        load_hf(ModelSpec(str(pickled), "hf", "fp32"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["llama", "mistral", "opt"])
def test_eager_attention_computes_what_fused_attention_does(tmp_path: Path, family: str) -> None:
    folder = save(tmp_path / "model", family, RAGGED[family])
    logits = []
    for fast in (True, False):
        engine, _, _ = load_hf(ModelSpec(str(folder), "hf", "fp32", fast_attention=fast))
        assert isinstance(engine, HfEngine) and engine.fused == fast
        engine.open(0, Sampling(), len(PROMPT))
        engine.feed([Feed(0, PROMPT[:6], 0)])
        logits.append(engine.logits([Feed(0, PROMPT[6:], len(PROMPT) - 6)]))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits[0], logits[1]), "two ways of summing leave different last bits"


def test_a_file_that_is_written_to_does_not_change_the_model(tmp_path: Path) -> None:
    """Where the numbers need no conversion, transformers only maps them."""
    folder = save(tmp_path / "model", "llama", RAGGED["llama"])
    engine, _, _ = load_hf(ModelSpec(str(folder), "hf", "fp32"))
    before = greedy_in_company(engine)
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(5000)
        stream.write(bytes(20_000))
    assert greedy_in_company(engine) == before


def test_a_draft_that_learns_is_corrected_as_on_the_kernels(tmp_path: Path) -> None:
    """What is told moves the scores of both tokens by half, for the state that they were scored from."""
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path, "llama", RAGGED["llama"]), attn_implementation="eager")
    engine = HfEngine(model, 64)
    engine.correct_choices()
    engine.open(0, Sampling(), len(PROMPT))
    scores = engine.logits([Feed(0, PROMPT, 1)])[0]
    own, right = (int(token) for token in scores.topk(2).indices)
    margin = float(scores[own] - scores[right])

    def choice() -> tuple[int, float]:
        engine.truncate(0, len(PROMPT) - 1)
        chosen = engine.feed([Feed(0, PROMPT[-1:], 1)])[0]
        return chosen.tokens[0], chosen.margins[0]

    told = 0
    while choice()[0] == own:
        assert engine.learn(0, len(PROMPT), [right]) == (0, 0)
        told += 1
    assert told == int(margin) + 1
    assert choice() == (right, pytest.approx(told - margin, abs=1e-3))
    assert engine.learn(0, len(PROMPT), [right]) == (1, 0)
    assert engine.learn(0, len(PROMPT), [own]) == (0, 1)
    assert engine.learn(0, len(PROMPT) + 1, [own]) == (0, 0), "nothing was chosen there"
    assert engine._rows[0].kept_choices[len(PROMPT)].state.base is None, "the scores beside it are let go"
    # Others see no trace of it: scores that are asked for are the model's own.
    engine.truncate(0, len(PROMPT) - 1)
    assert close(engine.logits([Feed(0, PROMPT[-1:], 1)]), scores[None])
    engine.release()
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_corrections_are_those_of_the_tokens_that_were_wrong_last_and_are_let_be_where_they_do_harm() -> None:
    corrections, state = Corrections(most=2), np.array([3.0, 4.0], np.float32)
    scores = np.zeros(5, np.float32)
    assert corrections.learn(KeptChoice(1, 1, state), 2) == 0
    np.testing.assert_allclose(corrections.corrected(scores, state), [0.0, -0.5, 0.5, 0.0, 0.0])
    np.testing.assert_allclose(corrections.corrected(scores, -2.0 * state), [0.0, 1.0, -1.0, 0.0, 0.0])
    assert corrections.learn(KeptChoice(1, 1, state), 3) == 0
    np.testing.assert_allclose(corrections.corrected(scores, state), [0.0, -1.0, 0.0, 0.5, 0.0])
    assert corrections.learn(KeptChoice(-1, -1, state), 4) == 0, "there was no choice"
    np.testing.assert_allclose(corrections.corrected(scores, state), [0.0, -1.0, 0.0, 0.5, 0.0])
    for harm in range(1, 5):
        assert corrections.trusted
        assert corrections.learn(KeptChoice(1, 3, state), 1) == -1, harm
    assert not corrections.trusted
    assert corrections.learn(KeptChoice(1, 3, state), 3) == 1
    assert corrections.trusted


def test_a_head_that_is_no_plain_matrix_learns_nothing(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path, "llama", RAGGED["llama"]), attn_implementation="eager")
    engine = HfEngine(model, 64)
    model.set_output_embeddings(torch.nn.Sequential(model.get_output_embeddings()))
    engine.correct_choices()
    assert engine.learner is None
    engine.release()


def test_falcon_s_biases_by_distance_are_added_once(tmp_path: Path) -> None:
    """As the model's makers and transformers' default have it; with attention of its own transformers adds them twice."""
    settings = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
    folder = save(tmp_path / "model", "falcon", settings | {"max_position_embeddings": 64, "multi_query": False})
    engine, _, _ = load_hf(ModelSpec(str(folder), "hf", "fp32", fast_attention=False))
    engine.open(0, Sampling(), len(PROMPT))
    found = engine.logits([Feed(0, PROMPT, len(PROMPT))])
    usual = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = usual(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
        usual.config._attn_implementation = "eager"
        twice = usual(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert (expected - twice).abs().max() > 0.05
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
