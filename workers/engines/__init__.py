"""The engines that run a model; what an engine is stands in ``outrider.workers.engines.engine``."""

import os

# Where the package for it is installed, transformers would fetch kernels of some families from the model hub, which are
# code. It reads this once, as it is imported.
os.environ.setdefault("USE_HUB_KERNELS", "NO")
