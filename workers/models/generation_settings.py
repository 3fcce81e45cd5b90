"""A model's generation settings: its end tokens, which are followed, and others that would change texts, which are
reported.

As transformers, it reads them from generation_config.json, or from config.json if there is none (older checkpoints).
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
# Settings that change texts, each with the value that means "not used".
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
# Settings that change no text, or only together with one of the above.
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
# A cache implementation that rounds keys and values.
ROUNDED_CACHE = "quantized"
# transformers' defaults for a model that samples; and the values that switch each setting off.
USUAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0}
OFF = {"temperature": None, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    end_tokens: tuple[int, ...]
    # The file of the settings, the settings that would change texts and are not followed, and the sampling (empty: greedy).
    file: str
    unfollowed: tuple[str, ...]
    sampling: tuple[tuple[str, float], ...]


def read_settings(path: Path, config: Mapping[str, Any], name: str, vocabulary: int) -> GenerationSettings:
    """``config`` is the content of the file ``name`` (config.json), or a GGUF file's metadata."""
    text = config.get("text_config")
    # Values of the whole model take precedence over those of its language model.
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
    """The declared end tokens, as a tuple of ids within the vocabulary."""
    if declared is None:
        return ()
    ids = declared if isinstance(declared, list) else [declared]
    if not all(type(id_) is int for id_ in ids):
        raise ModelError(f'{path}: "eos_token_id" must be a token id or a list of them, got {quoted(declared)}')
    # transformers fills in a family's default ids, which may be beyond a smaller vocabulary.
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
