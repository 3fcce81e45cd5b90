"""Constrained answers: which tokens are allowed, and the same text with a draft or without, in any batch, resumed too."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from built import target_of, write
from constrained import CONSTRAINTS, RECORD, AtOnce, draft_of_the_pair, grammar, model, tokenizer
from fakes import FakeEngine
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from one_tokenizer_process import tokenizer_process

from outrider.runner.job.nesting import MOST_LEVELS
from outrider.workers.constraints.grammars import LIMITS, BadConstraint, grammar_of, refuse_unusable
from outrider.workers.constraints.matching import Matching
from outrider.workers.constraints.schemas import ANNOTATIONS, IMPLEMENTED
from outrider.workers.draft import drafter
from outrider.workers.draft.drafter import DraftRow, _Guide
from outrider.workers.engines import native
from outrider.workers.engines.engine import Feed
from outrider.workers.messages import Row, RowFailure, RowResult, Sampling
from outrider.workers.models.model_info import find, read_model_info
from outrider.workers.models.tokenizer import Tokenizer
from outrider.workers.target import constraints
from outrider.workers.target.constraints import MaskMaker, fitting
from outrider.workers.target.live_row import LiveRow
from outrider.workers.target.proposers import Proposal
from outrider.workers.target.text_and_stop_strings import TextWriter

END = 0
WORDS = 4096 // 32


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path_factory.getbasetemp() / "packed"))


def begun(name: str, ends: tuple[int, ...] = (END,)) -> Matching:
    return AtOnce(model("pocket")).matching(grammar(name), ends)


def mask_of(matching: Matching) -> NDArray[np.uint32]:
    mask = np.full(WORDS, 0xFFFFFFFF, np.uint32)
    matching.fill(mask)
    return mask


def allowed(matching: Matching) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask_of(matching).view(np.uint8), bitorder="little")).tolist())


def with_most_states(count: int) -> LLParserLimits:
    """The limits of the library, but for the states that a lexer may be in."""
    return LLParserLimits(
        max_items_in_row=LIMITS.max_items_in_row,
        initial_lexer_fuel=LIMITS.initial_lexer_fuel,
        step_lexer_fuel=LIMITS.step_lexer_fuel,
        step_max_items=LIMITS.step_max_items,
        max_lexer_states=count,
        max_grammar_size=LIMITS.max_grammar_size,
        verbose_errors=False,
    )


def spelled(tokens: list[int]) -> bytes:
    return b"".join(map(tokenizer().token_bytes.bytes_of, tokens))


def wander(matching: Matching, random: np.random.Generator, most: int = 60) -> list[int]:
    """Go on at random as far as the grammar lets."""
    while len(matching) < most and (may := sorted(allowed(matching))):
        assert matching.take(int(random.choice(may)))
    return list(matching.tokens)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_the_mask_holds_the_tokens_that_go_on_towards_one_of_the_texts(seed: int) -> None:
    """Held against the texts themselves: where nothing is forced a token may come if some text goes on with it."""
    random = np.random.default_rng(seed)
    texts = [text.encode() for text in CONSTRAINTS["choice"]["value"]]
    pieces = {token: spelled([token]) for token in range(1, 4096) if not tokenizer().token_bytes.silent(token)}
    matching = begun("choice")
    while not matching.ended:
        so_far = spelled(list(matching.tokens))
        fits = {token for token, piece in pieces.items() if piece and any(t.startswith(so_far + piece) for t in texts)}
        fits |= {END} if so_far in texts else set()
        found = allowed(matching)
        if matching.forced:
            assert found == {matching.forced[0]} <= fits
        else:
            assert found == fits
        assert matching.take(int(random.choice(sorted(found))))
    assert spelled(list(matching.tokens[:-1])) in texts


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("seed", range(4))
def test_what_may_come_depends_on_what_is_written_alone(name: str, seed: int) -> None:
    """However much was tried and taken back on the way, and whether a mask was made there."""
    random = np.random.default_rng(seed)
    tokens = wander(begun(name), random)
    tried, straight, unasked = begun(name), begun(name), begun(name)
    for at, token in enumerate(tokens):
        if at % 3 == seed % 3:
            wander(tried, random, at + 5)
            # Back further than to here, and here again along what was taken before.
            tried.truncate(at // 2)
            assert all(map(tried.take, tokens[at // 2 : at]))
        # Wrong tokens change nothing.
        assert not any(map(tried.take, (wrong for wrong in range(1, 60) if wrong not in allowed(straight))))
        np.testing.assert_array_equal(mask_of(tried), mask_of(straight))
        assert tried.forced == straight.forced == unasked.forced
        assert tried.take(token) and straight.take(token) and unasked.take(token)
    np.testing.assert_array_equal(mask_of(unasked), mask_of(straight))


def test_rows_of_one_grammar_leave_each_other_room_in_the_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps the states of all rows under a grammar and gives up at too many: here at those of four rows."""
    monkeypatch.setattr("outrider.workers.constraints.matching.LIMITS", with_most_states(3_000))
    grammars = AtOnce(model("pocket"))
    hungry = grammar_of({"kind": "regex", "value": "[a-z ]*a[a-z ]{20}"})
    random = np.random.default_rng(0)
    for _ in range(7):
        together = grammars.matching(hungry, (END,))
        tokens = wander(together, random)
        alone = AtOnce(model("pocket")).matching(hungry, (END,))
        assert all(map(alone.take, tokens))
        np.testing.assert_array_equal(mask_of(together), mask_of(alone))
        assert len(tokens) == 60 or together.ended
        assert not together.problem and not alone.problem


