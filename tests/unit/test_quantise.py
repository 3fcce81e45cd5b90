"""``outrider quantize``: the arithmetic of its methods, its files, and that a killed run resumes to the same bytes."""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext
from errno import ENOSPC
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from built_once import CliRunner
from command_line import outrider
from gguf_models import mostly, write_gguf
from imports import reached
from native_models import logits as native_logits
from native_models import open_native, save_tiny
from one_tokenizer_process import tokenizer_process
from quantised_models import save_small
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tiny_models import OF_SEVERAL_KINDS, TINY, saved_tensors, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.kernels.program import Format, Kind, Program
from outrider.runner.cli.main import app
from outrider.runner.options.option import build_options
from outrider.runner.options.quality import QuantizeSpec
from outrider.runner.quality import quantize as quantize_module
from outrider.runner.quality import score as score_module
from outrider.runner.quality.quantize import evenly, quantize
from outrider.runner.writable import check_new_folder
from outrider.workers.errors import JobChangedError, ModelError, UsageError
from outrider.workers.messages import ModelSpec
from outrider.workers.models.families import build_program
from outrider.workers.models.model_info import find, read_model_info
from outrider.workers.models.opening import open_model
from outrider.workers.quantising import folder as folder_module
from outrider.workers.quantising.compressed import description, pack, tensors_of
from outrider.workers.quantising.forward import Forward
from outrider.workers.quantising.gptq import Feedback
from outrider.workers.quantising.grids import Form, fit, nearest, whole_range
from outrider.workers.quantising.layers import Feeder, layers_of, live_buffers, named
from outrider.workers.quantising.methods import Choice, best_of, rounded_in_all_ways, run_layer
from outrider.workers.quantising.quantisable import check_quantisable
from outrider.workers.quantising.quantiser import Wanted, choice_of, program_of, quantise
from outrider.workers.quantising.scales import apply
from outrider.workers.quantising.summary import QuantiseSummary

LENGTH = 24
GENERATOR = torch.Generator().manual_seed(11)
TOKENS = torch.randint(0, 203, (4 * LENGTH,), generator=torch.Generator().manual_seed(4))
WINDOWS = tuple(tuple(row) for row in TOKENS.view(4, LENGTH).tolist())
FORM = Form(4, 32, True, torch.float16)
# Layers of one kind each, whose feeders are counted; test_quantise_mixtures.py has the others.
WITHOUT_STATE = [name for name in TINY if not name.startswith(OF_SEVERAL_KINDS)]
# What takes factors in each layer: norms of attention and feed-forward, values, and (where nothing but the factor's sign
# matters between the two matrices) the feed-forward's inside.
FEEDERS = {
    "llama": 4,
    "mistral": 4,
    "qwen2": 4,
    "qwen3": 4,
    "bloom": 3,
    "bloom-of-norms": 1,
    "mpt": 3,
    "mpt-clipped": 2,
    "falcon-rw": 3,
    "opt": 4,
    "opt-plain": 3,
    "opt-350m": 2,
    "bigcode": 3,
    "gpt2": 3,
    "gpt": 1,
    "gpt-untied": 2,
    "gemma": 2,
    "gemma2": 2,
    "gemma3": 2,
    "gemma3n": 3,
    "gemma4": 3,
    "phi3": 4,
    "granite": 4,
    "hyperclovax": 4,
    "ministral": 4,
    "ministral3": 4,
    "internlm3": 4,
    "iquestcoder": 4,
    "smollm3": 4,
    "olmo": 2,
    "olmo-clipped": 1,
    "seed": 4,
    "cwm": 4,
    "hunyuan": 4,
    "exaone": 4,
    "exaone4": 2,
    "vaultgemma": 2,
    "youtu": 3,
    "youtu-wide": 4,
    "glm": 4,
    "glm4": 4,
    "ernie": 4,
    "helium": 4,
    "olmo2": 2,
    "olmo3": 2,
    "apertus": 3,
    "arcee": 3,
    "nanochat": 1,
    "nemotron": 1,
    "jais2": 3,
    "minicpm3": 4,
    "minicpm3-long": 3,
    "bitnet": 4,
    "biogpt": 3,
    "biogpt-untied": 4,
    "ettin": 4,
    "neox": 3,
    "neox-japanese": 3,
    "neox-japanese-part": 4,
    "starcoder2": 3,
    "cohere": 3,
    "cohere2": 3,
    "phi": 2,
    "stablelm": 4,
    "stablelm-parallel": 3,
    "gptj": 2,
    "codegen": 2,
    "falcon": 2,
    "falcon-serial": 3,
    "falcon-new": 3,
    "gpt-neo": 3,
    "persimmon": 3,
}
# Where one norm feeds both halves of a layer. In the last layer not all tokens go on from the attention to the other half.
ONE_NORM = ("cohere", "cohere2", "phi", "stablelm-parallel", "gptj", "codegen", "falcon")
# Where the embeddings' norm stands in for that before the first attention: residuals come out of it as well.
OF_EMBEDDINGS = ("ettin",)


