"""A model that scores some tokens of its vocabulary: those of its texts. For drafts, whose choices are guesses."""

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import kernel_models
import numpy as np
import pytest
from coded_models import model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_models import LLAMA, Packed, Shape, all_logits, assert_same_bits, pack_program, packed, random_matrices, tokens
from quantised_rows import SCHEMES

from outrider.kernels import library
from outrider.kernels.builder import Builder
from outrider.kernels.library import KernelError
from outrider.kernels.native import NativeDecodeFeed, NativeFeed, NativeStopRule
from outrider.kernels.program import Format, Slice, Tensor

NEVER = np.float32(-1e30)
SMALL = replace(LLAMA, width=64, heads=2, kv_heads=2, inner=64, layers=1, vocabulary=90)


class Met:
    """The tokens on a list of this length, by when they were met."""

    def __init__(self, count: int) -> None:
        self.tokens = OrderedDict.fromkeys(reversed(range(count)))

    def meet(self, text: Iterable[int]) -> None:
        for token in text:
            if token not in self.tokens:
                self.tokens.popitem(last=False)
            self.tokens[token] = None
            self.tokens.move_to_end(token)


def scored(logits: np.ndarray) -> set[int]:
    return set(np.flatnonzero(logits != NEVER).tolist())


def assert_shortened(model: Packed, shape: Shape, count: int, threads: int = 1) -> None:
    """Passes score what was met last, with the bits of a model that scores all."""
    text, met = tokens(shape, 3 * count), Met(count)
    with model.model() as every, model.model(threads=threads) as short:
        short.shorten(count)
        wanted = all_logits(every, every.open(), text)
        row, start = short.open(), 0
        for size in (1, 3, 9, 5, 2, 1, len(text)):
            piece = text[start : start + size]
            met.meet(piece)
            [answer] = short.forward([NativeFeed(row, piece, choose=len(piece), logits=len(piece))])
            for at, (logits, choice) in enumerate(zip(answer.logits, answer.tokens, strict=True), start):
                assert scored(logits) == set(met.tokens)
                known = sorted(met.tokens)
                assert_same_bits(logits[known], wanted[at][known])
                assert choice == logits.argmax()
            start += size


@pytest.mark.one_in(3)
@pytest.mark.parametrize("format", Format)
def test_scores_of_known_tokens_are_those_of_the_whole_vocabulary(format):
    assert_shortened(packed(LLAMA, format), LLAMA, 70)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SCHEMES)
def test_rows_of_codes_move_with_their_scales(name):
    shape, model = model_of(SCHEMES[name], Format.W4A8, ordered=len(name) % 2 == 1)
    assert_shortened(model, shape, 37)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("isa", library.available_instruction_sets())
@pytest.mark.parametrize("name", ["rounded on load", "words"])
def test_on_every_instruction_set_and_several_threads(name, isa, monkeypatch):
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    shape, model = model_of(SCHEMES[name], Format.W4A8) if name in SCHEMES else (LLAMA, packed(LLAMA, Format.W4A8))
    assert_shortened(model, shape, 66, threads=2)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_token_that_was_met_longest_ago_makes_room(data):
    count = data.draw(st.integers(1, SMALL.vocabulary - 1))
    token = st.integers(0, SMALL.vocabulary - 1)
    pieces = data.draw(st.lists(st.lists(token, min_size=1, max_size=40), min_size=1, max_size=8))
    met = Met(count)
    with _small().model() as engine:
        engine.shorten(count)
        row = engine.open()
        for piece in pieces:
            met.meet(piece)
            [answer] = engine.forward([NativeFeed(row, piece, choose=1, logits=1)])
            assert scored(answer.logits[0]) == set(met.tokens)


@cache
def _small() -> Packed:
    return packed(SMALL, Format.W4A8)


def test_skipped_tokens_are_met_too():
    text = tokens(SMALL, 50)
    met = Met(30)
    met.meet(text)
    with _small().model() as engine:
        engine.shorten(30)
        row = engine.open()
        engine.skip(row, text[:40])
        [answer] = engine.forward([NativeFeed(row, text[40:], choose=1, logits=1)])
        assert scored(answer.logits[0]) == set(met.tokens)


def with_head(head: Callable[[Builder, Slice], Slice]) -> Packed:
    """A model of one layer that ends like this."""
    width = 64
    builder = Builder(SMALL.vocabulary, SMALL.context, Format.BF16, SMALL.group)
    x = builder.embed(Tensor("embed", (SMALL.vocabulary, width)))
    parts = builder.linear(x, [Tensor(name, (width, width)) for name in "qkv"]).split(width, width, width)
    x = builder.attention(*parts, heads=2, kv_heads=2)
    program = builder.finish(head(builder, x))
    return Packed(program, pack_program(program, random_matrices(program)))


def test_a_bias_moves_with_its_row():
    def head(builder: Builder, x: Slice) -> Slice:
        biases = [Tensor("head.bias", (SMALL.vocabulary,))]
        return builder.linear(x, [Tensor("head", (SMALL.vocabulary, 64))], biases=biases)

    assert_shortened(with_head(head), SMALL, 40)


