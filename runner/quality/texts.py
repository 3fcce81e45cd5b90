"""The tokens of an input for scoring or calibration: rows in lines of JSON (as for ``run``), or a file that is one text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.runner.job.admission import MOST_ERRORS_SHOWN, refusal_of
from outrider.runner.job.encoded_rows import ROWS_AT_ONCE, text_of
from outrider.runner.job.input import open_input
from outrider.runner.job.prompts import read_rows
from outrider.runner.job.reading import CSV_SUFFIXES
from outrider.runner.job.requests import Request
from outrider.runner.job.source import Source
from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.printable import printable
from outrider.workers.errors import InputError, UsageError
from outrider.workers.models.model_info import ModelInfo

# A text is encoded in pieces of about this size, so that it may have any length.
PIECE_BYTES = 4 << 20
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")

Tokens = tuple[int, ...]


@contextmanager
def opened_source(path: Path, say: Callable[[str], None]) -> Iterator[Source]:
    """The input's lines; a piped input is kept in a temporary file meanwhile."""
    # Path.is_dir would raise for a name that is too long, which open_input reports in a sentence.
    if os.path.isdir(path):  # noqa: PTH112
        raise UsageError(
            f"{printable(path)} is a directory, which is no text; give a file of rows as lines of JSON, or of text"
        )
    with TemporaryDirectory(prefix="outrider-") as folder:
        source = open_input(path, Path(folder), say, form="jsonl")
        assert isinstance(source, Source)
        yield source


def is_text(source: Source, form: str) -> bool:
    """Whether a file is one text: by --format, else by its name, else by its first character."""
    if form != "auto":
        return form == "text"
    suffix = source.suffix.lower()
    if suffix in JSON_SUFFIXES:
        return False
    if suffix in (".txt", ".text"):
        return True
    if suffix in CSV_SUFFIXES:
        raise UsageError(
            f"{source.name} is a table, and rows are taken here as lines of JSON; convert it, or take all of it as one "
            "text with --format text"
        )
    first = next((line for line in source.lines() if line is None or line.strip()), b"")
    return first is None or not first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def texts(
    source: Source,
    form: str,
    model_info: ModelInfo,
    tokenizer_process: TokenizerProcess,
    skip_bad: bool,
    say: Callable[[str], None],
) -> Iterator[Iterable[Tokens]]:
    """Every text of the input as consecutive pieces of tokens, which must be consumed in order."""
    if is_text(source, form):
        if skip_bad:
            raise UsageError(
                f"--skip-bad leaves out rows, and {source.name} is taken as one text: leave it out, or give --format jsonl"
            )
        yield _pieces(source, model_info, tokenizer_process)
    else:
        for tokens in _rows(source, model_info, tokenizer_process, skip_bad, say):
            yield (tokens,)


def _pieces(source: Source, model_info: ModelInfo, tokenizer_process: TokenizerProcess) -> Iterator[Tokens]:
    """The pieces of one text; each ends with a line, and only the first has the tokenizer's BOS token and the like."""
    ahead = None
    for index, text in enumerate(_decoded(source)):
        asked = tokenizer_process.begin_to_encode(model_info.path, [text], continued=index > 0)
        if ahead is not None:
            yield _checked(ahead()[0], source.name, model_info)
        ahead = asked
    if ahead is None:
        raise UsageError(f"{source.name} holds no text, only blank lines")
    yield _checked(ahead()[0], source.name, model_info)


def _decoded(source: Source) -> Iterator[str]:
    lines: list[bytes] = []
    held = before = 0
    for number, line in enumerate(source.lines(), start=1):
        if line is None:
            raise UsageError(f"{source.name}:{number}: the line is too long; break it into several")
        lines.append(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
        held += len(line)
        if held >= PIECE_BYTES:
            yield _text(b"".join(lines), source.name, before)
            lines, held, before = [], 0, number
    last = b"".join(lines)
    if last.strip() or (before and last):
        yield _text(last, source.name, before)


def _text(raw: bytes, name: str, lines_before: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = lines_before + raw.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}:{line}: this is not UTF-8; convert the file to UTF-8") from None


def _rows(
    source: Source, model_info: ModelInfo, tokenizer_process: TokenizerProcess, skip_bad: bool, say: Callable[[str], None]
) -> Iterator[Tokens]:
    """The prompts' tokens; all rows are checked before the first is encoded."""
    bad: list[str] = []
    wrong = good = 0
    for row in read_rows(source, "jsonl"):
        if isinstance(row, Request):
            good += 1
            continue
        wrong += 1
        if len(bad) < MOST_ERRORS_SHOWN:
            bad.append(f"{source.name}:{row.line}: {row.message}")
    if not good and not wrong:
        raise UsageError(f"{source.name} holds no prompts, only blank lines; give one prompt a line")
    if wrong and not skip_bad:
        raise InputError(*refusal_of(bad, wrong))
    if wrong:
        say(f"note: {wrong:,} of the rows are wrong and left out, first {bad[0]}")
    rows = (row for row in read_rows(source, "jsonl") if isinstance(row, Request))
    while some := list(islice(rows, ROWS_AT_ONCE)):
        encoded = iter(
            tokenizer_process.encode(model_info.path, [text_of(row) for row in some if row.prompt_tokens is None])
        )
        for row in some:
            tokens = row.prompt_tokens if row.prompt_tokens is not None else next(encoded)
            try:
                yield _checked(tokens, f"{source.name}:{row.line}", model_info)
            except UsageError as error:
                if not skip_bad:
                    raise
                say(f"note: left out: {error}")


def _checked(tokens: Tokens | str, name: str, model_info: ModelInfo) -> Tokens:
    if isinstance(tokens, str):
        raise UsageError(f"{name}: {tokens}")
    if max(tokens) >= model_info.vocabulary:
        raise UsageError(
            f"{name}: the text has the token id {max(tokens)}, which {model_info.name} does not know: it has "
            f"{model_info.vocabulary}"
        )
    return tokens
