"""What each actor loads and how it works: engine, precision, candidates, and the placement that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.options import Options
from outrider.runner.planning.placement_request import PlacementRequest, on_accelerator
from outrider.workers.errors import UsageError
from outrider.workers.messages import ModelSpec, ReplicaSpec
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.precisions import arithmetic

LOOKUP, SUFFIX = "lookup", "suffix"
FEWEST_CORES_TO_SPLIT = 4
# What a checkpoint calls its own number format.
OWN_PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def choose_models(
    spec: Options,
    target: ModelInfo,
    draft: ModelInfo | None,
    tokenizer_process: TokenizerProcess,
    say: Callable[[str], None],
) -> tuple[ModelSpec, ModelSpec | None]:
    """What each actor loads, and on which engine."""
    devices = tuple(device.strip() for device in spec.devices.split(",") if device.strip())
    target_on_accelerator, draft_on_accelerator = on_accelerator(devices)
    target_model = _model(spec, target, spec.precision, target_on_accelerator, tokenizer_process, say)
    if spec.cache_precision != "auto" and target_model.engine != "native":
        raise UsageError(
            f"--cache-precision: only the native engine keeps keys and values in {spec.cache_precision}, and {target.name} "
            "runs on the hf engine: leave it out"
        )
    target_model = replace(target_model, cache_precision=spec.cache_precision)
    if draft is None or spec.draft_tokens == 0:
        if spec.draft_shortlist not in ("auto", 0):
            raise UsageError(
                "--draft-shortlist: no draft model runs that could score fewer tokens: leave it out, or name a draft model"
            )
        return target_model, None
    precision = _draft_precision(spec, target_model, draft, draft_on_accelerator, tokenizer_process)
    if draft.head and (target_model.engine != "native" or draft_on_accelerator):
        other = target.name if target_model.engine != "native" else "the head"
        raise UsageError(
            f'--draft: "{draft.name}" is a head on the target\'s hidden states, which only the native engine hands out and '
            f"reads, and {other} would run on the hf engine; choose a draft with a model of its own, or --draft lookup"
        )
    draft_model = _model(spec, draft, precision, draft_on_accelerator, tokenizer_process, say)
    if spec.draft_shortlist not in ("auto", 0):
        _check_shortlist(draft, draft_model)
    if draft.head:
        target_model = replace(target_model, states=draft.states)
        draft_model = replace(draft_model, target=target.path)
    # A draft may change: no text depends on it.
    small = spec.small_draft_cache
    return target_model, replace(draft_model, small_cache=small, digest="", mask_token=draft.mask_token)


def _check_shortlist(draft: ModelInfo, model: ModelSpec) -> None:
    if model.engine != "native":
        raise UsageError(
            f"--draft-shortlist: {draft.name} runs on the hf engine, where a draft scores all tokens of its vocabulary: "
            "leave it out"
        )
    if draft.scored is not None:
        raise UsageError(
            f"--draft-shortlist: {draft.name} is a head that scores {draft.scored:,} tokens, chosen by those who made it: "
            "leave it out"
        )


def _draft_precision(
    spec: Options, target: ModelSpec, draft: ModelInfo, on_accelerator: bool, tokenizer_process: TokenizerProcess
) -> str:
    """Drafts are hints: rounding one costs no text, and a step takes the time of its bytes."""
    if spec.draft_precision != "auto" or draft.made_for or on_accelerator or spec.engine == "hf":
        return spec.draft_precision
    if not spec.fast_attention or tokenizer_process.native_refuses(draft.path) is not None:
        return "bf16" if draft.dtype in ("float16", "float32") else "auto"
    # Four bits hold a little seldomer than eight, which pays where the target's own passes are as short.
    return "w4a8" if arithmetic(target.precision).startswith("w4") else "w8a8"


def _model(
    spec: Options,
    model_info: ModelInfo,
    precision: str,
    on_accelerator: bool,
    tokenizer_process: TokenizerProcess,
    say: Callable[[str], None],
) -> ModelSpec:
    own = OWN_PRECISION.get(model_info.dtype, "fp32")
    # A checkpoint that comes quantised is run in what it was made for.
    chosen = (model_info.made_for or own) if precision == "auto" else precision
    engine = spec.engine
    if engine == "native" and not spec.fast_attention:
        raise UsageError("--no-fast-attention: the native engine has fused attention only; --engine hf has both")
    if engine == "auto" and (on_accelerator or chosen == "fp16" or not spec.fast_attention):
        engine = "hf"
    if engine != "hf":
        refusal = tokenizer_process.native_refuses(model_info.path)
        if refusal is not None and engine == "native":
            raise UsageError(f"--engine native: {refusal}")
        if refusal is not None:
            say(f"note: {model_info.name} runs on the hf engine, more slowly and not bit for bit: {refusal}")
        engine = "hf" if refusal is not None else "native"
    if engine == "hf" and precision == "auto":
        chosen = own
    if engine == "hf" and chosen not in ("fp32", "bf16", "fp16"):
        why = "" if spec.fast_attention else "--no-fast-attention needs the hf engine, and "
        raise UsageError(
            f'--precision: {why}the hf engine does not know "{chosen}"; choose fp32, bf16 or fp16 for {model_info.name}'
        )
    if engine == "native" and chosen == "fp16":
        raise UsageError(f"--precision: the native engine does not know fp16; choose another for {model_info.name}")
    tokenizer_process.check_weights(model_info.path, engine, spec.allow_pickle, chosen)
    if engine == "hf":
        tokenizer_process.check_hf_runs(model_info, spec.fast_attention)
    return ModelSpec(
        model_info.path,
        engine,
        chosen,
        allow_pickle=spec.allow_pickle,
        prefix_tokens=spec.prefix_tokens,
        fast_attention=spec.fast_attention,
        ipex=spec.ipex,
        digest=model_info.digest,
    )


def replica_spec_of(spec: Options, draft: ModelSpec | None, draft_name: str) -> ReplicaSpec:
    return ReplicaSpec(
        batch=spec.batch,
        draft_tokens=None if spec.draft_tokens == "auto" else spec.draft_tokens,
        model=draft is not None,
        lookup=_proposes_by(LOOKUP, draft_name),
        suffix=_proposes_by(SUFFIX, draft_name),
        answer_tokens=spec.answer_tokens,
        draft_confidence=spec.draft_confidence,
        draft_learns=spec.draft_learns,
        draft_shortlist=None if spec.draft_shortlist == "auto" else spec.draft_shortlist,
        runners_up=spec.runners_up,
        draft_deadline=spec.draft_deadline,
    )


def _proposes_by(kind: str, draft_name: str) -> bool:
    """Alone, or beside a model."""
    return draft_name == kind or draft_name.endswith(f"+{kind}")


def is_movable(spec: Options, target: ModelSpec, draft: ModelSpec | None) -> bool:
    """Whether how the two share their cores is left open; only the native engine can be moved while it works."""
    return _left_open(spec) and draft is not None and {target.engine, draft.engine} == {"native"}


def _left_open(spec: Options) -> bool:
    return spec.layout == "auto" and spec.draft_cores is None and not spec.devices


def placement_request_of(spec: Options, movable: bool, cores: int) -> PlacementRequest:
    """What is asked of the placement on a host, or several, of so many cores."""
    devices = tuple(device.strip() for device in spec.devices.split(",") if device.strip())
    layout = spec.layout
    if movable:
        # Both get all cores of their replica, and how they share them is found out on the job's own rows.
        layout = "shared"
    elif _left_open(spec):
        # A target loses 1/n of its speed with one of n cores, and a draft that takes turns costs less than a quarter.
        layout = "shared" if cores // (spec.replicas or 1) < FEWEST_CORES_TO_SPLIT else "split"
    return PlacementRequest(spec.per, spec.replicas, spec.draft_cores, layout, devices)
