"""Loads a model with transformers, checks it, and chooses the engine that runs it rightly."""

from __future__ import annotations

import logging
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from outrider.workers.engines.engine import Feed
from outrider.workers.engines.hf import HfEngine, vocabulary_of
from outrider.workers.engines.hf_batching import Batching, RowFeeding
from outrider.workers.engines.hf_masks import NotHonoured
from outrider.workers.engines.hf_rows import HfRowEngine
from outrider.workers.errors import ModelError, first_line
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models import ipex
from outrider.workers.models.batching_cache import batching_of, said_of
from outrider.workers.models.config_file import config_path, read_config
from outrider.workers.models.formats.section import KEY
from outrider.workers.models.formats.unexpected_tensors import refuse_unexpected
from outrider.workers.models.library_weights import layer_that_mixes, parts_of
from outrider.workers.models.model_info import ModelInfo, read_model_info, weight_files
from outrider.workers.models.probe import find_batching
from outrider.workers.models.quantisation_libraries import check_library, installed_by, is_compiled
from outrider.workers.models.twins import attention_of
from outrider.workers.models.unread_keys import refuse_unread

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROBE = (3, 1, 4, 1, 5, 9, 2, 6)
# The largest difference between logits of the ragged path and of the model's own forward pass, relative to the largest
# logit.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

# More than the shapes that torch compiles separately (one or many tokens, each width), of all layers together.
MOST_SHAPES = 4096

logger = logging.getLogger(__name__)


def load_hf(spec: ModelSpec) -> tuple[HfEngine | HfRowEngine, ModelInfo, list[str]]:
    """The engine, the model's info, and notes for the user on how it runs."""
    model_info = read_model_info(spec.path)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    config, source = read_config(Path(model_info.path)), str(config_path(Path(model_info.path)))
    refuse_unread(config, source)
    check_library(config, source, spec.device)
    with said_of(model_info):
        batching = batching_of(Path(model_info.path), spec.fast_attention)
    model = _load_weights(model_info, DTYPES[spec.precision], spec)
    notes = []
    if extension := ipex.used_for(spec):
        said = f"{model_info.name}: through Intel's extension {extension} (ipex.optimize) in {spec.precision}"
        model, trouble = _optimize(model)
        if trouble:
            # ipex.optimize has changed the weights in place, so they are loaded again.
            model = _load_weights(model_info, DTYPES[spec.precision], spec)
            said = f"{model_info.name}: without Intel's extension {extension}, since with it {trouble}"
        notes.append(said)
    expected = _probed(model, model_info, spec)
    batching = _batching_as_quantised(batching, model, model_info, spec)
    if batching.ragged:
        engine = HfEngine(model, model_info.context, fused=spec.fast_attention)
        if _ragged_agrees(engine, expected):
            return engine, model_info, notes
        engine.release()
        alone = find_batching(model.config, spec.fast_attention, ragged=False)
        batching = replace(alone, why=f"on {spec.device} in {spec.precision} rows that share a pass change one another")
    return (
        HfRowEngine(model, model_info.context, batching.feeding),
        model_info,
        [*notes, f"{model_info.name} ({model_info.family}): {batching.note}"],
    )


def _batching_as_quantised(batching: Batching, model: PreTrainedModel, model_info: ModelInfo, spec: ModelSpec) -> Batching:
    """The batching for a quantised model, whose loaded layers are tried: twins are not quantised, and no configuration says
    how a library computes."""
    stepped = not batching.ragged and batching.feeding is RowFeeding.STEPPED
    if getattr(model, "hf_quantizer", None) is None or stepped:
        return batching
    mixes = layer_that_mixes(model, torch.tensor([_probe_of(vocabulary_of(model))], device=model.device))
    if mixes is None:
        return batching
    with said_of(model_info):
        return find_batching(
            model.config,
            spec.fast_attention,
            pooled=f"its tokens in a pass change one another as it is quantised ({mixes})",
        )


