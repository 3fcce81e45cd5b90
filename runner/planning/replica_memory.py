"""What memory a replica takes on its host: its weights, the work on them, its rows' keys and values, and the processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.runner.planning.placement_request import ModelSizes
from outrider.workers.models.model_memory import ModelMemory

# What a process takes beside its model, as measured: a worker of Ray's with our modules, on the hf engine with torch.
PROCESS_BYTES = {"native": 100_000_000, "hf": 400_000_000}


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process with its model. ``known``: by the model's own program, else about what its weights take."""

    model: ModelMemory
    engine: str
    known: bool

    @property
    def room(self) -> int:
        return PROCESS_BYTES[self.engine] + self.model.working


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    target: ProcessMemory
    draft: ProcessMemory | None

    def sizes(self, rows: int, tokens: int = 0, draft_tokens: int = 0) -> ModelSizes:
        """With so many rows at once, which have so many tokens together in the target's cache and in the draft's."""
        target = self.target
        sizes = ModelSizes(target.model.weights, target_kv=target.model.of_rows(rows, tokens), target_room=target.room)
        if self.draft is None:
            return sizes
        draft = self.draft.model
        return replace(sizes, draft=draft.weights, draft_kv=draft.of_rows(rows, draft_tokens), draft_room=self.draft.room)
