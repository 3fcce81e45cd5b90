"""Reading checkpoints and keeping packed weights. A packer that stores plain float32 stands for the kernels' formats."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from outrider.kernels.program import Format, Program, Tensor, Weight
from outrider.workers.errors import ModelError, UsageError
from outrider.workers.models import packed_cache
from outrider.workers.models.families import build_program
from outrider.workers.models.model_info import read_model_info
from outrider.workers.models.native_packer import NativePacker
from outrider.workers.models.packed import NotFiniteError, PackedModel, Packer, load_packed


class PlainMemory:
    def __init__(self, size: int) -> None:
        self.array = np.zeros(size, dtype=np.uint8)
        self.address = self.array.ctypes.data
        self.view = self.array.data


class PlainPacker:
    """Float32, row after row. ``packed`` counts calls, so that a test can tell a cache hit."""

    version = "plain 1"

    def __init__(self) -> None:
        self.packed = 0
        self.memory = PlainMemory(0)

    def allocate(self, size: int) -> PlainMemory:
        self.memory = PlainMemory(size)
        return self.memory

    def packed_bytes(self, weight: Weight) -> int:
        return 4 * weight.rows * weight.columns

    def pack_rows(self, weight: Weight, address: int, first_row: int, rows: Any) -> None:
        self.packed += 1
        values = (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows.astype(np.float32)
        if not np.isfinite(values).all():
            raise NotFiniteError
        start = address - self.memory.address + 4 * first_row * weight.columns
        self.memory.array[start : start + values.nbytes] = values.reshape(-1).view(np.uint8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(path: Path, packer: PlainPacker | None = None, **more: Any) -> PackedModel:
    model_info = read_model_info(str(path))
    program = build_program(json.loads((path / "config.json").read_text()), Format.BF16)
    return load_packed(model_info, program, cast(Packer, packer or PlainPacker()), threads=2, **more)


def weights(model: PackedModel) -> list[np.ndarray]:
    """Each weight's content as float32."""
    array = model.memory.array  # type: ignore[attr-defined]
    found = []
    for weight, address in zip(model.program.weights, model.addresses, strict=True):
        start = address - model.memory.address
        found.append(array[start : start + 4 * weight.rows * weight.columns].view(np.float32).reshape(weight.rows, -1))
    return found


def expected(program: Program, tensors: dict[str, torch.Tensor]) -> list[np.ndarray]:
    def stacked(weight: Weight) -> np.ndarray:
        if weight.values:
            return np.array([weight.values], dtype=np.float32)
        parts = [
            _as_asked(source, tensors[source.name])[start:stop].float()
            for source in weight.sources
            for start, stop in source.ranges
        ]
        return torch.cat(parts).numpy().reshape(weight.rows, weight.columns)

    return [stacked(weight) for weight in program.weights]


def _as_asked(source: Tensor, stored: torch.Tensor) -> torch.Tensor:
    if not source.stored:
        return stored
    return stored.T if len(source.shape) == 2 else stored.flatten()


def assert_holds(packed: PackedModel, tensors: dict[str, torch.Tensor]) -> None:
    for weight, found, wanted in zip(
        packed.program.weights, weights(packed), expected(packed.program, tensors), strict=True
    ):
        np.testing.assert_array_equal(found, wanted, err_msg=str(weight.sources))


