"""Where a row's seed comes from when the row names none."""

from __future__ import annotations

import hashlib


def derived_seed(job_seed: int, custom_id: str) -> int:
    """A row's own seed where it names none: the same wherever the row stands in the file."""
    digest = hashlib.blake2b(f"{job_seed}:{custom_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
