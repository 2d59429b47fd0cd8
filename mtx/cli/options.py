"""Command lines from dataclasses: an option is a field, by its path: `--layout.pipe 4`.

All commands share what is here: short aliases, families of models, options that contradict each
other, and one-line errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import tyro

from mtx.errors import UserError, nearest, shown
from mtx.families import NAMES as FAMILIES
from mtx.families import family_module
from mtx.fields import resolve_types

Options = TypeVar("Options")
Command = Callable[[list[str]], int | None]
OwnFields = tyro.conf.arg(name="")  # --steps instead of --run.steps
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]  # --json, without a --no-json
File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
_LAYOUT = "pipe", "tensor", "data", "context", "virtual", "microbatch", "zero", "recompute"
_MODEL = "layers", "hidden", "heads", "sequence"
ALIASES = {name: f"layout.{name}" for name in _LAYOUT} | {name: f"model.{name}" for name in _MODEL}
ALIASES |= {f"lora.{name}": f"model.lora-{name}" for name in ("rank", "alpha", "on")}
ALIASES |= {"dtype": "model.compute-dtype"}  # if a command has no dtype of its own
# Spellings of earlier versions whose last part has changed.
_RETIRED = {"stages": "layout.pipe", "precision": "model.compute-dtype"}
_NAMED = {  # the names before all options, as usages spell them
    "RUN_DIR": "the folder of a training run (its --out)", "FILE": "the files to read",
    "PREFIX": "the prefix of a dataset", "SHELL": "the shell, bash or zsh",
    "SOURCE": "a folder to read", "TARGET": "a folder to make",
}  # fmt: skip


# --- fields ---------------------------------------------------------------------------------------


@functools.cache
def part(kind: type, *names: str, **types: Any) -> type:
    """A dataclass of the fields `names` of the config `kind` (none: all), which are checked one by
    one but not together: for a command that takes some fields of an existing run, and reads only
    those that are given. types: for fields of which the command takes other values than `kind`."""
    hints = typing.get_type_hints(kind, include_extras=True) | types
    each = {field.name: field for field in dataclasses.fields(kind)}
    fields = [
        (name, hints[name], dataclasses.field(
            default=each[name].default, default_factory=each[name].default_factory))
        for name in names or types
    ]  # fmt: skip
    made = dataclasses.make_dataclass(
        kind.__name__, fields, bases=() if names else (kind,), frozen=True, kw_only=True,
        namespace={"__post_init__": resolve_types},
    )  # fmt: skip
    # tyro reads an option's help next to the field, at the place the class names: first the module,
    # then the line, since Python 3.13 drops the line when the module is set.
    for name in ("__module__", "__qualname__", "__doc__", "__firstlineno__"):
        if name in vars(kind):
            setattr(made, name, vars(kind)[name])
    return made


def is_part(config: object) -> bool:
    return getattr(type(config), "__post_init__", None) is resolve_types


def with_family(run: Any, name: str) -> Any:
    """`run` with its model in the family `name`: fields that both families have keep their values
    unless None, and the others are the new family's own. run: a RunConfig, or options that have a
    `model`."""
    before, config = run.model, family_module(name).CONFIG
    family = part(config) if is_part(before) else config
    both = _names(before) & _names(family) - {"family"}
    values = {field: getattr(before, field) for field in both}
    model = family(**{field: value for field, value in values.items() if value is not None})
    return dataclasses.replace(run, model=model)


def families(field: str = "") -> list[str]:
    """All families of models, or those that have this field."""
    return [name for name in FAMILIES if not field or field in _names(family_module(name).CONFIG)]


def _names(config: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def spellings(options: Any) -> dict[str, str]:
    """The path of the field for each spelling of each option, without its --."""
    found = {}
    for path, hint in _leaves(options):
        found[path] = path
        if hint is bool:
            section, dot, field = path.rpartition(".")
            found[f"{section}{dot}no-{field}"] = path
    return {alias: path for alias, path in ALIASES.items() if path in found} | found


def _leaves(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The path and the type of every field of `options` and the configs in it."""
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value, hint = getattr(options, field.name), hints[field.name]
        path = prefix + _hyphened(field.name)
        if not dataclasses.is_dataclass(value):
            yield path, hint
        else:
            own = OwnFields in getattr(hint, "__metadata__", ())
            yield from _leaves(value, prefix if own else f"{path}.")


def _hyphened(name: str) -> str:
    return name.replace("_", "-")


# --- a command line -------------------------------------------------------------------------------


class Help(SystemExit):
    """Raised for --help on the options `default` of `usage`; callers show it. Exit status 0."""

    def __init__(self, default: object, *, usage: str, about: str, more: Callable[[], str] | None):
        super().__init__(0)
        self.default, self.usage, self.about, self.more = default, usage, about, more


