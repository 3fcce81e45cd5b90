"""What transformers needs for each quantisation method that it knows, and the error where that is missing.

Without this check a checkpoint would fail in the middle of loading, with the message of whichever library noticed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.formats.mlx import KEY as OF_MLX
from outrider.workers.models.formats.mlx import read_mlx
from outrider.workers.models.formats.section import KEY
from outrider.workers.models.headers import quoted

ELSEWHERE = "take this model in another format"
NATIVE = "the native engine reads it, of its own families: leave out --engine hf"


@dataclass(frozen=True, slots=True)
class Needs:
    """``modules`` must be importable, ``install`` are the arguments of pip install; ``devices`` on which it runs (empty:
    all).

    ``compiled``: torch compiles a part of it at run time. ``never``: why transformers cannot run it. ``native``: the native
    engine reads it.
    """

    modules: tuple[str, ...] = ()
    install: str = ""
    devices: tuple[str, ...] = ()
    compiled: bool = False
    never: str = ""
    native: bool = False


GPU = ("cuda",)
# For methods whose kernels transformers downloads from the model hub as compiled code.
FETCHED = "runs by kernels that are fetched from the model hub as code, which outrider never runs"
NEEDS: dict[str, Needs] = {
    "aqlm": Needs(("aqlm", "accelerate"), "'aqlm[cpu]' accelerate"),
    # Most files also need auto-round-lib, the CPU kernels, which the library names only in a warning.
    "auto-round": Needs(("auto_round",), "auto-round auto-round-lib"),
    "awq": Needs(("gptqmodel", "accelerate"), "gptqmodel accelerate"),
    "bitnet": Needs(("accelerate",), "accelerate", compiled=True),
    "bitsandbytes": Needs(("bitsandbytes", "accelerate"), "bitsandbytes accelerate"),
    "compressed-tensors": Needs(("compressed_tensors",), "compressed-tensors"),
    "eetq": Needs(never=FETCHED),
    "fbgemm_fp8": Needs(("fbgemm_gpu", "accelerate"), "fbgemm-gpu accelerate", GPU),
    "fouroversix": Needs(("fouroversix",), "fouroversix --no-build-isolation"),
    "fp8": Needs(("accelerate",), "accelerate"),
    "fp_quant": Needs(("fp_quant",), "fp_quant", GPU),
    "gemma": Needs(),
    "gguf": Needs(),
    "gptq": Needs(("optimum", "gptqmodel"), "optimum gptqmodel"),
    "higgs": Needs(
        ("flute", "fast_hadamard_transform", "accelerate"), "flute-kernel fast_hadamard_transform accelerate", GPU
    ),
    "hqq": Needs(never="is not read by transformers 5"),
    "intel/auto-round": Needs(never="is not known to transformers by that name", native=True),
    "metal": Needs(never="runs on Apple's GPUs alone"),
    "modelopt": Needs(never="is not known to transformers", native=True),
    "mxfp4": Needs(("accelerate",), "accelerate"),
    "mxfp8": Needs(("accelerate",), "accelerate"),
    "nvfp4": Needs(never="is not read by transformers yet"),
    "quanto": Needs(never="is what transformers makes of plain weights as it loads them, and reads no checkpoint of"),
    "quark": Needs(("quark",), "amd-quark"),
    "sinq": Needs(("sinq",), "sinq"),
    "spqr": Needs(("spqr_quant", "accelerate"), "'spqr_quant[gpu]' accelerate", GPU),
    "torchao": Needs(("torchao",), "torchao"),
    "vptq": Needs(("vptq", "accelerate"), "vptq accelerate", GPU),
}


def check_library(config: Mapping[str, Any], source: str, device: str | None) -> None:
    """Refuse a quantised checkpoint that transformers would fail to run here and now, on the device where one is named."""
    if config.get(OF_MLX):
        read_mlx(config, source)  # refuses a family that the native engine does not read so either
        raise ModelError(f"{source}: MLX's quantisation ({OF_MLX}) is not read by transformers; {NATIVE}")
    stated = _stated(config)
    if not stated:
        return
    if not isinstance(stated, dict):
        raise ModelError(f"{source}: {KEY} must be an object, got {quoted(stated)}")
    method = _method(stated)
    if method is None:
        raise ModelError(f'{source}: {KEY} has no "quant_method", so that nothing says how its weights are stored')
    needs = NEEDS.get(method) if isinstance(method, str) else None
    if needs is None:
        # An unknown method: probe.py asks this release of transformers.
        return
    what = f'{source}: the quantisation "{method}" ({KEY}, "quant_method")'
    if needs.never:
        raise ModelError(f"{what} {needs.never}; {NATIVE if needs.native else ELSEWHERE}")
    if device is not None and needs.devices and device.partition(":")[0] not in needs.devices:
        known = " and ".join(needs.devices)
        raise ModelError(f"{what} runs on {known} alone, and this model is to run on {device}; {ELSEWHERE}")
    missing = [name for name in needs.modules if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise ModelError(f"{what} needs {' and '.join(missing)}, which {are} not installed: pip install {needs.install}")
    # torch uses $CXX, or g++.
    if needs.compiled and shutil.which(compiler := os.environ.get("CXX") or "g++") is None:
        raise ModelError(
            f"{what} is compiled as it runs, and there is no {compiler}: install g++, or name a compiler in CXX"
        )


def installed_by(config: Mapping[str, Any], module: str) -> str:
    """The arguments of pip install for a missing module: those of the quantisation method, or else the module's name."""
    stated = _stated(config)
    method = _method(stated) if isinstance(stated, dict) else None
    needs = NEEDS.get(method, Needs()) if isinstance(method, str) else Needs()
    return needs.install or module


def is_compiled(config: Mapping[str, Any]) -> bool:
    """Whether torch compiles a part of the quantisation method."""
    stated = _stated(config)
    method = _method(stated) if isinstance(stated, dict) else None
    return isinstance(method, str) and NEEDS.get(method, Needs()).compiled


def _stated(config: Mapping[str, Any]) -> Any:
    text = config.get("text_config")
    return config.get(KEY) or (text.get(KEY) if isinstance(text, dict) else None)


def _method(stated: Mapping[str, Any]) -> Any:
    in_bits = stated.get("load_in_8bit") or stated.get("load_in_4bit")
    return stated.get("quant_method") or ("bitsandbytes" if in_bits else None)
