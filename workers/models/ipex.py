"""Intel's extension for PyTorch, if it is installed with the release of torch that it was made for.

It is archived upstream and tied to one release of torch, so it needs an environment of its own. With another torch its
import ends the process, so the versions are compared first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

from outrider.workers.messages import ModelSpec

# The attribute of an optimized model that holds the extension's version.
_MARK = "_outrider_ipex"
PACKAGE, MODULE = "intel-extension-for-pytorch", "intel_extension_for_pytorch"
# ipex.optimize knows these on every CPU that it runs on.
PRECISIONS = ("fp32", "bf16")


def version() -> str | None:
    """The installed version; None where it is not installed."""
    if importlib.util.find_spec(MODULE) is None:
        return None
    return importlib.metadata.version(PACKAGE)


def mismatch() -> str | None:
    """Why the installed version cannot be used; None where it can be, or none is installed."""
    ours, torch = version(), importlib.metadata.version("torch")
    if ours is None or _release(ours) == _release(torch):
        return None
    return f"intel-extension-for-pytorch {ours} is made for torch {'.'.join(_release(ours))}, and torch is {torch}"


def used_for(spec: ModelSpec) -> str | None:
    """The version that this model is to be optimized with; None where the extension is not used."""
    wanted = spec.engine == "hf" and spec.ipex and spec.device == "cpu" and spec.precision in PRECISIONS
    return version() if wanted and mismatch() is None else None


def optimize(model: Any, dtype: Any) -> Any:
    """The model with its weights packed and its modules replaced as the extension does it."""
    optimized = importlib.import_module(MODULE).optimize(model, dtype=dtype, inplace=True)
    setattr(optimized, _MARK, version())
    return optimized


def went_through(model: Any) -> str | None:
    """The version that this model was optimized with; None where it was not."""
    found: str | None = getattr(model, _MARK, None)
    return found


def _release(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]
