"""The supported GGUF architectures, by llama.cpp's names."""

from __future__ import annotations

from outrider.workers.models.formats.gguf.architectures import (
    alibi,
    apertus,
    cohere,
    cohere_moe,
    corrected_mixtures,
    delta_nets,
    exaone,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt,
    granite,
    kimi_linear,
    latent,
    layer_norms,
    lfm2,
    llama,
    mamba,
    mamba2,
    mixtures,
    multimodal,
    olmo,
    phi,
    starcoder,
)
from outrider.workers.models.formats.gguf.architectures.architecture import Architecture
from outrider.workers.models.formats.gguf.architectures.others import why_not
from outrider.workers.models.formats.gguf.metadata import Metadata
from outrider.workers.models.headers import quoted

ARCHITECTURES: dict[str, Architecture] = {
    **llama.ARCHITECTURES,
    **apertus.ARCHITECTURES,
    **gemma.ARCHITECTURES,
    **gemma3n.ARCHITECTURES,
    **gemma4.ARCHITECTURES,
    **phi.ARCHITECTURES,
    **granite.ARCHITECTURES,
    **glm.ARCHITECTURES,
    **cohere.ARCHITECTURES,
    **olmo.ARCHITECTURES,
    **exaone.ARCHITECTURES,
    **layer_norms.ARCHITECTURES,
    **gpt.ARCHITECTURES,
    **alibi.ARCHITECTURES,
    **starcoder.ARCHITECTURES,
    **mixtures.ARCHITECTURES,
    **corrected_mixtures.ARCHITECTURES,
    **latent.ARCHITECTURES,
    **delta_nets.ARCHITECTURES,
    **kimi_linear.ARCHITECTURES,
    **cohere_moe.ARCHITECTURES,
    **lfm2.ARCHITECTURES,
    **mamba.ARCHITECTURES,
    **mamba2.ARCHITECTURES,
    **multimodal.ARCHITECTURES,
}


def architecture_of(metadata: Metadata) -> Architecture:
    name = metadata.architecture
    if name not in ARCHITECTURES:
        metadata.refuse(f"is of the architecture {quoted(name)}, {why_not(name)}")
    if name == "llama" and metadata.get("expert_count", int, 0):
        return mixtures.MIXTRAL
    return ARCHITECTURES[name]
