"""The compiled choice of a token against its definition, score for score and token for token."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_models import LLAMA, LONG, packed, tokens

from examples import examples
from outrider.kernels import arithmetic, library, native
from outrider.kernels.native import NativeFeed
from outrider.kernels.program import Format
from outrider.workers.engines import sampling as definition
from outrider.workers.engines.engine import MOST_RANKED
from outrider.workers.messages import Sampling

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from((0.0, 0.3, 0.7, 1.0, 1.7)),
    top_k=st.sampled_from((0, 1, 3, 40, 5000, (1 << 32) + 1)),
    top_p=st.sampled_from((1.0, 0.95, 0.5, 0.01)),
    min_p=st.sampled_from((0.0, 0.02, 0.4)),
    seed=st.integers(0, 2**64 - 1),
    sample=st.integers(0, 7),
    repetition_penalty=st.sampled_from((1.0, 1.3, 0.8)),
    presence_penalty=st.sampled_from((0.0, 0.6)),
    frequency_penalty=st.sampled_from((0.0, -0.4, 1.1)),
    logit_bias=st.lists(st.tuples(st.integers(0, 4), st.sampled_from((-100.0, 3.5))), max_size=3).map(tuple),
    min_tokens=st.sampled_from((0, 1, 8, 30)),
    end_tokens=st.one_of(st.none(), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
)


# Of the tokens that a mask allows; None: no mask.
SHARES = st.sampled_from((None, None, 0.0, 0.01, 0.5, 1.0))


def masked(generator: np.random.Generator, vocabulary: int, share: float) -> np.ndarray:
    """Bits at random, those beyond the vocabulary set, which mean nothing."""
    bits = generator.random(-(-vocabulary // 32) * 32) < share
    bits[vocabulary:] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def counts(history: list[int]) -> dict[int, int]:
    return {token: history.count(token) for token in history}


@pytest.mark.parametrize("isa", library.available_instruction_sets())
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_scores_and_choices_are_the_definitions(isa, data):
    vocabulary = data.draw(st.sampled_from((5, 17, 64, 1000, 4099)))
    generator = np.random.default_rng(data.draw(st.integers(0, 1 << 16)))
    logits = (generator.standard_normal(vocabulary) * data.draw(st.sampled_from((0.1, 3.0, 30.0)))).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.round(logits)  # many equal scores
    history = generator.integers(0, vocabulary, data.draw(st.integers(0, 30))).tolist()
    prompt = data.draw(st.integers(0, len(history)))
    sampling = data.draw(SAMPLINGS)
    past = counts(history[:prompt]), counts(history[prompt:])
    mask = masked(generator, vocabulary, share) if (share := data.draw(SHARES)) is not None else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_ISA", isa)
        token, runner_up, margin, scores = native.choose(logits, sampling, history, prompt, mask=mask)
        # Where the scores are not asked for some choices take a shorter way.
        assert native.choose(logits, sampling, history, prompt, False, mask)[:3] == (token, runner_up, margin)
    wanted_scores = definition.process(logits, sampling, *past, mask)
    np.testing.assert_array_equal(scores, wanted_scores)
    wanted, wanted_lead = definition.choose(logits, sampling, len(history), *past, mask)
    assert token == wanted
    assert margin == wanted_lead
    if wanted < 0:
        assert runner_up == -1
        return
    if not sampling.greedy:
        wanted_scores += arithmetic.gumbel(sampling.seed, sampling.sample, len(history), vocabulary)
    wanted_scores[wanted] = -np.inf
    assert runner_up == (wanted_scores.argmax() if wanted_scores.max() > -np.inf else -1)


@pytest.mark.parametrize("isa", library.available_instruction_sets())
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_log_probabilities_are_the_definitions(isa, data):
    vocabulary = data.draw(st.sampled_from((1, 5, 17, 64, 1000, 4099)))
    generator = np.random.default_rng(data.draw(st.integers(0, 1 << 16)))
    logits = (generator.standard_normal(vocabulary) * data.draw(st.sampled_from((0.0, 0.1, 3.0, 400.0)))).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.round(logits)  # many equal scores
    chosen = data.draw(st.integers(0, vocabulary - 1))
    count = data.draw(st.integers(0, min(20, vocabulary)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_ISA", isa)
        found = native.log_probabilities(logits, chosen, count)
    assert found == definition.log_probabilities(logits, chosen, count)


@pytest.mark.parametrize(("chosen", "count"), [(40, 0), (-1, 0), (0, 41), (0, -1)])
def test_log_probabilities_that_cannot_be_are_refused(chosen, count):
    with pytest.raises(library.KernelError, match="of a vocabulary of 40"):
        native.log_probabilities(np.zeros(40, np.float32), chosen, count)


def test_behind_memory_that_was_taken_anew_no_choice_can_be_ranked():
    """Its scores may lie elsewhere."""
    with packed(LLAMA, Format.W8A8).model() as engine:
        engine.forward([NativeFeed(engine.open(), [1, 2, 3])])
        assert len(engine.rank(0, 2)) == 2
        engine.reserve(400, 300, 64)
        with pytest.raises(library.KernelError, match="choice 0 is not one of the latest pass"):
            engine.rank(0, 2)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8, seed=5),
        Sampling(temperature=0.9, top_p=0.9, seed=7, repetition_penalty=1.2),
        Sampling(presence_penalty=0.7),
    ],
)
def test_what_else_a_choice_could_have_been_is_told_behind_the_pass(sampling):
    model = packed(LLAMA, Format.W8A8)
    text, prompt = tokens(LLAMA, 20), 12
    generator = np.random.default_rng(3)
    with model.model(threads=2) as engine:
        other, row = engine.open(), engine.open(sampling, prompt)
        engine.forward([NativeFeed(row, text[:10], choose=0)])
        feeds = [NativeFeed(other, text[:9], choose=2, branches=[(8, 5)]), NativeFeed(row, text[10:], choose=4, logits=4)]
        _, answer = engine.forward(feeds)
        for index in (3, 1, 0):
            length = 17 + index
            engine.truncate(row, length)
            past = counts(text[:prompt]), counts(text[prompt:length])
            for mask in (None, masked(generator, LLAMA.vocabulary, 0.3), masked(generator, LLAMA.vocabulary, 0.0)):
                scores = definition.process(answer.logits[index], sampling, *past, mask)
                if not sampling.greedy:
                    scores += arithmetic.gumbel(sampling.seed, sampling.sample, length, LLAMA.vocabulary)
                wanted = [
                    token for token in np.argsort(-scores, kind="stable")[:MOST_RANKED].tolist() if scores[token] > -np.inf
                ]
                assert engine.rank(3 + index, MOST_RANKED, mask) == wanted
                assert engine.rank(3 + index, 1, mask) == wanted[:1]
        with pytest.raises(library.KernelError, match="row 1 does not hold what stood before choice 6 any more"):
            engine.rank(6, 1)
        for choice in (-1, 2, 7):  # 2 is a branch's
            with pytest.raises(library.KernelError, match=f"choice {choice} is not one of the latest pass"):
                engine.rank(choice, 1)
        with pytest.raises(library.KernelError, match=f"{MOST_RANKED + 1} tokens ranked"):
            engine.rank(0, MOST_RANKED + 1)
        with pytest.raises(library.KernelError, match="a mask of 1 words"):
            engine.rank(0, 1, np.zeros(1, np.uint32))


def test_every_position_of_a_pass_has_its_own_past_and_noise():
    model = packed(LLAMA, Format.W8A8)
    text, prompt = tokens(LLAMA, 40), 12
    sampling = Sampling(
        temperature=0.9,
        top_p=0.9,
        seed=77,
        sample=3,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        min_tokens=20,
        end_tokens=tuple(range(0, LLAMA.vocabulary, 2)),
    )
    with model.model(threads=2) as engine:
        row = engine.open(sampling, prompt)
        engine.forward([NativeFeed(row, text[:10], choose=0)])
        other = NativeFeed(engine.open(), text[:9], choose=3, logprobs=0)
        answer, _ = engine.forward([NativeFeed(row, text[10:], choose=30, logits=30, logprobs=5), other])
        for index, logits in enumerate(answer.logits):
            length = 11 + index
            past = counts(text[:length][:prompt]), counts(text[prompt:length])
            token, margin = definition.choose(logits, sampling, length, *past)
            assert (token, margin) == (answer.tokens[index], answer.margins[index]), f"after {length} tokens"
            assert answer.logprobs[index] == definition.log_probabilities(logits, token, 5)
            assert token % 2 or length >= prompt + 20, "an end token before min_tokens"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_no_number_is_an_error(bad):
    logits = np.zeros(40, np.float32)
    logits[33] = bad
    with pytest.raises(library.KernelError, match="not a finite number"):
        native.choose(logits, Sampling(), [], 0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -1.0}, "temperature -1: it must be 0 or more"),
        ({"temperature": np.inf}, "temperature inf: it must be 0 or more, and finite"),
        ({"repetition_penalty": 0.0}, "repetition penalty 0: it must be more than 0"),
        ({"repetition_penalty": np.inf}, "repetition penalty inf: it must be more than 0, and finite"),
        *(({"top_p": value}, f"top_p {value:g}: it must be more than 0") for value in (0.0, -0.5, 1.5, np.nan, np.inf)),
        *(({"min_p": value}, f"min_p {value:g}: it must be from 0 to 1") for value in (-0.1, 1.5, np.nan)),
        ({"presence_penalty": np.nan}, "presence penalty nan: it must be finite"),
        ({"frequency_penalty": -np.inf}, "frequency penalty -inf: it must be finite"),
        ({"logit_bias": ((99, 1.0),)}, "a bias on token 99 of a vocabulary of 40"),
        ({"logit_bias": ((9, np.nan),)}, "a bias of nan on token 9: it must be finite"),
        ({"end_tokens": (99,)}, "end token 99 of a vocabulary of 40"),
    ],
)
def test_parameters_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(library.KernelError, match=said):
        native.choose(np.zeros(40, np.float32), Sampling(**wrong), [], 0)


def test_a_pass_waits_for_masks_and_keeps_to_them() -> None:
    model, text = packed(LLAMA, Format.FP32), tokens(LLAMA, 9)
    words = -(-LLAMA.vocabulary // 32)
    masks = native.NativeMasks(np.zeros((4, words), np.uint32), np.zeros(1, np.int32))

    def make() -> None:
        for at, allowed in enumerate(((5,), (1, 2, 3), ())):
            for token in allowed:
                masks.words[1 + at, token // 32] |= np.uint32(1 << token % 32)
        masks.ready[0] = 1

    with model.model(threads=2) as engine:
        free = engine.forward([NativeFeed(engine.open(), text, choose=3, logits=3)])[0]
        later = threading.Timer(0.05, make)
        later.start()
        feeds = [NativeFeed(engine.open(), text, choose=3, first_mask=1), NativeFeed(engine.open(), text, choose=3)]
        held, untouched = engine.forward(feeds, masks)
        later.join()
    assert held.tokens == [5, 1 + int(free.logits[1, 1:4].argmax()), -1]
    assert untouched.tokens == free.tokens


@pytest.mark.parametrize("fed", [3, 9])
def test_masks_of_a_row_that_grows_beyond_the_switch_of_its_rope(fed: int) -> None:
    """Its choices are made in two passes, and each keeps its own mask."""
    model, text = packed(LONG, Format.FP32), tokens(LONG, LONG.longest + 2)
    words = -(-LONG.vocabulary // 32)
    allowed = [int(token) for token in np.random.default_rng(fed).integers(0, LONG.vocabulary, fed)]
    # What is fed is what is chosen: behind anything else nobody looks.
    text[len(text) - fed + 1 :] = allowed[:-1]
    masks = native.NativeMasks(np.zeros((fed, words), np.uint32), np.ones(1, np.int32))
    for at, token in enumerate(allowed):
        masks.words[at, token // 32] |= np.uint32(1 << token % 32)
    with model.model() as engine:
        row = engine.open()
        engine.forward([NativeFeed(row, text[:-fed], choose=0)])
        assert engine.forward([NativeFeed(row, text[-fed:], choose=fed, first_mask=0)], masks)[0].tokens == allowed


def test_masks_that_are_too_short_are_refused() -> None:
    model = packed(LLAMA, Format.FP32)
    masks = native.NativeMasks(np.zeros((1, 1), np.uint32), np.ones(1, np.int32))
    with (
        model.model() as engine,
        pytest.raises(library.KernelError, match=f"masks of 1 words for a vocabulary of {LLAMA.vocabulary}"),
    ):
        engine.forward([NativeFeed(engine.open(), [1], first_mask=0)], masks)


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64, 95, 4000])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_mask_that_allows_everything_is_none_and_one_token_less_is_seen(vocabulary: int, temperature: float) -> None:
    random = np.random.default_rng(vocabulary)
    logits, sampling = random.normal(size=vocabulary).astype(np.float32), Sampling(temperature=temperature, seed=3)
    free = native.choose(logits, sampling, [], 0, with_scores=False)[:3]
    for beyond in (0, 0xFFFFFFFF):  # bits that are no token's
        everything = np.full(-(-vocabulary // 32), 0xFFFFFFFF, np.uint32)
        if vocabulary % 32:
            own = (1 << vocabulary % 32) - 1
            everything[-1] = own | (beyond & ~own)
        assert native.choose(logits, sampling, [], 0, with_scores=False, mask=everything)[:3] == free
        for token in {free[0], 0, vocabulary - 1}:
            less = everything.copy()
            less[token // 32] &= ~np.uint32(1 << token % 32)
            found = native.choose(logits, sampling, [], 0, with_scores=False, mask=less)[0]
            assert found != token if token == free[0] else found == free[0]


@pytest.mark.parametrize("density", [0.1, 0.6, 0.97])
@pytest.mark.parametrize("seed", range(8))
def test_a_greedy_choice_under_a_mask_is_that_of_all_scores(density: float, seed: int) -> None:
    """With ties. The scores are all looked at where they are wanted."""
    random = np.random.default_rng(seed)
    logits = random.integers(0, 12 if seed % 2 else 10_000, 1000).astype(np.float32)
    bits = random.random(1024) < density
    mask = np.packbits(bits, bitorder="little").view(np.uint32)
    quick = native.choose(logits, Sampling(), [], 0, with_scores=False, mask=mask)[:3]
    assert quick == native.choose(logits, Sampling(), [], 0, with_scores=True, mask=mask)[:3]
    allowed = np.where(bits[:1000], logits, -np.inf)
    assert quick[0] == int(allowed.argmax()) and quick[2] == np.diff(np.sort(allowed)[-2:])[0]
