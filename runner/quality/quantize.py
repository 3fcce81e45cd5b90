"""``outrider quantize``: a smaller checkpoint of a model, calibrated on text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

from outrider.runner.counted import counted
from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.options.quality import QuantizeSpec
from outrider.runner.planning.placement_request import ModelSizes, PlacementRequest
from outrider.runner.printable import printable
from outrider.runner.quality.model_process import placed_process, send_message
from outrider.runner.quality.progress import StatusLine
from outrider.runner.quality.texts import PIECE_BYTES, Tokens, opened_source, texts
from outrider.runner.report.display import console
from outrider.runner.writable import check_new_folder
from outrider.workers.errors import UsageError, encodable
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.quantising.summary import QuantiseSummary

METHODS = {4: ("auto", "rtn", "awq", "gptq"), 8: ("auto", "rtn", "gptq", "smoothquant")}
# Calibration uses 32 windows of 512 tokens, spread evenly over the first MOST_TOKENS tokens of the text.
WINDOW, WINDOWS, MOST_TOKENS = 512, 32, 1 << 20
LEAST_WINDOW = 64


def quantize(spec: QuantizeSpec) -> None:
    if spec.bits is None or spec.out is None:
        raise UsageError("--bits is missing: give 4 or 8" if spec.bits is None else "--out is missing: name a new folder")
    if spec.method not in METHODS[spec.bits]:
        known = ", ".join(METHODS[spec.bits])
        raise UsageError(f"--method: {spec.method} is not for {spec.bits} bits; choose one of {known}")
    for option, given in (("--format", spec.format != "auto"), ("--skip-bad", spec.skip_bad)):
        if given and spec.calibration is None:
            raise UsageError(f"{option} applies to --calibration, which is not given: leave it out, or name a file")
    check_new_folder("--out", spec.out)
    out = str(spec.out.absolute())
    if out != encodable(out):
        raise UsageError(
            f"--out: {out} is not UTF-8, and safetensors writes no file under such a name; name another folder"
        )
    with StatusLine(console()) as line, TokenizerProcess() as tokenizer_process:
        model_info, _ = tokenizer_process.prepare_scoring(spec.model, None, line.say)
        tokenizer_process.check_quantisable(model_info.path, out, spec.bits, spec.group)
        windows: list[Tokens] = []
        if spec.method != "rtn":
            windows = _windows(spec, model_info, tokenizer_process, line.say)
        elif spec.calibration is not None:
            raise UsageError("--calibration: rtn needs none; leave it out, or choose another --method")
        asked = (spec.bits, spec.method, spec.group, tuple(windows))
        request = (model_info.path, out, *asked, model_info.digest, spec.allow_pickle)
        line.show("starting")
        # A layer or two in float32, their Hessians and activations: about a quarter of the checkpoint, and 1 GB.
        needed = model_info.weight_bytes // 4 + (1 << 30)
        with placed_process(ModelSizes(needed), PlacementRequest(spec.per, 1), spec.wait_for_cores, line.say) as process:
            made = process.begin(_quantise, request, process.actor.cores)(line.say)
    print(result_line(spec.out, made))


def result_line(out: Path, made: QuantiseSummary) -> str:
    how = ", ".join(f"{method} in {counted(count, 'layer')}" for method, count in made.methods.items())
    group = f" in groups of {made.group}" if made.group else ", a scale a row"
    few = (
        f"; {made.few:,} of {made.experts:,} experts were calibrated on other tokens, too: few came to them"
        if made.few
        else ""
    )
    return f"{printable(out)}: {made.size / 1e9:.3g} GB, {made.bits:.2f} bits a rounded weight{group}; {how}{few}"


def _windows(
    spec: QuantizeSpec, model_info: ModelInfo, tokenizer_process: TokenizerProcess, say: Callable[[str], None]
) -> list[Tokens]:
    if spec.calibration is None:
        say("note: no --calibration was given: calibrating on the text that comes with outrider and Python's reference")
        return evenly(
            chain.from_iterable(_own_text(model_info, tokenizer_process)),
            model_info.context,
            "the text that comes with outrider",
        )
    with opened_source(spec.calibration, say) as source:
        found = texts(source, spec.format, model_info, tokenizer_process, spec.skip_bad, say)
        return evenly((token for text in found for piece in text for token in piece), model_info.context, source.name)


def evenly(tokens: Iterable[int], context: int, name: str) -> list[Tokens]:
    """Up to WINDOWS windows of equal length, spread evenly over the text."""
    stream = list(islice(tokens, MOST_TOKENS))
    size = min(WINDOW, context, len(stream) // 2)
    if size < LEAST_WINDOW:
        raise UsageError(f"--calibration: {name} has {len(stream):,} tokens, too few for calibration; give some thousand")
    count = min(WINDOWS, len(stream) // size)
    starts = [index * (len(stream) - size) // max(1, count - 1) for index in range(count)]
    return [tuple(stream[start : start + size]) for start in starts]


def _own_text(model_info: ModelInfo, tokenizer_process: TokenizerProcess) -> Iterator[Tokens]:
    """The tokens of the bundled text and of Python's language reference, if that is installed."""
    parts = [(files("outrider.runner.bench") / "text.txt").read_text(encoding="utf-8")]
    if find_spec("pydoc_data") is not None:
        from pydoc_data.topics import topics

        parts.append("\n\n".join(topics[name] for name in sorted(topics)))
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            [tokens] = tokenizer_process.encode(model_info.path, [part[start : start + PIECE_BYTES]])
            if isinstance(tokens, str):
                raise UsageError(f"{model_info.name}: {tokens}")
            yield tokens


def _quantise(request: tuple[Any, ...], cores: tuple[int, ...]) -> QuantiseSummary:
    """Runs in the model's process."""
    from outrider.workers.quantising.quantiser import Wanted, quantise

    return quantise(replace(Wanted(*request), threads=len(cores)), send_message)
