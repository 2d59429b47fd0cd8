"""One word for each idea, the field's own: retired words are in neither code nor prose."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path for folder in ("mtx", "tests", "docs", "experiments", "launch")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".pyi", ".md") and path != Path(__file__)
] + [ROOT / "README.md"]  # fmt: skip
# The retired words, in patterns that match no other sense, and the words that replace them.
RETIRED = {
    r"\bseals?\b|\bsealed\b": "checksum",
    r"[\w.]*settle[ds]?\w*": "resolve",
    r"\b(go|goes|going|went) back (to|over|through|because) ?(a|an|the|of|it)? ?"
    r"(checkpoint|chunk|layers?|stages?|it)": "backward, or roll back",
    r"\bgoing_back\b|\bgoes_back\b": "backward",
    r"\b(a|the|last|no|its) beats?\b|\bbeat_|_beats?\b": "heartbeat",
    r"\b(the|a|tokenizer's) marks of a tokenizer\b|\btokenizer\.marks\b": "special tokens",
    r"\.ends\.|\bends_s\b|\bboth ends of the model\b|\btied ends\b": "embedding and head",
    r"\bfetch(es|ed|ing)? (the )?(weights|parameters|layers|chunk)": "all-gather",
    r"\bspends? (the )?(gradients?|chunk)\b": "reduce-scatter",
    r"\bat hand\b(?=.*(parameter|gradient|weight))": "gathered",
    r"\b(first|then|early|late)[ _]gradients?\b": "input gradient, weight gradient",
    r"\bletters? (that )?(arrive|wait|come|sent)|\bletter_slots?\b": "receive slot",
    r"\bclass Place\b(?!:)|\blayers\.place\b|\bPlace\(layer": "Context",
    r"(?<!self\.)\bdraws\b(?= of (a|the) (layer|step|sample))": "rng",
    r"\bmtx\.models\b": "mtx.layers, mtx.families",
}
# Pieces of a model; elsewhere the word is allowed.
OF_MODELS = r"\b(_?pieces?|_pieces?_\w+|\w+_pieces?)\b"
PACKAGES = "schedules", "pipeline", "step", "sharding", "plan", "compile", "config", "layers"
# Retired words that have a reason: names in files of earlier formats, or of other libraries.
EXCEPTIONS = {("CHANGELOG.md", "*"), ("formats.py", "ends"), ("test_checkpoint_formats.py", "ends")}


def found(pattern: str, files: list[Path]) -> list[str]:
    word = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for hit in word.finditer(line)
        if not any(path.name == name and said in hit[0] for name, said in EXCEPTIONS)
    ]


@pytest.mark.parametrize("pattern, instead", RETIRED.items(), ids=RETIRED.values())
def test_retired_words_are_gone(pattern, instead):
    assert not found(pattern, FILES), f"use {instead}"


def test_a_model_has_virtual_stages_and_chunks():
    files = [path for path in FILES if path.is_relative_to(ROOT / "mtx") and path.parts[
        len(ROOT.parts) + 1] in PACKAGES]  # fmt: skip
    files += [path for path in FILES if path.name.startswith(("test_pipeline", "test_schedules"))]
    assert not found(OF_MODELS, files)


def test_the_words_are_found():
    """The patterns find what they are made for."""
    for line in (
        "settle_types(self)", "the seal of a state", "a run goes back to a checkpoint", "a beat",
        "params.ends.tokens", "fetch the weights", "early gradients", "from mtx.models import gpt",
    ):  # fmt: skip
        assert any(re.search(pattern, line) for pattern in RETIRED), line