def rewrite(path: Path, **changed: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    for name, value in changed.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("name", ["llama", "bigcode-mha"])
def test_every_row_of_every_tensor_lies_where_the_program_wants_it(name: str, tmp_path: Path) -> None:
    whole = tiny_model(name)
    whole.save_pretrained(tmp_path / "model")
    assert_holds(load(tmp_path / "model"), whole.state_dict())


def test_a_large_matrix_is_packed_in_chunks_that_share_no_tile(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.workers.models.packed.CHUNK_BYTES", 1)
    packer = PlainPacker()
    assert_holds(load(model, packer), load_file(model / "model.safetensors"))
    assert packer.packed > 2 * len(build_program(json.loads((model / "config.json").read_text()), Format.BF16).weights)


def test_rows_in_another_order_are_read_together_in_chunks_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ERNIE's rope turns neighbours: single rows of every head, which are read a chunk at a time."""
    whole = tiny_model("ernie")
    whole.save_pretrained(tmp_path)
    packer = PlainPacker()
    assert_holds(load(tmp_path, packer), whole.state_dict())
    assert packer.packed < 40
    monkeypatch.setattr("outrider.workers.models.packed.CHUNK_BYTES", 1)
    monkeypatch.setenv("OUTRIDER_CACHE_GB", "0")
    assert_holds(load(tmp_path), whole.state_dict())


def test_sharded_and_pickled_checkpoints_hold_the_same(tmp_path: Path) -> None:
    whole = tiny_model("opt")
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_holds(load(tmp_path / "sharded"), whole.state_dict())
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(tmp_path / "sharded" / "config.json", pickled)
    # As facebook's own files: half precision, and named as the bare decoder names them.
    bare = {name.removeprefix("model."): value.half() for name, value in whole.state_dict().items()}
    torch.save(bare, pickled / "pytorch_model.bin")
    assert_holds(load(pickled), {name: value.half().float() for name, value in whole.state_dict().items()})


@pytest.mark.parametrize("name", ["gpt2", "cohere"])
def test_what_lies_in_another_shape_is_turned_in_chunks_or_not_and_pickled_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_GB", "0")
    whole = tiny_model(name)
    whole.save_pretrained(tmp_path / "safe")
    assert_holds(load(tmp_path / "safe"), whole.state_dict())
    monkeypatch.setattr("outrider.workers.models.packed.CHUNK_BYTES", 1)
    assert_holds(load(tmp_path / "safe"), whole.state_dict())
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(tmp_path / "safe" / "config.json", pickled)
    half = {key: value.bfloat16() for key, value in whole.state_dict().items()}
    torch.save(half, pickled / "pytorch_model.bin")
    assert_holds(load(pickled), {key: value.float() for key, value in half.items()})


def test_a_matrix_that_does_not_lie_turned_round_is_refused_with_its_shape(tmp_path: Path) -> None:
    """As GPT-2's all do: the shape that is asked for is that of the file."""
    whole = tiny_model("gpt2")
    whole.save_pretrained(tmp_path)
    rewrite(tmp_path, **{"transformer.h.0.mlp.c_fc.weight": whole.transformer.h[0].mlp.c_fc.weight.T.contiguous()})
    with pytest.raises(ModelError, match=r'c_fc\.weight" has shape \(200, 96\), config\.json asks for \(96, 200\)'):
        load(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    tiny_model("opt").save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    next((tmp_path / "sharded").glob("*00002-of*")).unlink()
    with pytest.raises(ModelError, match=r"lacks 'model-00002-of.*which model.safetensors.index.json names"):
        load(tmp_path / "sharded")


def test_a_pickle_that_runs_code_is_refused(model: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("ran",))

    (model / "model.safetensors").unlink()
    torch.save({"x": Runs(), "rest": torch.zeros(10_000)}, model / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds more than weights; --allow-pickle runs the code in it"):
        load(model)


def test_a_missing_weight_is_named(model: Path) -> None:
    rewrite(model, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r'lacks the weight "model.layers.1.mlp.up_proj.weight"'):
        load(model)


def test_a_weight_of_another_shape_is_named_with_both_shapes(model: Path) -> None:
    rewrite(model, model__norm__weight=torch.ones(95))
    with pytest.raises(ModelError, match=r'"model.norm.weight" has shape \(95,\), config.json asks for \(96,\)'):
        load(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.v_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_a_weight_that_is_not_finite_is_named(model: Path, name: str, value: float) -> None:
    tensor = load_file(model / "model.safetensors")[name]
    tensor.view(-1)[-1] = value
    rewrite(model, **{name.replace(".", "__"): tensor})
    with pytest.raises(ModelError, match=f'"{name}" holds a value that is not a finite number'):
        load(model)


def test_a_weight_that_would_become_infinite_is_named_with_what_to_do(model: Path) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    tensor = load_file(model / "model.safetensors")[name].float()
    tensor.view(-1)[-1] = 3.4e38
    rewrite(model, **{name.replace(".", "__"): tensor})
    with pytest.raises(ModelError, match=f'"{name}" holds a value that is too large for this precision; choose fp32'):
        load(model, NativePacker())  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [0.999, 0.5, 0.001, 0.0])
def test_a_truncated_file_is_one_clear_error(model: Path, kept: float) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ModelError, match=r"model\.safetensors is (truncated|not a whole safetensors file)"):
        load(model)


def test_a_header_that_is_no_header_is_one_clear_error(model: Path) -> None:
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)
    with pytest.raises(ModelError, match="damaged header"):
        load(model)


def test_packed_weights_come_from_the_cache_the_second_time(model: Path, cache: Path) -> None:
    first, second = PlainPacker(), PlainPacker()
    steps: list[tuple[int, int]] = []
    fresh = load(model, first)
    cached = load(model, second, progress=lambda done, total: steps.append((done, total)))
    assert (fresh.cached, cached.cached, second.packed) == (False, True, 0)
    assert_holds(cached, load_file(model / "model.safetensors"))
    assert steps[-1] == (cached.size, cached.size)
    assert [file.suffix for file in cache.iterdir()] == [".packed"]


def _flip(content: bytearray, at: int) -> bytes:
    content[at] ^= 1
    return bytes(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: _flip(content, -1), "another checksum"),
        (lambda content: _flip(content, 40), "damaged header"),
        (lambda content: bytes(content[:-5]), "are needed"),
        (lambda content: b"something else entirely", "not one of outrider's files"),
        (lambda content: b"", "not one of outrider's files"),
    ],
)
def test_a_damaged_cache_file_is_packed_again_with_a_warning(model: Path, cache: Path, damage: Any, reason: str) -> None:
    load(model)
    file = next(cache.iterdir())
    file.write_bytes(damage(bytearray(file.read_bytes())))
    packer = PlainPacker()
    again = load(model, packer)
    assert not again.cached
    assert packer.packed
    assert reason in again.notes[0]
    assert_holds(again, load_file(model / "model.safetensors"))
    assert load(model).cached, "the damaged file was not replaced"


