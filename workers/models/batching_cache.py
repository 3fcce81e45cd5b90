"""Remembers on disk how the hf engine batches the rows of each model (hf_batching.py), which depends only on config.json
and versions.

A job looks it up before it starts an actor, and its actors need not try again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from outrider.workers import engines
from outrider.workers.engines.hf_batching import Batching, RowFeeding
from outrider.workers.errors import ModelError
from outrider.workers.models.config_file import NAME
from outrider.workers.models.files import read_json
from outrider.workers.models.limits import limited
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.packed_cache import cache_directory, make_directory

FOLDER = "ways"
# The limit of CPU time for the trials, which usually take a second or two.
TRIAL_SECONDS = 120.0


def batching_of(path: Path, fused: bool) -> Batching:
    """The best batching for the model in this directory; a ModelError with a sentence where there is none."""
    known = remembered_batching(path, fused)
    if known is not None:
        return known
    from transformers import AutoConfig

    from outrider.workers.models.probe import find_batching, said

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a config.json can be wrong with surfaces here, in many types
        if _needs_own_code(path):
            raise ModelError("it needs code from its own repository (auto_map), which outrider never runs") from error
        raise ModelError(f"transformers cannot read its config.json ({said(error)})") from error
    try:
        batching = find_batching(config, fused)
    except ModelError as error:
        _remember(path, fused, {"refused": str(error)})
        raise
    _remember(path, fused, {"ragged": batching.ragged, "feeding": batching.feeding.value, "why": batching.why})
    return batching


def _needs_own_code(path: Path) -> bool:
    from transformers import CONFIG_MAPPING

    config = read_json(path / NAME)
    return bool(config.get("auto_map")) and config.get("model_type") not in CONFIG_MAPPING


def is_known(model_info: ModelInfo, fused: bool) -> bool:
    """Whether a batching is remembered; a ModelError where it is remembered that there is none."""
    with said_of(model_info):
        return remembered_batching(Path(model_info.path), fused) is not None


def try_within_limits(model_info: ModelInfo, fused: bool) -> None:
    """Try all kinds of batching within limits that may end this process, since the configuration is not trusted."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with said_of(model_info), limited(TRIAL_SECONDS):
        batching_of(Path(model_info.path), fused)


@contextmanager
def said_of(model_info: ModelInfo) -> Iterator[None]:
    """Begin the sentence of a ModelError with this model's name."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{model_info.name} ({model_info.family}) cannot be run by the hf engine: {error}") from error


def remembered_batching(path: Path, fused: bool) -> Batching | None:
    """The remembered batching; None where there is none, or its file cannot be read."""
    try:
        found = json.loads(_file(path, fused).read_bytes())
        if "refused" not in found:
            return Batching(bool(found["ragged"]), RowFeeding(found["feeding"]), str(found["why"]))
        refusal = str(found["refused"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    raise ModelError(refusal)


def _remember(path: Path, fused: bool, found: dict[str, object]) -> None:
    """If it cannot be written, the next process tries again, which takes a second or two."""
    file = _file(path, fused)
    with suppress(OSError):
        make_directory(file.parent)
        descriptor, partial = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(descriptor, "w") as stream:
            json.dump(found, stream)
        Path(partial).replace(file)


def _file(path: Path, fused: bool) -> Path:
    known = hashlib.sha256()
    for part in (version("transformers"), version("torch"), str(fused), _own_digest()):
        known.update(part.encode() + b"\0")
    known.update((path / "config.json").read_bytes())
    return cache_directory() / FOLDER / f"{known.hexdigest()}.json"


def _own_digest() -> str:
    here = Path(__file__).parent
    files = [*sorted(Path(str(engines.__path__[0])).glob("hf*.py")), here / "probe.py", here / "twins.py"]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
