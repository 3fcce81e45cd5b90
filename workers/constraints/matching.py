"""How far a row's answer has come in its grammar, and what may come next.

The set of allowed tokens is a function of the tokens written so far, and of nothing else: not of how many were tried and
taken back, nor of where an earlier process stopped, nor of other rows with the same grammar. Where the grammar forces text,
llguidance spells it in tokens once, as the tokenizer would; that spelling is kept until it is used up, and no other is
allowed.
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

# Compiled grammars that are kept: most jobs have a few, each for many rows.
MOST_COMPILED = 64
# A mask that leaves a place open, which masks that take less never do.
EVERYTHING = np.uint32(0xFFFFFFFF)
LEAST_OPEN_SECONDS = 2e-4

Result = TypeVar("Result")


class CompiledGrammar:
    """A grammar, and a matcher of it whose copies share one lexer.

    The library keeps all states that the lexer of a grammar has been in, whoever brought it there, and gives up where they
    are too many. So it may give up at a row for what other rows have written, or for what a draft proposed.
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
        """A copy whose lexer has been in no state yet; further copies share that one."""
        self._matcher = self._compile()
        return self.copy()

    def _compile(self) -> LLMatcher:
        return LLMatcher(self.tokenizer, self._grammar, log_level=0, limits=LIMITS)


class Matching:
    """One row's place in its grammar. ``ends`` are the tokens that end it, the one that is written where it must end first.

    A token that ends the row may come wherever the grammar allows the text to end, and is no part of it.

    Candidates are tried when they come, again when masks are made, and again when they are committed. So ``back`` only says
    where the row stands; the library's matcher stays ahead, and tokens along its way cost nothing, until it is asked for
    another token or a mask.
    """

    def __init__(self, compiled: CompiledGrammar, ends: Sequence[int], vocabulary: int) -> None:
        """``vocabulary`` is how many ids the model scores; a tokenizer may have more."""
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._tokenizer = compiled.tokenizer
        self._matcher = compiled.copy()
        self._end_bit = self._tokenizer.eos_token
        self._scratch = np.zeros(-(-self._tokenizer.vocab_size // 32), np.uint32)
        self._ends = tuple(ends)
        # Those that the matcher has been through; the row stands behind the first so many of them.
        self._tokens: list[int] = []
        self._length = 0
        # After each of the tokens, and before the first: what is forced to come next, as far as it is spelled.
        self._forced: list[tuple[int, ...]] = [()]
        self._forced[0] = self._surely(self._spelled)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens[: self._length]

    def last(self, count: int) -> Sequence[int]:
        """At most so many of the tokens, the last ones."""
        return self._tokens[max(0, self._length - count) : self._length]

    @property
    def forced(self) -> tuple[int, ...]:
        """What must come next, where that is known; more may be behind it."""
        return self._forced[self._length]

    @property
    def ended(self) -> bool:
        return self._length > 0 and self._tokens[self._length - 1] in self._ends

    @property
    def problem(self) -> str:
        """What the library gave up at; "" where it did not."""
        return shortened(self._matcher.get_error()) if self._matcher.is_error() else ""

    def take(self, token: int) -> bool:
        """Go on with the token; False, and nothing is changed, where it may not come."""
        forced = self.forced
        # Less than 0 is what an engine answers where it could choose nothing.
        if token < 0 or self.ended or (forced and token != forced[0]):
            return False
        if self._length < len(self._tokens):
            if self._tokens[self._length] == token:
                self._length += 1
                return True
            self._come_back()
        if token in self._ends:
            if not forced and not self._surely(lambda: self._may_end_by(token)):
                return False
            self._go_on(token, ())
            return True
        if not self._surely(lambda: self._consume(token, known=bool(forced))):
            return False
        self._go_on(token, forced[1:])
        if not self.forced:
            self._forced[-1] = self._surely(self._spelled)
        return True

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        if not self.take(token):
            self.mend()
            return False
        self.back(len(self) - 1)
        return True

    def back(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        if length < self._length:
            self._length = length
            self.mend()

    def fill(self, mask: NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may come next. ``mask`` is as long as the model's vocabulary asks for."""
        mask[:] = 0
        if self.ended:
            return
        if forced := self.forced:
            _allow(mask, forced[0])
            return
        self._come_back()
        words = self._scratch
        self._surely(lambda: self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes))
        if self._matcher.is_error():
            return
        end_word, end_bit = self._end_bit // 32, np.uint32(1 << self._end_bit % 32)
        may_end = bool(words[end_word] & end_bit)
        words[end_word] &= ~end_bit
        shorter = min(len(words), len(mask))
        mask[:shorter] = words[:shorter]
        if may_end:
            # Where nothing else may come, the end has one spelling too: `_spelled` may or may not have seen that it must.
            for end in self._ends if words.any() else self._ends[:1]:
                _allow(mask, end)

    def mend(self) -> None:
        """After the library gave up at something that was only tried."""
        if self._matcher.is_error():
            self._begin_again(self._compiled.copy())

    def _surely(self, step: Callable[[], Result]) -> Result:
        """What the step gives. Where the library gives up at it, what it gives in a lexer that has only read this row."""
        result = step()
        if self._matcher.is_error():
            self._begin_again(self._compiled.with_new_lexer())
            result = step()
        return result

    def _may_end_by(self, token: int) -> bool:
        return self._matcher.is_accepting() or self._matcher.validate_tokens([token]) == 1

    def _consume(self, token: int, known: bool) -> bool:
        """``known``: to be the only one that may come."""
        return (known or self._matcher.validate_tokens([token]) == 1) and self._matcher.consume_token(token)

    def _spelled(self) -> tuple[int, ...]:
        forced = self._matcher.compute_ff_tokens()
        fits = self._matcher.validate_tokens(forced) if forced else 0
        if forced and not fits:
            # The library spells a text that names a special token with that token, which it then refuses itself.
            forced = self._tokenizer.greedy_tokenize(self._matcher.compute_ff_bytes().decode(errors="ignore"))
            fits = self._matcher.validate_tokens(forced)
        forced = forced[:fits]
        if not forced and self._matcher.is_stopped() and not self._matcher.is_error():
            return self._ends[:1]
        return tuple(takewhile(lambda token: token < self._vocabulary, forced))

    def _go_on(self, token: int, forced: tuple[int, ...]) -> None:
        self._tokens.append(token)
        self._forced.append(forced)
        self._length += 1

    def _come_back(self) -> None:
        """Bring the matcher to where the row stands."""
        gone = len(self._tokens) - self._length
        if not gone:
            return
        known = gone - (self._tokens[-1] in self._ends)  # the library was never told of an end
        del self._tokens[self._length :], self._forced[self._length + 1 :]
        if known and not self._matcher.rollback(known):
            self._begin_again(self._compiled.copy())

    def _begin_again(self, matcher: LLMatcher) -> None:
        """A matcher in which the library gave up stays like that: another one is brought to where the row stands."""
        del self._tokens[self._length :], self._forced[self._length + 1 :]
        self._matcher = matcher
        known = self._tokens[:-1] if self.ended else self._tokens
        if known:
            self._matcher.consume_tokens(list(known))


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
        """The beginning of an answer. A BadConstraint where there can be none."""
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
