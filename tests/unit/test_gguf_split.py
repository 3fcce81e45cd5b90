"""A model in several GGUF files equals the model in one file; missing, misnamed and foreign files are refused."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_models import mostly, write_gguf, write_split
from native_models import logits, open_native
from quantised_models import save_small

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.gguf.split import files_of, read_gguf
from outrider.workers.models.model_info import check_unchanged, find, read_model_info


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("source"))


@pytest.fixture
def parts(source: Path, tmp_path: Path) -> list[Path]:
    return write_split(source, tmp_path / "model.gguf", mostly("Q8_0"), 4, first_is_small=False)


@pytest.mark.parametrize("first_is_small", [False, True])
def test_a_model_in_several_files_is_the_model_in_one(source: Path, tmp_path: Path, first_is_small: bool) -> None:
    whole = write_gguf(source, tmp_path / "whole.gguf", mostly("Q8_0"))
    parts = write_split(source, tmp_path / "model.gguf", mostly("Q8_0"), 4, first_is_small)
    assert len(parts) > 2
    assert files_of(parts[0]) == parts
    assert read_gguf(parts[0]).tensors.keys() == read_gguf(whole).tensors.keys()
    one, several = (read_model_info(str(path)) for path in (whole, parts[0]))
    assert (several.numbers, several.family, several.made_for) == (one.numbers, one.family, one.made_for)
    assert several.weight_bytes == sum(part.stat().st_size for part in parts)
    kept = {key: value for key, value in read_gguf(parts[0]).metadata.items() if not key.startswith("split.")}
    assert kept == read_gguf(whole).metadata
    tokens = [3, 1, 4, 1, 5]
    expected, found = (logits(open_native(path, "w8a8"), tokens) for path in (whole, parts[0]))
    assert np.array_equal(expected, found)


def test_a_change_of_any_file_is_a_change_of_the_model(parts: list[Path]) -> None:
    digest = read_model_info(str(parts[0])).digest
    check_unchanged(parts[0], digest)
    content = bytearray(parts[-1].read_bytes())
    content[-1] ^= 1
    parts[-1].write_bytes(content)
    with pytest.raises(Exception, match="have changed since"):
        check_unchanged(parts[0], digest)


def test_files_that_are_not_there_are_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelError, match=f"of which {parts[1].name} is not there: fetch all"):
        read_model_info(str(parts[0]))
    parts[2].unlink()
    with pytest.raises(ModelError, match=f"of which {parts[1].name} and 1 others are not there: fetch all"):
        read_model_info(str(parts[0]))


def test_a_later_file_names_the_first(parts: list[Path]) -> None:
    with pytest.raises(
        ModelError, match=f"is file 2 of the {len(parts)} of a model, which is named by its first: {parts[0].name}"
    ):
        read_model_info(str(parts[1]))


def test_a_file_that_was_given_another_name_is_refused(parts: list[Path], tmp_path: Path) -> None:
    other = parts[0].rename(tmp_path / "mine.gguf")
    with pytest.raises(ModelError, match="restore the names"):
        read_model_info(str(other))


def test_files_in_another_order_are_refused(parts: list[Path], tmp_path: Path) -> None:
    parts[1].rename(tmp_path / "aside")
    parts[2].rename(parts[1])
    (tmp_path / "aside").rename(parts[2])
    with pytest.raises(ModelError, match=r"says that it is file 2 \(counted from 0\)"):
        read_model_info(str(parts[0]))


def test_a_file_of_another_cut_is_refused(source: Path, parts: list[Path], tmp_path: Path) -> None:
    """A tensor would be there twice, or one would be missing."""
    (tmp_path / "other").mkdir()
    others = write_split(source, tmp_path / "other" / "model.gguf", mostly("Q8_0"), 6, first_is_small=False)
    content = others[1].read_bytes().replace(struct.pack("<H", len(others)), struct.pack("<H", len(parts)), 1)
    parts[1].write_bytes(content)
    with pytest.raises(ModelError, match=r"which another file of the model holds as well|says that it is file"):
        read_model_info(str(parts[0]))


def test_a_truncated_file_among_several_is_named(parts: list[Path]) -> None:
    os.truncate(parts[1], parts[1].stat().st_size - 64)
    with pytest.raises(ModelError, match=f"{parts[1].name} has .* it is truncated"):
        read_model_info(str(parts[0]))


def test_a_whole_file_may_be_named_like_a_part(source: Path, tmp_path: Path) -> None:
    path = write_gguf(source, tmp_path / "model-00002-of-00003.gguf", mostly("Q8_0"))
    assert files_of(path) == [path]


def test_files_may_be_links_as_in_a_cache_of_downloads(parts: list[Path], tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, part in enumerate(parts):
        blob = shutil.move(part, tmp_path / f"blob{number}")
        (snapshot / part.name).symlink_to(blob)
    assert read_model_info(str(snapshot / parts[0].name)).weight_bytes > 0


def test_a_directory_of_such_files_is_told_from_a_model(parts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"has no config.json but GGUF files: name one of them, such as {parts[0]}"):
        find(str(tmp_path))