def test_what_no_lexer_has_room_for_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.workers.constraints.matching.LIMITS", with_most_states(100))
    hungry = AtOnce(model("pocket")).matching(grammar_of({"kind": "regex", "value": "[a-z ]*a[a-z ]{20}"}), (END,))
    wander(hungry, np.random.default_rng(0))
    assert not allowed(hungry)
    assert re.fullmatch("[^\n<]*too many states[^\n<]*", hungry.problem)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(8))
def test_records_written_at_random_fit_and_are_compact(seed: int) -> None:
    tokens = wander(begun("record"), np.random.default_rng(seed), 400)
    assert tokens[-1] == END
    text = spelled(tokens[:-1]).decode()
    Draft202012Validator(RECORD).validate(json.loads(text))
    assert text == json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")) or "\\" in text


def test_forced_text_has_the_spelling_of_the_tokenizer() -> None:
    matching = begun("record")
    assert matching.forced == tuple(tokenizer().encode_rendered('{"name":'))
    other = tokenizer().encode_rendered("{")[0], tokenizer().encode_rendered('"n')[0]
    assert not matching.take(other[1])


def test_every_end_of_the_row_may_end_it_where_it_may_end() -> None:
    matching = begun("regex", (END, 7, 9))
    for token in tokenizer().encode_rendered("abcd1"):
        assert not {END, 7, 9} & allowed(matching)
        assert matching.take(token)
    assert allowed(matching) >= {END, 7, 9}
    # Where it must, the end has one spelling.
    assert matching.take(tokenizer().encode_rendered("x")[0])
    assert allowed(matching) == {END}
    assert matching.take(END)
    assert matching.ended and not allowed(matching)


def live(name: str, logprobs: int | None = None) -> LiveRow:
    row = Row(0, (1,), 200, Sampling(grammar=grammar(name), end_tokens=(END,)), logprobs=logprobs)
    return LiveRow(row, [1], TextWriter(tokenizer().decode, (), (END,)), 0.0, matching=begun(name))


def test_candidates_are_cut_where_they_do_not_fit_and_what_is_forced_follows() -> None:
    row = live("record", logprobs=0)
    encode = tokenizer().encode_rendered
    name = encode('{"name":')
    # Nothing is proposed: what is certain is a candidate all the same.
    assert fitting(row, Proposal(), 64).tokens == name
    assert fitting(row, Proposal([name[0], 5, 6]), 64).tokens == name
    assert fitting(row, Proposal(), 2).tokens == name[:2]
    for token in [*name, *encode('"'), *encode("bob")]:
        row.append(token, (END,), 500)
    closed = encode('",')
    age = encode('"age":')
    certain = tuple(range(len(closed), len(closed) + len(age)))
    found = fitting(row, Proposal([*closed, 5], [(0, 5)]), 64)
    assert found == Proposal([*closed, *age], certain=certain), "whether the name goes on is the target's choice"
    assert [found.choices(count) for count in (0, 1, len(found.tokens))] == [0, 1, len(closed)]
    assert fitting(row, Proposal([END, 5]), 64).tokens == []
    assert list(row.tokens[1:]) == list(row.matching.tokens if row.matching else ())


