"""A target on a GPU with its draft on the CPU, where there is a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: the target cannot be put on one"),
]


def test_the_target_on_the_gpu_speculates_with_its_draft_on_the_cpu(tmp_path: Path) -> None:
    # Rows enough for the draft to be up before they have ended.
    rows = ({"id": str(number), "prompt": f"def f{number}(", "max_tokens": 128} for number in range(40))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = "from outrider.runner.cli.main import main; main()"
    words = ["run", "rows.jsonl", "-o", "job", "--devices", "cuda:0,cpu", "--draft-tokens", "4", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", command, *words],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accepted"] > 0
    pinned = {entry["role"]: entry for entry in json.loads((tmp_path / "job" / "job.json").read_text())["pinning"]}
    assert pinned["target"]["asked"]["device"] == "cuda:0"
    assert pinned["draft"]["asked"]["device"] == "cpu"
    assert pinned["target"]["visible_devices"] == pinned["target"]["asked"]["device_selector"]
