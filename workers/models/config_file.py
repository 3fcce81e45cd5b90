"""The configuration of a model: config.json in its directory, or the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.workers.models.files import read_json
from outrider.workers.models.formats.configuration import Quantisation, read_quantisation
from outrider.workers.models.formats.gguf.config import config_of
from outrider.workers.models.formats.gguf.file import gguf_quantisation, is_gguf
from outrider.workers.models.formats.gguf.split import read_gguf
from outrider.workers.models.language_model import language_config

NAME = "config.json"


def config_path(model: Path) -> Path:
    """The file of the configuration, for sentences."""
    return model if is_gguf(model) else model / NAME


def read_config(model: Path) -> dict[str, Any]:
    """The configuration; of a multimodal model, that of its language model."""
    if is_gguf(model):
        return config_of(read_gguf(model))
    return language_config(read_json(model / NAME), str(model / NAME))


def quantisation_of(model: Path) -> Quantisation | None:
    """How a checkpoint is quantised; None where it is not."""
    if is_gguf(model):
        return gguf_quantisation(read_gguf(model))
    return read_quantisation(read_config(model), str(model / NAME))
