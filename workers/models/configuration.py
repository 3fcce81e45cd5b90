"""A config.json whose keys are tracked, so that none is overlooked.

A family reads the keys that it implements. ``check_all_read`` then refuses every key that was not read, unless it changes
no logit or its value means "not used": a model with an unknown feature goes to the hf engine, and is never computed wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.generation_settings import SETTINGS

# Keys about training, names, saving and sampling, which do not change logits. ``quantization_config`` is read by
# formats/configuration.py, for the weights.
HARMLESS_NAMES = """
architectures model_type torch_dtype dtype transformers_version auto_map is_decoder use_cache bos_token_id
eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class prefix initializer_range
init_std pretraining_tp n_ctx gradient_checkpointing use_return_dict return_dict return_dict_in_generate attention_dropout
activation_dropout hidden_dropout dropout layerdrop resid_pdrop embd_pdrop attn_pdrop classifier_dropout
attention_probs_dropout_prob hidden_dropout_prob embedding_dropout embed_dropout residual_dropout resid_dropout
output_attentions output_hidden_states output_scores chunk_size_feed_forward problem_type id2label label2id num_labels
finetuning_task task_specific_params summary_activation summary_first_dropout summary_proj_to_labels summary_type
summary_use_proj attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner max_batch_size
max_sequence_length pad_key_length pre_allocate_kv_cache validate_runner_input experts_implementation
use_flash_attn use_sdpa attn_implementation unsloth_version unsloth_fixed torchscript cache_implementation
output_router_logits router_aux_loss_coef router_jitter_noise output_past
is_llama_config transformers.js_config neftune_noise_alpha
pard_token ptd_token_id spd_type dflash_config
quantization_config quantization
"""
# Keys for the longest row, the first one that is present counts.
CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "max_sequence_length", "n_ctx"),
    *("seq_length", "model_max_length", "context_length"),
)
# The longest row of a model without a limit of positions.
LONGEST_ROW = 1 << 20
# Older checkpoints have settings of generation in config.json, which generation_settings.py reports.
HARMLESS = frozenset(HARMLESS_NAMES.split()) | SETTINGS


class Config:
    """``values`` for a family's builder. A key may be read twice, but each must be read once.

    ``native_alone``: only the native engine runs this model.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json", native_alone: bool = False) -> None:
        if not isinstance(values, Mapping):  # a part of a configuration may be anything
            raise ModelError(f"{source} must be an object, got {values!r}")
        self.values = values
        self.source = source
        self._native_alone = native_alone
        self._read: set[str] = set()

    def unknown(self, what: str, hf: str = "may") -> ModelError:
        """The error for a feature that the native engine does not implement; the hf engine "does", or "may"."""
        if self._native_alone:
            return ModelError(f"{self.source}: the native engine does not know {what}")
        return ModelError(f"{self.source}: the native engine does not know {what}; the hf engine {hf}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is missing or null."""
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A count of something: a positive whole number."""
        value = self.get(key, default)
        if value is None:
            raise ModelError(f'{self.source} has no "{key}"')
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f'{self.source}: "{key}" must be a positive whole number, got {value!r}')
        return value

    def whole(self, key: str, default: int) -> int:
        """A whole number of at least 0."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelError(f'{self.source}: "{key}" must be a whole number of at least 0, got {value!r}')
        return value

    def either(self, key: str, other: str, default: int) -> int:
        """A size that has two names."""
        value = self.size(key, self.size(other, default))
        self.only(other, value)
        return value

    def context(self, default: int) -> int:
        """The longest row, of a family without a key of its own for it."""
        found = [key for key in CONTEXT_KEYS if self.get(key) is not None]
        return self.size(found[0]) if found else default

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelError(f'{self.source}: "{key}" must be a number, got {value!r}')
        if not math.isfinite(value):
            raise ModelError(f'{self.source}: "{key}" must be a finite number, got {value!r}')
        return float(value)

    def positive(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value <= 0.0:
            raise ModelError(f'{self.source}: "{key}" must be greater than 0, got {value!r}')
        return value

    def stated(self, key: str, default: Any) -> Any:
        """The value, which may be null; the default where the key is missing."""
        self._read.add(key)
        return self.values.get(key, default)

    def flag(self, key: str, default: bool) -> bool:
        # transformers takes null as false, where it takes it at all.
        if default and self.stated(key, default) is None:
            raise self.unknown(f'"{key}": null', hf="does")
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f'{self.source}: "{key}" must be true or false, got {value!r}')
        return value

    def only(self, key: str, value: Any) -> None:
        """Refuse the model unless the key is missing or has this one value."""
        found = self.get(key, value)
        if found != value:
            raise self.unknown(f'"{key}": {found!r}', hf="does")

    def window(self, default: int | None) -> int:
        """How many tokens back a sliding window reaches; 0 without one. Here null is a value: no window."""
        if self.stated("sliding_window", default) is None:
            return 0
        return self.size("sliding_window", default)

    def check_all_read(self) -> None:
        # A key of every family, for which false or null is not "not used".
        if (causal := self.stated("is_causal", True)) is not True:
            raise ModelError(
                f'{self.source}: with "is_causal": {causal!r} tokens attend to later ones, which no engine runs'
            )
        for key, value in self.values.items():
            unused = value is None or value is False or value in ([], {})
            if key not in self._read and key not in HARMLESS and not key.startswith("_") and not unused:
                raise self.unknown(f'"{key}": {value!r}')
