"""The twin of a tiny model: other people's tests have two heads, or three, or fewer channels and tokens than the twin."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from outrider.workers.errors import ModelError
from outrider.workers.models.probe import find_batching
from outrider.workers.models.twins import twin_config

SHAPES = [  # heads, heads of keys, their size
    ("llama", 1, 1, 8),
    ("llama", 2, 2, 64),
    ("gemma2", 3, 1, 16),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("qwen3", 2, 1, 16), ("llama", 3, 3, 12), ("qwen3", 5, 5, 8), ("gemma2", 6, 2, 8), ("llama", 8, 4, 4))
    ),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "heads", "key_heads", "size"), SHAPES)
def test_a_model_of_few_heads_has_a_twin_that_runs(family: str, heads: int, key_heads: int, size: int) -> None:
    config = AutoConfig.for_model(
        family,
        hidden_size=heads * size,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=size,
        intermediate_size=2 * heads * size,
        num_hidden_layers=2,
        vocab_size=60,
    )
    assert find_batching(config).ragged


@pytest.mark.parametrize(
    ("family", "heads"),
    [
        ("gpt2", 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("gpt_neox", 3), ("opt", 5), ("qwen3_next", 3))),
    ],
)
def test_one_of_the_older_and_of_the_newer_names(family: str, heads: int) -> None:
    names = {"gpt2": {"n_head": heads, "n_embd": 8 * heads, "n_layer": 2}}.get(
        family, {"num_attention_heads": heads, "hidden_size": 8 * heads, "num_hidden_layers": 4}
    )
    if family == "qwen3_next":
        names |= {"num_key_value_heads": 1, "linear_num_value_heads": heads, "linear_num_key_heads": heads, "head_dim": 8}
    find_batching(AutoConfig.for_model(family, vocab_size=60, **names))


@pytest.mark.parametrize("family", ["siglip", "paligemma", "qwen2_5_omni"])
def test_a_family_without_a_language_model_of_its_own_is_refused(family: str) -> None:
    """It was said in transformers' words, which name classes."""
    with pytest.raises(ModelError, match=r"^transformers has no causal language model of this family"):
        find_batching(AutoConfig.for_model(family))


def test_layers_that_a_list_names_are_among_those_of_the_twin() -> None:
    config = twin_config(AutoConfig.for_model("bamba", num_hidden_layers=32, attn_layer_indices=[9, 18, 27]))
    assert (config.num_hidden_layers, config.attn_layer_indices) == (4, [2, 3])
