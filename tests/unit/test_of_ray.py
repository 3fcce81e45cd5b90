"""The fast tests that are run again on the oldest Ray are those that it could change."""

from __future__ import annotations

from pathlib import Path

import pytest
from imports import reached
from of_ray import modules_that_import_ray, of_ray

UNIT = Path(__file__).parent


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("test_ray_compat", True),
        ("test_shared_memory_transport", True),
        ("test_lifecycle", True),  # through a helper: its driver's actors are Ray's
        ("test_driver", True),
        ("test_placement", False),
        ("test_journal", False),
    ],
)
def test_what_imports_ray_is_tried_on_the_oldest(name: str, chosen: bool) -> None:
    assert of_ray(UNIT / f"{name}.py") is chosen


def test_each_file_of_ours_that_imports_ray_is_reached() -> None:
    """From a chosen test, over whatever it imports: a new one that is not would never meet the oldest Ray here."""
    chosen = [path for folder in (UNIT, UNIT.parent / "support") for path in folder.glob("*.py") if of_ray(path)]
    assert modules_that_import_ray() <= frozenset().union(*map(reached, chosen))
