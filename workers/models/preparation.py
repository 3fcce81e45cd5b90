"""The functions of the tokenizer process: models are checked, prompts encoded, constraints compiled.

The driver loads neither transformers nor torch, so it calls these in a process of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from outrider.kernels.library import why_unusable
from outrider.workers.constraints.grammars import BadConstraint, shortened, usable_grammar_of
from outrider.workers.constraints.tool_forms import ToolForm
from outrider.workers.errors import ModelError
from outrider.workers.models.chat import refuse_left_out, refuse_unknown, refuse_unsaid
from outrider.workers.models.checkpoint_program import read_program
from outrider.workers.models.draft_names import AUTO, LOOKUP, MODEL, MTP, NONE, SUFFIX, WITH_TEXTS, split_draft
from outrider.workers.models.head_pairs import has_mtp, states_of
from outrider.workers.models.hub_names import hub_id
from outrider.workers.models.limits import TooManyTokens, limited
from outrider.workers.models.mask_token import mask_token_of
from outrider.workers.models.model_info import POCKET, POCKET_DRAFT, ModelInfo, mtp_info, read_model_info
from outrider.workers.models.reasoning import ReasoningTags
from outrider.workers.models.templates import MOST_CHARACTERS, render_all
from outrider.workers.models.text_after import text_after
from outrider.workers.models.tokenizer import (
    LOADING_SECONDS,
    Tokenizer,
    check_comparable,
    check_pair,
    load_tokenizer,
    said,
    with_template,
)
from outrider.workers.models.tool_detection import conversation_tried, form_of, tools_tried
from outrider.workers.precisions import PRECISIONS

NO_TOKENS = "the prompt has no tokens"
# Shorter texts are encoded in a tenth of a second, and their tokens counted.
LONG_CHARACTERS = 100_000
# The digest of each model's files when it was last prepared in this process, by its path.
_digests: dict[str, str] = {}
ENCODING_SECONDS, CHARACTERS_A_SECOND = 10.0, 100_000
# CPU time for compiling one schema. llguidance's own limits take effect within a second or two.
COMPILING_SECONDS = 10.0
# Usual drafts for the family "llama" by the size of the vocabulary, which tells its tokenizers apart. (CodeLlama has Llama
# 2's tokens and 16 more.)
LLAMA_DRAFTS = {
    32000: "JackFram/llama-160m",
    32016: "amd/AMD-Llama-135m-code",
    128256: "meta-llama/Llama-3.2-1B-Instruct",
    49152: "HuggingFaceTB/SmolLM2-135M-Instruct",
}


def choose_draft(target: ModelInfo) -> str:
    """The usual draft for a target; LOOKUP where none is known."""
    if target.name == POCKET:
        return POCKET_DRAFT
    known = {
        "opt": "facebook/opt-125m",
        "llama": LLAMA_DRAFTS.get(target.vocabulary, LOOKUP),
        "qwen2": "Qwen/Qwen1.5-0.5B-Chat" if target.vocabulary >= 151936 else LOOKUP,
        "qwen3": "Qwen/Qwen3-0.6B" if target.vocabulary >= 151936 else LOOKUP,
        "qwen3_moe": "Qwen/Qwen3-0.6B" if target.vocabulary >= 151936 else LOOKUP,
        "qwen3_next": "Qwen/Qwen3-0.6B" if target.vocabulary >= 151936 else LOOKUP,
        "granitemoehybrid": "ibm-granite/granite-4.0-350m" if target.vocabulary == 100352 else LOOKUP,
        "gemma2": "google/gemma-2-2b-it" if target.vocabulary == 256000 else LOOKUP,
        "gemma3_text": "google/gemma-3-270m-it" if target.vocabulary in (262144, 262208) else LOOKUP,
        "lfm2": "LiquidAI/LFM2-350M" if target.vocabulary == 65536 else LOOKUP,
        "olmo2": "allenai/OLMo-2-0425-1B" if target.vocabulary == 100352 else LOOKUP,
        "mamba": "state-spaces/mamba-130m-hf" if target.vocabulary == 50280 else LOOKUP,
        "bloom": "bigscience/bloom-560m" if target.vocabulary == 250880 else LOOKUP,
        "codegen": "Salesforce/codegen-350M-mono" if target.vocabulary == 51200 else LOOKUP,
        "gpt2": "distilbert/distilgpt2" if target.vocabulary == 50257 else LOOKUP,
        "gpt_neo": "EleutherAI/gpt-neo-125m" if target.vocabulary == 50257 else LOOKUP,
        "gpt_neox": "EleutherAI/pythia-160m",
        "gpt_bigcode": "bigcode/tiny_starcoder_py",
    }
    draft = known.get(target.family, LOOKUP)
    return LOOKUP if draft == hub_id(target.name) else draft


def prepare_pair(
    target_name: str,
    draft_name: str,
    tell: Callable[[int], None] = lambda size: None,
    loading: Callable[[str], None] = lambda path: None,
    by_headers: bool = False,
    native: bool = True,
) -> tuple[ModelInfo, ModelInfo | None, str, list[str]]:
    """The target's and the draft's info (None: no model), the draft's name, and notes for the user.

    ``tell`` is called with the bytes of weights that take long to read; ``loading`` with a model's path before its
    tokenizer is loaded, since a bad one may end this process. ``by_headers`` is for a plan, as in ``read_model_info``.
    ``native``: whether both may run on the native engine, as a layer for multi-token prediction does alone.
    """
    draft_name, beside = split_draft(draft_name)
    target = read_model_info(target_name, tell, by_headers)
    _refuse_head(target)
    _forget_others(target)
    loading(target.path)
    load_tokenizer(target.path)
    notes = []
    if draft_name == AUTO and not beside:
        # Candidates found in texts cost nothing, so auto includes them.
        if (reason := why_unusable()) is None:
            beside = f"+{SUFFIX}"
        else:
            notes.append(f"proposing without suffix, which cannot be used: {reason}")
    usual = draft_name in (AUTO, MODEL)
    wanted = _usual_draft(target, native) if usual else draft_name
    # Without a model, candidates come from texts.
    from_texts = WITH_TEXTS.get(beside, LOOKUP)
    if SUFFIX in (wanted, from_texts) and (reason := why_unusable()) is not None:
        raise ModelError(f"--draft suffix cannot be used: {reason}; --draft lookup can")
    if wanted in (LOOKUP, SUFFIX, NONE):
        # Lookup as the usual draft adds nothing to suffixes, which search the row's own text as well.
        name = from_texts if beside else wanted
        if draft_name == MODEL:  # (auto asks for texts as well, so it needs no note)
            notes.append(f"no usual draft is known for {target.name}, proposing by {name} instead")
        return target, None, name, notes
    try:
        draft = _read_draft(wanted, target, tell, loading, by_headers)
    except ModelError as error:
        if not usual:
            raise
        if by_headers:  # a run may fetch it
            return target, None, from_texts, [*notes, f"this plan is without the usual draft: {error}"]
        note = f"the usual draft cannot be used, proposing by {from_texts} instead: {error}"
        return target, None, from_texts, [*notes, note]
    return target, draft, wanted + beside, notes


def _usual_draft(target: ModelInfo, native: bool) -> str:
    """The target's own layer where it has one, or its family's draft."""
    return MTP if native and has_mtp(Path(target.path)) else choose_draft(target)


def _read_draft(
    name: str, target: ModelInfo, tell: Callable[[int], None], loading: Callable[[str], None], by_headers: bool
) -> ModelInfo:
    """The draft's info; a ModelError where it does not fit the target."""
    draft = mtp_info(target) if name == MTP else read_model_info(name, tell, by_headers)
    if draft.head:
        draft = replace(draft, states=states_of(target, draft))
        if draft.family == MTP:  # so that a layer that cannot be read is no draft by itself
            read_program(Path(draft.path), PRECISIONS["bf16"])
        return draft
    draft = replace(draft, mask_token=mask_token_of(Path(draft.path)))
    _forget_others(draft)
    loading(draft.path)
    check_pair(target, draft)
    return draft


