"""Which engine opens a model, and the numeric path that its results follow."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.kernels import library, native
from outrider.kernels.program import Cache, Format
from outrider.workers.engines.engine import Engine
from outrider.workers.errors import ModelError, UsageError
from outrider.workers.messages import ModelSpec
from outrider.workers.models.cards import weight_files
from outrider.workers.models.checkpoint import open_checkpoint
from outrider.workers.models.families import build_program
from outrider.workers.models.files import read_json

# What the native engine calls the formats that a person asks for by name.
NATIVE_PRECISIONS = {"fp32": Format.FP32, "bf16": Format.BF16, "w8a8": Format.W8A8, "w4a8": Format.W4A8}


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A running engine with what its users need to know beside it.

    ``numeric_path`` names everything that may decide a bit of the results: replicas and resumed runs must agree on it.
    ``weights`` are the buffers (address, bytes) in this process's memory, ``threads`` those of the kernels' own pool.
    """

    engine: Engine
    kind: str
    end_tokens: tuple[int, ...]
    notes: list[str]
    numeric_path: dict[str, str]
    weights: tuple[tuple[int, int], ...] = ()
    threads: int | None = None
    # Move the engine's threads to other cores of this process; None where the engine cannot.
    use_cores: Callable[[Sequence[int]], None] | None = None
    # Take memory for so many rows now rather than in the middle of the work; None where there is nothing to take.
    reserve: Callable[[int], None] | None = None


def native_supports(card_path: str) -> str | None:
    """None if the native engine can run the model in this directory, else the sentence that says why not."""
    try:
        library.instruction_set()
        file = Path(card_path) / "config.json"
        build_program(read_json(file), Format.BF16, source=str(file))
    except (library.KernelsUnavailable, library.KernelError, ModelError) as error:
        return str(error)
    return None


def check_weights(path: str, engine: str, allow_pickle: bool = False) -> None:
    """Refuse a model whose files lack what the engine will ask them for, before a process is started that would miss it.

    Files that are allowed to run code are left to that process; so is what only transformers knows to ask for.
    """
    directory = Path(path)
    safe = weight_files(directory)[0].suffix == ".safetensors"
    if (engine != "native" and safe) or (allow_pickle and not safe):
        return
    checkpoint = open_checkpoint(directory)
    try:
        if engine == "native":
            file = directory / "config.json"
            for weight in build_program(read_json(file), Format.BF16, source=str(file)).weights:
                for source in weight.sources:
                    checkpoint.check(source)
    finally:
        checkpoint.close()


def open_model(spec: ModelSpec, progress: Callable[[int, int], None] = lambda done, total: None) -> OpenModel:
    """``progress`` hears how many bytes of the packed weights are in place, of how many; only the native engine tells."""
    if spec.engine == "native":
        return _open_native(spec, progress)
    if spec.engine == "hf":
        return _open_hf(spec)
    raise UsageError(f'--engine: "{spec.engine}" is not an engine; choose native or hf')


def _open_native(spec: ModelSpec, progress: Callable[[int, int], None]) -> OpenModel:
    from outrider.workers.engines.native import NativeEngine
    from outrider.workers.models.cards import read_card
    from outrider.workers.models.native_packer import NativePacker
    from outrider.workers.models.packed import LOADING_VERSION, load_packed
    from outrider.workers.models.tying import head_of_its_own

    if spec.precision not in NATIVE_PRECISIONS:
        choices = ", ".join(NATIVE_PRECISIONS)
        raise UsageError(f'--precision: the native engine does not know "{spec.precision}"; choose one of {choices}')
    if spec.device != "cpu":
        raise UsageError(f'--device: the native engine runs on the cpu, not on "{spec.device}"; --engine hf does')
    try:
        isa = library.instruction_set()
    except (library.KernelsUnavailable, library.KernelError) as error:
        raise UsageError(f"the native engine cannot be used: {error}; --engine hf can") from error
    card = read_card(spec.path)
    file = Path(card.path) / "config.json"
    values = read_json(file)
    precision = NATIVE_PRECISIONS[spec.precision]
    program = build_program(values, precision, source=str(file))
    if head_of_its_own(program, Path(card.path), spec.allow_pickle):
        program = build_program(values | {"tie_word_embeddings": False}, precision, source=str(file))
    if spec.small_cache and program.integer:
        program = replace(program, cache=Cache.INT8)
    threads = spec.threads or len(spec.cores) or len(os.sched_getaffinity(0))
    packer = NativePacker()
    packed = load_packed(card, program, packer, threads, spec.allow_pickle, progress)
    cores = spec.cores if len(spec.cores) == threads else None
    model = native.NativeModel(program, packed.addresses, threads=threads, cores=cores, keep=packed)
    rounding = "rounded to nearest on load (rtn), " if program.integer else ""
    source = "from the cache" if packed.cached else "packed now"
    cache = ", keys and values in 8 bits" if program.cache is Cache.INT8 else ""
    notes = [
        f"native engine, {isa}: {spec.precision}, {rounding}{packed.size / 1e9:.2f} GB, {source}{cache}",
        *packed.notes,
    ]
    path = {"engine": "native", "precision": spec.precision, "packing": f"{packer.version}, loading {LOADING_VERSION}"}
    if not program.integer:
        # Only the integer formats are computed in one order on every instruction set.
        path["instruction_set"] = isa
    engine = NativeEngine(model, min(card.context, program.context))
    weights = ((packed.memory.address, packed.size),)
    return OpenModel(engine, "native", card.end_tokens, notes, path, weights, threads, model.use_cores, engine.reserve)


def _open_hf(spec: ModelSpec) -> OpenModel:
    import torch
    import transformers

    from outrider.workers.models.loading import load_hf

    engine, card, notes = load_hf(spec)
    path = {
        "engine": "hf",
        "precision": spec.precision,
        "device": spec.device.split(":")[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
    }
    if not spec.fast_attention:
        path["attention"] = "eager"
    on_host = [parameter for parameter in engine.model.parameters() if parameter.device.type == "cpu"]
    weights = tuple((parameter.data_ptr(), parameter.nbytes) for parameter in on_host)
    return OpenModel(engine, "hf", card.end_tokens, notes, path, weights)
