"""A row's state in its grammar: the tokens so far, and which may come next.

The set of allowed tokens depends on the tokens written so far and on nothing else: not on candidates that were tried and
rejected, on where an earlier process stopped, or on other rows with the same grammar. Where the grammar forces text,
llguidance tokenizes it once, as the tokenizer would; only these tokens are allowed until all of them are written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from outrider.workers.constraints.grammars import LIMITS, BadConstraint, shortened

# This many compiled grammars are kept: most jobs have a few, each for many rows.
MOST_COMPILED = 64
# A word of a mask that allows every token.
EVERYTHING = np.uint32(0xFFFFFFFF)
# A mask that takes at least this long to compute may be left open, which allows every token; the choice is checked later.
LEAST_OPEN_SECONDS = 2e-4

Result = TypeVar("Result")


class CompiledGrammar:
    """A grammar, and a matcher of it whose copies share one lexer.

    The library keeps every state that the lexer of a grammar has been in, for all rows and candidates, and fails where they
    exceed a limit. So it may fail at one row because of what other rows wrote or a draft proposed.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        self.tokenizer = tokenizer
        self._grammar = grammar
        self._matcher = self._compile()

    @property
    def problem(self) -> str:
        """Why it cannot be compiled; "" where it can."""
        return self._matcher.get_error()

    def copy(self) -> LLMatcher:
        return self._matcher.deep_copy()

    def with_new_lexer(self) -> LLMatcher:
        """A copy with an empty lexer; later copies share it."""
        self._matcher = self._compile()
        return self.copy()

    def _compile(self) -> LLMatcher:
        return LLMatcher(self.tokenizer, self._grammar, log_level=0, limits=LIMITS)