@pytest.mark.parametrize(("at_once", "cores"), [(1.0, 1), (-1.0, 1), (-1.0, 16)])
def test_masks_of_a_pass_are_those_of_its_positions(at_once: float, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made before the pass, in a thread beside it, and in several."""
    monkeypatch.setattr(constraints, "AT_ONCE_SECONDS", at_once)
    monkeypatch.setattr(constraints, "_all_cores", lambda: {*range(cores)})
    monkeypatch.setattr(constraints, "_on_all_cores", lambda: None)
    rows = [live("record"), live("regex")]
    candidates = [tokenizer().encode_rendered('{"name":"bo'), tokenizer().encode_rendered("abab")]
    maker = MaskMaker(FakeEngine(vocabulary=4096))
    feeds = [Feed(at, [1, *tokens], len(tokens) + 1) for at, tokens in enumerate(candidates)]
    masked = maker.begin(rows, feeds)
    assert (maker._threads is None) == (at_once > 0)
    maker.finish()
    for row, feed, tokens in zip(rows, masked, candidates, strict=True):
        assert feed.masks is not None and row.matching is not None
        for index, token in enumerate([*tokens, None]):
            np.testing.assert_array_equal(feed.masks.of.words[feed.masks.first + index], mask_of(row.matching))
            assert token is None or row.matching.take(token)


def rows_of_all_kinds(count: int, tokens: int = 90, seed: int = 5) -> list[Row]:
    random = np.random.default_rng(seed)
    names = ["", *CONSTRAINTS]
    head = tokenizer().encode("def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n")
    rows = []
    for key in range(count):
        prompt = [*head, *tokenizer().encode(f"def f{key % 7}(x):\n    return")]
        sampling = Sampling(
            temperature=float(random.choice([0.0, 0.7, 1.0, 1.5])),
            top_k=int(random.choice([0, 0, 2, 50])),
            top_p=float(random.choice([1.0, 1.0, 0.8])),
            seed=key,
            repetition_penalty=float(random.choice([1.0, 1.0, 1.3])),
            logit_bias=((12, 4.0), (2, -3.0)) if random.random() < 0.3 else (),
            end_tokens=(END, 199) if random.random() < 0.2 else (END,),
            grammar=grammar(name) if (name := names[key % len(names)]) else "",
        )
        stop = ("4", "re") if random.random() < 0.15 else ()
        logprobs = int(random.integers(3)) if random.random() < 0.3 else None
        rows.append(Row(key, tuple(prompt), int(random.choice([7, tokens])), sampling, stop, logprobs))
    return rows


def what_counts(results: dict[int, RowResult]) -> dict[int, tuple[object, ...]]:
    return {key: (each.tokens, each.text, each.finish_reason, each.logprobs) for key, each in sorted(results.items())}


@pytest.mark.slow
def test_masks_that_are_left_out_change_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """All places behind a mask are left open, whatever it took: choices that are not allowed are made again."""
    opened, rows = model("pocket"), rows_of_all_kinds(40, seed=6)
    plain, whole = write(target_of(opened, 1, 0, tokenizer=tokenizer()), rows)
    seen: list[str] = []
    allowed = MaskMaker._allowed

    def watched(
        self: MaskMaker, matching: Matching, token: int, rank: constraints.Rank, ends: Collection[int]
    ) -> tuple[int, float]:
        found, mask_seconds = allowed(self, matching, token, rank, ends)
        seen.append("masked" if mask_seconds else "best" if found == token else "another")
        return found, mask_seconds

    monkeypatch.setattr(MaskMaker, "_allowed", watched)
    monkeypatch.setattr(constraints, "LEAST_OPEN_SECONDS", 0.0)
    monkeypatch.setattr(constraints, "SHARE_OF_PASS", math.inf)
    monkeypatch.setattr(drafter, "LEAST_OPEN_SECONDS", 1e-9)
    for batch, asked, draft, lookup in [(1, 0, None, False), (7, 0, None, False), (5, 4, draft_of_the_pair(), True)]:
        seen.clear()
        found, verifier = write(target_of(opened, batch, asked, draft, lookup, 500, tokenizer()), rows)
        assert what_counts(found) == what_counts(plain)
        assert min(map(seen.count, ("best", "another", "masked"))) > 20
        assert verifier.counters.tokens == whole.counters.tokens
        assert not asked or 0 < verifier.counters.accepted < verifier.counters.proposed
    # Where prompts fill more than one pass, what was chosen in the first ones is not known any more.
    monkeypatch.setattr(native, "PASS_TOKENS", 24)
    assert what_counts(write(target_of(opened, 7, 0, tokenizer=tokenizer()), rows)[0]) == what_counts(plain)


def test_a_draft_leaves_masks_out_and_guesses_on_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    row = DraftRow(matching=begun("regex"))
    assert row.matching is not None
    guide, mask, letters = _Guide(row, row.matching), np.zeros(128, np.uint32), tokenizer().encode_rendered("ab")
    monkeypatch.setattr(drafter, "LEAST_OPEN_SECONDS", 1e-9)
    guide.fill(mask)
    np.testing.assert_array_equal(mask, mask_of(row.matching))
    assert guide.follow(letters[0]) is not None
    guide.fill(mask)
    assert (mask == 0xFFFFFFFF).all()
    assert guide.follow(tokenizer().encode_rendered("{")[0]) is None and len(row.matching) == 1
    guide.fill(mask)
    np.testing.assert_array_equal(mask, mask_of(row.matching))


def test_only_choices_among_all_tokens_are_left_open() -> None:
    assert constraints.may_be_open(Sampling(temperature=1.0)) and constraints.may_be_open(Sampling(top_k=2, top_p=0.1))
    for shares in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert not constraints.may_be_open(Sampling(temperature=1.0, **shares))


def test_a_mask_is_left_out_where_it_costs_more_than_what_fails_without() -> None:
    maker, row = MaskMaker(model("pocket").engine), live("record")
    assert not maker._is_open(row), "nothing is known yet"
    row.mask_seconds = 1e-3
    assert maker._is_open(row)
    row.mask_seconds = 1e-5
    assert not maker._is_open(row), "cheap"
    row.mask_seconds = 1.0
    assert not maker._is_open(row), "the library may be about to give up, and that is the row's error"
    row.mask_seconds = 1e-3
    maker._refused = 2e-3
    assert not maker._is_open(row), "this model knows no JSON"
    maker._refused = 0.0
    row.next_mask_key = (1, (5, 6))
    assert not maker._is_open(row, row.next_mask_key), "a place behind what was forced is of another kind"
    maker._observe_mask(row.next_mask_key, 2e-3)
    assert not maker._is_open(row, row.next_mask_key), "the first mask of a kind takes longer than the next"
    maker._observe_mask(row.next_mask_key, 1e-3)
    assert maker._is_open(row, row.next_mask_key), "of which other rows know"
    row.mask_seconds = 0.0
    assert not maker._is_open(row)
    for _ in range(2):
        maker._observe_mask(maker._unforced_key(row), 1e-3)
    assert maker._is_open(row), "where masks became dear for others"
    assert not MaskMaker(FakeEngine(vocabulary=4096))._is_open(replace(row, mask_seconds=1e-3)), "none that ranks choices"
    assert not maker._is_open(replace(row, row=replace(row.row, logprobs=0), mask_seconds=1e-3))


@pytest.mark.parametrize(("count", "one_of"), [(6, 4), pytest.param(30, 1, marks=pytest.mark.slow)])
def test_the_same_text_assisted_or_not_in_any_batch_resumed_or_not(
    count: int, one_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, rows = model("pocket"), rows_of_all_kinds(count)
    plain, alone = write(target_of(opened, 1, 0, tokenizer=tokenizer()), rows)
    assert {result.finish_reason for result in plain.values()} == {"stop", "length"}
    assert alone.counters.forced_tokens > count
    for row in rows:
        if row.sampling.grammar == grammar("record") and plain[row.key].tokens[-1] == END:
            Draft202012Validator(RECORD).validate(json.loads(plain[row.key].text))
    ways = [
        (7, 0, None, False),
        (1, 3, draft_of_the_pair(), False),
        (6, 5, draft_of_the_pair(500), False),
        (5, 6, draft_of_the_pair(constrained=False), False),
        (4, 4, None, True),
        (9, 2, draft_of_the_pair(), True),
    ]
    for batch, count, draft, lookup in ways[::-one_of]:
        monkeypatch.setattr(constraints, "AT_ONCE_SECONDS", 1.0 if count % 2 else -1.0)
        assisted, verifier = write(target_of(opened, batch, count, draft, lookup, 500, tokenizer()), rows)
        assert what_counts(assisted) == what_counts(plain)
        assert not count or 0 < verifier.counters.accepted < verifier.counters.proposed
    half = []
    random = np.random.default_rng(2)
    for row in rows:
        whole = plain[row.key]
        cut = int(random.integers(0, len(whole.tokens) + 1))
        told: tuple[tuple[tuple[int, float], ...], ...] = ()
        if whole.logprobs is not None:
            own = zip(whole.tokens, whole.logprobs.chosen, whole.logprobs.likeliest, strict=True)
            told = tuple(((token, chosen), *likeliest) for token, chosen, likeliest in own)[:cut]
        half.append(replace(row, resumed=whole.tokens[:cut], resumed_logprobs=told))
    for batch, count, draft in [(1, 0, None), (6, 4, draft_of_the_pair(300))][::-one_of]:
        resumed, _ = write(target_of(opened, batch, count, draft, tokenizer=tokenizer()), half)
        assert what_counts(resumed) == what_counts(plain)


def test_what_an_earlier_target_wrote_under_another_grammar_is_written_anew() -> None:
    opened = model("pocket")
    [row] = [row for row in rows_of_all_kinds(2) if row.sampling.grammar]
    plain, _ = write(target_of(opened, 1, 0, tokenizer=tokenizer()), [row])
    again, _ = write(target_of(opened, 1, 0, tokenizer=tokenizer()), [replace(row, resumed=(55, 56))])
    assert what_counts(again) == what_counts(plain)


@pytest.mark.slow
def test_a_draft_under_masks_is_right_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the load of the machine does not move: what is asked for depends on what masks and passes take."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 1e-3)
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    rows = [
        replace(row, logprobs=None, stop=(), max_tokens=90, sampling=replace(row.sampling, grammar=grammar("record")))
        for row in rows_of_all_kinds(6)
    ]
    shares = []
    for constrained in (True, False):
        target = target_of(model("pocket"), 4, 4, draft_of_the_pair(constrained=constrained), tokenizer=tokenizer())
        _, verifier = write(target, rows)
        shares.append(verifier.counters.tokens / verifier.counters.rounds)
    assert shares[0] > 1.15 * shares[1]


@pytest.mark.slow
def test_on_the_hf_engine_tokens_are_the_same() -> None:
    opened, rows = model("pocket", "hf"), rows_of_all_kinds(18, 60)
    plain, _ = write(target_of(opened, 1, 0, tokenizer=tokenizer()), rows)
    assisted, verifier = write(target_of(opened, 5, 3, draft_of_the_pair(), tokenizer=tokenizer()), rows)
    turned = [key for key in plain if plain[key].tokens != assisted[key].tokens]
    assert len(turned) <= verifier.counters.near_ties


def test_where_the_model_has_no_token_for_it_the_row_fails_and_says_so() -> None:
    class Larger(Tokenizer):
        """It has tokens that the model does not score."""

        def __init__(self) -> None:
            super().__init__(find("pocket"))

        def for_grammars(self, vocabulary: int, end: int) -> LLTokenizer:
            return super().for_grammars(vocabulary + 32, end)

    target = target_of(model("pocket"), 2, 0, tokenizer=Larger())
    hopeless = Row(0, (1, 2), 9, Sampling(grammar=grammar_of({"kind": "grammar", "value": "start: <[4100]>"})))
    target.verifier.add([hopeless, Row(1, (1, 2), 9, Sampling(grammar="{}"))])
    ended = [result for _ in range(4) for result in target.verifier.round()]
    failures = {result.key: result.message for result in ended if isinstance(result, RowFailure)}
    assert failures[0] == "after 0 tokens no token of the model satisfies the row's constraint"
    assert failures[1].startswith("the row's constraint cannot be used: it cannot be compiled")


def test_where_the_library_fails_at_the_first_forced_text_the_row_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at any later text: the target, and the rows beside it, go on."""
    forced = grammar_of({"kind": "choice", "value": ["before <|endoftext|> and behind"]})
    hopeless = Row(0, (1, 2), 60, Sampling(grammar=forced))
    others = [Row(1, (1, 2), 5, Sampling()), Row(2, (1, 2), 60, Sampling(grammar=grammar("record")))]
    expected, _ = write(target_of(model("pocket"), 3, 0, tokenizer=tokenizer()), others)
    consume = Matching._consume

    def failing(self: Matching, token: int, known: bool) -> bool:
        first_forced = known and not len(self) and self._compiled._grammar == forced
        return not first_forced and consume(self, token, known)

    monkeypatch.setattr(Matching, "_consume", failing)
    target = target_of(model("pocket"), 3, 0, tokenizer=tokenizer())
    target.verifier.add([hopeless, *others])
    ended = [result for _ in range(100) for result in target.verifier.round()]
    [failure] = [result for result in ended if isinstance(result, RowFailure)]
    assert failure == RowFailure(0, "after 0 tokens no token of the model satisfies the row's constraint")
    assert {row.key: row.tokens for row in ended if isinstance(row, RowResult)} == {
        key: row.tokens for key, row in expected.items()
    }


def test_a_text_may_hold_the_name_of_a_special_token() -> None:
    """It is spelled in other tokens, since the special one would not stand in the text."""
    opened = model("pocket")
    named = "before <|endoftext|> and behind"
    asked = Row(0, (1, 2), 60, Sampling(grammar=grammar_of({"kind": "choice", "value": [named]})))
    written, _ = write(target_of(opened, 1, 0, tokenizer=tokenizer()), [asked])
    assert (written[0].text, written[0].finish_reason) == (named, "stop")


@pytest.mark.parametrize(
    ("constraint", "sentence"),
    [
        ({"kind": "json", "value": {"type": "objekt"}}, "it cannot be compiled: "),
        ({"kind": "json", "value": {"properties": {"a": {"type": "string", "format": "nonsense"}}}}, "it cannot be"),
        ({"kind": "json", "value": {"uniqueItems": False}}, '"uniqueItems" at # of the schema cannot be enforced'),
        ({"kind": "json", "value": False}, "it cannot be compiled: "),
        ({"kind": "json", "value": {"x-guidance": {"lenient": True}}}, '"x-guidance" of a schema holds .* "lenient"'),
        ({"kind": "json", "value": {"x-guidance": 3}}, '"x-guidance" of a schema holds'),
        ({"kind": "json", "value": {"$ref": "#/$defs/none"}}, "it cannot be compiled: "),
        ({"kind": "regex", "value": "(a"}, "it cannot be compiled: "),
        ({"kind": "regex", "value": "a(?=b)"}, "it cannot be compiled: "),
        ({"kind": "grammar", "value": "start: nobody"}, "it cannot be compiled: "),
        (
            {"kind": "grammar", "value": "start: x\nx[max_tokens=3]: /a+/"},
            'the grammar\'s attribute "max_tokens" is not supported',
        ),
        ({"kind": "grammar", "value": "start: x\nx[stop=/b/ , max_tokens\t=3]: /a+/"}, "the grammar's attribute"),
        ({"kind": "grammar", "value": 'start: x\nx[stop="]", temperature=1]: /a+/'}, "the grammar's attribute"),
        (
            {"kind": "grammar", "value": 'start: "a" %json {"minlength": 3}'},
            '"minlength" at # of the schema cannot be enforced',
        ),
        ({"kind": "grammar", "value": 'start: %json {"x-guidance": {"lenient": true}}'}, '"x-guidance" of a schema holds'),
        ({"kind": "grammar", "value": "start: %json {"}, "the grammar cannot be read"),
        ({"kind": "grammar", "value": 'root ::= "a'}, "the grammar cannot be read|it cannot be compiled"),
    ],
)
def test_what_cannot_be_compiled_says_why(constraint: dict[str, object], sentence: str) -> None:
    opened = model("pocket")
    vocabulary = tokenizer().for_grammars(opened.engine.vocabulary, END)
    with pytest.raises(BadConstraint, match=f"^({sentence})"):
        refuse_unusable(grammar_of(constraint), vocabulary)


DRAFT_4, DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"
TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"minlength": 3}, '"minlength" at #'),
        ({"properties": {"a": {"requird": []}}}, '"requird" at #/properties/a'),
        ({"properties": {"a/b": {"maxLen": 3}}}, '"maxLen" at #/properties/a~1b'),
        ({"items": {"divisibleBy": 3}}, '"divisibleBy" at #/items'),
        ({"items": [TEXT, {"minlength": 3}]}, '"minlength" at #/items/1'),
        ({"prefixItems": [{"minlength": 3}]}, '"minlength" at #/prefixItems/0'),
        ({"additionalProperties": {"anyOf": [TEXT, {"minlength": 3}]}}, '"minlength" at #/additionalProperties/anyOf/1'),
        ({"allOf": [{"patternProperties": {"^a": {"minlength": 3}}}]}, '"minlength" at #/allOf/0/patternProperties/^a'),
        ({"oneOf": [{"items": [], "additionalItems": {"minlength": 3}}]}, '"minlength" at #/oneOf/0/additionalItems'),
        ({"$defs": {"x": {"minlength": 3}}, "$ref": "#/$defs/x"}, '"minlength" at #/$defs/x'),
        ({"definitions": {"x": {"minlength": 3}}}, '"minlength" at #/definitions/x'),
        ({"components": {"x y": {"minlength": 3}}, "$ref": "#/components/x%20y"}, '"minlength" at #/components/x y'),
        ({"components": {"x": {}}, "other": {"x": {}}, "$ref": "#/components/x"}, '"other" at #'),
        ({"additionalItems": False}, '"additionalItems" at #'),
        ({"prefixItems": [TEXT], "additionalItems": False}, '"additionalItems" at #'),
        ({"properties": {"a": {"type": "integer", "required": True}}}, '"required" at #/properties/a'),
        ({"type": "string", "nullable": True}, '"nullable" at #'),
        ({"properties": {"a": {"x-guidance": {"whitespace_flexible": True}}}}, '"x-guidance" at #/properties/a'),
        ({"not": TEXT}, '"not" at #'),
        # Left out where an older draft does not know them.
        ({"$schema": DRAFT_4, "propertyNames": TEXT}, '"propertyNames" at #'),
        ({"$schema": DRAFT_4, "properties": {"a": {"const": 1}}}, '"const" at #/properties/a'),
        ({"$schema": DRAFT_7, "prefixItems": [TEXT]}, '"prefixItems" at #'),
    ],
)
def test_what_the_library_would_leave_out_of_a_schema_is_named(schema: dict[str, object], place: str) -> None:
    with pytest.raises(BadConstraint) as refused:
        grammar_of({"kind": "json", "value": schema})
    assert str(refused.value) == f"{place} of the schema cannot be enforced; correct its spelling or remove it"


