"""Models that call tools: shortened versions of the families' published chat templates, with tiny tokenizers and weights.

Each token is a byte, except the marks, which are special tokens if they are in the family.
"""

from __future__ import annotations

import json
from pathlib import Path

from tiny_models import tiny_model
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from outrider.workers.models.model_info import ModelInfo, read_model_info
from outrider.workers.models.token_bytes import LETTERS

# "hermes" and "special" use Qwen's template: older models of Hermes, whose marks are no tokens, and models whose marks are
# special tokens. "coder" writes calls that are not JSON; "plain" has no tools.
TEMPLATES = {
    **{path.stem: path.read_text() for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")},
    "plain": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
}
TEMPLATES |= {"hermes": TEMPLATES["qwen"], "special": TEMPLATES["qwen"]}
_TAGS = {"<tool_call>": False, "</tool_call>": False}
ADDED: dict[str, dict[str, bool]] = {
    "qwen": {"<|im_start|>": True, "<|im_end|>": True, **_TAGS},
    "thinking": {"<|im_start|>": True, "<|im_end|>": True, **_TAGS, "<think>": False, "</think>": False},
    "llama": {"<|eot_id|>": True, "<|start_header_id|>": True, "<|end_header_id|>": True, "<|python_tag|>": True},
    "mistral": {"</s>": True, "[INST]": True, "[/INST]": True, "[TOOL_CALLS]": True, "[AVAILABLE_TOOLS]": True},
    "coder": {"<|im_start|>": True, "<|im_end|>": True, **_TAGS},
    "plain": {"<|im_end|>": True},
    "hermes": {"<|im_start|>": True, "<|im_end|>": True},
    "special": {"<|im_start|>": True, "<|im_end|>": True, "<tool_call>": True, "</tool_call>": True},
}
ENDS = {"llama": "<|eot_id|>", "mistral": "</s>"}
VOCABULARY = 288


def write_tokenizer(directory: Path, family: str) -> int:
    """Writes the tokenizer; returns the id of the end token."""
    directory.mkdir(exist_ok=True)
    alphabet = sorted(LETTERS, key=LETTERS.__getitem__)
    fast = Fast(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    for mark, special in ADDED[family].items():
        fast.add_tokens([AddedToken(mark, special=special, normalized=False)])
    fast.save(str(directory / "tokenizer.json"))
    end = ENDS.get(family, "<|im_end|>")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATES[family])
    token = fast.token_to_id(end)
    assert isinstance(token, int)
    return token


def tool_model(directory: Path, family: str, seed: int = 0) -> ModelInfo:
    """Writes a model with random weights, whose vocabulary is larger than the tokenizer's."""
    end = write_tokenizer(directory, family)
    changes = {"vocab_size": VOCABULARY, "max_position_embeddings": 8192, "hidden_size": 48, "intermediate_size": 64}
    model = tiny_model("llama", seed, **changes, eos_token_id=end, num_attention_heads=3, num_key_value_heads=1)
    model.save_pretrained(directory)
    return read_model_info(str(directory))