def help_of(command: Command) -> Help:
    try:
        command(["--help"])
    except Help as asked:
        return asked
    raise TypeError(f"{command} reads no options")


def summary(command: object) -> str:
    """The first line of a command's docstring."""
    return (command.__doc__ or "").splitlines()[0]


@dataclass(frozen=True)
class Line(Generic[Options]):
    """A command line, parsed."""

    names: tuple[str, ...]  # before all options
    options: Options
    given: frozenset[str]  # the options that were given, spelled in full: --layout.pipe

    @property
    def name(self) -> str | None:
        return self.names[0] if self.names else None

    def changes(self, section: str) -> dict[str, Any]:
        """The fields of the config `section` that are given, with their values."""
        config = getattr(self.options, section)
        return {
            name: getattr(config, name)
            for name in _names(config)
            if f"--{section}.{_hyphened(name)}" in self.given
        }


def command(
    usage: str, options: type[Options], *, more: Callable[[], str] | None = None
) -> Callable[[Callable[[Line[Options]], int | None]], Command]:
    """Make a command from a function of its Line. usage and errors: as for `read_line`."""

    def of_line(run: Callable[[Line[Options]], int | None]) -> Command:
        @functools.wraps(run)
        def of_arguments(arguments: list[str]) -> int | None:
            return run(read_line(arguments, options(), usage, run, more=more))

        return of_arguments

    return of_line


def read_line(
    arguments: list[str], default: Options, usage: str, about: Callable,
    *, more: Callable[[], str] | None = None,
) -> Line[Options]:  # fmt: skip
    """Parse `arguments`. usage: "mtx convert SOURCE TARGET --out FILE": NAME is given once, NAME...
    at least once, [NAME] at most once, and --out must be given. Errors: as for `parse`."""
    names, rest = split_names(arguments)
    options = parse(rest, default, prog=usage, about=about, more=more)
    _check_names(names, usage.partition(" --")[0])
    for option in re.findall(r" --([a-z-]+)", usage):
        if not getattr(options, option.replace("-", "_")):
            raise UserError(f"--{option} is missing; the usage is {usage}")
    given = frozenset(f"--{path}" for path in _given(rest, _of_family(rest, default)))
    return Line(tuple(names), options, given)


