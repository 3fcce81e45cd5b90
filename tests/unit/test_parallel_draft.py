"""Parallel drafts: the masks that they are fed, their candidates, the cache after a pass, and the cost of a pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from math import inf
from pathlib import Path

import numpy as np
import pytest
from built import CURVE, draft_of, opened, target_of, write
from constrained import AtOnce, grammar, model, tokenizer
from fakes import END, VOCABULARY, FakeEngine, hashed
from native_models import save_tiny
from numpy.typing import NDArray

from outrider.workers.build import build_draft
from outrider.workers.draft.drafter import Drafter
from outrider.workers.draft.parallel import OnePass, decode_in_one_pass
from outrider.workers.engines.costs import CostCurve
from outrider.workers.engines.engine import Chosen, DecodeFeed, Feed
from outrider.workers.errors import ModelError
from outrider.workers.messages import Advance, DraftReply, DraftRequest, ModelSpec, ReplicaSpec, Row, Sampling
from outrider.workers.models.mask_token import mask_token_of
from outrider.workers.models.model_info import find
from outrider.workers.models.opening import open_model
from outrider.workers.models.preparation import prepare_pair
from outrider.workers.models.tokenizer import Tokenizer
from outrider.workers.speculation import MOST_CANDIDATES, DraftCost, LayoutKind, round_seconds
from outrider.workers.target.slots import best_request

MASK = 10
GREEDY = Sampling()


def never_ends(tokens: Sequence[int], sampling: Sampling) -> int:
    """Depends on the masks as on any token, but is none."""
    return hashed(tokens, sampling) % MASK


def guessed(text: Sequence[int], number: int) -> tuple[int, ...]:
    """What stands behind the text and behind each of the masks that follow it."""
    return tuple(never_ends([*text, *[MASK] * masks], GREEDY) for masks in range(number))


def drafter_of(engine: FakeEngine, curve: CostCurve | None = None) -> Drafter:
    return Drafter(engine, {END}, one_pass=OnePass(MASK, curve or CostCurve({1: 1.0, 64: 2.0})))


def ask(drafter: Drafter, *rows: Advance, confidence: float = 0.0) -> DraftReply:
    return drafter.propose(DraftRequest(1, rows, (), confidence))


def opening(key: int, tokens: Sequence[int], limit: int, sampling: Sampling = GREEDY) -> Advance:
    return Advance(key, 0, tuple(tokens), limit, sampling, len(tokens))


def test_all_candidates_of_all_rows_take_one_pass_and_no_mask_stays() -> None:
    engine = FakeEngine(choose=never_ends)
    reply = ask(drafter_of(engine), opening(1, (1, 2, 3), 4), opening(2, (5,), 6), opening(3, (4, 4), 0))
    assert reply.tokens == {1: guessed((1, 2, 3), 4), 2: guessed((5,), 6), 3: ()}
    assert [[list(feed.tokens) for feed in fed] for fed in engine.passes] == [[[1, 2, 3, *[MASK] * 3], [5, *[MASK] * 5]]]
    assert {row: tokens for row, tokens in engine.rows.items() if row < 3} == {1: [1, 2, 3], 2: [5]}
    assert reply.passes == 1


def test_only_what_was_committed_since_is_fed() -> None:
    engine = FakeEngine(choose=never_ends)
    drafter = drafter_of(engine)
    text = [1, 2, 3]
    reply = ask(drafter, opening(1, text, 3))
    for held in (0, 2, 3, 1):
        committed = (*reply.tokens[1][:held], 7)
        engine.passes.clear()
        reply = ask(drafter, Advance(1, len(text), committed, 3, None, 3))
        text.extend(committed)
        [[feed]] = engine.passes
        assert list(feed.tokens) == [*committed, MASK, MASK]
        assert engine.rows[1] == text
        assert reply.tokens[1] == guessed(text, 3), "all anew: what is left of the last guesses was made from further back"
        assert reply.forgotten == ()
        assert reply.passes == 1


def test_long_prompts_are_read_first_and_counted() -> None:
    engine = FakeEngine(context=600, choose=never_ends)
    prompt = [index % MASK for index in range(500)]
    reply = ask(drafter_of(engine), opening(1, prompt, 5))
    assert reply.tokens[1] == guessed(prompt, 5)
    assert reply.passes == len(engine.passes) == 2


def test_a_row_stops_at_an_end_and_at_a_mask_and_at_the_context() -> None:
    engine = FakeEngine(choose=lambda tokens, sampling: END if len(tokens) == 4 else 1)
    assert ask(drafter_of(engine), opening(1, (1, 2), 9)).tokens[1] == (1, 1, END)
    engine = FakeEngine(choose=lambda tokens, sampling: MASK if len(tokens) == 4 else 1)
    assert ask(drafter_of(engine), opening(1, (1, 2), 9)).tokens[1] == (1, 1)
    engine = FakeEngine(context=8, choose=never_ends)
    assert len(ask(drafter_of(engine), opening(1, (1, 2, 3, 4, 5, 6), 9)).tokens[1]) == 2


def test_a_pass_that_fails_leaves_no_mask_behind() -> None:
    class Failing(FakeEngine):
        def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
            answers = super().feed(feeds)
            if len(self.passes) == 2:
                raise RuntimeError("half done")
            return answers

    engine = Failing(choose=never_ends)
    drafter = drafter_of(engine)
    first = ask(drafter, opening(1, (1, 2, 3), 3)).tokens[1]
    with pytest.raises(RuntimeError):
        ask(drafter, Advance(1, 3, (first[0], 7), 3, None, 3))
    assert engine.rows[1] == [1, 2, 3]
    assert ask(drafter, Advance(1, 5, (5,), 3, None, 3)).tokens[1] == guessed((1, 2, 3, first[0], 7, 5), 3)


def test_candidates_that_seem_unlikely_are_not_sent() -> None:
    engine = FakeEngine(choose=never_ends)
    drafter = drafter_of(engine)
    text = [1, 2]
    ask(drafter, opening(1, text, 4))
    for _ in range(60):  # nothing that it says holds
        text.append(MASK + 1)
        reply = ask(drafter, Advance(1, len(text) - 1, (text[-1],), 4, None, 2))
    assert reply.tokens[1]
    assert not ask(drafter, Advance(1, len(text), (3,), 4, None, 2), confidence=0.4).tokens[1]


def test_how_sure_a_guess_may_be_depends_on_its_depth() -> None:
    """The first always holds and the second never, all as clear as one another."""
    drafter = drafter_of(FakeEngine(context=500, choose=never_ends))
    text = [1, 2]
    reply = ask(drafter, opening(1, text, 4))
    for _ in range(40):
        committed = (reply.tokens[1][0], MASK + 1)
        text.extend(committed)
        reply = ask(drafter, Advance(1, len(text) - 2, committed, 4, None, 2))
    assert len(reply.tokens[1]) == 4
    more = (reply.tokens[1][0], MASK + 1)
    assert len(ask(drafter, Advance(1, len(text), more, 4, None, 2), confidence=0.4).tokens[1]) == 1


def test_it_never_drafts_ahead() -> None:
    engine = FakeEngine(choose=never_ends)
    drafter = drafter_of(engine)
    ask(drafter, opening(1, (1, 2), 3))
    assert not drafter.draft_ahead()
    assert len(engine.passes) == 1


# Noise and runners-up, on real engines


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize("engine", ["native", pytest.param("hf", marks=pytest.mark.slow)])
def test_a_candidate_has_the_noise_of_its_own_position(
    tiny: Path, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So hot that the noise alone decides: then every candidate is what the target chooses, whatever the models say."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    target, draft = (opened(tiny, engine, "fp32") for _ in range(2))
    hot = Sampling(temperature=1e6, seed=9, end_tokens=())
    rows = [Row(key, tuple(range(5, 9 + key)), 29, hot) for key in range(3)]
    _, verifier = write(target_of(target, 3, 6, draft_of(draft, mask_token=202)), rows)
    counters = verifier.counters
    assert counters.accepted == counters.proposed > 60
    assert counters.draft_passes == 4, "28 tokens a row behind the first, seven a round"


def test_runners_up_come_with_the_pass(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    engine = opened(tiny, "native", "bf16").engine
    engine.open(1, Sampling(temperature=2.0, seed=4), 3)
    decoded = engine.decode([DecodeFeed(1, [5, 6, 7], 1, ())], drafter_of(FakeEngine()).confidence.stop_rule())
    engine.truncate(1, 0)
    [once] = decode_in_one_pass(engine, [DecodeFeed(1, [5, 6, 7], 4, ())], 202).chosen
    assert once.tokens[0] == decoded.chosen[0].tokens[0]
    assert once.runners_up[0] == decoded.chosen[0].runners_up[0]
    assert len(once.tokens) == len(once.runners_up) == len(once.margins) == 4
    assert all(token != other for token, other in zip(once.tokens, once.runners_up, strict=True))
    assert engine.length(1) == 3


# Constraints


class Alternating:
    """Allows even and odd tokens in turn; behind a 4 comes a 5, and needs no choice."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def fill(self, mask: NDArray[np.uint32]) -> None:
        for token in range(len(self.taken) % 2, VOCABULARY, 2):
            mask[token // 32] |= np.uint32(1 << token % 32)

    def follow(self, token: int) -> list[int] | None:
        if token % 2 != len(self.taken) % 2:
            return None
        self.taken.append(token)
        behind = [5] if token == 4 else []
        self.taken.extend(behind)
        return behind


@pytest.mark.parametrize(
    ("said", "tokens", "margins"),
    [
        ((2, 3, 6, 1), [2, 3, 6, 1], [1.0, 1.0, 1.0, 1.0]),
        ((2, 3, 7, 1), [2, 3], [1.0, 1.0]),
        ((3, 3, 7, 1), [], []),
        ((4, 9, 2, 2), [4, 5, 2], [1.0, inf, 1.0]),
        ((-1, 3, 2, 2), [], []),
    ],
)
def test_choices_go_on_as_far_as_a_guide_allows(said: Sequence[int], tokens: list[int], margins: list[float]) -> None:
    class Saying(FakeEngine):
        def feed(self, feeds: Sequence[Feed]) -> list[Chosen]:
            [feed], masks = feeds, feeds[0].masks
            assert masks is not None
            first, *others = masks.of.words[masks.first : masks.first + feed.choose]
            assert int(first[0]) == 0b010101010101, "the first as the guide says"
            assert all(int(each[0]) == 0xFFFFFFFF for each in others), "the others free"
            self.rows[feed.row].extend(feed.tokens)
            return [Chosen(list(said), [1.0] * 4)]

    engine = Saying()
    engine.open(1, GREEDY, 1)
    [chosen] = decode_in_one_pass(engine, [DecodeFeed(1, [1], 4, (), guide=Alternating())], MASK).chosen
    assert (chosen.tokens, chosen.margins) == (tokens, margins)


def test_constrained_rows_are_the_rows_of_plain_decoding() -> None:
    target, draft = model("pocket"), model("pocket-parallel", precision="w8a8")
    spec = ModelSpec("", draft.kind, "", mask_token=mask_token_of(find("pocket-parallel")))
    ids = tuple(tokenizer().encode("def main():\n"))
    rows = [
        Row(key, ids, 24, Sampling(temperature=0.7 * (key % 2), seed=key, grammar=grammar(name)))
        for key, name in zip(count(), ["record", "regex", "choice", "grammar", "record"], strict=False)
    ]
    rows.append(Row(9, ids, 24))
    plain, _ = write(target_of(target, 3, 0, tokenizer=tokenizer()), rows)
    by_draft = build_draft(spec, ReplicaSpec(1, None), draft, AtOnce(draft), CURVE)
    assisted, verifier = write(target_of(target, 3, 6, by_draft, tokenizer=tokenizer()), rows)
    assert {key: (row.tokens, row.text) for key, row in assisted.items()} == {
        key: (row.tokens, row.text) for key, row in plain.items()
    }
    assert verifier.counters.accepted > 0


# Costs


def test_the_costs_are_those_of_one_pass() -> None:
    steps, one_pass = DraftCost(0.1), DraftCost(0.0, one_pass=[0.1] * MOST_CANDIDATES)
    assert round_seconds(LayoutKind.SEQUENTIAL, 1.0, steps, 6, 1.0) == pytest.approx(1.6)
    assert round_seconds(LayoutKind.SEQUENTIAL, 1.0, one_pass, 6, 1.0) == pytest.approx(1.1)
    assert round_seconds(LayoutKind.SEQUENTIAL, 1.0, one_pass, 0, 1.0) == 1.0

    def verify(tokens: int) -> float:
        return 1.0 + 0.002 * tokens

    reaches = [[0.8**held for held in range(1, MOST_CANDIDATES + 1)]]
    by_steps, at_once = (best_request(reaches, verify, cost) for cost in (steps, one_pass))
    assert by_steps.counts[0] < 8 < at_once.counts[0], "where a pass has room, more candidates cost next to nothing"
    assert by_steps.least_sum > at_once.least_sum == 0.0, "one pass cannot be left half way"
    rising = DraftCost(0.0, one_pass=[0.1 * count for count in range(1, MOST_CANDIDATES + 1)])
    assert best_request(reaches, verify, rising).counts == by_steps.counts


def test_a_reply_says_what_a_pass_takes_by_the_number_of_candidates() -> None:
    engine = FakeEngine(context=500, choose=never_ends)
    drafter = drafter_of(engine, CostCurve({1: 1.0, 16: 1.0, 64: 4.0}))
    alone = ask(drafter, opening(1, (1, 2), 3)).one_pass
    both = ask(drafter, *(opening(key, (1, 2), 3) for key in range(2, 6))).one_pass
    assert len(alone) == len(both) == MOST_CANDIDATES
    assert list(alone) == sorted(alone)
    assert alone[0] < 0.1, "passes of this engine take far less than the curve says"
    assert alone[5] == pytest.approx(alone[0]), "six candidates of one row, where sixteen tokens cost what one does"
    assert both[11] > 2 * both[0], "twelve candidates of four rows"
    assert ask(Drafter(FakeEngine(choose=never_ends), ()), opening(1, (1, 2), 3)).one_pass == ()


# What configurations name


def config_at(folder: Path, **keys: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 100, **keys}))
    return folder


