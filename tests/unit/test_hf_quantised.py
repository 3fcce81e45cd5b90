"""Quantised checkpoints on the hf engine whose layers look at all tokens of a pass: a row's text is its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import compressed, save_small, set_config
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bitnet import BitNetHfQuantizer

from benchmarks.families.check import write
from outrider.workers.engines.hf import vocabulary_of
from outrider.workers.engines.hf_batching import RowFeeding
from outrider.workers.errors import ModelError
from outrider.workers.messages import ModelSpec
from outrider.workers.models import probe, quantisation_libraries
from outrider.workers.models.hf_loading import _load_weights, load_hf
from outrider.workers.models.library_weights import layer_that_mixes
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.opening import check_weights
from outrider.workers.models.probe import find_batching
from outrider.workers.models.quantisation_libraries import NEEDS

BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
# Parts that come again, for candidates.
PROMPTS = [[7 + (index * 37 + length) % 190 for index in range(7)] * (length // 7) for length in (7, 28, 49, 63)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int", "float"])
def test_activations_that_share_a_scale_with_the_whole_pass_change_no_text(kind: str, tmp_path: Path) -> None:
    activations = {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": True, "symmetric": True}
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
    compressed(save_small(tmp_path / "model"), format=f"{kind}-quantized", activations=activations, **weights)
    threads = torch.get_num_threads()
    engine, _, notes = load_hf(ModelSpec(str(tmp_path / "model"), "hf", "bf16", threads=1))
    try:
        alone = [write(engine, [prompt], 0)[0][0] for prompt in PROMPTS]
        together, (proposed, _) = write(engine, PROMPTS, 3)
    finally:
        torch.set_num_threads(threads)
    assert proposed > 10
    assert together == alone
    assert (
        "one token after the other, so that candidates gain nothing, because its tokens in a pass share a scale" in notes[0]
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("settings", "pooled"),
    [
        ({}, True),  # the library's own threshold
        ({"llm_int8_threshold": 6.0}, True),
        ({"llm_int8_threshold": 0.0}, False),
        ({"load_in_8bit": False, "load_in_4bit": True, "llm_int8_threshold": 6.0}, False),
    ],
)
def test_bitsandbytes_in_8_bits_looks_at_the_whole_pass_for_outliers(
    settings: dict[str, Any], pooled: bool, tmp_path: Path
) -> None:
    """Its library, tried apart, gave 3 of 8 rows of a batch another text before."""
    config = AutoConfig.from_pretrained(save_small(tmp_path))
    config.quantization_config = BITSANDBYTES | settings
    batching = find_batching(config)
    assert batching.ragged is not pooled
    if pooled:
        assert batching.feeding is RowFeeding.STEPPED
        assert "its tokens in a pass change one another (quantization_config: llm_int8_threshold 6.0)" in batching.note


def test_what_a_configuration_does_not_tell_the_layers_show_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_pooled", lambda config: "")
    activations = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": True, "symmetric": True}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    compressed(save_small(tmp_path / "model"), format="int-quantized", activations=activations, **weights)
    engine, _, notes = load_hf(ModelSpec(str(tmp_path / "model"), "hf", "bf16"))
    assert engine.feeding is RowFeeding.STEPPED  # type: ignore[union-attr]
    assert "its tokens in a pass change one another as it is quantised (model.layers.0.self_attn.q_proj)" in notes[0]


class SharedScale(torch.nn.Linear):
    """Rounds activations by the largest of all tokens, as torchao and Quark do where a scale is that of a tensor."""

    def largest(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.abs().max()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        step = self.largest(tokens) / 127
        return super().forward((tokens / step).round() * step)


class OwnScale(SharedScale):
    def largest(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.abs().amax(dim=-1, keepdim=True)


class OutlierColumns(torch.nn.Linear):
    """Rounds all columns but those in which some token is large, as bitsandbytes does."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        spared = (tokens.abs() > 6.0).flatten(0, -2).any(dim=0)
        return super().forward(torch.where(spared, tokens, tokens.mul(16).round() / 16))


@pytest.mark.parametrize(("kind", "mixes"), [(SharedScale, True), (OutlierColumns, True), (OwnScale, False)])
def test_a_layer_is_tried_beside_much_larger_tokens(kind: type[torch.nn.Linear], mixes: bool) -> None:
    model = tiny_model("llama", 0)
    own = model.model.layers[0].mlp.up_proj
    other = model.model.layers[0].mlp.up_proj = kind(own.in_features, own.out_features, bias=False)
    other.weight = own.weight
    found = layer_that_mixes(model, torch.tensor([[3, 1, 4, 1, 5]]))
    assert found == ("model.layers.0.mlp.up_proj" if mixes else None)