def program_and_tensors(name: str, **changes: Any) -> tuple[Program, dict[str, Tensor], Any]:
    model = tiny_model(name, **changes)
    program = build_program(model.config.to_dict(), Format.W4A8)
    flat = {part.name: part for weight in program.weights for part in weight.sources if part.stored}
    embedding = model.get_input_embeddings()
    if isinstance(getattr(embedding, "embed_scale", None), Tensor):
        # Gemma's factor is of the embeddings' type, which is bf16 unless activations are fp32.
        embedding.embed_scale = embedding.embed_scale.bfloat16().float()
    for module in model.modules():
        if getattr(module, "activation_sparsity", 0.0) > 0.0:
            # So is how many deviations Gemma 3n's gates are cut at.
            cut = torch.tensor(NormalDist().inv_cdf(module.activation_sparsity)).bfloat16()
            module.activation_sparsity = NormalDist().cdf(float(cut))
    state = {name: tensor.detach().clone() for name, tensor in saved_tensors(model).items()}
    # As a checkpoint hands them out (Command R's norms of heads are stored as matrices, GPT-2's matrices are transposed).
    state |= {
        name: state[name].T if len(part.shape) == 2 else state[name].reshape(part.shape) for name, part in flat.items()
    }
    return program, state, model


def logits(program: Program, tensors: dict[str, Tensor], length: int = LENGTH) -> Tensor:
    buffers: dict[int, Tensor] = {}
    with torch.inference_mode():
        Forward(program, tensors, length).run(0, len(program.ops) - 1, buffers, TOKENS)
    return buffers[program.ops[-1].input.buffer].view(-1, length, program.vocabulary)


@pytest.mark.parametrize("columns", [7, 256, 700])
def test_columns_lose_by_the_upper_factor_of_the_inverse(columns: int) -> None:
    """Also of sizes that are inverted by halves, and of halves that are not equal."""
    x = torch.randn(2 * columns, columns, generator=torch.Generator().manual_seed(columns))
    x[:, ::5] *= 8
    hessian = x.T @ x / len(x)
    feedback = Feedback(hessian, damping=0.01)
    ordered = hessian[feedback._order][:, feedback._order].double() / hessian.diagonal().double().mean()
    ordered.diagonal().add_(0.01)
    wanted = torch.linalg.cholesky(torch.linalg.inv(ordered), upper=True)
    assert torch.equal(feedback._inverse, feedback._inverse.triu())
    torch.testing.assert_close(feedback._inverse.double(), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.one_in(30)
@pytest.mark.parametrize("name", WITHOUT_STATE)
def test_a_program_in_torch_gives_the_models_own_logits(name: str) -> None:
    program, tensors, model = program_and_tensors(name)
    with torch.inference_mode():
        expected = model(input_ids=TOKENS.view(-1, LENGTH)).logits
    assert torch.allclose(logits(program, tensors), expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["gemma4", "ministral3"])
def test_layers_one_after_the_other_give_the_whole(name: str) -> None:
    """Behind the embeddings nobody has the tokens any more."""
    program, tensors, _ = program_and_tensors(name)
    layers, buffers = layers_of(program), dict[int, Tensor]()
    forward = Forward(program, tensors, LENGTH)
    with torch.inference_mode():
        forward.run(0, layers[0].start, buffers, TOKENS)
        for start, stop in pairwise([*(layer.start for layer in layers), len(program.ops) - 1]):
            buffers = {number: buffers[number] for number in live_buffers(program, start) if number in buffers}
            forward.run(start, stop, buffers, torch.empty(0))
    found = buffers[program.ops[-1].input.buffer].view(-1, LENGTH, program.vocabulary)
    assert torch.equal(found, logits(program, tensors))


@pytest.mark.one_in(30)
@pytest.mark.parametrize("name", [name for name in WITHOUT_STATE if not name.startswith("hrm-text")])
def test_factors_that_are_moved_leave_the_function_as_it_was(name: str) -> None:
    program, tensors, _ = program_and_tensors(name)
    before = logits(program, tensors)
    stored = dict.fromkeys(tensors, torch.float32)
    changed = dict(tensors)
    layers, family = layers_of(program), name if name in FEEDERS else name.split("-")[0]
    for layer in layers:
        # Gemma 3n's gates are no part of the product where most of them are closed.
        cut = any(op.kind is Kind.GAUSSIAN_TOP_K for op in program.ops[layer.start : layer.stop])
        without = (family in ONE_NORM and layer is layers[-1]) or (family in OF_EMBEDDINGS and layer is layers[0])
        assert len(layer.feeders) == FEEDERS[family] - cut - without
        for feeder in layer.feeders:
            names = [part.name for part in named(program, feeder.readers)]
            factors = torch.rand(changed[names[0]].shape[1], generator=GENERATOR) * 3 + 0.3
            if feeder.repeats > 1:
                heads = factors.view(-1, feeder.repeats, feeder.head_size)
                factors = heads[:, :1].expand_as(heads).reshape(-1)
            apply(feeder, names, factors, changed, stored)
    assert not torch.equal(changed[names[0]], tensors[names[0]])
    assert torch.allclose(logits(program, changed), before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))


def test_the_rounding_of_a_norm_is_made_up_for_by_what_reads_it() -> None:
    program, tensors, _ = program_and_tensors("llama")
    stored = dict.fromkeys(tensors, torch.bfloat16)
    tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    before, changed = logits(program, tensors), dict(tensors)
    feeder = layers_of(program)[0].feeders[0]
    names = [part.name for part in named(program, feeder.readers)]
    apply(feeder, names, torch.rand(96, generator=GENERATOR) + 0.5, changed, stored)
    gain = changed[feeder.vectors[0]]
    assert torch.equal(gain.bfloat16().float(), gain)
    assert torch.allclose(logits(program, changed), before, rtol=1e-4, atol=1e-5 * float(before.abs().max()))


