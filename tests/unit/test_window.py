"""The draft's window: as long as pays, by measured costs and by the acceptance with each window."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from built import draft_of, opened, target_of, write
from fakes import END, FakeEngine, hashed
from hypothesis import given
from hypothesis import strategies as st

from outrider.workers.build import Draft
from outrider.workers.draft.drafter import Drafter
from outrider.workers.draft.window import SMALLEST, TRY_EVERY, WHOLE, WINDOWS, Prices, WindowChoice
from outrider.workers.engines.costs import CostCurve
from outrider.workers.engines.engine import Chosen, Engine, Feed
from outrider.workers.messages import Advance, DraftReply, DraftRequest, Row, Sampling
from outrider.workers.models.model_info import find
from outrider.workers.models.tokenizer import Tokenizer

# A token of the text takes 5 ms, to read one takes 0.3.
PRICES = Prices(200.0, 0.3e-3, 0.0)
GREEDY = Sampling()
PROMPTS = [
    "Once upon a time there was a small dog who lived near the river. ",
    "def add(a, b):\n    return a + b\n\n",
    "The weather was cold, and the children wanted to play in the snow. ",
    "Question: what is two and two? Answer: four. ",
    "She opened the door and saw that the room was empty. ",
    "Dear friend, I write to you about our trip to the mountains. ",
]


def experienced(accepted: int = 2, prices: Prices = PRICES) -> WindowChoice:
    """Of which it is known what whole texts bring, and what things take."""
    choice = WindowChoice()
    for _ in range(100):
        choice.observe(WHOLE, accepted, 4)
    choice.price(prices)
    return choice


def chosen(choice: WindowChoice, unread: int, seen: int = 0, to_read: int | None = None) -> int:
    """But for what is only tried."""
    windows = [choice.choose(seen, unread, unread if to_read is None else to_read) for _ in range(TRY_EVERY + 1)]
    return max(set(windows), key=windows.count)


def test_texts_are_read_whole_until_it_is_known_what_reading_takes() -> None:
    choice = WindowChoice()
    assert chosen(choice, 1000) == WHOLE == choice.best
    for unknown in (PRICES._replace(read=0.0), PRICES._replace(rate=0.0)):
        choice.price(unknown)
        assert chosen(choice, 1000) == WHOLE == choice.best
    choice.price(PRICES)
    assert chosen(choice, 1000) == choice.best != WHOLE, "a draft that is too dear for whole texts is tried at all"


def test_what_takes_longer_to_read_than_it_should_save_is_not_read() -> None:
    window = chosen(experienced(), 1000)
    assert SMALLEST <= window < 1000
    assert chosen(experienced(prices=PRICES._replace(read=PRICES.read / 100)), 1000) in (WHOLE, *range(window + 1, 1000))
    assert chosen(experienced(prices=PRICES._replace(read=1e-9)), 1000) == WHOLE, "what costs nothing may help"
    slow = chosen(experienced(prices=PRICES._replace(rate=20.0)), 1000)
    assert slow > window or slow == WHOLE, "where a token takes longer, one is worth more"
    assert chosen(experienced(), SMALLEST) == WHOLE, "less than the smallest window is left"


def test_a_context_that_every_pass_reads_is_weighed_too() -> None:
    free = PRICES._replace(read=1e-9)
    assert chosen(experienced(prices=free), 4000) == WHOLE
    assert SMALLEST <= chosen(experienced(prices=free._replace(context=2e-6)), 4000) < 1000


def test_what_other_rows_will_begin_with_as_well_is_read() -> None:
    assert chosen(experienced(), 1000) != WHOLE
    assert chosen(experienced(), 1000, to_read=40) == WHOLE


def test_rows_that_are_asked_about_often_are_worth_more_reading() -> None:
    seldom, often = experienced(), experienced()
    for _ in range(20):
        seldom.ended(2)
        often.ended(200)
    seldom.price(PRICES)
    often.price(PRICES)
    assert SMALLEST == seldom.best == chosen(seldom, 2000) < often.best


@pytest.mark.parametrize(("accepted", "kept"), [(0, False), (2, True)])
def test_a_window_is_kept_for_what_is_accepted_behind_it(accepted: int, kept: bool) -> None:
    choice = experienced()
    window = chosen(choice, 1000)
    for _ in range(1000):
        choice.observe(window, accepted, 4)
    choice.price(PRICES)
    assert (chosen(choice, 1000) == window == choice.best) == kept


def test_where_every_window_loses_what_it_saves_texts_are_read_whole_again() -> None:
    """And that shows without anybody's help: windows that bring little are left for larger ones."""
    choice, windows = experienced(accepted=3, prices=PRICES._replace(rate=50.0)), list[int]()
    for _ in range(80):
        windows.append(choice.choose(0, 600, 600))
        for _ in range(20):
            choice.observe(windows[-1], 3 if windows[-1] == WHOLE else 1, 4)
        choice.ended(20)
        choice.price(PRICES._replace(rate=50.0))
    assert windows[0] != WHOLE
    late = windows[-2 * TRY_EVERY :]
    assert late.count(WHOLE) >= len(late) - 2


