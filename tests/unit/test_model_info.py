"""Facts about a model that are read before its weights, and refusals of directories that hold no usable model."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from fake_hub import CONFIG, FOREIGN, PUBLISHED, SHARDS, Hub
from huggingface_hub import constants, errors
from safetensors.numpy import save_file
from second_user import as_guest, only_root
from transformers import GenerationConfig

from outrider.workers.errors import ModelError, UsageError
from outrider.workers.models.generation_settings import SETTINGS
from outrider.workers.models.headers import INDEX
from outrider.workers.models.model_info import POCKET, ModelInfo, find, read_model_info, weight_files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    write_weights(directory, 7)
    return directory


def write_weights(directory: Path, *values: float) -> None:
    save_file({"model.norm.weight": np.array(values, np.float32)}, directory / "model.safetensors")


def configure(model: Path, **changes: Any) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def message(name: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_model_info(str(name))
    return str(caught.value)


def test_a_whole_model(model: Path) -> None:
    model_info = read_model_info(str(model))
    assert (model_info.family, model_info.context, model_info.vocabulary, model_info.dtype) == (
        "llama",
        64,
        100,
        "bfloat16",
    )
    assert (model_info.end_tokens, model_info.weight_bytes) == ((2,), (model / "model.safetensors").stat().st_size)
    assert model_info.path == str(model)


@pytest.mark.parametrize(("declared", "end"), [(5, (5,)), ([7, 3], (3, 7)), (None, (2,))])
def test_generation_settings_go_over_the_configuration(model: Path, declared: Any, end: tuple[int, ...]) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    assert read_model_info(str(model)).end_tokens == end


def test_a_model_may_have_no_end(model: Path) -> None:
    configure(model, eos_token_id=None)
    assert read_model_info(str(model)).end_tokens == ()


def test_limits_may_stand_one_level_down(model: Path) -> None:
    configure(model, text_config={"vocab_size": 7, "n_positions": 9})
    model_info = read_model_info(str(model))
    assert (model_info.vocabulary, model_info.context) == (7, 9)


def test_directories_that_are_no_model(model: Path, tmp_path: Path) -> None:
    assert message(tmp_path) == f"{tmp_path} has no config.json: is this a language model's directory?"
    (model / "model.safetensors").unlink()
    assert message(model) == f"{model} holds no weights: neither *.safetensors nor *.bin"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "config.json cannot be read: Expecting property name"),
        (b"\xff\xfe", "config.json cannot be read: 'utf-8' codec can't decode"),
        (b"[]", "config.json does not hold a JSON object"),
        (b"{}", 'config.json has no "model_type"'),
    ],
)
def test_broken_configurations(model: Path, content: bytes, expected: str) -> None:
    (model / "config.json").write_bytes(content)
    assert expected in message(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": None},
        {"vocab_size": "100"},
        {"vocab_size": 0},
        {"vocab_size": True},
        {"max_position_embeddings": -1},
        {"max_position_embeddings": None},
        {"max_position_embeddings": 0, "model_type": "falcon_text"},
    ],
)
def test_limits_that_are_none(model: Path, changes: dict[str, Any]) -> None:
    configure(model, **changes)
    missing = message(model)
    if changes.get("vocab_size", 100) == 100:
        assert missing.endswith('how long a row may be: add "max_position_embeddings", a positive whole number')
    else:
        assert missing.endswith('how many tokens there are: add "vocab_size", a positive whole number')


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_type_that_is_no_text(model: Path, key: str) -> None:
    configure(model, **{"dtype": None, key: [1, 2]})
    assert message(model).endswith(f'config.json: "{key}" must be a text such as "bfloat16", got [1, 2]')


@pytest.mark.parametrize("limit", ["x", "-1", "nan", "1e300"])
def test_a_limit_of_the_cache_that_is_no_number(model: Path, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_GB", limit)
    with pytest.raises(UsageError, match=f'^OUTRIDER_CACHE_GB="{limit}" is not a number of gigabytes; 0 keeps nothing, 50'):
        read_model_info(str(model))


@pytest.mark.parametrize("family", ["falcon", "bloom"])
def test_a_family_whose_configurations_state_no_length(model: Path, family: str) -> None:
    configure(model, model_type=family, max_position_embeddings=None)
    assert read_model_info(str(model)).context == 2048


def test_a_scaling_of_rope_that_transformers_would_pass_over_is_refused(model: Path) -> None:
    configure(model, model_type="olmo3", rope_scaling={"type": "yarn", "factor": 4.0})
    assert message(model).endswith('by "type", which transformers does not read: write "rope_type"')
    for scaling in ({"type": "default"}, {"rope_type": "yarn", "factor": 4.0}):
        configure(model, model_type="olmo3", rope_scaling=scaling)
        assert read_model_info(str(model)).family == "olmo3"


def test_a_scaling_of_rope_that_transformers_never_reads_is_refused(model: Path) -> None:
    for scaling in ({"type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}):
        configure(model, model_type="cohere2_moe", rope_scaling=scaling)
        assert message(model).endswith(
            '"rope_scaling" of this family is not read by transformers: say it in "rope_parameters"'
        )
    for unused in (None, {"type": "default"}):
        configure(
            model, model_type="cohere2_moe", rope_scaling=unused, rope_parameters={"rope_type": "linear", "factor": 2.0}
        )
        assert read_model_info(str(model)).family == "cohere2_moe"


def test_a_model_with_an_encoder_is_refused_and_its_decoder_alone_is_not(model: Path) -> None:
    configure(model, is_encoder_decoder=True)
    assert message(model).endswith("config.json is of an encoder-decoder model, and outrider runs decoders only")
    configure(model, is_encoder_decoder=True, is_decoder=True)
    read_model_info(str(model))


def test_an_adapter_is_not_passed_over(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    assert "adapter_config.json: an adapter is merged into its model before it runs (outrider merge " in message(model)
    (model / "config.json").unlink()
    assert "an adapter is merged into its model" in message(model)


NEUTRAL = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [], "forced_eos_token_id": None}
NEUTRAL |= {"num_beams": 1, "token_healing": False, "stop_strings": None, "max_length": 20, "typical_p": 1.0}
NEUTRAL |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "cache_implementation": "hybrid", "max_time": None}
# Everything that transformers' generate is known to change a text by.
USED = {"repetition_penalty": 1.05, "no_repeat_ngram_size": 2, "suppress_tokens": [0], "forced_eos_token_id": 0}
USED |= {"num_beams": 4, "token_healing": True, "stop_strings": "###", "dola_layers": "high", "penalty_alpha": 0.6}
USED |= {"exponential_decay_length_penalty": [8, 1.1], "watermarking_config": {"bias": 2.5}, "typical_p": 0.9}
USED |= {"epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "top_h": 0.4, "min_new_tokens": 3, "bad_words_ids": [[3]]}
USED |= {"guidance_scale": 1.5, "sequence_bias": [[[3], 2.0]], "begin_suppress_tokens": [3], "forced_bos_token_id": 0}
USED |= {"cache_implementation": "quantized", "max_time": 1.0, "min_length": 4}


def settings_of(model: Path, settings: dict[str, Any]) -> ModelInfo:
    (model / "generation_config.json").write_text(json.dumps(settings))
    return read_model_info(str(model))


def test_settings_of_generate_that_change_texts_are_told(model: Path) -> None:
    assert settings_of(model, NEUTRAL | {"do_sample": True}).unfollowed == ()
    told = settings_of(model, USED)
    assert (set(told.unfollowed), told.settings) == (set(USED), "generation_config.json")


def test_settings_of_before_stand_in_the_configuration(model: Path) -> None:
    """transformers reads them there where no other file states any."""
    configure(model, **NEUTRAL)
    assert read_model_info(str(model)).unfollowed == ()
    configure(model, **USED, text_config={"vocab_size": 7, "n_positions": 9, "encoder_repetition_penalty": 2.0})
    told = read_model_info(str(model))
    assert (set(told.unfollowed), told.settings) == ({*USED, "encoder_repetition_penalty"}, "config.json")
    told = settings_of(model, {"repetition_penalty": 1.2})
    assert (told.unfollowed, told.settings) == (("repetition_penalty",), "generation_config.json")


def test_every_setting_of_transformers_is_known() -> None:
    """One that a later release adds has to be looked at: does it change texts?"""
    theirs = {name for name in GenerationConfig().__dict__ if not name.startswith("_")} - {"transformers_version"}
    assert theirs <= SETTINGS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": True, "top_k": 0, "min_p": 0.05}, {"temperature": 1.0, "min_p": 0.05}),
        ({"do_sample": True, "temperature": "hot", "top_p": True, "top_k": None}, {"top_k": 50}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"temperature": 0.6}, {}),
    ],
)
def test_how_a_model_would_sample(settings: dict[str, Any], expected: dict[str, float], model: Path) -> None:
    assert dict(settings_of(model, settings).sampling) == expected


def test_the_end_of_texts_is_that_of_the_whole_model_where_it_states_one(model: Path) -> None:
    """As transformers has it of models that hear."""
    text = {"vocab_size": 90, "n_positions": 9, "eos_token_id": 4}
    configure(model, eos_token_id=[3, 95], text_config=text)
    assert read_model_info(str(model)).end_tokens == (3,)
    configure(model, eos_token_id=None, text_config=text)
    assert read_model_info(str(model)).end_tokens == (4,)


def test_a_text_config_that_is_none_is_passed_over(model: Path) -> None:
    configure(model, text_config=5)
    assert read_model_info(str(model)).vocabulary == 100


@pytest.mark.parametrize("end", ["</s>", [1, "2"], {"a": 1}, 1.5, True])
def test_end_tokens_that_are_no_ids(model: Path, end: Any) -> None:
    configure(model, eos_token_id=end)
    assert '"eos_token_id" must be a token id or a list of them' in message(model)


def test_safetensors_go_before_pickles(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"old")
    (model / "training_args.bin").write_bytes(b"no weights")
    assert [path.name for path in weight_files(model)] == ["model.safetensors"]
    (model / "model.safetensors").unlink()
    assert [path.name for path in weight_files(model)] == ["pytorch_model.bin"]


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/no/where/at/all", "a/b/c"])
def test_paths_that_do_not_exist_are_not_looked_for_on_the_hub(name: str) -> None:
    assert message(name) == f'the model directory "{name}" does not exist'


def test_paths_that_cannot_exist() -> None:
    assert message("~nobody-of-that-name/x").startswith('the model directory "~nobody-of-that-name/x" does not exist')
    assert message("/" + "x" * 5000) == f'the model directory "/{"x" * 79}" does not exist: File name too long'


@only_root
def test_a_directory_of_another_user_is_not_said_to_lack_anything() -> None:
    """As where a colleague's home holds the model."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "closed").mkdir(mode=0o700)
        (folder / "closed/inside").mkdir()
        for asked, said in (
            (folder / "closed", f"{folder}/closed/config.json cannot be read: Permission denied"),
            (folder / "closed/inside", f'this user may not read the model directory "{folder}/closed/inside"'),
        ):
            assert as_guest(partial(message, asked)) == repr(said)


