"""Sections of options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from outrider.runner.options.of_drafts import OF_A_DRAFT, idle_without_draft, keeps_answers
from outrider.runner.options.option import Option, OptionModel, Switch, flag_of
from outrider.runner.options.values import (
    NO_DRAFT,
    PRECISIONS,
    CachePrecision,
    DraftTokens,
    Engine,
    Layout,
    Name,
    Per,
    Precision,
    Shortlist,
)
from outrider.workers.errors import UsageError
from outrider.workers.models.draft_names import MOST_FOUND, split_draft

ASSISTED = Switch(
    "assisted",
    ("--assisted/--no-assisted", "--assisted_generation"),
    "--no-assisted is --draft none.",
    default=True,
    value=NO_DRAFT,
    conflict="--no-assisted runs without a draft, --draft {} with one: leave out one",
)
# transformers' default when sampling is on.
DO_SAMPLE = Switch(
    "do_sample",
    ("--do-sample", "--do_sample"),
    "Temperature 1, unless --temperature is given.",
    default=False,
    value=1.0,
)


class ModelOptions(OptionModel):
    """The model"""

    model: Annotated[
        Name,
        Option(
            help="Target: directory, GGUF file, hub id (of GGUF OWNER/NAME:TYPE), short name or 'pocket'.",
            decides_text=True,
            spellings=("-m", "--model_name"),
            metavar="MODEL",
        ),
    ] = "pocket"
    allow_pickle: Annotated[
        bool,
        Option(
            help="Run whatever code a .bin file holds; otherwise one that holds more than weights is refused.",
            decides_text=False,
        ),
    ] = False


class EngineOptions(OptionModel):
    """Engine and precision"""

    engine: Annotated[
        Engine,
        Option(
            help="native (our kernels), hf (transformers), or auto: native where it runs the model as it is.",
            decides_text=True,
        ),
    ] = "auto"
    precision: Annotated[
        Precision, Option(help=f"Target's precision: {PRECISIONS}; auto: the checkpoint's own.", decides_text=True)
    ] = "auto"
    cache_precision: Annotated[
        CachePrecision,
        Option(
            help="Target's KV cache: int8 (native engine) halves its bytes and changes texts; auto: 16 bits, fp32: 32.",
            decides_text=True,
        ),
    ] = "auto"
    # Not part of the identity, although texts depend on it: only the hf engine has both kinds, and it promises no equality.
    fast_attention: Annotated[
        bool,
        Option(
            help="Fused attention on the hf engine; --no-fast-attention: eager.",
            decides_text=False,
            spellings=("--fast_attention",),
        ),
    ] = True
    # If it changes bits, the numeric path says so, which is compared when a job is resumed.
    ipex: Annotated[
        bool, Option(help="Use Intel's extension for PyTorch where it is installed (hf engine, CPU).", decides_text=False)
    ] = True


class ComputedModel(ModelOptions, EngineOptions):
    """A model, and how it is computed."""


class StartOptions(OptionModel):
    """Starting"""

    start_deadline: Annotated[
        float, Field(gt=0.0), Option(help="Seconds that a model may take to load.", decides_text=False)
    ] = 300.0


class SamplingOptions(OptionModel):
    """Sampling, where a row does not say"""

    temperature: Annotated[
        float,
        Field(ge=0.0, le=100.0),
        Option(help="Temperature; 0 is greedy.", decides_text=True, switches=(DO_SAMPLE,)),
    ] = 0.0
    top_p: Annotated[
        float,
        Field(gt=0.0, le=1.0),
        Option(
            help="Sample from the most probable tokens that reach this probability together; 1: from all.",
            decides_text=True,
            spellings=("--top_p",),
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Field(ge=-1),
        Option(
            help="Sample from this many most probable tokens; 0 or -1: from all.",
            decides_text=True,
            spellings=("--top_k",),
        ),
    ] = 0
    min_p: Annotated[
        float,
        Field(ge=0.0, le=1.0),
        Option(
            help="Sample from tokens of at least this share of the best one's probability; 0: from all.", decides_text=True
        ),
    ] = 0.0
    seed: Annotated[
        int,
        Field(ge=0, lt=1 << 63),
        Option(help="The job's seed, from which a row's seed is derived.", decides_text=True),
    ] = 0


class SpeculationOptions(OptionModel):
    """Speculation"""

    draft: Annotated[
        Name,
        Option(
            help="A draft model (also MODEL+lookup, MODEL+suffix); mtp: the target's own layer for multi-token prediction; "
            "model: the usual one of the target's family; auto: model+suffix (bench: model); lookup, suffix: candidates "
            "from texts alone; none: plain decoding.",
            decides_text=False,
            spellings=("--assistant-model", "--assistant_model"),
            metavar="DRAFT",
            switches=(ASSISTED,),
        ),
    ] = "auto"
    draft_precision: Annotated[
        Precision,
        Option(
            help="As --precision, of the draft; auto: w4a8 beside a target of four bits, else w8a8; --engine hf: its own.",
            decides_text=False,
            spellings=("--draft_precision",),
        ),
    ] = "auto"
    draft_tokens: Annotated[
        DraftTokens,
        Option(
            help="Candidates for each row in a round: a number (6 is classic), or auto: as many as pay.", decides_text=False
        ),
    ] = "auto"
    draft_confidence: Annotated[
        float,
        Field(ge=0.0, lt=1.0),
        Option(
            help="End a row's candidates before the first whose estimated chance of acceptance is below this; 0: never.",
            decides_text=False,
        ),
    ] = 0.0
    draft_learns: Annotated[
        bool,
        Option(
            help="Correct the draft's logits by what the target chose instead of its guesses; no text depends on it.",
            decides_text=False,
        ),
    ] = True
    draft_shortlist: Annotated[
        Shortlist,
        Option(
            help="Compute the draft's logits of this many tokens only, those of the job's texts; 0: of all; "
            "auto: of a quarter of a large vocabulary.",
            decides_text=False,
        ),
    ] = "auto"
    runners_up: Annotated[
        bool,
        Option(
            help="Where a pass has room, verify the draft's second choice too, in place of an uncertain candidate.",
            decides_text=False,
        ),
    ] = True
    small_draft_cache: Annotated[
        bool,
        Option(
            help="Keep keys and values of a w4a8 or w8a8 draft in 8 bits, else in 16; no text depends on it.",
            decides_text=False,
        ),
    ] = True
    draft_deadline: Annotated[
        float,
        # In milliseconds it is a number of 32 bits.
        Field(gt=0.0, le=1e6),
        Option(help="Seconds that a round waits for the draft; then it goes on without candidates.", decides_text=False),
    ] = 5.0
    answer_tokens: Annotated[
        int,
        Field(ge=0, le=1 << 26),
        Option(
            help="Most tokens of other rows' answers in which suffix searches, on each replica; 0: a row's own text alone.",
            decides_text=False,
        ),
    ] = 1 << 21
    batch: Annotated[
        int, Field(ge=1, le=4096), Option(help="Most rows that a replica decodes at once.", decides_text=False)
    ] = 8
    prefix_tokens: Annotated[
        int,
        Field(ge=0),
        Option(
            help="Most prompt tokens of ended rows that are kept for rows with the same prefix; 0: rows share no prefix.",
            decides_text=False,
        ),
    ] = 4096


class UnitOptions(OptionModel):
    """Cores"""

    per: Annotated[
        Per,
        Option(
            help="What one replica gets: a NUMA node, a socket or the whole machine; auto: the smallest that holds it.",
            decides_text=False,
        ),
    ] = "auto"


class PlacementOptions(OptionModel):
    """Replicas and devices"""

    replicas: Annotated[
        int | None,
        Field(ge=1, le=4096),
        Option(help="Pairs of target and draft [default: one for each unit of --per].", decides_text=False),
    ] = None
    layout: Annotated[
        Layout,
        Option(
            help="shared: draft and target on the same cores, in turn; split: the draft has its own; auto: the faster.",
            decides_text=False,
        ),
    ] = "auto"
    draft_cores: Annotated[
        int | None,
        Field(ge=1),
        Option(
            help="Cores for the draft alone (--layout split) [default: with split, one core in eight].",
            decides_text=False,
        ),
    ] = None
    devices: Annotated[
        str,
        Option(
            help="Devices of the target and, after a comma, of the draft, such as cuda:0,cpu [default: the CPU].",
            decides_text=False,
        ),
    ] = ""


class WaitingOptions(OptionModel):
    """Other runs on this machine"""

    wait_for_cores: Annotated[
        float,
        Field(ge=0.0),
        Option(help="Seconds to wait for cores that other runs hold; then the run is given up.", decides_text=False),
    ] = 3600.0


class Options(
    ComputedModel, StartOptions, SamplingOptions, SpeculationOptions, UnitOptions, PlacementOptions, WaitingOptions
):
    """Which models, how they are run and how they choose: what every command that runs a pair of models has."""

    def check(self) -> None:
        super().check()
        split_draft(self.draft)
        if idle := self.asked_of_a_draft(idle_without_draft(self.draft, self.draft_tokens)):
            raise UsageError(f"{idle[0]}: no draft model runs: leave it out, or name a draft")
        if not keeps_answers(self.draft) and self.asked_of_a_draft(("answer_tokens",)):
            raise UsageError("--answer-tokens: only suffix keeps answers: leave it out, or name a draft with +suffix")
        if self.draft == "suffix" and self.draft_tokens != "auto" and self.draft_tokens > MOST_FOUND:
            raise UsageError(
                f"--draft-tokens: suffix finds {MOST_FOUND} candidates for a row at most, got {self.draft_tokens}; "
                f"ask for {MOST_FOUND}, or name a draft"
            )

    def asked_of_a_draft(self, names: Iterable[str]) -> list[str]:
        """The flags of those of these options that are set to something that needs a draft."""
        found = []
        for name in sorted(names):
            value, flag = getattr(self, name), flag_of(type(self), name)
            if value != type(self).model_fields[name].default and value not in OF_A_DRAFT[name]:
                found.append(flag.replace("--", "--no-", 1) if value is False else flag)
        return found

    @classmethod
    def overruled(cls, given: Mapping[str, Any]) -> frozenset[str]:
        draft = given.get("draft")
        idle = idle_without_draft(draft, given.get("draft_tokens"))
        # A value that is not a text is refused later.
        return idle if not isinstance(draft, str) or keeps_answers(draft) else idle | {"answer_tokens"}
