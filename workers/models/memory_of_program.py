"""What memory a model takes in its process on the native engine: by its program, before a weight of it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from outrider.kernels.packer import packed_bytes
from outrider.kernels.program import RECURRENT, Kind, Op, Program
from outrider.workers.engines.native import reserved
from outrider.workers.messages import ModelSpec
from outrider.workers.models.laying_out import lay_out
from outrider.workers.models.model_info import weight_files
from outrider.workers.models.model_memory import ModelMemory
from outrider.workers.models.opening import with_cache
from outrider.workers.precisions import PRECISIONS

FLOAT_BYTES = 4
# Of the kernels: what is taken for a pass is a quarter more than asked for and in huge pages, for each of the program's
# buffers and for some of the kernels' own.
LANES, SPARE, HUGE_PAGE, OWN_BUFFERS = 16, 1.25, 2 << 20, 8
# Tokens of a block of the cache.
BLOCK_TOKENS = 32
# Tokens whose inputs are kept beside a state, and how many times the memory of their tokens' keys and values its copies may
# take.
KEPT_INPUTS, SNAPSHOT_SHARE = 64, 4


def memory_of(spec: ModelSpec, rows: int) -> ModelMemory | None:
    """Of a model that works on so many rows at once; None where that is not known before it is open."""
    directory = Path(spec.path)
    if spec.engine != "native" or weight_files(directory)[0].suffix == ".bin":
        return None
    laid_out = lay_out(directory, PRECISIONS[spec.precision], states=spec.states)
    return memory_of_program(with_cache(laid_out.program, spec), rows)


def memory_of_program(program: Program, rows: int) -> ModelMemory:
    pass_tokens, choices, first_tokens = reserved(rows, program.context)
    state, inputs = _state(program)
    token = program.token_bytes
    return ModelMemory(
        weights=sum(packed_bytes(weight) for weight in program.weights),
        working=OWN_BUFFERS * HUGE_PAGE + sum(_buffers(program, pass_tokens, choices)),
        row=state + KEPT_INPUTS * inputs,
        token=token + _snapshots(state, token, program.context),
        first_tokens=first_tokens // rows,
    )


def _buffers(program: Program, tokens: int, choices: int) -> Iterator[int]:
    """What a pass over so many tokens keeps between its operations; behind the selection only those with a choice."""
    selection = next((index for index, op in enumerate(program.ops) if op.kind is Kind.SELECT), len(program.ops))
    of_all = {op.output.buffer for op in program.ops[:selection] if op.kind is not Kind.CHOOSE}
    for buffer, width in enumerate(program.buffers):
        vectors = -(-width // LANES) | 1
        size = SPARE * (tokens if buffer in of_all else choices) * vectors * LANES * FLOAT_BYTES
        yield -int(-size // HUGE_PAGE) * HUGE_PAGE


def _state(program: Program) -> tuple[int, int]:
    """Bytes of a row's recurrent states, and of what a token adds to them."""
    parts = [_state_of(program, op) for op in program.ops if op.kind in RECURRENT]
    return FLOAT_BYTES * sum(state for state, _ in parts), FLOAT_BYTES * sum(inputs for _, inputs in parts)


def _state_of(program: Program, op: Op) -> tuple[int, int]:
    if op.kind is Kind.DELTA:
        return op.head_size * op.output.width, op.key.width + op.value.width + op.heads
    return (program.weights[op.weight].columns - 1) * op.input.width, op.input.width


def _snapshots(state: int, token: int, context: int) -> int:
    """What copies of a state that are kept on the way come to for each token."""
    block = max(BLOCK_TOKENS * token, 64)
    blocks = min(-(-state // (SNAPSHOT_SHARE * block)), context // BLOCK_TOKENS + 1)
    return -(-state // (blocks * BLOCK_TOKENS)) if state else 0
