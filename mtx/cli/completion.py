"""Scripts that complete commands, names, options and their values in a shell.

They carry one table of all options, read from the commands themselves when a script is made:
completing starts no Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mtx.cli.help import Option, options_of
from mtx.cli.options import families, help_of, with_family
from mtx.config import ModelConfig, RunConfig
from mtx.errors import unknown_name

Command = Callable[[list[str]], int | None]
_FILES = "@files"  # in a row's values: the names of files and folders


class Row(NamedTuple):
    """What may stand where: a line of the table, its parts joined by |"""

    command: str  # "data build"; "" of mtx itself
    flag: str  # --out; "" for the names before all options, :NAME for a command below this one
    takes: str  # "": nothing, it is a switch; "1" value, or "many"
    values: str  # known ones, and _FILES
    about: str


def completion_script(shell: str, commands: Mapping[str, Command]) -> str:
    """What makes `shell` complete mtx. commands: "train", "data", "data build", ..."""
    if shell not in _SCRIPTS:
        raise unknown_name("shell", shell, _SCRIPTS)
    table = "\n".join("|".join(row) for row in rows(commands))
    known = "".join(f"|{command}" for command in commands)
    return _SCRIPTS[shell].replace("@COMMANDS@", f"{known}|").replace("@TABLE@", table)


def has_actions(command: str, commands: Iterable[str]) -> bool:
    return any(other.startswith(f"{command} ") for other in commands)


def rows(commands: Mapping[str, Command]) -> Iterator[Row]:
    """The whole table."""
    for command, run in commands.items():
        above, _, name = command.rpartition(" ")
        summary = (run.__doc__ or "").splitlines()[0]
        yield Row(above, f":{name}", "", "", summary)
        if has_actions(command, commands):
            continue  # which have the options
        yield Row(command, "", "many", " ".join(_names(command)), "")
        default = help_of(run).default
        yield from (_row(command, option) for option in of_all_families(default))
    yield Row("", ":help", "", "", "Say what a command does, and list its options.")
    for flag, about in (("--help", "say what there is"), ("--version", "say which this is")):
        yield Row("", flag, "", "", about)


@dataclass(frozen=True)
class _Model:
    model: ModelConfig


def of_all_families(default: object) -> list[Option]:
    """The options of a command, with those that only other families of models have."""
    found = {option.flags: option for option in options_of(default)}
    for name in families() if ("--model.family",) in found else ():
        for option in options_of(_Model(model=with_family(RunConfig(), name).model)):
            found.setdefault(option.flags, option)
    sections = list(dict.fromkeys(option.section for option in found.values()))
    return sorted(found.values(), key=lambda option: sections.index(option.section))


def _row(command: str, option: Option) -> Row:
    takes = "" if not option.form else "many" if option.many else "1"
    values = " ".join(_values(option)) if option.form else ""
    return Row(command, " ".join(option.flags), takes, values, option.about)


def _values(option: Option) -> list[str]:
    """What an option takes: known words, choices as its form lists them, or files for a text."""
    field, form = option.flags[0].rpartition(".")[2].lstrip("-"), option.form
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
    """What may stand before all options."""
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


# Both scripts walk over the words before the cursor, to the command, its last option, and how many
# words come after that; and then over the table, for what may follow. The `--` of mtx launch begins
# anew. bash 3.2, which macOS has, will do.
_BASH = r"""# bash completion of mtx; eval "$(mtx completion bash)"
_mtx() {
    local cur=${COMP_WORDS[COMP_CWORD]} command= given= count=0 i word state= one
    local at flag takes values about names= below= flags=
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        case $word in
        =) ;;
        --) command= given= count=0 ;;
        -?*) given=${word//_/-} count=0 ;;
        *) if [[ -z $given && $count == 0 && $word == help && -z $command ]]; then :
           elif [[ -z $given && '@COMMANDS@' == *"|${command:+$command }$word|"* ]]; then
               command=${command:+$command }$word
           else
               count=$((count + 1))
           fi ;;
        esac
    done
    [[ $cur == = ]] && cur=
    while IFS='|' read -r at flag takes values about; do
        [[ $at == "$command" ]] || continue
        case $flag in
        '') [[ $given ]] || names=$values ;;
        :*) [[ $given || $count != 0 ]] || below+=" ${flag#:}" ;;
        *) flags+=" $flag"
           for one in $flag; do
               if [[ $one == "$given" ]] && [[ $takes == many || $takes$count == 10 ]]; then
                   state=value names=$values
               fi
           done ;;
        esac
    done <<'END'
@TABLE@
END
    if [[ $cur == -* && $state != value ]] || [[ $given && $state != value ]]; then
        names=$flags
    elif [[ $cur == -* ]]; then
        names="$flags $names"
    elif [[ -z $given ]]; then
        names="$names $below"
        [[ $names == *[!\ ]* || -z $command ]] || names=$flags
    fi
    COMPREPLY=()
    while IFS= read -r one; do
        [[ $one && $one != @files ]] && COMPREPLY+=("$one")
    done < <(
        compgen -W "$names" -- "$cur"
        [[ " $names " == *' @files '* ]] && compgen -f -- "$cur"
    )
    [[ " $names " == *' @files '* ]] && compopt -o filenames 2> /dev/null
    return 0
}
complete -F _mtx mtx"""

_ZSH = r"""#compdef mtx
# zsh completion of mtx: as _mtx in a folder of fpath; or eval "$(mtx completion zsh)"
_mtx() {
    local cur=${words[CURRENT]} command= given= state= word one
    local at flag takes values about
    local -a names below flags
    integer count=0
    for word in "${(@)words[2,CURRENT-1]}"; do
        case $word in
        (--) command= given= count=0 ;;
        (--?*=*) given=${${word%%=*}//_/-} count=1 ;;
        (-?*) given=${word//_/-} count=0 ;;
        (*) if [[ -z $given && $count == 0 && $word == help && -z $command ]]; then :
            elif [[ -z $given && '@COMMANDS@' == *"|${command:+$command }$word|"* ]]; then
                command=${command:+$command }$word
            else
                count+=1
            fi ;;
        esac
    done
    if [[ $cur == --*=* ]]; then
        given=${${cur%%=*}//_/-} count=0 cur=
        compset -P '*='
    fi
    while IFS='|' read -r at flag takes values about; do
        [[ $at == "$command" ]] || continue
        case $flag in
        ('') [[ -n $given ]] || names=(${=values}) ;;
        (:*) [[ -n $given || $count != 0 ]] || below+=("${flag#:}:${about//:/\\:}") ;;
        (*) for one in ${=flag}; do
                flags+=("$one:${about//:/\\:}")
                if [[ $one == "$given" ]] && [[ $takes == many || $takes$count == 10 ]]; then
                    state=value names=(${=values})
                fi
            done ;;
        esac
    done <<'END'
@TABLE@
END
    if [[ $cur == -* ]] || [[ -n $given && $state != value ]]; then
        _describe -o option flags
        [[ $state == value ]] || return
    elif [[ -z $given ]]; then
        (( $#below )) && _describe command below
        [[ -z $command ]] || (( $#names + $#below )) || _describe -o option flags
    fi
    (( ${names[(I)@files]} )) && _files
    names=(${names:#@files})
    (( $#names )) && compadd -a names
}
if [[ ${funcstack[1]} == _mtx ]]; then
    _mtx "$@"
else
    compdef _mtx mtx
fi"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH}
