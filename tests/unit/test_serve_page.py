"""The page in a real browser, without a network: Chromium, where there is one, light and dark and as narrow as a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import KEY, FakeServer, line, until

from outrider.runner.serve.auth import page_token

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: apt-get install chromium"),
]
PHONE, DESK = (390, 900), (1200, 900)
EVIL = "<img src=x onerror=\"document.title='run'\"><b>bold</b>"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Batches of every kind, one of which has a name that would be HTML."""
    fake = FakeServer(tmp_path / "data", at_once=False)
    with fake.served() as url:
        import openai

        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:

            def batch(content: str, **more: str) -> str:
                file = client.files.create(file=("rows.jsonl", content.encode()), purpose="batch").id
                made = client.batches.create(
                    input_file_id=file, endpoint="/v1/completions", completion_window="24h", metadata=more
                )
                return made.id

            whole = batch(line("a") + line("fail"))
            until(lambda: whole in fake.runner.jobs, "run")
            fake.runner.do(whole, 2)
            until(lambda: client.batches.retrieve(whole).status == "completed", "end")
            half = batch("".join(line(str(number)) for number in range(8)), note=EVIL)
            until(lambda: half in fake.runner.jobs, "run")
            fake.runner.do(half, 1)
            until(lambda: client.batches.retrieve(half).request_counts.completed == 1, "a row")  # type: ignore[union-attr]
            fake.runner.do(half, 1)
            batch("{bad")
            until(lambda: client.batches.list().data[0].status == "failed", "refusal")
        yield url


def browse(url: str, folder: Path, size: tuple[int, int], dark: bool = False, picture: bool = False) -> str:
    """The page as the browser has it after its script has run; or a picture of it."""
    assert BROWSER is not None
    arguments = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}",
        f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=1500",
        # Nothing but this machine can be reached.
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    ]  # fmt: skip
    if dark:
        arguments.append("--blink-settings=preferredColorScheme=0")
    arguments.append(f"--screenshot={folder / 'page.png'}" if picture else "--dump-dom")
    done = subprocess.run([BROWSER, *arguments, url], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_link_shows_batches_and_their_progress(url: str, tmp_path: Path) -> None:
    seen = browse(f"{url}/#{page_token([KEY])}", tmp_path, DESK)
    assert seen.count('<li class="batch ') == 3
    assert re.findall(r'<span class="status">([a-z ]+)</span>', seen) == ["failed", "in progress", "completed"]
    assert "2 of 8" in seen and "2 of 2" in seen
    assert 'aria-valuenow="25"' in seen
    assert "50.0%" in seen, "acceptance"
    assert "line 1: This line is not parseable as valid JSON." in seen
    links = re.findall(r'<a href="(/page/reports/batch_[0-9a-f]{24}\?sign=[0-9a-f]{32})"', seen)
    assert len(links) == 2, "of the one that runs, too"
    report = browse(f"{url}{links[0]}", tmp_path, DESK)
    assert "2<small>of 8 done" in report and "running, 6 rows to go" in report
    assert "small: loaded" in seen


def test_what_clients_name_is_text(url: str, tmp_path: Path) -> None:
    seen = browse(f"{url}/#{page_token([KEY])}", tmp_path, DESK)
    assert "<title>outrider</title>" in seen
    assert "&lt;b&gt;bold" in seen and "<b>bold" not in seen


def test_without_the_link_there_is_nothing(url: str, tmp_path: Path) -> None:
    assert "Open the page by the link" in browse(url, tmp_path, DESK)
    seen = browse(f"{url}/#{'0' * 32}", tmp_path, DESK)
    assert "This link is of another server" in seen
    assert '<li class="batch ' not in seen


def test_it_is_drawn_in_both_colours_and_as_wide_as_a_phone(url: str, tmp_path: Path) -> None:
    """Two pictures that differ as light and dark do; and nothing stands out at the side."""
    link, means = f"{url}/#{page_token([KEY])}", []
    for dark in (False, True):
        folder = tmp_path / str(dark)
        folder.mkdir()
        browse(link, folder, PHONE, dark, picture=True)
        means.append(_brightness(folder / "page.png"))
    assert means[0] > 0.7 > 0.4 > means[1], means


def _brightness(picture: Path) -> float:
    from matplotlib import image

    return float(image.imread(picture)[..., :3].mean())