@pytest.mark.parametrize(
    ("schema", "place", "number"),
    [
        ({"const": 12345678901234567890}, '"const" at #', "12345678901234567890"),
        ({"properties": {"id": {"enum": ["a", 9007199254740993]}}}, '"enum" at #/properties/id', "9007199254740993"),
        ({"enum": [{"a": [1, [-9007199254740993]]}]}, '"enum" at #', "-9007199254740993"),
        ({"const": 1 << 63}, '"const" at #', "9223372036854775808"),
        # At this one the library dies.
        ({"const": -1 << 63}, '"const" at #', "-9223372036854775808"),
        ({"const": 123456789.12345679}, '"const" at #', "123456789.12345679"),
        ({"const": 1.5e-30}, '"const" at #', "1.5e-30"),
        ({"const": 1e400}, '"const" at #', "inf"),
        ({"type": "integer", "minimum": 9007199254740993}, '"minimum" at #', "9007199254740993"),
        ({"type": "integer", "exclusiveMinimum": -1 << 60}, '"exclusiveMinimum" at #', str(-1 << 60)),
        ({"items": {"maximum": 10**400}}, '"maximum" at #/items', "1000"),
    ],
)
def test_a_number_that_the_library_would_round_is_named(schema: dict[str, object], place: str, number: str) -> None:
    with pytest.raises(BadConstraint) as refused:
        grammar_of({"kind": "json", "value": schema})
    said = str(refused.value)
    assert said.startswith(f"{place} of the schema has the number {number}")
    assert said.endswith(", which would be rounded; give a number of 15 digits or fewer, or a text")


