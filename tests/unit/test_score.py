"""``outrider score``: its arithmetic, its windows, and that transformers finds the same perplexity on the same chunks."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import zstandard
from command_line import outrider
from hypothesis import given
from hypothesis import strategies as st
from native_models import save_tiny
from transformers import AutoModelForCausalLM

from outrider.runner.options.option import build_options
from outrider.runner.options.quality import ScoreSpec
from outrider.runner.planning.replica_memory import ProcessMemory
from outrider.runner.quality import score as score_module
from outrider.runner.quality import texts as texts_module
from outrider.runner.quality.score import chunking, first_tokens
from outrider.runner.quality.texts import opened_source, texts
from outrider.workers.engines.hf_rows import HfRowEngine
from outrider.workers.errors import InputError, JobError, UsageError
from outrider.workers.messages import ModelSpec
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.model_memory import ModelMemory
from outrider.workers.scoring import scorer as scorer_module
from outrider.workers.scoring import windows as windows_module
from outrider.workers.scoring.figures import Figures, of_logits, of_two
from outrider.workers.scoring.scorer import Scorer
from outrider.workers.scoring.windows import Window, windows_of

MODEL_INFO = ModelInfo("tiny", "/models/tiny", "llama", 128, 500, "float32", (2,), 1, "digest")
TOKENS = np.random.default_rng(5).integers(0, 203, 300).tolist()


def test_figures_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    ours, theirs = (torch.randn(40, 17, generator=generator) * 3 for _ in range(2))
    wanted = torch.randint(0, 17, (40,), generator=generator)
    found = of_two(ours.numpy(), theirs.numpy(), wanted.numpy())
    assert found.perplexity == pytest.approx(torch.nn.functional.cross_entropy(ours, wanted).exp().item(), rel=1e-5)
    assert found.other_perplexity == pytest.approx(torch.nn.functional.cross_entropy(theirs, wanted).exp().item(), rel=1e-5)
    kl = torch.nn.functional.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean")
    assert found.kl == pytest.approx(kl.item(), rel=1e-5)
    assert found.same == (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
    assert of_logits(ours.numpy(), wanted.numpy()).loss == found.loss


def test_a_model_agrees_with_itself_and_with_one_that_pads_its_vocabulary() -> None:
    logits = np.random.default_rng(0).normal(size=(9, 11)).astype(np.float32)
    padded = np.concatenate([logits, np.full((9, 5), 8, np.float32)], axis=1)
    wanted = np.arange(9)
    for other in (logits, padded):
        found = of_two(logits, other, wanted)
        assert found.kl == pytest.approx(0.0, abs=1e-12) and found.agreement == 1.0
    assert of_two(logits, padded, wanted).other_perplexity > of_two(logits, logits, wanted).other_perplexity


def test_a_token_that_the_other_rules_out_adds_nothing_to_the_divergence() -> None:
    logits = np.zeros((1, 3), np.float32)
    other = np.array([[0.0, 0.0, -np.inf]], np.float32)
    assert of_two(logits, other, np.array([0])).kl == pytest.approx(math.log(3 / 2))


@given(st.integers(1, 200), st.integers(2, 40), st.data())
def test_every_token_is_scored_once_with_as_much_before_it_as_windows_allow(length: int, size: int, data: Any) -> None:
    stride = data.draw(st.integers(1, size))
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4)))
    text = list(range(length))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, length], strict=True)]
    scored: list[int] = []
    for window in windows_of(pieces, size, stride):
        assert len(window.tokens) <= size and window.scored > 0
        assert list(window.tokens) == text[window.tokens[0] : window.tokens[-1] + 1]
        scored += window.tokens[window.first :]
    # Only what begins a window that overlaps none is not predicted.
    expected = [token for token in text if token and (stride < size or token % size)]
    assert scored == expected


def test_the_process_is_planned_with_its_window_and_the_scores_of_a_pass() -> None:
    """Of 32,000 tokens a pass over 512 has 66 MB of scores: measured, one model took 5 times that and two took 11.8."""
    model = ModelMemory(weights=535_000_000, working=136_000_000, token=8192, first_tokens=256)
    held = [ProcessMemory(model, "native", True)] * 2
    scores = 32_000 * 512 * 4
    assert score_module._needed(held[:1], 2048, 32_000) == 100_000_000 + 671_000_000 + 2048 * 8192 + 6 * scores
    assert score_module._needed(held, 100, 32_000) == 100_000_000 + 2 * (671_000_000 + 512 * 8192) + 12 * scores
    assert score_module._needed(held[:1], 100, 256_000) < 100_000_000 + 671_000_000 + 512 * 8192 + 6 * (65 << 20)


def test_the_last_window_is_cut_where_so_many_tokens_are_scored() -> None:
    windows = list(first_tokens(windows_of([range(100)], 10, 10), 12))
    assert [window.scored for window in windows] == [9, 3]
    assert sum(window.scored for window in first_tokens(windows_of([range(100)], 10, 10), None)) == 90


def chunk_perplexity(path: Path, windows: list[Window]) -> float:
    """As it is usually done: transformers' own loss of each chunk, weighted by what was predicted in it."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    loss = count = 0.0
    for window in windows:
        ids = torch.tensor([window.tokens])
        labels = ids.clone()
        labels[:, : window.first] = -100
        with torch.inference_mode():
            loss += model(input_ids=ids, labels=labels).loss.item() * window.scored
        count += window.scored
    return math.exp(loss / count)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("engine", ["native", "hf", "hf rows"])