def _forget_others(model: ModelInfo) -> None:
    """Clear the caches if a model's files have changed since they were loaded (the process of a server runs for long)."""
    if _digests.setdefault(model.path, model.digest) != model.digest:
        _digests[model.path] = model.digest
        for known in (load_tokenizer, _for_grammars, tool_form):
            known.cache_clear()


def _refuse_head(model: ModelInfo) -> None:
    if model.head:
        raise ModelError(
            f'"{model.name}" is a head on another model\'s hidden states, which can only be a draft: name the model with '
            "-m, and the head with --draft of outrider run"
        )


def prepare_scoring(
    name: str,
    against_name: str | None,
    tell: Callable[[int], None] = lambda size: None,
    loading: Callable[[str], None] = lambda path: None,
) -> tuple[ModelInfo, ModelInfo | None]:
    """The info of a model that scores text, and of the one that it is compared with."""
    model = read_model_info(name, tell)
    _refuse_head(model)
    loading(model.path)
    load_tokenizer(model.path)
    if against_name is None:
        return model, None
    against = read_model_info(against_name, tell)
    _refuse_head(against)
    loading(against.path)
    check_comparable(model, against)
    return model, against


def encode(
    path: str, prompts: list[Any], continued: bool = False, context: int | None = None
) -> list[tuple[int, ...] | str]:
    """Token ids for each prompt (a text, messages, or messages with options and tools), or a sentence why there are none.

    ``continued`` texts get no special tokens of a text's beginning. A long prompt that cannot have fewer tokens than
    ``context`` is refused without being encoded, which may take longer than all others.
    """
    texts = iter(_encode_texts(path, [prompt for prompt in prompts if isinstance(prompt, str)], continued, context))
    chats = iter(_encode_chats(path, [prompt for prompt in prompts if not isinstance(prompt, str)], context))
    return [next(texts) if isinstance(prompt, str) else next(chats) for prompt in prompts]


