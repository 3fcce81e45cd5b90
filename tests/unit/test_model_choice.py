"""The models, engines and precisions of target and draft, by options and machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eagle3 import tiny_head

from outrider.runner.model_choice import choose_models, replica_spec_of
from outrider.runner.options.job import JobSpec
from outrider.workers.errors import ModelError, UsageError
from outrider.workers.models.model_info import ModelInfo
from outrider.workers.models.opening import native_supports

TARGET = ModelInfo("target", "/models/target", "llama", 100, 100, "float16", (0,), 1 << 30, "one")
DRAFT = ModelInfo("draft", "/models/draft", "llama", 100, 100, "bfloat16", (0,), 1 << 20, "two")


class Willing:
    def native_refuses(self, path: str) -> str | None:
        return None

    def check_weights(self, path: str, engine: str, allow_pickle: bool, precision: str, on_accelerator: bool) -> None: ...

    def check_hf_runs(self, model_info: ModelInfo, fast_attention: bool) -> None: ...


def chosen(**options: Any) -> tuple[bool, bool]:
    """Whether target and draft keep keys and values in 8 bits."""
    spec = JobSpec(input=Path("in.jsonl"), **options)
    target, draft = choose_models(spec, TARGET, DRAFT, Willing(), print)  # type: ignore[arg-type]
    assert draft is not None
    return target.small_cache, draft.small_cache


def test_what_is_said_of_runners_up_reaches_the_target() -> None:
    for wanted in (True, False):
        spec = JobSpec(input=Path("in.jsonl"), runners_up=wanted)
        assert replica_spec_of(spec, None, "none").runners_up is wanted


@pytest.mark.parametrize("precision", ["w4a8", "w8a8", "bf16"])
def test_a_small_cache_is_for_drafts_only(precision: str) -> None:
    """Texts depend on the rounding of a target."""
    assert chosen(precision=precision, draft_precision=precision) == (False, True)
    assert chosen(precision=precision, draft_precision=precision, small_draft_cache=False) == (False, False)


def test_a_cache_precision_is_the_targets_and_of_the_native_engine_alone() -> None:
    def models(**options: Any) -> list[str]:
        spec = JobSpec(input=Path("in.jsonl"), precision="bf16", **options)
        both = choose_models(spec, TARGET, DRAFT, Willing(), print)  # type: ignore[arg-type]
        return [model.cache_precision for model in both if model is not None]

    assert models() == ["auto", "auto"]
    assert models(cache_precision="int8") == ["int8", "auto"]
    assert models(cache_precision="int8", devices="cpu,cuda:0") == ["int8", "auto"]
    for options in ({"engine": "hf"}, {"fast_attention": False}, {"devices": "cuda:0,cpu"}):
        with pytest.raises(
            UsageError, match="--cache-precision: only the native engine keeps keys and values in int8, and"
        ):
            models(cache_precision="int8", **options)


def test_a_shortlist_is_the_drafts_and_of_the_native_engine_alone() -> None:
    def spec(**options: Any) -> JobSpec:
        return JobSpec(input=Path("in.jsonl"), precision="bf16", **options)

    for asked, told in (("auto", None), (0, 0), (512, 512)):
        assert replica_spec_of(spec(draft_shortlist=asked), None, "model").draft_shortlist == told
        choose_models(spec(draft_shortlist=asked), TARGET, DRAFT, Willing(), print)  # type: ignore[arg-type]
    for options in ({"engine": "hf"}, {"devices": "cpu,cuda:0"}):
        choose_models(spec(draft_shortlist=0, **options), TARGET, DRAFT, Willing(), print)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="--draft-shortlist: draft runs on the hf engine, where a draft scores all"):
            choose_models(spec(draft_shortlist=9, **options), TARGET, DRAFT, Willing(), print)  # type: ignore[arg-type]
    head = replace(DRAFT, head=True, scored=32000)
    choose_models(spec(), TARGET, head, Willing(), print)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--draft-shortlist: draft is a head with a vocabulary of its own, 32,000 tokens"):
        choose_models(spec(draft_shortlist=9), TARGET, head, Willing(), print)  # type: ignore[arg-type]


def test_what_is_said_of_a_draft_that_was_not_found_is_told() -> None:
    """Whether there is one was left to us, so that it is no error."""
    said: list[str] = []
    asked: dict[str, Any] = {"draft_cores": 1, "draft_shortlist": 9, "draft_tokens": 6}
    for options in ({}, asked):
        spec = JobSpec(input=Path("in.jsonl"), precision="bf16", **options)
        choose_models(spec, TARGET, None, Willing(), said.append)  # type: ignore[arg-type]
    assert said == ["note: no draft model runs, so these options have no effect: --draft-cores, --draft-shortlist"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "it comes in fp16, which the native engine does not compute; --precision bf16 or w4a8 takes that engine"),
        ({"precision": "fp16"}, "the native engine does not compute fp16"),
        ({"precision": "bf16", "fast_attention": False}, "--no-fast-attention is for that engine alone"),
        ({"precision": "bf16"}, None),
        ({"engine": "hf"}, None),
        ({"devices": "cuda:0"}, None),
    ],
)
def test_a_model_that_is_left_to_the_hf_engine_is_told(options: dict[str, Any], reason: str | None) -> None:
    said: list[str] = []
    spec = JobSpec(input=Path("in.jsonl"), **options)
    target, _ = choose_models(spec, TARGET, None, Willing(), said.append)  # type: ignore[arg-type]
    assert (target.engine == "native") == (options == {"precision": "bf16"})
    start = "note: target runs on the hf engine, more slowly and not bit for bit"
    assert said == ([] if reason is None else [f"{start}: {reason}"])


def test_settings_of_generate_that_are_not_followed_are_told_of_the_target_alone() -> None:
    said: list[str] = []
    unfollowed = ("repetition_penalty", "typical_p")
    target, draft = (replace(each, unfollowed=unfollowed, settings="config.json") for each in (TARGET, DRAFT))
    choose_models(JobSpec(input=Path("in.jsonl"), precision="bf16"), target, draft, Willing(), said.append)  # type: ignore[arg-type]
    assert said == [
        'note: target\'s config.json sets "repetition_penalty", "typical_p", which outrider ignores (docs/jobs.md)'
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_model_that_would_sample_is_told_where_rows_are_greedy(temperature: float) -> None:
    said: list[str] = []
    target, draft = (replace(each, sampling=(("temperature", 0.6), ("top_k", 20))) for each in (TARGET, DRAFT))
    spec = JobSpec(input=Path("in.jsonl"), precision="bf16", temperature=temperature)
    choose_models(spec, target, draft, Willing(), said.append)  # type: ignore[arg-type]
    note = (
        "note: target's generation_config.json samples, and rows that state no temperature are greedy: --temperature 0.6 "
        "--top-k 20 samples as it says (docs/jobs.md)"
    )
    assert said == ([] if temperature else [note])


@pytest.mark.parametrize(
    ("options", "hint"),
    [({}, "; --precision bf16 runs it on the native engine"), ({"precision": "fp16"}, ""), ({"engine": "hf"}, "")],
)
def test_where_only_the_hf_engine_refuses_a_model_in_fp16_the_other_is_named(options: dict[str, Any], hint: str) -> None:
    class Unable(Willing):
        def check_hf_runs(self, model_info: ModelInfo, fast_attention: bool) -> None:
            raise ModelError("it cannot be run")

    with pytest.raises(ModelError) as refusal:
        choose_models(JobSpec(input=Path("in.jsonl"), **options), TARGET, None, Unable(), print)  # type: ignore[arg-type]
    assert str(refusal.value) == f"it cannot be run{hint}"


def test_a_family_that_the_native_engine_refuses_is_told_as_such() -> None:
    class Unwilling(Willing):
        def native_refuses(self, path: str) -> str | None:
            return "it cannot"

    said: list[str] = []
    choose_models(JobSpec(input=Path("in.jsonl")), TARGET, None, Unwilling(), said.append)  # type: ignore[arg-type]
    assert said == ["note: target runs on the hf engine, more slowly and not bit for bit: it cannot"]


def test_a_draft_that_the_native_engine_refuses_is_not_rounded() -> None:
    class Particular(Willing):
        def native_refuses(self, path: str) -> str | None:
            return "it cannot" if path == DRAFT.path else None

    for dtype, precision in (("float16", "bf16"), ("float32", "bf16"), ("bfloat16", "bf16")):
        spec = JobSpec(input=Path("in.jsonl"), precision="w4a8")
        _, draft = choose_models(spec, TARGET, replace(DRAFT, dtype=dtype), Particular(), print)  # type: ignore[arg-type]
        assert draft is not None
        assert (draft.engine, draft.precision) == ("hf", precision)


@pytest.mark.parametrize(
    ("dtype", "options", "precisions"),
    [
        ("float32", {}, ("fp32", "w8a8")),
        ("bfloat16", {"precision": "bf16"}, ("bf16", "w8a8")),
        ("float16", {"precision": "w8a8"}, ("w8a8", "w8a8")),
        ("bfloat16", {"precision": "w4a8:g64"}, ("w4a8:g64", "w4a8")),
        ("float16", {"precision": "w4abf16"}, ("w4abf16", "w4a8")),
        ("float32", {"draft_precision": "fp32"}, ("fp32", "fp32")),
        ("float32", {"devices": "cuda:0,cpu"}, ("fp32", "w8a8")),
        ("float32", {"devices": "cpu,cuda:0"}, ("fp32", "fp32")),
    ],
)
def test_a_draft_on_the_cpu_is_rounded(dtype: str, options: dict[str, Any], precisions: tuple[str, str]) -> None:
    """As its target is, and to eight bits beside a target of more than four."""
    spec = JobSpec(input=Path("in.jsonl"), **options)
    model_infos = replace(TARGET, dtype="float32"), replace(DRAFT, dtype=dtype)
    target, draft = choose_models(spec, *model_infos, Willing(), print)  # type: ignore[arg-type]
    assert draft is not None
    assert (target.precision, draft.precision) == precisions
    on_cards = [device.startswith("cuda") for device in str(options.get("devices", "cpu,cpu")).split(",")]
    assert [model.engine == "hf" for model in (target, draft)] == on_cards


class Reading(Willing):
    """Says what the native engine says of the model's files."""

    def native_refuses(self, path: str) -> str | None:
        return None if path == TARGET.path else native_supports(path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bias": True}, 'the native engine does not know "bias": True; choose another draft, or --draft lookup'),
        ({"target_model_type": "qwen3_vl"}, "does not know \"target_model_type\": 'qwen3_vl'; choose another draft"),
        ({"hidden_act": "tanh"}, 'does not know the activation "tanh"; choose another draft'),
        ({"rope_scaling": {"rope_type": "ntk"}}, "does not know the rope type 'ntk'; choose another draft"),
        ({"partial_rotary_factor": 0.5}, 'does not know "partial_rotary_factor": 0.5; choose another draft'),
        ({"num_hidden_layers": 2}, "a head of 2 layers is not supported"),
        ({"sliding_window": 7, "use_sliding_window": True}, "a head with a sliding window is not supported"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"engine": "native"}, {"draft_precision": "bf16"}])
