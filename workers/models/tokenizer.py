"""Tokenizers: prompts to ids, ids to text, and whether a draft's ids mean what the target's mean."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from outrider.workers.errors import ModelError, PairError, first_line
from outrider.workers.models.cards import ModelCard
from outrider.workers.models.files import FAST, holds_tokenizer
from outrider.workers.models.headers import quoted
from outrider.workers.models.limits import limited
from outrider.workers.models.pieces import TokenizerPieces

# Of the processor. The largest take three to be loaded; from files of other kinds a tokenizer has to be made first.
LOADING_SECONDS, CONVERTING_SECONDS = 15.0, 300.0
LONGEST_SAID = 300


class Tokenizer:
    def __init__(self, path: str | Path) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            self.pieces = TokenizerPieces(self._tokenizer)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # whatever a broken file leads to, in many types; a panic in Rust is no Exception
            if not any(holds_tokenizer(file) for file in Path(path).iterdir()):
                raise ModelError(f"{path} holds no tokenizer: neither {FAST} nor what one is made of") from None
            raise ModelError(f"the tokenizer of {path} cannot be loaded: {said(error)}") from None

    @property
    def chats(self) -> bool:
        return self._tokenizer.chat_template is not None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """What ``encode`` gives for each, several times as fast."""
        return list(self._tokenizer(texts, return_attention_mask=False, return_token_type_ids=False)["input_ids"])

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation in the model's own template, up to where the answer begins."""
        return self.encode_rendered(self.render(messages))

    def render(self, messages: list[dict[str, str]]) -> str:
        """A conversation as the model's own template writes it, up to where the answer begins."""
        text: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text

    def encode_rendered(self, text: str) -> list[int]:
        # The template writes the special tokens itself.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def meanings(self) -> dict[int, str]:
        """Every id with the token it stands for."""
        return {id_: token for token, id_ in self._tokenizer.get_vocab().items()}


@lru_cache(maxsize=2)
def load_tokenizer(path: str) -> Tokenizer:
    """In a process that may be ended: within limits."""
    with limited(LOADING_SECONDS if (Path(path) / FAST).is_file() else CONVERTING_SECONDS):
        return Tokenizer(path)


def said(error: BaseException) -> str:
    """What a foreign library says of a model's file, as part of one line."""
    line = "".join(letter if letter.isprintable() else " " for letter in first_line(error)).rstrip(",:; ")
    return line if len(line) <= LONGEST_SAID else f"{line[:LONGEST_SAID]}…"


def check_pair(target: ModelCard, draft: ModelCard) -> None:
    """Refuse a draft that may propose an id which means another token in the target.

    Ids that only one of the two has are harmless (padding, added tokens): they are never accepted.
    """
    theirs, ours = load_tokenizer(draft.path).meanings(), load_tokenizer(target.path).meanings()
    shared = [id_ for id_ in theirs.keys() & ours.keys() if id_ < draft.vocabulary]
    different = sorted(id_ for id_ in shared if theirs[id_] != ours[id_])
    if different or not shared:
        first = different[0] if different else 0
        raise PairError(
            f'the draft "{draft.name}" does not fit "{target.name}": {len(different):,} of {len(shared):,} token ids mean '
            f"something else, first id {first}: {quoted(theirs.get(first))} in the draft, {quoted(ours.get(first))} in the "
            "target; choose a draft with the target's tokenizer, or --draft lookup"
        )
