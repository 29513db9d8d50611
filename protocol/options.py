"""One option table for every role: flags, environment variables and a TOML file become one frozen Struct.

A role's options are the fields of a msgspec Struct: the name gives `--max-num-seqs`, `DRAFTHOUSE_MAX_NUM_SEQS` and the
file key `max_num_seqs`; the annotation gives type and limits; `Meta(description=...)` gives the help. Precedence: flag,
environment, file, default. Whatever is unknown, malformed or contradictory is an `OptionsError` of one sentence.
Never keeps state; reads the process's own arguments and environment only in `from_process`, which the entry points call.
"""

import difflib
import math
import os
import re
import sys
import textwrap
import tomllib
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

ENVIRONMENT_PREFIX = "DRAFTHOUSE_"
CONFIG = "config"
EXIT_BAD_OPTIONS = 2

_T = TypeVar("_T", bound=msgspec.Struct)
_SAYS_GOT = re.compile(r", got \w+$")  # msgspec names the type it got; we name the value


class OptionsError(ValueError):
    """What was asked for cannot be run. The message is one sentence that names the option."""


class HelpRequested(Exception):
    """`--help` was given. The message is the help text."""


class Option(msgspec.Struct, frozen=True):
    """One row of the table. `default` is `msgspec.NODEFAULT` where the option must be given."""

    name: str
    type: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


def table(kind: type[msgspec.Struct], without: Iterable[str] = ()) -> dict[str, Option]:
    """The options that the fields of `kind` define, by name."""
    left_out = frozenset(without)
    return {
        field.name: Option(field.name, _limits_inside(field.type), _default(field), _description(field.type))
        for field in msgspec.structs.fields(kind)
        if field.name not in left_out
    }


def parse(
    kind: type[_T],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    program: str,
    secrets: Collection[str] = (),
) -> _T:
    """The options of one role. Raises `OptionsError`, or `HelpRequested`."""
    return build(kind, read(table(kind), arguments, environment, program=program, secrets=secrets))


def read(
    options: Mapping[str, Option],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    program: str,
    secrets: Collection[str] = (),
) -> dict[str, Any]:
    """The values that were given, by name and checked one by one; options left at their default are absent.

    `secrets`: environment variables that are no options and are left alone. A secret has no flag, which every user of the
    machine could read, and never becomes part of a Struct, which somebody could log.
    """
    flags = _read_flags(options, arguments, program)
    given = {name: value for name, value in environment.items() if name not in secrets}
    variables = _read_environment(options, given, program)
    file = flags.pop(CONFIG, None) or variables.pop(CONFIG, None)
    values = _read_file(options, file, program) if file is not None else {}
    for name, text in variables.items():
        values[name] = _convert(options[name], text, options[name].variable)
    for name, text in flags.items():
        values[name] = _convert(options[name], text, options[name].flag)
    for option in options.values():
        if option.default is msgspec.NODEFAULT and option.name not in values:
            raise OptionsError(f"{option.flag} is required ({option.help})")
    return values


def build(kind: type[_T], given: Mapping[str, Any]) -> _T:
    """Construct `kind` from the given values that are its own; its `check_given(names)`, if any, sees contradictions."""
    own = {field.name for field in msgspec.structs.fields(kind)}
    values = {name: value for name, value in given.items() if name in own}
    try:
        options = kind(**values)
        check: Callable[[frozenset[str]], None] | None = getattr(options, "check_given", None)
        if check is not None:
            check(frozenset(values))
    except ValueError as error:
        raise OptionsError(str(error)) from error
    return options


def as_flags(given: Mapping[str, Any]) -> list[str]:
    """Command-line arguments that say the same as `given`, for starting a child process."""
    return [f"--{name.replace('_', '-')}={_render(value)}" for name, value in given.items() if value is not None]


def from_process(kind: type[_T], *, program: str, secrets: Collection[str] = ()) -> _T:
    """The options of this process. On a mistake: one sentence on stderr and exit code 2; on --help: text and 0."""
    try:
        return parse(kind, sys.argv[1:], os.environ, program=program, secrets=secrets)
    except HelpRequested as text:
        sys.stdout.write(str(text))
        raise SystemExit(0) from None
    except OptionsError as error:
        refuse(program, str(error))


def refuse(program: str, sentence: str) -> NoReturn:
    """End the process because of what it was asked to do."""
    sys.stderr.write(f"{program}: {sentence}\n")
    raise SystemExit(EXIT_BAD_OPTIONS)


