"""Models that are hostile, or change under a job, as a user meets them on the command line."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import children_titled, finish, outrider, rows_done, start, wait_for_rows
from safetensors.torch import load_file, save_file

from outrider.workers.models.model_info import find

pytestmark = pytest.mark.slow

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
SECONDS = 30
PADDING = 66 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(find("pocket"), tmp_path / "model"))


def growing(model: Path) -> None:
    """The library behind it takes memory until it is refused, and then aborts."""
    tokenizer = json.loads((model / TOKENIZER).read_text())
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [step] * 4}
    (model / TOKENIZER).write_text(json.dumps(tokenizer))


def pipe(model: Path) -> None:
    (model / WEIGHTS).unlink()
    os.mkfifo(model / WEIGHTS)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tokenizer that takes all memory": (
        growing,
        "asked for more time or memory for a prompt of one letter than",
    ),
    "a vast tokenizer": (lambda model: os.truncate(model / TOKENIZER, 1 << 30), f"{TOKENIZER} is larger than 256 MB"),
    "weights that are a pipe": (pipe, f"{WEIGHTS} is a pipe, where a regular file is needed"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_model_is_one_sentence_within_seconds(kind: str, model: Path, tmp_path: Path) -> None:
    spoil, sentence = HOSTILE[kind]
    spoil(model)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a" * 100}) + "\n")
    # What refuses stands before both commands: bench shows it with the least.
    benches = [["bench", "--new-tokens", "4"]] if kind == "a vast tokenizer" else []
    for command in (["run", "in.jsonl", "-o", "job"], *benches):
        started = time.monotonic()
        done = outrider(*command, "-m", model, "--draft", "none", cwd=tmp_path)
        assert time.monotonic() - started < SECONDS
        assert done.returncode == 2, done.stderr
        if command[0] == "run":
            assert sentence in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr and "memory allocation" not in done.stderr
        assert "loading" not in done.stderr, "no actor was started"


def pad(model: Path) -> None:
    """To more than 64 MiB, by what nobody misses, beside weights that are used."""
    content = (model / WEIGHTS).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, size = json.loads(content[8:start]), len(content) - start
    header["model.rotary_emb.cos_cached"] = {"dtype": "U8", "shape": [PADDING], "data_offsets": [size, size + PADDING]}
    text = json.dumps(header).encode()
    (model / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[start:] + bytes(PADDING))


def overwrite(model: Path, size: int) -> bytes:
    """Other bytes in the middle of the weights, and the old times put back. What was there before."""
    file = model / WEIGHTS
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(before.st_size // 2)
        old = stream.read(size)
        stream.seek(before.st_size // 2)
        stream.write(bytes(byte ^ 0x01 for byte in old))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return old


def put_back(model: Path, old: bytes) -> None:
    with (model / WEIGHTS).open("r+b") as stream:
        stream.seek(os.fstat(stream.fileno()).st_size // 2)
        stream.write(old)


@pytest.mark.parametrize(("engine", "code"), [("native", 0), ("hf", 2)])
def test_a_model_whose_path_is_no_utf8_runs_or_is_one_sentence(engine: str, code: int, model: Path, tmp_path: Path) -> None:
    """Every row failed on the one engine, and on the other the target's process ended without a word."""
    path = model.rename(tmp_path / os.fsdecode(b"m\xe4"))
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    options = ("--engine", engine, "--draft", "lookup", "--max-tokens", "4")
    done = outrider("run", "in.jsonl", "-o", "job", "-m", path, *options, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert code == 0 or "m\\udce4 cannot be loaded: " in done.stderr, done.stderr


def test_a_draft_whose_scores_are_no_numbers_is_named_and_changes_no_text(tmp_path: Path) -> None:
    """Each of its weights is finite, so it is only found as it drafts. Nobody was told that the job had no draft."""
    draft = Path(shutil.copytree(find("pocket-draft"), tmp_path / "draft"))
    weights = load_file(draft / WEIGHTS)
    save_file({name: weight * 1e30 if "norm" in name else weight for name, weight in weights.items()}, draft / WEIGHTS)
    rows = [
        {"prompt": f"def f{number}(x):", "max_tokens": 30, "seed": 3, "temperature": number % 2} for number in range(12)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = outrider("run", "in.jsonl", "-o", "plain", "--draft", "none", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    # One row at a time, so that rows are left when the draft is loaded.
    layout = ("--layout", "shared", "--draft-tokens", "3", "--batch", "1")
    done = outrider("run", "in.jsonl", "-o", "job", "--draft", draft, *layout, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "note: the draft answered 3 requests in succession with an error; rows go on without it" in said
    assert "a logit is not a finite number" in said
    assert (tmp_path / "job" / "results.jsonl").read_bytes() == (tmp_path / "plain" / "results.jsonl").read_bytes()


def test_weights_that_change_under_a_job_end_it_and_put_back_let_it_go_on(model: Path, tmp_path: Path) -> None:
    pad(model)
    rows = [{"prompt": f"def f{number}(x):", "max_tokens": 200, "ignore_eos": True} for number in range(40)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("run", "in.jsonl", "-m", model, "--draft", "none", "--batch", "2")
    assert outrider(*options, "-o", "undisturbed", cwd=tmp_path).returncode == 0

    job = tmp_path / "job"
    process = start(*options, "-o", job, cwd=tmp_path)
    wait_for_rows(process, job, 3)
    old = overwrite(model, 64)
    target, *_ = children_titled(process.pid, "ray::TargetActor")
    target.kill()
    said = " ".join(finish(process, code=1).split())
    assert f"the files of {model} have changed since this run looked at them" in said
    done = rows_done(job)
    assert 3 <= done < len(rows)
    kept = (job / "results.jsonl").read_text().splitlines()
    assert len(kept) == done

    # Nor is it gone on with as long as the files are others.
    put_back(model, old)
    old = overwrite(model, 4096)
    refused = outrider(*options, "-o", job, cwd=tmp_path)
    assert refused.returncode == 1 and "model" in refused.stderr
    assert rows_done(job) == done
    put_back(model, old)
    again = outrider(*options, "-o", job, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    finished = (tmp_path / "undisturbed" / "results.jsonl").read_bytes()
    assert (job / "results.jsonl").read_bytes() == finished
    assert set(kept) <= set(finished.decode().splitlines())
