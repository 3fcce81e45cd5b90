"""A page of a list, as the API shows it."""

from __future__ import annotations

from typing import Any


def page_of(shown: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list; ``shown`` has one entry beyond ``limit`` if there are more."""
    data = shown[:limit]
    ids = [each["id"] for each in data] or [None]
    return {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": len(shown) > limit}
