"""Control characters in names and texts are escaped wherever they are printed."""

from __future__ import annotations

import io
import unicodedata

import pytest
from rich.console import Console
from rich.table import Table

from outrider.runner.cli import machine
from outrider.runner.cli import main as cli
from outrider.runner.printable import printable, printable_lines
from outrider.runner.report.display import Display, console, summary_table
from outrider.workers.errors import InputError

HOSTILE = "a\x1b[31mred\r\n\x07\x9b2J\u202eevil\u2066\u200b\x7f\x00"
SHOWN = r"a\x1b[31mred\r\n\x07\x9b2J\u202eevil\u2066\u200b\x7f\x00"


def test_what_a_terminal_obeys_is_shown() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("naïve 文字 👩‍🚀 \\n 'x'") == "naïve 文字 👩‍🚀 \\n 'x'"
    assert printable(b"\xff".decode(errors="surrogateescape")) == r"\udcff"
    assert printable_lines("one\n\ttwo\x1b[0m\r\n") == "one\n\ttwo\\x1b[0m\\r\n"


def test_what_reads_like_an_emoji_s_name_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A problem of line 100 was shown as one of in.jsonl💯."""
    said = "in.jsonl:100: of a row called :smile:, in a:rocket:b"
    Display(console()).say(said)
    table = Table(box=None)
    table.add_row("job", said)
    console().print(table)
    machine._console().print(table)
    printed = capsys.readouterr()
    assert printed.err.count(said) == 2 and printed.out.count(said) == 1


@pytest.mark.slow
def test_no_control_character_of_unicode_gets_through() -> None:
    every = (chr(code) for code in range(0x110000))
    through = [c for c in every if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and printable(c) == c]
    assert through == []
    turning = [chr(code) for code in range(0x110000) if unicodedata.bidirectional(chr(code)) in (
        "LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")]  # fmt: skip
    assert turning
    assert [c for c in turning if printable(c) == c] == []


def test_errors_and_their_lines_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise InputError(f"sentence {HOSTILE}", [f"in:1: {HOSTILE}"])

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit):
        cli._run()
    assert capsys.readouterr().err == f"in:1: {SHOWN}\noutrider: sentence {SHOWN}\n"


def test_notes_and_the_summary_are_shown() -> None:
    out = io.StringIO()
    console = Console(file=out, width=400)
    Display(console).say(f"note: {HOSTILE} [bold]")
    summary = {"rows": 1, "done": 1, "failed": 0, "tokens": 1, "seconds": 1.0, "accepted": 0, "proposed": 0, "near_ties": 0,
               "acceptance": 0.0, "tokens_per_round": 1.0, "mean_k": 0.0, "plain_rounds": 0, "runners_up": 0,
               "runners_up_accepted": 0, "accepted_lengths": [], "time": {}, "replicas": []}  # fmt: skip
    console.print(summary_table(summary, [], HOSTILE + "[bold]"))
    text = out.getvalue()
    assert text.count(f"{SHOWN} [bold]") == 1
    assert text.count(f"{SHOWN}[bold]") == 1
    assert "\x1b" not in text
