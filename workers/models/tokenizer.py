"""Tokenizers: encoding prompts, decoding answers, and the check that a draft's token ids mean the same as the target's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from outrider.workers.constraints.grammars import BadConstraint
from outrider.workers.errors import ModelError, PairError, first_line
from outrider.workers.models import kept_tokenizers
from outrider.workers.models.fast_tokenizer import AnyTokenizer, FastTokenizer, TextCoder, fast_inside
from outrider.workers.models.files import FAST, holds_tokenizer
from outrider.workers.models.formats.gguf.file import is_gguf
from outrider.workers.models.headers import quoted
from outrider.workers.models.hide_torch import import_transformers
from outrider.workers.models.kept_tokenizers import KeptTokenizer
from outrider.workers.models.limits import limited
from outrider.workers.models.longest_token import longest_token
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.reasoning import (
    CHANNEL,
    CHANNEL_MARKS,
    CLOSING_TAG,
    MESSAGE,
    OPENING_TAG,
    THOUGHTS,
    ReasoningTags,
)
from outrider.workers.models.template_variables import template_variables
from outrider.workers.models.token_bytes import TokenizerBytes

# Limits of CPU time. The largest tokenizers load in 3 s; without a tokenizer.json one has to be converted first.
LOADING_SECONDS, CONVERTING_SECONDS, KEEPING_SECONDS = 20.0, 300.0, 60.0
LONGEST_ERROR = 300


class Tokenizer:
    """The tokenizer of a model's directory or GGUF file. transformers is loaded only for chat templates, and for a
    tokenizer that is not kept on disk (``kept_tokenizers.py``)."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._place = kept_tokenizers.place_of(self._path)
        kept = None if self._place is None else kept_tokenizers.recall(self._place)
        self._coder: TextCoder = AnyTokenizer(self._whole) if kept is None else kept.fast
        self.chats = self._whole.chat_template is not None if kept is None else kept.chats
        with _sentence(self._path):
            self.token_bytes = TokenizerBytes(self._coder)

    def keep(self) -> None:
        """Keep the tokenizer on disk for later processes, if possible. Takes at least as long as loading it."""
        if not isinstance(self._coder, AnyTokenizer) or (self._place is not None and kept_tokenizers.is_left(self._place)):
            return
        fast = fast_inside(self._whole)
        if fast is not None:
            self._coder = fast
        # Not if the files have changed meanwhile.
        if self._place is not None and kept_tokenizers.place_of(self._path) == self._place:
            kept_tokenizers.remember(self._place, None if fast is None else KeptTokenizer(fast, self.chats))

    @cached_property
    def _whole(self) -> Any:
        """The tokenizer of transformers."""
        with _sentence(self._path):
            import_transformers()
            if is_gguf(self._path):
                from outrider.workers.models.formats.gguf.tokenizer import gguf_tokenizer

                return gguf_tokenizer(self._path)
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(str(self._path), local_files_only=True, trust_remote_code=False)

    def load_template(self) -> None:
        """Load transformers' tokenizer now, which takes seconds, for its chat template. Refused if the files have
        changed."""
        if not self.chats or "_whole" in self.__dict__:
            return
        _ = self._whole
        if kept_tokenizers.place_of(self._path) != self._place:
            del self._whole
            raise ModelError(f"{self._path} changed while its model is in use: start again to read the new files")

    @cached_property
    def longest_token(self) -> int | None:
        """How many characters of a text one token can stand for at most; None if that is not known."""
        # transformers' class around another tokenizer may change texts in any way.
        return longest_token(self._coder.fast) if isinstance(self._coder, FastTokenizer) else None

    def encode(self, text: str) -> list[int]:
        return self._coder.encode([text], framed=True)[0]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """``encode`` for each text, several times as fast."""
        return self._coder.encode(texts, framed=True)

    def render(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A conversation rendered by the model's chat template, up to the beginning of the answer.

        ``options`` are variables of the template, such as ``enable_thinking``.
        """
        text: str = self._whole.apply_chat_template(
            messages, tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **(options or {})
        )
        return text

    def template_variables(self, tools: bool) -> frozenset[str]:
        """The variables of the chat template for rows with tools, or without, except those that every template gets."""
        given = frozenset(map(str, self._whole.special_tokens_map))
        return template_variables(self._template(tools)) - given

    @cached_property
    def reasoning_tags(self) -> ReasoningTags | None:
        """The tags around thoughts, if the chat template has them and decoded texts contain them."""
        if not self.chats:
            return None
        if THOUGHTS in self._template():
            return ReasoningTags(CHANNEL, MESSAGE, tuple(self.encode_rendered(CHANNEL)), self.special_among(CHANNEL_MARKS))
        if CLOSING_TAG not in self._template():
            return None
        # Tags that are special tokens are missing from decoded texts.
        if {OPENING_TAG, CLOSING_TAG} & {str(token) for token in self._whole.all_special_tokens}:
            return None
        return ReasoningTags(OPENING_TAG, CLOSING_TAG, tuple(self.encode_rendered(OPENING_TAG)))

    def _template(self, tools: bool = False) -> str:
        """The chat template for rows with tools, or without, if the model has several."""
        text: str = self._whole.get_chat_template(tools=[] if tools else None)
        return text

    def encode_rendered(self, text: str) -> list[int]:
        # The template writes the special tokens itself.
        return self._coder.encode([text], framed=False)[0]

    def decode(self, tokens: Sequence[int], shown: Collection[int] = ()) -> str:
        """Special tokens are left out, but for those that are ``shown``."""
        wanted, skipped = list(tokens), True
        if shown:
            wanted = [token for token in tokens if token in shown or not self.token_bytes.silent(token)]
            skipped = False
        return self._coder.decode(wanted, skipped)

    def special_among(self, marks: Collection[str]) -> tuple[int, ...]:
        """The ids of those marks that are special tokens (and so left out of texts)."""
        return tuple(
            sorted(token for mark in marks if (token := self._added(mark)) is not None and self.token_bytes.silent(token))
        )

    def tokens_of(self, vocabulary: LLTokenizer) -> Callable[[str], int | None]:
        """For grammars: a function from a mark to its special token, or None."""

        def token_of(mark: str) -> int | None:
            token = self._added(mark)
            return token if token is not None and vocabulary.is_special_token(token) else None

        return token_of

    def _added(self, mark: str) -> int | None:
        return next((token for token, each in self._coder.added.items() if str(each.content) == mark), None)

    def for_grammars(self, vocabulary: int, end: int) -> LLTokenizer:
        """The tokenizer in llguidance's form, for a model that scores ``vocabulary`` ids. Takes a second for a large
        one."""
        if self._coder.fast is None:
            raise BadConstraint("the model's tokenizer has no tokenizer.json, which constraints need")
        fast = copy(self._coder.fast)
        fast.no_padding()
        fast.no_truncation()
        size = 1 + max(self._coder.vocabulary().values(), default=0)
        return LLTokenizer(fast.to_str(), n_vocab=max(size, vocabulary), eos_token=end)

    def meanings(self) -> dict[int, str]:
        """The token of every id."""
        return {id_: token for token, id_ in self._coder.vocabulary().items()}


@contextmanager
def _sentence(path: Path) -> Iterator[None]:
    """Turn exceptions into a ModelError about the tokenizer of this model."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, ModelError):
        raise
    except BaseException as error:  # broken files raise many types; a panic in Rust is no Exception
        if path.is_dir() and not any(holds_tokenizer(file) for file in path.iterdir()):
            raise ModelError(f"{path} holds no tokenizer: neither {FAST} nor the files that it is made from") from None
        raise ModelError(f"the tokenizer of {path} cannot be loaded: {said(error)}") from None


@lru_cache(maxsize=2)
def load_tokenizer(path: str) -> Tokenizer:
    """Load within limits of memory and time, which may end the process."""
    with limited(_loading_seconds(path)):
        tokenizer = Tokenizer(path)
    with limited(KEEPING_SECONDS):
        tokenizer.keep()
    return tokenizer


def with_template(path: str) -> Tokenizer:
    """The same tokenizer, with the model's chat template loaded."""
    tokenizer = load_tokenizer(path)
    with limited(_loading_seconds(path)):
        tokenizer.load_template()
    return tokenizer


def _loading_seconds(path: str) -> float:
    return LOADING_SECONDS if (Path(path) / FAST).is_file() else CONVERTING_SECONDS


def said(error: BaseException) -> str:
    """The first line of a library's error, printable and shortened, for a sentence."""
    line = "".join(letter if letter.isprintable() else " " for letter in first_line(error)).rstrip(",:; ")
    return line if len(line) <= LONGEST_ERROR else f"{line[:LONGEST_ERROR]}…"


def check_pair(target: ModelInfo, draft: ModelInfo) -> None:
    """Refuse a draft in which an id stands for another token than in the target.

    Ids that only one of the two has (padding, added tokens) are harmless: they are never accepted.
    """
    if (found := _other_meanings(target, draft, "target", "draft")) is not None:
        raise PairError(
            f'the draft "{draft.name}" does not fit "{target.name}": {found}; choose a draft with the '
            "target's tokenizer, or --draft lookup"
        )


def check_comparable(model: ModelInfo, against: ModelInfo) -> None:
    """Refuse to compare models whose ids stand for different tokens."""
    if (found := _other_meanings(model, against, "model", "other")) is not None:
        raise PairError(
            f'"{model.name}" cannot be compared with "{against.name}": {found}; choose a model with the same '
            "tokenizer, or score each by itself"
        )


def _other_meanings(model: ModelInfo, other: ModelInfo, role: str, others_role: str) -> str | None:
    """How many shared ids stand for different tokens, and the first of them; None where all agree."""
    theirs, ours = load_tokenizer(other.path).meanings(), load_tokenizer(model.path).meanings()
    shared = [id_ for id_ in theirs.keys() & ours.keys() if id_ < other.vocabulary]
    different = sorted(id_ for id_ in shared if theirs[id_] != ours[id_])
    if shared and not different:
        return None
    first = different[0] if different else 0
    return (
        f"{len(different):,} of {len(shared):,} token ids mean something else, first id {first}: "
        f"{quoted(theirs.get(first))} in the {others_role}, {quoted(ours.get(first))} in the {role}"
    )
