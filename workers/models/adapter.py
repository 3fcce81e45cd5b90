"""Reads a LoRA adapter of PEFT (adapter_config.json, adapter_model.safetensors); an option that is unknown is refused.

For each matrix W that it changes, an adapter has A [r, inputs] and B [outputs, r]: the weight becomes W + B A alpha / r.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.files import read_json
from outrider.workers.models.formats.patterns import UnusablePattern, compiled
from outrider.workers.models.formats.section import Section
from outrider.workers.models.headers import Entry, quoted, read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"
# Keys that have no effect after training, that are read below, or whose effect is in the tensors.
HARMLESS_NAMES = """
    auto_mapping base_model_name_or_path exclude_modules inference_mode layers_pattern layers_to_transform lora_dropout
    megatron_core modules_to_save peft_type peft_version qalora_group_size r lora_alpha alpha_pattern rank_pattern
    target_modules task_type use_rslora runtime_config ephemeral_gpu_offload fan_in_fan_out bias init_lora_weights revision
    ensure_weight_tying
"""
HARMLESS = frozenset(HARMLESS_NAMES.split())
# Initialisations that leave the base model's weights unchanged; others (PiSSA, OLoRA, LoftQ) change them.
INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")
FLOATS = ("F16", "BF16", "F32")
PREFIX = "base_model.model."
TENSOR = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.weight)?")


@dataclass(frozen=True, slots=True)
class Change:
    """One matrix's ``a`` [r, inputs] and ``b`` [outputs, r]; the inputs of an embedding are tokens."""

    module: str
    a: Entry
    b: Entry
    scale: float
    embedding: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of B A."""
        return self.b.shape[0], self.a.shape[1]


@dataclass(frozen=True, slots=True)
class Adapter:
    """``base`` is the base model's name in the adapter's configuration.

    ``whole`` are tensors that replace the model's. ``copies`` should equal the model's: PEFT saves an embedding that the
    adapter changes, and the LM head with it, since the vocabulary may have been extended.
    """

    path: Path
    base: str
    changes: tuple[Change, ...]
    whole: Mapping[str, Entry]
    copies: Mapping[str, Entry]


def is_adapter(path: Path) -> bool:
    return os.path.lexists(path / CONFIG)


def read_adapter(path: Path) -> Adapter:
    source = path / CONFIG
    section = Section(read_json(source), str(source))
    _check(section)
    if not os.path.lexists(path / WEIGHTS):
        raise ModelError(f"{path} has no {WEIGHTS}: save the adapter with PEFT's save_pretrained, in safetensors")
    entries = read_header(path / WEIGHTS)
    pairs: dict[str, dict[str, Entry]] = {}
    whole: dict[str, Entry] = {}
    copies: dict[str, Entry] = {}
    saved = section.names("modules_to_save")
    for name, entry in entries.items():
        own = name.removeprefix(PREFIX)
        if own == name:
            raise ModelError(f"{entry.file} holds {quoted(name)}, whose name does not begin with {PREFIX}: is it PEFT's?")
        if entry.type not in FLOATS:
            raise ModelError(f"{entry.file}: {quoted(name)} is of type {entry.type}; {', '.join(FLOATS)} are read")
        found = TENSOR.fullmatch(own)
        if found is not None:
            pairs.setdefault(found[1], {})[found[2]] = entry
        elif any(module in own.split(".") for module in saved):
            whole[own] = entry
        else:
            copies[own.replace(".base_layer.", ".")] = entry
    changes = tuple(_change(section, module, pair) for module, pair in sorted(pairs.items()))
    return Adapter(path, section.values.get(BASE) or "", changes, whole, copies)


def _check(section: Section) -> None:
    section.one_of("peft_type", ("LORA",), "LORA")
    section.one_of("bias", ("none",), "none")
    section.one_of("init_lora_weights", INITIALISATIONS, True)
    section.one_of("revision", ("main",), "main")
    section.one_of("ensure_weight_tying", (False,), False)
    if not isinstance(section.values.get(BASE) or "", str):
        raise section.refuse(f'has "{BASE}": {quoted(section.values[BASE])}, where a name is needed')
    for key, value in section.values.items():
        if key not in HARMLESS and value not in (None, False, {}, []):
            raise section.refuse(f"has {quoted(key)}: {quoted(value)}, which is not supported")


def _change(section: Section, module: str, pair: Mapping[str, Entry]) -> Change:
    names = ("lora_A", "lora_B") if "lora_A" in pair or "lora_B" in pair else ("lora_embedding_A", "lora_embedding_B")
    if set(pair) != set(names):
        raise ModelError(f"{section.source}: of {quoted(module)} there is {' and '.join(sorted(pair))} alone")
    a, b = (pair[name] for name in names)
    rank = _of_module(section, "rank_pattern", module, section.number("r", 8))
    alpha = _of_module(section, "alpha_pattern", module, section.real("lora_alpha", 8.0))
    if rank < 1 or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise ModelError(
            f"{section.source}: A and B of {quoted(module)} have the shapes {a.shape} and {b.shape}, its rank is {rank}"
        )
    scale = alpha / (math.sqrt(rank) if section.flag("use_rslora", False) else rank)
    return Change(module, a, b, scale, embedding=names[0] != "lora_A")


def _of_module(section: Section, key: str, module: str, usual: Any) -> Any:
    """The value of the first pattern that matches the end of the module's name, as in PEFT; ``usual`` where none does."""
    stated = Section(section.values.get(key) or {}, f'{section.source}: "{key}"')
    for pattern, value in stated.values.items():
        try:
            found = compiled(rf"(.*\.)?({pattern})$").match(module)
        except UnusablePattern as error:
            raise stated.refuse(f"has {quoted(pattern)}, which {error}") from None
        if found:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise stated.refuse(f"has {quoted(pattern)}: {quoted(value)}, where a number is needed")
            return value
    return usual
