"""How a model can be run rightly by transformers, found out on a small twin of it.

The twin (``workers/models/twins.py``) writes a few texts by transformers' own ``generate``: shorter and longer than each of
its windows, chunks and switches of rope, and across them. Then each way of running it has to give the same scores along
these texts: rows of different lengths in one pass, prompts in pieces, candidates that hold and others that are taken back,
forks. The first way that does is the model's. What a real model weighs plays no part: a twin has some ten thousand weights.
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
from outrider.workers.engines.hf_masks import NotHonoured
from outrider.workers.engines.hf_rows import CACHE_NAMES, HfRowEngine
from outrider.workers.engines.ways import RowFeeding, Way
from outrider.workers.errors import ModelError
from outrider.workers.messages import Sampling
from outrider.workers.models.formats.section import KEY
from outrider.workers.models.headers import quoted
from outrider.workers.models.quantisation_libraries import ELSEWHERE, NATIVE, NEEDS, Needs
from outrider.workers.models.twins import NEAR, VOCABULARY, build_twin, twin_config

# Prompts below every limit of a twin, up to just below its longest (they cross it as they are written), and beyond all.
PROMPTS = (3, NEAR.switch - 4, NEAR.switch + 13)
WRITTEN = 10
# How far scores may lie apart, relative to the largest: rounding in float32, no more. What is not honoured shows in tenths.
TOLERANCE = 2e-3
# One candidate that holds, one that does not, and so on: how many of each in the rounds to come.
ROUNDS = ((0, 0), (0, 2), (2, 1), (1, 1), (0, 1), (3, 0))

# bitsandbytes' own, where a configuration does not say.
LLM_INT8_THRESHOLD = 6.0

# The longest row that is tried.
CONTEXT = PROMPTS[-1] + WRITTEN + 8
LONGEST_SAID = 160

logger = logging.getLogger(__name__)
Engine = HfEngine | HfRowEngine


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, what transformers wrote behind it, and the scores after the prompt and after each written token but one."""

    prompt: list[int]
    written: list[int]
    scores: torch.Tensor


def find_way(config: PretrainedConfig, fused: bool = True, ragged: bool = True, pooled: str = "") -> Way:
    """The best way to run models of this configuration that gives transformers' own texts; a ModelError where none does.

    Without ``ragged`` only those that run one row at a time. ``pooled`` says why a token's scores depend on the others of
    its pass, where that is known of the model itself.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            "transformers has no model of this family that goes on with a text by itself (AutoModelForCausalLM): it is "
            "one that also sees or hears, or no language model at all"
        )
    _check_quantised(config)
    # A twin is not quantised, so that no trial on it would show this.
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
        raise ModelError("transformers itself writes scores with it that are not numbers")
    if looks_ahead(model):
        raise ModelError("its tokens see those that come after them, so that no candidate can be verified")
    beside = pooled or special(model)
    why = beside or "its attention cannot be replaced in transformers"
    if model._supports_attention_backend and ragged and not pooled:
        found = _differs(partial(HfEngine, model, CONTEXT, fused), texts)
        if found is None:
            return Way(True)
        why = beside or found
        model = build_twin(twin_config(config), fused=fused)
    first = ""
    for feeding in (RowFeeding.STEPPED,) if pooled else RowFeeding:
        found = _differs(partial(HfRowEngine, model, CONTEXT, feeding), texts)
        if found is None:
            return Way(False, feeding, why)
        first = first or found
    raise ModelError(f"{why}, and a row alone does not give the text of transformers' generate either: {first}")


def _check_quantised(config: PretrainedConfig) -> None:
    """Refuse a way of quantising that transformers does not know: it loads such weights as if they were plain."""
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
    # Of a model that is loaded it is no dictionary any more.
    return stated if isinstance(stated, dict) else {}


def _pooled(config: PretrainedConfig) -> str:
    """Why a token's scores depend on the other tokens of its pass, as far as the configuration tells before any weight is
    read; of the model itself ``library_weights`` finds it out."""
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
    """What a model remembers of a row beside keys and values, or does with them that no mask can say; None for neither."""
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
    """What a foreign exception says, in a line. Of configurations that check themselves it is the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrapped = "ValidationError" in type(error).__name__
    text = lines[-1 if wrapped else 0] if lines else type(error).__name__
    return text if len(text) <= LONGEST_SAID else f"{text[:LONGEST_SAID]}…"


def prompt_of(length: int) -> list[int]:
    """Tokens without a pattern that a model could repeat. Small ids have meanings of their own in some."""
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
    """Why an engine does not give the texts; None where it does."""
    try:
        engine = open_engine()
        if not same_in_company(engine, texts):
            return "rows that share a pass change one another" if isinstance(engine, HfEngine) else "its scores differ"
        if engine.forks and not same_after_a_fork(engine, texts[-1]):
            return "a fork does not go on as its source"
    except NotHonoured as error:
        return f"its attention asks for {error}"
    except Exception as error:  # models' own code meets what it does not expect
        logger.info("a way to run a model fails", exc_info=True)
        return f"transformers fails at it ({type(error).__name__}: {said(error)})"
    return None


def same_in_company(engine: Engine, texts: Sequence[Text]) -> bool:
    """All texts at once: prompts in two pieces, then rounds of candidates, of which some are taken back."""
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
    """For each round, how many candidates of each row hold and how many behind them do not."""
    for number in range(WRITTEN):
        chosen = [ROUNDS[(number + row) % len(ROUNDS)] for row in range(rows)]
        yield [held for held, _ in chosen], [wrong for _, wrong in chosen]


def same_after_a_fork(engine: Engine, text: Text) -> bool:
    half = len(text.prompt) // 2
    engine.open(0, Sampling(), len(text.prompt))
    engine.feed([Feed(0, text.prompt, 0)])
    engine.fork(1, 0, half, Sampling(), len(text.prompt))
    engine.close(0)
    scores = engine.logits([Feed(1, text.prompt[half:], 1)])
    engine.close(1)
    return close(scores, text.scores[:1])
