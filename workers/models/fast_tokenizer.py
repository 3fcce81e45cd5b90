"""Encodes and decodes with the fast tokenizer (of the package ``tokenizers``) inside most tokenizers of transformers.

It is used alone if transformers' class around it changes neither texts nor ids. That is decided by the attributes that the
class defines: an unknown one is assumed to change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

# Attributes of such classes that neither encode nor decode: their construction, and what a model gets beside the ids.
HARMLESS = frozenset(
    (
        *("__module__", "__doc__", "__init__", "__annotations__", "__dict__", "__weakref__"),
        *("__static_attributes__", "__firstlineno__"),
        *("vocab_files_names", "model", "model_input_names", "padding_side", "slow_tokenizer_class"),
        *("pretrained_vocab_files_map", "build_inputs_with_special_tokens"),
    )
)


class TextCoder(Protocol):
    """Encodes texts, decodes ids, and knows its vocabulary."""

    @property
    def fast(self) -> Fast | None:
        """The fast tokenizer, where there is one."""

    @property
    def added(self) -> dict[int, AddedToken]:
        """The added tokens, most of them special ones."""

    def encode(self, texts: list[str], framed: bool) -> list[list[int]]:
        """``framed``: with the special tokens that the tokenizer puts around a text."""

    def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...

    def vocabulary(self) -> dict[str, int]: ...

    def token(self, id_: int) -> str | None:
        """The token's string; None for an id without a token."""


class FastTokenizer:
    """``fast`` neither truncates nor pads. ``splits_special``: text that reads like a special token is encoded as text."""

    def __init__(self, fast: Fast, splits_special: bool) -> None:
        self.fast = fast
        self.splits_special = splits_special
        fast.encode_special_tokens = splits_special

    @cached_property
    def added(self) -> dict[int, AddedToken]:
        found: dict[int, AddedToken] = self.fast.get_added_tokens_decoder()
        return found

    def encode(self, texts: list[str], framed: bool) -> list[list[int]]:
        return [encoding.ids for encoding in self.fast.encode_batch(texts, add_special_tokens=framed)]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        text: str = self.fast.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self.fast.get_vocab(with_added_tokens=True)
        return found

    def token(self, id_: int) -> str | None:
        found: str | None = self.fast.id_to_token(id_)
        return found


class AnyTokenizer:
    """A tokenizer of transformers, unchanged."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    @property
    def fast(self) -> Fast | None:
        fast: Fast | None = getattr(self._whole, "backend_tokenizer", None)
        return fast

    @cached_property
    def added(self) -> dict[int, AddedToken]:
        found: dict[int, AddedToken] = self._whole.added_tokens_decoder
        return found

    def encode(self, texts: list[str], framed: bool) -> list[list[int]]:
        if len(texts) == 1:
            return [self._whole(texts[0], add_special_tokens=framed)["input_ids"]]
        encoded = self._whole(texts, add_special_tokens=framed, return_attention_mask=False, return_token_type_ids=False)
        return list(encoded["input_ids"])

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        text: str = self._whole.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return text

    def vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._whole.get_vocab()
        return found

    def token(self, id_: int) -> str | None:
        found: str | None = self._whole.convert_ids_to_tokens(id_)
        return found


def fast_inside(whole: Any) -> FastTokenizer | None:
    """The fast tokenizer inside one of transformers', if the latter changes neither texts nor ids; else None."""
    from transformers import PreTrainedTokenizerFast

    kind = type(whole)
    if not isinstance(whole, PreTrainedTokenizerFast):
        return None
    own = kind.__mro__[: kind.__mro__.index(PreTrainedTokenizerFast)]
    if any(not vars(each).keys() <= HARMLESS for each in own) or any(map(callable, vars(whole).values())):
        return None
    try:
        written = whole.backend_tokenizer.to_str()
        fast = Fast.from_str(written)
        # Scores are written as decimals: equal texts mean that no digit was lost.
        same = fast.to_str() == written
        fast.no_padding()
        fast.no_truncation()
        found = FastTokenizer(fast, bool(whole.split_special_tokens))
        return found if same and _agree(found, AnyTokenizer(whole)) else None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # it cannot be serialized, parsed or used to encode; a panic in Rust is no Exception
        return None


def _agree(found: FastTokenizer, whole: AnyTokenizer) -> bool:
    """Whether both encode and decode all added tokens alike. They may not: a token that was added twice with different
    flags is serialized with the last ones only."""
    contents = [str(token.content) for token in whole.added.values()]
    texts = [text for each in contents for text in (each, f" {each} {each}")]
    encoded = whole.encode(texts, framed=False) if texts else []
    return (
        found.added == whole.added
        and all(found.token(id_) == whole.token(id_) for id_ in whole.added)
        and (not texts or found.encode(texts, framed=False) == encoded)
        and all(
            found.decode(ids, skip_special) == whole.decode(ids, skip_special)
            for ids in [*encoded, *([id_] for id_ in whole.added)]
            for skip_special in (True, False)
        )
    )
