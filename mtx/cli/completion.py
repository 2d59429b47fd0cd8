"""Shell scripts that complete commands, names, options and their values.

A script carries one table of all options, read from the commands themselves when the script is
made, so that completion starts no Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from mtx.cli.help import Option, options_of
from mtx.cli.options import Command, families, help_of, summary, with_family
from mtx.config import ModelConfig, RunConfig
from mtx.errors import unknown_name

_FILES = "@files"  # in a row's values: stands for the names of files and folders


class Row(NamedTuple):
    """A line of the table, its fields joined by |: one thing that may be typed."""

    command: str  # "data build"; "" for mtx itself
    flag: str  # --out; "" for the names before all options, :NAME for a subcommand
    takes: str  # how many values: "" (a switch), "1" or "many"
    values: str  # the known values, and _FILES
    about: str


def completion_script(shell: str, commands: Mapping[str, Command]) -> str:
    """The script that makes `shell` complete mtx. commands: "train", "data", "data build", ..."""
    if shell not in _SCRIPTS:
        raise unknown_name("shell", shell, _SCRIPTS)
    table = "\n".join("|".join(row) for row in rows(commands))
    known = "".join(f"|{command}" for command in commands)
    following = _FOLLOWING.replace("@COMMANDS@", f"{known}|").replace("@TABLE@", table)
    return _SCRIPTS[shell].replace("@FOLLOWING@", following)


def has_actions(command: str, commands: Iterable[str]) -> bool:
    return any(other.startswith(f"{command} ") for other in commands)


def rows(commands: Mapping[str, Command]) -> Iterator[Row]:
    """The whole table."""
    for command, run in commands.items():
        above, _, name = command.rpartition(" ")
        yield Row(above, f":{name}", "", "", summary(run))
        if has_actions(command, commands):
            continue  # its actions have the options
        yield Row(command, "", "many", " ".join(_names(command)), "")
        default = help_of(run).default
        yield from (_row(command, option) for option in of_all_families(default))
    yield Row("", ":help", "", "", "Say what a command does, and list its options.")
    for flag, about in (("--help", "say what there is"), ("--version", "say which this is")):
        yield Row("", flag, "", "", about)


@dataclass(frozen=True)
class _Model:
    model: ModelConfig


@lru_cache(maxsize=64)  # tyro reads each config's source again every time
def of_all_families(default: object) -> tuple[Option, ...]:
    """The options of a command, including those that only other families of models have."""
    found = {option.flags: option for option in options_of(default)}
    for name in families() if ("--model.family",) in found else ():
        for option in _of_family(name):
            if option.flags not in found or not found[option.flags].about:
                found[option.flags] = option
    sections = list(dict.fromkeys(option.section for option in found.values()))
    return tuple(sorted(found.values(), key=lambda option: sections.index(option.section)))


@cache  # shared by many commands
def _of_family(name: str) -> list[Option]:
    return options_of(_Model(model=with_family(RunConfig(), name).model))


def _row(command: str, option: Option) -> Row:
    takes = "" if not option.form else "many" if option.many else "1"
    values = " ".join(_values(option)) if option.form else ""
    return Row(command, " ".join(option.flags), takes, values, option.about)


def _values(option: Option) -> list[str]:
    """The values to offer for an option: known words, choices that its form lists, or files."""
    field, form = option.flags[0].rpartition(".")[2].lstrip("-"), option.form
    if field == "family":
        return families()
    if field == "target":
        from mtx.plan.hardware import HARDWARE

        return [*HARDWARE, _FILES]
    if field in ("schedule", "beside"):
        return [*_schedules(), *(["auto"] if field == "schedule" else []), _FILES]
    choices = re.findall(r"{([^{}\[\]]+)}", form)
    if choices:
        known = {word for words in choices for word in words.split(",")}
        return sorted(known) + [_FILES] * ("STR" in form)
    return [] if re.fullmatch(r"\W*(?:(?:INT|FLOAT)\W*)+", form) else [_FILES]


def _names(command: str) -> list[str]:
    """The words to offer before all options."""
    from mtx.presets import NAMES

    if command in ("train", "plan"):
        return [*NAMES, _FILES]
    if command == "schedule":
        return [*_schedules(), "auto", "compare", _FILES]
    if command == "completion":
        return list(_SCRIPTS)
    return [] if command in ("launch", "presets") else [_FILES]


def _schedules() -> tuple[str, ...]:
    from mtx.schedules.makers import MAKERS

    return tuple(MAKERS)


# In awk, which every system has. It scans the words up to the cursor for the command, its last
# option, and the number of words after that; then it scans the table for what may follow, and
# prints each on a line, with a tab and its description. The `--` of mtx launch starts over; bash
# splits --option=value into three words.
_FOLLOWING = r"""_mtx_following() {
    awk '
    function option(word) { sub(/=.*/, "", word); gsub(/_/, "-", word); return word }
    BEGIN {
        cur = ARGV[ARGC - 1]
        for (i = 1; i < ARGC - 1; i++) {
            word = ARGV[i]
            if (word == "=") continue
            else if (word == "--") { command = given = ""; count = 0 }
            else if (word ~ /^-./) { given = option(word); count = word ~ /^--[^=]+=/ }
            else if (given == "" && !count && word == "help" && command == "") continue
            else {
                below = (command == "" ? "" : command " ") word
                if (given == "" && index("@COMMANDS@", "|" below "|")) command = below
                else count++
            }
        }
        if (cur ~ /^--[^=]+=/) { given = option(cur); count = 0; cur = "" }
        while ((getline row < "/dev/stdin") > 0) {
            split(row, cell, "|")
            if (cell[1] != command) continue
            if (cell[2] == "") { if (given == "" && cur !~ /^-/) values = cell[4] }
            else if (cell[2] ~ /^:/) {
                if (given == "" && !count && cur !~ /^-/) {
                    commands = commands substr(cell[2], 2) "\t" cell[5] "\n"
                }
            } else {
                size = split(cell[2], flag, " ")
                for (i = 1; i <= size; i++) {
                    flags = flags flag[i] "\t" cell[5] "\n"
                    if (flag[i] == given && (cell[3] == "many" || cell[3] == 1 && !count)) {
                        values = cell[4]; taken = 1
                    }
                }
            }
        }
        if (cur ~ /^-/ || given != "" && !taken || command != "" && given values commands == "") {
            printf "%s", flags
        }
        gsub(/ +/, "\n", values)
        printf "%s%s\n", commands, values
    }' "$@" <<'END'
@TABLE@
END
}
"""

_BASH = r"""# bash completion of mtx; eval "$(mtx completion bash)"
@FOLLOWING@_mtx() {
    local cur=${COMP_WORDS[COMP_CWORD]} word _
    COMPREPLY=()
    while IFS=$'\t' read -r word _; do
        [[ $cur == = ]] && cur=
        if [[ $word == @files ]]; then
            compopt -o filenames 2> /dev/null
            while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$cur")
        elif [[ $word && $word == "$cur"* ]]; then
            COMPREPLY+=("$word")
        fi
    done < <(_mtx_following "${COMP_WORDS[@]:1:COMP_CWORD}")
    return 0
}
complete -F _mtx mtx"""

_ZSH = r"""#compdef mtx
# zsh completion of mtx: as _mtx in a folder of fpath; or eval "$(mtx completion zsh)"
@FOLLOWING@_mtx() {
    local line
    local -a named described options
    for line in "${(@f)$(_mtx_following "${(@)words[2,CURRENT]}")}"; do
        case $line in
        (-*) options+=("${${line//:/\\:}/$'\t'/:}") ;;
        (*$'\t'*) described+=("${${line//:/\\:}/$'\t'/:}") ;;
        (?*) named+=("$line") ;;
        esac
    done
    [[ ${words[CURRENT]} == --*=* ]] && compset -P '*='
    (( $#options )) && _describe -o option options
    (( $#described )) && _describe command described
    (( ${named[(I)@files]} )) && _files
    named=(${named:#@files})
    (( $#named )) && compadd -a named
}
if [[ ${funcstack[1]} == _mtx ]]; then
    _mtx "$@"
else
    compdef _mtx mtx
fi"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH}
