"""Tokenizers: prompts to ids, ids to text, and whether a draft's ids mean what the target's mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from outrider.workers.errors import ModelError, PairError, first_line
from outrider.workers.models.cards import ModelCard
from outrider.workers.models.pieces import TokenizerPieces


class Tokenizer:
    def __init__(self, path: str | Path) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a broken file leads to, in many types
            raise ModelError(f"the tokenizer of {path} cannot be loaded: {first_line(error)}") from error

        self.pieces = TokenizerPieces(self._tokenizer)

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


def check_pair(target: ModelCard, draft: ModelCard) -> None:
    """Refuse a draft that may propose an id which means another token in the target.

    Ids that only one of the two has are harmless (padding, added tokens): they are never accepted.
    """
    theirs, ours = Tokenizer(draft.path).meanings(), Tokenizer(target.path).meanings()
    shared = [id_ for id_ in theirs.keys() & ours.keys() if id_ < draft.vocabulary]
    different = sorted(id_ for id_ in shared if theirs[id_] != ours[id_])
    if different or not shared:
        first = different[0] if different else 0
        raise PairError(
            f'the draft "{draft.name}" does not fit "{target.name}": {len(different):,} of {len(shared):,} token ids mean '
            f"something else, first id {first}: {theirs.get(first)!r} in the draft, {ours.get(first)!r} in the target; "
            "choose a draft with the target's tokenizer, or --draft lookup"
        )
