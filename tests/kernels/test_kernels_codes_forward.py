"""Passes over codes as they came quantised: against the reference, and bit for bit however they are asked."""

from dataclasses import replace

import numpy as np
import pytest
from coded_models import model_of
from kernel_models import LLAMA, Packed, all_logits, assert_same_bits, build, pack_program, random_matrices, tokens
from quantised_rows import SCHEMES, random_rows

from outrider.kernels import library, packing, storage
from outrider.kernels.native import NativeFeed
from outrider.kernels.program import Format, Kind
from outrider.kernels.quantised import Scheme
from outrider.kernels.reference import ReferenceModel

INSTRUCTION_SETS = library.available_instruction_sets()
# A group of one row is an outlier of the others' size; one int8 step of it is more of the whole.
TOLERANCE = {Format.W4A8: 4e-2, Format.W4ABF16: 1e-2, Format.W8AF32: 1e-5}


@pytest.mark.one_in(28)
@pytest.mark.parametrize("format", TOLERANCE)
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_against_the_reference_and_on_every_instruction_set(name, format, monkeypatch):
    shape, model = model_of(SCHEMES[name], format, ordered=len(name) % 2 == 1)
    text = tokens(shape, 31)
    wanted = ReferenceModel(model.program, model.memory).logits(text)
    found = {}
    for isa in INSTRUCTION_SETS:
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        with model.model() as engine:
            found[isa] = all_logits(engine, engine.open(), text)
        assert np.isfinite(found[isa]).all()
        assert_same_bits(found[isa], found[INSTRUCTION_SETS[0]])
    assert abs(found[INSTRUCTION_SETS[0]] - wanted).max() <= TOLERANCE[format] * abs(wanted).max()


@pytest.mark.one_in(7)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("format", [Format.W4A8, Format.W4ABF16])
@pytest.mark.parametrize(
    "name", ["rounded on load", "gguf Q4_0", "gguf Q5_1", "gguf Q4_K", "gguf Q6_K", "awq g32", "awq g64"]
)
def test_codes_however_they_are_asked(name, format, isa, monkeypatch):
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    shape, model = model_of(SCHEMES[name], format)
    text = tokens(shape, 75)
    with model.model() as engine:
        whole = all_logits(engine, engine.open(), text)
        assert_same_bits(all_logits(engine, engine.open(), text, (1, 7, 2, 5, 4, 6, 3, 8, 1, 13)), whole)
        row = engine.open()
        engine.forward([NativeFeed(row, text[:30], choose=0)])
        # The second token tried in place of the fourth, then what follows as if it had not been.
        [answer] = engine.forward([NativeFeed(row, text[30:34], choose=1, logprobs=2, branches=[(3, text[40])])])
        other = engine.open()
        engine.forward([NativeFeed(other, text[:33], choose=0)])
        [alone] = engine.forward([NativeFeed(other, [text[40]], choose=1, logprobs=2)])
        assert (answer.tokens[1], answer.margins[1], answer.logprobs[1]) == (
            alone.tokens[0],
            alone.margins[0],
            alone.logprobs[0],
        )
    with model.model(threads=3) as engine:
        assert_same_bits(all_logits(engine, engine.open(), text, (40, 1, 9)), whole)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", TOLERANCE)
@pytest.mark.parametrize("name", ["gguf MXFP4", "gguf IQ4_XS", "gguf Q4_0", "gguf Q8_0", "pack-quantized g32", "awq g32"])
def test_codes_on_tiles_at_every_number_of_rows(name, format, monkeypatch):
    """Rows by sixteen, a token's digits together, and more than are summed up at once."""
    if "amx" not in INSTRUCTION_SETS:
        pytest.skip("no AMX here")
    shape, model = model_of(SCHEMES[name], format)
    text = tokens(shape, 140)
    monkeypatch.setenv("OUTRIDER_ISA", "avx512vnni")
    with model.model() as engine:
        wanted = all_logits(engine, engine.open(), text)
    monkeypatch.setenv("OUTRIDER_ISA", "amx")
    with model.model(threads=2) as engine:
        for sizes in ((), (9, 10, 11, 16, 17, 21), (42, 43), (86,), (129,)):
            assert_same_bits(all_logits(engine, engine.open(), text, sizes), wanted)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SCHEMES)