@pytest.mark.parametrize(
    "number",
    [
        0,
        -7,
        1 << 53,
        -(1 << 53),
        10**18,
        (1 << 62) + (1 << 10),
        1.0,
        0.1,
        1e-7,
        1e22,
        123456789.012345,
        1.5e-20,
        -99999999999999.9,
    ],
)
def test_a_constant_is_written_as_the_schema_has_it(number: float) -> None:
    """Among others, and within what is a value as a whole."""
    schema = {"properties": {"a": {"const": [{"b": number}, True, None, "1e400"]}}, "required": ["a"], "type": "object"}
    written = grammar_of({"kind": "json", "value": {**schema, "additionalProperties": False}})
    matcher = LLMatcher(tokenizer().for_grammars(model("pocket").engine.vocabulary, 0), written, log_level=0, limits=LIMITS)
    [value, *_] = json.loads(matcher.compute_ff_bytes())["a"]
    assert value["b"] == number


@pytest.mark.parametrize(
    ("bound", "within", "beyond"),
    [
        ({"maximum": (1 << 63) - 1}, (1 << 63) - 1, 1 << 63),
        ({"maximum": 1 << 60}, 1 << 60, (1 << 60) + 1),
        ({"minimum": -(1 << 60)}, -(1 << 60), -(1 << 60) - 1),
        ({"exclusiveMaximum": 1 << 53}, (1 << 53) - 1, 1 << 53),
    ],
)
def test_a_large_bound_is_kept(bound: dict[str, int], within: int, beyond: int) -> None:
    vocabulary = tokenizer().for_grammars(model("pocket").engine.vocabulary, 0)
    for number, fits in ((within, True), (beyond, False)):
        written = grammar_of({"kind": "json", "value": {"type": "integer", **bound}})
        matcher, tokens = LLMatcher(vocabulary, written, log_level=0, limits=LIMITS), vocabulary.tokenize_str(str(number))
        found = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        assert found == fits, number


