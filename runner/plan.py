"""What a replica is to be made of."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.workers.messages import ModelSpec, ServeSpec


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    target: ModelSpec
    draft: ModelSpec | None
    serve: ServeSpec
