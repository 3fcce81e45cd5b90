"""Declarations of options, from which command line, YAML keys, Python interface and a job's identity are made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from outrider.runner.small_file import read_small
from outrider.runner.validation_errors import must, shown
from outrider.workers.errors import UsageError, first_line

AnyOptions = TypeVar("AnyOptions", bound="OptionModel")


@dataclass(frozen=True, slots=True)
class Switch:
    """A flag that stands for one value of an option, for compatibility with the older tools."""

    name: str
    flags: tuple[str, ...]
    help: str
    default: bool
    # The option's value when the switch is not at its default.
    value: Any
    # The error if the option is given too, with another value ({}). Without this sentence the option's value holds.
    conflict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The annotation of a field of an ``OptionModel``; bounds are pydantic's, beside it."""

    help: str
    # Whether a row's text depends on it: then it is part of the job's identity, and a resumed job must have the same value.
    decides_text: bool
    # Further flags: short ones, and those of the older tools.
    spellings: tuple[str, ...] = ()
    # The flag, if it is not the field's name with hyphens.
    flag: str = ""
    metavar: str | None = None
    # An argument without a flag, and what to do if it is missing.
    positional: bool = False
    if_missing: str = ""
    # False: only in configuration files and in Python.
    on_command_line: bool = True
    switches: tuple[Switch, ...] = ()


class OptionModel(BaseModel):
    """A section of options or a command's own, frozen and strict. Its docstring heads the section in ``--help``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        flags: dict[str, str] = {}
        for name, field in cls.model_fields.items():
            if sum(isinstance(each, Option) for each in field.metadata) != 1:
                raise TypeError(
                    f"{cls.__name__}.{name} needs one Option, which says its help and whether it decides a text"
                )
            if not option_of(field).help:
                raise TypeError(f"{cls.__name__}.{name} says nothing for --help")
            for flag in (flag_of(cls, name), *option_of(field).spellings):
                if (other := flags.setdefault(flag, name)) != name:
                    raise TypeError(f"{cls.__name__}.{name} and {other} are both {flag}")

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number: YAML reads ``yes`` as true, and Python takes True for 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kind = cls.model_fields[info.field_name].annotation
            kinds = {*(get_args(kind) or [kind])} - {type(None)}
            if kinds in ({int}, {float}):
                raise ValueError("be a whole number" if int in kinds else "be a number")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_bytes_for_a_text(cls, value: Any) -> Any:
        """Refuse bytes, which pydantic would decode."""
        if isinstance(value, bytes):
            raise ValueError("be a text")
        return value

    def check(self) -> None:
        """Refuse combinations of options that do not go together."""

    @classmethod
    def overruled(cls, given: Mapping[str, Any]) -> frozenset[str]:
        """Options of a configuration file that have no effect beside the given ones, and are ignored."""
        return frozenset()


def option_of(field: FieldInfo) -> Option:
    return next(each for each in field.metadata if isinstance(each, Option))


def flag_of(kind: type[OptionModel], name: str) -> str:
    """A field's flag on the command line."""
    option = option_of(kind.model_fields[name])
    return name.upper() if option.positional else option.flag or f"--{name.replace('_', '-')}"


def takes_path(field: FieldInfo) -> bool:
    """Whether an option is a file or a directory."""
    return _has_path(field.annotation)


def _has_path(annotation: Any) -> bool:
    return annotation is Path or any(map(_has_path, get_args(annotation)))


def home_read(path: Any) -> Any:
    """A path with ~ expanded, which no shell has done."""
    return os.path.expanduser(path) if isinstance(path, str) else path  # noqa: PTH111  (Path's raises for an unknown user)


def deciding(kind: type[OptionModel]) -> list[str]:
    """The options on which a row's text depends."""
    return [name for name, field in kind.model_fields.items() if option_of(field).decides_text]


