"""Intel's extension for PyTorch, where it stands beside the torch that it was made for.

It is archived upstream and tied to one release of torch, so it belongs into an environment of its own. Imported beside
another torch it ends the process: hence versions are compared first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

from outrider.workers.messages import ModelSpec

# Where a model that went through the extension keeps the extension's version.
_MARK = "_outrider_ipex"
PACKAGE, MODULE = "intel-extension-for-pytorch", "intel_extension_for_pytorch"
# ipex.optimize knows these on every CPU that it runs on.
PRECISIONS = ("fp32", "bf16")


def version() -> str | None:
    """Which one is installed."""
    if importlib.util.find_spec(MODULE) is None:
        return None
    return importlib.metadata.version(PACKAGE)


def mismatch() -> str | None:
    """Why the one that is installed cannot be used; None where it can be, or where there is none."""
    ours, torch = version(), importlib.metadata.version("torch")
    if ours is None or _release(ours) == _release(torch):
        return None
    return f"intel-extension-for-pytorch {ours} is made for torch {'.'.join(_release(ours))}, and torch is {torch}"


def used_for(spec: ModelSpec) -> str | None:
    """The version that the model is to go through; None where it is left out."""
    wanted = spec.engine == "hf" and spec.ipex and spec.device == "cpu" and spec.precision in PRECISIONS
    return version() if wanted and mismatch() is None else None


def optimize(model: Any, dtype: Any) -> Any:
    """The model with its weights packed and its modules replaced as the extension does it."""
    optimized = importlib.import_module(MODULE).optimize(model, dtype=dtype, inplace=True)
    setattr(optimized, _MARK, version())
    return optimized


def went_through(model: Any) -> str | None:
    """The version that this model did go through; None where it was left out, or did not run with it."""
    found: str | None = getattr(model, _MARK, None)
    return found


def _release(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]
