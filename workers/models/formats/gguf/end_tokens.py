"""A GGUF model's end tokens: those that its metadata names, and those that llama.cpp recognises by their texts.

A file has room for three ids, and models have more: Llama 3's name one of `<|eot_id|>`, `<|eom_id|>` and `<|end_of_text|>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOKENIZER = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4
# From llama.cpp's list, without its tokens for infilling code (<|fim_pad|> and others), which end no answer.
LISTED = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT>
_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
"""
TEXTS = frozenset(LISTED.split())
# Gemma 4 has this one, and "</s>" as a word of HTML.
OF_GEMMA_4 = "<|tool_response>"
# In a model that has one of these pairs, <|end|> ends only a part of the answer.
OF_PARTS = ({"<|return|>", "<|call|>"}, {"<|return|>", "<|calls|>"}, {"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})


def end_tokens(values: Mapping[str, Any]) -> list[int]:
    """The ids of the end tokens, from a file's metadata."""
    stated = [values.get(f"{TOKENIZER}{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, types = values.get(f"{TOKENIZER}tokens"), values.get(f"{TOKENIZER}token_type")
    found: dict[str, int] = {}
    # (gguf_tokenizer refuses values that are no lists, and lists of different lengths.)
    if isinstance(tokens, list) and isinstance(types, list):
        for id_, (token, type_) in enumerate(zip(tokens, types, strict=False)):
            # Converters mark tokens that are not special in transformers as user-defined, once also Phi 3's <|end|>.
            if type_ in (CONTROL, USER_DEFINED) and token in TEXTS:
                found[token] = id_
    if any(pair <= found.keys() for pair in OF_PARTS):
        found.pop("<|end|>", None)
    if OF_GEMMA_4 in found:
        found.pop("</s>", None)
    return sorted({id_ for id_ in stated if type(id_) is int} | set(found.values()))
