"""Every option of the commands, each declared once: sections that several commands share, and what is a command's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from outrider.runner.option import Option, OptionModel, Switch, build_options, flag_of
from outrider.runner.template import Template
from outrider.workers.errors import UsageError
from outrider.workers.models.draft_names import MOST_FOUND, split_draft

Engine = Literal["auto", "native", "hf"]
Precision = Literal[
    "auto",
    "fp32",
    "bf16",
    "fp16",
    "w8a8",
    "w8af32",
    "w4a8",
    "w4abf16",
    "w4a8:g128",
    "w4a8:g64",
    "w4a8:g32",
    "w4abf16:g128",
    "w4abf16:g64",
    "w4abf16:g32",
]
# As --help lists them.
PRECISIONS = "fp32, bf16, fp16 (hf), w8a8, w8af32, w4a8 and w4abf16 (these two also with :g128, :g64 or :g32)"
CachePrecision = Literal["auto", "int8"]
Format = Literal["auto", "jsonl", "text"]
InputFormat = Literal["auto", "jsonl", "text", "csv", "parquet", "arrow"]
Method = Literal["auto", "rtn", "awq", "gptq", "smoothquant"]
Per = Literal["auto", "node", "socket", "machine"]
Layout = Literal["auto", "split", "shared"]
MOST_DRAFT_TOKENS = 64
MOST_SHORTLISTED = 1 << 24
NO_DRAFT = "none"
# A file that is called so holds options, unless it is said what its lines are.
CONFIG_SUFFIXES = (".yaml", ".yml")
# These propose without a draft model.
FROM_TEXTS = ("lookup", "suffix")
# What asks something of a draft model, with the values beside the usual one that ask nothing.
OF_A_DRAFT: dict[str, tuple[object, ...]] = {
    "draft_precision": (),
    "draft_tokens": (0,),
    "draft_confidence": (),
    "draft_learns": (),
    "draft_shortlist": (0,),
    "draft_deadline": (),
    "draft_cores": (),
    "layout": ("shared",),
    "runners_up": (),
    "small_draft_cache": (),
    "answer_tokens": (),
}
# Candidates that are found in texts are counted, too.
OF_A_MODEL_ALONE = frozenset(OF_A_DRAFT) - {"draft_tokens", "answer_tokens"}


def idle_without_draft(draft: object, draft_tokens: object) -> frozenset[str]:
    """The options that have no effect where these two say that no draft model runs."""
    if draft == NO_DRAFT or draft_tokens == 0:
        return frozenset(OF_A_DRAFT)
    return OF_A_MODEL_ALONE if draft in FROM_TEXTS else frozenset()


def keeps_answers(draft: str) -> bool:
    """Does this draft look in what other rows wrote?"""
    return draft in ("auto", "suffix") or draft.endswith("+suffix")


def _named(value: object) -> object:
    """A name or a path that somebody gave."""
    if isinstance(value, str | Path) and (not str(value) or "\0" in str(value)):
        raise ValueError("be a name that is not empty and holds no NUL")
    return value


def _number_or_auto(most: int) -> Callable[[object], object]:
    def read(value: object) -> object:
        if value == "auto":
            return value
        if not isinstance(value, bool):
            with suppress(TypeError):
                number = index(value)  # type: ignore[arg-type]  # numpy's whole numbers, too
                if 0 <= number <= most:
                    return number
        if isinstance(value, str) and value.isdecimal() and len(value) <= len(str(most)):
            return read(int(value))
        raise ValueError(f'be a whole number from 0 to {most:,}, or "auto"')

    return read


def _bits(value: int | None) -> int | None:
    if value not in (None, 4, 8):
        raise ValueError("be 4 or 8")
    return value


def _template(value: str | None) -> str | None:
    if value is not None:
        Template.parse(value)
    return value


def _carried(value: str) -> str:
    if not all(name.strip() for name in value.split(",")):
        raise ValueError("be all, none, or names of columns with commas between them")
    return value


def _hostname(value: str) -> str:
    """As the Host header of a request can have it, in front of its port."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?", value):
        raise ValueError(
            "be a name of letters, digits, - and . alone, such as batch.example.org (no http://, port or path)"
        )
    return value


