"""The changes of mlx-lm's conversion to each family's checkpoint, beside quantisation: names, and a few values.

All experts of a layer are in one tensor [experts, N, K bits/32], under ``switch_mlp`` or ``experts``; convolutions have
taps before inputs. Latent attention has, instead of kv_b_proj, ``embed_q`` (queries to the latent vector) and
``unembed_out`` (latent vector to values), each with all heads in one tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from outrider.workers.models.headers import BITS, Entry

# The supported "model_type"s: a converted model of each was compared with mlx-lm's logits.
FAMILIES = frozenset(
    (
        *("llama", "mistral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2"),
        *("gemma3_text", "phi", "phi3", "phimoe", "granite", "granitemoe", "smollm3", "olmo2", "olmo3", "olmoe", "glm4"),
        *("glm4_moe", "cohere", "cohere2", "exaone4", "ernie4_5", "lfm2", "stablelm", "starcoder2", "nemotron", "apertus"),
        *("hunyuan_v1_dense", "seed_oss", "solar_open", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "dots1", "afmoe"),
        *("lfm2_moe", "gpt_oss", "qwen3_next", "mellum", "granitemoehybrid", "nemotron_h"),
    )
)
# Families whose norms are stored as w elsewhere and as 1 + w by mlx-lm.
WITH_WHOLE_NORMS = frozenset(("qwen3_next",))

STACKED = re.compile(r"(.*)\.(?:switch_mlp|experts)\.(gate_proj|up_proj|down_proj|fc1|fc2)\.(weight|scales|biases|bias)")
HEADS = re.compile(r"(.*\.(?:embed_q|unembed_out))\.(weight|scales|biases)")
OF_A_HEAD = re.compile(r"(.*\.(?:embed_q|unembed_out))\.\d+")
FIRST_HEAD = ".embed_q.0.weight"
# The dense layers of LFM2's mixtures.
DENSE = re.compile(r"(.*\.feed_forward)\.(gate_proj|up_proj|down_proj)\.(\w+)")
# The names of an expert's matrices in Mixtral and LFM2 (other_names.py).
OTHER_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# The names of Nemotron's two matrices, by mlx-lm's names.
OF_TWO = {"fc1": "up_proj", "fc2": "down_proj"}
WITH_OTHER_MATRICES = ("block_sparse_moe", "feed_forward")
OF_AN_EXPERT = re.compile(r"(.*)\.experts\.\d+\.(\w+)")
WITH_GATES = (("gate_proj", "up_proj"), ("w1", "w3"))
TAPS = ("conv.conv.weight", "conv1d.weight")


def names_in_mlx(module: str) -> Iterator[str]:
    """The names that a layer may have in ``quantization``."""
    yield module
    block, _, last = module.rpartition(".")
    if found := OF_AN_EXPERT.fullmatch(module):
        matrix = _usual(found[2])
        yield from (
            f"{found[1]}.switch_mlp.{name}" for name in (matrix, *(two for two, one in OF_TWO.items() if one == matrix))
        )
        yield f"{found[1]}.experts.{matrix}"
    elif found := OF_A_HEAD.fullmatch(module):
        yield found[1]
    elif block.endswith(".feed_forward"):
        yield f"{block}.{_usual(last)}"


def alike(module: str, entries: Collection[str]) -> list[str]:
    """The layers that must be stored like this one: all experts of a layer, gate and up, and all heads."""
    patterns = [module]
    if found := OF_AN_EXPERT.fullmatch(module):
        both = next((each for each in WITH_GATES if found[2] in each), (found[2],))
        patterns = [f"{found[1]}.experts.{{}}.{matrix}" for matrix in both]
    elif found := OF_A_HEAD.fullmatch(module):
        patterns = [f"{found[1]}.{{}}"]
    names: list[str] = []
    for number in range(len(entries)):
        more = [each for pattern in patterns if f"{(each := pattern.format(number))}.scales" in entries]
        names += more
        if not more or patterns == [module]:
            break
    return names


def _usual(matrix: str) -> str:
    return next((usual for usual, other in OTHER_MATRICES.items() if other == matrix), matrix)


def as_transformers_names(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries for single experts under transformers' names, and convolutions with transformers' dimensions."""
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        stacked, dense = STACKED.fullmatch(name), DENSE.fullmatch(name)
        if name.endswith(TAPS) and len(entry.shape) == 3 and entry.shape[2] == 1:
            found[name] = replace(entry, shape=(entry.shape[0], 1, entry.shape[1]))
        elif stacked is not None and len(entry.shape) == (2 if stacked[3] == "bias" else 3):
            block, matrix, part = stacked.groups()
            matrix = OF_TWO.get(matrix, matrix)
            matrix = OTHER_MATRICES[matrix] if block.endswith(WITH_OTHER_MATRICES) else matrix
            found |= _apart(entry, f"{block}.experts.{{}}.{matrix}.{part}")
        elif (heads := HEADS.fullmatch(name)) is not None and len(entry.shape) == 3:
            found |= _apart(entry, f"{heads[1]}.{{}}.{heads[2]}")
        elif dense is not None:
            found[f"{dense[1]}.{OTHER_MATRICES[dense[2]]}.{dense[3]}"] = entry
        else:
            found[name] = entry
    return found


def _apart(entry: Entry, name: str) -> dict[str, Entry]:
    """An entry for each matrix of a tensor that holds several, with its number in the name."""
    shape = entry.shape[1:]
    size = math.prod(shape) * BITS.get(entry.type, 8) // 8
    offsets = (entry.offset + number * size for number in range(entry.shape[0]))
    return {name.format(number): replace(entry, shape=shape, offset=offset) for number, offset in enumerate(offsets)}
