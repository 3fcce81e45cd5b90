"""The systems that people benchmark, with the configurations that the hub publishes (``configs/``, one file each)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.workers.models.hub_names import hub_id

CONFIGS = Path(__file__).resolve().parent / "configs"
# Below this a model serves as a draft, and is inflated from the pocket draft rather than the pocket target.
DRAFT_PARAMETERS = 600e6


@dataclass(frozen=True, slots=True)
class System:
    name: str
    config: dict[str, Any]

    @property
    def family(self) -> str:
        return str(self.config["model_type"])

    @property
    def inflatable(self) -> bool:
        return self.family in ("llama", "qwen2")

    @property
    def folder(self) -> str:
        """As the hub's client calls it in its cache."""
        return f"models--{self.name.replace('/', '--')}"


def catalogue() -> dict[str, System]:
    systems = {}
    for file in sorted(CONFIGS.glob("*.json")):
        name = file.stem.replace("--", "/", 1)
        systems[name] = System(name, json.loads(file.read_text(encoding="utf-8")))
    return systems


def find_system(name: str) -> System:
    systems = catalogue()
    full = name if name in systems else hub_id(name)
    if full not in systems:
        raise SystemExit(f'shapes: "{name}" is not in the catalogue; it has {", ".join(systems)}')
    return systems[full]
