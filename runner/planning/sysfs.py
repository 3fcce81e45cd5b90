"""Reads the small text files of sysfs, of any kernel version and of saved trees.

A file that is missing, truncated or malformed reads as None. Nothing here raises: one odd file must not make a machine
unusable.
"""

from __future__ import annotations

import re
from pathlib import Path

from outrider.workers.machine.core_lists import format_list as format_list

# Linux has at most 8192 CPUs and 1024 nodes; a larger id is a damaged file, and expanding its range would hang us.
LARGEST_ID = 1 << 16
MASK_GROUP_BITS = 32


def read_text(path: Path) -> str | None:
    """A file's text, without the NUL bytes that saved trees and some firmware leave at its end."""
    try:
        return path.read_bytes().replace(b"\0", b"").decode("ascii", "replace").strip()
    except (OSError, ValueError):
        return None


def read_int(path: Path) -> int | None:
    text = read_text(path)
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None


def parse_list(text: str | None) -> frozenset[int] | None:
    """``0-3,8,10-11`` as a set. An empty list is an empty set, a malformed one is None."""
    if text is None:
        return None
    members: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None:
            return None
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first or last >= LARGEST_ID:
            return None
        members.update(range(first, last + 1))
    return frozenset(members)


def parse_mask(text: str | None) -> frozenset[int] | None:
    """``00000000,ff00ff00`` as a set: groups of 32 bits, the highest first."""
    if not text:
        return None
    groups = text.removeprefix("0x").split(",")
    if not all(re.fullmatch(r"[0-9a-fA-F]+", group) for group in groups) or len(text) > LARGEST_ID // 4:
        return None
    # Leading groups may be shortened; the others are always whole, so they tell how wide a group is.
    bits = max([MASK_GROUP_BITS, *(4 * len(group) for group in groups[1:])])
    value = 0
    for group in groups:
        value = value << bits | int(group, 16)
    return frozenset(bit for bit in range(value.bit_length()) if value >> bit & 1)


def read_set(folder: Path, *names: str) -> frozenset[int] | None:
    """The first of these files that can be parsed; names ending in ``list`` are lists, others are masks."""
    for name in names:
        text = read_text(folder / name)
        members = parse_list(text) if name.endswith("list") else parse_mask(text)
        if members is not None:
            return members
    return None


def numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """The entries ``<prefix><number>`` of a folder, by number."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return {}
    found = {}
    for entry in entries:
        number = entry.name.removeprefix(prefix)
        if entry.name.startswith(prefix) and number.isdecimal() and number.isascii() and int(number) < LARGEST_ID:
            found[int(number)] = entry
    return dict(sorted(found.items()))