def test_a_file_is_no_directory_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    name = str(tmp_path / "model.safetensors")
    said = f"\"{name}\" is neither a model's directory nor a GGUF file; give the directory of the model's files"
    assert message(name) == said


def test_a_hub_id_that_is_not_cached_and_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert message("someone/a-model") == (
        f'"someone/a-model" is neither a directory nor in the local cache ({tmp_path}), and HF_HUB_OFFLINE is set: '
        "give a directory, or unset it where there is a network"
    )


WHOLE = set(PUBLISHED) - {".gitattributes", "README.md"}


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        (["config.json"], "it lacks config.json"),
        (["tokenizer.json"], "it lacks a tokenizer"),
        (SHARDS, "it lacks weights"),
        (SHARDS[1:], f"lacks '{SHARDS[1]}', which {INDEX} names"),
        ([INDEX, SHARDS[0]], "it has 1 of 2 files of weights"),
    ],
)
def test_a_download_that_was_cut_off_is_completed(
    lacking: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = Hub(tmp_path, monkeypatch).has(*WHOLE - set(lacking))
    hub.offline(True)
    sentence = message("org/big")
    assert sentence.startswith('the download of "org/big" is not complete (')
    assert f"{said}), and HF_HUB_OFFLINE is set: unset it" in sentence
    hub.offline(False)
    assert find("org/big") == hub.snapshot and (hub.asked, hub.there()) == (1, WHOLE)
    assert read_model_info("org/big").weight_bytes > 0
    assert hub.asked == 1, "a whole download needs no hub"


def test_a_cut_off_download_and_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = Hub(tmp_path, monkeypatch).has(*WHOLE - {SHARDS[1]})

    def unreachable(self: object, name: str, timeout: float) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    said = message("org/big")
    assert f"{hub.snapshot} lacks '{SHARDS[1]}', which {INDEX} names), and the model hub cannot be reached" in said


def test_what_was_published_and_is_needed_for_nothing_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = Hub(tmp_path, monkeypatch).has(*WHOLE)
    hub.remembers()
    hub.offline(True)
    assert find("org/big") == hub.snapshot


@pytest.mark.skipif(not hasattr(errors, "IncompleteSnapshotError"), reason="the hub's client remembers no list of files")
def test_what_was_published_and_decides_texts_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = Hub(tmp_path, monkeypatch).has(*WHOLE - {"generation_config.json"})
    hub.remembers()
    hub.offline(True)
    assert "is not complete (" in (said := message("org/big")) and "(generation_config.json)" in said
    hub.offline(False)
    assert find("org/big") == hub.snapshot and hub.there() == WHOLE


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (("config.json", "model.safetensors", *SHARDS, INDEX, *FOREIGN), {"config.json", "model.safetensors", INDEX}),
        (("config.json", "pytorch_model.bin", *FOREIGN[1:]), {"config.json", "pytorch_model.bin"}),
        (("config.json", *FOREIGN), {"config.json", "consolidated.safetensors"}),
    ],
)
def test_one_set_of_weights_is_downloaded(
    published: tuple[str, ...], expected: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = Hub(tmp_path, monkeypatch, *published)
    find("org/big")
    assert hub.there() == expected


def test_a_head_is_whole_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = Hub(tmp_path, monkeypatch).has("config.json", "model.safetensors")
    hub.offline(True)
    (hub.snapshot / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLMEagle3"]}))
    assert find("org/big") == hub.snapshot


def test_safetensors_beside_the_models_are_no_part_of_it(tmp_path: Path) -> None:
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    for directory in (alone, beside):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(CONFIG))
        save_file({"a": np.zeros(2, np.float32)}, directory / SHARDS[0])
        save_file({"b": np.zeros(2, np.float32)}, directory / SHARDS[1])
        (directory / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}))
    save_file({"c": np.zeros(9, np.float32)}, beside / "consolidated.safetensors")
    assert [file.name for file in weight_files(beside)] == SHARDS
    one, other = read_model_info(str(alone)), read_model_info(str(beside))
    assert (one.weight_bytes, one.digest) == (other.weight_bytes, other.digest)
    # The file that transformers reads then, whatever an index says.
    write_weights(beside, 7)
    assert [file.name for file in weight_files(beside)] == ["model.safetensors"]


