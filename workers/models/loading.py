"""From a model's directory to a running transformers engine."""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.workers.engines.engine import Feed
from outrider.workers.engines.hf import HfEngine
from outrider.workers.engines.hf_rows import HfRowEngine
from outrider.workers.errors import ModelError, first_line
from outrider.workers.messages import ModelSpec, Sampling
from outrider.workers.models.cards import ModelCard, read_card, weight_files

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROBE = (3, 1, 4, 1, 5, 9, 2, 6)
# How far (relative to the largest logit) the ragged path may lie from the model's own forward pass: rounding, no more.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

logger = logging.getLogger(__name__)


def load_hf(spec: ModelSpec) -> tuple[HfEngine | HfRowEngine, ModelCard, list[str]]:
    """The engine, the model's card, and what a person should know about how it runs."""
    card = read_card(spec.path)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    model = _load_weights(card, DTYPES[spec.precision], spec)
    notes: list[str] = []
    if model._supports_attention_backend:
        engine = HfEngine(model, card.context, fused=spec.fast_attention)
        if _ragged_agrees(engine):
            return engine, card, notes
    notes.append(f"{card.name} ({card.family}) cannot feed several rows at once in transformers: rows run one at a time")
    model.set_attn_implementation("eager")
    if getattr(model, "_is_stateful", False):
        raise ModelError(f"{card.name} ({card.family}) keeps a state that cannot be taken back, so nothing can be verified")
    return HfRowEngine(model, card.context), card, notes


def _load_weights(card: ModelCard, dtype: torch.dtype, spec: ModelSpec) -> PreTrainedModel:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    safe = weight_files(Path(card.path))[0].suffix == ".safetensors"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A .bin file is read with weights_only, so that it cannot run code.
            model, report = AutoModelForCausalLM.from_pretrained(
                card.path,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=safe,
                weights_only=not spec.allow_pickle,
                output_loading_info=True,
            )
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{card.name} holds more than weights in its .bin files; --allow-pickle runs what is in them"
        ) from error
    except Exception as error:  # whatever a checkpoint can be wrong with surfaces here, in many types
        raise ModelError(f"{card.name} cannot be loaded: {first_line(error)}") from error
    _check_complete(card, report)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.sum()):
            raise ModelError(f'{card.name}: the weight "{name}" holds a value that is not a number')
    if spec.device == "cpu":
        _leave_the_files(model)
    return model.eval().to(spec.device)


def _leave_the_files(model: PreTrainedModel) -> None:
    """Copy what is still mapped from the files: who writes to one would change the model amid its work.

    The copies also lie on the memory nodes that the process is bound to, where a file's pages belong to whoever came first.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _check_complete(card: ModelCard, report: dict[str, Any]) -> None:
    missing = sorted(report.get("missing_keys") or ())
    wrong = sorted(str(entry) for entry in report.get("mismatched_keys") or ())
    if missing:
        raise ModelError(f'{card.name} lacks {len(missing)} of its weights, first "{missing[0]}"')
    if wrong:
        raise ModelError(f"{card.name}: {len(wrong)} weights have another shape than config.json says, first {wrong[0]}")


@torch.inference_mode()
def _ragged_agrees(engine: HfEngine) -> bool:
    """Whether a probe fed in two pieces, beside another row, gives the logits of the model's own attention.

    Catches every model whose attention does something that the ragged path does not know (biases, caps, sinks).
    """
    model = engine.model
    probe = [token % engine.vocabulary for token in PROBE]
    model.set_attn_implementation("eager")
    expected = model(input_ids=torch.tensor([probe], device=model.device), use_cache=False).logits[0, -1].float().cpu()
    model.set_attn_implementation(engine.attention)
    for row in (0, 1):
        engine.open(row, Sampling(), len(probe))
    try:
        engine.feed([Feed(0, probe[:5], 0), Feed(1, probe[:2], 0)])
        logits = engine.logits([Feed(1, probe[2:4], 0), Feed(0, probe[5:], 1)])[-1]
    except (TypeError, AttributeError, RuntimeError) as error:
        logger.info("the ragged path does not run %s: %s", model.config.model_type, error)
        return False
    finally:
        for row in (0, 1):
            engine.close(row)
    distance = (logits - expected).abs().max() / expected.abs().max()
    return bool(distance < PROBE_TOLERANCE[model.dtype])
