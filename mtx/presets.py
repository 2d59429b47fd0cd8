"""Named runs: published models, from the families' files, and small models of our own."""

from __future__ import annotations

from collections.abc import Iterable

from mtx import families
from mtx.config import DataConfig, RunConfig, from_dict
from mtx.errors import UserError, require_kind, unknown_name
from mtx.families import presets_of

_FAMILIES = {preset: name for name in families.NAMES for preset in presets_of(name)}
NAMES = tuple(_FAMILIES)
# These learn from text that ships with Python, or from pictures that are drawn.
_WITH_DATA = ("miniature", "miniature-bert", "miniature-llava", "bench-s")


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


_SPELLED = {_letters(name): name for name in NAMES}


def preset(name: str) -> RunConfig:
    """The preset of that name, with or without its hyphens and dots (llama3-8b); UserError with
    the nearest name if there is none."""
    require_kind("preset", name, str, "its name, such as 'miniature'")
    name = _SPELLED.get(_letters(name), name)
    if name not in _FAMILIES:
        raise unknown_name("preset", name, NAMES)
    family = _FAMILIES[name]
    fields = presets_of(family)[name]
    return from_dict(RunConfig, fields | {"model": {"family": family, **fields["model"]}})


def brings_data(run: RunConfig) -> bool:
    """Whether the run's data are known: it names them, or its model is that of a preset so small
    that the text that ships with Python, or pictures that are drawn, will do."""
    return bool(run.data.path) or run.model in [preset(name).model for name in _WITH_DATA]


def require_data(start: RunConfig, run: RunConfig, arguments: Iterable[str]) -> None:
    """UserError if nothing says what data a run is to be trained on, or with which tokenizer.

    start: the preset or plan that the command line's `arguments` turned into `run`.
    """
    if brings_data(start):
        return
    default, given = DataConfig(), {argument.partition("=")[0] for argument in arguments}
    said = {
        "--data.path": bool(run.data.path),
        "--data.tokenizer": "--data.tokenizer" in given or run.data.tokenizer != default.tokenizer,
    }
    kinds = {
        "--data.path": "FILE, FOLDER or DATASET",
        "--data.tokenizer": "FILE or wordpiece" if run.model.objective == "masked tokens"
        else "FILE, bpe or bytes",
    }  # fmt: skip
    missing = [option for option, there in said.items() if not there]
    if missing:
        names = " and ".join(option.removeprefix("--") for option in missing)
        raise UserError(
            f"{names} {'is' if len(missing) == 1 else 'are'} not given, and a model with "
            f"vocab={run.model.vocab:,} has no text of its own; use "
            + " ".join(f"{option} {kinds[option]}" for option in missing)
        )
