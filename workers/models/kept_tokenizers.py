"""Fast tokenizers kept on disk, since loading transformers for one takes a second or two in each process.

A file holds the fast tokenizer as transformers made it from the model's files, under a digest of these and of the
libraries' versions.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer as Fast

from outrider.workers.models.cache_files import own_folder, read_own, write_own
from outrider.workers.models.digests import FileState, digest_of
from outrider.workers.models.fast_tokenizer import FastTokenizer
from outrider.workers.models.files import LONGEST_TOKENIZER
from outrider.workers.models.formats.gguf.file import is_gguf
from outrider.workers.models.model_info import described

# Raised with the format of these files, and with the rule by which a tokenizer may be kept.
KIND = "outrider-tokenizer-6"
MOST_KEPT = 32
# The content for a tokenizer that must be loaded by transformers.
LEFT = b'"transformers"\n'

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptTokenizer:
    """``chats``: whether the model has a chat template."""

    fast: FastTokenizer
    chats: bool


def place_of(path: Path) -> Path | None:
    """The file of this model's tokenizer in the cache; None for a GGUF file that was written within the last seconds."""
    if is_gguf(path):
        # The digest of a GGUF file reads all of it, unless it is remembered, which needs a stable file.
        if not FileState.of(path).stable():
            return None
        files = [path]
    else:
        files = described(path)
    known = f"{KIND} {version('transformers')} {version('tokenizers')} {digest_of(files)}"
    return own_folder("tokenizers") / hashlib.sha256(known.encode()).hexdigest()[:40]


def recall(place: Path) -> KeptTokenizer | None:
    content = read_own(place, 2 * LONGEST_TOKENIZER)
    head, _, text = (content or b"").partition(b"\n")
    try:
        known = json.loads(head)
        if known["sha256"] != hashlib.sha256(text).hexdigest():
            return None
        with suppress(OSError):  # marks it as used; a read-only cache cannot
            os.utime(place)
        return KeptTokenizer(FastTokenizer(Fast.from_buffer(text), known["splits_special"]), known["chats"])
    except (ValueError, KeyError, TypeError):
        return None


def is_left(place: Path) -> bool:
    """Whether it is remembered that this tokenizer must be loaded by transformers."""
    return read_own(place, len(LEFT)) == LEFT


def remember(place: Path, tokenizer: KeptTokenizer | None) -> None:
    """Keep a tokenizer, or with None that it must be loaded by transformers. If that cannot be written, nothing is kept."""
    content = LEFT
    if tokenizer is not None:
        text = tokenizer.fast.fast.to_str().encode()
        known = {
            "chats": tokenizer.chats,
            "splits_special": tokenizer.fast.splits_special,
            "sha256": hashlib.sha256(text).hexdigest(),
        }
        content = json.dumps(known).encode() + b"\n" + text
    try:
        write_own(place, content, MOST_KEPT)
    except OSError as error:
        logger.info("a tokenizer is not kept: %s", error)
