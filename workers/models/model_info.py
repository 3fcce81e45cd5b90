"""Finds a model and reads what is known before its weights are loaded: its path, limits, settings and digest."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeGuard

from outrider.workers.errors import JobChangedError, ModelError
from outrider.workers.models.adapter import CONFIG as ADAPTER
from outrider.workers.models.adapter import WEIGHTS, is_adapter
from outrider.workers.models.cached_numbers import cached_numbers
from outrider.workers.models.config_file import NAME, config_path, quantisation_of, read_config
from outrider.workers.models.configuration import CONTEXT_KEYS, LONGEST_ROW
from outrider.workers.models.digests import digest_of
from outrider.workers.models.draft_names import MTP
from outrider.workers.models.files import check_describing, holds_tokenizer, read_json, state_of
from outrider.workers.models.formats.gguf.file import is_gguf
from outrider.workers.models.formats.gguf.split import files_of, read_gguf
from outrider.workers.models.generation_settings import FILE, read_settings
from outrider.workers.models.headers import INDEX, SINGLE, Outline, quoted, read_outline, safetensors_of
from outrider.workers.models.heads import FAMILY, head_of, is_head
from outrider.workers.models.hub import Wanted, from_hub
from outrider.workers.models.hub_gguf import models_among, of_hub, told, wanted_of
from outrider.workers.models.hub_names import hub_id
from outrider.workers.models.language_model import TYPES, texts_below
from outrider.workers.models.mtp import model_named, model_of, mtp_path
from outrider.workers.models.packed_cache import chosen_limit
from outrider.workers.models.size_check import check_fits

POCKET = "pocket"
POCKET_DRAFT = "pocket-draft"
POCKET_PARALLEL = "pocket-parallel"
POCKET_HEAD = "pocket-head"
# The folder of each bundled model.
POCKETS = {POCKET: "target", POCKET_DRAFT: "draft", POCKET_PARALLEL: "parallel", POCKET_HEAD: "head"}
# The files beside the weights that may change what a model writes.
DESCRIBING = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.bpe", "additional_chat_templates/*.jinja")
# Files in subfolders of a hub repository, which are for other formats and tasks.
IN_FOLDERS = tuple(f"*/*.{suffix}" for suffix in ("json", "model", "txt", "tiktoken", "bpe", "safetensors", "bin"))
# Mistral's own format, beside the same weights in transformers'.
CONSOLIDATED = "consolidated"
# A key by which transformers reads weights from a file of another name.
WEIGHTS_KEY = "transformers_weights"
NUMBERED = re.compile(r"-of-0*(\d+)\.\w+$")
# The context of families whose configurations may lack these keys: transformers' default, or that of training.
USUAL_CONTEXT = {"bloom": 2048, "falcon": 2048}
# Recurrent families without a limit of positions.
WITHOUT_LIMIT = frozenset(("mamba", "mamba2", "falcon_mamba", "xlstm", "rwkv", "recurrent_gemma"))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    path: str
    family: str
    context: int
    vocabulary: int
    dtype: str
    end_tokens: tuple[int, ...]
    weight_bytes: int
    digest: str
    # The precision of a quantised checkpoint that the native engine reads; else "".
    made_for: str = ""
    # The mask token of a parallel draft.
    mask_token: int | None = None
    # Whether it is a head on a target's hidden states, which cannot run alone.
    head: bool = False
    # How many tokens a head scores, if fewer than its target.
    scored: int | None = None
    # The target's layers whose inputs a head reads, once its target is known.
    states: tuple[int, ...] = ()
    # The number of weights, if the headers tell.
    numbers: int | None = None
    # Generation settings that would change texts and are not followed; those of sampling; and the file of both.
    unfollowed: tuple[str, ...] = ()
    sampling: tuple[tuple[str, float], ...] = ()
    settings: str = FILE
    # The size of the KV cache a token, in numbers, if config.json tells.
    cached_numbers: int | None = None
    # The first token id whose embedding comes from vision or audio parts, which are not loaded (Gemma 3n).
    texts_below: int | None = None


def find(name: str, fetch: bool = True) -> Path:
    """The local directory (or GGUF file) of a model named by a path, a hub id, or ``pocket``.

    Missing files are downloaded; without ``fetch`` they are an error.
    """
    if name in POCKETS:
        return _pocket(name)
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            _refuse_several(path)
            return path
        if is_gguf(path) and path.exists():
            return path
        if path.is_symlink() and not path.exists():
            raise ModelError(f'the model directory "{name[:80]}" does not exist: it is a link to nowhere, or to itself')
    except PermissionError:
        raise ModelError(f'this user may not read the model directory "{name[:80]}"') from None
    except OSError as error:  # the name is too long
        raise ModelError(f'the model directory "{name[:80]}" does not exist: {error.strerror}') from None
    except RuntimeError as error:  # ~user of an unknown user
        raise ModelError(f'the model directory "{name[:80]}" does not exist: {error}') from None
    if (of_gguf := of_hub(name)) is not None:
        repository, choice = of_gguf
        return from_hub(f"{repository}:{choice}", repository, wanted_of(repository, choice), fetch)
    if is_gguf(path):
        raise ModelError(f'the GGUF file "{name}" does not exist')
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        if path.exists():
            raise ModelError(
                f"\"{name}\" is neither a model's directory nor a GGUF file; give the directory of the model's files"
            )
        raise ModelError(f'the model directory "{name}" does not exist')
    name = hub_id(name)
    return from_hub(name, name, Wanted(DESCRIBING, partial(_to_fetch, name), Path, _lacking, IN_FOLDERS), fetch)


def _refuse_several(path: Path) -> None:
    """Refuse a directory of GGUF files, each of which is a model or a part of one."""
    if not os.path.lexists(path / NAME) and (found := sorted(filter(is_gguf, path.glob("*")))):
        raise ModelError(f"{path} has no {NAME} but GGUF files: name one of them, such as {found[0]}")


def _pocket(name: str) -> Path:
    path = Path(str(files("outrider.workers"))) / "pocket" / POCKETS[name]
    if not (path / "config.json").is_file():
        raise ModelError(f"the bundled pocket model is missing from {path}: reinstall outrider")
    return path


def _to_fetch(name: str, published: Sequence[str]) -> list[str]:
    """The describing files and one set of weights, safetensors if there are any (they cannot hold code)."""
    safe = [file for file in published if file.endswith(".safetensors") and "/" not in file]
    if not safe and (models := models_among(published)) and not any(file.endswith(".bin") for file in published):
        raise ModelError(
            f'the repository "{name}" holds GGUF models ({told(models)}): name one by its type, such as "{name}:Q4_K_M"'
        )
    own = [file for file in safe if not file.startswith(CONSOLIDATED)]
    return [*DESCRIBING, *([SINGLE] if SINGLE in safe else own or safe or ["pytorch_model*.bin"])]


def _lacking(path: Path) -> str:
    """What an interrupted download lacks; "" where it is complete as far as known."""
    if not (path / NAME).exists() and is_adapter(path):
        return "" if (path / WEIGHTS).exists() else f"it lacks {WEIGHTS}"
    if not (path / NAME).exists():
        return f"it lacks {NAME}"
    try:
        weights = weight_files(path)
    except ModelError as error:
        return str(error)
    if not all(file.exists() for file in weights) or not weights:
        return "it lacks weights"
    # Without an index, which may be missing as well, the numbered names tell how many files there are.
    told = [] if (path / INDEX).exists() else [int(found[1]) for file in weights if (found := NUMBERED.search(file.name))]
    if told and max(told) > len(weights):
        return f"it has {len(weights)} of {max(told)} files of weights"
    if not any(map(holds_tokenizer, described(path))) and not is_head(read_config(path)):
        return "it lacks a tokenizer"
    return ""


def read_model_info(name: str, tell: Callable[[int], None] = lambda size: None, by_headers: bool = False) -> ModelInfo:
    """Read and check everything but the weights.

    The weights are read only for their digest, unless it is remembered (``workers/models/digests.py``): ``tell`` is called
    with their bytes if that takes long. ``by_headers``: no digest is computed, and nothing downloaded.
    """
    chosen_limit()  # refuses a setting that is no number, before anything is loaded
    if (model := model_named(name)) is not None:
        return mtp_info(read_model_info(model, tell, by_headers))
    path = find(name, fetch=not by_headers)
    _refuse_adapter(path)
    source = config_path(path)
    config = read_config(path)
    if config.get("is_encoder_decoder") is True and config.get("is_decoder") is not True:
        raise ModelError(f"{source} is of an encoder-decoder model, and outrider runs decoders only")
    _refuse_unread_rope(config, source)
    # Multimodal models that are not in ``language_model.MULTIMODAL`` have the language model's limits in ``text_config``.
    text: Mapping[str, Any] = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    family = config.get("model_type")
    if (head := head_of(config, str(source))) is not None:
        text, family = head.values, FAMILY
    if not isinstance(family, str):
        raise ModelError(f'{source} has no "model_type": is this a language model\'s directory?')
    if config.get(WEIGHTS_KEY) is not None:
        raise ModelError(f'{source}: "{WEIGHTS_KEY}" is not supported; remove it, and name the weights {SINGLE}')
    weights = _there(path)
    context = _context(text, family, source)
    vocabulary = text.get("vocab_size")
    if not _is_count(vocabulary):
        raise ModelError(f'{source} does not say how many tokens there are: add "vocab_size", a positive whole number')
    stated = config if is_gguf(path) else read_json(source)
    settings = read_settings(path, text if head is not None else stated, source.name, vocabulary)
    check_describing(described(path))
    outline = _outline(path, weights)
    check_fits(path, text, outline)
    return ModelInfo(
        name=name,
        path=str(path),
        family=family,
        context=context,
        vocabulary=vocabulary,
        dtype=_dtype(source, text, config),
        end_tokens=settings.end_tokens,
        weight_bytes=sum(state_of(file).st_size for file in weights),
        digest="" if by_headers else digest(path, tell),
        made_for=_made_for(path),
        numbers=outline.numbers,
        head=head is not None,
        scored=None if head is None or head.draft_vocabulary == head.vocabulary else head.draft_vocabulary,
        unfollowed=settings.unfollowed,
        sampling=settings.sampling,
        settings=settings.file,
        cached_numbers=cached_numbers(text),
        texts_below=texts_below(stated),
    )


def mtp_info(model: ModelInfo) -> ModelInfo:
    """Of a model's layer for multi-token prediction, which is a head on its own model's states."""
    name, path = mtp_path(model.name), mtp_path(model.path)
    return replace(model, name=name, path=path, family=MTP, head=True, unfollowed=(), sampling=())


def _refuse_adapter(path: Path) -> None:
    if is_adapter(path):
        raise ModelError(
            f"{path / ADAPTER}: an adapter is merged into its model before it runs (outrider merge {path} -o DIR); or "
            "remove both adapter files to run the model without it"
        )


def _refuse_unread_rope(config: Mapping[str, Any], source: Path) -> None:
    """Refuse rope scalings and bases that transformers ignores, since the engines would differ."""
    attention = config.get("attn_config")
    if config.get("model_type") == "dbrx" and isinstance(attention, dict) and "rope_theta" in attention:
        rope = config.get("rope_parameters")
        theta = rope.get("rope_theta") if isinstance(rope, dict) else config.get("rope_theta")
        if attention["rope_theta"] != (10000.0 if theta is None else theta):
            raise ModelError(
                f'{source}: transformers does not read the "rope_theta" in "attn_config": write '
                f'"rope_theta": {attention["rope_theta"]} beside "attn_config" as well'
            )
    scaling, family = config.get("rope_scaling"), config.get("model_type")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return
    if family == "olmo3" and "rope_type" not in scaling:
        raise ModelError(
            f'{source}: "rope_scaling" of OLMo 3 names its type by "type", which transformers does not read: '
            'write "rope_type"'
        )
    if family == "cohere2_moe":
        raise ModelError(
            f'{source}: "rope_scaling" of this family is not read by transformers: say it in "rope_parameters"'
        )


def _context(text: Mapping[str, Any], family: str, source: Path) -> int:
    usual = LONGEST_ROW if family in WITHOUT_LIMIT else USUAL_CONTEXT.get(family)
    context = next((text[key] for key in CONTEXT_KEYS if _is_count(text.get(key))), usual)
    if context is None:
        raise ModelError(f'{source} does not say how long a row may be: add "{CONTEXT_KEYS[0]}", a positive whole number')
    return context


def _dtype(source: Path, *configs: Mapping[str, Any]) -> str:
    for config in configs:
        for key in TYPES:
            if value := config.get(key):
                if not isinstance(value, str):
                    raise ModelError(f'{source}: "{key}" must be a text such as "bfloat16", got {quoted(value)}')
                return value
    return "float32"


def _made_for(path: Path) -> str:
    """The precision of a quantised checkpoint; "" also for one that the native engine does not read."""
    try:
        quantisation = quantisation_of(path)
    except ModelError:
        return ""
    return "" if quantisation is None else quantisation.made_for


def _outline(path: Path, weights: list[Path]) -> Outline:
    if is_gguf(path):
        file = read_gguf(path)
        return Outline(len(file.tensors), file.size)
    return read_outline(path, weights)


def _there(path: Path) -> list[Path]:
    weights = weight_files(path)
    if not weights:
        raise ModelError(f"{path} holds no weights: neither *.safetensors nor *.bin")
    return weights


def weight_files(path: Path) -> list[Path]:
    """The files of the weights: safetensors if there are any, else pickled ``.bin`` files; or those of a GGUF model. Those
    of an MTP layer are its model's."""
    path = model_of(path) or path
    if is_gguf(path):
        return files_of(path)
    return safetensors_of(path) or sorted(path.glob("pytorch_model*.bin"))


def digest(path: Path, tell: Callable[[int], None] = lambda size: None) -> str:
    """A digest of the configuration, the tokenizer and the weights."""
    path = model_of(path) or path
    return digest_of([*described(path), *weight_files(path)], tell)


def described(path: Path) -> list[Path]:
    return sorted({file for pattern in DESCRIBING for file in path.glob(pattern)})


def check_unchanged(path: str | Path, expected: str) -> None:
    """Refuse a model whose files are no longer those that ``expected`` is the digest of."""
    if expected and (found := digest(Path(path))) != expected:
        raise JobChangedError(
            f"the files of {path} have changed since this run looked at them ({shown(expected)} then, {shown(found)} now): "
            "put them back as they were and run this again, or begin another job with another --out"
        )


def shown(digest: str) -> str:
    """The digest's first characters, for a sentence."""
    return f"{digest.rpartition(':')[2][:12]}…"


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0
