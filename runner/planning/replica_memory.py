"""The memory of a replica: weights, working memory, keys and values of rows, kept answers, and its processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.kernels.suffixes import bytes_of_answers
from outrider.runner.planning.placement_request import ModelSizes
from outrider.workers.models.model_memory import ModelMemory

# Measured memory of a Ray worker process with our modules (hf: and torch), without the model.
PROCESS_BYTES = {"native": 100_000_000, "hf": 400_000_000}
# Measured memory of a loaded tokenizer per token (128,000 tokens, 280,000 merges).
TOKENIZER_BYTES = 2_400


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process with its model. ``known``: computed from the model's program, else estimated from its files.

    ``tokens``: the vocabulary of its tokenizer; 0 without one.
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
    """A replica's processes; ``answer_tokens``: the most tokens of answers that are kept for suffixes."""

    target: ProcessMemory
    draft: ProcessMemory | None
    answer_tokens: int = 0

    @property
    def native(self) -> bool:
        """Whether the target is on the native engine, which has a prefix cache and can keep keys and values in 8 bits."""
        return self.target.engine == "native"

    def sizes(self, rows: int, tokens: int = 0, draft_tokens: int = 0, written: int | None = None) -> ModelSizes:
        """The sizes with a batch of ``rows`` that have ``tokens`` (in the draft's cache ``draft_tokens``) together.

        ``written``: the tokens of all answers of the job; None if unknown.
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