def test_a_text_that_repeats_itself_says_little_for_its_window() -> None:
    """One row of sixteen candidates a round is one row."""
    choice = experienced()
    for _ in range(50):
        choice.observe(SMALLEST, 16, 16)
        choice.observe(2 * SMALLEST, 4, 16)
    assert choice.accepted(2 * SMALLEST) >= choice.accepted(SMALLEST) > 2.0


def test_one_row_in_some_tries_another_window() -> None:
    choice = experienced()
    windows = [choice.choose(0, 3000, 3000) for _ in range(TRY_EVERY * 12)]
    usual = max(set(windows), key=windows.count)
    assert windows.count(usual) >= len(windows) * (TRY_EVERY - 1) // TRY_EVERY
    assert {WHOLE, max(SMALLEST, usual // 2), 2 * usual} <= set(windows)


@given(
    st.lists(
        st.tuples(st.sampled_from([WHOLE, *WINDOWS]), st.integers(0, 16), st.integers(1, 5000), st.integers(1, 5000)),
        max_size=60,
    ),
    st.builds(Prices, st.floats(0, 1e5), st.floats(0, 0.1), st.floats(0, 1e-3)),
)
def test_a_choice_is_the_whole_text_or_a_window_that_is_smaller(
    rounds: Sequence[tuple[int, int, int, int]], prices: Prices
) -> None:
    choice = experienced()
    for window, accepted, unread, seen in rounds:
        choice.observe(window, accepted, 16)
        choice.price(prices)
        found = choice.choose(seen, unread, unread)
        assert found == WHOLE or (found in WINDOWS and found < unread)
        choice.ended(accepted)
        assert 0.0 <= choice.accepted(window) <= 16.0


def test_a_job_whose_text_changes_is_followed() -> None:
    choice = experienced()
    for _ in range(10_000):
        choice.observe(SMALLEST, 4, 4)
    before = choice.accepted(SMALLEST)
    for _ in range(10_000):
        choice.observe(SMALLEST, 0, 4)
    assert before > 3.5 and choice.accepted(SMALLEST) < 0.6


class SkippingEngine(FakeEngine):
    """Chooses by what a row sees of its text."""

    def __init__(self) -> None:
        super().__init__(1 << 14, choose=lambda tokens, sampling: hashed(tokens[self._begin :], sampling) % END)
        self.skipper = self
        self.begins: dict[int, int] = {}
        self._begin = 0

    def open(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        super().open(row, sampling, prompt_length)
        self.begins[row] = 0

    def skip(self, row: int, tokens: Sequence[int]) -> None:
        assert len(tokens) > 0
        self.rows[row].extend(tokens)
        self.begins[row] = len(self.rows[row])

    def fork(self, row: int, source: int, length: int, sampling: Sampling, prompt_length: int) -> None:
        assert self.begins[source] == 0, f"row {row} begins with what row {source} never read"
        super().fork(row, source, length, sampling, prompt_length)

    def _feed(self, feed: Feed) -> Chosen:
        self._begin = self.begins[feed.row]
        return super()._feed(feed)


def drafter_of(engine: Engine, window: int = SMALLEST, prefix_tokens: int = 0) -> Drafter:
    """One that has found this window to be the best."""
    drafter = Drafter(engine, {END}, prefix_tokens)
    for _ in range(1000):
        drafter._windows.observe(window, 2, 4)
    drafter._reading.observe(1, 0.3e-3)
    return drafter


def ask(drafter: Drafter, *rows: Advance, closed: Sequence[int] = (), rate: float = 200.0) -> DraftReply:
    return drafter.propose(DraftRequest(1, rows, tuple(closed), rate=rate))


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((7 * at + seed) % (END - 1) + 1 for at in range(length))


def written(tokens: Sequence[int], count: int) -> tuple[int, ...]:
    row = list(tokens)
    for _ in range(count):
        row.append(hashed(row, GREEDY) % END)
    return tuple(row[len(tokens) :])


def test_a_long_prompt_is_read_from_its_window_on_behind_its_first_token() -> None:
    engine = SkippingEngine()
    drafter, prompt = drafter_of(engine), text(300)
    reply = ask(drafter, Advance(1, 0, prompt, 3, GREEDY, 300))
    seen = [prompt[0], *prompt[-SMALLEST:]]
    assert [token for feed in engine.passes[0] for token in feed.tokens] == seen
    assert reply.tokens[1] == written(seen, 3)
    assert (reply.skipped, reply.window) == (300 - SMALLEST - 1, SMALLEST)
    assert engine.length(1) == 300 + 2, "places count from the text's beginning, as the noise of sampled rows does"
    # It goes on like any other row, and what was skipped is told once.
    again = ask(drafter, Advance(1, 300, (*reply.tokens[1][:2], 9), 2, None, 300))
    assert again.tokens[1] == written([*seen, *reply.tokens[1][:2], 9], 2)
    assert again.skipped == 0


def test_whoever_does_not_say_what_a_token_is_worth_has_texts_read_whole() -> None:
    engine, prompt = SkippingEngine(), text(300)
    reply = ask(drafter_of(engine), Advance(1, 0, prompt, 3, GREEDY, 300), rate=0.0)
    assert reply.tokens[1] == written(prompt, 3) and reply.skipped == 0


def test_an_engine_that_cannot_skip_reads_all() -> None:
    engine, prompt = FakeEngine(1 << 14, choose=lambda tokens, sampling: hashed(tokens, sampling) % END), text(300)
    reply = ask(drafter_of(engine), Advance(1, 0, prompt, 3, GREEDY, 300))
    assert reply.tokens[1] == written(prompt, 3) and reply.skipped == 0


def test_a_row_that_has_gone_on_for_long_without_the_draft_is_read_from_a_window_on() -> None:
    engine = SkippingEngine()
    drafter, row = drafter_of(engine), text(20)
    first = ask(drafter, Advance(1, 0, row, 2, GREEDY, 20)).tokens[1]
    assert first == written(row, 2)
    more = text(400, seed=5)
    engine.passes.clear()
    reply = ask(drafter, Advance(1, 20, more, 2, None, 20))
    seen = [row[0], *more[-SMALLEST:]]
    assert [token for feed in engine.passes[0] for token in feed.tokens] == seen
    assert reply.tokens[1] == written(seen, 2)


def test_a_beginning_that_comes_again_is_read_once_for_all() -> None:
    """The first row skips it, nobody knows better yet; the second reads it, and the others begin with that."""
    engine = SkippingEngine()
    drafter, system = drafter_of(engine, prefix_tokens=10_000), text(500)
    prompts = [(*system, *text(20, seed=3 + key)) for key in range(4)]
    skipped = []
    for key, prompt in enumerate(prompts):
        reply = ask(drafter, Advance(key, 0, prompt, 2, GREEDY, len(prompt)))
        skipped.append(reply.skipped)
        assert reply.tokens[key] == written(prompt if key else [prompt[0], *prompt[-SMALLEST:]], 2)
    assert skipped == [520 - SMALLEST - 1, 0, 0, 0]
    assert sum(len(feed.tokens) for feeds in engine.passes for feed in feeds) < 2 * 520
    # Of rows that have ended, too: what the first did not read is not kept for others.
    ask(drafter, closed=range(4))
    last = (*system, *text(20, seed=9))
    assert ask(drafter, Advance(9, 0, last, 2, GREEDY, 520)).tokens[9] == written(last, 2)


def test_tokens_that_the_draft_does_not_have_are_never_skipped() -> None:
    engine = SkippingEngine()
    reply = ask(drafter_of(engine), Advance(1, 0, (*text(300), engine.vocabulary), 3, GREEDY, 301))
    assert reply.tokens[1] == () and reply.skipped == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_depends_on_what_a_draft_left_unread(temperature: float) -> None:
    """And it guesses well all the same: sampled candidates too, whose noise goes by places in the whole text."""
    target, draft = (opened(find(name), "native", "w4a8") for name in ("pocket", "pocket-draft"))
    tokenizer = Tokenizer(find("pocket"))
    rows = []
    for key in range(len(PROMPTS)):
        prompt = tokenizer.encode("".join(PROMPTS[key:] + PROMPTS[:key]))
        assert len(prompt) > 2 * SMALLEST
        rows.append(Row(key, tuple(prompt), 40, Sampling(temperature=temperature, seed=key, end_tokens=())))
    plain, _ = write(target_of(target, 3, 0), rows)
    beside = draft_of(draft)
    drafters = {window: drafter_of(beside.drafter.engine, window) for window in (WHOLE, SMALLEST)}
    accepted = {}
    for window, drafter in drafters.items():
        assisted_target = target_of(target, 3, 4, Draft(draft, drafter))
        # Passes that take next to nothing: reading must be worth less.
        assisted_target.verifier.policy.verify_seconds = CostCurve({1: 1e-6 if window else 1e3})
        assisted, verifier = write(assisted_target, rows)
        assert {key: row.tokens for key, row in assisted.items()} == {key: row.tokens for key, row in plain.items()}
        assert (verifier.counters.draft_skipped > 0) == bool(window)
        accepted[window] = verifier.counters.accepted
    assert accepted[SMALLEST] > 0.8 * accepted[WHOLE] > 0
