"""Tokenizers with which an older outrider decoded answers without their first space."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.prepare_job import drops_first_space
from outrider.workers.models import preparation
from outrider.workers.models.model_info import find

PIECES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def drops(path: Path) -> bool:
    return drops_first_space(cast(TokenizerProcess, preparation), str(path))


def test_most_tokenizers_keep_the_first_space() -> None:
    assert not drops(find("pocket"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("decoder", "dropped"),
    [
        (decoders.Sequence([*PIECES, decoders.Strip(" ", 1, 0)]), True),  # Llama 2's
        (decoders.Metaspace(), True),
        (decoders.Sequence(PIECES), False),  # Gemma's
    ],
)
def test_tokenizers_with_marks_for_spaces(decoder: Any, dropped: bool, tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE({"<s>": 0, "▁": 1, "a": 2, "▁a": 3}, [("▁", "a")]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(tmp_path)
    assert drops(tmp_path) == dropped


def test_words_that_cannot_be_told_apart_keep_nobody_from_going_on(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    backend.decoder = decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(tmp_path)
    assert not drops(tmp_path)