def test_an_embedding_of_codes_gives_the_numbers_that_they_stand_for(name):
    """A model whose embedding is packed computes, bit for bit, what it does with a table of its numbers."""
    scheme = SCHEMES[name]
    shape, plain = model_of(scheme, Format.W8AF32)
    program, offsets = plain.program, packing.weight_offsets(plain.program)[0]
    pieces = [plain.memory[at : at + packing.packed_size(each)] for at, each in zip(offsets, program.weights, strict=True)]
    [embed] = [op.weight for op in program.ops if op.kind is Kind.EMBED]
    table = program.weights[embed]
    kept, group = storage.storage_for(scheme, table.columns)
    codes = replace(table, format=Format.W8AF32, table=False, storage=kept, group=group)
    pieces[embed] = storage.pack(codes, random_rows(scheme, table.rows, table.columns))
    numbers = replace(table, format=Format.FP32)
    found = []
    for weight, piece in ((codes, pieces[embed]), (numbers, packing.pack(numbers, storage.unpack(codes, pieces[embed])))):
        weights = tuple(weight if index == embed else each for index, each in enumerate(program.weights))
        changed = replace(program, weights=weights)
        memory = np.zeros(packing.weight_offsets(changed)[1] + packing.ALIGNMENT, np.uint8)
        memory = memory[-memory.ctypes.data % packing.ALIGNMENT :][: packing.weight_offsets(changed)[1]]
        parts = [piece if index == embed else each for index, each in enumerate(pieces)]
        for at, part in zip(packing.weight_offsets(changed)[0], parts, strict=True):
            memory[at : at + part.size] = part
        with Packed(changed, memory).model() as engine:
            found.append(all_logits(engine, engine.open(), tokens(shape, 40)))
    assert_same_bits(found[0], found[1])


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_a_head_in_fp16_scores_as_one_in_fp32(isa, monkeypatch):
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    program = build(replace(LLAMA, layers=1), Format.W4A8)
    matrices = random_matrices(program)
    head = next(op.weight for op in reversed(program.ops) if op.kind is Kind.LINEAR)
    matrices[head] = matrices[head].astype(np.float16).astype(np.float32)
    found = []
    for format in (Format.FP16, Format.FP32):
        weight = replace(program.weights[head], format=format, group=0, storage=None)
        weights = tuple(weight if index == head else each for index, each in enumerate(program.weights))
        changed = replace(program, weights=weights)
        with Packed(changed, pack_program(changed, matrices)).model() as engine:
            found.append(all_logits(engine, engine.open(), tokens(LLAMA, 40), (1, 7, 2, 12)))
    assert_same_bits(found[0], found[1])


def test_an_order_is_applied_to_the_activations():
    """Columns and channels shuffled alike give what neither shuffled gives, where the groups' scales are the same."""
    scheme = Scheme("gptq", 4, 128, symmetric=False)
    shape, ordered = model_of(scheme, Format.W8AF32, ordered=True)
    weights = []
    offsets, _ = packing.weight_offsets(ordered.program)
    for weight, offset in zip(ordered.program.weights, offsets, strict=True):
        part = ordered.memory[offset : offset + packing.packed_size(weight)]
        unordered = replace(weight, format=Format.FP32, group=0, storage=None, ordered=False)
        weights.append((unordered if weight.ordered else weight, packing.unpack(weight, part)))
    program = replace(ordered.program, weights=tuple(weight for weight, _ in weights))
    plain = Packed(program, pack_program(program, [matrix for _, matrix in weights]))
    text = tokens(shape, 20)
    with ordered.model() as engine, plain.model() as other:
        found, wanted = all_logits(engine, engine.open(), text), all_logits(other, other.open(), text)
    assert abs(found - wanted).max() <= 1e-5 * abs(wanted).max()


@pytest.mark.parametrize(("format", "size"), [(Format.W4ABF16, 30), (Format.W8AF32, 3000)])
def test_activations_of_very_different_sizes_lose_nothing_that_matters(format, size):
    """One channel a thousand (fp32: a hundred thousand) times the others, which its own weights ignore: the others still
    count."""
    program = build(replace(LLAMA, layers=1), format)
    matrices = random_matrices(program)
    for weight, matrix in zip(program.weights, matrices, strict=True):
        if weight.table and weight.rows > 1:
            matrix[:, 5] = size
        elif not weight.table and weight.columns == LLAMA.width:
            matrix[:, 5] = 0
    model = Packed(program, pack_program(program, matrices))
    text = tokens(LLAMA, 12)
    wanted = ReferenceModel(program, model.memory).logits(text)
    with model.model() as engine:
        found = all_logits(engine, engine.open(), text)
    assert abs(found - wanted).max() <= 2e-3 * abs(wanted).max()
