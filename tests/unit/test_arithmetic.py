"""The arithmetic that decides a sampled token."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels import arithmetic

# Two units in the last place of a double.
NEAR = 4.5e-16

positive = st.floats(min_value=sys.float_info.min, max_value=sys.float_info.max, allow_nan=False)
negative = st.floats(min_value=arithmetic.EXP_FLOOR, max_value=0.0)


def log(x: float) -> float:
    return float(arithmetic.log(np.array([x]))[0])


def exp(x: float) -> float:
    return float(arithmetic.exp(np.array([x]))[0])


@given(positive)
def test_log_against_libm(x: float) -> None:
    assert math.isclose(log(x), math.log(x), rel_tol=1e-15, abs_tol=0.0)


@given(negative)
def test_exp_against_libm(x: float) -> None:
    assert math.isclose(exp(x), math.exp(x), rel_tol=1e-15)


def test_log_and_exp_over_a_dense_grid() -> None:
    x = np.concatenate([np.linspace(1e-12, 4.0, 20_001), 1.0 + np.linspace(-1e-6, 1e-6, 2001)])
    assert np.allclose(arithmetic.log(x), [math.log(value) for value in x], rtol=1e-15, atol=0)
    y = -np.linspace(0, 700, 20_001)
    assert np.allclose(arithmetic.exp(y), [math.exp(value) for value in y], rtol=1e-15, atol=0)


@pytest.mark.parametrize("x", [1.0, 2.0, 0.5, math.sqrt(2), math.nextafter(math.sqrt(2), 2), sys.float_info.min])
def test_log_at_its_seams(x: float) -> None:
    assert math.isclose(log(x), math.log(x), rel_tol=1e-15, abs_tol=1e-300)


def test_exp_at_its_edges() -> None:
    assert exp(0.0) == 1.0
    assert exp(-math.inf) == 0.0
    assert exp(math.nextafter(arithmetic.EXP_FLOOR, -math.inf)) == 0.0
    assert exp(arithmetic.EXP_FLOOR) > 0.0


@given(positive)
def test_log_never_falls_between_neighbours(x: float) -> None:
    later = min(x * (1 + 1e-15) + 5e-324, sys.float_info.max)
    assert log(x) <= log(later) + abs(log(x)) * NEAR


@given(negative, negative)
def test_exp_is_monotone(x: float, y: float) -> None:
    low, high = min(x, y), max(x, y)
    assert exp(low) <= exp(high) * (1 + NEAR)


# From Random123's kat_vectors: philox4x32, 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    first = np.array([counter[0]], dtype=np.uint32)
    found = arithmetic.philox(key[0] | key[1] << 32, (first, *counter[1:]))  # type: ignore[arg-type]
    assert [f"{word:08x}" for word in found[0]] == words.split()


def test_gumbel_has_the_right_moments() -> None:
    noise = np.concatenate([arithmetic.gumbel(7, 0, position, 5000) for position in range(40)])
    # Standard errors of mean and variance over 200,000 draws are 0.0029 and 0.0076.
    assert noise.mean() == pytest.approx(0.5772156649, abs=0.012)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert np.isfinite(noise).all()


def test_gumbel_does_not_depend_on_how_much_is_asked() -> None:
    assert np.array_equal(arithmetic.gumbel(3, 1, 4, 1003)[:17], arithmetic.gumbel(3, 1, 4, 17))


def test_gumbel_depends_on_every_part_of_its_key() -> None:
    base = arithmetic.gumbel(3, 1, 4, 64)
    others = [
        arithmetic.gumbel(4, 1, 4, 64),
        arithmetic.gumbel(3 + (1 << 32), 1, 4, 64),
        arithmetic.gumbel(3, 2, 4, 64),
        arithmetic.gumbel(3, 1, 5, 64),
    ]
    for other in others:
        assert not np.isin(base, other).any()


@given(st.lists(st.floats(-1e12, 1e12), max_size=200))
def test_lane_sum_keeps_its_order(values: list[float]) -> None:
    lanes = [0.0] * 16
    for index, value in enumerate(values):
        lanes[index % 16] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[index] + lanes[index + half] for index in range(half)]
    assert arithmetic.lane_sum(np.array(values)) == lanes[0]


PROGRAM = """
import hashlib, sys
import numpy as np
from outrider.kernels import arithmetic
from outrider.workers.messages import Sampling
from outrider.workers.engines.sampling import choose, process
random = np.random.default_rng(5)
logits = random.standard_normal((20, 4096), dtype=np.float32) * 4
total = hashlib.sha256()
total.update(arithmetic.log(random.random(4096) + 1e-9).tobytes())
total.update(arithmetic.exp(-random.random(4096) * 50).tobytes())
sampling = Sampling(temperature=0.8, top_p=0.95, top_k=900, min_p=0.001, seed=3)
for position, row in enumerate(logits):
    total.update(arithmetic.gumbel(1, 2, position, 4096).tobytes())
    total.update(process(row, sampling).tobytes())
    total.update(repr(choose(row, sampling, position)).encode())
sys.stdout.write(total.hexdigest())
"""
FEATURES = ("AVX512_SKX", "AVX512F", "AVX2", "FMA3", "X86_V4", "X86_V3")


def test_bits_do_not_depend_on_numpys_instruction_set() -> None:
    """NumPy's own log and exp would fail this; ours are additions and multiplications."""

    def digest(**extra: str) -> str:
        environment = {**os.environ, **extra}
        # NumPy warns of features that it was not built to dispatch on.
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    with_all = digest()
    without = digest(NPY_DISABLE_CPU_FEATURES=" ".join(FEATURES))
    assert len(with_all) == hashlib.sha256().digest_size * 2
    assert with_all == without
