"""Parts of a file that do not affect the next token: multi-token prediction layers, and the sections of multimodal rope."""

from __future__ import annotations

from outrider.workers.models.formats.gguf.metadata import Metadata

FURTHER_LAYERS = "nextn_predict_layers"
SECTIONS = "rope.dimension_sections"


def further_layers(metadata: Metadata) -> range:
    """The layers at the end that predict further tokens (multi-token prediction)."""
    count, further = metadata.get("block_count", int), metadata.get(FURTHER_LAYERS, int, 0)
    if further and not 0 < further < count:
        metadata.refuse_value(FURTHER_LAYERS)
    return range(count - further, count)


def layers(metadata: Metadata) -> int:
    """The number of layers without the multi-token prediction layers."""
    return further_layers(metadata).start


def check_sections(metadata: Metadata) -> None:
    """Check the sections of multimodal rope: for text three directions have the token's position, the fourth 0."""
    if metadata.has(SECTIONS) and metadata.several(SECTIONS, int, 4)[3]:
        metadata.refuse_value(SECTIONS)
