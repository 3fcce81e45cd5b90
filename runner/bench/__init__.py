"""``outrider bench``: the classic tables."""
