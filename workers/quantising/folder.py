"""The folder of an unfinished quantised checkpoint: a file for each finished layer, and the activations after the last one.

It lies beside the final path and is renamed to it at the end. Every file is written under another name first, so a file
with its final name is complete; a run that finds the folder continues after its last layer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.workers.errors import JobChangedError, UsageError, first_line
from outrider.workers.models.files import sync
from outrider.workers.models.headers import INDEX
from outrider.workers.models.model_info import described

SUFFIX = ".unfinished"
PLAN = "plan.json"
STATE = "activations.safetensors"
LAYER = "layer"
THREADS = "threads"


class Folder:
    """``plan`` is all that determines the bytes of the result; a folder that was begun with another plan is refused.

    Only the number of threads is taken from the folder, since it came from the cores that were free then.
    """

    def __init__(self, out: Path, plan: Mapping[str, Any], layers: int) -> None:
        self.out = out
        self._layers = layers
        self.path = out.with_name(out.name + SUFFIX)
        self.threads: int = plan[THREADS]
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / PLAN).exists():
                found = json.loads((self.path / PLAN).read_text())
                self._check_same(plan, found)
                self.threads = found[THREADS]
            else:
                self._write_text(PLAN, json.dumps(plan, indent=2, sort_keys=True))

    def _check_same(self, plan: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        for key in sorted((plan.keys() | found.keys()) - {THREADS}):
            if plan.get(key) != found.get(key):
                raise JobChangedError(
                    f"{self.path} was begun with another {key} ({found.get(key)}, now {plan.get(key)}): give it as it was "
                    "to go on there, or remove that folder to begin anew"
                )

    def done(self) -> tuple[int, dict[int, Tensor] | None]:
        """How many layers are finished, and the activations after the last of them (None: none are kept)."""
        state = self.path / STATE
        if not state.exists():
            count = 0
            while count < self._layers and self._layer(count).exists():
                count += 1
            return count, None
        with safe_open(str(state), "pt") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        count = int(found.pop(LAYER))
        return count, {int(name): part for name, part in found.items()}

    def keep_layer(self, index: int, tensors: Mapping[str, Tensor], told: Mapping[str, str]) -> None:
        # ``told`` has a file of its own, since safetensors does not keep the order of its metadata. It is written first, so
        # the layer's file means that both are complete.
        self._write_text(f"{LAYER}-{index}.json", json.dumps(dict(told)))
        self._write(self._layer(index), tensors)

    def keep_state(self, count: int, buffers: Mapping[int, Tensor]) -> None:
        """Keep the activations after the first ``count`` layers, whose files are complete."""
        named = {str(number): part for number, part in buffers.items()}
        self._write(self.path / STATE, named | {LAYER: torch.tensor(count)})

    def told(self, index: int) -> dict[str, str]:
        """The record of a finished layer."""
        return dict(json.loads((self.path / f"{LAYER}-{index}.json").read_text()))

    def finish(self, source: Path, rest: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Write the remaining files, and rename the folder."""
        self._write(self._layer(-1), rest)
        weights, size = {}, 0
        for part in [self._layer(index) for index in range(-1, self._layers)]:
            with safe_open(str(part), "pt") as opened:
                for tensor in opened.keys():  # noqa: SIM118
                    weights[tensor] = part.name
            size += part.stat().st_size
        self._write_text(INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": weights}, indent=2) + "\n")
        with self._writing():
            for file in described(source):
                if file.name != "config.json" and not file.name.endswith(".index.json"):
                    target = self.path / file.relative_to(source)
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, target)
                    sync(target)
        self._write_text("config.json", json.dumps(dict(config), indent=2) + "\n")
        with self._writing():
            (self.path / STATE).unlink(missing_ok=True)
            self.path.rename(self.out)
            sync(self.out.parent)
        # Removed last, since a run that continues needs them.
        for name in (PLAN, *(f"{LAYER}-{index}.json" for index in range(self._layers))):
            (self.out / name).unlink()

    def _layer(self, index: int) -> Path:
        """The file of a layer; -1 is that of the tensors outside of layers."""
        return self.path / f"model-{index + 2:05}-of-{self._layers + 1:05}.safetensors"

    def _write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        partial = path.with_suffix(".partial")
        ready = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with self._writing():
            save_file(ready, str(partial), {"format": "pt"})
            self._replace_durably(partial, path)

    def _write_text(self, name: str, text: str) -> None:
        partial = self.path / f"{name}.partial"
        with self._writing():
            partial.write_text(text, encoding="utf-8")
            self._replace_durably(partial, self.path / name)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:  # safetensors has the system's reason in an error of its own
            reason = error.strerror if isinstance(error, OSError) else first_line(error)
            raise UsageError(
                f"--out: {self.path} cannot be written: {reason}; once it can be, the same command goes on there"
            ) from None

    def _replace_durably(self, partial: Path, path: Path) -> None:
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        partial.rename(path)
        sync(self.path)


def digest_of_tokens(windows: Tensor) -> str:
    return hashlib.sha256(windows.to(torch.int64).numpy().tobytes()).hexdigest()