@pytest.mark.parametrize(
    "schema",
    [
        RECORD,
        {"properties": {"minlength": TEXT, "not": TEXT}, "required": ["minlength"]},
        {"const": {"minlength": 3}},
        {"enum": [{"minlength": 3}], "default": {"minlength": 3}, "examples": [{"minlength": 3}], "example": {"not": 1}},
        {"$schema": DRAFT_7, "$id": "http://a/b", "$comment": "c", "title": "t", "description": "d", "type": "object"},
        {"deprecated": True, "readOnly": True, "writeOnly": True, "nullable": False, "strict": True, "type": "object"},
        {"x-order": 3, "externalDocs": {"url": "u"}, "xml": {"name": "n"}, "contentMediaType": "a/b", "contentSchema": {}},
        {
            "$defs": {"A": {"properties": {"kind": {"const": "a"}}}, "B": {"properties": {"kind": {"const": "b"}}}},
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
            "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/A", "b": "#/$defs/B"}},
        },
        {"components": {"schemas": {"x": TEXT}}, "items": {"$ref": "#/components/schemas/x"}},
        {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "properties": {"a": {"$ref": "#"}}},
        {"items": [TEXT], "additionalItems": False},
        {"items": TEXT, "additionalItems": True},
        {"$schema": DRAFT_4, "minimum": 3, "exclusiveMinimum": True},
    ],
)
def test_what_changes_no_answer_may_stand_in_a_schema(schema: dict[str, object]) -> None:
    assert grammar_of({"kind": "json", "value": schema})


