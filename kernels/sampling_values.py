"""The sampling parameters that the kernels take. Imports nothing heavy, since the driver uses it, too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingValues:
    """Greedy when ``temperature`` is 0.

    ``seed`` and ``sample`` (the index among the row's n answers) are the keys of the noise; all other defaults are neutral.
    ``end_tokens`` end the row (None: those of the model do), and cannot be chosen before ``min_tokens`` others are written.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_tokens: tuple[int, ...] | None = None