class Packed(torch.Tensor):
    """A library's own kind of tensor, which can be multiplied with, and little else: torchao's has no sum."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Packed:
        made: Packed = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: object) -> Packed:
        return Packed(**parts)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            return func(args[0], args[1].codes.to(args[1].scale.dtype) * args[1].scale, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].codes, args[0].scale)
        raise NotImplementedError(f"Packed does not know {func}")


@pytest.mark.parametrize("scale", [0.01, float("nan")])
def test_weights_in_a_library_s_own_kind_of_tensor_load(
    scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_small(tmp_path)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    codes = torch.randint(-8, 8, layer.weight.shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    mapped = codes.data_ptr()
    held = Packed(codes, torch.tensor(scale, dtype=torch.bfloat16))
    layer.weight = torch.nn.Parameter(held, requires_grad=False)
    model.hf_quantizer = object()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (model, {}))
    if scale != scale:
        with pytest.raises(ModelError, match=r'"model.layers.0.mlp.up_proj.weight" holds a value that is not a number'):
            load_hf(ModelSpec(str(path), "hf", "bf16"))
        return
    engine, _, notes = load_hf(ModelSpec(str(path), "hf", "bf16"))
    assert not notes
    assert write(engine, PROMPTS[:2], 3)[0] == [write(engine, [prompt], 0)[0][0] for prompt in PROMPTS[:2]]
    # What was mapped from a file has been copied.
    assert layer.weight.codes.data_ptr() != mapped


def quantised_by(path: Path, **stated: Any) -> Path:
    set_config(save_small(path), quantization_config=stated)
    return path


@pytest.mark.parametrize(
    ("stated", "device", "sentence"),
    [
        ({"quant_method": "hqq"}, "cpu", "is not read by transformers 5; take this model in another format"),
        (
            {"quant_method": "eetq"},
            "cuda:0",
            "runs by kernels that are fetched from the model hub as code, which outrider never runs;",
        ),
        (
            {"quant_method": "intel/auto-round"},
            "cpu",
            "is not known to transformers by that name; the native engine reads it, of its own families: leave out",
        ),
        (
            {"quant_method": "modelopt"},
            "cuda",
            "is not known to transformers; the native engine reads it, of its own families: leave out --engine hf",
        ),
        ({"quant_method": "metal"}, "cpu", "runs on Apple's GPUs alone; take this model in another format"),
        (
            {"quant_method": "spqr"},
            "cpu",
            "runs on cuda alone, and this model is to run on cpu; take this model in another",
        ),
        (
            {"quant_method": "vptq"},
            "cuda:1",
            "needs vptq and accelerate, which are not installed: pip install vptq accelerate",
        ),
        ({"quant_method": "quark"}, "cpu", "needs quark, which is not installed: pip install amd-quark"),
        (
            {"quant_method": "auto-round"},
            "cpu",
            "needs auto_round, which is not installed: pip install auto-round auto-round-lib",
        ),
        (
            {"load_in_4bit": True},
            "cpu",
            "needs bitsandbytes and accelerate, which are not installed: pip install bitsandbytes",
        ),
    ],
)
def test_what_transformers_would_fail_at_is_said_before_anything_is_loaded(
    stated: dict[str, Any], device: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantisation_libraries, "find_spec", lambda name: None)
    path = quantised_by(tmp_path / "model", **stated)
    name = stated.get("quant_method", "bitsandbytes")
    with pytest.raises(ModelError) as refusal:
        load_hf(ModelSpec(str(path), "hf", "bf16", device=device))
    said = f'{path}/config.json: the quantisation "{name}" (quantization_config, "quant_method") {sentence}'
    assert str(refusal.value).startswith(said)
    with pytest.raises(ModelError) as earlier:
        check_weights(str(path), "hf", on_accelerator=device != "cpu")
    assert str(earlier.value) == str(refusal.value)


def test_on_an_accelerator_whichever_it_is_only_libraries_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quantised_by(tmp_path / "model", quant_method="higgs")
    monkeypatch.setattr(quantisation_libraries, "find_spec", lambda name: name)
    check_weights(str(path), "hf", on_accelerator=True)
    with pytest.raises(ModelError, match="runs on cuda alone, and this model is to run on cpu"):
        check_weights(str(path), "hf")


def test_a_checkpoint_may_be_quantised_in_its_language_model_alone(tmp_path: Path) -> None:
    text = {"quantization_config": {"quant_method": "hqq"}}
    set_config(save_small(tmp_path / "model"), text_config=text)
    with pytest.raises(ModelError, match=r'the quantisation "hqq" .* is not read'):
        check_weights(str(tmp_path / "model"), "hf")


@pytest.mark.parametrize(
    ("stated", "sentence"),
    [({"bits": 4}, 'has no "quant_method", so that nothing says how'), ("awq", "must be an object, got 'awq'")],
)
def test_a_quantisation_without_a_name_is_refused(stated: object, sentence: str, tmp_path: Path) -> None:
    set_config(save_small(tmp_path / "model"), quantization_config=stated)
    with pytest.raises(ModelError, match=f"quantization_config {sentence}"):
        check_weights(str(tmp_path / "model"), "hf")


def test_an_empty_quantisation_is_none(tmp_path: Path) -> None:
    """To transformers it is one without a name."""
    set_config(save_small(tmp_path / "model"), quantization_config={})
    check_weights(str(tmp_path / "model"), "hf")
    load_hf(ModelSpec(str(tmp_path / "model"), "hf", "bf16"))


def test_every_way_of_quantising_that_transformers_knows_is_known() -> None:
    """A later release's has to be looked at: what does it need, and does it run here?"""
    theirs = {name.partition("bitsandbytes_")[0] or "bitsandbytes" for name in AUTO_QUANTIZER_MAPPING}
    assert theirs == {name for name, needs in NEEDS.items() if not needs.native}