def help_text(options: Mapping[str, Option], program: str) -> str:
    """The text of --help: every option with its default and environment variable."""
    lines = [f"usage: {program} [options]", "", f"Also by environment variable ({ENVIRONMENT_PREFIX}NAME) and by the"]
    lines += ["keys of a TOML file (--config FILE); a flag wins over the environment, and that over the file.", ""]
    for option in options.values():
        lines.append(f"  {option.flag} {_metavar(option.type)}")
        default = "" if option.default in (None, msgspec.NODEFAULT) else f" (default {_render(option.default)})"
        lines += textwrap.wrap(option.help + default, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join([*lines, "  --config FILE", "        TOML file with options", "  --help", ""])


def show(options: msgspec.Struct) -> str:
    """One line with every option's resolved value, for the start-up log."""
    return " ".join(f"{name}={_render(getattr(options, name))}" for name in options.__struct_fields__)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default


def _limits_inside(annotation: Any) -> Any:
    """`Annotated[int | None, limits]` as `Annotated[int, limits] | None`, which is what msgspec can check."""
    limits = getattr(annotation, "__metadata__", ())
    bare = _bare(annotation)
    if not limits or type(None) not in typing.get_args(annotation.__origin__):
        return annotation
    return typing.Optional[typing.Annotated.__class_getitem__((bare, *limits))]  # type: ignore[attr-defined]  # noqa: UP045


def _description(annotation: Any) -> str:
    for meta in getattr(annotation, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta) and meta.description:
            return meta.description
    return next(filter(None, map(_description, typing.get_args(annotation))), "")


def _read_flags(options: Mapping[str, Option], arguments: Sequence[str], program: str) -> dict[str, str]:
    flags: dict[str, str] = {}
    left = list(reversed(arguments))
    while left:
        argument = left.pop()
        if argument in ("--help", "-h"):
            raise HelpRequested(help_text(options, program))
        if not argument.startswith("--") or argument == "--":
            raise OptionsError(f"unexpected argument {argument!r}: options look like --name value")
        flag, has_value, value = argument.partition("=")
        name = flag[2:].replace("-", "_")
        if (name not in options and name != CONFIG) or "_" in flag:
            raise OptionsError(f"there is no option {flag}{_suggestion(flag, _flags(options))}")
        if name in flags:
            raise OptionsError(f"{flag} is given twice")
        flags[name] = value if has_value else _next_value(options.get(name), flag, left)
    return flags


def _next_value(option: Option | None, flag: str, left: list[str]) -> str:
    """The argument behind a flag; a switch may stand alone."""
    follows = bool(left) and not left[-1].startswith("--")
    if option is not None and _bare(option.type) is bool:
        return left.pop() if follows else "true"
    if not follows:
        raise OptionsError(f"{flag} needs a value")
    return left.pop()


def _read_environment(options: Mapping[str, Option], environment: Mapping[str, str], program: str) -> dict[str, str]:
    names = {option.variable: name for name, option in options.items()} | {ENVIRONMENT_PREFIX + "CONFIG": CONFIG}
    variables: dict[str, str] = {}
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if variable not in names:
            raise OptionsError(
                f"the environment variable {variable} is no option of {program}{_suggestion(variable, names)}"
            )
        variables[names[variable]] = environment[variable]
    return variables


def _read_file(options: Mapping[str, Option], file: str, program: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionsError(f"the configuration file {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise OptionsError(f"the configuration file {file} is not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in options:
            raise OptionsError(f"{key!r} in {file} is no option of {program}{_suggestion(key, options)}")
        values[key] = _convert(options[key], value, f"{key} in {file}")
    return values


def _convert(option: Option, value: Any, source: str) -> Any:
    try:
        converted = msgspec.convert(value, option.type, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        raise OptionsError(f"{source}: {_expectation(option.type, error)}, got {value!r}") from error
    if isinstance(converted, float) and not math.isfinite(converted):
        raise OptionsError(f"{source}: expected a finite number, got {value!r}")
    return converted


def _bare(annotation: Any) -> Any:
    """The type without its limits and without None."""
    if hasattr(annotation, "__metadata__"):
        return _bare(annotation.__origin__)
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    is_optional = len(parts) == 1 and type(None) in typing.get_args(annotation)
    return _bare(parts[0]) if is_optional else annotation


def _metavar(annotation: Any) -> str:
    bare = _bare(annotation)
    if typing.get_origin(bare) is typing.Literal:
        return "|".join(typing.get_args(bare))
    return {bool: "true|false", int: "N", float: "X"}.get(bare, "TEXT")


def _expectation(annotation: Any, error: msgspec.ValidationError) -> str:
    bare = _bare(annotation)
    if typing.get_origin(bare) is typing.Literal:
        return "expected one of " + ", ".join(typing.get_args(bare))
    reason = _SAYS_GOT.sub("", str(error).replace("`", ""))
    return reason[:1].lower() + reason[1:]


def _flags(options: Mapping[str, Option]) -> list[str]:
    return [option.flag for option in options.values()] + ["--config", "--help"]


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def _render(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
