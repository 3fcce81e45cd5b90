"""The cache of how the hf engine runs a model: the trial runs once, and damaged entries are ignored."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quantised_models import set_config

from benchmarks.families.settings import configuration
from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.workers.engines.hf_batching import Batching, RowFeeding
from outrider.workers.errors import ModelError
from outrider.workers.models import batching_cache, probe
from outrider.workers.models.batching_cache import batching_of, remembered_batching
from outrider.workers.models.model_info import ModelInfo, find
from outrider.workers.models.twins import build_twin, twin_config


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def saved(folder: Path, family: str) -> Path:
    twin_config(configuration(family)).save_pretrained(folder)
    return folder


def test_a_way_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tries = saved(tmp_path / "model", "llama"), []
    found = Batching(False, RowFeeding.WHOLE, "of a test")
    monkeypatch.setattr(probe, "find_batching", lambda config, fused: tries.append(config.model_type) or found)
    assert remembered_batching(folder, True) is None
    assert [batching_of(folder, True), batching_of(folder, True), remembered_batching(folder, True)] == [found] * 3
    assert tries == ["llama"]
    batching_of(folder, False)
    assert len(tries) == 2, "other attention is another question"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    batching_of(folder, True)
    assert len(tries) == 3, "so is another configuration"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b'{"ragged": true}', b'{"ragged": true, "feeding": "x", "why": ""}']
)
def test_what_is_damaged_is_found_out_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    folder = saved(tmp_path / "model", "llama")
    monkeypatch.setattr(probe, "find_batching", lambda config, fused: Batching(True))
    batching_of(folder, True)
    batching_cache._file(folder, True).write_bytes(content)
    assert remembered_batching(folder, True) is None
    assert batching_of(folder, True) == remembered_batching(folder, True) == Batching(True)


def test_a_refusal_is_remembered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model", "bert, both ways")
    with pytest.raises(ModelError, match="attend to later ones"):
        batching_of(folder, True)
    monkeypatch.setattr(probe, "find_batching", lambda config, fused: pytest.fail("it is known"))
    with pytest.raises(ModelError, match="attend to later ones"):
        batching_of(folder, True)


def test_a_way_of_quantising_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    for method, said in (
        ("another", "'another', which transformers does not know: it would .*; take this model in another format"),
        ("intel/auto-round", "'intel/auto-round', which transformers does not know: it would .*: leave out --engine hf"),
        ("modelopt", "'modelopt', which transformers does not know: it would .*; the native engine reads it"),
    ):
        set_config(folder, quantization_config={"quant_method": method, "bits": 4})
        with pytest.raises(ModelError, match=rf"\"quant_method\" {said}"):
            batching_of(folder, True)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(probe, "find_batching", lambda config, fused: Batching(True))
    assert batching_of(saved(tmp_path / "model", "llama"), True) == Batching(True)


@pytest.mark.slow
def test_the_driver_asks_before_anything_starts(tmp_path: Path) -> None:
    """In a process of its own, and the second time without one."""
    right, wrong = (saved(tmp_path / name, name) for name in ("llama", "bert, both ways"))

    def model_info(folder: Path, family: str) -> ModelInfo:
        return ModelInfo("a name", str(folder), family, 100, 101, "float32", (), 1, "")

    with TokenizerProcess() as tokenizer_process:
        for _ in range(2):
            tokenizer_process.check_hf_runs(model_info(right, "llama"), True)
            with pytest.raises(ModelError, match=r"a name \(bert\) cannot be run by the hf engine: its tokens attend"):
                tokenizer_process.check_hf_runs(model_info(wrong, "bert"), True)


@pytest.mark.slow
def test_a_job_is_refused_before_actors_start(tmp_path: Path) -> None:
    """By exit code 2 and a sentence; Ray is not even begun."""
    config = twin_config(configuration("bert, both ways"))
    build_twin(config).save_pretrained(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find("pocket") / file, tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a prompt\n")
    command = [
        sys.executable,
        "-c",
        "from outrider.runner.cli.main import main; main()",
        "run",
        str(tmp_path / "prompts.txt"),
    ]
    command += ["-m", str(tmp_path / "model"), "--draft", "lookup", "-o", str(tmp_path / "job")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2, ended.stderr
    said = " ".join(ended.stderr.split())
    assert "cannot be run by the hf engine: its tokens attend to later ones" in said
    assert "Traceback" not in said and "ray" not in said.lower()


def test_a_model_with_code_of_its_own_is_refused_as_such(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "mymodel", "auto_map": {"AutoConfig": "configuration_my.MyConfig"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    with pytest.raises(ModelError, match=r"^it needs code from its own repository \(auto_map\), which outrider"):
        batching_of(folder, True)
