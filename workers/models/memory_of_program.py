"""The memory of a model on the native engine, computed from its program before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from outrider.kernels.packer import packed_bytes
from outrider.kernels.program import OUTER_PRODUCTS, RECURRENT, Codes, Format, Kind, Op, Program, Scales, Weight
from outrider.workers.engines.native import head_of, reserved, scored_tokens
from outrider.workers.messages import ModelSpec
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.model_info import weight_files
from outrider.workers.models.model_memory import NO_PAIRS, ModelMemory, PairsMemory
from outrider.workers.models.opening import with_cache
from outrider.workers.precisions import PRECISIONS

FLOAT_BYTES = 4
# As in the kernels: each buffer of a pass is allocated with a quarter to spare and in huge pages, and so are OWN_BUFFERS
# that are not the program's.
LANES, SPARE, HUGE_PAGE, OWN_BUFFERS = 16, 1.25, 2 << 20, 7
# For products in pairs of channels a matrix has one more number for each output (in whole tiles) and block of channels.
# DIGITS: into how many int8 digits some formats split an input.
TILE, BLOCK_CHANNELS, DIGITS = 32, 128, 3
# How many numbers a shortlist keeps for each token of the vocabulary, and for each token on it.
OF_EVERY_TOKEN, OF_A_LISTED_TOKEN = 1, 4
# The tokens of a block of the KV cache.
BLOCK_TOKENS = 32
# For how many tokens the inputs are kept after a recurrent state; and the most memory of its snapshots, as a multiple of
# that of keys and values, or without attention as a part of that of the inputs of all tokens.
KEPT_INPUTS, SNAPSHOT_SHARE, INPUTS_SHARE = 64, 4, 16


def memory_of(spec: ModelSpec, rows: int, shortlist: int | None = 0) -> ModelMemory | None:
    """The memory with this many rows at once; None where it is not known before the model is open.

    A draft with a ``shortlist`` scores at most this many tokens (0: all, None: as many as pay).
    """
    directory = Path(spec.path)
    if spec.engine != "native" or weight_files(directory)[0].suffix == ".bin":
        return None
    built = read_program(directory, PRECISIONS[spec.precision], states=spec.states)
    return memory_of_program(with_cache(built.program, spec), rows, shortlist)


def memory_of_program(program: Program, rows: int, shortlist: int | None = 0) -> ModelMemory:
    program, listed = _shortened(program, shortlist)
    pass_tokens, choices, first_tokens = reserved(rows, program.context)
    state, inputs = _state(program)
    token = program.token_bytes
    return ModelMemory(
        weights=sum(packed_bytes(weight) for weight in program.weights),
        working=OWN_BUFFERS * HUGE_PAGE
        + _inputs(program, pass_tokens)
        + sum(_buffers(program, pass_tokens, choices))
        + listed,
        row=state + KEPT_INPUTS * inputs,
        token=token + _snapshots(state, inputs, token, program.context),
        first_tokens=first_tokens // rows,
        pairs=_of_pairs(program),
    )


def _shortened(program: Program, shortlist: int | None) -> tuple[Program, int]:
    """The program with the shortlist's matrix in addition to the whole LM head; and the bytes of the list itself."""
    head, scored = head_of(program), scored_tokens(program, shortlist)
    if scored >= head.output.width:
        return program, 0
    output = replace(head.output, buffer=len(program.buffers), offset=0, width=scored)
    short = replace(head, weight=len(program.weights), output=output)
    beside = replace(
        program,
        ops=(*program.ops, short),
        weights=(*program.weights, replace(program.weights[head.weight], rows=scored)),
        buffers=(*program.buffers, scored),
    )
    return beside, FLOAT_BYTES * (OF_EVERY_TOKEN * program.vocabulary + OF_A_LISTED_TOKEN * scored)


