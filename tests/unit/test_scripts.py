"""The scripts of benchmarks/ and tools/ run over fakes, and refuse wrong arguments in one sentence."""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import LlamaForCausalLM

from outrider.workers import actor_loops
from outrider.workers.errors import ModelError
from outrider.workers.messages import Row, RowResult, Sampling

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]
POCKET = ROOT / "workers" / "pocket"


def test_targets_that_answer_at_once_stand_where_verifiers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = importlib.import_module("drive")
    monkeypatch.setattr(actor_loops, "SECONDS_BETWEEN_PARTIAL_TOKENS", 0.0)
    loop = actor_loops.TargetLoop(drive.Instant(batch=2, tokens=3, seconds=0.0))
    loop.learn([(1, 2)])
    loop.submit([Row(key, (1, 2, 3), 3, Sampling()) for key in range(5)])
    ended: list[RowResult] = []
    while len(ended) < 5:
        ended += [each for each in loop.harvest(20.0).ended if isinstance(each, RowResult)]
    assert [(each.key, each.tokens) for each in ended] == [(key, (0, 1, 2)) for key in range(5)]


def test_repetition_by_costs_needs_no_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "repetition.py --costs 1:1,16:1.4,64:3.4 --rows 2 --repeat 1 --kinds extraction --batch 2"
    monkeypatch.setattr(sys, "argv", words.split())
    importlib.import_module("repetition").main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = told["figures"]["extraction"]
    assert (told["shape"], found["plain"]["times by costs"]) == ("no model", 1.0)
    assert found["lookup"]["tokens a round"] > 1.2 and found["suffix"]["times by costs"] > 1.2


def test_one_window_has_no_standard_error() -> None:
    compared = importlib.import_module("perplexity").compared
    assert compared(np.log([1.25])) == " +25.00% (one window, so no standard error)"
    assert compared(np.array([0.0, 0.0])) == "  +0.00% ± 0.00%"


