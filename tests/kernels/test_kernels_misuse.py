"""An engine that is closed, called by two threads at once, or left in a fork: refused, without a crash or a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import kernel_models
import numpy as np
import pytest
from kernel_models import LLAMA, Packed, Shape, pack_program, packed, random_matrices, tokens

from outrider.kernels.builder import Builder
from outrider.kernels.library import KernelError
from outrider.kernels.native import NativeDecodeFeed, NativeFeed, NativeMasks, NativeModel, NativeOutput, NativeStopRule
from outrider.kernels.program import Format, Kind, Tensor

SMALL = Shape(width=96, heads=4, kv_heads=2, inner=104, layers=1, vocabulary=101, group=32)
FEED = NativeFeed(0, [1, 2, 3])
# Longer than any pass here takes; a test that waits for so long fails.
LONG_ENOUGH = 60.0


@pytest.fixture(scope="module")
def model() -> Packed:
    return packed(SMALL, Format.W4A8)


CALLS: dict[str, Callable[[NativeModel], object]] = {
    "forward": lambda engine: engine.forward([FEED]),
    "decode": lambda engine: engine.decode([NativeDecodeFeed(0, [1], 2)], NativeStopRule()),
    "open": lambda engine: engine.open(),
    "fork": lambda engine: engine.fork(0, 0),
    "skip": lambda engine: engine.skip(0, [1]),
    "truncate": lambda engine: engine.truncate(0, 0),
    "close_row": lambda engine: engine.close_row(0),
    "length": lambda engine: engine.length(0),
    "cache_use": lambda engine: engine.cache_use(),
    "experts_read": lambda engine: engine.experts_read(),
    "rank": lambda engine: engine.rank(0, 1),
    "correct": lambda engine: engine.correct(8),
    "shorten": lambda engine: engine.shorten(8),
    "learn": lambda engine: engine.learn(0, 0, [1]),
    "reserve": lambda engine: engine.reserve(8, 1, 32),
    "use_cores": lambda engine: engine.use_cores([-1]),
}


def run_apart(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(kernel_models.__file__).parent), *sys.path])}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


CLOSED = """
import sys
sys.path.insert(0, "{here}")
from test_kernels_misuse import CALLS, SMALL, Format, KernelError, packed
engine = packed(SMALL, Format.W4A8).model()
engine.close()
engine.close()
for name, call in CALLS.items():
    try:
        call(engine)
    except KernelError as error:
        print(name, error.status, error)
