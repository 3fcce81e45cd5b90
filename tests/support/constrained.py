"""The bundled pair under constraints, in this process. It was trained on code and would not write JSON by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from outrider.workers.build import Draft, build_draft
from outrider.workers.constraints.grammars import grammar_of
from outrider.workers.constraints.matching import Grammars, Matching
from outrider.workers.messages import ModelSpec, ReplicaSpec
from outrider.workers.models.model_info import find
from outrider.workers.models.opening import OpenModel, open_model
from outrider.workers.models.tokenizer import Tokenizer

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 8}, "number": {"type": "integer", "maximum": 99}},
            "required": ["street", "number"],
            "additionalProperties": False,
        },
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "address", "member"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "record": {"kind": "json", "value": RECORD},
    "spaced": {"kind": "json", "value": RECORD, "options": {"whitespace_flexible": True}},
    "regex": {"kind": "regex", "value": "(ab|cd){2,5}[0-9]+x?"},
    "choice": {"kind": "choice", "value": ["red", "redder", "green", 'a "b"\n', "grün"]},
    "grammar": {"kind": "grammar", "value": 'start: "(" inner ")"\ninner: /[a-c]{1,3}/ | start'},
}


class OfOneForm(Tokenizer):
    """Has one form for each vocabulary and end, since compiled grammars change nothing of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._forms: dict[tuple[int, int], LLTokenizer] = {}

    def for_grammars(self, vocabulary: int, end: int) -> LLTokenizer:
        if (vocabulary, end) not in self._forms:
            self._forms[vocabulary, end] = super().for_grammars(vocabulary, end)
        return self._forms[vocabulary, end]


@cache
def tokenizer() -> Tokenizer:
    return OfOneForm(find("pocket"))


@cache
def grammar(name: str) -> str:
    return grammar_of(CONSTRAINTS[name])


@cache
def model(name: str, engine: str = "native", precision: str = "fp32") -> OpenModel:
    return open_model(ModelSpec(str(find(name)), engine, precision, threads=1 if engine == "native" else 0))


class AtOnce:
    """Constraints for a draft, compiled when they are asked for (not in the background)."""

    def __init__(self, opened: OpenModel) -> None:
        vocabulary = opened.engine.vocabulary
        self._grammars = Grammars(lambda: tokenizer().for_grammars(vocabulary, opened.end_tokens[0]), vocabulary)

    def matching(self, grammar: str, ends: Sequence[int]) -> Matching:
        return self._grammars.matching(grammar, ends)


def draft_of_the_pair(prefix_tokens: int = 0, constrained: bool = True) -> Draft:
    opened = model("pocket-draft", precision="w8a8")
    spec = ModelSpec("", opened.kind, "", prefix_tokens=prefix_tokens)
    return build_draft(spec, ReplicaSpec(1, None), opened, AtOnce(opened) if constrained else None)
