"""From options to what each actor loads and does: engine, precision, memory, candidates, and the placement request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from outrider.runner.job.tokenizer_process import TokenizerProcess
from outrider.runner.options.of_drafts import OF_A_MODEL_ALONE
from outrider.runner.options.shared import ComputedModel, Options
from outrider.runner.planning.placement_request import PlacementRequest, on_accelerator
from outrider.runner.planning.replica_memory import ProcessMemory, ReplicaMemory
from outrider.runner.planning.replica_plan import memory_by_files
from outrider.workers.errors import ModelError, UsageError
from outrider.workers.messages import ModelSpec, ReplicaSpec
from outrider.workers.models.draft_names import AUTO, MODEL, MTP, split_draft
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.precisions import arithmetic

LOOKUP, SUFFIX = "lookup", "suffix"
# Of a quantised checkpoint's own precisions, those with activations in int8, for its MTP layer.
ROUNDED = {"w4abf16": "w4a8", "w8af32": "w8a8"}
FEWEST_CORES_TO_SPLIT = 4
# A checkpoint's dtype, and our name for it.
OWN_PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def may_be_native(spec: Options) -> bool:
    """Whether the options leave both target and draft to the native engine."""
    return spec.engine != "hf" and spec.fast_attention and not any(on_accelerator(_devices(spec)))


def choose_models(
    spec: Options,
    target: ModelInfo,
    draft: ModelInfo | None,
    tokenizer_process: TokenizerProcess,
    say: Callable[[str], None],
) -> tuple[ModelSpec, ModelSpec | None]:
    """What each actor loads, and on which engine. No draft also where the usual one is an MTP layer, and cannot run."""
    target_on_accelerator, draft_on_accelerator = on_accelerator(_devices(spec))
    target_model = choose_target(spec, target, tokenizer_process, say, target_on_accelerator)
    target_model = replace(target_model, prefix_tokens=spec.prefix_tokens)
    _note_unfollowed_settings(spec, target, say)
    if draft is None or spec.draft_tokens == 0:
        # Where the user asked for no draft, JobSpec has refused these options already.
        if idle := spec.asked_of_a_draft(OF_A_MODEL_ALONE):
            say(f"note: no draft model runs, so these options have no effect: {', '.join(idle)}")
        return target_model, None
    if draft.head:
        off_native = target_model.engine != "native" or draft_on_accelerator
        if off_native and draft.family == MTP and split_draft(spec.draft)[0] in (AUTO, MODEL):
            say(f"note: the usual draft, {draft.name}, cannot be used: only the native engine runs multi-token prediction")
            return target_model, None
        _check_head(spec, target_model, target, draft, draft_on_accelerator, tokenizer_process)
    precision = _draft_precision(spec, target_model, draft, draft_on_accelerator, tokenizer_process)
    draft_model = _model(spec, draft, precision, draft_on_accelerator, tokenizer_process, say)
    if spec.draft_shortlist not in ("auto", 0):
        _check_shortlist(draft, draft_model)
    if draft.head:
        target_model = replace(target_model, states=draft.states)
        draft_model = replace(draft_model, target=target.path)
    # No digest for a draft: it may change between two runs, since no text depends on it.
    draft_model = replace(draft_model, digest="", small_cache=spec.small_draft_cache, prefix_tokens=spec.prefix_tokens)
    return target_model, replace(draft_model, mask_token=draft.mask_token)


def without_unusable(
    spec: Options, draft: ModelInfo | None, draft_model: ModelSpec | None, draft_name: str
) -> tuple[ModelInfo | None, str]:
    """The draft and its name; None and what finds candidates in texts where the usual draft cannot run."""
    if draft is None or draft_model is not None or spec.draft_tokens == 0:
        return draft, draft_name
    return None, draft_name.removeprefix(MTP).removeprefix("+") or LOOKUP


def _devices(spec: Options) -> tuple[str, ...]:
    return tuple(device.strip() for device in spec.devices.split(",") if device.strip())


def _note_unfollowed_settings(spec: Options, target: ModelInfo, say: Callable[[str], None]) -> None:
    """Notes on settings of generation_config.json that the job does not follow by default."""
    if target.unfollowed:
        names = ", ".join(f'"{name}"' for name in target.unfollowed)
        say(f"note: {target.name}'s {target.settings} sets {names}, which outrider ignores (docs/jobs.md)")
    if target.sampling and spec.temperature == 0:
        options = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in target.sampling)
        say(
            f"note: {target.name}'s {target.settings} samples, and rows that state no temperature are greedy: {options} "
            "samples as it says (docs/jobs.md)"
        )


def choose_target(
    spec: ComputedModel,
    target: ModelInfo,
    tokenizer_process: TokenizerProcess,
    say: Callable[[str], None],
    on_accelerator: bool = False,
) -> ModelSpec:
    """How a model is loaded that is not a draft."""
    model = _model(spec, target, spec.precision, on_accelerator, tokenizer_process, say)
    if spec.cache_precision != "auto" and model.engine != "native":
        raise UsageError(
            f"--cache-precision: only the native engine keeps keys and values in {spec.cache_precision}, and {target.name} "
            "runs on the hf engine: leave it out"
        )
    return replace(model, cache_precision=spec.cache_precision)


def _check_head(
    spec: Options,
    target_model: ModelSpec,
    target: ModelInfo,
    head: ModelInfo,
    on_accelerator: bool,
    tokenizer_process: TokenizerProcess,
) -> None:
    """A head runs on the native engine or not at all."""
    if target_model.engine != "native" or on_accelerator:
        other = target.name if target_model.engine != "native" else "the head"
        raise UsageError(
            f'--draft: "{head.name}" is a head on the target\'s hidden states, which only the native engine supports, '
            f"and {other} would run on the hf engine; choose a draft with a model of its own, or --draft lookup"
        )
    if (refusal := tokenizer_process.native_refuses(head.path)) is not None:
        raise UsageError(f"--draft: no engine runs this head: {refusal}; choose another draft, or --draft lookup")
    if spec.draft_precision == "fp16":
        raise UsageError(f'--draft-precision: "{head.name}" is a head, and none runs in fp16; leave it out')


def _check_shortlist(draft: ModelInfo, model: ModelSpec) -> None:
    if model.engine != "native":
        raise UsageError(
            f"--draft-shortlist: {draft.name} runs on the hf engine, where a draft scores all tokens of its vocabulary: "
            "leave it out"
        )
    if draft.scored is not None:
        raise UsageError(
            f"--draft-shortlist: {draft.name} is a head with a vocabulary of its own, {draft.scored:,} tokens: leave it out"
        )


def _draft_precision(
    spec: Options, target: ModelSpec, draft: ModelInfo, on_accelerator: bool, tokenizer_process: TokenizerProcess
) -> str:
    """The precision of a draft. Rounding changes no text, and a step's time is that of reading the weights' bytes."""
    if spec.draft_precision == "auto" and draft.family == MTP:
        return ROUNDED.get(draft.made_for, draft.made_for) or _rounded(target)
    if spec.draft_precision != "auto" or draft.made_for or on_accelerator or spec.engine == "hf":
        return spec.draft_precision
    if not spec.fast_attention or tokenizer_process.native_refuses(draft.path) is not None:
        return "bf16" if draft.dtype in ("float16", "float32") else "auto"
    return _rounded(target)


def _rounded(target: ModelSpec) -> str:
    # Candidates of a four-bit draft are accepted a little less often; that pays beside a target with passes as short.
    return "w4a8" if arithmetic(target.precision).startswith("w4") else "w8a8"


def _model(
    spec: ComputedModel,
    model_info: ModelInfo,
    precision: str,
    on_accelerator: bool,
    tokenizer_process: TokenizerProcess,
    say: Callable[[str], None],
) -> ModelSpec:
    own = OWN_PRECISION.get(model_info.dtype, "fp32")
    # A quantised checkpoint runs in the precision that it was made for.
    chosen = (model_info.made_for or own) if precision == "auto" else precision
    engine, left_for_fp16 = spec.engine, False
    if engine == "native" and not spec.fast_attention:
        raise UsageError("--no-fast-attention: the native engine has fused attention only; --engine hf has both")
    if engine == "auto" and on_accelerator:
        engine = "hf"
    if engine != "hf":
        refusal = tokenizer_process.native_refuses(model_info.path)
        if refusal is not None and engine == "native":
            raise UsageError(f"--engine native: {refusal}")
        if engine == "auto":
            left_for_fp16 = refusal is None and chosen == "fp16" and precision == "auto" and spec.fast_attention
            refusal = refusal or _left_to_hf(spec, chosen, precision)
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
    tokenizer_process.check_weights(model_info.path, engine, spec.allow_pickle, chosen, on_accelerator)
    if engine == "hf":
        try:
            tokenizer_process.check_hf_runs(model_info, spec.fast_attention)
        except ModelError as error:
            if not left_for_fp16:
                raise
            raise ModelError(f"{error}; --precision bf16 runs it on the native engine") from error
    return ModelSpec(
        model_info.path,
        engine,
        chosen,
        allow_pickle=spec.allow_pickle,
        fast_attention=spec.fast_attention,
        ipex=spec.ipex,
        digest=model_info.digest,
    )


def _left_to_hf(spec: ComputedModel, chosen: str, asked: str) -> str | None:
    """With ``--engine auto``: why a model that the native engine can run is left to the hf engine; None if it is not."""
    if not spec.fast_attention:
        return "--no-fast-attention is for that engine alone"
    if chosen != "fp16":
        return None
    if asked == "fp16":
        return "the native engine does not compute fp16"
    return "it comes in fp16, which the native engine does not compute; --precision bf16 or w4a8 takes that engine"


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
        draft_shortlist=_shortlist(spec),
        runners_up=spec.runners_up,
        draft_deadline=spec.draft_deadline,
    )


def _shortlist(spec: Options) -> int | None:
    """The size of a draft's shortlist; 0: it scores all tokens, None: the size is chosen by measuring."""
    return None if spec.draft_shortlist == "auto" else spec.draft_shortlist


