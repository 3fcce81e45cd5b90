"""The parameters that decide a row's text: made at admission, kept in the journal, and read back for the workers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from outrider.runner.job.damage import WHAT_TO_DO
from outrider.runner.job.journal import StoredRow
from outrider.runner.job.requests import MOST_SAMPLES, Request
from outrider.runner.job.row_seed import derived_seed
from outrider.runner.job.tools import Choice
from outrider.runner.options.job import JobSpec
from outrider.runner.validation_errors import must, where
from outrider.workers.errors import JobError
from outrider.workers.messages import Row, Sampling
from outrider.workers.models.model_info import ModelInfo

LEAST_TEMPERATURE = 1e-6


def resolve(row: Request, prompt_length: int, spec: JobSpec, model_info: ModelInfo) -> dict[str, Any]:
    """The parameters that decide the row's text, with the job's defaults filled in."""
    own = row.parameters

    def value(name: str) -> Any:
        given = getattr(own, name)
        return getattr(spec, name) if given is None else given

    return {
        "max_tokens": min(value("max_tokens"), model_info.context - prompt_length),
        "min_tokens": value("min_tokens"),
        "n": own.n or 1,
        "stop": list(own.stop or ()),
        "end_tokens": sorted({*(own.stop_token_ids or ()), *(() if value("ignore_eos") else model_info.end_tokens)}),
        "logprobs": own.logprobs,
        **({"echo": row.prompt or ""} if own.echo else {}),
        "temperature": _temperature(float(value("temperature"))),
        "top_p": float(value("top_p")),
        "top_k": max(0, value("top_k")),
        "min_p": float(value("min_p")),
        "seed": own.seed % (1 << 64) if own.seed is not None else derived_seed(spec.seed, row.custom_id),
        "repetition_penalty": float(1.0 if own.repetition_penalty is None else own.repetition_penalty),
        "presence_penalty": float(own.presence_penalty or 0.0),
        "frequency_penalty": float(own.frequency_penalty or 0.0),
        "logit_bias": sorted((int(token), float(bias)) for token, bias in (own.logit_bias or {}).items()),
    }


def _temperature(asked: float) -> float:
    """Temperatures below LEAST_TEMPERATURE are greedy: noise cannot change a choice, and logits / T may overflow."""
    return asked if asked >= LEAST_TEMPERATURE else 0.0


class Resolved(TypedDict):
    """The parameters that ``resolve`` makes, as they are read back from a journal (which may be damaged)."""

    max_tokens: Annotated[StrictInt, Field(ge=0)]
    min_tokens: NotRequired[StrictInt]
    n: Annotated[StrictInt, Field(ge=1, le=MOST_SAMPLES)]
    stop: list[StrictStr]
    end_tokens: NotRequired[list[StrictInt] | None]
    logprobs: NotRequired[StrictInt | None]
    echo: NotRequired[StrictStr]
    temperature: StrictFloat
    top_p: StrictFloat
    top_k: StrictInt
    min_p: StrictFloat
    seed: Annotated[StrictInt, Field(ge=0, lt=1 << 64)]
    repetition_penalty: StrictFloat
    presence_penalty: StrictFloat
    frequency_penalty: StrictFloat
    logit_bias: list[tuple[StrictInt, StrictFloat]]
    grammar: NotRequired[StrictStr]
    # The tags around the model's reasoning, and whether the prompt ends after the opening one.
    reasoning: NotRequired[tuple[StrictStr, StrictStr, StrictBool]]
    # The form of the model's tool calls, the tools' names, and the row's "tool_choice".
    tools: NotRequired[tuple[Literal["hermes", "llama", "mistral"], list[StrictStr], Choice]]
    # Special tokens that are decoded as text, since they mark reasoning or tool calls.
    shown: NotRequired[list[StrictInt]]
    # The tokens of the row's "prediction", among which candidates are looked for.
    predicted: NotRequired[list[StrictInt]]


RESOLVED = TypeAdapter(Resolved)


def samples_of(stored: StoredRow) -> list[Row]:
    """One row for the workers per sample; its key is row * MOST_SAMPLES + sample."""
    try:
        request = RESOLVED.validate_python(stored.request)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise JobError(
            f"the job's journal is damaged: row {stored.row} (line {stored.line}): {where(first)} {must(first)}; "
            f"{WHAT_TO_DO}"
        ) from None
    ends = request.get("end_tokens")
    return [
        Row(
            key=stored.row * MOST_SAMPLES + sample,
            prompt=stored.prompt,
            max_tokens=request["max_tokens"],
            stop=tuple(request["stop"]),
            logprobs=request.get("logprobs"),
            echo=request.get("echo"),
            shown=tuple(request.get("shown", ())),
            predicted=tuple(request.get("predicted", ())),
            sampling=Sampling(
                temperature=request["temperature"],
                top_p=request["top_p"],
                top_k=request["top_k"],
                min_p=request["min_p"],
                seed=request["seed"],
                sample=sample,
                repetition_penalty=request["repetition_penalty"],
                presence_penalty=request["presence_penalty"],
                frequency_penalty=request["frequency_penalty"],
                logit_bias=tuple(request["logit_bias"]),
                min_tokens=request.get("min_tokens", 0),
                end_tokens=None if ends is None else tuple(ends),
                grammar=request.get("grammar", ""),
            ),
        )
        for sample in range(request["n"])
    ]
