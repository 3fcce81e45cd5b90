"""Whether fp16 represents the dequantised weights of a quantised matrix."""

from dataclasses import dataclass

import numpy as np
import pytest

from outrider.kernels.quantised import QuantisedRows, Scheme, Values
from outrider.workers.models.formats.exact_storage import fits_halves

GROUP = 32


@dataclass
class OneRow:
    """Codes 0 to 15, twice, with one scale."""

    scheme: Scheme
    scale: float
    read: bool = False
    shape: tuple[int, int] = (1, GROUP)
    parts: tuple[str, ...] = ()
    order: None = None

    def rows(self, start: int, stop: int) -> QuantisedRows:
        assert (start, stop) == (0, 1)
        self.read = True
        codes = np.arange(GROUP, dtype=np.uint8)[None] % 16
        zeros = np.full((1, 1), 8 if self.scheme.values is Values.INTEGER else 0, np.uint8)
        return QuantisedRows(self.scheme, codes, np.full((1, 1), self.scale, np.float32), zeros)

    def done(self) -> None:
        pass


# The most that bf16 has bits for, and the least and greatest scales whose products with -8..7 are numbers in fp16.
LONGEST = 255 / 128


@pytest.mark.parametrize(
    ("scale", "fits"), [(LONGEST * 2**-17, True), (LONGEST * 2**-18, False), (8128, True), (8192, False), (0, True)]
)
def test_products_have_to_lie_in_its_range(scale: float, fits: bool) -> None:
    assert fits_halves(OneRow(Scheme("test", 4, GROUP, scale_type="BF16"), scale)) is fits


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("test", 4, GROUP, scale_type="F16"),
        Scheme("test", 4, GROUP, scale_type="F32"),
        Scheme("test", 4, GROUP, scale_type="BF16", symmetric=False),
        Scheme("test", 5, GROUP, scale_type="BF16"),
        Scheme("test", 4, GROUP, scale_type="E8M0", minima=True),
        Scheme("test", 8, GROUP, Values.E4M3, scale_type="BF16"),
    ],
)
def test_weights_are_not_read_where_products_have_more_bits(scheme: Scheme) -> None:
    matrix = OneRow(scheme, 1)
    assert not fits_halves(matrix) and not matrix.read


def test_floats_of_four_bits_with_a_power_of_two() -> None:
    found = [
        fits_halves(OneRow(Scheme("test", 4, GROUP, Values.E2M1, scale_type="E8M0"), 2.0**e)) for e in (-24, -23, 13, 14)
    ]
    assert found == [False, True, True, False]
