"""What of a file the next token of a text does not hang on: layers that guess further tokens, rope's other directions."""

from __future__ import annotations

from outrider.workers.models.formats.gguf.metadata import Metadata

FURTHER_LAYERS = "nextn_predict_layers"
SECTIONS = "rope.dimension_sections"


def further_layers(metadata: Metadata) -> range:
    """The last ones, where they guess further tokens."""
    count, further = metadata.get("block_count", int), metadata.get(FURTHER_LAYERS, int, 0)
    if further and not 0 < further < count:
        metadata.refuse_value(FURTHER_LAYERS)
    return range(count - further, count)


def layers(metadata: Metadata) -> int:
    """Those that the next token is computed by."""
    return further_layers(metadata).start


def check_sections(metadata: Metadata) -> None:
    """Where rope turns in several directions a text has one position in three of them, and 0 in the fourth."""
    if metadata.has(SECTIONS) and metadata.several(SECTIONS, int, 4)[3]:
        metadata.refuse_value(SECTIONS)