HEAD, TARGET = POCKET / "head", POCKET / "target"
PARALLEL = f"train_parallel --target {TARGET} --draft {POCKET / 'draft'} --out out {ROOT / 'README.md'}"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("benchmarks.race.__main__ --batches 1", "--prompts is missing: a file with lines of"),
        ("benchmarks.race.__main__ --prompts nowhere.jsonl", "--prompts nowhere.jsonl is no file"),
        ("constraints masks --model 160m", "--model and --draft are for a job"),
        ("constraints masks --draft pocket-draft", "--model and --draft are for a job"),
        ("agreement a b --tokens 500", "--tokens: 500 make no window of 512"),
        (f"inflate_head {HEAD} out --target nowhere", "--target: nowhere has no config.json"),
        (f"inflate_head nowhere out --target {TARGET}", "source: nowhere has no config.json"),
        ("sparse_race --llama-bench nowhere/llama-bench", "--llama-bench: nowhere/llama-bench is no program"),
        (f"train_parallel --target nowhere --draft {TARGET} --out out a.txt", "--target: nowhere has no config.json"),
        (f"train_parallel --target {TARGET} --draft {TARGET} --out out nowhere.txt", "texts: no file is nowhere.txt"),
        (f"{PARALLEL} --length 1", "argument --length: must be at least 2, got 1"),
        (f"{PARALLEL} --length many", "argument --length: must be a whole number, got 'many'"),
        (f"{PARALLEL} --tokens 0", "argument --tokens: must be at least 1, got 0"),
        (f"{PARALLEL} --answers -3", "argument --answers: must be at least 0, got -3"),
        (f"{PARALLEL} --threads 0", "argument --threads: must be at least 1, got 0"),
        (f"{PARALLEL} --minutes nan", "argument --minutes: must be a number, got 'nan'"),
        (f"{PARALLEL} --minutes 0", "argument --minutes: must be more than 0, got 0"),
        (f"{PARALLEL} --rate 0", "argument --rate: must be more than 0, got 0"),
        (f"{PARALLEL} --out {TARGET}", f"--out: {TARGET} is there already; name a directory that is not"),
        (f"{PARALLEL} --draft {HEAD}", "holds no tokenizer"),
        ("train_pocket --out out --target-minutes -1", "argument --target-minutes: must be at least 0, got -1"),
        (
            "train_pocket --out out --target-minutes 0",
            "--target-minutes 0 keeps the target that is there, and out/target",
        ),
        (f"train_pocket --out {HEAD} --draft-minutes 0", "--draft-minutes 0 keeps the draft that is there"),
        (f"train_pocket --out {HEAD}/config.json/out", "out cannot be made: Not a directory"),
        (f"train_pocket_head --out {HEAD}/config.json/out", "out cannot be made: Not a directory"),
        (f"train_pocket_head --out out --begin {TARGET}", "is no head that this tool wrote"),
        ("train_pocket_head --out out --begin nowhere", "--begin: nowhere has no model.safetensors"),
        ("train_pocket_head --out out --shallow 2", "argument --shallow: must lie between 0 and 1, got 2"),
        (f"train_pocket_head --out out --target {TARGET.parent / 'draft'}", 'its "hidden_size" is 128, not 256'),
        (f"train_pocket_head --out {TARGET}", f"--out: {TARGET} is the target's own directory; name another"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module, *words = command.split()
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main()
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["config.json", "tokenizer.json"])
def test_a_target_with_a_broken_file_is_refused_by_its_name(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((TARGET / name).read_bytes()[: 50 if name == broken else None])
    monkeypatch.setattr(sys, "argv", ["train_pocket_head", "--out", str(tmp_path / "out"), "--target", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("train_pocket_head").main()
    assert ended.value.code == 2 and f"--target: {tmp_path / broken} cannot be read: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_gone_on_with_keeps_its_own_tokens(tmp_path: Path) -> None:
    """Which tokens are the most frequent differs from one Python to the next."""
    tool = importlib.import_module("train_pocket_head")
    target = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    saved = load_file(HEAD / "model.safetensors")
    head = tool.begun(target, HEAD)
    assert head.chosen.tolist() == (saved["d2t"] + torch.arange(len(saved["d2t"]))).tolist()
    assert torch.equal(head.lm_head.weight.bfloat16(), saved["lm_head.weight"])
    tool.save(head, target, head.chosen, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    with pytest.raises(ModelError, match=r"target/model\.safetensors is no head that this tool wrote"):
        tool.begun(target, TARGET)


def _saving(role: str, stream: object, held_out: object, minutes: float, teacher: object, save: Callable[..., None]) -> Any:
    """A training of train_pocket's that only saves, twice."""
    model = tiny_model("llama")
    for _ in range(2):
        save(role, model)
    return model


def _nothing_to_learn(head: Any, *given: object) -> tuple[torch.Tensor, list[float]]:
    return head.lm_head.weight.sum() * 0, [0.0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "stopped; {}"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "--out: out cannot be written: [Errno 28] No space left on"),
    ],
)
@pytest.mark.parametrize(("name", "folder"), [("train_pocket", "out/target"), ("train_pocket_head", "out")])
def test_a_training_that_ends_early_says_so_and_keeps_what_it_had_saved(
    name: str,
    folder: str,
    ends: BaseException,
    code: int,
    said: str,
    before: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool, saves = importlib.import_module(name), itertools.count()
    replacing = tool.replacing

    @contextmanager
    def ended(*given: Path) -> Iterator[Path]:
        with replacing(*given) as partial:
            yield partial
            if next(saves) == before:
                raise ends

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tool, "replacing", ended)
    monkeypatch.setattr(tool, "read_corpus", lambda: (["word = 1\n" * 4000, "import os\n" * 4000],) * 2)
    if name == "train_pocket":
        monkeypatch.setattr(tool, "train", _saving)
    else:
        monkeypatch.setattr(tool, "losses", _nothing_to_learn)
        monkeypatch.setattr(tool, "cpu_minutes", lambda minutes: lambda step: float(step))
    monkeypatch.setattr(sys, "argv", [name, "--out", "out", "--threads", str(torch.get_num_threads())])
    with pytest.raises(SystemExit) as end:
        tool.main()
    assert end.value.code == code
    assert said.format("out is as it was last saved" if before else "nothing was saved yet") in capsys.readouterr().err
    assert {path.name for path in Path("out").iterdir()} <= {"target", "config.json", "model.safetensors"}
    assert (Path(folder) / "config.json").is_file() == bool(before)
    assert not before or load_file(Path(folder) / "model.safetensors")
