"""A tokenizer of each system's size that needs no network: the pocket pair's, with named but unreachable ids on top.

The names of the added ids tell the families apart, so that a draft of another family is refused as a real one would be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_tokenizer(source: Path, out: Path, family: str, vocabulary: int) -> None:
    content: dict[str, Any] = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    known = content["model"]["vocab"]
    if vocabulary < len(known):
        raise SystemExit(f"shapes: {vocabulary} tokens are fewer than the {len(known)} of the pocket tokenizer")
    for number in range(len(known), vocabulary):
        known[f"<|{family} {number}|>"] = number
    (out / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    template = source / "chat_template.jinja"
    if template.is_file():
        (out / template.name).write_bytes(template.read_bytes())
