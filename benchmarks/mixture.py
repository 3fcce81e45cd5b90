"""Make a mixture of experts out of a Llama checkpoint: the same text at a mixture's cost, nothing downloaded.

    python benchmarks/inflate.py workers/pocket/target /tmp/160m --shape 160m --noise 0.02
    python benchmarks/mixture.py /tmp/160m /tmp/mixture --experts 16 --chosen 2 --noise 0.02
    python benchmarks/paired.py --target /tmp/mixture --draft /tmp/draft --batch 1

Each expert is the dense layer with noise of its own, and a token's weights add up to one, so whichever experts a token
takes, it goes on as the dense model would. The routers are random: what tokens of one text share is what their states do.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors_writer import Recipe, write_sharded

NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
ROUTERS = np.float32(0.05)
KEPT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def tensors(source: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (it is no dictionary)
                yield name, stored.get_tensor(name).float().numpy()


def recipes(source: Path, config: dict[str, Any], experts: int, noise: float, seed: int) -> Iterator[Recipe]:
    generator = np.random.default_rng(seed)
    for name, values in tensors(source):
        layer, found, rest = name.partition(".mlp.")
        if not found:
            yield Recipe(name, values.shape, partial(_as_it_is, values))
            continue
        matrix = NAMES[rest.removesuffix(".weight")]
        for expert in range(experts):
            stem = f"{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"
            yield Recipe(stem, values.shape, partial(_with_noise, values, noise, int(generator.integers(1 << 40))))
        if matrix == "w1":
            router = ROUTERS * generator.standard_normal((experts, config["hidden_size"]), dtype=np.float32)
            yield Recipe(f"{layer}.block_sparse_moe.gate.weight", router.shape, partial(_as_it_is, router))


def _as_it_is(values: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    yield values


def _with_noise(values: NDArray[np.float32], noise: float, seed: int) -> Iterator[NDArray[np.float32]]:
    drawn = np.random.default_rng(seed).standard_normal(values.shape, dtype=np.float32)
    yield values + np.float32(noise * np.sqrt(np.mean(np.square(values)))) * drawn


def make(source: Path, out: Path, experts: int, chosen: int, noise: float, seed: int) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise SystemExit(f"mixture: {source} is of the family {config['model_type']}, only llama can become a mixture")
    out.mkdir(parents=True, exist_ok=True)
    write_sharded(out, list(recipes(source, config, experts, noise, seed)))
    for unused in ("attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(unused, None)
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
    config |= {"num_local_experts": experts, "num_experts_per_tok": chosen}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in KEPT:
        if (source / name).is_file():
            shutil.copy(source / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--chosen", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    make(asked.source, asked.out, asked.experts, asked.chosen, asked.noise, asked.seed)


if __name__ == "__main__":
    main()
