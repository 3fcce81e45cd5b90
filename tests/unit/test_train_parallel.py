"""How a parallel draft is trained: a window with its blocks of masks says what passes over a text and masks say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from outrider.workers.models.mask_token import mask_token_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from train_parallel import backward, lay_out, masked_states, save_parallel, tokens_a_round, train_parallel, with_mask_token

LENGTH = 24


def test_each_mask_sees_its_text_and_the_masks_before_it() -> None:
    """What the draft will be fed, one block after the other, against all blocks at once."""
    model = tiny_model("llama").eval()
    vocabulary = model.config.vocab_size
    mask_token = vocabulary - 1
    layout = lay_out(LENGTH, np.random.default_rng(2), most_masks=4)
    window = torch.from_numpy(np.random.default_rng(3).integers(1, vocabulary - 1, size=(1, LENGTH + 1)))
    with torch.no_grad():
        together = masked_states(model, window, layout, mask_token)[0]
        assert layout.masks > LENGTH // 2
        for block in range(int(layout.blocks[-1]) + 1):
            places = LENGTH + np.flatnonzero(layout.blocks.numpy() == block)
            anchor = int(layout.positions[places[0]]) - 1
            text = [*window[0, : anchor + 1].tolist(), *[mask_token] * len(places)]
            alone = model.base_model(input_ids=torch.tensor([text])).last_hidden_state[0]
            torch.testing.assert_close(together[places], alone[anchor + 1 :], rtol=0, atol=1e-5)
            torch.testing.assert_close(together[anchor], alone[anchor], rtol=0, atol=1e-5)
            assert layout.labels[places].tolist() == list(range(anchor + 2, anchor + 2 + len(places)))


def test_most_blocks_are_short_and_all_windows_of_one_size() -> None:
    layouts = [lay_out(256, np.random.default_rng(seed)) for seed in range(4)]
    assert {len(layout.positions) for layout in layouts} == {256 + 384}
    lengths = np.concatenate([np.bincount(layout.blocks.numpy()) for layout in layouts])
    assert (lengths == 1).mean() > 0.2
    assert lengths.max() == 11


def test_an_id_is_added_where_the_tokenizer_gives_all() -> None:
    spare, full = tiny_model("llama"), tiny_model("llama")
    vocabulary = spare.config.vocab_size
    assert with_mask_token(spare, vocabulary - 7) == vocabulary - 1
    assert spare.config.vocab_size == vocabulary
    assert with_mask_token(full, vocabulary) == vocabulary
    assert full.config.vocab_size == full.get_input_embeddings().weight.shape[0] == vocabulary + 1


@pytest.mark.slow
def test_a_few_steps_teach_it_a_text_that_repeats_itself(tmp_path: Path) -> None:
    target, draft = tiny_model("llama"), tiny_model("llama", 1)
    stream = np.tile(np.arange(5, 15), 60)
    mask_token = with_mask_token(draft, draft.config.vocab_size - 1)
    layout = lay_out(64, np.random.default_rng(0))
    window = torch.from_numpy(np.stack([stream[:65]]))
    before = backward(draft, target, window, layout, mask_token)
    saved = []
    torch.set_num_threads(1)
    given = (lambda step: step / 24, 1e-2, 256, 64, saved.append)
    train_parallel(draft, target, [stream], stream, mask_token, *given)
    assert backward(draft, target, window, layout, mask_token) < before - 0.3
    assert saved
    assert tokens_a_round(draft, target, stream, mask_token) >= 1.0
    source = tmp_path / "draft"
    tiny_model("llama").save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    save_parallel(draft, source, tmp_path / "out", mask_token)
    assert mask_token_of(tmp_path / "out") == mask_token
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["pard_token"] == mask_token
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