# Of each keyword that is let through a schema and what does not fit it, though it would without that keyword.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"type": "string"}, "1"),
    "const": ({"const": "a"}, '"b"'),
    "enum": ({"enum": ["a"]}, '"b"'),
    "$ref": ({"$defs": {"x": TEXT}, "$ref": "#/$defs/x"}, "1"),
    "allOf": ({"allOf": [TEXT]}, "1"),
    "anyOf": ({"anyOf": [TEXT]}, "1"),
    "oneOf": ({"oneOf": [TEXT]}, "1"),
    "properties": ({"properties": {"a": TEXT}}, '{"a":1}'),
    "patternProperties": ({"patternProperties": {"^a": TEXT}}, '{"a":1}'),
    "additionalProperties": ({"additionalProperties": TEXT}, '{"a":1}'),
    "required": ({"required": ["a"]}, '{"b":1}'),
    "minProperties": ({"minProperties": 1}, "{}"),
    "maxProperties": ({"maxProperties": 1}, '{"a":1,"b":1}'),
    "items": ({"items": TEXT}, "[1]"),
    "prefixItems": ({"prefixItems": [TEXT]}, "[1]"),
    "additionalItems": ({"items": [], "additionalItems": TEXT}, "[1]"),
    "minItems": ({"minItems": 1}, "[]"),
    "maxItems": ({"maxItems": 1}, "[1,1]"),
    "minLength": ({"minLength": 2}, '"a"'),
    "maxLength": ({"maxLength": 1}, '"aa"'),
    "pattern": ({"pattern": "^a$"}, '"b"'),
    "format": ({"format": "date"}, '"b"'),
    "minimum": ({"minimum": 2}, "1"),
    "maximum": ({"maximum": 2}, "3"),
    "exclusiveMinimum": ({"exclusiveMinimum": 2}, "2"),
    "exclusiveMaximum": ({"exclusiveMaximum": 2}, "2"),
    "multipleOf": ({"multipleOf": 2}, "3"),
}