Name = Annotated[str, BeforeValidator(_named)]
NamedPath = Annotated[Path, BeforeValidator(_named)]
DraftTokens = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto(MOST_DRAFT_TOKENS))]
Shortlist = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto(MOST_SHORTLISTED))]

ASSISTED = Switch(
    "assisted",
    ("--assisted/--no-assisted", "--assisted_generation"),
    "--no-assisted is --draft none.",
    default=True,
    value=NO_DRAFT,
    conflict="--no-assisted runs without a draft, --draft {} with one: leave out one",
)
# What those who sample without saying how warm have always got.
DO_SAMPLE = Switch(
    "do_sample",
    ("--do-sample", "--do_sample"),
    "Temperature 1, where --temperature is not given.",
    default=False,
    value=1.0,
)


class ModelOptions(OptionModel):
    """The model"""

    model: Annotated[
        Name,
        Option(
            help="Target: directory, hub id, short name or 'pocket'.",
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
            help="int8: target's keys and values in 8 bits (native engine), half the bytes, other texts; auto: 16 or 32.",
            decides_text=True,
        ),
    ] = "auto"
    # Only the hf engine has both, and which engine it is stands in the identity.
    fast_attention: Annotated[
        bool,
        Option(
            help="--no-fast-attention: eager attention, on the hf engine.",
            decides_text=False,
            spellings=("--fast_attention",),
        ),
    ] = True
    # Where it changes a bit, the numeric path says so, and a job that goes on is held to that.
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
    """Sampling"""

    temperature: Annotated[
        float,
        Field(ge=0.0, le=100.0),
        Option(help="0 is greedy; a row's own value replaces it.", decides_text=True, switches=(DO_SAMPLE,)),
    ] = 0.0
    top_p: Annotated[
        float,
        Field(gt=0.0, le=1.0),
        Option(help="1 is off; a row's own value replaces it.", decides_text=True, spellings=("--top_p",)),
    ] = 1.0
    top_k: Annotated[
        int,
        Field(ge=-1),
        Option(help="0 or -1 is off; a row's own value replaces it.", decides_text=True, spellings=("--top_k",)),
    ] = 0
    min_p: Annotated[
        float, Field(ge=0.0, le=1.0), Option(help="0 is off; a row's own value replaces it.", decides_text=True)
    ] = 0.0
    seed: Annotated[
        int,
        Field(ge=0, lt=1 << 63),
        Option(help="Rows that have no seed of their own derive one from it.", decides_text=True),
    ] = 0


