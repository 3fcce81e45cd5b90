"""Arguments of attention on the hf engine: followed as transformers' own attention does, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    chunked_overlay,
    or_masks,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from outrider.workers.engines import hf_attention
from outrider.workers.engines.hf_attention import RowCache, Span, attend, current
from outrider.workers.engines.hf_masks import NotHonoured, describe

HEADS, SIZE, TOKENS = 2, 4, 5


class Module(torch.nn.Module):
    is_causal = True


def attention(module: torch.nn.Module | None = None, **keywords: Any) -> torch.Tensor:
    """Of one row of a few tokens."""
    numbers = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, HEADS, TOKENS, SIZE, generator=numbers) for _ in range(3))
    current.begin([Span(RowCache(), 0, TOKENS)], torch.arange(TOKENS), {}, fused=True)
    try:
        return attend(module or Module(), query, key, value, **keywords)[0]
    finally:
        current.end()


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"position_bias": torch.zeros(1)}, "a bias by position"),
        ({"indices": torch.zeros(1)}, "attention to selected tokens"),
        ({"frobnication": 3}, 'what it calls "frobnication"'),
        ({"frobnication": 0.0}, 'what it calls "frobnication"'),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "attention to tokens that come later"),
        ({"attention_mask": torch.ones(1, 1, TOKENS, TOKENS)}, "a mask of its own"),
        ({"s_aux": torch.zeros(HEADS, TOKENS)}, "sinks that differ by token"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(keywords: dict[str, Any], named: str) -> None:
    with pytest.raises(NotHonoured, match=named):
        attention(**keywords)


def test_a_module_that_looks_both_ways_is_refused() -> None:
    module = Module()
    module.is_causal = False
    with pytest.raises(NotHonoured, match="tokens that come later"):
        attention(module)


def test_what_says_nothing_changes_nothing() -> None:
    plain = attention()
    assert torch.equal(plain, attention(frobnication=None, output_attentions=False, position_ids=torch.zeros(1)))


@pytest.mark.parametrize("keywords", [{"softcap": 0.5}, {"s_aux": torch.tensor([1.0, -1.0])}, {"scaling": 0.1}])
def test_what_is_honoured_changes_the_numbers(keywords: dict[str, Any]) -> None:
    assert not torch.allclose(attention(), attention(**keywords), atol=1e-3)


@pytest.mark.parametrize(("cap", "sinks"), [(None, None), (0.5, None), (None, torch.tensor([1.0, -1.0]))])
def test_attention_spelled_out_is_that_of_gemma_2_and_gpt_oss(cap: float | None, sinks: torch.Tensor | None) -> None:
    numbers = torch.Generator().manual_seed(2)
    query, keys, values = (torch.randn(1, HEADS, TOKENS, SIZE, generator=numbers) for _ in range(3))
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    found = hf_attention._eager(query, keys, values, mask, 0.7, cap, sinks)
    module = Module()
    module.num_key_value_groups, module.sinks = 1, sinks
    added = torch.zeros(TOKENS, TOKENS).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    if sinks is None:
        from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

        wanted = eager_attention_forward(module, query, keys, values, added, scaling=0.7, softcap=cap)[0]
    else:
        from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

        wanted = eager_attention_forward(module, query, keys, values, added, scaling=0.7)[0]
    torch.testing.assert_close(found.transpose(1, 2), wanted, atol=1e-6, rtol=1e-5)


NO_PADDING = torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize(
    "function",
    [
        causal_mask_function,
        sliding_window_causal_mask_function(4),
        chunked_causal_mask_function(6, NO_PADDING),
        and_masks(chunked_overlay(6, NO_PADDING), sliding_window_overlay(4), causal_mask_function),
    ],
)
def test_a_row_sees_what_the_mask_function_of_transformers_lets_it_see(function: Any) -> None:
    mask = describe(function)
    for past in (0, 1, 5, 6, 11, 12, 20):
        for count in (1, 2, 7, 13):
            whole = sdpa_mask(1, count, past + count, past, 0, function, allow_is_causal_skip=False)[0, 0]
            first, seen = mask.of(past, count, torch.device("cpu"))
            assert not whole[:, :first].any()
            ours = torch.ones(count, past + count - first, dtype=torch.bool) if seen is None else seen
            assert torch.equal(ours, whole[:, first:]), (past, count)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (or_masks(causal_mask_function, sliding_window_overlay(3)), "or_masks"),
        (lambda batch, head, query, key: query >= key, "a mask of its own"),
        (sliding_window_overlay(3), "tokens that come later"),
    ],
)
def test_a_mask_that_is_not_known_is_refused(function: Any, named: str) -> None:
    with pytest.raises(NotHonoured, match=named):
        describe(function)
