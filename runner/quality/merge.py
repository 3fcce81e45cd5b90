"""``outrider merge``: merges a LoRA adapter into its model."""

from __future__ import annotations

import os

from outrider.runner.counted import counted
from outrider.runner.options.quality import MergeSpec
from outrider.runner.printable import printable
from outrider.runner.quality.progress import StatusLine
from outrider.runner.report.display import console
from outrider.runner.writable import check_new_folder
from outrider.workers.errors import ModelError, UsageError


def merge(spec: MergeSpec) -> None:
    if spec.out is None:
        raise UsageError("--out is missing: name a new folder")
    check_new_folder("--out", spec.out)
    if os.path.lexists(spec.out):
        raise UsageError(f"--out: {spec.out} is there already; name a folder that is not, or remove it")
    from outrider.workers import merging
    from outrider.workers.models.adapter import CONFIG, is_adapter, read_adapter
    from outrider.workers.models.model_info import find

    path = find(spec.adapter)
    if not is_adapter(path):
        raise ModelError(f"{path} has no {CONFIG}: name the directory of a LoRA adapter, as PEFT saves it")
    adapter = read_adapter(path)
    name = spec.model or adapter.base
    if not name:
        raise UsageError(f"{path / CONFIG} does not name its base model: give it with --model")
    try:
        base = find(name)
    except ModelError as error:
        if spec.model is not None:
            raise
        raise ModelError(f"{path / CONFIG}: its base model is not found: {error}; --model gives another place") from None
    with StatusLine(console()) as line:
        made = merging.merge(base, adapter, spec.out.absolute(), line.show)
    replaced = f", {counted(made.replaced, 'tensor')} replaced" if made.replaced else ""
    changed = counted(made.changed, "matrix", "matrices")
    print(f"{printable(spec.out)}: {made.size / 1e9:.3g} GB, {changed} changed{replaced}")
