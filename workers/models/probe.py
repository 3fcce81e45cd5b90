"""Finds the best batching with which the hf engine computes a model exactly as ``generate`` does, by trials on a small
twin.

The twin (``workers/models/twins.py``) has the model's class and features, and some ten thousand weights. ``generate``
writes a few texts with it: shorter and longer than its windows, chunks and switches of rope, and across them. Each kind of
batching then has to give the same logits along these texts: with rows of different lengths in one pass, prompts in
pieces, candidates that are accepted and rejected, and forks. The first batching that passes is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer

from outrider.workers.engines.engine import Feed
from outrider.workers.engines.hf import HfEngine
from outrider.workers.engines.hf_batching import Batching, RowFeeding
from outrider.workers.engines.hf_masks import NotHonoured
from outrider.workers.engines.hf_rows import CACHE_NAMES, HfRowEngine
from outrider.workers.errors import ModelError
from outrider.workers.messages import Sampling
from outrider.workers.models.formats.section import KEY
from outrider.workers.models.headers import quoted
from outrider.workers.models.quantisation_libraries import ELSEWHERE, NATIVE, NEEDS, Needs
from outrider.workers.models.twins import NEAR, VOCABULARY, build_twin, twin_config

# The lengths of prompts: below every limit of a twin; just below the largest limit, which the text then crosses; beyond
# all.
PROMPTS = (3, NEAR.switch - 4, NEAR.switch + 13)
WRITTEN = 10
# The largest difference of logits, relative to the largest one: float32 rounding. A feature that is ignored shows in
# tenths.
TOLERANCE = 2e-3
# (accepted, rejected) candidates of a row in successive rounds.
ROUNDS = ((0, 0), (0, 2), (2, 1), (1, 1), (0, 1), (3, 0))

# The default of bitsandbytes.
LLM_INT8_THRESHOLD = 6.0

# The longest row of the trials.
CONTEXT = PROMPTS[-1] + WRITTEN + 8
LONGEST_ERROR = 160

logger = logging.getLogger(__name__)
Engine = HfEngine | HfRowEngine


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, the tokens that transformers wrote after it, and the logits by which each of these was chosen."""

    prompt: list[int]
    written: list[int]
    scores: torch.Tensor


