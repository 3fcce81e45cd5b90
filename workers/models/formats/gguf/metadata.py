"""A GGUF file's metadata, read key by key under the architecture's name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.gguf.file import GgufFile
from outrider.workers.models.headers import quoted

# Keys that would change logits with any other value than this one; they may be missing.
USUAL: dict[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "use_parallel_residual": False,
    # Written by the first converters: the order of rows that all files of Llama have.
    "tensor_data_layout": "Meta AI original pth",
}


class Metadata:
    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.values = file.metadata
        architecture = self.values.get("general.architecture")
        if not isinstance(architecture, str):
            self.refuse('has no "general.architecture": is it a language model?')
        self.architecture = architecture

    def refuse(self, what: str) -> NoReturn:
        raise ModelError(f"{self.file.path} {what}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.values.get(name, default)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            self.refuse(f"has {quoted(name)}: {quoted(value)}, where a value of another kind is needed")
        if value is None:
            self.refuse(f"has no {quoted(name)}")
        return value

    def several(self, key: str, kind: type, length: int) -> list[Any]:
        """A list of ``length`` values of type ``kind``."""
        values = self.get(key, list)
        if len(values) != length or not all(type(value) is kind for value in values):
            self.refuse(f"has {quoted(f'{self.architecture}.{key}')}: {quoted(values)}, where {length} values are needed")
        return list(values)

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.values

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def check_known(self, known: Collection[str]) -> None:
        prefix = f"{self.architecture}."
        for name, value in self.values.items():
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and key not in known and USUAL.get(key, ...) != value:
                self.refuse_value(key)

    def refuse_value(self, key: str) -> NoReturn:
        name = f"{self.architecture}.{key}"
        self.refuse(f"has {quoted(name)}: {quoted(self.values[name])}, which the native engine does not know")
