"""The engines that run a model; what an engine is stands in ``outrider.workers.engines.engine``."""
