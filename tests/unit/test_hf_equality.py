"""The rule of the house on the hf engine: assisted text is plain text, token for token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from built import draft_of, opened, target_of, write

from outrider.workers.engines.engine import Feed
from outrider.workers.engines.sampling import choose
from outrider.workers.messages import Row, Sampling
from outrider.workers.models.model_info import find
from outrider.workers.models.opening import OpenModel
from outrider.workers.models.tokenizer import Tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "prompts.jsonl"
PROMPTS = 24
TOKENS = 12
DRAWS = 10_000
# torch's kernels sum in another order at another batch, so one row may turn where two scores nearly tie.
MOST_TURNED = 1


@pytest.fixture(scope="module")
def pair() -> list[OpenModel]:
    return [opened(find(name), "hf", "fp32") for name in ("pocket", "pocket-draft")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(find("pocket"))


def random_rows(temperature: float) -> list[Row]:
    random = np.random.default_rng(11)
    return [
        Row(
            key=key,
            prompt=tuple(random.integers(1, 4096, size=random.integers(1, 40)).tolist()),
            max_tokens=TOKENS,
            sampling=Sampling(temperature=temperature, seed=int(random.integers(1 << 62))),
        )
        for key in range(PROMPTS)
    ]


def example_rows(tokenizer: Tokenizer, temperature: float) -> Iterator[Row]:
    for key, line in enumerate(EXAMPLES.read_text().splitlines()):
        entry = json.loads(line)
        prompt = entry.get("prompt") or entry.get("body", {}).get("prompt")
        if prompt:
            yield Row(key, tuple(tokenizer.encode(prompt)), TOKENS, Sampling(temperature=temperature, seed=key))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_assisted_text_is_plain_text(pair, tokenizer, temperature):
    target, draft = pair
    rows = random_rows(temperature)
    rows += [
        Row(row.key + PROMPTS, row.prompt, row.max_tokens, row.sampling) for row in example_rows(tokenizer, temperature)
    ]
    plain, _ = write(target_of(target, 1, 0), rows)
    assert len(plain) == len(rows)
    # One row at a time takes eight times as long, so a quarter of them has to do.
    for batch, count, given in ((1, 6, rows[::4]), (8, 1, rows[::2]), (8, 6, rows)):
        assisted, verifier = write(target_of(target, batch, count, draft_of(draft)), given)
        assert len(assisted) == len(given)
        turned = [key for key in assisted if assisted[key].tokens != plain[key].tokens]
        assert verifier.counters.accepted > 0, "the draft was never right, so nothing was tested"
        assert len(turned) <= MOST_TURNED, f"batch {batch}, k {count}: rows {turned} differ"
        # Where a row did turn, the verifier must have seen the tie that turned it.
        assert verifier.counters.near_ties >= len(turned)


@pytest.mark.slow
def test_greedy_text_is_what_transformers_generates(pair, tokenizer):
    target, draft = pair
    rows = list(example_rows(tokenizer, 0.0))
    ours, _ = write(target_of(target, 8, 4, draft_of(draft)), rows)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(find("pocket"), dtype=torch.float32)
    for row in rows:
        generated = model.generate(torch.tensor([row.prompt]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        assert ours[row.key].tokens == tuple(generated[0, len(row.prompt) :].tolist())


@pytest.mark.slow
def test_first_tokens_follow_the_targets_softmax(pair, tokenizer):
    target = pair[0].engine
    prompt = tokenizer.encode("def main(")
    target.open(0, Sampling(), len(prompt))
    logits = target.logits([Feed(0, prompt, 1)]).numpy()[0]
    target.close(0)
    counts = np.zeros(len(logits))
    for seed in range(DRAWS):
        counts[choose(logits, Sampling(temperature=1.0, seed=seed), len(prompt))[0]] += 1
    weights = np.exp(logits.astype(np.float64) - logits.max())
    expected = DRAWS * weights / weights.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    # A chi-square of n degrees of freedom is nearly normal, of mean n and variance 2n; five deviations: one in millions.
    freedom = len(wanted) - 1
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)
