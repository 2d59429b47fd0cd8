"""`mtx data`: text files to indexed datasets, and what can be done with these."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from mtx.cli.options import parse
from mtx.config.data import SplitBy
from mtx.errors import UserError, unknown_name
from mtx.fields import Between
from mtx.sizes import DataSeed, Processes, Tokens, TrainedVocab, Vocab

if TYPE_CHECKING:
    from mtx.data.build import Built, Progress
    from mtx.data.indexed import IndexedDataset
    from mtx.data.split import Foreseen

_INT = tyro.conf.arg(metavar="INT")
_Processes = Annotated[Processes | None, _INT]
_Vocab = Annotated[Vocab | None, _INT]
_Tokens = Annotated[Tokens | None, _INT]
_Samples = Annotated[
    int | None, Between(1, 2**28), _INT
]  # a dozen bytes each, while they are placed
_Count = Annotated[int | None, _INT]
_Megabytes = Annotated[int | None, Between(1, 2**20), _INT]
_Name = Annotated[str | None, tyro.conf.arg(metavar="STR")]
_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


def data_command(arguments: list[str]) -> None:
    """Make, look at, join and cut indexed datasets (.bin and .idx) from text files.

    build FILE... --out PREFIX, inspect PREFIX, merge PREFIX... --out PREFIX, split PREFIX,
    index PREFIX..., tokenizer FILE... --out tokenizer.json; mtx data ACTION --help lists the
    options of each.
    """
    action, *rest = arguments or ["--help"]
    if action in ("-h", "--help"):
        print(_overview())
        return
    if action not in ACTIONS:
        raise unknown_name("action", action, ACTIONS)
    ACTIONS[action](rest)


def _overview() -> str:
    rows = [(name, action.__doc__.splitlines()[0]) for name, action in ACTIONS.items()]
    return "\n".join([
        data_command.__doc__.splitlines()[0], "",
        "usage: mtx data ACTION NAME... [OPTIONS]", "",
        *(f"  {name:<10}{summary}" for name, summary in rows), "",
        "mtx data ACTION --help lists the options.",
    ])  # fmt: skip


def _names(arguments: list[str], what: str) -> tuple[list[str], list[str]]:
    """The names that stand before all options, and the rest."""
    names = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    rest = arguments[len(names) :]
    if not names and "-h" not in rest and "--help" not in rest:
        raise UserError(f"name {what} before all options")
    return names, rest


def _required(value: str | None, option: str) -> str:
    if value is None:
        raise UserError(f"{option} is missing: it names what is to be written")
    return value


# --- build ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    out: _Name = None  # what the names begin with: OUT_text_document.bin, .idx and .json
    tokenizer: str = "bytes"  # or a tokenizer.json, vocab.json, SentencePiece .model, or folder
    eod: str = "auto"  # the end-of-document token: its name or number, auto, or none
    level: Literal["document", "sentence"] = "document"  # sentence: for BERT
    field: str = "text"  # of JSON lines and Parquet
    lines: _Flag = False  # a line of a text file is a document, instead of the file
    max_line_mib: Annotated[int, Between(1, 2**10)] = 64  # of lines
    processes: _Processes = None  # one for each CPU where not given
    json: _Flag = False  # what was written, as JSON


def build_action(arguments: list[str]) -> None:
    """Tokenize text files, JSON lines (also .gz, .zst) and Parquet into a dataset.

    FILE... are files and folders: .txt, .md, .rst, .jsonl, .json, .parquet. Nothing appears under
    the dataset's name before all of it is written.
    """
    names, rest = _names(arguments, "the files to read")
    options = parse(
        rest, BuildOptions(), prog="mtx data build FILE... --out PREFIX", about=build_action
    )
    from mtx.data.build import Recipe, build_dataset
    from mtx.data.indexed import IndexedDataset
    from mtx.data.sources import Reading
    from mtx.data.split import foresee

    reading = Reading(
        field=options.field, lines=options.lines, most_line_bytes=options.max_line_mib << 20
    )
    recipe = Recipe(
        tokenizer=options.tokenizer, eod=options.eod, level=options.level, reading=reading
    )
    prefix = f"{_required(options.out, '--out')}_{options.field}_{options.level}"
    start = time.perf_counter()
    with _progress_bar() as report:
        built = build_dataset(names, prefix, recipe, processes=options.processes, report=report)
    elapsed_s = time.perf_counter() - start
    _print_built(built, foresee(IndexedDataset(prefix).document_lengths()), elapsed_s, options.json)


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr, where that is a terminal; it takes what `build_dataset` reports."""
    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, start = bar.add_task("", total=None), time.perf_counter()

        def report(progress: Progress) -> None:
            rate = progress.text_bytes / 1e6 / (time.perf_counter() - start)
            said = f"{progress.tokens:,} tokens, {rate:.1f} MB/s"
            read, total = progress.read_bytes, progress.total_bytes
            bar.update(task, completed=read, total=total, description=said)

        yield report


