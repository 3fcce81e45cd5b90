"""A model's own settings of transformers' generate: what ends its texts, and what else would change them.

transformers reads them from generation_config.json, and where there is none from config.json, as checkpoints of before have
them. Of these only the tokens that end a text are followed; the rest is told.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.files import read_json
from outrider.workers.models.headers import quoted

FILE = "generation_config.json"
# Settings that change texts, and what says that they are not in use.
UNFOLLOWED: dict[str, object] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "stop_strings", "penalty_alpha"), None),
    **dict.fromkeys(("dola_layers", "force_words_ids", "constraints", "max_time", "top_h"), None),
    "typical_p": 1,
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("token_healing", "force_bos_token_to_be_generated"), False),
}
# Those that change no text of a model whose scores are numbers, or none without one of the above.
HARMLESS_NAMES = """
max_length max_new_tokens early_stopping do_sample use_cache cache_config max_cache_len temperature top_k top_p min_p
num_beam_groups diversity_penalty length_penalty num_return_sequences renormalize_logits remove_invalid_values
output_attentions output_hidden_states output_scores output_logits return_dict_in_generate pad_token_id bos_token_id
eos_token_id decoder_start_token_id low_memory cache_implementation prefill_chunk_size compile_config disable_compile
continuous_batching_config use_mtp is_assistant num_assistant_tokens num_assistant_tokens_schedule
assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight
prompt_lookup_num_tokens max_matching_ngram_size speculation_type
"""
SETTINGS = frozenset((*UNFOLLOWED, *HARMLESS_NAMES.split()))
# Of keys and values in a cache that rounds them.
ROUNDED_CACHE = "quantized"
# Where a model samples and does not say how: as transformers has it.
USUAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0}
OFF = {"temperature": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    end_tokens: tuple[int, ...]
    # Which file they stand in, what in it changes texts and is not followed, and how it samples; empty where it does not.
    file: str
    unfollowed: tuple[str, ...]
    sampling: tuple[tuple[str, float], ...]


def read_settings(path: Path, config: Mapping[str, Any], name: str, vocabulary: int) -> GenerationSettings:
    """``config`` is what the file ``name``, or a GGUF file's metadata, holds beside the settings or instead of them."""
    text = config.get("text_config")
    # What is said of the whole model counts before what is said of its language model.
    within = text if isinstance(text, dict) else {}
    stated = {**within, **{key: value for key, value in config.items() if value is not None}}
    there = os.path.lexists(path / FILE)
    settings = read_json(path / FILE) if there else stated
    declared = settings.get("eos_token_id")
    return GenerationSettings(
        end_tokens=_end_tokens(path, stated.get("eos_token_id") if declared is None else declared, vocabulary),
        file=FILE if there else name,
        unfollowed=_unfollowed(settings),
        sampling=_sampling(settings),
    )


def _end_tokens(path: Path, declared: Any, vocabulary: int) -> tuple[int, ...]:
    """Ids that end a text: the generation settings' where there are any, else the model's."""
    if declared is None:
        return ()
    ids = declared if isinstance(declared, list) else [declared]
    if not all(type(id_) is int for id_ in ids):
        raise ModelError(f'{path}: "eos_token_id" must be a token id or a list of them, got {quoted(declared)}')
    # Families have ids of their own where nothing is said, also for models with fewer tokens.
    return tuple(sorted({id_ for id_ in ids if 0 <= id_ < vocabulary}))


def _unfollowed(settings: Mapping[str, Any]) -> tuple[str, ...]:
    found = [key for key, unused in UNFOLLOWED.items() if settings.get(key, unused) not in (unused, None, [], {})]
    return (*found, "cache_implementation") if settings.get("cache_implementation") == ROUNDED_CACHE else tuple(found)


def _sampling(settings: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    if settings.get("do_sample") is not True:
        return ()
    found = {key: usual if settings.get(key) is None else settings[key] for key, usual in USUAL_SAMPLING.items()}
    return tuple((key, value) for key, value in found.items() if _is_number(value) and value != OFF[key])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