@pytest.mark.parametrize(
    ("keys", "token"),
    [
        ({}, None),
        ({"pard_token": 7}, 7),
        ({"pard_token": 7, "spd_type": "pard", "architectures": ["LlamaForCausalLM"]}, 7),
        ({"ptd_token_id": 0}, 0),
        ({"dflash_config": {"mask_token_id": 99}}, 99),
        ({"pard_token": 5, "ptd_token_id": 5, "pard2": False}, 5),
    ],
)
def test_the_mask_token_goes_by_several_names(tmp_path: Path, keys: dict[str, object], token: int | None) -> None:
    assert mask_token_of(config_at(tmp_path, **keys)) == token


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pard_token": 100}, '"pard_token" must be the id of one of 100 tokens'),
        ({"pard_token": True}, '"pard_token" must be'),
        ({"pard_token": 5, "ptd_token_id": 6}, "several mask tokens"),
        ({"pard_token": 5, "spd_type": "pard2"}, "\"spd_type\": 'pard2'"),
        ({"pard_token": 5, "pard2_target_layers": [3], "pard2_scale": 0.02}, '"pard2_target_layers", "pard2_scale"'),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1]}}, '"dflash_config.target_layer_ids"'),
        ({"pard_token": 5, "architectures": ["DFlashDraftModel"]}, "\"architectures\": 'DFlashDraftModel'"),
        ({"pard_token": 5, "architectures": "DFlashDraftModel"}, "(\"architectures\": 'DFlashDraftModel')"),
        ({"pard_token": 5, "architectures": 5}, '("architectures": 5)'),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(tmp_path: Path, keys: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        mask_token_of(config_at(tmp_path, **keys))
    assert said in str(caught.value)


def test_the_bundled_one_goes_with_the_bundled_target() -> None:
    target, draft, name, notes = prepare_pair("pocket", "pocket-parallel")
    assert draft is not None
    assert (name, notes) == ("pocket-parallel", [])
    assert draft.mask_token is not None
    assert draft.mask_token >= target.vocabulary, "an id that the tokenizer never gives"
    assert draft.vocabulary == draft.mask_token + 1
    assert sum(file.stat().st_size for file in Path(draft.path).iterdir()) <= 4 << 20


@pytest.mark.slow
def test_the_bundled_one_gains_a_token_a_round() -> None:
    """At six candidates a round over the prompts of the examples, where it writes 3.3 tokens a round."""
    target, draft, _, _ = prepare_pair("pocket", "pocket-parallel")
    assert draft is not None
    ids = Tokenizer(target.path)
    lines = map(json.loads, (Path(__file__).parents[2] / "examples" / "prompts.jsonl").read_text().splitlines())
    asked = [(line["prompt"], line.get("max_tokens", 64)) for line in lines if "prompt" in line]
    rows = [Row(key, tuple(ids.encode(prompt)), most, GREEDY) for key, (prompt, most) in enumerate(asked)]
    by_draft = draft_of(open_model(ModelSpec(draft.path, "native", "w8a8", threads=1)), mask_token=draft.mask_token)
    model = open_model(ModelSpec(target.path, "native", "w4a8", threads=1))
    _, verifier = write(target_of(model, 8, 6, by_draft, tokenizer=ids), rows)
    assert len(rows) > 15
    assert verifier.counters.tokens >= 2 * verifier.counters.row_rounds