def find_batching(config: PretrainedConfig, fused: bool = True, ragged: bool = True, pooled: str = "") -> Batching:
    """The best batching for models of this configuration that gives transformers' own texts; a ModelError where none does.

    Without ``ragged`` only kinds with one row at a time are tried. ``pooled`` says why a token's logits depend on the other
    tokens of its pass, if that is known of the model itself.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            "transformers has no causal language model of this family (AutoModelForCausalLM): it is multimodal, or no "
            "language model"
        )
    _check_quantised(config)
    # Twins are not quantised, so their trials cannot show this.
    pooled = pooled or _pooled(config)
    try:
        model = build_twin(twin_config(config), fused=fused)
    except Exception as error:  # configurations check themselves, each in its own way
        raise ModelError(f"no small model of its kind can be built to try it out ({said(error)})") from error
    try:
        texts = [written_by_transformers(model, prompt_of(length)) for length in PROMPTS]
    except Exception as error:  # whatever a model's own code fails with
        raise ModelError(f"transformers itself cannot write a text with it ({said(error)})") from error
    if not all(torch.isfinite(text.scores).all() for text in texts):
        raise ModelError("transformers itself computes logits with it that are not finite")
    if looks_ahead(model):
        raise ModelError("its tokens attend to later ones, so that no candidate can be verified")
    beside = pooled or special(model)
    why = beside or "its attention cannot be replaced in transformers"
    if model._supports_attention_backend and ragged and not pooled:
        found = _differs(partial(HfEngine, model, CONTEXT, fused), texts)
        if found is None:
            return Batching(True)
        why = beside or found
        model = build_twin(twin_config(config), fused=fused)
    first = ""
    for feeding in (RowFeeding.STEPPED,) if pooled else RowFeeding:
        found = _differs(partial(HfRowEngine, model, CONTEXT, feeding), texts)
        if found is None:
            return Batching(False, feeding, why)
        first = first or found
    raise ModelError(f"{why}, and a row alone does not give the text of transformers' generate either: {first}")


def _check_quantised(config: PretrainedConfig) -> None:
    """Refuse a quantisation that transformers does not know, since it would load the codes as plain weights."""
    stated = _quantisation(config)
    if "quant_method" in stated and not AutoHfQuantizer.supports_quant_method(stated):
        method = stated["quant_method"]
        native = isinstance(method, str) and NEEDS.get(method, Needs()).native
        raise ModelError(
            f'its {KEY} has "quant_method" {quoted(method)}, which transformers does not know: it would read the codes '
            "without their scales; "
            f"{NATIVE if native else ELSEWHERE}"
        )


def _quantisation(config: PretrainedConfig) -> dict[str, Any]:
    stated = getattr(config, KEY, None) or getattr(config.get_text_config(decoder=True), KEY, None)
    # (In the configuration of a loaded model it is an object of another class.)
    return stated if isinstance(stated, dict) else {}


def _pooled(config: PretrainedConfig) -> str:
    """Why a token's logits depend on the other tokens of its pass, as far as the configuration tells ("": unknown).
    ``library_weights`` tries the loaded model."""
    stated = _quantisation(config)
    if stated.get("quant_method") == "bitsandbytes" and (stated.get("load_in_8bit") or stated.get("_load_in_8bit")):
        # A column is computed in fp16 instead of int8 as soon as one token of the pass exceeds the threshold in it.
        threshold = stated.get("llm_int8_threshold", LLM_INT8_THRESHOLD)
        return f"its tokens in a pass change one another ({KEY}: llm_int8_threshold {threshold})" if threshold else ""
    groups = stated.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        activations = group.get("input_activations") if isinstance(group, dict) else None
        if isinstance(activations, dict) and activations.get("dynamic") and activations.get("strategy") == "tensor":
            return f'its tokens in a pass share a scale ({KEY}: input_activations of the strategy "tensor")'
    return ""


@torch.inference_mode()
def special(model: PreTrainedModel) -> str | None:
    """A feature that the ragged path cannot compute: a state beside keys and values, or attention that no mask
    describes."""
    text = model.config.get_text_config(decoder=True)
    outputs = model(input_ids=torch.tensor([prompt_of(5)]), use_cache=True)
    layers = getattr(next(filter(None, (getattr(outputs, name, None) for name in CACHE_NAMES)), None), "layers", [])
    if getattr(text, "alibi", False) or model.config.model_type in ("bloom", "mpt"):
        return "its attention has a bias by distance"
    if any(hasattr(module, "recurrent_states") for module in model.modules()):
        return "it keeps a recurrent state in the model itself"
    if any(any(getattr(layer, "is_recurrent_states_initialized", {}).values()) for layer in layers):
        return "it keeps a recurrent state"
    if any(any(getattr(layer, "is_conv_states_initialized", {}).values()) for layer in layers):
        return "it has convolutions over earlier tokens"
    if hasattr(text, "index_topk") or hasattr(text, "indexer_budget"):
        return "its attention selects the tokens that it sees"
    return None


def said(error: Exception) -> str:
    """One line of a foreign exception: the first, or the last of a ValidationError."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrapped = "ValidationError" in type(error).__name__
    text = lines[-1 if wrapped else 0] if lines else type(error).__name__
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}…"


def prompt_of(length: int) -> list[int]:
    """Tokens without a pattern that a model could repeat, and without small ids, which are special in some models."""
    return [7 + (length * 31 + index * index * 17 + index * 5) % (VOCABULARY - 8) for index in range(length)]


