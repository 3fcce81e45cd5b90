"""Buffers of a finished list of operations: which positions they hold, and which of them share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.kernels.program import RECURRENT, Kind, Op, Slice

# The operations that need all tokens of a pass, besides attention that fills a cache: token and position embeddings,
# recurrent states, and hidden states that are returned.
_EVERY_TOKEN = (Kind.EMBED, Kind.POSITION, Kind.HIDDEN_OUT, *RECURRENT)


def select_positions(ops: Sequence[Op], widths: Sequence[int]) -> tuple[list[Op], list[int]]:
    """After the last operation that needs all tokens, only positions whose choice or logits are asked for are computed.

    Of a prompt that is the last position, which saves most of the last layer, and all of the layers that share an earlier
    layer's cache.
    """
    filling = {op.integer: index for index, op in reversed(list(enumerate(ops))) if op.kind is Kind.ATTENTION}
    border = 1 + max([*filling.values(), *(index for index, op in enumerate(ops) if op.kind in _EVERY_TOKEN)])
    before, after = list(ops[:border]), ops[border:]
    made = {op.output.buffer for op in before}
    selected = {}
    longer = list(widths)
    for buffer in sorted({read.buffer for op in after for read in _of_selected(op)} & made):
        selected[buffer] = len(longer)
        longer.append(widths[buffer])
        whole = Slice(buffer, 0, widths[buffer])
        before.append(Op(Kind.SELECT, whole, output=replace(whole, buffer=selected[buffer])))
    kept = {buffer: selected.get(buffer, buffer) for buffer in range(len(longer))}
    # Attention among these shares a cache that has been filled for all positions, so its key and value stay.
    renamed = [_rename(op, kept) for op in after]
    return before + [
        replace(new, key=op.key, value=op.value) if op.kind is Kind.ATTENTION else new
        for op, new in zip(after, renamed, strict=True)
    ], longer


def _of_selected(op: Op) -> tuple[Slice, ...]:
    return (op.input,) if op.kind is Kind.ATTENTION else op.reads


def share_buffers(ops: Sequence[Op], widths: Sequence[int]) -> tuple[tuple[Op, ...], tuple[int, ...]]:
    """Gives buffers whose lifetimes do not overlap the same memory."""
    last_use = {slice.buffer: index for index, op in enumerate(ops) for slice in (*op.reads, op.output)}
    physical: dict[int, int] = {}
    sizes: list[int] = []
    free: list[int] = []
    renamed: list[Op] = []
    for index, op in enumerate(ops):
        buffer = op.output.buffer
        if buffer >= 0 and buffer not in physical:
            width = widths[buffer]
            fitting = [number for number in free if sizes[number] == width]
            if fitting:
                physical[buffer] = fitting[0]
                free.remove(fitting[0])
            else:
                physical[buffer] = len(sizes)
                sizes.append(width)
        renamed.append(_rename(op, physical))
        free += [
            physical[number]
            for number in {s.buffer for s in (*op.reads, op.output)}
            if last_use.get(number) == index and number >= 0
        ]
    return tuple(renamed), tuple(sizes)


def _rename(op: Op, physical: dict[int, int]) -> Op:
    def new(slice: Slice) -> Slice:
        return slice if slice.buffer < 0 else Slice(physical[slice.buffer], slice.offset, slice.width)

    return replace(
        op, input=new(op.input), key=new(op.key), value=new(op.value), residual=new(op.residual), output=new(op.output)
    )
