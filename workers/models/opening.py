"""Which engine opens a model, and the numeric path that its results follow."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.workers.engine import Engine
from outrider.workers.errors import UsageError
from outrider.workers.messages import ModelSpec


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A running engine with what its users need to know beside it.

    ``numeric_path`` names everything that may decide a bit of the results: replicas and resumed runs must agree on it.
    """

    engine: Engine
    kind: str
    end_tokens: tuple[int, ...]
    notes: list[str]
    numeric_path: dict[str, str]


def open_model(spec: ModelSpec) -> OpenModel:
    if spec.engine != "hf":
        raise UsageError(f'--engine: "{spec.engine}" is not an engine; choose hf')
    import torch
    import transformers

    from outrider.workers.models.loading import load_hf

    engine, card, notes = load_hf(spec)
    path = {
        "engine": "hf",
        "precision": spec.precision,
        "device": spec.device.split(":")[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
    }
    return OpenModel(engine, "hf", card.end_tokens, notes, path)