def test_a_file_of_another_model_is_not_used(model: Path, cache: Path) -> None:
    load(model)
    foreign = next(cache.iterdir()).read_bytes()
    rewrite(model, model__norm__weight=torch.full((96,), 2.0))
    for file in cache.iterdir():
        file.unlink()
    load(model)
    file = next(cache.iterdir())
    file.write_bytes(foreign)
    again = load(model)
    assert not again.cached
    assert "another model or another version" in again.notes[0]


def test_another_packing_version_is_another_file(model: Path, cache: Path) -> None:
    class Newer(PlainPacker):
        version = "plain 2"

    load(model)
    assert not load(model, Newer()).cached
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_a_warning(model: Path, cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    packed = load(model)
    assert packed.notes == (
        f"packed weights were not cached in {cache}: File exists; "
        "the next start packs them again (OUTRIDER_CACHE names another folder)",
    )
    assert_holds(packed, load_file(model / "model.safetensors"))


def test_a_cache_that_may_not_be_looked_into_costs_a_warning(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, for himself alone. (Root, who may run this, may look into all.)"""
    refusal = PermissionError(errno.EACCES, "Permission denied")

    def refused(path: Any, *more: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{cache}/"):
            raise refusal
        return stat(path, *more, **options)

    cache.mkdir()
    stat = os.stat
    monkeypatch.setattr(os, "stat", refused)
    monkeypatch.setattr(packed_cache, "store", mock.Mock(side_effect=refusal))
    assert load(model).notes == (
        f"packed weights were not cached in {cache}: Permission denied; "
        "the next start packs them again (OUTRIDER_CACHE names another folder)",
    )


def test_a_user_without_a_home_is_told_of_that(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the device that stands for it."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("OUTRIDER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert load(model).notes == (
        "packed weights were not cached, since this user has no home; the next start packs them again "
        "(OUTRIDER_CACHE names a folder)",
    )


def test_processes_of_the_same_number_store_the_same_weights_at_once(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of containers are that share a cache: both have written before one moves its file to its place."""
    both, fsync = threading.Barrier(2), os.fsync

    def written(descriptor: int) -> None:
        fsync(descriptor)
        both.wait(60)

    monkeypatch.setattr(packed_cache.os, "fsync", written)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: load(model), range(2)))
    assert [each.notes for each in found] == [(), ()]
    assert load(model).cached
    assert [file.suffix for file in cache.iterdir()] == [".packed"]


def test_what_was_used_longest_ago_leaves_the_cache(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = load(model).size
    (first,) = cache.glob("*.packed")
    shutil.copytree(model, tmp_path / "second")
    assert load(tmp_path / "second").cached, "the same weights in another place are the same model"
    rewrite(tmp_path / "second", model__norm__weight=torch.full((96,), 2.0))
    load(tmp_path / "second")
    (second,) = set(cache.glob("*.packed")) - {first}
    for age, file in ((2000, first), (1000, second)):
        os.utime(file, (time.time() - age, time.time() - age))
    assert load(model).cached  # which makes the first the one used last
    (cache / ".killed.packed.1.partial").write_bytes(b"left")
    os.utime(cache / ".killed.packed.1.partial", (0, 0))
    monkeypatch.setenv("OUTRIDER_CACHE_GB", str(2.5 * size / 1e9))
    shutil.copytree(model, tmp_path / "third")
    rewrite(tmp_path / "third", model__norm__weight=torch.full((96,), 3.0))
    assert not load(tmp_path / "third").notes
    left = set(cache.glob("*.p*"))
    assert first in left and second not in left and len(left) == 2


@pytest.mark.parametrize(("limit", "holds"), [("0", "0 MB"), ("0.00001", "0.01 MB")])
def test_a_limit_that_leaves_no_room_costs_a_warning(
    model: Path, cache: Path, limit: str, holds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_GB", limit)
    packed = load(model)
    assert re.search(rf"they take 0\.\d+ MB, the cache may hold {holds} \(OUTRIDER_CACHE_GB\)", packed.notes[0])
    assert not list(cache.glob("*.packed"))
    assert_holds(packed, load_file(model / "model.safetensors"))


def test_a_home_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", "~nobody-here/cache")
    with pytest.raises(UsageError, match=r'OUTRIDER_CACHE="~nobody-here/cache" names no folder: '):
        packed_cache.cache_directory()
    for name in ("OUTRIDER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(OSError):
        packed_cache.make_directory(packed_cache.cache_directory() / "digests")