def test_a_head_that_the_native_engine_refuses_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str, options: dict[str, Any]
) -> None:
    """The hf engine, which runs other models that the native one does not know, runs no head."""
    path = tiny_head(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    said: list[str] = []
    spec = JobSpec(input=Path("in.jsonl"), precision="bf16", **options)
    with pytest.raises(UsageError) as error:
        choose_models(spec, TARGET, replace(DRAFT, path=str(path), head=True), Reading(), said.append)  # type: ignore[arg-type]
    assert str(error.value).startswith("--draft: no engine runs this head: ") and sentence in str(error.value)
    assert "hf engine" not in str(error.value) and said == []


def test_a_head_never_goes_to_the_hf_engine(tmp_path: Path) -> None:
    head = replace(DRAFT, path=str(tiny_head(tmp_path)), head=True)

    def models(**options: Any) -> Any:
        spec = JobSpec(input=Path("in.jsonl"), precision="bf16", **options)
        return choose_models(spec, TARGET, head, Reading(), print)  # type: ignore[arg-type]

    assert [model.engine for model in models()] == ["native", "native"]
    with pytest.raises(UsageError, match='--draft-precision: "draft" is a head, and none runs in fp16; leave it out'):
        models(draft_precision="fp16")
    for options in ({"engine": "hf"}, {"devices": "cpu,cuda:0"}):
        with pytest.raises(UsageError, match="which only the native engine supports, and"):
            models(**options)
