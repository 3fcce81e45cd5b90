"""Training of a parallel draft: a window with blocks of masks gives the logits of passes over the text with masks."""

from __future__ import annotations

import json
import sys
from errno import ENOSPC
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider.workers.errors import ModelError
from outrider.workers.models.mask_token import mask_token_of
from outrider.workers.models.model_info import find

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from train_parallel import (
    backward,
    lay_out,
    main,
    masked_states,
    reach_of,
    read_stream,
    refuse_untrainable,
    save_parallel,
    scores_of,
    tokens_a_round,
    train_parallel,
    with_mask_token,
)

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


@pytest.mark.parametrize("family", ["gemma2-caps", "granite"])
def test_scores_are_the_models_own(family: str) -> None:
    model = tiny_model(family).eval()
    window = torch.arange(5, 25)[None]
    with torch.no_grad():
        output = model(window, output_hidden_states=True)
        torch.testing.assert_close(scores_of(model, output.hidden_states[-1]), output.logits, rtol=0, atol=1e-5)
        refuse_untrainable(model, tiny_model(family, 1).eval(), model.config.vocab_size - 1)


def test_a_draft_with_another_memory_than_attention_is_refused() -> None:
    """Its convolutions would go from one block of masks into the next."""
    draft, target = tiny_model("lfm2").eval(), tiny_model("llama").eval()
    with pytest.raises(ModelError, match="not of attention alone"):
        refuse_untrainable(draft, target, draft.config.vocab_size - 1)


def test_no_window_is_longer_than_a_layer_sees() -> None:
    sees_seven, sees_all = tiny_model("mistral"), tiny_model("llama")
    assert reach_of(sees_seven, sees_all) == 7
    assert reach_of(sees_all, sees_seven) == 128


def test_of_a_drafts_files_its_weights_alone_are_not_taken_over(tmp_path: Path) -> None:
    model, source = tiny_model("llama"), tmp_path / "draft"
    model.to(torch.bfloat16).save_pretrained(source, max_shard_size="100KB")
    (source / "pytorch_model.bin").write_bytes(b"the same weights")
    (source / "tokenizer.json").write_text("{}")
    config = json.loads((source / "config.json").read_text())
    # As configurations had it before transformers 5.
    (source / "config.json").write_text(json.dumps({**config, "dtype": None, "torch_dtype": config["dtype"]}))
    save_parallel(model, source, tmp_path / "out", 7)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def pocket_with(path: Path, end: str | None, **ids: int) -> Path:
    """A tiny draft with the bundled tokenizer, in which some tokens have other ids."""
    tokenizer = json.loads((find("pocket") / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"].update(ids)
    size = 1 + max(tokenizer["model"]["vocab"].values())
    tiny_model("llama", vocab_size=size).save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((find("pocket") / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": end}))
    return path


def trained(monkeypatch: pytest.MonkeyPatch, draft: Path, out: Path, text: str | bytes, length: int = 16) -> None:
    """A step or two by the tool's own door."""
    (out.parent / "text.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setattr("train_parallel.cpu_minutes", lambda minutes: lambda step: step / 1)
    given = ["--target", str(find("pocket-draft")), "--draft", str(draft), "--out", str(out)]
    given += ["--length", str(length), "--tokens", "32", "--threads", "1", str(out.parent / "text.txt")]
    monkeypatch.setattr(sys, "argv", ["train_parallel.py", *given])
    main()


@pytest.mark.slow
def test_a_tokenizer_may_name_no_end_and_leave_ids_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = pocket_with(tmp_path / "draft", end=None, z=4100)
    trained(monkeypatch, draft, tmp_path / "out", "def main():\n    return 0\n" * 200)
    # The id 4100 is a token's, though there are but 4096.
    assert mask_token_of(tmp_path / "out") == 4101
    # One that is trained on keeps its mask token.
    trained(monkeypatch, tmp_path / "out", tmp_path / "more", "import os\n" * 500)
    assert mask_token_of(tmp_path / "more") == 4101


def test_a_draft_with_other_tokens_than_the_targets_is_refused_before_it_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = json.loads((find("pocket") / "tokenizer.json").read_text())["model"]["vocab"]
    draft = pocket_with(tmp_path / "draft", end="<|endoftext|>", y=ids["z"], z=ids["y"])
    with pytest.raises(SystemExit):
        trained(monkeypatch, draft, tmp_path / "out", "def main():\n" * 400)
    assert "token ids mean something else" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_it_learns_is_told_of_short_windows_and_of_few_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four windows of two tokens say nothing of six candidates: enough is held out for one that does."""
    trained(monkeypatch, find("pocket-draft"), tmp_path / "out", "x = 1\n" * 200, length=2)
    assert mask_token_of(tmp_path / "out") == 4096
    told = capsys.readouterr().out
    assert float(told.split()[-1]) >= 1.0, told


def test_a_target_that_transformers_cannot_run_is_told() -> None:
    target, draft = tiny_model("llama").eval(), tiny_model("llama", 1).eval()
    del target.base_model.layers[0].mlp.down_proj.weight  # as one whose weights are packed has none
    with pytest.raises(ModelError, match=r"transformers cannot run the target: .*; of one that is quantised give"):
        refuse_untrainable(draft, target, draft.config.vocab_size - 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "the texts come to 1 tokens: too few to learn from; give 640, or a shorter --length"),
        (b"fine\n\xff\n", "text.txt:2: this is not UTF-8"),
    ],
)
def test_texts_that_teach_nothing_are_told(
    text: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        trained(monkeypatch, find("pocket-draft"), tmp_path / "out", text)
    assert said in capsys.readouterr().err


def test_a_text_that_cannot_be_read_is_told() -> None:
    with pytest.raises(ModelError, match=r"^texts: /proc/self/mem cannot be read: Input/output error$"):
        read_stream(AutoTokenizer.from_pretrained(find("pocket-draft")), [Path("/proc/self/mem")])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "stopped; nothing was saved yet"),
        (OSError(ENOSPC, "No space left on device"), 1, "out cannot be written: [Errno 28] No space left on device"),
    ],
)
def test_a_training_that_ends_early_says_so(
    ends: BaseException,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def training(*given: object) -> None:
        raise ends

    monkeypatch.setattr("train_parallel.train_parallel", training)
    with pytest.raises(SystemExit) as ended:
        trained(monkeypatch, find("pocket-draft"), tmp_path / "out", "import os\n" * 500)
    assert ended.value.code == code and said in capsys.readouterr().err


def test_what_was_saved_outlives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source, out = tiny_model("llama"), tmp_path / "draft", tmp_path / "out"
    model.save_pretrained(source)
    save_parallel(model, source, out, 7)
    before = (out / "model.safetensors").read_bytes()

    def full(self: object, path: Path) -> None:
        (path / "model.safetensors").write_bytes(before[:100])
        raise OSError(ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        with pytest.raises(OSError, match="No space left"):
            save_parallel(model, source, out, 7)
    assert (out / "model.safetensors").read_bytes() == before
    save_parallel(model, source, out, 7)
    assert {path.name for path in tmp_path.iterdir()} == {"draft", "out"}


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
