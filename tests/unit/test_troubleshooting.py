"""docs/troubleshooting.md lists every sentence with which outrider ends, and quotes none that is not in the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from error_sentences import Sentence, error_classes, literals, sentences

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"

# Not listed: only a mistake of ours can cause these, or what follows the colon is a sentence that is listed by itself.
EXCEPTIONS = {
    "a lease is named by a core number or a device such as cuda-0, got",
    "cores, memory nodes and threads must be numbers from 0 to",
    "an actor needs at least one core and one thread",
    "the size of a model or of its cache cannot be negative",
}
# Fewer words of its own than this say nothing without what is filled in.
LEAST_WORDS = 2
# A quote has all words of a sentence, or so many that no other begins or ends like it.
ENOUGH_WORDS = 5


@cache
def words(text: str) -> list[str]:
    return re.findall(r"[\w'-]{2,}", text.replace("…", " "))


@cache
def quotes() -> list[str]:
    """What the first column of the tables has in backticks, and the reasons that the second repeats."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    found = []
    for row in rows:
        says, _, meaning = row.strip("| ").partition(" | ")
        found += re.findall(r"`([^`]+)`", says)
        # Reasons that are part of a sentence: whatever is longer than a command or an option.
        found += [each for each in re.findall(r"`([^`]+)`", meaning) if each.startswith("…") or len(words(each)) > 6]
    return found


def stands_in(quote: str, text: str) -> bool:
    """Whether a text says what is quoted, "…" standing for anything in either."""
    parts, pattern = _pattern(quote)
    # Nearly no text has all parts, and to look for them takes a tenth of the time.
    return all(part in text for part in parts) and pattern.search(text) is not None


@cache
def _pattern(quote: str) -> tuple[list[str], re.Pattern[str]]:
    parts = [part.strip() for part in quote.strip("… ").split("…")]
    return parts, re.compile(".*".join(map(re.escape, parts)))


def listed(sentence: Sentence) -> bool:
    needed = min(ENOUGH_WORDS, len(words(sentence.text)))
    return any(stands_in(quote, sentence.text) for quote in quotes() if len(words(quote)) >= needed)


def test_the_sentences_of_the_code_are_found() -> None:
    found = sentences()
    assert {"InputError", "RayLostError"} <= error_classes()
    assert len(found) > 200
    assert any(sentence.text.startswith("no core is free: all that this process") for sentence in found)


def test_each_sentence_of_the_code_is_listed() -> None:
    missing = [
        f"{each.file}:{each.line}: {each.error}: {each.text}"
        for each in sentences()
        if len(words(each.text)) >= LEAST_WORDS and not listed(each) and not any(known in each.text for known in EXCEPTIONS)
    ]
    assert not missing, "\n".join(["docs/troubleshooting.md does not say what a user can do about", *missing])


def test_what_is_quoted_stands_in_the_code() -> None:
    assert len(quotes()) > 200
    assert [quote for quote in quotes() if not stands_in(quote, texts())] == [], "no sentence of the code says these"


@cache
def texts() -> str:
    """One a line, which a quote's "…" does not reach beyond."""
    return "\n".join([*literals(), *(each.text for each in sentences())])


def test_each_exception_is_still_needed() -> None:
    found = [each.text for each in sentences()]
    assert [known for known in EXCEPTIONS if not any(known in text for text in found)] == []


def test_each_row_of_the_page_says_why() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if len(row.strip("| ").partition(" | ")[2].split()) < 3] == []