def test_what_is_chosen_step_by_step_and_learned():
    """Steps and corrections work on a list; a token that comes in is guessed like any other."""
    text = tokens(LLAMA, 30)
    with packed(LLAMA, Format.W4A8).model() as engine:
        engine.shorten(64)
        engine.correct(8)
        row, known = engine.open(), Met(64)
        known.meet(text)
        [(chosen, _, _)], _ = engine.decode([NativeDecodeFeed(row, text, 12)], NativeStopRule(), guess_room=4)
        assert len(chosen) == 12 and set(chosen) <= set(known.tokens)
        outside = next(token for token in range(LLAMA.vocabulary) if token not in known.tokens)
        engine.truncate(row, len(text))
        # Its vector moves, whether it has a score or not.
        for _ in range(40):
            engine.truncate(row, len(text) - 1)
            engine.forward([NativeFeed(row, text[-1:], choose=1)], runners_up=True)
            engine.learn(row, len(text), [outside])
        engine.truncate(row, len(text) - 1)
        assert engine.forward([NativeFeed(row, text[-1:], choose=1)])[0].tokens != [outside]
        engine.forward([NativeFeed(row, [outside], choose=0)])
        engine.truncate(row, len(text) - 1)
        assert engine.forward([NativeFeed(row, text[-1:], choose=1)])[0].tokens == [outside]


@pytest.mark.parametrize("count", [-1, SMALL.vocabulary, SMALL.vocabulary + 1])
def test_a_list_has_fewer_tokens_than_the_vocabulary(count: int):
    with _small().model() as engine, pytest.raises(KernelError, match=f"a shortlist of {count} tokens of 90"):
        engine.shorten(count)


def test_a_list_begins_anew_and_ends():
    """Called again, and for all tokens once more."""
    text = tokens(SMALL, 60)
    with _small().model() as engine:
        every = all_logits(engine, engine.open(), text)
        for count in (40, 20, 0, 33):
            engine.shorten(count)
            met = Met(count or SMALL.vocabulary)
            met.meet(text)
            [answer] = engine.forward([NativeFeed(engine.open(), text, choose=1, logits=1)])
            assert scored(answer.logits[0]) == set(met.tokens)
            assert_same_bits(answer.logits[0][sorted(met.tokens)], every[-1][sorted(met.tokens)])


def test_a_head_whose_vocabulary_is_shortened_already_is_refused():
    tokens_of_head = range(0, SMALL.vocabulary, 3)

    def head(builder: Builder, x: Slice) -> Slice:
        return builder.scatter(builder.linear(x, [Tensor("head", (len(tokens_of_head), 64))]), list(tokens_of_head))

    with with_head(head).model() as engine:
        with pytest.raises(KernelError, match="a shortlist needs a matrix that makes the scores of all tokens"):
            engine.shorten(20)
        [answer] = engine.forward([NativeFeed(engine.open(), [1], choose=1, logits=1)])
        assert scored(answer.logits[0]) == set(tokens_of_head)


NO_MEMORY_FOR_A_SHORTLIST = r"""
import re, resource
from pathlib import Path
from kernel_models import Packed, Shape, all_logits, build, pack_program, random_matrices, stored, tokens
from outrider.kernels.library import KernelError
from outrider.kernels.program import Codes, Format, Scales, Storage
shape = Shape(width=640, heads=8, kv_heads=4, inner=64, layers=1, vocabulary=20_000)
program = stored(build(shape, Format.W4A8), group=128, storage=Storage(Codes.INT4, Scales.WORDS, zeros=True))
model = Packed(program, pack_program(program, random_matrices(program))).model()
text = tokens(shape, 30)
every = all_logits(model, model.open(), text)
unlimited = resource.getrlimit(resource.RLIMIT_AS)
said = set()
for room in range(0, 128):
    held = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (held + (room << 18), unlimited[1]))
    try:
        model.shorten(15_000)
    except KernelError as error:
        said.add(str(error))
    else:
        break
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
    assert (all_logits(model, model.open(), text) == every).all(), "the list that could not be made is used"
shortened = all_logits(model, model.open(), text)
print(*sorted(said), (shortened != every).any(), (shortened[-1][text] == every[-1][text]).all(), sep="\n")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's allocator ends the process itself"
)
def test_a_list_for_which_there_is_no_memory_leaves_all_tokens() -> None:
    """A list whose constants of pairs had no memory was used with none, which ended the process."""
    if "avx512pairs" not in library.available_instruction_sets():
        pytest.skip("no AVX-512 with bf16 here")
    paths = {"PYTHONPATH": str(Path(kernel_models.__file__).parent), "OUTRIDER_ISA": "avx512pairs"}
    call = [sys.executable, "-c", NO_MEMORY_FOR_A_SHORTLIST]
    found = subprocess.run(call, capture_output=True, text=True, check=False, env={**os.environ, **paths})
    assert found.returncode == 0, found
    *said, fewer, same = found.stdout.splitlines()
    assert (fewer, same) == ("True", "True")
    assert any("no memory for a shortlist of 15000 tokens" in each for each in said), said
    assert any("no memory for what products in pairs need of a matrix of 15000 rows" in each for each in said), said
