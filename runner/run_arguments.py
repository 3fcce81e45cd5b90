"""The keyword arguments of ``outrider.run``, for editors and type checkers. A test holds them to ``JobSpec``."""

from __future__ import annotations

from os import PathLike
from typing import Literal, TypedDict

from outrider.runner.options.values import CachePrecision, Engine, InputFormat, Layout, Per, Precision


class RunArguments(TypedDict, total=False):
    out: str | PathLike[str] | None
    format: InputFormat
    skip_bad: bool
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    trace: str | PathLike[str] | None
    metrics_port: int | None
    address: str | None
    share_cores: bool
    on_end: str | None
    prompt_column: str | None
    template: str | None
    chat: bool
    carry: str
    split: str | None
    model: str | PathLike[str]
    draft: str | PathLike[str]
    engine: Engine
    precision: Precision
    draft_precision: Precision
    cache_precision: CachePrecision
    fast_attention: bool
    ipex: bool
    allow_pickle: bool
    start_deadline: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    draft_tokens: int | Literal["auto"]
    draft_confidence: float
    draft_learns: bool
    draft_shortlist: int | Literal["auto"]
    runners_up: bool
    small_draft_cache: bool
    draft_deadline: float
    answer_tokens: int
    batch: int
    prefix_tokens: int
    replicas: int | None
    per: Per
    layout: Layout
    draft_cores: int | None
    devices: str
    wait_for_cores: float
