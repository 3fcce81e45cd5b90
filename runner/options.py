"""What a job is asked to be: every option in one frozen, strict object."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from outrider.runner.validation_errors import must
from outrider.workers.errors import UsageError, first_line

Engine = Literal["auto", "native", "hf"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "w8a8", "w4a8"]
Format = Literal["auto", "jsonl", "text"]
MOST_DRAFT_TOKENS = 64
AnyOptions = TypeVar("AnyOptions", bound="Options")


def _named(value: object) -> object:
    """A name or a path that somebody gave."""
    if isinstance(value, str | Path) and (not str(value) or "\0" in str(value)):
        raise ValueError("be a name that is not empty and holds no NUL")
    return value


def _draft_tokens(value: object) -> object:
    if value == "auto" or (type(value) is int and 0 <= value <= MOST_DRAFT_TOKENS):
        return value
    if isinstance(value, str) and value.isdecimal() and len(value) < 3:
        return _draft_tokens(int(value))
    raise ValueError(f'be a whole number from 0 to {MOST_DRAFT_TOKENS}, or "auto"')


Name = Annotated[str, BeforeValidator(_named)]
NamedPath = Annotated[Path, BeforeValidator(_named)]


class Options(BaseModel):
    """Which models, how they are run and how they choose. The names are those of the command line, with underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: Name = "pocket"
    draft: Name = "auto"

    temperature: float = Field(0.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    seed: int = Field(0, ge=0, lt=1 << 63)

    engine: Engine = "auto"
    precision: Precision = "auto"
    draft_precision: Precision = "auto"
    draft_tokens: Annotated[int | Literal["auto"], BeforeValidator(_draft_tokens)] = "auto"
    draft_confidence: float = Field(0.0, ge=0.0, lt=1.0)
    runners_up: bool = True
    small_draft_cache: bool = True
    fast_attention: bool = True
    draft_deadline: float = Field(5.0, gt=0.0)
    batch: int = Field(8, ge=1, le=4096)
    prefix_tokens: int = Field(4096, ge=0)
    replicas: int | None = Field(None, ge=1, le=4096)
    per: Literal["auto", "node", "socket", "machine"] = "auto"
    layout: Literal["auto", "split", "shared"] = "auto"
    draft_cores: int | None = Field(None, ge=1)
    devices: str = ""
    wait_for_cores: float = Field(3600.0, ge=0.0)
    allow_pickle: bool = False
    start_deadline: float = Field(300.0, gt=0.0)


class JobSpec(Options):
    """A batch job."""

    input: NamedPath
    out: NamedPath | None = None
    format: Format = "auto"
    skip_bad: bool = False
    max_tokens: int = Field(128, ge=1)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    trace: NamedPath | None = None
    metrics_port: int | None = Field(None, ge=1, le=65535)
    address: Name | None = None
    share_cores: bool = False


def build_spec(options: dict[str, Any], config_file: Path | None = None) -> JobSpec:
    return build_options(JobSpec, options, config_file)


def build_options(kind: type[AnyOptions], options: dict[str, Any], config_file: Path | None = None) -> AnyOptions:
    """A spec from the options given on the command line, over those of a file, over the defaults."""
    from_file = _read_config(config_file) if config_file is not None else {}
    unknown = sorted(from_file.keys() - kind.model_fields.keys())
    if unknown:
        raise UsageError(f'{config_file}: unknown key "{unknown[0]}"; known are {", ".join(sorted(kind.model_fields))}')
    try:
        return kind(**{**from_file, **options})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        if key == "input" and first["type"] == "missing":
            raise UsageError("INPUT is missing: name a file of prompts") from None
        where = f"{config_file}: {key}" if key in from_file and key not in options else f"--{key.replace('_', '-')}"
        raise UsageError(f"{where}: {must(first)}") from None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--config: {path} is not valid YAML: {first_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config: {path} must hold keys and values")
    return {str(key).replace("-", "_"): value for key, value in content.items()}