def _print_built(built: Built, split: Foreseen, elapsed_s: float, as_json: bool) -> None:
    if as_json:
        print(json.dumps({
            "prefix": built.prefix, "documents": built.documents, "sequences": built.sequences,
            "tokens": built.tokens, "dtype": str(built.dtype), "empty_documents": built.empty,
            "text_bytes": built.text_bytes, "elapsed_s": round(elapsed_s, 3),
            "tokenizer": vars(built.identity), "split": vars(split),
        }, indent=1))  # fmt: skip
        return
    left_out = f", {built.empty:,} empty ones left out" if built.empty else ""
    size = built.text_bytes / 1e6
    print("\n".join([
        f"wrote      {built.prefix}.bin, .idx, .json",
        f"documents  {built.documents:,}{left_out}",
        *([f"sentences  {built.sequences:,}"] if built.sequences != built.documents else []),
        f"tokens     {built.tokens:,}, {built.dtype}",
        *_split_lines(split),
        f"tokenizer  {built.identity.name}, vocabulary {built.identity.vocab:,}",
        f"rate       {size:,.1f} MB of text in {elapsed_s:,.1f} s: {size / elapsed_s:,.1f} MB/s",
    ]))  # fmt: skip


def _split_lines(split: Foreseen) -> list[str]:
    """What a run makes of the dataset, where it says nothing of data.split."""
    held_out = f"{split.tokens:,} tokens to train on, {split.held_out_tokens:,} held out"
    if split.by == "tokens":
        return [f"split      {held_out}: the end of each document, as whole ones are too few"]
    lines = [f"split      {held_out}: whole documents, {split.held_out_documents:,} of them"]
    if split.lopsided:
        lines.append("           far from 3 %: --data.split-by tokens holds out the end of each")
    return lines


# --- inspect --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    document: _Count = None  # print the tokens of this one, from 0
    tokenizer: _Name = None  # check that this one made the dataset
    eod: str = "auto"  # of that tokenizer
    vocab: _Vocab = None  # check that every token is below it
    json: _Flag = False  # the same as JSON


def inspect_action(arguments: list[str]) -> None:
    """Check a dataset, and say what it holds.

    Every offset of the index is checked; with --vocab, every token as well.
    """
    names, rest = _names(arguments, "the prefix of a dataset")
    options = parse(rest, InspectOptions(), prog="mtx data inspect PREFIX", about=inspect_action)
    from mtx.data.indexed import IndexedDataset
    from mtx.data.tokenizer_files import load_tokenizer

    dataset = IndexedDataset(_one(names))
    if options.tokenizer is not None:
        if dataset.identity is None:
            raise UserError(f"{dataset.prefix}.json is not there to say which tokenizer made it")
        dataset.require_tokenizer(load_tokenizer(options.tokenizer, eod=options.eod).identity)
    if options.vocab is not None:
        dataset.require_vocab(options.vocab)
    if options.document is not None:
        if not 0 <= options.document < dataset.document_count:
            raise UserError(
                f"document={options.document} is not one of 0 to {dataset.document_count - 1:,}"
            )
        print(" ".join(map(str, dataset.document(options.document).tolist())))
        return
    _print_datasets([dataset], options.json)


def _one(names: list[str]) -> str:
    if len(names) != 1:
        raise UserError(f"one prefix of a dataset is asked for, not {len(names)}")
    return names[0]


