"""What is known of a model before its weights are loaded: where it lies, its limits, and a digest of its content."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeGuard

from outrider.workers.errors import ModelError
from outrider.workers.models.names import hub_id

POCKET = "pocket"
POCKET_DRAFT = "pocket-draft"
SAMPLED_FILE_BYTES = 64 << 20
SAMPLES = 64
SAMPLE_BYTES = 64 << 10
# Names under which configurations state how long a row may be, the most binding first.
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelCard:
    name: str
    path: str
    family: str
    context: int
    vocabulary: int
    dtype: str
    end_tokens: tuple[int, ...]
    weight_bytes: int
    digest: str


def find(name: str) -> Path:
    """The local directory of a model named by a path, a hub id, or ``pocket``; downloads what the cache lacks."""
    if name in (POCKET, POCKET_DRAFT):
        return _pocket(name)
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError) as error:  # a name too long, or a home that nobody has
        raise ModelError(f'the model directory "{name[:80]}" does not exist: {error}') from None
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f'the model directory "{name}" does not exist')
    return _from_hub(hub_id(name))


def _pocket(name: str) -> Path:
    role = "target" if name == POCKET else "draft"
    path = Path(str(files("outrider.workers"))) / "pocket" / role
    if not (path / "config.json").is_file():
        raise ModelError(f"the bundled pocket model is missing from {path}: reinstall outrider")
    return path


def _from_hub(name: str) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        cached = Path(snapshot_download(name, local_files_only=True))
        if weight_files(cached):
            return cached
    except HFValidationError as error:
        raise ModelError(f'"{name}" is neither a directory nor a name that a model hub could have') from error
    except LocalEntryNotFoundError:
        pass
    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f'"{name}" is neither a directory nor in the local cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE '
            "is set: give a directory, or unset it where there is a network"
        )
    try:
        published = [entry.rfilename for entry in HfApi().model_info(name, timeout=10).siblings or []]
        # One set of weights is enough, and safetensors is the one that can hold nothing but weights.
        weights = "*.safetensors" if any(entry.endswith(".safetensors") for entry in published) else "*.bin"
        return Path(snapshot_download(name, allow_patterns=[weights, "*.json", "*.model", "*.txt", "*.jinja"]))
    except RepositoryNotFoundError as error:
        raise ModelError(f'the model hub has no "{name}" that may be read from here') from error
    except Exception as error:  # the transport below the hub's client, and so its errors, change with its version
        raise ModelError(
            f'"{name}" is neither a directory nor in the local cache ({constants.HF_HUB_CACHE}), and the model hub cannot '
            f"be reached ({error}): give a directory, or fill the cache where there is a network"
        ) from error


def read_card(name: str) -> ModelCard:
    """Read and check what can be known without the weights."""
    path = find(name)
    config = _read_json(path / "config.json")
    # Models that see or hear keep the language model's limits one level down.
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ModelError(f'{path / "config.json"} has no "model_type": is this a language model\'s directory?')
    weights = weight_files(path)
    if not weights:
        raise ModelError(f"{path} holds no weights: neither *.safetensors nor *.bin")
    context = next((text[key] for key in CONTEXT_KEYS if _is_count(text.get(key))), None)
    vocabulary = text.get("vocab_size")
    if context is None or not _is_count(vocabulary):
        raise ModelError(f"{path / 'config.json'} does not say how long a row may be or how many tokens there are")
    return ModelCard(
        name=name,
        path=str(path),
        family=family,
        context=context,
        vocabulary=vocabulary,
        dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "float32"),
        end_tokens=_end_tokens(path, text),
        weight_bytes=sum(file.stat().st_size for file in weights),
        digest=digest(path, weights),
    )


def weight_files(path: Path) -> list[Path]:
    """The files that hold the model: safetensors where there are any, else pickled ``.bin`` files."""
    return sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))


def digest(path: Path, weights: list[Path]) -> str:
    """A digest of the configuration, the tokenizer and the weights.

    Small files are read whole. Of a large one, its size and 64 pieces spread evenly over it are read: enough to tell one
    checkpoint from another within a second, though not one altered byte.
    """
    total = hashlib.sha256()
    described = sorted([*path.glob("*.json"), *path.glob("*.model"), *path.glob("*.txt"), *path.glob("*.jinja")])
    for file in [*described, *weights]:
        size = file.stat().st_size
        total.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            if size <= SAMPLED_FILE_BYTES:
                total.update(stream.read())
                continue
            for piece in range(SAMPLES):
                stream.seek((size - SAMPLE_BYTES) * piece // (SAMPLES - 1))
                total.update(stream.read(SAMPLE_BYTES))
    return total.hexdigest()


def _end_tokens(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end a text: the generation settings' where there are any, else the model's."""
    generation = path / "generation_config.json"
    declared = (_read_json(generation) if generation.is_file() else {}).get("eos_token_id")
    if declared is None:
        declared = config.get("eos_token_id")
    if declared is None:
        return ()
    ids = declared if isinstance(declared, list) else [declared]
    if not all(type(id_) is int for id_ in ids):
        raise ModelError(f'{path}: "eos_token_id" must be a token id or a list of them, got {declared!r}')
    return tuple(sorted(ids))


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: is this a language model's directory?") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content