def test_a_library_that_fails_in_its_own_way_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bitsandbytes does with plain weights that are said to be its own: by an assertion without a word."""

    class Failing(torch.nn.Linear):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    path = save_small(tmp_path)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.model.layers[0].mlp.up_proj = Failing(64, 128, bias=False)
    model.hf_quantizer = object()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (model, {}))
    with pytest.raises(
        ModelError,
        match=r"is quantised and cannot be computed in bf16 \(AssertionError\); choose another .*, such as fp32",
    ):
        load_hf(ModelSpec(str(path), "hf", "bf16"))


def test_a_library_that_makes_nothing_of_the_checkpoint_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """auto-round takes a stand-in for the layers where the library with its kernels is not there."""
    path = save_small(tmp_path)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.hf_quantizer = object()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (model, {"missing_keys": {"b", "a"}}))
    with pytest.raises(
        ModelError,
        match=r'makes no weights for 2 names of the quantised checkpoint, first "a": its library may need another',
    ):
        load_hf(ModelSpec(str(path), "hf", "bf16"))


def test_a_head_without_a_weight_says_how_many_tokens_it_scores() -> None:
    """As SINQ's."""
    model = tiny_model("llama", 0)
    head = torch.nn.Linear(96, 7)
    head.weight = None
    model.set_output_embeddings(head)
    assert vocabulary_of(model) == 7


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("method", "install"), [(None, "pcre"), ("torchao", "torchao"), ("gptq", "optimum gptqmodel")])
def test_a_library_that_is_not_there_is_named_with_the_command(
    method: str | None, install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a library asks for comes with that library: a package of its own name may be another."""

    def lacking(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'pcre'", name="pcre")

    path = save_small(tmp_path)
    set_config(path, quantization_config=method and {"quant_method": method})
    monkeypatch.setattr(quantisation_libraries, "find_spec", lambda name: name)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lacking)
    with pytest.raises(ModelError, match=rf"cannot be loaded without pcre, which is not installed: pip install {install}$"):
        load_hf(ModelSpec(str(path), "hf", "bf16"))


def bitnet(path: Path) -> Path:
    """A small model whose configuration says that its layers are BitNet's. No test computes anything with it."""
    online = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    set_config(save_small(path), quantization_config=online)
    return path


def test_what_is_compiled_as_it_runs_asks_for_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantisation_libraries, "find_spec", lambda name: object())
    monkeypatch.setenv("CXX", sys.executable)  # any program that is there
    check_weights(str(bitnet(tmp_path)), "hf")
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    with pytest.raises(
        ModelError, match=r"quantisation .bitnet. .* is compiled as it runs, and there is no .*/g\+\+: install"
    ):
        check_weights(str(tmp_path), "hf")


@pytest.mark.slow  # torch loads its compiler
def test_what_is_compiled_is_compiled_for_every_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives up after eight shapes and then rounds otherwise."""
    monkeypatch.setattr(quantisation_libraries, "find_spec", lambda name: object())
    monkeypatch.setattr(BitNetHfQuantizer, "validate_environment", lambda self, **settings: None)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    monkeypatch.setattr(torch._dynamo.config, "accumulated_recompile_limit", 256)
    path = str(bitnet(tmp_path))
    _load_weights(read_model_info(path), torch.float32, ModelSpec(path, "hf", "fp32"))
    assert torch._dynamo.config.recompile_limit > 1000
    assert torch._dynamo.config.accumulated_recompile_limit > 1000
