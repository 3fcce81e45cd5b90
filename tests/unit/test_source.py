"""The lines of an input: compressed or not, of bounded length, and of one file only."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from outrider.runner.job import source
from outrider.runner.job.source import Source
from outrider.workers.errors import UsageError

LINES = [f"line {number}\n".encode() for number in range(300)]
TEXT = b"".join(LINES)
TAR = b"a.jsonl".ljust(257, b"\0") + b"ustar\0".ljust(255, b"\0") + TEXT


def compressed_by_zstandard(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


SKIPPED = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "zstandard": compressed_by_zstandard,
    "gzip in members": lambda data: gzip.compress(data[:100]) + gzip.compress(b"") + gzip.compress(data[100:]),
    "zstandard as pzstd writes it": lambda data: SKIPPED + compressed_by_zstandard(data),
    "zstandard in frames": lambda data: (
        compressed_by_zstandard(data[:100]) + SKIPPED + compressed_by_zstandard(b"") + compressed_by_zstandard(data[100:])
    ),
}


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        list(Source(path).lines())
    return str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_lines_and_the_digest_of_the_file_as_it_is(tmp_path: Path, form: str) -> None:
    path = tmp_path / "in.jsonl"  # whatever it is called
    path.write_bytes(FORMS[form](TEXT))
    found = Source(path)
    assert list(found.lines()) == LINES
    assert found.digest == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst", "in.jsonl.zstd"])
def test_the_suffix_is_that_of_the_uncompressed_file(name: str) -> None:
    assert Source(Path(name)).suffix == ".jsonl"


@pytest.mark.parametrize("form", list(FORMS)[1:])
def test_a_file_that_was_cut_off_is_said_wherever_it_was_cut(tmp_path: Path, form: str) -> None:
    path, whole = tmp_path / "in", FORMS[form](TEXT)
    ends = {0: "nothing", len(whole): "all"}
    for cut in random.Random(1).sample(range(3, len(whole)), 60):
        path.write_bytes(whole[:cut])
        try:
            found = list(Source(path).lines())
        except UsageError as error:
            assert str(error) in (
                f"{path}: the compressed data end in the middle; make the file anew",
                f"{path}: the compressed data are damaged (Unknown frame descriptor); make the file anew",
            )
        else:  # behind a member or a frame nothing tells that more came
            assert form.endswith(("members", "frames")), cut
            assert b"".join(line or b"" for line in found) in (TEXT[:100], b""), cut
            ends[cut] = "a part"
    assert len(ends) < 12


@pytest.mark.parametrize("form", ["gzip", "zstandard with a sum"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, form: str) -> None:
    path, dice = tmp_path / "in", random.Random(2)
    whole = gzip.compress(TEXT) if form == "gzip" else compressed_by_zstandard(TEXT, write_checksum=True)
    for _ in range(40):
        broken = bytearray(whole)
        broken[dice.randrange(12, len(whole) - 8)] ^= 1 << dice.randrange(8)
        path.write_bytes(broken)
        assert refused(path).startswith(
            (f"{path}: the compressed data are damaged (", f"{path}: the compressed data end in")
        )


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.gz", TEXT, "holds no gzip data, though its name says so; rename it"),
        ("a.zst", gzip.compress(TEXT), "holds no zstandard data, though its name says so; rename it"),
        ("a.gz", gzip.compress(gzip.compress(TEXT)), "is compressed twice (gzip within gzip); decompress it once"),
        ("a.parquet.gz", gzip.compress(b"PAR1" + TEXT), "holds Parquet within gzip; decompress it"),
        ("a", lzma.compress(TEXT), "is compressed by xz; outrider reads gzip and zstandard: decompress it"),
        ("a", bz2.compress(TEXT), "is compressed by bzip2; outrider reads gzip and zstandard: decompress it"),
        ("a", bz2.compress(b""), "is compressed by bzip2; outrider reads gzip and zstandard: decompress it"),
        (
            "a",
            lzma.compress(TEXT, format=lzma.FORMAT_ALONE),
            "is compressed by lzma; outrider reads gzip and zstandard: decompress it",
        ),
        ("a.tar", TAR, "is an archive of files (tar); unpack it, and give a file of it"),
        ("a.tgz", gzip.compress(TAR), "is an archive of files (tar); unpack it, and give a file of it"),
        ("a", b"PK\x03\x04...", "is compressed by zip; outrider reads gzip and zstandard: decompress it"),
        ("a", TEXT.decode().encode("utf-16"), "is UTF-16; convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
        ("a.gz", gzip.compress(TEXT.decode().encode("utf-32")), "is UTF-32; convert it to UTF-8: iconv -f UTF-32 -t UTF-8"),
    ],
)
def test_what_is_no_text_in_utf8_is_said_once(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert refused(tmp_path / name) == f"{tmp_path / name} {sentence}"


def test_a_text_that_begins_like_bzip2_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"BZh9 is how bzip2 begins\n")
    assert list(Source(tmp_path / "a").lines()) == [b"BZh9 is how bzip2 begins\n"]


@pytest.mark.parametrize("form", ["plain", "gzip", "zstandard"])
def test_a_line_longer_than_any_prompt_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(source, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(source, "READ_AT_ONCE", 512)
    exact, long = b"a" * 999 + b"\n", b"b" * 1000 + b"\n"
    path = tmp_path / "in"
    path.write_bytes(FORMS[form](exact + long + b"c" * 9000 + b"\nlast\n" + b"d" * 5000))
    assert list(Source(path).lines()) == [exact, None, None, b"last\n", None]


def _link(path: Path) -> None:
    path.with_name("further").hardlink_to(path)


def _link_and_unlink(path: Path) -> None:
    """As many names as before."""
    _link(path)
    path.with_name("further").unlink()


def _append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"one more\n")


def _write_over(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(-1000, os.SEEK_END)
        stream.write(b"x")


def _write_over_in_secret(path: Path) -> None:
    before = path.stat()
    _write_over(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", [_append, _write_over, _write_over_in_secret, _replace, _cut, Path.unlink])
@pytest.mark.parametrize("when", [0, 5_000, 20_000])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: Callable[[Path], None], when: int) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a line of this file that is read\n" * 100_000)
    time.sleep(0.011)  # more than what file systems tell apart
    with pytest.raises(UsageError, match="in changed while it was read, so its rows may be of two files"):
        for number, _ in enumerate(Source(path).lines()):
            if number == when:
                change(path)


@pytest.mark.parametrize("change", [_link, _link_and_unlink])
def test_a_file_of_several_names_may_get_others_where_nobody_writes_it(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = tmp_path / "in"
    for linked in (False, True):
        path.write_bytes(b"a line of this file that is read\n" * 100_000)
        time.sleep(0.011)  # more than what file systems tell apart
        lines = Source(path, linked=linked).lines()
        next(lines)
        change(path)
        if linked:
            assert len(list(lines)) == 99_999
        else:
            with pytest.raises(UsageError, match="in changed while it was read"):
                list(lines)
        path.unlink()
        path.with_name("further").unlink(missing_ok=True)


@pytest.mark.parametrize("change", [_append, _write_over, _replace, _cut, Path.unlink])
def test_what_is_written_is_seen_there_too(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a line of this file that is read\n" * 100_000)
    time.sleep(0.011)
    lines = Source(path, linked=True).lines()
    next(lines)
    change(path)
    with pytest.raises(UsageError, match="in changed while it was read"):
        list(lines)
