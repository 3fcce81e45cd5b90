"""Opens a model on an engine, and names the numeric path of its results."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.kernels import library, native
from outrider.kernels.program import SMALLEST_ASYMMETRIC_GROUP, Cache, Format, Program, Scales
from outrider.kernels.storage import LARGEST_BESIDE_INT4, largest_activation
from outrider.workers.engines.engine import Engine
from outrider.workers.errors import ModelError, UsageError, WorkerError
from outrider.workers.messages import ModelSpec
from outrider.workers.models import ipex
from outrider.workers.models.checkpoint import open_checkpoint
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.config_file import config_path, quantisation_of, read_config
from outrider.workers.models.families import build_head, build_mtp, build_program
from outrider.workers.models.formats.gguf.file import is_gguf
from outrider.workers.models.formats.section import KEY
from outrider.workers.models.headers import INDEX, SINGLE
from outrider.workers.models.heads import head_of
from outrider.workers.models.model_info import weight_files
from outrider.workers.models.mtp import model_of, mtp_layer
from outrider.workers.models.quantisation_libraries import check_library
from outrider.workers.models.unread_keys import refuse_unread
from outrider.workers.precisions import PRECISIONS, Precision

# The file names that transformers looks for: with safetensors (True), or with pickled weights.
HF_WEIGHTS = {True: (SINGLE, INDEX), False: ("pytorch_model.bin", "pytorch_model.bin.index.json")}


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A running engine and its description.

    ``numeric_path`` names everything that may change a bit of the results: replicas and resumed runs must agree on it.
    ``weights`` are the buffers (address, bytes) in this process's memory, ``threads`` the size of the kernels' pool.
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
    # Whether the model is a head on a target's hidden states.
    head: bool = False
    # Allocate memory for this many rows in advance; None where the engine has nothing to allocate.
    reserve: Callable[[int], None] | None = None


def native_supports(model_path: str) -> str | None:
    """None if the native engine can run the model in this directory, else the sentence that says why not."""
    try:
        library.instruction_set()
        model = model_of(model_path)
        path = model or Path(model_path)
        values, source = read_config(path), str(config_path(path))
        if model is not None:
            build_mtp(mtp_layer(values, source), Format.BF16, source=source)
        elif (head := head_of(values, source)) is not None:
            build_head(head, Format.BF16, tokens=range(head.draft_vocabulary))
        else:
            build_program(values, Format.BF16, source=source)
        quantisation_of(path)
    except (
        library.KernelError
    ) as error:  # OUTRIDER_ISA names an instruction set that this machine lacks: that is the user's error
        raise UsageError(str(error)) from None
    except (library.KernelsUnavailable, ModelError) as error:
        return str(error)
    return None


def check_weights(
    path: str, engine: str, allow_pickle: bool = False, precision: str = "bf16", on_accelerator: bool = False
) -> None:
    """Refuse a model that the engine could not load, before its process is started: missing files or tensors, and for a
    quantised model on the hf engine a missing library or an unsupported device.

    Pickles that are allowed to run code are checked by the process that loads them, and so is what only transformers knows.
    """
    directory = Path(path)
    safe = weight_files(directory)[0].suffix == ".safetensors"
    if allow_pickle and not safe:
        return
    if engine == "native":
        read_program(directory, PRECISIONS.get(precision, Precision(Format.BF16)))
    elif is_gguf(directory):
        raise ModelError(f"{path}: the hf engine does not read GGUF files; leave out --engine hf")
    elif not any((directory / name).exists() for name in HF_WEIGHTS[safe]):
        raise ModelError(
            f"{path} has neither {' nor '.join(HF_WEIGHTS[safe])}, which the hf engine needs to find the weights: save "
            "the model again with save_pretrained, or add the index"
        )
    else:
        config = read_config(directory)
        refuse_unread(config, str(config_path(directory)))
        # The kind of accelerator is checked where the model is loaded.
        check_library(config, str(config_path(directory)), None if on_accelerator else "cpu")
        if not config.get(KEY):
            # (Quantised tensors are checked by the library that transformers reads them with.)
            open_checkpoint(directory).close()


def open_model(spec: ModelSpec, progress: Callable[[int, int], None] = lambda done, total: None) -> OpenModel:
    """``progress`` is called with (bytes of packed weights done, bytes in all), by the native engine only."""
    if spec.engine == "native":
        return _open_native(spec, progress)
    assert spec.engine == "hf", spec.engine
    return _open_hf(spec)


def _open_native(spec: ModelSpec, progress: Callable[[int, int], None]) -> OpenModel:
    from outrider.workers.engines.head import HeadEngine
    from outrider.workers.engines.native import NativeEngine
    from outrider.workers.models.model_info import read_model_info
    from outrider.workers.models.native_packer import NativePacker
    from outrider.workers.models.packed import LOADING_VERSION, load_packed

    if spec.precision not in PRECISIONS:
        choices = ", ".join(PRECISIONS)
        raise UsageError(f'--precision: the native engine does not know "{spec.precision}"; choose one of {choices}')
    if spec.device != "cpu":
        raise UsageError(f'--devices: the native engine runs on the cpu, not on "{spec.device}"; --engine hf does')
    try:
        isa = library.instruction_set()
    except (library.KernelsUnavailable, library.KernelError) as error:
        raise UsageError(f"the native engine cannot be used: {error}; --engine hf can") from error
    model_info = read_model_info(spec.path)
    built = read_program(Path(model_info.path), PRECISIONS[spec.precision], spec.allow_pickle, spec.states)
    target_info = read_model_info(spec.target) if model_info.head else None
    program = with_cache(built.program, spec)
    threads = spec.threads or len(spec.cores) or len(os.sched_getaffinity(0))
    packer = NativePacker()
    packed = load_packed(model_info, program, packer, threads, spec.allow_pickle, progress, target_info)
    cores = spec.cores if len(spec.cores) == threads else None
    try:
        model = native.NativeModel(program, packed.addresses, threads=threads, cores=cores, keep=packed)
    except library.KernelError as error:
        raise WorkerError(f"the native engine cannot be started: {error}") from error
    path = {"engine": "native", "precision": spec.precision, "packing": f"{packer.version}, loading {LOADING_VERSION}"}
    path |= _arithmetic(program, spec.precision, built.weights)
    rounding = f"{built.weights}, " if built.weights else ""
    size = f"{packed.size / 1e9:.2f} GB" if packed.size >= 1e9 else f"{packed.size / 1e6:.1f} MB"
    source = "from the cache" if packed.cached else "packed now"
    cache = ", keys and values in 8 bits" if program.cache is Cache.INT8 else ""
    notes = [f"native engine, {isa}: {spec.precision}, {rounding}{size}, {source}{cache}", *packed.notes]
    context = min(model_info.context, program.context)
    weights = ((packed.memory.address, packed.size),)
    if target_info is not None:
        engine: NativeEngine = HeadEngine(model, context)
        ends = target_info.end_tokens
    else:
        engine, ends = NativeEngine(model, context), model_info.end_tokens
    return OpenModel(
        engine, "native", ends, notes, path, weights, threads, model.use_cores, target_info is not None, engine.reserve
    )


def _arithmetic(program: Program, precision: str, weights: str) -> dict[str, str]:
    """The part of the numeric path that the program decides. ``weights`` says how its weights are rounded."""
    path = {}
    if weights:
        path["weights"] = weights
    if program.cache is Cache.INT8:
        path["cache"] = "int8, weighed in whole numbers"
    if _is_latent(program):
        path["attention"] = "of latent vectors" + (", kept once" if program.cache is Cache.INT8 else "")
    if LARGEST_BESIDE_INT4 in {largest_activation(each) for each in program.weights if each.format is Format.W4A8}:
        path["activations"] = f"int8 up to {LARGEST_BESIDE_INT4} beside codes of 4 bits"
    if precision.startswith("w4abf16"):
        path["activations"] = "bf16, in 15 bits beside the largest of a block"
    if any(each.stored.scales is Scales.HALF_MINIMA and each.group > SMALLEST_ASYMMETRIC_GROUP for each in program.weights):
        path["minima"] = "by the groups of the checkpoint"
    if not program.integer:
        # Only integer formats give the same bits on every instruction set.
        path["instruction_set"] = library.float_instruction_set()
    return path


def with_cache(program: Program, spec: ModelSpec) -> Program:
    small = spec.cache_precision == "int8" or (spec.small_cache and program.integer)
    return replace(program, cache=Cache.INT8) if small else program


def _is_latent(program: Program) -> bool:
    return any(op.value_in_key for op in program.caches)


def _open_hf(spec: ModelSpec) -> OpenModel:
    import torch
    import transformers

    from outrider.workers.models.hf_loading import load_hf

    if spec.cache_precision != "auto":
        raise UsageError(
            f"--cache-precision: the hf engine keeps no keys and values in {spec.cache_precision}; leave it out"
        )
    engine, model_info, notes = load_hf(spec)
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
    elif spec.device.startswith("cuda"):
        # Part of the path, because jobs that were begun by earlier versions used cuDNN's attention, which has other bits.
        path["attention"] = "without cuDNN"
    if extension := ipex.went_through(engine.model):
        path["ipex"] = extension
    on_host = [parameter for parameter in engine.model.parameters() if parameter.device.type == "cpu"]
    weights = tuple((parameter.data_ptr(), parameter.nbytes) for parameter in on_host)
    return OpenModel(engine, "hf", model_info.end_tokens, notes, path, weights)
