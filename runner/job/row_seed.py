"""The seed of a row that names none."""

from __future__ import annotations

import hashlib


def derived_seed(job_seed: int, custom_id: str) -> int:
    """Derived from the row's id, so that it does not depend on the row's position in the file."""
    digest = hashlib.blake2b(f"{job_seed}:{custom_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
