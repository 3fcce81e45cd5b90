"""argparse types for numeric options of the training tools: other values are refused with a sentence before any file is
read."""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if value < least:
            raise ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return whole


def finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentTypeError(f"must be a number, got {text!r}")
    return value


def positive(text: str) -> float:
    value = finite(text)
    if value <= 0:
        raise ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def not_negative(text: str) -> float:
    value = finite(text)
    if value < 0:
        raise ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def share(text: str) -> float:
    value = finite(text)
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"must lie between 0 and 1, got {text}")
    return value


def make_folder(parser: ArgumentParser, option: str, folder: Path) -> None:
    """Makes the folder at the start, so that an unusable path is found before hours of training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{option}: {folder} cannot be made: {error.strerror}")