def _print_datasets(datasets: list[IndexedDataset], as_json: bool) -> None:
    if as_json:
        numbers = [_dataset_numbers(dataset) for dataset in datasets]
        print(json.dumps(numbers if len(numbers) > 1 else numbers[0], indent=1))
    else:
        print("\n\n".join(map(_dataset_text, datasets)))


def _dataset_numbers(dataset: IndexedDataset) -> dict:
    lengths, made = dataset.lengths, dataset.identity
    return {
        "prefix": dataset.prefix, "documents": dataset.document_count,
        "sequences": len(dataset), "tokens": len(dataset.tokens), "dtype": str(dataset.dtype),
        "shortest": int(lengths.min()) if len(lengths) else 0,
        "longest": int(lengths.max()) if len(lengths) else 0,
        "multimodal": dataset.modes is not None,
        "tokenizer": vars(made) if made else None,
    }  # fmt: skip


def _dataset_text(dataset: IndexedDataset) -> str:
    numbers, made = _dataset_numbers(dataset), dataset.identity
    least, most = numbers["shortest"], numbers["longest"]
    mean = len(dataset.tokens) / max(1, len(dataset))
    said = (
        f"{made.name}, vocabulary {made.vocab:,}, end of document {made.eod}, "
        f"sha256 {made.sha256[:12]}"
        if made
        else "not named: the dataset was made elsewhere"
    )
    return "\n".join([
        f"dataset    {dataset.prefix}",
        f"documents  {dataset.document_count:,}",
        f"sequences  {len(dataset):,} of {least:,} to {most:,} tokens, {mean:,.1f} on average",
        f"tokens     {len(dataset.tokens):,}, {dataset.dtype}",
        f"tokenizer  {said}",
        *(["modes      one a sequence"] if dataset.modes is not None else []),
    ])  # fmt: skip


# --- merge and split ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    out: _Name = None  # the prefix to write
    json: _Flag = False  # what was written, as JSON


def merge_action(arguments: list[str]) -> None:
    """Join datasets of one type and tokenizer, in the order that they are named.

    PREFIX... are datasets; documents stay whole and in their order.
    """
    names, rest = _names(arguments, "the prefixes to merge")
    options = parse(
        rest, MergeOptions(), prog="mtx data merge PREFIX... --out PREFIX", about=merge_action
    )
    from mtx.data.merge import merge_datasets

    _print_datasets([merge_datasets(names, _required(options.out, "--out"))], options.json)


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    ratios: str = "969,30,1"  # of train, valid and test
    by: SplitBy = "auto"  # documents, or tokens of each; auto: tokens where documents are too few
    out: _Name = None  # what the names begin with: OUT_train, ...; PREFIX where not given
    json: _Flag = False  # what was written, as JSON


def split_action(arguments: list[str]) -> None:
    """Cut a dataset's documents, in their order, into train, valid and test.

    Training cuts by itself (--data.split); this is for parts that are to be files.
    """
    names, rest = _names(arguments, "the prefix of a dataset")
    options = parse(rest, SplitOptions(), prog="mtx data split PREFIX", about=split_action)
    from mtx.data.indexed import strip_suffix
    from mtx.data.merge import split_dataset

    out = options.out or strip_suffix(_one(names))
    parts = split_dataset(_one(names), options.ratios, out, by=options.by)
    _print_datasets(list(parts.values()), options.json)


# --- index ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class IndexOptions:
    sequence: _Tokens = None  # model.sequence of the run
    split: str = "969,30,1"  # its data.split
    split_by: SplitBy = "auto"  # its data.split_by
    seed: DataSeed = 0  # its data.seed
    cache: _Name = None  # its data.cache; index_cache beside the first dataset where not given
    samples: _Samples = None  # of a blend by weights: its steps times global_batch
    eval_samples: _Samples = None  # of a blend by weights: its eval_batches times global_batch
    json: _Flag = False  # how many samples there are, as JSON