def _buffers(program: Program, tokens: int, choices: int) -> Iterator[int]:
    """The bytes of each buffer in a pass over ``tokens``; buffers after the SELECT operation hold only tokens with a
    choice."""
    selection = next((index for index, op in enumerate(program.ops) if op.kind is Kind.SELECT), len(program.ops))
    of_all = {op.output.buffer for op in program.ops[:selection] if op.kind is not Kind.CHOOSE}
    for buffer, width in enumerate(program.buffers):
        vectors = -(-width // LANES) | 1
        size = SPARE * (tokens if buffer in of_all else choices) * vectors * LANES * FLOAT_BYTES
        yield _in_pages(size)


def _inputs(program: Program, tokens: int) -> int:
    """The bytes of the largest prepared (quantised) input of a product: for experts a token's own, and one for each
    expert."""
    of_a_token = (
        {Kind.LINEAR: 1, Kind.EXPERTS: op.kv_heads + 1, Kind.HEADS: op.heads}[op.kind] * _words(program.weights[op.weight])
        for op in program.ops
        if op.kind in (Kind.LINEAR, Kind.EXPERTS, Kind.HEADS)
    )
    return _in_pages(SPARE * FLOAT_BYTES * tokens * max(of_a_token, default=0))


def _words(weight: Weight) -> int:
    """32-bit words of a prepared input of this weight."""
    columns = weight.columns
    if weight.format.integer:
        return -(-columns // 8) * 2 * (DIGITS if weight.format in (Format.W4ABF16, Format.W8AF32) else 1)
    return -(-columns // 2) if weight.format is Format.BF16 else columns


def _of_pairs(program: Program) -> PairsMemory:
    """The additional bytes of matrices whose codes are multiplied in pairs of channels.

    Those of a layer's experts are allocated together; experts with factors are not multiplied in pairs.
    """
    matrices = {op.weight: 1 for op in program.ops if op.kind is Kind.LINEAR}
    for op in program.ops:
        if op.kind is Kind.EXPERTS and program.weights[op.weight].stored.scales is not Scales.FACTORS:
            matrices[op.weight] = op.heads
    return sum((_of_matrices(program.weights[each], count) for each, count in matrices.items()), NO_PAIRS)


def _of_matrices(weight: Weight, count: int) -> PairsMemory:
    if not (weight.format in (Format.W4A8, Format.W4ABF16) and weight.stored.codes is Codes.INT4):
        return NO_PAIRS
    numbers = _in_pages(count * FLOAT_BYTES * TILE * _tiles(weight) * -(-weight.columns // BLOCK_CHANNELS))
    if weight.stored.scales is Scales.FACTORS:
        return PairsMemory(factors=numbers)
    in_words = weight.stored.scales is Scales.WORDS and weight.group == BLOCK_CHANNELS
    return PairsMemory(words=numbers) if in_words else NO_PAIRS


def _tiles(weight: Weight) -> int:
    """The number of tiles; half of a gated matrix's tile are gates."""
    return -(-weight.rows // 2 // LANES) if weight.gated else -(-weight.rows // TILE)


def _in_pages(size: float) -> int:
    return -int(-size // HUGE_PAGE) * HUGE_PAGE


def _state(program: Program) -> tuple[int, int]:
    """The bytes of a row's recurrent states, and of one token's inputs to them."""
    parts = [_state_of(program, op) for op in program.ops if op.kind in RECURRENT]
    return FLOAT_BYTES * sum(state for state, _ in parts), FLOAT_BYTES * sum(inputs for _, inputs in parts)


def _state_of(program: Program, op: Op) -> tuple[int, int]:
    if op.kind in OUTER_PRODUCTS:
        return op.head_size * op.output.width, op.parts * op.head_size + op.value.width + op.decays
    return (program.weights[op.weight].columns - 1) * op.input.width, op.input.width


def _snapshots(state: int, inputs: int, token: int, context: int) -> int:
    """The bytes of snapshots of the recurrent states, for each token. ``inputs`` and ``token`` are the bytes of a token's
    inputs to the states, and of its keys and values."""
    if not state:
        return 0
    block = SNAPSHOT_SHARE * BLOCK_TOKENS * token if token else BLOCK_TOKENS * inputs // INPUTS_SHARE
    blocks = min(-(-state // block), context // BLOCK_TOKENS + 1)
    return -(-state // (blocks * BLOCK_TOKENS))
