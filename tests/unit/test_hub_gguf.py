"""GGUF models of the hub, named by repository and type or file: the files that are fetched, and found in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_hub import Hub
from gguf_models import mostly, write_split
from quantised_models import save_small

from outrider.runner.hosts.submit import absolute_model
from outrider.workers.errors import ModelError
from outrider.workers.models.hub_gguf import models_among, of_hub
from outrider.workers.models.model_info import find, read_model_info

SPLIT = [f"BF16/big-BF16-0000{number}-of-00002.gguf" for number in (1, 2)]
WHOLE = ("big-Q4_K_M.gguf", "big-Q4_K_S.gguf", "big.i1-Q4_K_M.gguf", "Q8_0.gguf")
PUBLISHED = ("README.md", "mmproj-BF16.gguf", *WHOLE, *SPLIT)


class GgufHub(Hub):
    """Publishes GGUF files, each of which holds ``content``, or is a part of a model in two."""

    content: dict[str, bytes]

    def has(self, *names: str) -> Hub:
        for name in names:
            file = self.snapshot / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(self.content.get(name, b"GGUF"))
        return self


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("parts")
    files = write_split(save_small(folder), folder / "big.gguf", mostly("Q8_0"), 6, first_is_small=False)
    assert len(files) == len(SPLIT)
    return [file.read_bytes() for file in files]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: list[bytes]) -> GgufHub:
    found = GgufHub(tmp_path, monkeypatch, *PUBLISHED)
    found.content = dict(zip(SPLIT, parts, strict=True)) | {"big-Q4_K_S.gguf": b"GGUF"}
    return found


def message(name: str) -> str:
    with pytest.raises(ModelError) as caught:
        find(name)
    return str(caught.value)


def test_the_files_of_one_model_are_fetched_once(hub: GgufHub) -> None:
    path = find("org/big:bf16")
    assert path == hub.snapshot / SPLIT[0]
    assert hub.there() == set(SPLIT)
    assert find("org/big:BF16") == path and hub.asked == 1
    assert read_model_info("org/big:BF16").weight_bytes == sum(map(len, hub.content.values())) - len(b"GGUF")
    hub.offline(True)
    assert find(f"org/big:{SPLIT[0]}") == path


def test_a_model_is_named_by_its_file_where_a_type_says_too_little(hub: GgufHub) -> None:
    assert message("org/big:Q4_K_M") == (
        'the repository "org/big" has several GGUF models "Q4_K_M" (big-Q4_K_M, big.i1-Q4_K_M): name the file, such as '
        '"org/big:big-Q4_K_M.gguf"'
    )
    assert find("org/big:big-Q4_K_M.gguf") == hub.snapshot / "big-Q4_K_M.gguf"
    assert find("org/big:i1-q4_k_m") == hub.snapshot / "big.i1-Q4_K_M.gguf"
    assert find("org/big:Q8_0") == hub.snapshot / "Q8_0.gguf"


@pytest.mark.parametrize("choice", ["4_K_M", "Q4_K", "big", "IQ2_M", "other.gguf", "README.md"])
def test_what_is_not_published_is_told_from_what_is(hub: GgufHub, choice: str) -> None:
    assert message(f"org/big:{choice}") == (
        f'the repository "org/big" has no GGUF model "{choice}": it has BF16/big-BF16, Q8_0, big-Q4_K_M, big-Q4_K_S, '
        "big.i1-Q4_K_M"
    )


def test_a_repository_of_gguf_files_is_no_model_by_itself(hub: GgufHub) -> None:
    said = message("org/big")
    assert said.startswith('the repository "org/big" holds GGUF models (BF16/big-BF16, Q8_0, ')
    assert said.endswith('name one by its type, such as "org/big:Q4_K_M"')


def test_a_download_that_was_cut_off_is_completed(hub: GgufHub) -> None:
    hub.has(SPLIT[0])
    hub.offline(True)
    said = message("org/big:BF16")
    assert said.startswith('the download of "org/big:BF16" is not complete (')
    assert f"of which {Path(SPLIT[1]).name} is not there" in said
    hub.offline(False)
    assert find("org/big:BF16") == hub.snapshot / SPLIT[0] and hub.there() == set(SPLIT)


def test_another_type_in_the_cache_is_not_this_one(hub: GgufHub) -> None:
    hub.has("Q8_0.gguf")
    hub.offline(True)
    assert message("org/big:BF16").startswith('"org/big:BF16" is neither a directory nor in the local cache')
    with pytest.raises(ModelError, match='"org/big:BF16" is not on this machine, and a plan downloads nothing'):
        find("org/big:BF16", fetch=False)


def test_names_are_told_from_paths() -> None:
    assert of_hub("org/big:Q4_K_M") == ("org/big", "Q4_K_M")
    assert of_hub("qwen3-8b:Q8_0") == ("Qwen/Qwen3-8B", "Q8_0")
    for name in ("org/big", "./org/big:Q4", "/org/big:Q4", "a/b/c:Q4", "org/big:", ":Q4", "a b:Q4", "big.gguf"):
        assert of_hub(name) is None
    assert absolute_model("org/big:a.gguf") == "org/big:a.gguf"
    assert absolute_model("a.gguf").startswith("/")


def test_models_that_see_have_a_part_that_is_none() -> None:
    assert models_among(["mmproj-f16.gguf", "a-mmproj-Q8_0.gguf", "a-Q8_0.GGUF", "x.txt"]) == {"a-Q8_0": ["a-Q8_0.GGUF"]}