class SpeculationOptions(OptionModel):
    """Speculation"""

    draft: Annotated[
        Name,
        Option(
            help="A draft model (also MODEL+lookup, MODEL+suffix); model: the usual one of the target's family; auto: "
            "model+suffix (bench: model); lookup, suffix: candidates from texts alone; none: plain decoding.",
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
            help="End a row's candidates before one whose estimated chance of being accepted is below this (0: never).",
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
            help="Most tokens for which the draft computes logits, those of the job's texts; 0: its whole vocabulary; "
            "auto: a quarter of a large one.",
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
        Field(gt=0.0),
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
        Option(help="Pairs of target and draft [default: one a unit of --per].", decides_text=False),
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
            help="Cores of the draft's own, which splits the layout [default of split: one core in eight].",
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
        """Those of these options that ask something of a draft, as the command line spells them."""
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
        # What is no text is refused as such.
        return idle if not isinstance(draft, str) or keeps_answers(draft) else idle | {"answer_tokens"}


class ColumnOptions(OptionModel):
    """Columns of the input"""

    prompt_column: Annotated[
        Name | None,
        Option(help="The column that holds the prompts [default: prompt, or messages].", decides_text=True, metavar="NAME"),
    ] = None
    template: Annotated[
        Name | None,
        AfterValidator(_template),
        Option(
            help="Make each prompt from columns, such as 'Summarise: {text}'; {{ and }} are braces.",
            decides_text=True,
            metavar="TEXT",
        ),
    ] = None
    chat: Annotated[
        bool,
        Option(
            help="Put each prompt into the model's chat template, as a message of the user; otherwise it stands as it is.",
            decides_text=True,
        ),
    ] = False
    # It decides what stands in results beside the texts, which two runs of one job have to agree on.
    carry: Annotated[
        str,
        AfterValidator(_carried),
        Option(
            help="Columns to copy to the results: all, none or NAME,NAME; auto: all that are not parameters of a row.",
            decides_text=True,
            metavar="COLUMNS",
        ),
    ] = "auto"
    split: Annotated[
        Name | None,
        Option(
            help="Which split of a dataset's directory, such as train; needed where it has several.",
            decides_text=True,
            metavar="NAME",
        ),
    ] = None

    def check_new(self) -> None:
        """Refuse what older versions began jobs with, which go on as they were begun: with the template."""
        if self.prompt_column is not None and self.template is not None:
            raise UsageError("--prompt-column and --template both say what the prompt is: leave out one")


class JobSpec(ColumnOptions, Options):
    """The job"""

    input: Annotated[
        NamedPath,
        Option(
            help="OpenAI batch JSONL, plain JSONL, text with a prompt a line, CSV (all .gz or .zst, too), Parquet, Arrow, "
            "or the directory of a dataset. - is standard input.",
            decides_text=True,
            metavar="INPUT",
            positional=True,
            if_missing="name a file of prompts",
        ),
    ]
    out: Annotated[
        NamedPath | None,
        Option(
            help="Job directory [default: INPUT's name and -job].", decides_text=False, spellings=("-o",), metavar="DIR"
        ),
    ] = None
    format: Annotated[
        InputFormat, Option(help="auto (by name and content), jsonl, text, csv, parquet or arrow.", decides_text=True)
    ] = "auto"
    skip_bad: Annotated[
        bool, Option(help="Bad rows become error records; otherwise one bad row refuses the input.", decides_text=True)
    ] = False
    max_tokens: Annotated[
        int, Field(ge=1), Option(help="Most new tokens of a row, where the row does not say.", decides_text=True)
    ] = 128
    min_tokens: Annotated[
        int, Field(ge=0), Option(help="Tokens before a row may end, where the row does not say.", decides_text=True)
    ] = 0
    ignore_eos: Annotated[
        bool, Option(help="Go on after the model's end tokens; otherwise a row ends at one.", decides_text=True)
    ] = False
    trace: Annotated[
        NamedPath | None,
        Option(
            help="Write a timeline of all processes to this file, for ui.perfetto.dev.", decides_text=False, metavar="FILE"
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        Field(ge=1, le=65535),
        Option(
            help="Serve Prometheus metrics at this port of 127.0.0.1 while the job runs [default: none are served].",
            decides_text=False,
        ),
    ] = None
    on_end: Annotated[
        Name | None,
        Option(
            help="Shell command to run when the job ends, however it ends, with $OUTRIDER_JOB and $OUTRIDER_EXIT.",
            decides_text=False,
            metavar="COMMAND",
        ),
    ] = None
    address: Annotated[
        Name | None,
        Option(
            help="Run on a Ray cluster: auto (the one that this host is in) or HOST:PORT [default: on this host alone].",
            decides_text=False,
            metavar="WHERE",
        ),
    ] = None
    share_cores: Annotated[
        bool,
        Option(
            help="Share cores with other replicas, and with runs that have this option: slow, for trials.",
            decides_text=False,
        ),
    ] = False

    def check_new(self) -> None:
        super().check_new()
        if self.format == "auto" and self.input.suffix.lower() in CONFIG_SUFFIXES:
            raise UsageError(
                f"INPUT: {self.input} is called like a file of options: give it as --config {self.input}, or with "
                "--format text where its lines are prompts"
            )


class BenchSpec(Options):
    """The benchmark"""

    task: Annotated[
        Literal["decode", "benchmark", "benchmark_code", "quantize"],
        Option(
            help="decode: ten short prompts. benchmark: prompts by length. benchmark_code: beginnings of Python functions. "
            "quantize: make a smaller checkpoint, as outrider quantize does.",
            decides_text=True,
        ),
    ] = "decode"
    algorithm: Annotated[
        Method,
        Option(help="Of --task quantize; auto: the best of them, layer by layer.", decides_text=False),
    ] = "auto"
    out: Annotated[
        NamedPath | None,
        Option(
            help="Of --task quantize: directory of the new checkpoint.",
            decides_text=False,
            spellings=("-o",),
            metavar="DIR",
        ),
    ] = None
    calibration: Annotated[
        NamedPath | None,
        Option(help="Of --task quantize: text to calibrate on [default: our own].", decides_text=False, metavar="FILE"),
    ] = None
    lengths: Annotated[
        tuple[int, ...],
        Option(help="Prompt lengths of --task benchmark, such as 256,512 [default: 256,512,1024,1968].", decides_text=True),
    ] = ()
    new_tokens: Annotated[
        tuple[int, ...],
        Option(
            help="New tokens for each prompt, such as 64,128 [default: decode 30; benchmark 64 to 1024, 60 behind long "
            "prompts; benchmark_code 128].",
            decides_text=True,
            spellings=("--max_new_tokens",),
        ),
    ] = ()
    compare: Annotated[
        bool,
        Option(
            help="Measure plain and assisted in turn, with the speed-up; otherwise assisted alone (--no-assisted: plain).",
            decides_text=False,
        ),
    ] = False
    # As the older tables' answers did.
    stop_at_end: Annotated[
        bool,
        Option(
            help="Let an end token end an answer before --new-tokens; otherwise end tokens are ignored.", decides_text=True
        ),
    ] = False
    repeat: Annotated[
        int,
        Field(ge=1, le=1000),
        Option(help="Measurements of each example; the median one is shown.", decides_text=False),
    ] = 1
    json_file: Annotated[
        Path | None,
        Option(help="Write everything measured to this file.", decides_text=False, flag="--json", metavar="FILE"),
    ] = None
    plot: Annotated[Path | None, Option(help="Draw a chart: FILE.svg or FILE.png.", decides_text=False, metavar="FILE")] = (
        None
    )
    # One pair, and one row at a time.
    replicas: Annotated[
        int | None, Field(ge=1, le=4096), Option(help="One pair is measured.", decides_text=False, on_command_line=False)
    ] = None
    batch: Annotated[
        Literal[1], Option(help="One row at a time is measured.", decides_text=False, on_command_line=False)
    ] = 1
    # Prompts come more than once here, and what was written for one must not be there already.
    answer_tokens: Annotated[
        Literal[0], Option(help="No answer knows another.", decides_text=False, on_command_line=False)
    ] = 0
    draft_learns: Annotated[
        Literal[False], Option(help="The draft does not learn.", decides_text=False, on_command_line=False)
    ] = False
    # Each time at their full cost.
    prefix_tokens: Annotated[
        Literal[0], Option(help="Prompts are read at their full cost.", decides_text=False, on_command_line=False)
    ] = 0
    # Packing a large model for the first time takes minutes.
    start_deadline: Annotated[
        float, Field(gt=0.0), Option(help="Seconds that a model may take to load.", decides_text=False)
    ] = 3600.0

    @field_validator("lengths", "new_tokens")
    @classmethod
    def _counts(cls, counts: tuple[int, ...]) -> tuple[int, ...]:
        if any(count < 1 for count in counts):
            raise ValueError("must be whole numbers from 1 on")
        return counts


class ScoreSpec(ComputedModel, UnitOptions, WaitingOptions):
    """The score"""

    input: Annotated[
        NamedPath,
        Option(
            help="Rows in lines of JSON (the prompts are scored), or one text; .gz and .zst, too.",
            decides_text=False,
            metavar="INPUT",
            positional=True,
            if_missing="name a file of text, or of rows",
        ),
    ]
    format: Annotated[Format, Option(help="auto, jsonl (rows) or text (the whole file is one).", decides_text=False)] = (
        "auto"
    )
    skip_bad: Annotated[bool, Option(help="Leave bad rows out.", decides_text=False)] = False
    against: Annotated[
        Name | None,
        Option(help="Compare with this model, which has the same tokens.", decides_text=False, metavar="MODEL"),
    ] = None
    against_precision: Annotated[
        Precision,
        Option(
            help="Precision of the --against model; without one, compare with the same model in this precision.",
            decides_text=False,
        ),
    ] = "auto"
    window: Annotated[
        int | None,
        Field(ge=2),
        Option(help="Tokens of a window [default: 2048, or the model's context where that is less].", decides_text=False),
    ] = None
    stride: Annotated[
        int | None,
        Field(ge=1),
        Option(
            help="Tokens from one window's beginning to the next's [default: --window, so that none overlap].",
            decides_text=False,
        ),
    ] = None
    most_tokens: Annotated[
        int | None, Field(ge=1), Option(help="Stop after so many scored tokens [default: score all].", decides_text=False)
    ] = None


class ServeSpec(Options):
    """The server"""

    data: Annotated[
        NamedPath,
        Option(
            help="Directory of files and batches; a server that is started with it again goes on with them.",
            decides_text=False,
            metavar="DIR",
        ),
    ] = Path("outrider-data")
    # On the command line by name and repeated: -m name=path.
    models: Annotated[
        dict[str, Name],
        Option(help="The models by the names that clients call them.", decides_text=False, on_command_line=False),
    ] = Field(default_factory=dict)
    model: Annotated[Name, Option(help="See models.", decides_text=False, on_command_line=False)] = "pocket"
    host: Annotated[Name, Option(help="The address to listen at.", decides_text=False, metavar="ADDRESS")] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535), Option(help="The port to listen at; 0: a free one.", decides_text=False)
    ] = 8000
    hostname: Annotated[
        tuple[Annotated[str, AfterValidator(_hostname)], ...],
        Option(
            help="Host names that clients use, such as batch.example.org,b.lan; requests under others are refused.",
            decides_text=False,
        ),
    ] = ()
    api_key_file: Annotated[
        NamedPath | None,
        Option(
            help="The keys that clients may use, one a line [default: one is made, in api-key under --data].",
            decides_text=False,
            metavar="FILE",
        ),
    ] = None
    most_upload: Annotated[int, Field(ge=1, le=1 << 20), Option(help="Largest upload, in MiB.", decides_text=False)] = 2048
    turn: Annotated[
        float,
        Field(gt=0.0),
        Option(help="Seconds that a model keeps the machine while another one's batches wait.", decides_text=False),
    ] = 600.0
    max_tokens: Annotated[
        int, Field(ge=1), Option(help="Most new tokens of a row, where the row does not say.", decides_text=True)
    ] = 128


class QuantizeSpec(ModelOptions, UnitOptions, WaitingOptions):
    """The new checkpoint"""

    # Both must be given; quantize says so.
    out: Annotated[
        NamedPath | None,
        Option(
            help="Directory of the new checkpoint.",
            decides_text=False,
            spellings=("-o",),
            metavar="DIR",
        ),
    ] = None
    bits: Annotated[
        int | None,
        AfterValidator(_bits),
        Option(help="4: int4 weights. 8: int8 weights, for int8 activations.", decides_text=False),
    ] = None
    method: Annotated[
        Method,
        Option(help="awq is for 4 bits, smoothquant for 8; auto: the best, layer by layer.", decides_text=False),
    ] = "auto"
    group: Annotated[
        int | None,
        Field(ge=8, le=1024),
        Option(
            help="Weights that share a scale, with --bits 4 [default: the largest up to 32 that divides all widths].",
            decides_text=False,
        ),
    ] = None
    calibration: Annotated[
        NamedPath | None,
        Option(
            help="Text to calibrate on: rows in lines of JSON, or one text [default: our own].",
            decides_text=False,
            metavar="FILE",
        ),
    ] = None
    format: Annotated[Format, Option(help="Of --calibration: auto, jsonl (rows) or text (one).", decides_text=False)] = (
        "auto"
    )
    skip_bad: Annotated[bool, Option(help="Leave bad rows of --calibration out.", decides_text=False)] = False


class TopologySpec(UnitOptions, PlacementOptions):
    """The machine"""

    sysfs: Annotated[
        NamedPath | None,
        Option(
            help="Directory with a saved /sys of another machine, to be shown instead of this one.",
            decides_text=False,
            metavar="DIR",
        ),
    ] = None
    plan: Annotated[
        bool, Option(help="Show too which actor would get which cores; nothing is downloaded for it.", decides_text=False)
    ] = False
    model: Annotated[
        Name | None,
        Option(
            help="Target of --plan: directory, hub id, short name or 'pocket'.",
            decides_text=False,
            spellings=("-m",),
            metavar="MODEL",
        ),
    ] = None
    precision: Annotated[Precision, Option(help="Target's precision, as outrider run takes it.", decides_text=False)] = (
        "auto"
    )
    draft: Annotated[
        Name, Option(help="Draft of --plan, as outrider run takes it.", decides_text=False, metavar="DRAFT")
    ] = "auto"
    draft_precision: Annotated[
        Precision, Option(help="Draft's precision, as outrider run takes it.", decides_text=False)
    ] = "auto"
    cache_precision: Annotated[
        CachePrecision, Option(help="Precision of keys and values, as outrider run takes it.", decides_text=False)
    ] = "auto"
    batch: Annotated[
        int, Field(ge=1, le=4096), Option(help="Rows at once on a replica, as outrider run takes it.", decides_text=False)
    ] = 8
    model_bytes: Annotated[
        int | None, Field(ge=0), Option(help="Size of the target's weights in bytes, instead of -m.", decides_text=False)
    ] = None
    draft_bytes: Annotated[
        int | None,
        Field(ge=0),
        Option(
            help="Size of the draft's weights in bytes, beside --model-bytes; without it there is no draft.",
            decides_text=False,
        ),
    ] = None
    kv_bytes: Annotated[
        int | None,
        Field(ge=0),
        Option(
            help="Size of the target's KV cache in bytes [default: with -m that of the rows' first tokens, else 0].",
            decides_text=False,
        ),
    ] = None
    draft_kv_bytes: Annotated[
        int | None,
        Field(ge=0),
        Option(help="Size of the draft's KV cache in bytes; its default alike.", decides_text=False),
    ] = None
    ray_resources: Annotated[bool, Option(help="Print the JSON for ray start --resources.", decides_text=False)] = False
    ray_folder: Annotated[
        bool,
        Option(help="Print the folder for ray start --temp-dir: nobody else can enter it.", decides_text=False),
    ] = False
    ray_labels: Annotated[bool, Option(help="Print the labels for ray start --labels.", decides_text=False)] = False


def build_spec(options: Mapping[str, Any], config_file: Path | None = None) -> JobSpec:
    return build_options(JobSpec, options, config_file)