def index_action(arguments: list[str]) -> None:
    """Build the sample indices of a run before it starts.

    PREFIX... are what the run names as data.path: one dataset, several, or weights and datasets in
    turns. Processes that start with the same values then find the indices in the cache.
    """
    names, rest = _names(arguments, "the prefixes to index")
    options = parse(rest, IndexOptions(), prog="mtx data index PREFIX...", about=index_action)
    if options.sequence is None:
        raise UserError("--sequence is missing: the tokens of a sample")
    from mtx.data.blend import read_blend
    from mtx.data.corpus import default_cache
    from mtx.data.gpt import open_part

    prefixes, weights = read_blend(names)
    cache = options.cache or default_cache(prefixes[0])
    wanted = {"--samples": options.samples, "--eval-samples": options.eval_samples}
    for option, samples in wanted.items():
        if weights is not None and samples is None:
            raise UserError(f"{option} is missing: how far the blend by weights is to reach")
        if weights is None and samples is not None:
            raise UserError(f"{option} is for a blend by weights; here all samples are indexed")
    found = {}
    for part, samples in zip(("train", "valid"), wanted.values(), strict=True):
        dataset = open_part(
            prefixes, weights, samples=samples, part=part, sequence=options.sequence,
            split=options.split, split_by=options.split_by, seed=options.seed, cache=cache,
        )  # fmt: skip
        found[part] = len(dataset)
    if options.json:
        written = {"samples": found, "sequence": options.sequence, "cache": str(cache)}
        print(json.dumps(written, indent=1))
        return
    for part, count in found.items():
        print(f"{part:<11}{count:,} samples of {options.sequence:,} tokens")
    print(f"cache      {cache}")


# --- tokenizer ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    out: _Name = None  # the tokenizer.json to write
    kind: Literal["bpe", "wordpiece"] = "bpe"  # wordpiece: lower-case, with BERT's special tokens
    vocab: TrainedVocab = 32_000  # tokens, with 256 bytes and the end of document
    end: str = "<|endoftext|>"  # bpe: how the end-of-document token is spelled
    field: str = "text"  # of JSON lines and Parquet
    lines: _Flag = False  # a line of a text file is a document, instead of the file
    max_mb: _Megabytes = None  # read so many MB of text, and no more
    json: _Flag = False  # what was written, as JSON


def tokenizer_action(arguments: list[str]) -> None:
    """Train a byte-level BPE, or a WordPiece, on text, as a tokenizer.json.

    FILE... are files and folders as for build. The same text gives the same file.
    """
    names, rest = _names(arguments, "the files to read")
    options = parse(
        rest, TokenizerOptions(), prog="mtx data tokenizer FILE... --out tokenizer.json",
        about=tokenizer_action,
    )  # fmt: skip
    from mtx.data.sources import Reading, read_texts
    from mtx.data.tokenizer import BETWEEN_WORDS, train_bpe
    from mtx.data.tokenizer_files import require_new_file, write_tokenizer
    from mtx.data.wordpiece import train_wordpiece

    out = _required(options.out, "--out")
    require_new_file(out)
    reading = Reading(field=options.field, lines=options.lines)
    start = time.perf_counter()
    most_bytes = options.max_mb and options.max_mb * 10**6

    class Texts:  # read anew each time they are gone through
        def __iter__(self):
            return read_texts(names, reading, cuts=BETWEEN_WORDS, most_bytes=most_bytes)

    if options.kind == "wordpiece":
        tokenizer, end = train_wordpiece(Texts(), vocab=options.vocab), "none"
    else:
        tokenizer = train_bpe(Texts(), vocab=options.vocab, end=options.end)
        end = f"{tokenizer.eod} {options.end}"
    path = write_tokenizer(tokenizer, out)
    if options.json:
        made = {"path": str(path), "vocab": tokenizer.vocab, "end": end}
        made |= {"sha256": tokenizer.identity.sha256, "elapsed_s": time.perf_counter() - start}
        print(json.dumps(made, indent=1))
        return
    print(f"wrote      {path}")
    print(f"tokens     {tokenizer.vocab:,}, end of document {end}")
    print(f"sha256     {tokenizer.identity.sha256[:12]}")
    print(f"time       {time.perf_counter() - start:,.1f} s")


ACTIONS: dict[str, Callable[[list[str]], None]] = {
    "build": build_action,
    "inspect": inspect_action,
    "merge": merge_action,
    "split": split_action,
    "index": index_action,
    "tokenizer": tokenizer_action,
}