def test_a_gain_that_its_type_does_not_hold_divided_stays_as_it_is() -> None:
    """Of a channel that is always 0 the factor is 1e-4; 30 / 1e-4 is infinite in fp16."""
    tensors = {"gain": torch.tensor([1.0, 30.0, 1e-4, 0.0]), "weight": torch.ones(2, 4)}
    factors = torch.tensor([2.0, 1e-4, 1e4, 2.0])
    applied = apply(Feeder((0,), vectors=("gain",)), ["weight"], factors, tensors, {"gain": torch.float16})
    assert applied.tolist() == [2.0, 1.0, 1.0, 1.0]
    assert torch.allclose(tensors["gain"], torch.tensor([0.5, 30.0, 1e-4, 0.0]), rtol=1e-3)
    assert torch.equal(tensors["weight"], applied.expand(2, 4))


@pytest.mark.parametrize("form", [FORM, Form(4, 32, False, torch.bfloat16), Form(8, 0, True, torch.float16)])
def test_grids_hold_what_they_are_to_hold(form: Form) -> None:
    matrix = torch.randn(70, 96, generator=GENERATOR)
    matrix[3] = 0
    whole, fitted = whole_range(matrix, form), fit(matrix, form)
    for grid in (whole, fitted):
        assert torch.equal(grid.scales.to(form.scale_type).float(), grid.scales)
        found = nearest(matrix, grid, form)
        assert found.values.min() >= form.lowest and found.values.max() <= form.highest
        assert torch.equal(found.matrix()[3], torch.zeros(96))
        assert float((found.matrix() - matrix).abs().max()) < (0.5 if form.bits == 4 else 0.03)
    losses = [(nearest(matrix, grid, form).matrix() - matrix).square().sum() for grid in (whole, fitted)]
    # A row of 8 bits may lose least on its whole range.
    assert losses[1] < losses[0] if form.bits == 4 else losses[1] <= losses[0]
    weighed = torch.ones(96)
    weighed[:8] = 1000
    heavy = (nearest(matrix, fit(matrix, form, weighed), form).matrix() - matrix).square()[:, :8].sum()
    assert heavy < (nearest(matrix, fitted, form).matrix() - matrix).square()[:, :8].sum()


def test_error_feedback_loses_least_where_it_is_asked_to() -> None:
    matrix = torch.randn(40, 160, generator=GENERATOR)
    inputs = torch.randn(900, 20, generator=GENERATOR) @ torch.randn(20, 160, generator=GENERATOR)
    inputs += 0.2 * torch.randn(900, 160, generator=GENERATOR)
    inputs[:, 7] = 0
    hessian = inputs.T @ inputs / len(inputs)

    def loss(found: Tensor) -> float:
        return float(((found - matrix) @ inputs.T).square().sum())

    plain = nearest(matrix, fit(matrix, FORM, hessian.diagonal()), FORM)
    fed_back = Feedback(hessian).rounded(matrix, FORM)
    assert loss(fed_back.matrix()) < 0.4 * loss(plain.matrix())
    # Where no column tells of another, nothing is to be made up for, and only the scales can still gain.
    alone, by_itself = Feedback(torch.eye(160)).rounded(matrix, FORM), nearest(matrix, fit(matrix, FORM), FORM)
    assert (alone.matrix() - matrix).norm() <= (by_itself.matrix() - matrix).norm()
    assert (alone.values != by_itself.values).float().mean() < 0.05


def test_inputs_that_are_no_numbers_are_said_to_be_none() -> None:
    with pytest.raises(UsageError, match=r"--calibration: .*cannot be used: .*; give another text, or --method rtn"):
        Feedback(torch.full((8, 8), math.nan))


def test_large_layers_are_not_all_tried_in_every_way() -> None:
    choice, large = Choice("auto", FORM, activations=False), 200_000_000
    gptq, everything = (("", True),), choice.recipes
    assert len(everything) == 3
    assert [choice.recipes_for(large, ["gptq"] * index) for index in range(10)] == [
        *[everything] * 2, *[gptq] * 6, everything, gptq
    ]  # fmt: skip
    assert choice.recipes_for(large, ["gptq", "gptq", "awq+gptq"]) == everything
    assert choice.recipes_for(1_000_000, ["gptq"] * 3) == everything
    assert Choice("awq", FORM, activations=False).recipes_for(large, ["gptq"] * 3) == (("awq", False),)


def test_shares_of_the_rows_are_rounded_side_by_side() -> None:
    weights, inputs = torch.randn(1101, 64, generator=GENERATOR), torch.randn(256, 64, generator=GENERATOR)
    hessian, before = inputs.T @ inputs / len(inputs), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with torch.inference_mode():
            both = Feedback(hessian).rounded(weights, FORM)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        parts = [Feedback(hessian).rounded(part, FORM) for part in (weights[:550], weights[550:])]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(both.values, torch.cat([part.values for part in parts]))
    assert torch.equal(both.grid.scales, torch.cat([part.grid.scales for part in parts]))


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_written_is_what_compressed_tensors_reads(symmetric: bool) -> None:
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    from compressed_tensors.quantization import QuantizationConfig

    form = Form(4, 16, symmetric, torch.float16)
    rounded = nearest(torch.randn(21, 48, generator=GENERATOR), *_fitted(form))
    config = QuantizationConfig.model_validate(description(form, False, ["lm_head"], True))
    written = {name.removeprefix("x."): tensor for name, tensor in tensors_of("x.weight", rounded).items()}
    assert written["weight_scale"].dtype == torch.float16
    # In float32 the library's product is not rounded once more.
    written["weight_scale"] = written["weight_scale"].float()
    scheme = config.config_groups["group_0"]
    assert torch.equal(library.PackedQuantizationCompressor.decompress(written, scheme)["weight"], rounded.matrix())
    zeros = rounded.grid.zeros.to(torch.int8)
    exact = {"weight": rounded.matrix(), "weight_scale": rounded.grid.scales, "weight_zero_point": zeros}
    whole = library.PackedQuantizationCompressor.compress(exact, scheme)
    for name in ("weight_packed", *(() if symmetric else ("weight_zero_point",))):
        assert torch.equal(whole[name], written[name])


