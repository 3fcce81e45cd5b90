"""What a replica takes on its host: weights, the work on them, keys and values of rows, kept answers, and processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.kernels.suffixes import bytes_of_answers
from outrider.runner.planning.placement_request import ModelSizes
from outrider.workers.models.model_memory import ModelMemory

# What a process takes beside its model, as measured: a worker of Ray's with our modules, on the hf engine with torch.
PROCESS_BYTES = {"native": 100_000_000, "hf": 400_000_000}
# What a tokenizer takes for each of its tokens while it is loaded, as measured with 128,000 tokens and 280,000 merges.
TOKENIZER_BYTES = 2_400


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process with its model. ``known``: by the model's own program, else about what its weights take.

    ``tokens`` are those of its tokenizer; 0 where it has none.
    """

    model: ModelMemory
    engine: str
    known: bool
    tokens: int = 0

    @property
    def room(self) -> int:
        return PROCESS_BYTES[self.engine] + self.model.working + TOKENIZER_BYTES * self.tokens


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """``answer_tokens`` are kept of what all rows wrote, for candidates to be found in."""

    target: ProcessMemory
    draft: ProcessMemory | None
    answer_tokens: int = 0

    @property
    def native(self) -> bool:
        """Whether the target is on the native engine, whose rows share prompts and whose caches may take 8 bits."""
        return self.target.engine == "native"

    def sizes(self, rows: int, tokens: int = 0, draft_tokens: int = 0, written: int | None = None) -> ModelSizes:
        """With so many rows at once, which have so many tokens together in the target's cache and in the draft's.

        ``written`` are the tokens of all answers in the end; None where nobody knows.
        """
        target = self.target
        answers = bytes_of_answers(self.answer_tokens, self.answer_tokens if written is None else written)
        cache = target.model.of_rows(rows, tokens)
        sizes = ModelSizes(target.model.weights, target_kv=cache, target_room=target.room, answers=answers)
        sizes = replace(sizes, int8_cache=self.native, target_pairs=target.model.pairs)
        if self.draft is None:
            return sizes
        draft = self.draft.model
        return replace(
            sizes,
            draft=draft.weights,
            draft_kv=draft.of_rows(rows, draft_tokens),
            draft_room=self.draft.room,
            draft_pairs=draft.pairs,
        )