def _proposes_by(kind: str, draft_name: str) -> bool:
    """Whether candidates come from lookup or suffixes, alone or beside a draft model."""
    return draft_name == kind or draft_name.endswith(f"+{kind}")


def is_movable(spec: Options, target: ModelSpec, draft: ModelSpec | None) -> bool:
    """Whether the layout can be chosen while the job runs; only the native engine can move to other cores."""
    return _left_open(spec) and draft is not None and {target.engine, draft.engine} == {"native"}


def _left_open(spec: Options) -> bool:
    return spec.layout == "auto" and spec.draft_cores is None and not spec.devices


def placement_request_of(spec: Options, movable: bool, cores: int) -> PlacementRequest:
    """The placement request for hosts of ``cores`` cores each."""
    layout = spec.layout
    if movable:
        # Both get all cores of their replica; the layout tuner measures how they share them best.
        layout = "shared"
    elif _left_open(spec):
        # With a core for the draft, the target loses 1/n of its speed; a draft on shared cores costs less than a quarter.
        layout = "shared" if cores // (spec.replicas or 1) < FEWEST_CORES_TO_SPLIT else "split"
    return PlacementRequest(spec.per, spec.replicas, spec.draft_cores, layout, _devices(spec))


def memory_of(
    model_info: ModelInfo,
    model: ModelSpec,
    rows: int,
    tokenizer_process: TokenizerProcess,
    shortlist: int | None = 0,
) -> ProcessMemory:
    """The memory of a process with this model and a batch of ``rows``; ``shortlist`` is that of a draft."""
    told = tokenizer_process.memory_of(model, rows, shortlist)
    known = told is not None
    return ProcessMemory(told or memory_by_files(model_info, model.precision), model.engine, known)


def memory_of_pair(
    target: tuple[ModelInfo, ModelSpec],
    draft: tuple[ModelInfo | None, ModelSpec | None],
    spec: Options,
    draft_name: str,
    tokenizer_process: TokenizerProcess,
) -> ReplicaMemory:
    """The memory of a target and its draft, if there is one."""
    rows, answers = spec.batch, spec.answer_tokens if _proposes_by(SUFFIX, draft_name) else 0
    of_target = replace(memory_of(*target, rows, tokenizer_process), tokens=target[0].vocabulary)
    info, model = draft
    if info is None or model is None:
        return ReplicaMemory(of_target, None, answers)
    return ReplicaMemory(of_target, memory_of(info, model, rows, tokenizer_process, _shortlist(spec)), answers)
