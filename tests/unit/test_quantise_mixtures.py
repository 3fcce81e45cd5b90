"""``outrider quantize`` of mixtures of experts, each expert by the tokens that come to it, and of layers with a state."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import finish, outrider, start, wait_for
from native_models import logits as native_logits
from native_models import open_native
from quantised_models import rewritten
from safetensors.torch import load_file, save_file
from test_quantise import FORM, LENGTH, TOKENS, contents, logits, meant, quietly, wanted
from tiny_models import MIXTURES, OF_SEVERAL_KINDS, TINY, one_by_one, saved_tensors, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.kernels.program import Kind, Program
from outrider.runner.quality import quantize as quantize_module
from outrider.workers.errors import ModelError
from outrider.workers.models.checkpoint import open_checkpoint
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.model_info import find
from outrider.workers.precisions import PRECISIONS
from outrider.workers.quantising import methods
from outrider.workers.quantising.layers import layers_of, named
from outrider.workers.quantising.methods import Choice, observe, rounded_in_all_ways, run_layer
from outrider.workers.quantising.quantisable import check_quantisable
from outrider.workers.quantising.quantiser import program_of, quantise, read
from outrider.workers.quantising.scales import apply
from outrider.workers.quantising.summary import QuantiseSummary

# Not those whose experts are one matrix; with those whose layers are of several kinds, but not where these share weights.
WITH_STATE = [name for name in TINY if name.startswith(OF_SEVERAL_KINDS) and not name.startswith("zamba2")]
QUANTISED = [name for name in MIXTURES if not name.startswith("dbrx")] + WITH_STATE
# Widths that groups of 32 divide.
WIDTHS = {"intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "head_dim": 32}
SMALL = {"mixtral": ("intermediate_size",), "qwen2-moe": tuple(WIDTHS)[:3], "gpt-oss": ("intermediate_size", "head_dim")}
SMALL |= {
    "qwen3-moe": ("intermediate_size", "moe_intermediate_size", "head_dim"),
    "olmoe": ("intermediate_size",),
    "deepseek-v2-groups": tuple(WIDTHS)[:2],
}
SMALL |= {"lfm2-moe": tuple(WIDTHS)[:2], "qwen3-next": tuple(WIDTHS), "qwen3-5": ()}
# Of latent attention's ranks, too, and of delta nets' heads.
MORE = {"deepseek-v2-groups": {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32}}
MORE |= {"qwen3-5": {"intermediate_size": 192}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def small(name: str, path: Path, **changes: Any) -> Any:
    """Saved in bf16; the model itself in float32."""
    model = tiny_model(name, **{key: WIDTHS[key] for key in SMALL[name]} | MORE.get(name, {}) | changes)
    rounded = {key: value.bfloat16().float() for key, value in model.state_dict().items()}
    model.load_state_dict(rounded)
    model.save_pretrained(path)
    rewritten(path, lambda tensors: {key: value.bfloat16() for key, value in tensors.items()})
    return model


def tensors_of(path: Path) -> tuple[Program, dict[str, Tensor]]:
    """As a checkpoint hands them out, experts one by one."""
    program, checkpoint = program_of(path)[0], open_checkpoint(path)
    try:
        return program, read(checkpoint, named(program, range(len(program.weights))))[0]
    finally:
        checkpoint.close()


@pytest.mark.one_in(30)
@pytest.mark.parametrize("name", QUANTISED)
def test_a_program_of_several_kinds_of_layers_gives_the_models_own_logits(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    program, tensors = tensors_of(tmp_path)
    if name == "gemma4-moe":  # whose factor of embeddings is bf16 unless activations are fp32
        embedding = model.get_input_embeddings()
        embedding.embed_scale = embedding.embed_scale.bfloat16().float()
    with torch.inference_mode():
        expected = model(input_ids=TOKENS.view(-1, LENGTH)).logits
    found = logits(program, tensors)
    assert torch.allclose(found, expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))
    # Factors that are moved within experts, and wherever no router reads, leave it as it was; and no router has changed.
    generator, changed = torch.Generator().manual_seed(5), dict(tensors)
    layers = layers_of(program)
    for layer in layers:
        for feeder in layer.feeders:
            names = [part.name for part in named(program, feeder.readers)]
            factors = torch.rand(changed[names[0]].shape[1], generator=generator) + 0.5
            if feeder.repeats > 1:
                heads = factors.view(-1, feeder.repeats, feeder.head_size)
                factors = heads[:, :1].expand_as(heads).reshape(-1)
            apply(feeder, names, factors, changed, dict.fromkeys(changed, torch.float32))
    assert torch.allclose(logits(program, changed), found, rtol=1e-3, atol=1e-4 * float(found.abs().max()))
    experts = [op for op in program.ops if op.kind is Kind.EXPERTS]
    assert bool(experts) == (name in MIXTURES)
    rounded = {number for layer in layers for number in layer.rounded}
    assert all(set(range(op.weight, op.weight + op.heads)) <= rounded for op in experts)
    routed = {op.input.buffer for op in program.ops if op.kind is Kind.ROUTE}
    routers = [op.weight for op in program.ops if op.kind is Kind.LINEAR and op.output.buffer in routed]
    counts = {op.heads for op in program.ops if op.kind is Kind.ROUTE}
    routers = [number for number in routers if program.weights[number].rows in counts]
    assert bool(routers) == bool(experts) and not rounded & set(routers)
    assert all(torch.equal(changed[part.name], tensors[part.name]) for part in named(program, routers))


# Each family is written in 4 bits and in 8, scaled by both ways of scaling, and (by "auto") rounded in every way of 4 bits.
# What a way of rounding does by itself knows no family: each has two or three.
EVERY_WAY = ((4, "awq"), (8, "smoothquant"), (4, "auto"))
IN_TURN = ((4, "rtn"), (4, "gptq"), (8, "rtn"), (8, "gptq"))
WRITTEN = [(name, *way) for at, name in enumerate(SMALL) for way in (*EVERY_WAY, IN_TURN[at % len(IN_TURN)])]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits", "method"), WRITTEN)
def test_what_is_written_of_a_mixture_is_what_was_meant(name: str, bits: int, method: str, tmp_path: Path) -> None:
    """The native engine keeps the codes and computes as they stand for, as transformers does with these numbers."""
    path, out, plain = tmp_path / "model", tmp_path / "out", tmp_path / "plain"
    model = small(name, path)
    made = quietly(wanted(path, out, method, bits))
    experts = sum(op.heads for op in program_of(path)[0].ops if op.kind is Kind.EXPERTS) // 2
    # So few tokens as these are, no expert has enough.
    assert made.experts == experts and made.few == (0 if method == "rtn" else experts)
    assert read_program(out, PRECISIONS["w8af32"]).kept
    found = native_logits(open_native(out, "fp32"), TOKENS[:LENGTH].tolist())
    with torch.inference_mode():
        exact = model(input_ids=TOKENS[None, :LENGTH]).logits[0].numpy()
    lost = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    # Random delta nets, whose states last for long, make much of little.
    bound = (0.5 if bits == 4 else 0.1) * (2 if name in ("qwen3-5", "qwen3-next") else 1)
    assert 0 < lost < bound
    if name == "gpt-oss":  # transformers knows its experts as one tensor
        program, tensors = program_of(path)[0], meant(out)
        expected = logits(program, tensors)[0].numpy()
    else:
        plain.mkdir()
        config = json.loads((out / "config.json").read_text())
        del config["quantization_config"]
        (plain / "config.json").write_text(json.dumps(config))
        save_file(meant(out), plain / "model.safetensors", {"format": "pt"})
        theirs: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
        one_by_one(theirs)
        with torch.inference_mode():
            expected = theirs(input_ids=TOKENS[None, :LENGTH]).logits[0].numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe"])
@pytest.mark.filterwarnings("ignore:You passed .quantization_config")
def test_transformers_reads_four_bits_of_a_mixture_where_it_dequantises(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    path, out = tmp_path / "model", tmp_path / "out"
    small(name, path)
    quietly(wanted(path, out, "rtn"))
    asked = CompressedTensorsConfig(dequantize=True)
    read_again: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=asked).eval()
    # Experts come in the type of their scales.
    one_by_one(read_again.float())
    with torch.inference_mode():
        expected = read_again(input_ids=TOKENS[None, :LENGTH]).logits[0].numpy()
    found = native_logits(open_native(out, "fp32"), TOKENS[:LENGTH].tolist())
    assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()


def test_names_are_those_of_the_checkpoint_and_routers_come_bit_for_bit(tmp_path: Path) -> None:
    path, out = tmp_path / "model", tmp_path / "out"
    small("mixtral", path)
    quietly(wanted(path, out, "rtn"))
    before, written = load_file(path / "model.safetensors"), {}
    for file in out.glob("*.safetensors"):
        written |= load_file(file)
    router, expert = "model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    assert torch.equal(written[router], before[router])
    assert f"{expert}_packed" in written and expert not in written and not any(".mlp." in name for name in written)
    kept = {name.removesuffix("_packed") for name in written if not name.endswith(("_scale", "_shape"))}
    assert kept == before.keys()
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    routers = [f"model.layers.{layer}.{part}.gate" for layer in range(2) for part in ("block_sparse_moe", "mlp")]
    assert ignored == sorted(["lm_head", *routers])


@pytest.mark.slow
def test_what_weighs_a_shared_expert_comes_bit_for_bit(tmp_path: Path) -> None:
    path, out = tmp_path / "model", tmp_path / "out"
    small("qwen2-moe", path)
    quietly(wanted(path, out, "awq"))
    before, written = load_file(path / "model.safetensors"), {}
    for file in out.glob("*.safetensors"):
        written |= load_file(file)
    for name in ("shared_expert_gate", "gate"):
        assert torch.equal(written[f"model.layers.0.mlp.{name}.weight"], before[f"model.layers.0.mlp.{name}.weight"])
    assert "model.layers.0.mlp.shared_expert.up_proj.weight_packed" in written


def inputs_of_layer(path: Path) -> tuple[Program, dict[str, Tensor], Any, dict[int, Tensor]]:
    from outrider.workers.quantising.forward import Forward

    program, tensors = tensors_of(path)
    layer, buffers = layers_of(program)[0], dict[int, Tensor]()
    with torch.inference_mode():
        Forward(program, tensors, LENGTH).run(0, layer.start, buffers, TOKENS)
    return program, tensors, layer, buffers


def test_each_expert_goes_by_the_tokens_that_come_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that few or none come to by others beside, which change nothing of what the layer makes."""
    small("olmoe", tmp_path)
    program, tensors, layer, buffers = inputs_of_layer(tmp_path)
    front, behind = (op for op in program.ops[layer.start : layer.stop] if op.kind is Kind.EXPERTS)
    router = next(
        part.name for part in named(program, range(len(program.weights))) if part.name.endswith("0.mlp.gate.weight")
    )
    heard: dict[int, Tensor] = {}

    def watch(number: int, x: Tensor) -> Tensor:
        heard[number] = x.clone()
        return x

    with torch.inference_mode():
        plain = run_layer(program, layer, tensors, buffers, LENGTH, watch, exactly=True)
        sent = {number: len(x) for number, x in heard.items() if number in layer.experts}
        few = set[int]()
        monkeypatch.setattr(methods, "LEAST_TOKENS", least := sorted(sent.values())[len(sent) // 2])
        with_others = run_layer(program, layer, tensors, buffers, LENGTH, watch, exactly=True, few=few)
        assert all(torch.equal(plain[number], with_others[number]) for number in plain)
        assert few == {number for number in range(front.weight, front.weight + front.heads) if sent.get(number, 0) < least}
        for expert in range(front.heads):
            count = sent.get(front.weight + expert, 0)
            for first in (front.weight, behind.weight):
                assert len(heard[first + expert]) == count + (least if count < least else 0)
        assert sum(sent.get(front.weight + expert, 0) for expert in range(front.heads)) == len(TOKENS) * front.kv_heads
        # What an expert reads is what the router was given, and the inside of it what it makes of that.
        gate, up = (tensors[f"model.layers.0.mlp.experts.2.{part}_proj.weight"] for part in ("gate", "up"))
        x = heard[front.weight + 2]
        inner = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
        assert torch.allclose(heard[behind.weight + 2], inner, rtol=1e-4, atol=1e-6)
        scores = x[: sent.get(front.weight + 2, 0)] @ tensors[router].T
        assert all(2 in row.topk(front.kv_heads).indices for row in scores)


@pytest.mark.slow
def test_an_expert_that_no_token_comes_to_is_rounded_by_the_layers_own(tmp_path: Path) -> None:
    model = small("olmoe", tmp_path / "model")
    changed = {key: value.clone() for key, value in saved_tensors(model).items()}
    # Of eight others each has its opposite, so that four scores are above this one's, which is 0: a token has four experts.
    gate = changed["model.layers.0.mlp.gate.weight"]
    gate[0], gate[5:] = 0.0, -gate[1:5]
    rewritten(tmp_path / "model", lambda tensors: {key: changed[key].bfloat16() for key in tensors})
    program, tensors, layer, buffers = inputs_of_layer(tmp_path / "model")
    choice = Choice("gptq", FORM, activations=False)
    stored = dict.fromkeys(tensors, torch.bfloat16)
    with torch.inference_mode():
        [fed_back] = rounded_in_all_ways(program, layer, choice, tensors, stored, buffers, LENGTH)
        [nearest] = rounded_in_all_ways(program, layer, Choice("rtn", FORM, False), tensors, stored, buffers, LENGTH)
        seen = observe(program, layer, FORM, "awq", tensors, buffers, LENGTH)
        heard = dict[int, int]()
        run_layer(program, layer, tensors, buffers, LENGTH, lambda number, x: [heard.setdefault(number, len(x)), x][1])
    front = next(op for op in program.ops if op.kind is Kind.EXPERTS)
    assert front.weight not in heard and front.weight + 1 in heard
    assert fed_back.few == front.heads and nearest.few == 0
    assert set(seen.importance) == layer.experts
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    x = torch.randn(400, 96, generator=torch.Generator().manual_seed(3))
    assert fed_back.rounded[name].values.shape == nearest.rounded[name].values.shape
    assert not torch.equal(fed_back.rounded[name].values, nearest.rounded[name].values)
    off = float(((fed_back.tensors[name] - tensors[name]) @ x.T).norm() / (tensors[name] @ x.T).norm())
    assert 0 < off < 0.3


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "method"), [(4, "auto"), (8, "auto"), (4, "rtn")])
def test_a_mixture_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Path, bits: int, method: str) -> None:
    path, whole, torn = tmp_path / "model", tmp_path / "whole", tmp_path / "torn"
    small("qwen2-moe", path)
    made = quietly(wanted(path, whole, method, bits))

    class Stopped(Exception):
        pass

    def stop(text: str) -> None:
        raise Stopped

    for _ in range(2):
        with pytest.raises(Stopped):
            quantise(wanted(path, torn, method, bits), stop)
    assert quietly(wanted(path, torn, method, bits)) == made
    assert contents(torn) == contents(whole)