def sections(kind: type[OptionModel]) -> dict[type[OptionModel], list[str]]:
    """The names of all options by the class that declares them; the command's own section comes first."""
    classes = [each for each in kind.__mro__ if issubclass(each, OptionModel)]
    found: dict[type[OptionModel], list[str]] = {each: [] for each in classes}
    for name in kind.model_fields:
        found[next(each for each in reversed(classes) if name in each.model_fields)].append(name)
    return {each: names for each, names in found.items() if names}


def build_options(
    kind: type[AnyOptions],
    options: Mapping[str, Any],
    config_file: Path | None = None,
    not_in_file: Set[str] = frozenset(),
) -> AnyOptions:
    """A model of options: given ones override those of a file, which override the defaults.

    ``not_in_file``: options that the calling program sets itself; the file must not have them.
    """
    if unknown := sorted(options.keys() - kind.model_fields.keys()):
        known = sorted(name for name, field in kind.model_fields.items() if not option_of(field).positional)
        raise UsageError(f'unknown option "{unknown[0]}"; known are {", ".join(known)}')
    from_file = {} if config_file is None else _options_of(kind, config_file)
    if twice := sorted(not_in_file & from_file.keys()):
        raise UsageError(f"{config_file}: {twice[0]} is given by the program that reads this file; leave it out")
    for name in kind.overruled(options):
        from_file.pop(name, None)
    try:
        made = kind(**{**from_file, **options})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        if first["type"] == "missing":
            raise UsageError(f"{flag_of(kind, name)} is missing: {option_of(kind.model_fields[name]).if_missing}") from None
        of_file = name in from_file and name not in options
        where = f"{config_file}: {name}" if of_file else flag_of(kind, name)
        raise UsageError(f"{where}: {must(first, of_python=not of_file)}") from None
    made.check()
    return made


def apply_switch(switch: Switch, name: str, options: dict[str, Any]) -> None:
    """Set a switch's option to the switch's value if it is not given; an error if it conflicts."""
    if switch.conflict and options.get(name, switch.value) != switch.value:
        raise UsageError(switch.conflict.format(options[name]))
    options.setdefault(name, switch.value)


def _options_of(kind: type[OptionModel], path: Path) -> dict[str, Any]:
    """A file's options by field name. Its keys are the flags of options and switches without hyphens."""
    content = _read_config(path)
    fields = {name: option_of(field) for name, field in kind.model_fields.items()}
    names = {name: name for name in fields} | {
        each.flag.removeprefix("--"): name for name, each in fields.items() if each.flag
    }
    switches = {switch.name: (switch, name) for name, option in fields.items() for switch in option.switches}
    known = names.keys() | switches.keys()
    if unknown := sorted(content.keys() - known):
        raise UsageError(f'{path}: unknown key "{unknown[0]}"; known are {", ".join(sorted(known))}')
    options = {
        names[key]: home_read(value) if takes_path(kind.model_fields[names[key]]) else value
        for key, value in content.items()
        if key in names
    }
    for key, (switch, name) in switches.items():
        value = content.get(key, switch.default)
        if type(value) is not bool:
            raise UsageError(f"{path}: {key}: must be true or false, got {shown(value)}")
        if value != switch.default:
            apply_switch(switch, name, options)
    return options


class _UniqueKeys(yaml.SafeLoader):
    """Refuses repeated keys, which YAML forbids but its loaders accept, taking the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f'the key "{key.value}" stands twice', key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(read_small(path).decode(), _UniqueKeys)
    except OSError as error:
        raise UsageError(f"--config: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--config: {path} is not UTF-8 (byte {error.start + 1}); convert the file to UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"--config: {path} is not valid YAML: {first_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config: {path} must hold keys and values")
    named: dict[str, Any] = {}
    for key in content:
        name = str(key).replace("-", "_")
        if name in named:
            raise UsageError(f'{path}: the key "{name}" stands twice, as {named[name]} and {key}; leave out one')
        named[name] = key
    return {name: content[key] for name, key in named.items()}