"""


def test_a_closed_engine_refuses_every_call() -> None:
    done = run_apart(CLOSED.format(here=Path(__file__).parent))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{name} invalid the engine is closed" for name in CALLS]


class Waiting:
    """A pass in another thread that waits for its masks until ``finish``."""

    def __init__(self, engine: NativeModel) -> None:
        self.masks = NativeMasks(np.full((1, -(-SMALL.vocabulary // 32)), 0xFFFFFFFF, np.uint32), np.zeros(1, np.int32))
        self.answers: list[NativeOutput] = []
        begun = Event()

        def run() -> None:
            begun.set()
            # Refused while the other thread's own question is being answered.
            while not self.answers:
                try:
                    self.answers += engine.forward([NativeFeed(0, [1, 2, 3], first_mask=0)], self.masks)
                except KernelError as error:
                    if "another thread is calling" not in str(error):
                        raise

        self._thread = Thread(target=run)
        self._thread.start()
        begun.wait()

    def finish(self) -> list[int]:
        self.masks.ready[0] = 1
        self._thread.join()
        return self.answers[0].tokens


def test_a_second_thread_is_refused(model: Packed) -> None:
    with model.model(threads=2) as engine:
        engine.open()
        wanted = engine.forward([FEED])[0].tokens
        engine.truncate(0, 0)
        waiting, deadline, refusal = Waiting(engine), monotonic() + LONG_ENOUGH, ""
        while not refusal and monotonic() < deadline:
            try:
                engine.length(0)
            except KernelError as error:
                refusal = str(error)
        assert waiting.finish() == wanted
        assert refusal == "another thread is calling this engine: only one at a time may"
        assert engine.length(0) == 3


def test_closing_waits_for_the_thread_that_is_calling(model: Packed) -> None:
    engine = model.model(threads=2)
    engine.open()
    wanted = engine.forward([FEED])[0].tokens
    engine.truncate(0, 0)
    waiting, deadline = Waiting(engine), monotonic() + LONG_ENOUGH
    while monotonic() < deadline:
        try:
            engine.length(0)
        except KernelError:
            break
    closing = Thread(target=engine.close)
    closing.start()
    assert waiting.finish() == wanted
    closing.join()
    with pytest.raises(KernelError, match="the engine is closed"):
        engine.length(0)


def in_a_fork(work: Callable[[], bool]) -> bool:
    """Whether ``work`` ended well in a fork; False if it hung."""
    process = os.fork()
    if not process:
        # Not pytest's handler: Python would call it only after the call that hangs.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LONG_ENOUGH))
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitpid(process, 0)[1] == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_a_fork_gives_its_engine_new_threads(model: Packed, threads: int) -> None:
    """The child has the engine's memory, but of its threads only the one that forked."""
    text = tokens(SMALL, 40)
    with model.model(threads=threads) as engine:
        engine.open()
        engine.forward([NativeFeed(0, text)])

        def work() -> bool:
            if threads > 1:
                for call in (CALLS["forward"], CALLS["decode"], CALLS["reserve"]):
                    with pytest.raises(KernelError, match="forked from the one that has the engine's threads"):
                        call(engine)
                engine.use_cores([-1, -1])
            found = engine.forward([FEED])[0].tokens
            engine.close()
            return found == wanted

        wanted = engine.forward([FEED])[0].tokens
        engine.truncate(0, len(text))
        assert in_a_fork(work)
        assert engine.forward([FEED])[0].tokens == wanted


def test_a_fork_that_uses_no_engine_ends(model: Packed) -> None:
    engine = model.model(threads=3)
    assert in_a_fork(lambda: engine.close() is None)
    engine.close()


def test_slices_beyond_32_bits_are_refused() -> None:
    """Their end is beyond the buffer, and must not wrap round to before it."""
    made = packed(LLAMA, Format.BF16)
    ops = list(made.program.ops)
    at = next(index for index, op in enumerate(ops) if op.kind is Kind.NORM)
    ops[at] = replace(ops[at], input=replace(ops[at].input, offset=2**31 - 8))
    with pytest.raises(KernelError, match="do not exist"):
        replace(made, program=replace(made.program, ops=tuple(ops))).model()


def head() -> Packed:
    """A program that is given states of 48 columns."""
    builder, width = Builder(50, 64, Format.FP32, 32), 32
    x = builder.embed(Tensor("embed", (50, width)))
    state = builder.load_hidden(builder.linear(builder.hidden_in(48), [Tensor("states", (width, 48))]))
    h = builder.scale(x, 0.5, residual=state)
    q, k, v = builder.linear(h, [Tensor(name, (width, width)) for name in "qkv"]).split(width, width, width)
    x = builder.linear(builder.attention(q, k, v, heads=4, kv_heads=4), [Tensor("o", (width, width))], residual=h)
    builder.store_hidden(x)
    program = builder.finish(builder.linear(x, [Tensor("head", (50, width))]))
    return Packed(program, pack_program(program, random_matrices(program)))


def test_states_of_another_width_are_not_read_beyond_their_end() -> None:
    with head().model() as engine:
        row = engine.open()
        assert engine.forward([NativeFeed(row, [1, 2], given=np.zeros((2, 48), np.uint16))])[0].tokens
        with pytest.raises(ValueError, match=r"states of \(1, 32\) for a program that takes 48 columns"):
            engine.forward([NativeFeed(row, [1], given=np.zeros((1, 32), np.uint16))])
        assert engine.length(row) == 2
