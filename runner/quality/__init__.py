"""``outrider score``, ``outrider quantize`` and ``outrider merge``."""
