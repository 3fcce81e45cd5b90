"""``outrider score``: a model's perplexity on a text; against another model or precision KL divergence and agreement."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.model_choice import choose_target, memory_of
from outrider.runner.options.quality import ScoreSpec
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.planning.replica_memory import PROCESS_BYTES, ProcessMemory
from outrider.runner.quality.model_process import ModelProcess, placed_process
from outrider.runner.quality.progress import StatusLine
from outrider.runner.quality.texts import opened_source, texts
from outrider.runner.report.display import console
from outrider.workers.errors import JobError, UsageError
from outrider.workers.messages import ModelSpec
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.model_memory import NO_PAIRS
from outrider.workers.scoring.figures import Figures
from outrider.workers.scoring.windows import USUAL, Window, pass_bytes, tokens_of_a_pass, windows_of

# Tokens that go to the model's process at a time: enough for full passes, few enough to show progress.
TOGETHER_TOKENS = 4096


def score(spec: ScoreSpec, as_json: bool) -> None:
    with StatusLine(console()) as line, TokenizerProcess() as tokenizer_process:
        against_name = _against(spec)
        model_info, against = tokenizer_process.prepare_scoring(spec.model, against_name, line.say)
        size, stride = chunking(spec, [model_info] if against is None else [model_info, against])
        models = [choose_target(spec, model_info, tokenizer_process, line.say)]
        if against is not None:
            other = spec.model_copy(update={"precision": spec.against_precision, "cache_precision": "auto"})
            models.append(choose_target(other, against, tokenizer_process, line.say))
        # One process holds both models.
        held = [
            memory_of(each, model, 1, tokenizer_process)
            for each, model in zip((model_info, against), models, strict=False)
            if each is not None
        ]
        needed = _needed(held, size, max(each.vocabulary for each in (model_info, against) if each is not None))
        with opened_source(spec.input, line.say) as source:
            found = texts(source, spec.format, model_info, tokenizer_process, spec.skip_bad, line.say)
            windows = first_tokens(
                (window for text in found for window in windows_of(text, size, stride)), spec.most_tokens
            )
            # The first window is read now, so that an unusable input is refused before a model is loaded.
            first = next(windows, None)
            if first is None:
                raise UsageError(f"{source.name} holds no text of two tokens: there is nothing to predict")
            line.show("loading the model")
            sizes = ModelSizes(needed, target_pairs=sum((each.model.pairs for each in held), NO_PAIRS))
            with placed_process(sizes, PlacementRequest(spec.per, 1), spec.wait_for_cores, line.say) as process:
                figures = _scored(process, models, first, windows, line)
    _report(spec, figures, models, size, stride, as_json)


def _needed(held: list[ProcessMemory], size: int, vocabulary: int) -> int:
    """The memory of a process with these models (one or two) for windows of ``size`` tokens."""
    tokens = max(size, tokens_of_a_pass(vocabulary))
    of_models = sum(each.model.weights + each.model.working + each.model.of_rows(1, tokens) for each in held)
    return max(PROCESS_BYTES[each.engine] for each in held) + of_models + pass_bytes(len(held), vocabulary)


def _against(spec: ScoreSpec) -> str | None:
    """The model to compare with: --against, or the same model if only --against-precision is given."""
    if spec.against is None and spec.against_precision != "auto":
        return spec.model
    return spec.against


def chunking(spec: ScoreSpec, model_infos: list[ModelInfo]) -> tuple[int, int]:
    """The tokens of a window, and the distance between windows."""
    shortest = min(model_infos, key=lambda model_info: model_info.context)
    size = min(USUAL, shortest.context) if spec.window is None else spec.window
    if size > shortest.context:
        raise UsageError(f"--window: {shortest.name} holds {shortest.context:,} tokens, got {size:,}; ask for fewer")
    stride = size if spec.stride is None else spec.stride
    if stride > size:
        raise UsageError(f"--stride: {stride:,} would leave out text between windows of {size:,} tokens; ask for less")
    return size, stride


def first_tokens(windows: Iterator[Window], most: int | None) -> Iterator[Window]:
    """The windows with the first ``most`` scored tokens; the last one is cut."""
    left = most
    for window in windows:
        if left is not None and window.scored >= left:
            yield Window(window.tokens[: window.first + left], window.first)
            return
        yield window
        left = None if left is None else left - window.scored


def _scored(
    process: ModelProcess, models: list[ModelSpec], first: Window, windows: Iterator[Window], line: StatusLine
) -> Figures:
    for note in process.begin(_open, models, process.actor.cores)():
        line.say(note)
    total = Figures()
    for some in _portions(first, windows):
        total += process.begin(_score, some)()
        line.show(f"scored {total.tokens:,} tokens, perplexity {total.perplexity:.4f}")
    # The perplexity may overflow even if the loss is finite.
    if not all(map(math.isfinite, (total.loss, total.divergence, total.perplexity, total.other_perplexity))):
        raise JobError(
            "the model's logits are not finite, or give a token of the text the probability 0: try another --precision"
        )
    return total


def _portions(first: Window, windows: Iterator[Window]) -> Iterator[list[Window]]:
    some, held = [first], len(first.tokens)
    for window in windows:
        if held >= TOGETHER_TOKENS:
            yield some
            some, held = [], 0
        some.append(window)
        held += len(window.tokens)
    yield some


def _report(spec: ScoreSpec, figures: Figures, models: list[ModelSpec], size: int, stride: int, as_json: bool) -> None:
    compared = len(models) == 2
    if as_json:
        answer: dict[str, Any] = {"tokens": figures.tokens, "perplexity": figures.perplexity}
        answer |= {"kl": figures.kl if compared else None, "agreement": figures.agreement if compared else None}
        print(json.dumps(answer))
        return
    every = "" if stride == size else f", every {stride:,}"
    rows = [("tokens", f"{figures.tokens:,} in windows of {size:,}{every}")]
    rows.append(("perplexity", f"{figures.perplexity:.4f} ({spec.model}, {_computed(models[0])})"))
    if compared:
        ratio = figures.perplexity / figures.other_perplexity
        other = f"{_against(spec)}, {_computed(models[1])}"
        rows.append(("against", f"{figures.other_perplexity:.4f} ({other}): {ratio:.4f} times that"))
        rows.append(("KL divergence", f"{figures.kl:.6f} nats a token"))
        rows.append(("agreement", f"{100 * figures.agreement:.2f}% of first choices"))
    for name, value in rows:
        print(f"{name:14} {value}")


def _computed(model: ModelSpec) -> str:
    cache = "" if model.cache_precision == "auto" else f", keys and values {model.cache_precision}"
    return f"{model.engine} {model.precision}{cache}"


# Below: runs in the model's process.
_scorer: Any


def _open(models: list[ModelSpec], cores: tuple[int, ...]) -> list[str]:
    from dataclasses import replace

    from outrider.workers.models.model_info import check_unchanged
    from outrider.workers.scoring.scorer import Scorer

    global _scorer
    for model in models:
        check_unchanged(model.path, model.digest)
    _scorer = Scorer(*(replace(model, threads=len(cores), cores=cores) for model in models))
    notes: list[str] = _scorer.notes
    return notes


def _score(windows: list[Window]) -> Figures:
    figures: Figures = _scorer.score(windows)
    return figures