class Matching:
    """One row's state in its grammar. ``ends`` are the end tokens; the first of them is written where the text must end.

    An end token is allowed wherever the grammar allows the text to end, and is no part of the text.

    Candidates are tried when they arrive, again when masks are made, and again when they are committed. So ``truncate``
    only sets the row's length: the library's matcher stays ahead, tokens that it has consumed already cost nothing, and it
    is rewound only for another token or a mask.
    """

    def __init__(self, compiled: CompiledGrammar, ends: Sequence[int], vocabulary: int) -> None:
        """``vocabulary`` is how many tokens the model scores; its tokenizer may have more."""
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._tokenizer = compiled.tokenizer
        self._matcher = compiled.copy()
        self._end_bit = self._tokenizer.eos_token
        self._scratch = np.zeros(-(-self._tokenizer.vocab_size // 32), np.uint32)
        self._ends = tuple(ends)
        # The tokens that the matcher has consumed; the row has the first ``_length`` of them.
        self._tokens: list[int] = []
        self._length = 0
        # Before the first token, and after each: the tokens that are forced to come next, as far as they are known.
        self._forced: list[tuple[int, ...]] = [()]
        self._forced[0] = self._with_new_lexer_on_error(self._forced_tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens[: self._length]

    def last(self, count: int) -> Sequence[int]:
        """The last ``count`` tokens, or all of fewer."""
        return self._tokens[max(0, self._length - count) : self._length]

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next, as far as known; further ones may be forced after them."""
        return self._forced[self._length]

    @property
    def ended(self) -> bool:
        return self._length > 0 and self._tokens[self._length - 1] in self._ends

    @property
    def problem(self) -> str:
        """The library's error; "" where there is none."""
        return shortened(self._matcher.get_error()) if self._matcher.is_error() else ""

    def take(self, token: int) -> bool:
        """Append the token; False, and nothing is changed, where it is not allowed."""
        forced = self.forced
        # An engine's choice is -1 where its mask allowed no token.
        if token < 0 or self.ended or (forced and token != forced[0]):
            return False
        if self._length < len(self._tokens):
            if self._tokens[self._length] == token:
                self._length += 1
                return True
            self._rewind_matcher()
        if token in self._ends:
            if not forced and not self._with_new_lexer_on_error(lambda: self._may_end_by(token)):
                return False
            self._append(token, ())
            return True
        if not self._with_new_lexer_on_error(lambda: self._consume(token, known=bool(forced))):
            return False
        self._append(token, forced[1:])
        if not self.forced:
            self._forced[-1] = self._with_new_lexer_on_error(self._forced_tokens)
        return True

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        if not self.take(token):
            self.recover()
            return False
        self.truncate(len(self) - 1)
        return True

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if length < self._length:
            self._length = length
            self.recover()

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may come next. ``mask`` is as long as the model's vocabulary asks for."""
        mask[:] = 0
        if self.ended:
            return
        if forced := self.forced:
            _allow(mask, forced[0])
            return
        self._rewind_matcher()
        words = self._scratch
        self._with_new_lexer_on_error(lambda: self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes))
        if self._matcher.is_error():
            return
        end_word, end_bit = self._end_bit // 32, np.uint32(1 << self._end_bit % 32)
        may_end = bool(words[end_word] & end_bit)
        words[end_word] &= ~end_bit
        shorter = min(len(words), len(mask))
        mask[:shorter] = words[:shorter]
        if may_end:
            # Where nothing but the end is allowed, only one end token is, whether `_forced_tokens` has noticed that or not.
            for end in self._ends if words.any() else self._ends[:1]:
                _allow(mask, end)

    def recover(self) -> None:
        """After the library failed at a token that was only tried."""
        if self._matcher.is_error():
            self._replace_matcher(self._compiled.copy())

    def _with_new_lexer_on_error(self, step: Callable[[], Result]) -> Result:
        """The result of the step; where the library fails at it, that of the same step with a lexer for this row alone."""
        result = step()
        if self._matcher.is_error():
            self._replace_matcher(self._compiled.with_new_lexer())
            result = step()
        return result

    def _may_end_by(self, token: int) -> bool:
        return self._matcher.is_accepting() or self._matcher.validate_tokens([token]) == 1

    def _consume(self, token: int, known: bool) -> bool:
        """``known``: it is the only one that is allowed."""
        return (known or self._matcher.validate_tokens([token]) == 1) and self._matcher.consume_token(token)

    def _forced_tokens(self) -> tuple[int, ...]:
        forced = self._matcher.compute_ff_tokens()
        fits = self._matcher.validate_tokens(forced) if forced else 0
        if forced and not fits:
            # The library tokenizes text that reads like a special token as that token, and then refuses it itself.
            forced = self._tokenizer.greedy_tokenize(self._matcher.compute_ff_bytes().decode(errors="ignore"))
            fits = self._matcher.validate_tokens(forced)
        forced = forced[:fits]
        if not forced and self._matcher.is_stopped() and not self._matcher.is_error():
            return self._ends[:1]
        return tuple(takewhile(lambda token: token < self._vocabulary, forced))

    def _append(self, token: int, forced: tuple[int, ...]) -> None:
        self._tokens.append(token)
        self._forced.append(forced)
        self._length += 1

    def _rewind_matcher(self) -> None:
        """Take the matcher back to the row's length."""
        surplus = len(self._tokens) - self._length
        if not surplus:
            return
        consumed = surplus - (self._tokens[-1] in self._ends)  # the library is never given an end token
        del self._tokens[self._length :], self._forced[self._length + 1 :]
        if consumed and not self._matcher.rollback(consumed):
            self._replace_matcher(self._compiled.copy())

    def _replace_matcher(self, matcher: LLMatcher) -> None:
        """A matcher that has failed stays failed: let this other one consume the row's tokens."""
        del self._tokens[self._length :], self._forced[self._length + 1 :]
        self._matcher = matcher
        consumed = self._tokens[:-1] if self.ended else self._tokens
        if consumed:
            self._matcher.consume_tokens(list(consumed))


def _allow(mask: NDArray[np.uint32], token: int) -> None:
    if token // 32 < len(mask):
        mask[token // 32] |= np.uint32(1 << token % 32)


class Grammars:
    """Compiled grammars over one tokenizer, the model's own. For one thread at a time."""

    def __init__(self, load: Callable[[], LLTokenizer], vocabulary: int) -> None:
        """``load`` is called when the first row comes that needs it: it takes a second for a large vocabulary."""
        self._load = load
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def load(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        return self._tokenizer

    def matching(self, grammar: str, ends: Sequence[int]) -> Matching:
        """The state of an empty answer; a BadConstraint where the grammar cannot be compiled."""
        tokenizer = self.load()
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = CompiledGrammar(tokenizer, grammar)
            if len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        if compiled.problem:
            raise BadConstraint(f"it cannot be compiled: {shortened(compiled.problem)}")
        eos = tokenizer.eos_token
        first = [eos] if eos in ends else []
        return Matching(compiled, [*first, *(end for end in ends if end != eos)], self._vocabulary)
