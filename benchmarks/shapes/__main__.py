"""Lay models of the classic benchmarks into a Hugging Face cache folder, so that their command lines resolve offline.

    python -m benchmarks.shapes opt-6.7b opt-125m --hub /tmp/hub
    HF_HUB_OFFLINE=1 HF_HUB_CACHE=/tmp/hub outrider bench -m opt-6.7b --task decode --precision w4a8

The configurations are the hub's. The weights are not: Llama and Qwen2 are inflated from the bundled pocket pair (they
write the pocket pair's text at the real cost), others are random, experts of gpt-oss in MXFP4. `--layers` and
`--vocabulary` make less of a model than it is. The tokenizer is the pocket pair's, padded
to the real size. What differs from the published files is written into SHAPE.md beside them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from inflate import Inflater, small_shape
from safetensors_writer import Recipe, write_sharded

from benchmarks.shapes.catalogue import DRAFT_PARAMETERS, System, catalogue, find_system
from benchmarks.shapes.random_weights import random_recipes
from benchmarks.shapes.tokenizers import write_tokenizer
from outrider.workers.models.model_info import POCKET, POCKET_DRAFT, find

REVISION = "0" * 39 + "1"
SPARE_BYTES = 4 << 30
# What was laid, and how.
ACCOUNT = "SHAPE.md"


def recipes_of(system: System, config: dict[str, Any], noise: float, random: bool, seed: int) -> list[Recipe]:
    dtype = "F16" if config["torch_dtype"] == "float16" else "BF16"
    if random or not system.inflatable:
        return random_recipes(config, dtype, seed)
    shape = small_shape(config)
    source = find(POCKET_DRAFT if shape.parameters < DRAFT_PARAMETERS else POCKET)
    tied, biased = bool(config["tie_word_embeddings"]), system.family == "qwen2"
    inflater = Inflater(source, shape, noise, seed, tied=tied, biased=biased)
    return [replace(recipe, dtype=dtype) for recipe in inflater.recipes()]


def changed_config(system: System, random: bool) -> dict[str, Any]:
    """What of the published configuration cannot stay: the inflated function has its own constants and end token."""
    pocket = json.loads((find(POCKET) / "config.json").read_text(encoding="utf-8"))
    changes: dict[str, Any] = {"bos_token_id": pocket["bos_token_id"], "eos_token_id": pocket["eos_token_id"]}
    if "pad_token_id" in system.config:
        changes["pad_token_id"] = pocket["eos_token_id"]
    if system.inflatable and not random:
        changes |= {"rms_norm_eps": pocket["rms_norm_eps"], "rope_theta": pocket["rope_parameters"]["rope_theta"]}
    if system.config["torch_dtype"] == "float32":
        changes["torch_dtype"] = "bfloat16"
    return {key: value for key, value in changes.items() if system.config.get(key) != value}


def smaller(system: System, layers: int | None, vocabulary: int | None) -> System:
    """With fewer layers, the first ones, or fewer tokens; the name says so."""
    config, name = dict(system.config), system.name
    if layers:
        config["num_hidden_layers"], name = layers, f"{name}-{layers}-layers"
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:layers]
    if vocabulary:
        config["vocab_size"], name = vocabulary, f"{name}-{vocabulary}-tokens"
    return System(name, config)


def lay(system: System, hub: Path, noise: float = 0.02, random: bool = False, seed: int = 1) -> Path:
    """The snapshot's directory, whole: an interrupted one is begun anew, and one that was laid otherwise is refused."""
    place = hub / system.folder
    snapshot, blobs = place / "snapshots" / REVISION, place / "blobs"
    changes = changed_config(system, random)
    account = _account(system, changes, random, noise, seed)
    if (place / "refs" / "main").is_file():
        if (blobs / ACCOUNT).read_text(encoding="utf-8") != account:
            raise SystemExit(f"shapes: {place} was laid with other options (see {blobs / ACCOUNT}): remove it first")
        return snapshot
    config = system.config | changes
    recipes = recipes_of(system, config, noise, random, seed)
    size = sum(recipe.size for recipe in recipes)
    hub.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(hub).free
    if free < size + SPARE_BYTES:
        raise SystemExit(f"shapes: {system.name} needs {size / 1e9:.1f} GB, {hub} has {free / 1e9:.1f} GB free")
    for folder in (snapshot, blobs, place / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    write_sharded(blobs, recipes)
    (blobs / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(find(POCKET), blobs, system.family, config["vocab_size"])
    (blobs / ACCOUNT).write_text(account, encoding="utf-8")
    # The hub's client keeps the content under blobs and links to it.
    for file in sorted(blobs.iterdir()):
        link = snapshot / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..") / ".." / "blobs" / file.name)
    (place / "refs" / "main").write_text(REVISION)
    return snapshot


def _account(system: System, changes: dict[str, Any], random: bool, noise: float, seed: int) -> str:
    made = "random" if random or not system.inflatable else f"inflated from outrider's pocket pair, noise {noise}"
    differences = ", ".join(f"{key} {system.config.get(key)} -> {value}" for key, value in changes.items()) or "nothing"
    return (
        f"# The shape of {system.name}, not the model\n\nWeights: {made}, seed {seed}. Tokenizer: the pocket pair's, "
        f"padded to {system.config['vocab_size']} ids.\nChanged in config.json: {differences}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="hub ids, their short names, or all")
    parser.add_argument("--hub", type=Path, required=True, help="the folder for HF_HUB_CACHE")
    parser.add_argument("--random", action="store_true", help="random weights for Llama and Qwen2 too: quicker to write")
    parser.add_argument("--noise", type=float, default=0.02, help="of inflated weights: less agreement with more")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--vocabulary", type=int, help="fewer tokens than the model has")
    arguments = parser.parse_args()
    chosen = list(catalogue().values()) if arguments.names == ["all"] else [find_system(name) for name in arguments.names]
    for system in (smaller(each, arguments.layers, arguments.vocabulary) for each in chosen):
        started = time.perf_counter()
        path = lay(system, arguments.hub, arguments.noise, arguments.random, arguments.seed)
        size = sum(file.stat().st_size for file in path.iterdir())
        print(f"{system.name}: {size / 1e9:.2f} GB in {time.perf_counter() - started:.0f} s, {path}", flush=True)


if __name__ == "__main__":
    main()
