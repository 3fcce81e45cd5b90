"""``outrider score`` and ``outrider quantize``: how good a model is, and a smaller one of it."""
