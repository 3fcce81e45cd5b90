"""Reads the config.json of a head on a target's hidden states (EAGLE-3), in the published layout or in that of
`speculators`.

A head is no language model by itself: it reads the inputs of some of the target's layers beside the tokens, and chooses
among some of the target's tokens. ``head_of`` recognises one; unsupported kinds and options are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.config_file import config_path, read_config
from outrider.workers.models.mtp import model_of

SPECULATORS = "speculators_model_type"
EAGLE3 = "eagle3"
FAMILY = "eagle3"
# The prefix of the first layer's tensors in the published layout and in that of speculators.
PUBLISHED_LAYER, SPECULATORS_LAYER = "midlayer.", "layers.0."
DEFAULT_STATES = 3
LAYERS = "eagle_aux_hidden_state_layer_ids"
# Keys of speculators' configurations that do not describe the model, and those that transformers adds to any configuration.
OF_SPECULATORS = frozenset(
    (
        *("speculators_config", "speculators_version", "auto_map", "architectures", "model_type", "torch_dtype", "dtype"),
        *("transformers_version", "embed_requires_grad", "has_no_defaults_at_init", "tie_word_embeddings"),
        *("_name_or_path", "base_model_ep_plan", "provenance"),
    )
)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """``values`` are the configuration of its layer, with the keys of a Llama's.

    ``norm_before_residual``: the residual of the layer is the normalised state. ``norm_before_fc`` normalises the
    concatenated states, ``fc_norm`` each by itself. ``norm_output``: the state for the next token is the normalised output.
    ``layers`` are the target's layers whose inputs it reads, if the configuration names them.
    """

    source: str
    values: Mapping[str, Any]
    first_layer: str
    target_hidden: int
    vocabulary: int
    draft_vocabulary: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    layers: tuple[int, ...] = ()

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The layers whose inputs are the states, of a target with ``count`` layers."""
        return self.layers or (2, count // 2, count - 3)

    @property
    def hidden(self) -> int:
        """The hidden size of the head itself."""
        width: int = self.values["hidden_size"]
        return width

    @property
    def states(self) -> int:
        return len(self.layers) or DEFAULT_STATES


def is_head(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a head of any kind, which cannot be run as a model."""
    architectures = values.get("architectures")
    names = [str(name).lower() for name in architectures] if isinstance(architectures, list) else []
    return SPECULATORS in values or any("eagle" in name for name in names)


def head_of(values: Mapping[str, Any], source: str) -> HeadConfig | None:
    """None where it is no head; a ModelError for an unsupported kind of head."""
    if not is_head(values):
        return None
    return _of_speculators(values, source) if SPECULATORS in values else _published(values, source)


def read_head(path: str | Path) -> HeadConfig | None:
    """None also where ``path`` is that of an MTP layer, which has no config.json."""
    model = Path(path)
    if model_of(model) is not None:
        return None
    return head_of(read_config(model), str(config_path(model)))


def _of_speculators(values: Mapping[str, Any], source: str) -> HeadConfig:
    kind = values[SPECULATORS]
    if kind != EAGLE3:
        raise ModelError(f'{source}: a head of the kind {kind!r} is not supported; those of the kind "eagle3" are')
    layer = values.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ModelError(f'{source}: the head has no "transformer_layer_config"')
    known = {SPECULATORS, "transformer_layer_config", "draft_vocab_size", "target_hidden_size"}
    known |= {LAYERS, *_FLAGS}
    for key, value in values.items():
        if key not in known and key not in OF_SPECULATORS and value not in (None, False, [], {}):
            raise ModelError(f'{source}: a head with "{key}": {value!r} is not supported')
    # Layers of other families have norms at other places.
    if layer.get("model_type", "qwen3") not in ("llama", "qwen3"):
        raise ModelError(
            f"{source}: a head with a layer of {layer['model_type']!r} is not supported; llama's and qwen3's are"
        )
    return _head(values, {"model_type": "qwen3", **layer}, source, SPECULATORS_LAYER)


_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _published(values: Mapping[str, Any], source: str) -> HeadConfig:
    architectures = [str(name) for name in values["architectures"]]
    if not any("eagle3" in name.lower() for name in architectures):
        raise ModelError(f"{source}: a head of the architecture {architectures[0]!r} is not supported; EAGLE-3's are")
    for key in ("parallel_drafting", "pard_token", "ptd_token_id", "mask_token_id"):
        if values.get(key) not in (None, False):
            raise ModelError(f'{source}: a head that proposes in parallel ("{key}") is not supported; EAGLE-3\'s are')
    if values.get("model_type", "llama") != "llama":
        raise ModelError(f"{source}: a head with a layer of {values['model_type']!r} is not supported; llama's are")
    apart = {"draft_vocab_size", "target_hidden_size", "eagle_config", LAYERS, *_FLAGS}
    eagle = values.get("eagle_config") or {}
    if not isinstance(eagle, dict) or not set(eagle) <= {LAYERS, "use_aux_hidden_state"}:
        raise ModelError(f'{source}: a head with "eagle_config": {eagle!r} is not supported')
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise ModelError(
            f'{source}: a head with "use_aux_hidden_state" off is not supported; EAGLE-3\'s read several states'
        )
    layer = {key: value for key, value in values.items() if key not in apart}
    # In "eagle_config" SpecForge, ModelOpt and SGLang number the layers whose outputs are read.
    return _head(values, layer, source, PUBLISHED_LAYER, _layers(eagle, source))


def _head(
    values: Mapping[str, Any], layer: Mapping[str, Any], source: str, first_layer: str, outputs: tuple[int, ...] = ()
) -> HeadConfig:
    """``outputs`` are the target's layers whose outputs the head reads, if it names them so."""
    hidden = _count(layer.get("hidden_size"), "hidden_size", source)
    vocabulary = _count(layer.get("vocab_size"), "vocab_size", source)
    flags = {name: values.get(name) or False for name in _FLAGS}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ModelError(f'{source}: "{name}" must be true or false, got {value!r}')
    layers, after_outputs = _layers(values, source), tuple(each + 1 for each in outputs)
    if layers and after_outputs and layers != after_outputs:
        raise ModelError(
            f'{source}: "{LAYERS}" names the inputs of the layers {layers}, and that of "eagle_config" the outputs of '
            f"{outputs}, which are others"
        )
    return HeadConfig(
        source,
        layer,
        first_layer,
        _count(values.get("target_hidden_size") or hidden, "target_hidden_size", source),
        vocabulary,
        _count(values.get("draft_vocab_size") or vocabulary, "draft_vocab_size", source),
        layers=layers or after_outputs,
        **flags,
    )


def _layers(values: Mapping[str, Any], source: str) -> tuple[int, ...]:
    layers = values.get(LAYERS) or []
    if not isinstance(layers, list) or not all(type(each) is int and each >= 0 for each in layers):
        raise ModelError(f'{source}: "{LAYERS}" must be a list of layers, got {layers!r}')
    return tuple(layers)


def _count(value: object, key: str, source: str) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f'{source}: "{key}" must be a positive whole number, got {value!r}')
    return value
