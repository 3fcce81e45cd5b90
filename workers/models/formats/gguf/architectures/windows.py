"""The layers with sliding windows."""

from __future__ import annotations

from outrider.workers.models.formats.gguf.architectures.left_out import layers
from outrider.workers.models.formats.gguf.metadata import Metadata
from outrider.workers.models.headers import quoted

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = "attention.sliding_window"
PATTERN = "attention.sliding_window_pattern"
KNOWN_OF_WINDOWS = frozenset({WINDOW, PATTERN, "rope.freq_base_swa"})


def layer_types(metadata: Metadata, every: int) -> list[str]:
    """The type of each layer. The file has a flag for each layer, or n: every nth layer has no window (default
    ``every``)."""
    count = layers(metadata)
    stated = metadata.values.get(f"{metadata.architecture}.{PATTERN}", every)
    if type(stated) is int and stated >= 0:
        # 0: all layers have a window.
        stated = [not stated or (layer + 1) % stated != 0 for layer in range(count)]
    flags = list(stated) if isinstance(stated, list) else []
    if len(flags) < count or not all(type(flag) is bool or flag in (0, 1) for flag in flags):
        metadata.refuse(f"has {quoted(f'{metadata.architecture}.{PATTERN}')}: {quoted(stated)}, for {count} layers")
    return [SLIDING if flag else FULL for flag in flags[:count]]


def same_base(metadata: Metadata) -> None:
    """Refuse a separate base of rope for layers with a window, in architectures without one."""
    base = metadata.get("rope.freq_base", float, 10000.0)
    if metadata.get("rope.freq_base_swa", float, base) != base:
        metadata.refuse_value("rope.freq_base_swa")
