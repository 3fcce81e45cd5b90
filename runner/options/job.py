"""The options of a job: outrider run and outrider.Job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from outrider.runner.options.option import Option, OptionModel, build_options
from outrider.runner.options.shared import Options
from outrider.runner.options.values import CONFIG_SUFFIXES, InputFormat, Name, NamedPath
from outrider.runner.template import Template
from outrider.workers.errors import UsageError


def _template(value: str | None) -> str | None:
    if value is not None:
        Template.parse(value)
    return value


def _carried(value: str) -> str:
    if not all(name.strip() for name in value.split(",")):
        raise ValueError("be all, none, or names of columns with commas between them")
    return value


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
    # Carried columns are part of the results, which must be the same when a job is resumed.
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
        """Checks for new jobs only: a job that an older version began with both options goes on with the template."""
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
                f"INPUT: {self.input} has the name of a --config file: give it as --config {self.input}, or with "
                "--format text where its lines are prompts"
            )


def build_spec(options: Mapping[str, Any], config_file: Path | None = None) -> JobSpec:
    return build_options(JobSpec, options, config_file)
