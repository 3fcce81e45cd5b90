"""Every byte of a model's files counts, and none is read twice without need."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.runner.job import tokenizer_process
from outrider.workers.errors import JobChangedError, ModelError
from outrider.workers.models import digests
from outrider.workers.models.digests import KIND, digest_of, remembers
from outrider.workers.models.model_info import check_unchanged, read_model_info

FOLDER = f"digests-{os.geteuid()}"
SIZE = 65 << 20
MIDDLE = SIZE // 2 + 12345


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    # Files of a test are younger than a file system's tick, and would be read again and again.
    monkeypatch.setattr(digests, "TICK_SECONDS", 0.0)
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files that were hashed, piece by piece."""
    seen: list[str] = []
    piece = digests._chunk

    def counted(descriptor: int, file: Path, start: int) -> bytes:
        seen.append(file.name)
        return piece(descriptor, file, start)

    monkeypatch.setattr(digests, "_chunk", counted)
    yield seen


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would begin."""
    monkeypatch.setattr(digests, "_here", {})


def wait_until_stable() -> None:
    """The clock of the file system ticks on, so that a change shows in its times."""
    time.sleep(0.02)


def weights(directory: Path) -> Path:
    """A model's weights, large enough for what used to be sampled."""
    data = SIZE - 8 - 128
    header = json.dumps({"a": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}).ljust(128).encode()
    file = directory / "model.safetensors"
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for block in range(0, data, 1 << 20):
            stream.write(block.to_bytes(4, "little") * (min(1 << 20, data - block) // 4))
        stream.truncate(SIZE)
    return file


def alter(file: Path, offset: int = MIDDLE, count: int = 4096) -> None:
    """Other bytes in the middle, and the time of modification put back."""
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(b"\xa5" * count)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)


def test_altered_weights_are_another_model_whatever_the_times_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = weights(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 9, "max_position_embeddings": 9}')
    wait_until_stable()
    model_info = read_model_info(str(tmp_path))
    assert model_info.digest.startswith(f"{KIND}:")
    check_unchanged(tmp_path, model_info.digest)
    alter(file)
    with pytest.raises(JobChangedError, match=r"have changed since this run looked at them \(.*… then, .*… now\)"):
        check_unchanged(tmp_path, model_info.digest)
    forget(monkeypatch)
    assert read_model_info(str(tmp_path)).digest != model_info.digest, "nor does what was remembered on disk hide it"


@pytest.mark.parametrize("offset", [0, 1, (8 << 20) - 1, 8 << 20, (1 << 20) - 1, (9 << 20) - 1])
def test_every_byte_counts(tmp_path: Path, offset: int) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(9 << 20))
    wait_until_stable()
    before = digest_of([file])
    alter(file, offset, 1)
    assert digest_of([file]) != before


def test_names_sizes_and_order_count_and_the_place_does_not(tmp_path: Path) -> None:
    for place in "one", "two":
        (tmp_path / place).mkdir()
        for name in "ab":
            (tmp_path / place / name).write_text(name)
    one, two = [tmp_path / "one/a", tmp_path / "one/b"], [tmp_path / "two/a", tmp_path / "two/b"]
    assert digest_of(one) == digest_of(two)
    two[0].rename(two[0].with_name("c"))
    found = {digest_of(one), digest_of(one[:1]), digest_of(one[::-1]), digest_of([tmp_path / "two/c", two[1]])}
    (tmp_path / "one/a").write_text("a\n")
    assert len(found | {digest_of(one)}) == 5


def test_what_was_read_once_is_remembered_until_it_changes(
    tmp_path: Path, cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x" * 1000)
    wait_until_stable()
    first = digest_of([file])
    forget(monkeypatch)
    assert (digest_of([file]), reads) == (first, ["weights"])
    (record,) = (cache / FOLDER).iterdir()
    assert (record.stat().st_mode & 0o777, record.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    file.write_bytes(b"x" * 999 + b"y")
    forget(monkeypatch)
    assert digest_of([file]) != first


def test_a_link_is_known_by_what_lies_behind_it(tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub's cache is made of links to blobs."""
    for name in "12":
        (tmp_path / name).write_text(name)
    link = tmp_path / "link"
    link.symlink_to("1")
    wait_until_stable()
    first = digest_of([link])
    link.unlink()
    link.symlink_to("2")
    assert digest_of([link]) != first
    forget(monkeypatch)
    digest_of([link])
    assert len(reads) == 2


def test_a_file_that_is_still_warm_is_not_remembered(
    tmp_path: Path, cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick of its file system's clock it could change again, and its times would be the same."""
    monkeypatch.setattr(digests, "TICK_SECONDS", 3.0)
    file = tmp_path / "weights"
    file.write_bytes(b"x")
    assert digest_of([file]) == digest_of([file])
    assert reads == ["weights", "weights"] and not cache.exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_text("{"),
        lambda file: file.write_text("[" * 100_000),
        lambda file: file.write_text("[]"),
        lambda file: file.write_text(file.read_text().replace(KIND, "samples")),
        lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | {"digest": "0"})),
        lambda file: file.chmod(0o666),
        lambda file: (file.rename(file.with_suffix(".elsewhere")), file.symlink_to(file.with_suffix(".elsewhere"))),
        lambda file: (file.unlink(), os.mkfifo(file)),
    ],
)
def test_what_cannot_be_trusted_is_read_again(
    tmp_path: Path, cache: Path, reads: list[str], spoil: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x")
    wait_until_stable()
    first = digest_of([file])
    (record,) = (cache / FOLDER).iterdir()
    spoil(record)  # type: ignore[operator]
    forget(monkeypatch)
    assert (digest_of([file]), reads) == (first, ["weights", "weights"])


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file where the cache should be")
    file = tmp_path / "weights"
    file.write_bytes(b"x")
    wait_until_stable()
    assert not remembers()
    assert digest_of([file]) == digest_of([file])
    assert reads == ["weights"], "within a process it is remembered all the same"


def test_the_memory_is_bounded(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MOST_REMEMBERED", 8)
    files = [tmp_path / str(number) for number in range(20)]
    for file in files:
        file.write_text(file.name)
    wait_until_stable()
    digest_of(files)
    assert len(list((cache / FOLDER).iterdir())) <= 8


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x")
    wait_until_stable()
    piece = digests._chunk

    def meanwhile(descriptor: int, name: Path, start: int) -> bytes:
        file.write_bytes(b"y")
        return piece(descriptor, name, start)

    monkeypatch.setattr(digests, "_chunk", meanwhile)
    with pytest.raises(ModelError, match="weights changed while it was read: wait until it is whole"):
        digest_of([file])


def test_a_long_read_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PATIENCE_SECONDS", 0.0)
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(9 << 20))
    told: list[int] = []
    digest_of([tmp_path / "a", tmp_path / "b"], told.append)
    assert told == [18 << 20]


@pytest.mark.parametrize(("there", "said"), [(True, "this is done once"), (False, "this is done each time")])
def test_it_is_told_whether_it_is_read_again(cache: Path, monkeypatch: pytest.MonkeyPatch, there: bool, said: str) -> None:
    if not there:
        cache.write_text("a file where the cache should be")
    heard: list[str] = []
    monkeypatch.setattr(tokenizer_process, "_messages", SimpleNamespace(send=heard.append), raising=False)
    tokenizer_process._tell_of_reading(3 * 10**9)
    assert heard[0].startswith(f"reading 3.0 GB of weights to know them again; {said}")