def test_weights_in_a_file_of_another_name_are_refused(model: Path) -> None:
    configure(model, transformers_weights="model.fp16.safetensors")
    assert message(model).endswith(
        '"transformers_weights" is not supported; remove it, and name the weights model.safetensors'
    )


def test_a_hub_without_a_home_to_keep_models_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    assert message("someone/a-model") == (
        '"someone/a-model" is not a directory, and there is no home directory to keep models of a hub in: '
        "set HOME or HF_HOME, or give a directory"
    )


@pytest.mark.parametrize("name", ["not a name", "a--b", "x..y/z", "-a/b"])
def test_names_that_no_hub_could_have(name: str) -> None:
    assert message(name) == f'"{name}" is neither a directory nor a name that a model hub could have'


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(self: object, name: str, timeout: float) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    found = message("someone/a-model")
    assert "the model hub cannot be reached (Name or service not known): give a directory" in found


def test_end_tokens_that_the_model_does_not_have_are_left_out(model: Path) -> None:
    configure(model, eos_token_id=[-1, 5, 10**30])
    assert read_model_info(str(model)).end_tokens == (5,)


def test_the_digest_is_of_the_content(model: Path) -> None:
    before = read_model_info(str(model)).digest
    assert read_model_info(str(model)).digest == before
    write_weights(model, 8)
    after = read_model_info(str(model)).digest
    (model / "tokenizer.json").write_text("{}")
    assert len({before, after, read_model_info(str(model)).digest}) == 3


def test_the_digest_does_not_depend_on_the_place(model: Path, tmp_path: Path) -> None:
    before = read_model_info(str(model)).digest
    assert read_model_info(str(model.rename(tmp_path / "elsewhere"))).digest == before


def test_the_pocket_model_is_found_or_its_lack_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("outrider.workers.models.model_info.files", lambda package: tmp_path)
    with pytest.raises(ModelError, match=r"the bundled pocket model is missing from .*: reinstall outrider"):
        find(POCKET)
