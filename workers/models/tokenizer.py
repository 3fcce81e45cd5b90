"""Tokenizers: prompts to ids, ids to text, and whether a draft's ids mean what the target's mean."""

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
from outrider.workers.models.fast_tokenizer import AnyTokenizer, TextCoder, fast_inside
from outrider.workers.models.files import FAST, holds_tokenizer
from outrider.workers.models.formats.gguf.file import is_gguf
from outrider.workers.models.headers import quoted
from outrider.workers.models.hide_torch import import_transformers
from outrider.workers.models.kept_tokenizers import KeptTokenizer
from outrider.workers.models.limits import limited
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

# Of the processor. The largest take three to be loaded; from files of other kinds a tokenizer has to be made first.
LOADING_SECONDS, CONVERTING_SECONDS, KEEPING_SECONDS = 20.0, 300.0, 60.0
LONGEST_SAID = 300


class Tokenizer:
    """Of a model's directory or GGUF file. transformers is loaded where it is needed: for chat templates, and for what was
    not kept (``kept_tokenizers.py``)."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._place = kept_tokenizers.place_of(self._path)
        kept = None if self._place is None else kept_tokenizers.recall(self._place)
        self._coder: TextCoder = AnyTokenizer(self._whole) if kept is None else kept.fast
        self.chats = self._whole.chat_template is not None if kept is None else kept.chats
        with _sentence(self._path):
            self.token_bytes = TokenizerBytes(self._coder)

    def keep(self) -> None:
        """On disk, for whoever loads it next, where that can be; it takes as long as loading it, or longer."""
        if not isinstance(self._coder, AnyTokenizer) or (self._place is not None and kept_tokenizers.is_left(self._place)):
            return
        fast = fast_inside(self._whole)
        if fast is not None:
            self._coder = fast
        # Of files that were changed meanwhile, it may be neither the old ones' nor the new ones'.
        if self._place is not None and kept_tokenizers.place_of(self._path) == self._place:
            kept_tokenizers.remember(self._place, None if fast is None else KeptTokenizer(fast, self.chats))

    @cached_property
    def _whole(self) -> Any:
        """One of transformers'."""
        with _sentence(self._path):
            import_transformers()
            if is_gguf(self._path):
                from outrider.workers.models.formats.gguf.tokenizer import gguf_tokenizer

                return gguf_tokenizer(self._path)
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(str(self._path), local_files_only=True, trust_remote_code=False)

    def load_template(self) -> None:
        """What else is done when a conversation comes: it takes seconds. Of files that are no longer the same, refused."""
        if not self.chats or "_whole" in self.__dict__:
            return
        _ = self._whole
        if kept_tokenizers.place_of(self._path) != self._place:
            del self._whole
            raise ModelError(f"{self._path} was changed while its model is in use: start anew, and it is read as it is now")

    def encode(self, text: str) -> list[int]:
        return self._coder.encode([text], framed=True)[0]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """What ``encode`` gives for each, several times as fast."""
        return self._coder.encode(texts, framed=True)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation in the model's own template, up to where the answer begins."""
        return self.encode_rendered(self.render(messages))

    def render(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """A conversation as the model's own template writes it, up to where the answer begins.

        ``options`` are the template's own variables, ``enable_thinking`` for one.
        """
        text: str = self._whole.apply_chat_template(
            messages, tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **(options or {})
        )
        return text

    def template_variables(self, tools: bool) -> frozenset[str]:
        """What the chat template asks for beside what every template is given, where a row has tools or has none."""
        given = frozenset(map(str, self._whole.special_tokens_map))
        return template_variables(self._template(tools)) - given

    @cached_property
    def reasoning_tags(self) -> ReasoningTags | None:
        """Where the chat template tells a model's thoughts from its answer, and texts show it."""
        if not self.chats:
            return None
        if THOUGHTS in self._template():
            return ReasoningTags(CHANNEL, MESSAGE, tuple(self.encode_rendered(CHANNEL)), self.special_among(CHANNEL_MARKS))
        if CLOSING_TAG not in self._template():
            return None
        # Special tokens are left out of texts.
        if {OPENING_TAG, CLOSING_TAG} & {str(token) for token in self._whole.all_special_tokens}:
            return None
        return ReasoningTags(OPENING_TAG, CLOSING_TAG, tuple(self.encode_rendered(OPENING_TAG)))

    def _template(self, tools: bool = False) -> str:
        """Of several, the one that is used where a row has tools, or has none."""
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
        """The ids of those marks that are special tokens, which texts leave out."""
        return tuple(
            sorted(token for mark in marks if (token := self._added(mark)) is not None and self.token_bytes.silent(token))
        )

    def tokens_of(self, vocabulary: LLTokenizer) -> Callable[[str], int | None]:
        """For grammars: the token that a mark is, where no other text is spelled with it."""

        def token_of(mark: str) -> int | None:
            token = self._added(mark)
            return token if token is not None and vocabulary.is_special_token(token) else None

        return token_of

    def _added(self, mark: str) -> int | None:
        return next((token for token, each in self._coder.added.items() if str(each.content) == mark), None)

    def for_grammars(self, vocabulary: int, end: int) -> LLTokenizer:
        """The same tokens as grammars need them, for a model that scores ``vocabulary`` ids. A large one takes a second."""
        if self._coder.fast is None:
            raise BadConstraint("the model's tokenizer has no tokenizer.json, by which alone a constraint can be kept")
        fast = copy(self._coder.fast)
        fast.no_padding()
        fast.no_truncation()
        size = 1 + max(self._coder.vocabulary().values(), default=0)
        return LLTokenizer(fast.to_str(), n_vocab=max(size, vocabulary), eos_token=end)

    def meanings(self) -> dict[int, str]:
        """Every id with the token it stands for."""
        return {id_: token for token, id_ in self._coder.vocabulary().items()}


@contextmanager
def _sentence(path: Path) -> Iterator[None]:
    """What fails within is said in a sentence about the tokenizer of this model."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, ModelError):
        raise
    except BaseException as error:  # whatever a broken file leads to, in many types; a panic in Rust is no Exception
        if path.is_dir() and not any(holds_tokenizer(file) for file in path.iterdir()):
            raise ModelError(f"{path} holds no tokenizer: neither {FAST} nor what one is made of") from None
        raise ModelError(f"the tokenizer of {path} cannot be loaded: {said(error)}") from None


@lru_cache(maxsize=2)
def load_tokenizer(path: str) -> Tokenizer:
    """In a process that may be ended: within limits."""
    with limited(_loading_seconds(path)):
        tokenizer = Tokenizer(path)
    with limited(KEEPING_SECONDS):
        tokenizer.keep()
    return tokenizer


def with_template(path: str) -> Tokenizer:
    """The same one, which has read the model's chat template by now."""
    tokenizer = load_tokenizer(path)
    with limited(_loading_seconds(path)):
        tokenizer.load_template()
    return tokenizer


def _loading_seconds(path: str) -> float:
    return LOADING_SECONDS if (Path(path) / FAST).is_file() else CONVERTING_SECONDS


def said(error: BaseException) -> str:
    """What a foreign library says of a model's file, as part of one line."""
    line = "".join(letter if letter.isprintable() else " " for letter in first_line(error)).rstrip(",:; ")
    return line if len(line) <= LONGEST_SAID else f"{line[:LONGEST_SAID]}…"


def check_pair(target: ModelInfo, draft: ModelInfo) -> None:
    """Refuse a draft that may propose an id which means another token in the target.

    Ids that only one of the two has are harmless (padding, added tokens): they are never accepted.
    """
    if (found := _other_meanings(target, draft, "target", "draft")) is not None:
        raise PairError(
            f'the draft "{draft.name}" does not fit "{target.name}": {found}; choose a draft with the '
            "target's tokenizer, or --draft lookup"
        )


def check_comparable(model: ModelInfo, against: ModelInfo) -> None:
    """Refuse to hold a model against one whose scores are of other tokens."""
    if (found := _other_meanings(model, against, "model", "other")) is not None:
        raise PairError(
            f'"{model.name}" cannot be held against "{against.name}": {found}; choose a model with the same '
            "tokenizer, or score each by itself"
        )


def _other_meanings(model: ModelInfo, other: ModelInfo, role: str, others_role: str) -> str | None:
    """How many ids mean different tokens in the two, and the first of them; None where all that both have mean the same."""
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