@pytest.mark.parametrize("stride", [64, 40])
def test_transformers_gives_the_same_perplexity_on_the_same_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, stride: int
) -> None:
    path = save_tiny("llama", tmp_path)
    windows = [*windows_of([TOKENS[:50], TOKENS[50:]], 64, stride), *windows_of([TOKENS[:7]], 64, stride)]
    # Passes that end inside of windows, and passes with several.
    for most in (512, 24):
        monkeypatch.setattr(windows_module, "MOST_TOKENS", most)
        scorer = Scorer(ModelSpec(str(path), engine[:2] if engine != "native" else engine, "fp32", threads=1))
        if engine == "hf rows":
            inner: Any = scorer._engines[0]
            inner.model.set_attn_implementation("eager")
            scorer._engines = [HfRowEngine(inner.model, 128)]
        found = scorer.score(windows)
        assert found.tokens == sum(window.scored for window in windows)
        assert found.perplexity == pytest.approx(chunk_perplexity(path, windows), rel=2e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_windows_that_take_long_rope_are_scored_as_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Windows of a token more than the short factors are for, alone and beside others, whole and in pieces."""
    path = save_tiny("phi3-long", tmp_path)
    longer, others = windows_of([TOKENS[:49]], 64, 64), windows_of([TOKENS[100:260]], 48, 30)
    [window], beside = list(longer), list(others)
    scorer = Scorer(ModelSpec(str(path), engine, "fp32", threads=1))
    for windows in ([window], [*beside[:2], window, *beside[2:]]):
        wanted = chunk_perplexity(path, windows)
        for most in (512, 32):
            monkeypatch.setattr(scorer, "_most", most)
            assert scorer.score(windows).perplexity == pytest.approx(wanted, rel=2e-5)


def test_another_precision_lies_near_and_the_same_one_at_nothing(tmp_path: Path) -> None:
    path = str(save_tiny("llama", tmp_path))
    windows = list(windows_of([TOKENS], 64, 64))
    fp32, w4a8 = (ModelSpec(path, "native", precision, threads=1) for precision in ("fp32", "w4a8"))
    same = Scorer(fp32, fp32).score(windows)
    assert (same.kl, same.agreement, same.loss) == (0.0, 1.0, same.other_loss)
    other = Scorer(w4a8, fp32).score(windows)
    assert other.other_loss == same.loss and 0 < other.kl < 0.5 and 0.3 < other.agreement < 1
    small = Scorer(replace(w4a8, cache_precision="int8"), w4a8).score(windows)
    assert small.other_loss == other.loss and 0 < small.kl < other.kl / 10


class LetterTokenizer:
    """A token a letter, and a zero at the beginning of a text."""

    def encode(self, path: str, prompts: list[Any]) -> list[tuple[int, ...] | str]:
        return self.begin_to_encode(path, prompts)()

    def begin_to_encode(
        self, path: str, prompts: list[Any], continued: bool = False
    ) -> Callable[[], list[tuple[int, ...] | str]]:
        def one(prompt: Any) -> tuple[int, ...]:
            text = prompt if isinstance(prompt, str) else "|".join(message["content"] for message in prompt)
            return (*(() if continued else (0,)), *(ord(letter) for letter in text))

        return lambda: [one(prompt) for prompt in prompts]


def read(path: Path, form: str = "auto", skip_bad: bool = False) -> list[list[tuple[int, ...]]]:
    tokenizer_process: Any = LetterTokenizer()
    with opened_source(path, print) as source:
        return [list(pieces) for pieces in texts(source, form, MODEL_INFO, tokenizer_process, skip_bad, print)]


def written(tokens: tuple[int, ...]) -> str:
    return "".join(map(chr, tokens))


def test_notes_say_which_of_two_models_they_are_about(tmp_path: Path) -> None:
    spec = ModelSpec(str(tmp_path), "native", "fp32", threads=1)
    opened = [SimpleNamespace(notes=[note], engine=SimpleNamespace(vocabulary=7)) for note in ("slower", "not cached")]
    with mock.patch.object(scorer_module, "open_model", side_effect=opened):
        assert Scorer(spec, spec).notes == ["slower", "--against: not cached"]


def test_a_text_file_is_one_text_and_long_ones_are_encoded_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbfone\n\ntwo\nthree\n"))
    assert [list(map(written, text)) for text in read(path)] == [["\0one\n\ntwo\nthree\n"]]
    monkeypatch.setattr(texts_module, "PIECE_BYTES", 6)
    assert [list(map(written, text)) for text in read(path)] == [["\0one\n", "\ntwo\nthree\n"]]


def test_rows_are_texts_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = [{"prompt": "ab"}, {"prompt": [1, 2, 3]}, {"messages": [{"role": "user", "content": "hi"}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(path) == [[(0, 97, 98)], [(1, 2, 3)], [(0, 104, 105)]]


def test_bad_rows_are_told_as_a_job_tells_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 1}\n{"prompt": [999]}\n')
    with pytest.raises(InputError, match="one row is wrong and nothing was started; mend it, or") as caught:
        read(path)
    assert caught.value.lines[0].startswith(f"{path}:2: ")
    assert read(path, skip_bad=True) == [[(0, 97)]]
    path.write_text('{"prompt": [999]}\n')
    with pytest.raises(UsageError, match=r"rows\.jsonl:1: the text has the token id 999, which tiny does not know"):
        read(path)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\nno \xff\n")
    with pytest.raises(UsageError, match=r"a.txt:2: this is not UTF-8"):
        read(path)
    path.write_bytes(b"\n \n")
    with pytest.raises(UsageError, match="holds no text"):
        read(path)


@pytest.mark.parametrize("name", ["rows.csv", "rows.TSV", "rows.csv.gz", "rows.tsv.zst"])
def test_a_table_is_not_taken_for_one_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = b"id,prompt\n1,ab\n"
    packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)(content)
    path.write_bytes(packed)
    with pytest.raises(UsageError, match=rf"{name} is a table, and rows are taken here as lines of JSON; .*--format text"):
        read(path)
    assert [list(map(written, text)) for text in read(path, "text")] == [["\0id,prompt\n1,ab\n"]]


@pytest.mark.parametrize(("name", "text"), [("A.TXT", True), ("a.Text", True), ("A.JSONL", False), ("a.Json", False)])
def test_a_name_is_read_in_capitals_too(tmp_path: Path, name: str, text: bool) -> None:
    """Whatever the content looks like."""
    (tmp_path / name).write_text("{ prose }\n" if text else '"x": 1\n')
    if text:
        assert [list(map(written, one)) for one in read(tmp_path / name)] == [["\0{ prose }\n"]]
        return
    with pytest.raises(InputError, match="one row is wrong"):
        read(tmp_path / name)


def test_one_text_has_no_rows_to_leave_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    said = rf"^--skip-bad leaves out rows, and {tmp_path}/a.txt is taken as one text: leave it out, or give --format jsonl$"
    with pytest.raises(UsageError, match=said):
        read(tmp_path / "a.txt", skip_bad=True)


@pytest.mark.parametrize("figures", [Figures(10, loss=8000.0), Figures(10, loss=1.0, other_loss=8000.0)])
def test_a_perplexity_that_is_no_number_is_a_sentence(figures: Figures) -> None:
    """Losses that are finite may have one: JSON knows no Infinity."""
    process: Any = mock.Mock()
    process.begin.side_effect = lambda function, *_: lambda: [] if function is score_module._open else figures
    window = Window((1, 2), 1)
    with pytest.raises(JobError, match="the model's logits are not finite"):
        score_module._scored(process, [], window, iter([]), mock.Mock())


def test_a_directory_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        UsageError, match=rf"^{tmp_path} is a directory, .*; give a file of rows as lines of JSON, or of text$"
    ):
        read(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"window": 129}, r"--window: tiny holds 128 tokens, got 129"),
        ({"window": 10, "stride": 11}, r"--stride: 11 would leave out text between windows of 10"),
        ({"window": 1}, r"--window: must be at least 2"),
        ({"most_tokens": 0}, r"--most-tokens: must be at least 1"),
        ({"precision": "int3"}, r"--precision: must be "),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        chunking(build_options(ScoreSpec, {"input": "x", **options}), [MODEL_INFO])


@pytest.mark.slow
def test_the_command_gives_its_object_and_nothing_else(tmp_path: Path) -> None:
    text = tmp_path / "a.py.txt"
    text.write_text(Path(argparse_source()).read_text()[:6000])
    plain = outrider("score", text, "-m", "pocket", "--precision", "w4a8", "--against", "pocket", "--json")
    assert plain.returncode == 0, plain.stderr
    found = json.loads(plain.stdout)
    assert list(found) == ["tokens", "perplexity", "kl", "agreement"]
    assert found["tokens"] > 1000 and found["perplexity"] < 20 and 0 < found["kl"] < 0.1 and found["agreement"] > 0.8
    other = outrider("score", text, "-m", "pocket", "--against", "pocket-draft", "--engine", "hf", "--most-tokens", 100)
    assert other.returncode == 0 and "agreement" in other.stdout and "100 in windows of 2,048" in other.stdout
    refused = outrider("score", tmp_path / "none.txt", "-m", "pocket")
    assert refused.returncode == 2 and "none.txt cannot be read" in refused.stderr and not refused.stdout


def argparse_source() -> str:
    import argparse

    return argparse.__file__
