"""A fake model hub without a network, and the cache of its client."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file

from outrider.workers.models.headers import INDEX

CONFIG = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 2, "dtype": "bfloat16"}
COMMIT = "a" * 40
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
PUBLISHED = (".gitattributes", "README.md", "config.json", "generation_config.json", "tokenizer.json", INDEX, *SHARDS)
# Files for other programs in a model's repository.
FOREIGN = ("consolidated.safetensors", "original/model.safetensors", "onnx/config.json", "optimizer.bin")


class Hub:
    """A cache of the hub's client in ``path``, and a hub that counts requests."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, *published: str) -> None:
        self.asked, self.published = 0, published or (*PUBLISHED, *FOREIGN)
        self.offline = partial(monkeypatch.setattr, constants, "HF_HUB_OFFLINE")
        self.offline(False)
        repository = path / "models--org--big"
        self.snapshot = repository / "snapshots" / COMMIT
        self.snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        self._tree = repository / "trees" / f"{COMMIT}.json"
        self._local: Any = huggingface_hub.snapshot_download
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda api, name, timeout: self._info())
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._download)

    def has(self, *names: str) -> Hub:
        contents = {
            "config.json": json.dumps(CONFIG),
            INDEX: json.dumps({"weight_map": dict(zip(("model.norm.weight", "lm_head.weight"), SHARDS, strict=True))}),
        }
        for name in names:
            file = self.snapshot / name
            file.parent.mkdir(exist_ok=True)
            if name in SHARDS or name == "model.safetensors":
                tensor = "lm_head.weight" if name == SHARDS[1] else "model.norm.weight"
                save_file({tensor: np.zeros(2, np.float32)}, file)
            else:
                file.write_text(contents.get(name, "{}"))
        return self

    def remembers(self) -> None:
        """Writes the list of published files that the client caches from version 2 on."""
        self._tree.parent.mkdir()
        entries = {name: {"size": 2, "blob_id": "b" * 40} for name in self.published}
        self._tree.write_text(json.dumps({"format_version": 1, "files": entries}))

    def _info(self) -> Any:
        self.asked += 1
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.published])

    def _download(self, name: str, local_files_only: bool = False, **patterns: Any) -> str:
        if local_files_only:
            return str(self._local(name, local_files_only=True, **patterns))
        self.has(*filter_repo_objects(self.published, **patterns))
        return str(self.snapshot)

    def there(self) -> set[str]:
        return {str(file.relative_to(self.snapshot)) for file in self.snapshot.rglob("*") if file.is_file()}
