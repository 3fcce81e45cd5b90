"""What the driver needs to know of models and prompts, as functions for a process of its own.

The driver loads neither transformers nor torch. So these run in a helper process that ends before the job begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.workers.errors import ModelError
from outrider.workers.models.cards import POCKET, POCKET_DRAFT, ModelCard, read_card
from outrider.workers.models.chat import refuse_left_out
from outrider.workers.models.limits import limited
from outrider.workers.models.names import hub_id
from outrider.workers.models.templates import render_all
from outrider.workers.models.tokenizer import Tokenizer, check_pair, load_tokenizer, said

NO_TOKENS = "the prompt has no tokens"
ENCODING_SECONDS, CHARACTERS_A_SECOND = 10.0, 100_000
LOOKUP, NONE, AUTO = "lookup", "none", "auto"
# Behind a draft's name: each row takes candidates from the model or from its own text, whichever does better.
WITH_LOOKUP = "+lookup"


def choose_draft(target: ModelCard) -> str:
    """The draft that is known to go with a target."""
    if target.name == POCKET:
        return POCKET_DRAFT
    known = {
        "opt": "facebook/opt-125m",
        # CodeLlama has Llama 2's tokens and 16 of its own.
        "llama": {32000: "JackFram/llama-160m", 32016: "amd/AMD-Llama-135m-code"}.get(target.vocabulary, LOOKUP),
        "qwen2": "Qwen/Qwen1.5-0.5B-Chat" if target.vocabulary >= 151936 else LOOKUP,
        "gpt_bigcode": "bigcode/tiny_starcoder_py",
    }
    draft = known.get(target.family, LOOKUP)
    return LOOKUP if draft == hub_id(target.name) else draft


def prepare_pair(
    target_name: str,
    draft_name: str,
    tell: Callable[[int], None] = lambda size: None,
    loading: Callable[[str], None] = lambda path: None,
) -> tuple[ModelCard, ModelCard | None, str, list[str]]:
    """The target's card, the draft's (None for lookup and none), the draft's name, and what to tell the user.

    ``tell`` hears of weights that take long to be read, and how many bytes they are; ``loading`` of each tokenizer before
    it is tried, since a bad one may be the end of this process.
    """
    target = read_card(target_name, tell)
    loading(target.path)
    load_tokenizer(target.path)
    both = draft_name.endswith(WITH_LOOKUP)
    draft_name = draft_name.removesuffix(WITH_LOOKUP)
    if draft_name == "model":
        draft_name = AUTO
    wanted = choose_draft(target) if draft_name == AUTO else draft_name
    if wanted in (LOOKUP, NONE):
        return target, None, LOOKUP if both else wanted, []
    try:
        draft = read_card(wanted, tell)
        loading(draft.path)
        check_pair(target, draft)
    except ModelError as error:
        if draft_name != AUTO:
            raise
        return target, None, LOOKUP, [f"the usual draft cannot be used, proposing by lookup instead: {error}"]
    return target, draft, wanted + WITH_LOOKUP if both else wanted, []


def encode(path: str, prompts: list[Any]) -> list[tuple[int, ...] | str]:
    """Token ids for each prompt (a text, or a list of messages), or the sentence why there are none."""
    tokenizer = load_tokenizer(path)
    texts = iter(_encode_texts(tokenizer, [prompt for prompt in prompts if isinstance(prompt, str)]))
    chats = iter(_encode_chats(tokenizer, path, [prompt for prompt in prompts if not isinstance(prompt, str)]))
    return [next(texts) if isinstance(prompt, str) else next(chats) for prompt in prompts]


def _encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[int, ...] | str]:
    if not texts:
        return []
    with limited(_seconds_for(texts)):
        try:
            return [tuple(ids) or NO_TOKENS for ids in tokenizer.encode_all(texts)]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # one of them is at fault, and only that one fails; a panic in Rust is no Exception
            return [_tokens(tokenizer.encode, text, NO_TOKENS) for text in texts]


def _seconds_for(texts: list[str]) -> float:
    """Of the processor: ten times what the slowest tokenizers take."""
    return ENCODING_SECONDS + sum(map(len, texts)) / CHARACTERS_A_SECOND


def _encode_chats(tokenizer: Tokenizer, path: str, conversations: list[Any]) -> list[tuple[int, ...] | str]:
    if not conversations:
        return []
    if not tokenizer.chats:
        none = "the model has no chat template, so /v1/chat/completions cannot be answered; use /v1/completions"
        return [none] * len(conversations)

    def render(messages: Any) -> str:
        refuse_left_out(tokenizer.render, messages)
        return tokenizer.render(messages)

    rendered = render_all(render, conversations, path)
    with limited(_seconds_for([text for text, _ in rendered])):
        return [
            f"the model's chat template {refusal}"
            if refusal
            else _tokens(tokenizer.encode_rendered, text, "the conversation has no tokens")
            for text, refusal in rendered
        ]


def _tokens(encode: Callable[[str], list[int]], text: str, none: str) -> tuple[int, ...] | str:
    try:
        return tuple(encode(text)) or none
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a tokenizer is configured by the model's author, and may refuse in any way
        return f"the model's tokenizer refuses the prompt: {said(error)}"
