from __future__ import annotations

from outrider.runner.counted import counted


def test_one_is_no_plural() -> None:
    assert [counted(number, "row") for number in (0, 1, 2, 2000)] == ["0 rows", "1 row", "2 rows", "2,000 rows"]
    assert (counted(1, "try", "tries"), counted(2, "try", "tries")) == ("1 try", "2 tries")