def _load_weights(model_info: ModelInfo, dtype: torch.dtype, spec: ModelSpec) -> PreTrainedModel:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # It warns at every product about rounding its input.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    safe = weight_files(Path(model_info.path))[0].suffix == ".safetensors"
    try:
        config = _computed_as_here(Path(model_info.path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A .bin file is read with weights_only, so that it cannot run code.
            model, report = AutoModelForCausalLM.from_pretrained(
                model_info.path,
                config=config,
                dtype=dtype,
                attn_implementation=attention_of(config, spec.fast_attention),
                experts_implementation=None,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=safe,
                weights_only=not spec.allow_pickle,
                # _check_complete reports them by name.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{model_info.name} holds more than weights in its .bin files; --allow-pickle runs the code in them"
        ) from error
    except ModuleNotFoundError as error:  # of a library of quantised weights that transformers has no sentence about
        install = installed_by(read_config(Path(model_info.path)), str(error.name))
        raise ModelError(
            f"{model_info.name} cannot be loaded without {error.name}, which is not installed: pip install {install}"
        ) from error
    except Exception as error:  # whatever a checkpoint can be wrong with surfaces here, in many types
        raise ModelError(f"{model_info.name} cannot be loaded: {first_line(error)}") from error
    quantised = getattr(model, "hf_quantizer", None) is not None
    if is_compiled(read_config(Path(model_info.path))):
        _compile_for_every_shape()
    _check_complete(model_info, report, quantised)
    if not quantised:
        # (A quantisation library consumes tensors that transformers does not know.)
        refuse_unexpected(report.get("unexpected_keys") or (), quantised=False)
    for name, parameter in model.named_parameters():
        for part in parts_of(parameter):
            _check_finite(model_info, name, part)
    if spec.device == "cpu":
        _leave_the_files(model)
    elif spec.device.startswith("cuda"):
        # cuDNN's attention builds a plan for every length of a row, which takes more than twice the time of a pass.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return model.eval().to(spec.device)


def _compile_for_every_shape() -> None:
    """Raise torch's limit of recompilations: beyond it layers run uncompiled, with other roundings in the middle of a job.

    BitNet's layers are compiled, and in bf16 some of their codes would then differ.
    """
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_SHAPES


def _computed_as_here(path: Path) -> PretrainedConfig:
    """The configuration without kernels for attention or experts, which transformers would fetch as code from the model
    hub."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    config._attn_implementation = config._experts_implementation = None
    if not getattr(config, KEY, True):
        # transformers would read an empty quantization_config as one.
        delattr(config, KEY)
    return config


def _check_finite(model_info: ModelInfo, name: str, weight: torch.Tensor) -> None:
    """Check the sum first, and every value only if that is not finite (a sum of finite values may overflow)."""
    if torch.isfinite(weight.sum(dtype=torch.float32)) or torch.isfinite(weight).all():
        return
    if weight.dtype is torch.float16 and model_info.dtype != "float16" and not torch.isnan(weight).any():
        raise ModelError(
            f'{model_info.name}: the weight "{name}" holds a value that is too large for fp16; choose bf16 or fp32 '
            "(--precision, of a draft --draft-precision)"
        )
    raise ModelError(f'{model_info.name}: the weight "{name}" holds a value that is not a number')


def _leave_the_files(model: PreTrainedModel) -> None:
    """Copy tensors that are mapped from files, so that a change of a file does not change the model while it runs.

    The copies are on the memory nodes that the process is bound to; a file's pages are on that of the first reader.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        for part in parts_of(tensor):
            part.data = part.data.clone()


def _check_complete(model_info: ModelInfo, report: dict[str, Any], quantised: bool) -> None:
    missing = sorted(report.get("missing_keys") or ())
    wrong = sorted(report.get("mismatched_keys") or ())
    if missing and quantised:
        raise ModelError(
            f"{model_info.name}: transformers makes no weights for {len(missing)} names of the quantised checkpoint, first "
            f'"{missing[0]}": its library may need another package to read it, as auto-round needs auto-round-lib'
        )
    if missing:
        raise ModelError(f'{model_info.name} lacks {len(missing)} of its weights, first "{missing[0]}"')
    if wrong:
        name, found, expected = wrong[0]
        shapes = ", not ".join(" × ".join(map(str, shape)) for shape in (found, expected))
        raise ModelError(
            f'{model_info.name}: {len(wrong)} weights have another shape than config.json says, first "{name}" ({shapes})'
        )


@torch.inference_mode()
def _optimize(model: PreTrainedModel) -> tuple[PreTrainedModel, str | None]:
    """Optimize a model with Intel's extension, in place; and what is wrong with it then (None: its logits are the same).

    The extension repacks the weights of linear layers and convolutions for its own modules. Some families (mamba) pass such
    a weight to a function of their own, which cannot read the packed one.
    """
    probe = torch.tensor([[token % model.config.vocab_size for token in PROBE]])
    expected = model(input_ids=probe).logits.float()
    try:
        model = ipex.optimize(model, model.dtype)
        logits = model(input_ids=probe).logits.float()
    except (TypeError, AttributeError, RuntimeError) as error:
        return model, f"it fails ({first_line(error)})"
    distance = float((logits - expected).abs().max() / expected.abs().max())
    # Written so that NaN fails.
    agrees = distance < PROBE_TOLERANCE[model.dtype]
    return model, None if agrees else f"its scores lie {distance:.2g} (of the largest) from its own"


@torch.inference_mode()
def _probed(model: PreTrainedModel, model_info: ModelInfo, spec: ModelSpec) -> torch.Tensor:
    """The logits after a probe with the model's own attention; a ModelError where they are not numbers, or computing
    fails."""
    try:
        probe = torch.tensor([_probe_of(vocabulary_of(model))], device=model.device)
        logits: torch.Tensor = model(input_ids=probe, use_cache=False).logits[0, -1].float().cpu()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Quantisation libraries support some types only, and report others in many ways.
        if getattr(model, "hf_quantizer", None) is None:
            raise
        other = "fp32" if spec.precision == "bf16" else "bf16"
        raise ModelError(
            f"{model_info.name} is quantised and cannot be computed in {spec.precision} ({first_line(error)}); choose "
            f"another precision, such as {other} (--precision, of a draft --draft-precision)"
        ) from error
    # Written so that NaN fails.
    if not logits.max() < torch.inf:
        raise ModelError(
            f"{model_info.name} gives scores that are not numbers in {spec.precision}; choose another precision, bf16 or "
            "fp32 in place of fp16 (--precision, of a draft --draft-precision)"
        )
    return logits


def _probe_of(vocabulary: int) -> list[int]:
    return [token % vocabulary for token in PROBE]


@torch.inference_mode()
def _ragged_agrees(engine: HfEngine, expected: torch.Tensor) -> bool:
    """Whether a probe in two pieces, with another row in the same passes, gives the logits of the model's own attention.

    The twin was tried on the CPU in fp32; this tries the model itself, with its precision, its device and their kernels.
    """
    model = engine.model
    probe = _probe_of(engine.vocabulary)
    for row in (0, 1):
        engine.open(row, Sampling(), len(probe))
    try:
        engine.feed([Feed(0, probe[:5], 0), Feed(1, probe[:2], 0)])
        logits = engine.logits([Feed(1, probe[2:4], 0), Feed(0, probe[5:], 1)])[-1]
    except (TypeError, AttributeError, RuntimeError, NotHonoured) as error:
        logger.info("the ragged path does not run %s: %s", model.config.model_type, error)
        return False
    finally:
        for row in (0, 1):
            engine.close(row)
    distance = (logits - expected).abs().max() / expected.abs().max()
    return bool(distance < PROBE_TOLERANCE[model.dtype])
