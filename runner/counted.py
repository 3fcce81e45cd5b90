"""Numbers of things in sentences."""

from __future__ import annotations


def counted(number: int, thing: str, things: str = "") -> str:
    """As in "1 row", "2,000 rows"; ``things`` where the plural is more than an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"