def _fitted(form: Form) -> tuple[Any, Form]:
    return fit(torch.randn(21, 48, generator=torch.Generator().manual_seed(2)), form), form


def test_words_are_filled_from_their_lowest_bits() -> None:
    words = pack(torch.tensor([[-8, -7, 7, -8, -8, -8, -8, -8, 1]]), 4)
    assert words.tolist() == [[0xF10, 9]]


def wanted(path: Path, out: Path, method: str = "gptq", bits: int = 4, **more: Any) -> Wanted:
    windows = () if method == "rtn" else WINDOWS
    given = {"group": None, "windows": windows, "digest": read_model_info(str(path)).digest} | more
    return Wanted(str(path), str(out), bits, method, **given)


def quietly(request: Wanted) -> QuantiseSummary:
    return quantise(request, lambda text: None)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("method", ["auto", "rtn"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Path, method: str, bits: int) -> None:
    path = save_tiny("llama", tmp_path / "model")
    (path / "generation_config.json").write_text('{"eos_token_id": 2}')
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    made = quietly(wanted(path, whole, method, bits))
    assert sum(made.methods.values()) == 2 and made.size > 0

    class Stopped(Exception):
        pass

    def stop(text: str) -> None:
        raise Stopped

    for _ in range(2):
        with pytest.raises(Stopped):
            quantise(wanted(path, torn, method, bits), stop)
        assert not torn.exists()
    said: list[str] = []
    quantise(wanted(path, torn, method, bits), said.append)
    assert said[0] == "going on behind layer 2 of 2" or "layer 2 of 2" in said[-1]
    assert contents(torn) == contents(whole)
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= contents(torn).keys()
    assert not list(tmp_path.glob("*.unfinished"))


def test_what_was_begun_otherwise_is_not_gone_on_with(tmp_path: Path) -> None:
    path, out = save_tiny("llama", tmp_path / "model"), tmp_path / "out"

    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise(wanted(path, out, "rtn"), stop)
    with pytest.raises(JobChangedError, match=r"out\.unfinished was begun with another group \(16, now 8\)"):
        quietly(wanted(path, out, "rtn", group=8))
    shutil.rmtree(tmp_path / "out.unfinished")
    quietly(wanted(path, out, "rtn", group=8))
    with pytest.raises(UsageError, match="is there already"):
        quietly(wanted(path, out, "rtn"))
    with pytest.raises(ModelError, match=r"is quantised already \(compressed-tensors\)"):
        quietly(wanted(out, tmp_path / "again", "rtn"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("begun", "now"), [(1, 2), (2, 1)])
def test_it_goes_on_with_the_threads_that_it_was_begun_with(tmp_path: Path, begun: int, now: int) -> None:
    path, out = save_tiny("llama", tmp_path / "model"), tmp_path / "out"
    said: list[str] = []
    threads: list[int] = []

    def hear(text: str) -> None:
        said.append(text)
        threads.append(torch.get_num_threads())
        if len(said) == 1:
            raise KeyboardInterrupt

    before = torch.get_num_threads()
    try:
        with pytest.raises(KeyboardInterrupt):
            quantise(wanted(path, out, "rtn", threads=begun), hear)
        quantise(wanted(path, out, "rtn", threads=now), hear)
    finally:
        torch.set_num_threads(before)
    assert said[1].startswith(
        f"note: this was begun with {begun} threads, which decide bits of it, and goes on with as many"
    )
    assert "layer 2 of 2" in said[-1] and set(threads) == {begun}
    assert (out / "config.json").exists()


def test_all_that_is_written_is_on_the_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copied files, too, which a machine that loses its power would else leave empty."""
    source, out, synced = tmp_path / "model", tmp_path / "out", list[str]()
    (source / "additional_chat_templates").mkdir(parents=True)
    copied = ("tokenizer.json", "generation_config.json", "additional_chat_templates/tool_use.jinja")
    for name in copied:
        (source / name).write_text("{}")
    save_file({"a": torch.zeros(1)}, source / "model.safetensors")

    def note(path: Path) -> None:
        assert not out.exists() or path == tmp_path
        synced.append(path.name)

    monkeypatch.setattr(folder_module, "sync", note)
    folder_module.Folder(out, {"threads": 1}, 0).finish(source, {"a": torch.zeros(1)}, {})
    assert {Path(name).name for name in copied} <= set(synced)
    assert {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()} >= {*copied, "config.json"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("file", ["out.unfinished/model-00003-of-00003.partial", "out.unfinished/tokenizer.json", "out"])
def test_a_disk_that_is_full_is_one_sentence_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    path, full = save_tiny("llama", tmp_path / "model"), True
    (path / "tokenizer.json").write_text("{}")

    # What the libraries say then, each in its own way.
    def save(tensors: dict[str, Tensor], name: str, metadata: dict[str, str]) -> None:
        if full and name.endswith(file):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, name, metadata)

    def refuse(work: Callable[[Path, Path], Any]) -> Callable[[Path, Path], Any]:
        def refusing(source: Path, target: Path) -> Any:
            if full and str(target).endswith(file):
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            return work(source, target)

        return refusing

    monkeypatch.setattr(folder_module, "save_file", save)
    monkeypatch.setattr(shutil, "copyfile", refuse(shutil.copyfile))
    monkeypatch.setattr(Path, "rename", refuse(Path.rename))
    with pytest.raises(UsageError) as caught:
        quietly(wanted(path, tmp_path / "out", "rtn"))
    place = tmp_path / "out.unfinished"
    assert str(caught.value).startswith(f"--out: {place} cannot be written: ")
    assert "No space left on device" in str(caught.value)
    assert str(caught.value).endswith("; once it can be, the same command goes on there")
    full = False
    said: list[str] = []
    quantise(wanted(path, tmp_path / "out", "rtn"), said.append)
    assert "going on behind layer" in said[0]
    assert contents(tmp_path / "out").keys() >= {"config.json", "tokenizer.json", "model-00003-of-00003.safetensors"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("llama-gqa-8", {}),
        ("qwen3", {}),
        ("opt", {"ffn_dim": 192}),
        ("llama-tied-biased", {}),
        ("youtu-wide", {"intermediate_size": 192, "q_lora_rank": 32, "v_head_dim": 32}),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_transformers_reads_it_as_it_is_meant(tmp_path: Path, name: str, widths: dict[str, int], bits: int) -> None:
    pytest.importorskip("compressed_tensors")
    path, out = tmp_path / "model", tmp_path / "out"
    tiny_model(name, **widths).save_pretrained(path)
    quietly(wanted(path, out, "auto", bits))
    read: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    program, tensors = program_of(path)[0], meant(out)
    with torch.inference_mode():
        found = read(input_ids=TOKENS.view(-1, LENGTH)).logits
    modules = dict(read.named_modules())
    for layer in layers_of(program):
        for matrix in layer.matrices(program):
            assert torch.equal(modules[matrix.name.removesuffix(".weight")].weight, tensors[matrix.name])
    expected = logits(program, tensors)
    # Activations in 8 bits are the reader's own affair: it may take 127 or 127.5 steps.
    tolerance = 0.1 if bits == 8 else 2e-5
    assert float((found - expected).norm() / expected.norm()) < tolerance


@pytest.mark.slow
def test_all_that_is_written_of_a_starcoder_is_near_to_what_was_there(tmp_path: Path) -> None:
    """transformers itself cannot load a GPTBigCode in this format: its initialisation asks for weights that are packed."""
    for name in ("bigcode", "bigcode-mha"):
        path, out = tmp_path / name, tmp_path / f"{name}-out"
        tiny_model(name).save_pretrained(path)
        quietly(wanted(path, out))
        program, tensors = program_of(path)[0], {n: t.float() for n, t in load_file(path / "model.safetensors").items()}
        exact, found = logits(program, tensors), logits(program, meant(out))
        assert 0 < float((found - exact).norm() / exact.norm()) < 0.2


def meant(out: Path) -> dict[str, Tensor]:
    """The weights that the files stand for, by the format's definition alone."""
    raw: dict[str, Tensor] = {}
    for file in out.glob("*.safetensors"):
        raw |= load_file(file)
    found = {}
    for name, tensor in raw.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            rows, columns = raw[f"{prefix}.weight_shape"].tolist()
            nibbles = torch.stack([(tensor >> (4 * place)) & 15 for place in range(8)], 2).view(rows, -1)[:, :columns]
            scales = raw[f"{prefix}.weight_scale"].float()
            found[f"{prefix}.weight"] = (nibbles - 8) * scales.repeat_interleave(columns // scales.shape[1], 1)
        elif f"{name}_scale" in raw:
            found[name] = tensor.float() * raw[f"{name}_scale"].float()
        elif not kind.startswith("weight_"):
            found[name] = tensor.float()
    return found


def test_what_is_not_rounded_is_copied_bit_for_bit(tmp_path: Path) -> None:
    path, out = tmp_path / "model", tmp_path / "out"
    tiny_model("opt-350m", ffn_dim=192).to(torch.bfloat16).save_pretrained(path)
    quietly(wanted(path, out, "gptq"))
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.decoder.project_in", "model.decoder.project_out"]
    before, after_ = load_file(path / "model.safetensors"), {}
    for file in out.glob("*.safetensors"):
        after_ |= load_file(file)
    assert after_["model.decoder.layers.0.fc1.weight_scale"].dtype == torch.bfloat16
    kept = [name for name in before if name in after_]
    assert len(kept) == sum(not name.endswith((".weight_packed", ".weight_scale", ".weight_shape")) for name in after_)
    assert all(torch.equal(before[name], after_[name]) for name in kept)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        with safe_open(str(out / file), "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118


def pocket_beginning(path: Path, layers: int = 2) -> Path:
    """The bundled target's first layers: trained weights, of which a test can take its time."""
    source = find("pocket")
    config = json.loads((source / "config.json").read_text())
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    tensors = load_file(source / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if "layers." not in n or int(n.split(".")[2]) < layers}
    save_file(kept, path / "model.safetensors")
    return path


def layer_losses(path: Path, form: Form, activations: bool, methods: tuple[str, ...]) -> dict[str, float]:
    """Of the first layer's output on text that was not calibrated on, by method."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(find("pocket") / "tokenizer.json"))
    text = Path(json.__file__).read_text() + Path(shutil.__file__).read_text()
    tokens = torch.tensor(tokenizer.encode(text).ids[: 10 * 512])
    program = program_of(path)[0]
    tensors = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    layer = layers_of(program)[0]
    buffers: dict[int, Tensor] = {}
    found = {}
    with torch.inference_mode():
        Forward(program, tensors, 512).run(0, layer.start, buffers, tokens)
        calibrating = {number: part[:4096] for number, part in buffers.items()}
        held_out = {number: part[4096:] for number, part in buffers.items()}
        stored = dict.fromkeys(tensors, torch.bfloat16)
        for method in methods:
            choice = Choice(method, form, activations)
            candidates = rounded_in_all_ways(program, layer, choice, tensors, stored, calibrating, 512)
            found[method] = best_of(program, layer, choice, candidates, tensors, held_out, 512)[1]
    return found


@pytest.mark.slow
def test_each_method_beats_rounding_to_nearest_on_trained_weights(tmp_path: Path) -> None:
    path = pocket_beginning(tmp_path / "pocket", 1)
    lost = layer_losses(path, FORM, False, ("rtn", "awq", "gptq", "auto"))
    assert lost["awq"] < 0.95 * lost["rtn"] and lost["gptq"] < 0.7 * lost["rtn"]
    assert lost["auto"] <= min(lost.values())


@pytest.mark.slow
def test_smoothing_mends_what_outliers_break(tmp_path: Path) -> None:
    path = pocket_beginning(tmp_path / "pocket", 1)
    tensors = load_file(path / "model.safetensors")
    readers: dict[str, tuple[str, ...]] = {"input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
    readers["post_attention_layernorm"] = ("mlp.gate_proj", "mlp.up_proj")
    plain = layer_losses(path, Form(8, 0, True, torch.float16), True, ("rtn",))["rtn"]
    for norm, matrices in readers.items():
        tensors[f"model.layers.0.{norm}.weight"][[5, 100]] *= 64
        for matrix in matrices:
            tensors[f"model.layers.0.{matrix}.weight"][:, [5, 100]] /= 64
    save_file(tensors, path / "model.safetensors")
    lost = layer_losses(path, Form(8, 0, True, torch.float16), True, ("rtn", "smoothquant", "auto"))
    assert lost["rtn"] > 10 * plain
    assert lost["smoothquant"] < lost["rtn"] / 5
    assert lost["auto"] <= lost["smoothquant"]


def outlying_opt(path: Path) -> Path:
    """An OPT with two channels behind every norm a hundred times as large, and what reads them as much smaller."""
    path = save_tiny("opt", path)
    tensors = load_file(path / "model.safetensors")
    readers = {
        "self_attn_layer_norm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "final_layer_norm": ("fc1",),
    }
    for name in [name for name in tensors if name.endswith("layer_norm.weight") and ".layers." in name]:
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        for vector in (name, name.replace(".weight", ".bias")):
            tensors[vector][[3, 17]] *= 100
        for matrix in readers[norm]:
            tensors[f"{layer}.{matrix}.weight"][:, [3, 17]] /= 100
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.slow
def test_an_opt_whose_outliers_break_int8_by_token_is_mended_by_smoothing(tmp_path: Path) -> None:
    """Its width is one block of channels, so that activations have one scale a token."""
    plain, path = save_tiny("opt", tmp_path / "plain"), outlying_opt(tmp_path / "opt")
    exact = native_logits(open_native(path, "fp32"))
    np.testing.assert_allclose(native_logits(open_native(plain, "fp32")), exact, atol=1e-4)
    off = {}
    for source, method in ((plain, "rtn"), (path, "rtn"), (path, "smoothquant")):
        out = tmp_path / f"{source.name}-{method}"
        quietly(wanted(source, out, bits=8, method=method, group=None))
        off[out.name] = float(np.abs(native_logits(open_native(out, "w8a8")) - exact).mean())
    assert off["opt-rtn"] > 4 * off["plain-rtn"], off
    assert off["opt-smoothquant"] < 1.5 * off["plain-rtn"], off


def test_layers_go_on_from_rounded_ones() -> None:
    """What a layer is calibrated by is what it will be given: the output of those before it as they are now."""
    program, tensors, _ = program_and_tensors("llama")
    layer = layers_of(program)[0]
    buffers: dict[int, Tensor] = {}
    with torch.inference_mode():
        Forward(program, tensors, LENGTH).run(0, layer.start, buffers, TOKENS)
        whole = run_layer(program, layer, tensors, buffers, LENGTH)
        again = run_layer(program, layer, tensors, buffers, LENGTH)
    assert all(torch.equal(whole[number], again[number]) for number in whole)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"group": 24}, r'--group: 24 does not divide the width 208 of "model\.layers\.0\.mlp\.down_proj\.weight"'),
        ({"bits": 8, "group": 16}, r"--group: 8 bits have one scale a row"),
        ({"windows": ()}, r"--calibration: the text is too short"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    path = save_tiny("llama", tmp_path / "model")
    with pytest.raises(UsageError, match=sentence):
        quietly(wanted(path, tmp_path / "out", **changes))
    assert not (tmp_path / "out.unfinished").exists()


def test_what_was_made_is_told() -> None:
    made = QuantiseSummary({"awq+gptq": 1, "gptq": 31}, 4.5, 32, 3_900_000_000)
    assert quantize_module.result_line(Path("out"), made) == (
        "out: 3.9 GB, 4.50 bits a rounded weight in groups of 32; awq+gptq in 1 layer, gptq in 31 layers"
    )


def test_the_driver_hears_what_was_made_without_torch() -> None:
    """It goes without: to be told of a checkpoint it would have loaded half a gigabyte."""
    assert "torch" not in reached(Path(inspect.getfile(QuantiseSummary)))


def test_a_group_that_does_not_fit_is_told_before_cores_are_waited_for(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "model")
    with pytest.raises(UsageError, match="--group: 24 does not divide the width 208"):
        check_quantisable(path, tmp_path / "out", 4, 24)
    with pytest.raises(UsageError, match="--group: 8 bits have one scale a row"):
        check_quantisable(path, tmp_path / "out", 8, 16)
    check_quantisable(path, tmp_path / "out", 4, 16)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"bits": 4, "method": "smoothquant"},
            r"--method: smoothquant is not for 4 bits; choose one of auto, rtn, awq, gptq",
        ),
        ({"bits": 8, "method": "awq"}, r"--method: awq is not for 8 bits"),
        ({"bits": 3}, r"--bits: must be 4 or 8"),
        ({}, r"--bits is missing: give 4 or 8"),
        ({"bits": 4, "group": 4}, r"--group: must be at least 8"),
        ({"bits": 4, "method": "best"}, r"--method: must be "),
        ({"bits": 4, "format": "jsonl"}, r"--format applies to --calibration, which is not given: leave it out"),
        ({"bits": 4, "method": "rtn", "skip_bad": True}, r"--skip-bad applies to --calibration, which is not given"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        quantize(build_options(QuantizeSpec, {"out": Path("x"), **options}))


def test_a_place_that_cannot_be_made_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    asked = {"bits": 4, "model": "nobody/knows-it"}
    with pytest.raises(UsageError, match=r"^--out: .*/file/a/b cannot be made in .*/file: Not a directory$"):
        quantize(build_options(QuantizeSpec, {"out": tmp_path / "file" / "a" / "b", **asked}))
    check_new_folder("--out", tmp_path / "new" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_whose_name_is_no_utf_8_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    out = tmp_path / os.fsdecode(b"m\xe4")
    with pytest.raises(UsageError, match=r"^--out: .*/m\\udce4/a is not UTF-8, and safetensors writes no file under such"):
        quantize(build_options(QuantizeSpec, {"out": out / "a", "bits": 4, "model": "nobody/knows-it"}))


def test_the_command_line_is_taken_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[QuantizeSpec] = []
    monkeypatch.setattr(quantize_module, "quantize", asked.append)
    result = CliRunner().invoke(app, ["quantize", "-m", "x", "-o", "y", "--bits", "4", "--group", "64", "--method", "awq"])
    assert result.exit_code == 0, result.exception
    found = asked[0]
    assert (found.model, found.out, found.bits, found.group, found.method) == ("x", Path("y"), 4, 64, "awq")


@pytest.mark.parametrize(
    "words",
    [
        ("quantize", "-m", "x", "-o", "y", "--bits", "4"),
        ("bench", "--task", "quantize", "-m", "x"),
        ("score", "rows.jsonl"),
    ],
)
def test_a_request_to_end_is_an_interrupt_with_a_word(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((quantize_module, "quantize"), (score_module, "score")):
        monkeypatch.setattr(module, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        result = CliRunner().invoke(app, words)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert result.exit_code == 130
    said = " before the text was scored to its end" if words[0] == "score" else "; the same command goes on where it was"
    assert result.stderr == f"stopped{said}\n"


def test_the_command_line_gives_the_bits_as_a_number(tmp_path: Path) -> None:
    arguments = ["quantize", "-m", "pocket", "-o", str(tmp_path / "x"), "--method", "smoothquant", "--bits"]
    taken = CliRunner().invoke(app, [*arguments, "4"])
    assert isinstance(taken.exception, UsageError) and "smoothquant is not for 4 bits" in str(taken.exception)
    refused = CliRunner().invoke(app, [*arguments, "3"])
    assert isinstance(refused.exception, UsageError) and str(refused.exception) == "--bits: must be 4 or 8, got 3"


def test_what_cannot_be_is_refused_before_cores_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_module, "placed_process", lambda *arguments: pytest.fail("it waits for cores"))
    monkeypatch.setattr(quantize_module, "TokenizerProcess", lambda: nullcontext(tokenizer_process()))
    model = Path(shutil.copytree(find("pocket"), tmp_path / "model"))
    asked = {"model": str(model), "bits": 4, "method": "rtn"}
    with pytest.raises(UsageError, match=r"--out: .*/model is there already; name a folder that is not, or remove it"):
        quantize(build_options(QuantizeSpec, {**asked, "out": model}))
    config = json.loads((model / "config.json").read_text())
    scheme = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    with pytest.raises(ModelError, match=r"model is quantised already \(awq\); give the checkpoint that it was made from"):
        quantize(build_options(QuantizeSpec, {**asked, "out": tmp_path / "new"}))


def test_a_gguf_file_is_refused_by_name(tmp_path: Path) -> None:
    save_small(tmp_path)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", mostly("F32"), "llama")
    with pytest.raises(ModelError, match=r"model\.gguf is a GGUF file, which is not quantised again"):
        program_of(path)


def test_the_usual_group_is_the_largest_that_divides_every_width(tmp_path: Path) -> None:
    for name, group in (("llama", 16), ("llama-gqa-8", 16), ("opt", 8)):
        program = program_and_tensors(name)[0]
        assert choice_of(4, "gptq", None, program, "float16").form.group == group
    with pytest.raises(ModelError, match="no group of 8 to 32 weights divides"):
        choice_of(4, "gptq", None, program_and_tensors("llama", intermediate_size=212)[0], "float16")


def test_windows_are_taken_from_all_of_a_text() -> None:
    windows = evenly(iter(range(100_000)), 4096, "x")
    assert len(windows) == 32 and windows[0][0] == 0 and windows[-1][-1] == 99_999
    assert {len(window) for window in windows} == {512}
    few = evenly(iter(range(300)), 4096, "x")
    assert [len(window) for window in few] == [150, 150]
    with pytest.raises(UsageError, match="x has 100 tokens, too few"):
        evenly(iter(range(100)), 4096, "x")


@pytest.mark.slow
def test_the_command_makes_a_checkpoint_that_scores(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(json.__file__).with_name("scanner.py").read_text())
    out = tmp_path / "out"
    words = ["-m", "pocket-draft", "--bits", "4", "--method", "gptq", "--format", "text"]
    made = outrider("quantize", *words, "-o", out, "--calibration", text)
    assert made.returncode == 0, made.stderr
    assert f"{out}: " in made.stdout and "bits a rounded weight in groups of" in made.stdout
    figures = outrider("score", text, "-m", out, "--against", "pocket-draft", "--format", "text", "--json")
    assert figures.returncode == 0, figures.stderr
    assert 0 < json.loads(figures.stdout)["kl"] < 0.05
    again = outrider("quantize", "-m", "pocket-draft", "-o", out, "--bits", "4", "--method", "rtn")
    assert again.returncode == 2 and "is there already" in again.stderr


@pytest.mark.parametrize("turns", [{}, {"H_cycles": 1, "L_cycles": 1}])
def test_layers_that_a_text_goes_through_again_are_refused(turns: dict[str, int]) -> None:
    config = tiny_config("hrm-text", **turns).to_dict()
    with pytest.raises(ModelError, match="passes through the model's layers repeatedly"):
        layers_of(build_program(config, Format.W4A8))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("name", "widths"), [("gpt2", {"n_inner": 192}), ("gpt", {})])
def test_matrices_that_lie_turned_round_are_written_as_the_format_has_them(
    name: str, widths: dict[str, int], bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[outputs, inputs]. transformers makes no such layers for quantised matrices; the hf engine refuses them."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path, out = tmp_path / "model", tmp_path / "out"
    model = tiny_model(name, **widths)
    model.save_pretrained(path)
    quietly(wanted(path, out, "auto", bits))
    assert json.loads((out / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    written, turned = meant(out), ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    written = {key: tensor.T if key.endswith(turned) else tensor for key, tensor in written.items()}
    exact = model(input_ids=TOKENS[None, :LENGTH]).logits[0].detach().numpy()
    assert model.load_state_dict(written, strict=False).missing_keys in ([], ["lm_head.weight"])
    with torch.inference_mode():
        expected = model(input_ids=TOKENS[None, :LENGTH]).logits[0].numpy()
    assert 0 < np.linalg.norm(expected - exact) / np.linalg.norm(exact) < (0.2 if bits == 4 else 0.02)
    for precision, bound in (("fp32", 1e-5), ("w4abf16", 0.01) if bits == 4 else ("w8a8", 0.03)):
        found = native_logits(open_native(out, precision), TOKENS[:LENGTH].tolist())
        assert np.abs(found - expected).max() / np.abs(expected).max() < bound
    with pytest.raises(ModelError, match=r"makes no weights for|have another shape|lacks"):
        open_model(ModelSpec(str(out), "hf", "fp32", threads=1))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("cohere", {"intermediate_size": 192}),
        ("codegen", {"n_inner": 192}),
        ("gemma3n", {"intermediate_size": 192, "laurel_rank": 32, "hidden_size_per_layer_input": 32, "head_dim": 32}),
        ("youtu-wide", {"intermediate_size": 192, "q_lora_rank": 32, "v_head_dim": 32}),
    ],
)
def test_rows_that_rope_wants_in_another_order_come_quantised(
    name: str, widths: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Command R's norms of heads, which are one matrix, are written as one; CodeGen's heads lie in shares, and what latent
    attention multiplies heads by is left as it is, as are the coefficients of Gemma 3n's streams."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path, out = tmp_path / "model", tmp_path / "out"
    model = tiny_model(name, **widths)
    model.save_pretrained(path)
    quietly(wanted(path, out, "rtn"))
    written = meant(out)
    assert {key: tensor.shape for key, tensor in model.state_dict().items() if key in written} == {
        key: tensor.shape for key, tensor in written.items()
    }
    model.load_state_dict(written, strict=False)
    with torch.inference_mode():
        expected = model(input_ids=TOKENS[None, :LENGTH]).logits[0].numpy()
    for precision, bound in (("fp32", 1e-4), ("w4abf16", 0.03)):
        found = native_logits(open_native(out, precision), TOKENS[:LENGTH].tolist())
        assert np.abs(found - expected).max() / np.abs(expected).max() < bound