def compile_constraints(path: str, vocabulary: int, end: int, constraints: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Each constraint's grammar, or "" and what is wrong with it."""
    compiled = []
    for constraint in constraints:
        try:
            tokenizer = _for_grammars(path, vocabulary, end)
            with limited(COMPILING_SECONDS):
                grammar = usable_grammar_of(constraint, tokenizer, load_tokenizer(path).tokens_of(tokenizer))
            compiled.append((grammar, ""))
        except BadConstraint as error:
            compiled.append(("", str(error)))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a schema may be anything; a panic in Rust is no Exception
            compiled.append(("", f"it cannot be compiled: {shortened(error)}"))
    return compiled


@lru_cache(maxsize=2)
def _for_grammars(path: str, vocabulary: int, end: int) -> LLTokenizer:
    tokenizer = load_tokenizer(path)
    with limited(LOADING_SECONDS):
        return tokenizer.for_grammars(vocabulary, end)


def decode(
    path: str, answer: Sequence[int], shown: tuple[int, ...] = (), prompt: tuple[int, ...] = (), unfinished: bool = False
) -> str:
    """The text of an answer's tokens after a prompt's, with the special tokens that are ``shown``.

    Of an ``unfinished`` answer without what further tokens may change, but for a character that is incomplete at its end.
    """
    tokenizer = load_tokenizer(path)
    with limited(ENCODING_SECONDS):
        if unfinished:
            answer = tokenizer.token_bytes.settled(answer, shown)
        return text_after(prompt, answer, lambda tokens: tokenizer.decode(tokens, shown))


def reasoning_tags(path: str) -> ReasoningTags | None:
    """The tags around a model's thoughts. None also where the template or the tokenizer fails: rows that need them report
    it."""
    tokenizer = with_template(path)
    with limited(ENCODING_SECONDS):
        try:
            return tokenizer.reasoning_tags
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # both are files of the model's author; a panic in Rust is no Exception
            return None


@lru_cache(maxsize=2)
def tool_form(path: str) -> ToolForm | None:
    """The form in which the chat template writes tool calls; None where it writes none, or in an unknown form."""
    tokenizer = with_template(path)
    if not tokenizer.chats:
        return None
    # Some templates support one call in a message only, and refuse two.
    tried = [conversation_tried(1), conversation_tried(2)]
    try:
        rendered = render_all(lambda each: tokenizer.render(each, None, tools_tried()), tried, path)
        with limited(ENCODING_SECONDS):
            return form_of([text for text, _ in rendered], tokenizer.special_among)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a file of the model's author: rows with tools say that they are not for this model
        return None


def _encode_texts(path: str, texts: list[str], continued: bool, context: int | None) -> list[tuple[int, ...] | str]:
    if not texts:
        return []
    tokenizer = load_tokenizer(path)
    problems = [_too_long(text, tokenizer, context) for text in texts]
    if any(problems):
        fitting = [text for text, problem in zip(texts, problems, strict=True) if problem is None]
        encoded = iter(_encode_texts(path, fitting, continued, context))
        return [next(encoded) if problem is None else problem for problem in problems]
    one = tokenizer.encode_rendered if continued else tokenizer.encode
    with limited(_seconds_for(texts)):
        try:
            every = map(one, texts) if continued else tokenizer.encode_all(texts)
            return [tuple(ids) or NO_TOKENS for ids in every]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # one by one, so that only the bad text fails; a panic in Rust is no Exception
            return [_tokens(one, text, NO_TOKENS) for text in texts]


def _too_long(text: str, tokenizer: Tokenizer, context: int | None) -> str | None:
    """Why the text is not encoded: it would take many times its memory and minutes, or cannot fit."""
    if len(text) > MOST_CHARACTERS:
        return f"the prompt has {len(text):,} characters; at most {MOST_CHARACTERS:,} are taken"
    if context is None or len(text) <= LONG_CHARACTERS or (longest := tokenizer.longest_token) is None:
        return None
    if (least := -(-len(text) // longest)) < context:
        return None
    return TooManyTokens(
        f"the prompt has {len(text):,} characters, which are {least:,} tokens or more, and the model holds {context:,} "
        "with the answer; shorten it"
    )


def _seconds_for(texts: list[str]) -> float:
    """CPU time for encoding: ten times that of the slowest tokenizers."""
    return ENCODING_SECONDS + sum(map(len, texts)) / CHARACTERS_A_SECOND


def _encode_chats(path: str, conversations: list[Any], context: int | None) -> list[tuple[int, ...] | str]:
    if not conversations:
        return []
    tokenizer = with_template(path)
    if not tokenizer.chats:
        none = "the model has no chat template, so /v1/chat/completions cannot be answered; use /v1/completions"
        return [none] * len(conversations)

    def render(conversation: Any) -> str:
        """A conversation is a list of messages, or a dictionary of messages, options for the template, and tools."""
        whole = conversation if isinstance(conversation, dict) else {"messages": conversation}
        messages, options, tools = whole["messages"], whole.get("options", {}), whole.get("tools", ())
        refuse_unknown(tokenizer.template_variables(bool(tools)) if options else frozenset(), options)
        refuse_left_out(tokenizer.render, messages, options, bool(tools))
        text = tokenizer.render(messages, options, tools)
        refuse_unsaid(text, tools)
        return text

    rendered = render_all(render, conversations, path)
    with limited(_seconds_for([text for text, _ in rendered])):
        return [
            f"the model's chat template {refusal}"
            if refusal
            else _too_long(text, tokenizer, context)
            or _tokens(tokenizer.encode_rendered, text, "the conversation has no tokens")
            for text, refusal in rendered
        ]


def _tokens(encode: Callable[[str], list[int]], text: str, none: str) -> tuple[int, ...] | str:
    try:
        return tuple(encode(text)) or none
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a tokenizer is configured by the model's author, and may refuse in any way
        return f"the model's tokenizer refuses the prompt: {said(error)}"
