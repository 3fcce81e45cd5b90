"""The fastest layout for a pair of models on this machine, remembered from one job to the next."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.workers.models.packed_cache import cache_directory, make_directory

logger = logging.getLogger(__name__)
# Afterwards it is measured again: machines get other neighbours, and other kernels.
LONGEST_SECONDS = 7 * 86400.0


# Beyond these ratios of pass times another layout may be the fastest now, or the machine was disturbed then.
SAME_PACE = (0.8, 1.25)


@dataclass(frozen=True, slots=True)
class RememberedLayout:
    """``took`` is the layout that was the fastest, ``rates`` are tokens a second of all that were tried. Then a plain pass
    of a full batch took ``pass_seconds`` on the first layout's cores.
    """

    took: str
    rates: dict[str, float]
    pass_seconds: float = 0.0

    def holds_at(self, pass_seconds: float) -> bool:
        """Whether the machine is about as fast as then; ``pass_seconds``: of such a pass now."""
        low, high = SAME_PACE
        return low * self.pass_seconds <= pass_seconds <= high * self.pass_seconds


def processor() -> str:
    """The model name of the processor, as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _file(key: str) -> Path:
    return cache_directory() / "layouts" / f"{hashlib.sha256(f'{processor()}|{key}'.encode()).hexdigest()[:32]}.json"


def recall(key: str, names: list[str]) -> RememberedLayout | None:
    """None where no record is recent, readable and of these layouts."""
    file = _file(key)
    try:
        if time.time() - file.stat().st_mtime > LONGEST_SECONDS:
            return None
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        rates = {str(name): float(rate) for name, rate in content["rates"].items()}
        known = RememberedLayout(str(content["took"]), rates, float(content["pass_seconds"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s cannot be used, measuring again: %s", file, error)
        return None
    return known if sorted(content.get("names", [])) == sorted(names) and known.took in names else None


def remember(key: str, names: list[str], found: RememberedLayout) -> None:
    """Best effort: a cache that cannot be written costs the next job a few seconds."""
    file = _file(key)
    content = {"key": key, "names": names, **asdict(found)}
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        make_directory(file.parent)
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        logger.warning("%s cannot be written: %s", file, error)