def split_names(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The names before all options, and the rest."""
    names = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    return names, arguments[len(names) :]


def _check_names(names: list[str], usage: str) -> None:
    places = re.findall(r"\[[^\]]*\]|[A-Z_]+(?:\.\.\.)?", usage)
    missing = [place for place in places if not place.startswith("[")][len(names) :]
    if missing:
        what = _NAMED[missing[0].rstrip(".")]
        raise UserError(f"{missing[0]} is missing: {what}; the usage is {usage}")
    if len(names) > len(places) and not usage.endswith("..."):
        raise UserError(f"unexpected argument {names[len(places)]!r}: the usage is {usage}")


def parse(
    arguments: list[str], default: Options, *, prog: str, about: Callable | None = None,
    more: Callable[[], str] | None = None,
) -> Options:  # fmt: skip
    """`default` with the fields that `arguments` name replaced. Raises Help for --help, which ends
    with what `more` returns; UserError for an option, a value or a choice that is not valid."""
    default = _of_family(arguments, default)
    described = inspect.getdoc(about or type(default)) or ""
    if "-h" in arguments or "--help" in arguments:
        raise Help(default, usage=prog, about=described, more=more)
    printed = io.StringIO()
    # tyro draws its errors to suit stdout: here not a terminal, but UTF-8.
    nowhere = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    full = [argument for group in _given(arguments, default).values() for argument in group]
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(printed):
            options, unknown = tyro.cli(
                type(default), default=default, args=full, prog=prog, return_unknown_args=True
            )
    except SystemExit as leaving:
        if not leaving.code:
            raise
        message = _own_error(leaving) or _one_line(printed.getvalue(), arguments)
        raise UserError(message) from None
    resolve_types(options)
    if unknown:
        raise _unknown(unknown, spellings(default))
    return options


def _of_family(arguments: list[str], default: Any) -> Any:
    """`default` with the fields of the family that --model.family names, if it is given."""
    holder = getattr(default, "run", default)
    if not hasattr(getattr(holder, "model", None), "family"):
        return default
    name = _given(arguments, default).get("model.family", [holder.model.family])[-1]
    name = name.rpartition("=")[2]
    if name in (holder.model.family, "--model.family"):  # without a value: tyro will report it
        return default
    swapped = with_family(holder, name)
    return swapped if holder is default else dataclasses.replace(default, run=swapped)


def _given(arguments: list[str], default: object) -> dict[str, list[str]]:
    """The arguments of each option, spelled in full, by the path of its field; unknown arguments by
    their own text. UserError if an option is given two values."""
    known, found, first = spellings(default), {}, {}
    for group in _groups(arguments):
        flag, equals, value = group[0].partition("=")
        spelled = _hyphened(flag[2:])
        path = known.get(spelled)
        if path is None:
            found[" ".join(group)] = group
            continue
        full = path if spelled in ALIASES else spelled
        full = [f"--{full}", *([value] if equals else []), *group[1:]]
        if found.setdefault(path, full) != full:
            raise UserError(
                f"{first[path]} and {_shortened(group)} are both given, and set one field, {path}; "
                "leave one out"
            )
        first.setdefault(path, _shortened(group))
    return found


def _shortened(group: list[str]) -> str:
    text = " ".join(group)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _groups(arguments: Iterable[str]) -> Iterator[list[str]]:
    """Each option with the values that follow it; values before the first option are a group."""
    group: list[str] = []
    for argument in arguments:
        if argument.startswith("--") and group:
            yield group
            group = []
        group.append(argument)
    if group:
        yield group


# --- mistakes -------------------------------------------------------------------------------------


def _unknown(unknown: list[str], known: dict[str, str]) -> UserError:
    """The error for what was left over: about the first option, or else the first value."""
    options = [argument for argument in unknown if argument.startswith("-")]
    if not options:
        return UserError(
            f"unexpected argument {unknown[0]!r}: a name stands before all options, and a switch "
            "takes no value (--json, --no-resume)"
        )
    flag = _hyphened(options[0].partition("=")[0])
    name = flag.lstrip("-")
    if _RETIRED.get(name) in known:
        return UserError(f"unknown option {flag}: it is now --{_RETIRED[name]}; use that")
    others = families(name.removeprefix("model.").replace("-", "_"))
    if name.startswith("model.") and "model.family" in known and others:
        return UserError(
            f"unknown option {flag}: this model's family has none; use --model.family "
            f"{' or '.join(others)} with it"
        )
    near = " or ".join(_near_options(flag, [f"--{path}" for path in known if path not in ALIASES]))
    return UserError(f"unknown option {flag}: {f'did you mean {near}?' if near else 'see --help'}")


def _near_options(name: str, known: list[str]) -> list[str]:
    """--model.vocab for --vocab, --model.no-tied for --no-model.tied; or options near a typo."""
    switch = re.sub(r"^--no-(.*)\.", r"--\1.no-", name)
    if switch in known:
        return [switch]
    section, field = _parts(name)
    parts = {option: _parts(option) for option in known}
    sections = nearest(section, {section for section, _ in parts.values()})
    here = {o: own for o, (above, own) in parts.items() if not section or above in sections}
    near = nearest(field, here.values())
    same = [option for option, (_, own) in parts.items() if own == field]
    return [option for option, own in here.items() if own in near][:3] or same[:3]


def _parts(option: str) -> tuple[str, str]:
    section, _, field = option.lstrip("-").rpartition(".")
    return section, field


def _own_error(leaving: BaseException) -> str:
    """The message of the config's own UserError that made tyro leave, or "". tyro's box has it too,
    but wrapped in the middle of what has no spaces."""
    cause = leaving.__context__
    while cause is not None and not isinstance(cause, UserError):
        cause = cause.__context__
    return "" if cause is None else str(cause)


def _one_line(box: str, arguments: list[str]) -> str:
    """An error that tyro prints as a box of several paragraphs, as one line."""
    rows = [line.strip("│ ") for line in box.splitlines() if line.startswith("│")]
    message = " ".join(itertools.takewhile(lambda row: not row.startswith("─"), rows))
    wrong_value = re.match(r"Error parsing (--\S+):", message)
    if wrong_value and "Argument helptext:" in rows:
        option, *form = rows[rows.index("Argument helptext:") + 1].split()
        spelled, value = _as_given(option, arguments)
        return f"{spelled} takes {plain_form(' '.join(form))}, not {shown(value)}"
    return message or box


def plain_form(form: str) -> str:
    """What an option takes, in tyro's notation made readable: without None for what may be left
    out, and with INT ... for [INT [INT ...]]."""
    form = re.sub(r"{None}\||\|{None}|(?<={)None,|,None(?=})", "", form)
    return re.sub(r"({)?\[(\S+) \[\2 \.\.\.\]\](?(1)})", r"\2 ...", form)


def _as_given(option: str, arguments: list[str]) -> tuple[str, str]:
    """How `arguments` spell an option, and the value that they give it."""
    short = {f"--{alias}": f"--{path}" for alias, path in ALIASES.items()}
    for group in _groups(arguments):
        name, equals, value = group[0].partition("=")
        if option in (_hyphened(name), short.get(name)):
            said = f"{name} ({option})" if short.get(name) == option else option
            return said, value if equals else " ".join(group[1:])
    return option, ""
