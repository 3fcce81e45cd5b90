"""typer commands made from a pydantic model of options, and the options that a user gave; defaults are the model's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from outrider.runner.options.option import OptionModel, Switch

REST = "Other options"
NUMBERS: dict[Any, str] = {int: "<int>", float: "<float>"}
# With more choices than this, the option's help lists them instead of its metavar.
MOST_CHOICES = 6


def words(text: str) -> str:
    """An option's text. An empty one is refused: most often it is an unset variable of the user's shell."""
    if not text:
        raise typer.BadParameter("must not be empty")
    return text


def path(text: str) -> Path:
    return Path(words(text))


Config = Annotated[Path | None, typer.Option(parser=path, metavar="FILE", help="A YAML file: the options above as keys.")]


class Deferred(TyperCommand):
    """A command whose options are made when it is called, so that other commands do not import pydantic for them."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._command: TyperCommand | None = None
        super().__init__(*arguments, **settings)

    @property
    def params(self) -> list[Any]:
        return self._made().params

    @params.setter
    def params(self, given: list[Any]) -> None:
        """Ignored: typer sets the parameters of the placeholder function, which has none."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._made().make_context(info_name, args, parent=parent, **extra)

    def _made(self) -> TyperCommand:
        if self._command is None:
            assert self.callback is not None
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            app.command(self.name, cls=_InSections, help=self.help)(inspect.unwrap(self.callback)())
            command = typer.main.get_command(app)
            assert isinstance(command, TyperCommand)
            self._command = command
        return self._command


class _InSections(TyperCommand):
    """Its options under the headings of the model's sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        headings: dict[str, str] = getattr(inspect.unwrap(self.callback), "headings", {}) if self.callback else {}
        found: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                argument = parameter.param_type_name == "argument"
                heading = "Arguments" if argument else headings.get(parameter.name or "", REST)
                found.setdefault(heading, []).append(record)
        for heading, records in found.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def with_options(kind: type[OptionModel], call: Callable[..., None]) -> Callable[..., None]:
    """A function with a signature for typer: the options of ``kind``, then ``call``'s own parameters.

    It calls ``call`` with a dict of the options of ``kind`` that were given, and its own parameters by name.
    """
    from outrider.runner.options.option import option_of, sections

    own = list(inspect.signature(call, eval_str=True).parameters.values())[1:]
    parameters: list[inspect.Parameter] = []
    headings: dict[str, str] = {}
    for section, names in sections(kind).items():
        for name in names:
            field = kind.model_fields[name]
            if not option_of(field).on_command_line:
                continue
            made = [_parameter(kind, name), *(_switch(switch) for switch in option_of(field).switches)]
            headings |= {each.name: section.__doc__ or REST for each in made}
            parameters += made

    def command(**values: Any) -> None:
        context: typer.Context = values.pop("context")
        call(given(context, kind), **{each.name: values[each.name] for each in own})

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
    every = [context, *parameters, *own]
    command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in every}
    command.headings = headings  # type: ignore[attr-defined]
    return command


def _parameter(kind: type[OptionModel], name: str) -> inspect.Parameter:
    from outrider.runner.options.option import flag_of, option_of

    field = kind.model_fields[name]
    option, default, asked = option_of(field), field.default, _plain(field.annotation)
    if asked is bool:
        # An option that is on by default has both flags: the positive one overrides a configuration file.
        flags = f"{flag_of(kind, name)}/--no-{name.replace('_', '-')}" if default else flag_of(kind, name)
        return _keyword(name, bool, typer.Option(flags, *option.spellings, help=option.help), default)
    kept: dict[str, Any] = {"help": option.help, "metavar": option.metavar or _choices(field)}
    if asked in NUMBERS:
        # Taken as text: the model parses it, with better error sentences than typer's.
        asked, kept["metavar"] = str, NUMBERS[asked]
    if asked is Path:
        kept["parser"] = path
    elif asked is str and option.metavar is not None:
        kept["parser"] = words
    if option.positional:
        return _keyword(name, asked | None, typer.Argument(**kept), None)
    short = [each for each in option.spellings if not each.startswith("--")]
    long = [each for each in option.spellings if each.startswith("--")]
    info = typer.Option(*short, flag_of(kind, name), *long, **kept)
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return _keyword(name, asked if default is not None else asked | None, info, default)


def _switch(switch: Switch) -> inspect.Parameter:
    return _keyword(switch.name, bool, typer.Option(*switch.flags, help=switch.help), switch.default)


def _keyword(name: str, annotation: Any, info: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info])


def _choices(field: FieldInfo) -> str | None:
    """The choices of a Literal, if they are few."""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return "|".join(choices) if 0 < len(choices) <= MOST_CHOICES else None


def _plain(annotation: Any) -> Any:
    """The type that typer is told. Literals and tuples are text: the model checks them, with better error sentences."""
    if get_origin(annotation) in (Union, UnionType):
        inner = [each for each in get_args(annotation) if each is not type(None)]
        return _plain(inner[0]) if len(inner) == 1 else str
    if get_origin(annotation) in (Literal, tuple):
        return str
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    return annotation


def given(context: typer.Context, kind: type[OptionModel]) -> dict[str, Any]:
    """The options that stand on the command line, by their names, switches translated."""
    from outrider.runner.options.option import apply_switch, option_of

    options: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if name in context.params and _stands_on_command_line(context, name):
            options[name] = _read(field, context.params[name])
    for name, field in kind.model_fields.items():
        for switch in option_of(field).switches:
            if context.params.get(switch.name, switch.default) != switch.default:
                apply_switch(switch, name, options)
    return options


def _read(field: FieldInfo, value: Any) -> Any:
    if isinstance(field.default, tuple):
        return tuple(part.strip() for part in value.split(","))
    for number in NUMBERS:
        if isinstance(value, str) and number in (field.annotation, *get_args(field.annotation)):
            try:
                return number(value)
            except ValueError:  # the model refuses it with a sentence
                return value
    return value


def _stands_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