def test_a_mixture_whose_experts_are_one_matrix_is_refused_by_name(tmp_path: Path) -> None:
    tiny_model("dbrx").save_pretrained(tmp_path)
    sentence = (
        r'has all experts of a layer in one matrix, "transformer\.blocks\.0\..*w1".*; --precision w4a8 rounds it on load'
    )
    with pytest.raises(ModelError, match=sentence):
        check_quantisable(tmp_path, tmp_path / "out", 4, None)


def test_how_many_experts_few_tokens_came_to_is_told() -> None:
    made = QuantiseSummary({"gptq": 48}, 4.5, 32, 16_900_000_000, 37, 6144)
    assert quantize_module.result_line(Path("out"), made) == (
        "out: 16.9 GB, 4.50 bits a rounded weight in groups of 32; gptq in 48 layers; 37 of 6,144 experts were calibrated "
        "on other tokens, too: few came to them"
    )


@pytest.mark.slow
def test_the_command_goes_on_after_a_kill_and_its_mixture_scores(tmp_path: Path) -> None:
    """A mixture of the bundled target's tokens, with a shared expert."""
    path, text = tmp_path / "model", tmp_path / "text.txt"
    small("qwen2-moe", path, vocab_size=4096, num_hidden_layers=3, max_position_embeddings=512)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find("pocket") / file, path / file)
    text.write_text(Path(json.__file__).with_name("scanner.py").read_text())
    common = ("quantize", "-m", path, "--bits", "4", "--method", "gptq", "--calibration", text)
    whole = outrider(*common, "-o", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert "experts were calibrated on other tokens, too" in whole.stdout
    process = start(*common, "-o", tmp_path / "torn")
    unfinished = tmp_path / "torn.unfinished"
    wait_for(process, lambda: (unfinished / "activations.safetensors").exists(), "the first layer")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert unfinished.exists()
    finish(start(*common, "-o", tmp_path / "torn"))
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")
    figures = outrider("score", text, "-m", tmp_path / "torn", "--against", path, "--json")
    assert figures.returncode == 0, figures.stderr
    assert 0 < json.loads(figures.stdout)["kl"] < 0.5