def fits(schema: dict[str, Any], text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar_of({"kind": "json", "value": schema}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


@pytest.mark.parametrize("key", sorted(IMPLEMENTED))
def test_each_keyword_that_is_let_through_is_kept(key: str) -> None:
    schema, text = BROKEN[key]
    assert not fits(schema, text)
    assert fits({other: value for other, value in schema.items() if other != key}, text)


def test_annotations_change_nothing() -> None:
    """Those by which the library finds its way are texts."""
    paths = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "http://a/b", "id": "c", "$anchor": "d"}
    assert fits({**{key: {} for key in sorted(ANNOTATIONS)}, **paths}, "1")


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "temperature=" /[0-9]+/',
        r'start: "\"temperature=" /max_tokens=[0-9\/]+/',
        "start: x // temperature=\nx: /a/ # max_tokens=",
        'root ::= "max_tokens=" [0-9]+',
        'start: %json {"const": "temperature=1"}',
    ],
)
def test_texts_and_expressions_of_a_grammar_may_hold_any_word(grammar: str) -> None:
    refuse_unusable(grammar_of({"kind": "grammar", "value": grammar}), LLTokenizer("byte"))


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Tokenizer(find("pocket"))
    monkeypatch.setattr(other, "_coder", SimpleNamespace(fast=None))
    with pytest.raises(BadConstraint, match=r"no tokenizer\.json"):
        other.for_grammars(4096, END)


def test_the_tokenizer_process_compiles_and_says_what_cannot_be() -> None:
    model_info = read_model_info("pocket")
    asked: list[dict[str, Any]] = [
        {"key": "a", "kind": "choice", "value": ["yes", "no"]},
        {"key": "a", "kind": "json", "value": {"type": "objekt"}},
        {"key": "a", "kind": "json", "value": RECORD},
    ]
    deepest: dict[str, Any] = {}
    for _ in range(MOST_LEVELS - 1):
        deepest = {"items": deepest}
    asked.append({"key": "a", "kind": "json", "value": deepest})
    begun = tokenizer_process().begin_to_compile(model_info.path, model_info.vocabulary, model_info.end_tokens[0], asked)
    choice, wrong, schema, deep = begun()
    assert deep[0] == "" and deep[1].startswith("it cannot be compiled: recursion limit exceeded")
    assert '"yes"' in choice[0].replace("\\", "") and choice[1] == ""
    assert wrong[0] == "" and wrong[1].startswith("it cannot be compiled: ")
    assert '"whitespace_flexible":false' in schema[0].replace(" ", "") and schema[1] == ""