@torch.inference_mode()
def written_by_transformers(model: PreTrainedModel, prompt: Sequence[int], count: int = WRITTEN) -> Text:
    found = model.generate(
        input_ids=torch.tensor([list(prompt)], device=model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    written = found.sequences[0, len(prompt) :].tolist()
    return Text(list(prompt), written, torch.cat([each.float().cpu() for each in found.logits]))


@torch.inference_mode()
def looks_ahead(model: PreTrainedModel) -> bool:
    """Whether scores change with tokens that come later."""
    tokens = prompt_of(PROMPTS[1])
    short = model(input_ids=torch.tensor([tokens[:-5]]), use_cache=False).logits[0, : len(tokens) - 5]
    whole = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, : len(tokens) - 5]
    return not close(whole, short)


def close(scores: torch.Tensor, expected: torch.Tensor) -> bool:
    if scores.shape != expected.shape or not torch.isfinite(scores).all():
        return False
    return bool((scores - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _differs(open_engine: Callable[[], Engine], texts: Sequence[Text]) -> str | None:
    """Why an engine's logits differ from those of the texts; None where they agree."""
    try:
        engine = open_engine()
        if not agrees_in_shared_passes(engine, texts):
            return "rows that share a pass change one another" if isinstance(engine, HfEngine) else "its scores differ"
        if engine.forks and not agrees_after_a_fork(engine, texts[-1]):
            return "a fork does not go on as its source"
    except NotHonoured as error:
        return f"its attention asks for {error}"
    except Exception as error:  # a model's own code may fail in any way
        logger.info("a batching fails", exc_info=True)
        return f"transformers fails at it ({type(error).__name__}: {said(error)})"
    return None


def agrees_in_shared_passes(engine: Engine, texts: Sequence[Text]) -> bool:
    """Whether logits agree with all texts in the same passes: prompts in two pieces, then rounds with wrong candidates."""
    for row, text in enumerate(texts):
        engine.open(row, Sampling(), len(text.prompt))
    try:
        engine.feed([Feed(row, text.prompt[: len(text.prompt) // 3], 0) for row, text in enumerate(texts)][1:])
        feeds = [Feed(row, text.prompt[engine.length(row) :], 1) for row, text in enumerate(texts)]
        if not close(engine.logits(feeds[::-1]).flip(0), torch.stack([text.scores[0] for text in texts])):
            return False
        done = [0] * len(texts)
        for count, (held, wrong) in enumerate(_rounds(len(texts))):
            feeds, expected, kept = [], [], []
            for row, text in enumerate(texts):
                at, more = done[row], min(held[row], WRITTEN - 1 - done[row])
                if more < 0 or (at + more + 1 >= WRITTEN):
                    continue
                bad = [(token + 1 + count) % VOCABULARY for token in text.written[at + more + 1 :][: wrong[row]]]
                feeds.append(Feed(row, [*text.written[at : at + 1 + more], *bad], 1 + more + len(bad)))
                expected.append(text.scores[at + 1 : at + 2 + more])
                kept.append((row, 1 + more, 1 + more + len(bad)))
            if not feeds:
                break
            scores = engine.logits(feeds).split([asked for _, _, asked in kept])
            for (row, taken, _), found, wanted in zip(kept, scores, expected, strict=True):
                if not close(found[:taken], wanted):
                    return False
                done[row] += taken
                engine.truncate(row, len(texts[row].prompt) + done[row])
    finally:
        for row in range(len(texts)):
            engine.close(row)
    return True


def _rounds(rows: int) -> Iterator[tuple[list[int], list[int]]]:
    """For each round, the number of right candidates of each row, and of wrong ones after them."""
    for number in range(WRITTEN):
        chosen = [ROUNDS[(number + row) % len(ROUNDS)] for row in range(rows)]
        yield [held for held, _ in chosen], [wrong for _, wrong in chosen]


def agrees_after_a_fork(engine: Engine, text: Text) -> bool:
    half = len(text.prompt) // 2
    engine.open(0, Sampling(), len(text.prompt))
    engine.feed([Feed(0, text.prompt, 0)])
    engine.fork(1, 0, half, Sampling(), len(text.prompt))
    engine.close(0)
    scores = engine.logits([Feed(1, text.prompt[half:], 1)])
    engine.close(1)
    return close(scores, text.scores[:1])
