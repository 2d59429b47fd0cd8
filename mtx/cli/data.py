"""`mtx data`: build indexed datasets from text files, and work with them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from mtx.cli.neighbours import neighbours_action
from mtx.cli.options import Command, Flag, Line, command, part
from mtx.cli.output import facts, progress, run_action, say
from mtx.config import DataConfig, ModelConfig
from mtx.config.data import SplitBy
from mtx.errors import UserError
from mtx.fields import Between
from mtx.sizes import Processes, TrainedVocab, Vocab

if TYPE_CHECKING:
    from mtx.data.build import Built, Progress
    from mtx.data.indexed import IndexedDataset
    from mtx.data.split import Foreseen

_Samples = Annotated[int, Between(1, 2**28)]  # each takes a dozen bytes while they are placed


def data_command(arguments: list[str]) -> None:
    """Build indexed datasets (.bin and .idx) from text files; inspect, merge and split them.

    build FILE... --out PREFIX, inspect PREFIX, merge PREFIX... --out PREFIX, split PREFIX,
    index PREFIX..., neighbours PREFIX, tokenizer FILE... --out tokenizer.json; mtx data ACTION
    --help lists the options of each.
    """
    run_action(arguments, ACTIONS, usage="mtx data ACTION NAME...", about=data_command)


# --- build ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    out: str = ""  # prefix of the files: OUT_text_document.bin, .idx and .json
    tokenizer: str = "bytes"  # bytes, a tokenizer.json, vocab.json, SentencePiece .model, or folder
    eod: str = "auto"  # the end-of-document token: its name or number, auto, or none
    level: Literal["document", "sentence"] = "document"  # what a sequence is; sentence: for BERT
    field: str = "text"  # field of JSON lines and Parquet that holds the text
    lines: Flag = False  # each line of a text file is a document, instead of the whole file
    max_line_mib: Annotated[int, Between(1, 2**10)] = 64  # the longest line allowed, in MiB
    processes: Processes | None = None  # number of processes; by default one per CPU
    json: Flag = False  # print what was written as JSON


@command("mtx data build FILE... --out PREFIX", BuildOptions)
def build_action(line: Line[BuildOptions]) -> None:
    """Tokenize text files, JSON lines (also .gz, .zst) and Parquet into a dataset.

    FILE... are files and folders: .txt, .md, .rst, .jsonl, .json, .parquet. Nothing appears under
    the dataset's name until all of it is written.
    """
    options = line.options
    from mtx.data.build import Recipe, build_dataset
    from mtx.data.sources import Reading
    from mtx.data.split import foresee

    reading = Reading(
        field=options.field, lines=options.lines, most_line_bytes=options.max_line_mib << 20
    )
    recipe = Recipe(
        tokenizer=options.tokenizer, eod=options.eod, level=options.level, reading=reading
    )
    prefix = f"{options.out}_{options.field}_{options.level}"
    start = time.perf_counter()
    with progress() as bar:

        def report(now: Progress) -> None:
            rate = now.text_bytes / 1e6 / (time.perf_counter() - start)
            bar(now.read_bytes, now.total_bytes, f"{now.tokens:,} tokens, {rate:.1f} MB/s")

        built = build_dataset(
            list(line.names), prefix, recipe, processes=options.processes, report=report
        )
    elapsed_s = time.perf_counter() - start
    _print_built(built, foresee(built.dataset.document_lengths()), elapsed_s, options.json)


def _print_built(built: Built, split: Foreseen, elapsed_s: float, as_json: bool) -> None:
    made, identity = built.dataset, vars(built.dataset.identity)
    documents, sequences, tokens = made.document_count, len(made), len(made.tokens)
    numbers = {
        "prefix": made.prefix, "documents": documents, "sequences": sequences, "tokens": tokens,
        "dtype": str(made.dtype), "empty_documents": built.empty, "text_bytes": built.text_bytes,
        "elapsed_s": round(elapsed_s, 3), "tokenizer": identity, "split": vars(split),
    }  # fmt: skip
    left_out = f", {built.empty:,} empty ones left out" if built.empty else ""
    size = built.text_bytes / 1e6
    lines = facts({
        "wrote": f"{made.prefix}.bin, .idx, .json",
        "documents": f"{documents:,}{left_out}",
        "sentences": f"{sequences:,}" if sequences != documents else None,
        "tokens": f"{tokens:,}, {made.dtype}",
        "split": _split_text(split),
        "tokenizer": f"{identity['name']}, vocabulary {identity['vocab']:,}",
        "rate": f"{size:,.1f} MB of text in {elapsed_s:,.1f} s: {size / elapsed_s:,.1f} MB/s",
    })  # fmt: skip
    say(numbers, lines, as_json=as_json)


def _split_text(split: Foreseen) -> str:
    """How a run splits the dataset if it does not set data.split."""
    held_out = f"{split.tokens:,} tokens to train on, {split.held_out_tokens:,} held out"
    if split.by == "tokens":
        return f"{held_out}: the end of each document, as whole ones are too few"
    said = f"{held_out}: whole documents, {split.held_out_documents:,} of them"
    if split.lopsided:
        said += f"\n{'':<11}far from 3 %: --data.split-by tokens holds out the end of each"
    return said


# --- inspect --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    document: int | None = None  # print the tokens of this document, counted from 0
    tokenizer: str | None = None  # check that this tokenizer made the dataset
    eod: str = "auto"  # the end-of-document token of that tokenizer
    vocab: Vocab | None = None  # check that every token is below this number
    json: Flag = False  # print the result as JSON


@command("mtx data inspect PREFIX", InspectOptions)
def inspect_action(line: Line[InspectOptions]) -> None:
    """Check a dataset, and show what it holds.

    Every offset of the index is checked; with --vocab, every token as well.
    """
    options = line.options
    from mtx.data.indexed import IndexedDataset
    from mtx.data.tokenizer_files import load_tokenizer

    dataset = IndexedDataset(line.names[0])
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


def _print_datasets(datasets: list[IndexedDataset], as_json: bool) -> None:
    numbers, texts = list(map(_dataset_numbers, datasets)), []
    for dataset, now in zip(datasets, numbers, strict=True):
        made, count = dataset.identity, now["sequences"]
        texts += ["", *facts({
            "dataset": dataset.prefix,
            "documents": f"{dataset.document_count:,}",
            "sequences": f"{count:,} of {now['shortest']:,} to {now['longest']:,} tokens, "
            f"{now['tokens'] / max(1, count):,.1f} on average",
            "tokens": f"{now['tokens']:,}, {dataset.dtype}",
            "tokenizer": f"{made.name}, vocabulary {made.vocab:,}, end of document {made.eod}, "
            f"sha256 {made.sha256[:12]}"
            if made
            else "not named: the dataset was made elsewhere",
            "modes": "one a sequence" if dataset.modes is not None else None,
        })]  # fmt: skip
    say(numbers if len(numbers) > 1 else numbers[0], texts[1:], as_json=as_json)


def _dataset_numbers(dataset: IndexedDataset) -> dict:
    lengths, made = dataset.lengths, dataset.identity
    return {
        "prefix": dataset.prefix, "documents": dataset.document_count, "sequences": len(dataset),
        "tokens": len(dataset.tokens), "dtype": str(dataset.dtype),
        "shortest": int(lengths.min()) if len(lengths) else 0,
        "longest": int(lengths.max(initial=0)), "multimodal": dataset.modes is not None,
        "tokenizer": vars(made) if made else None,
    }  # fmt: skip


# --- merge and split ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    out: str = ""  # the prefix to write
    json: Flag = False  # print what was written as JSON


@command("mtx data merge PREFIX... --out PREFIX", MergeOptions)
def merge_action(line: Line[MergeOptions]) -> None:
    """Join datasets of one type and tokenizer, in the order in which they are named.

    PREFIX... are datasets; documents stay whole and in order.
    """
    from mtx.data.merge import merge_datasets

    _print_datasets([merge_datasets(list(line.names), line.options.out)], line.options.json)


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    ratios: str = "969,30,1"  # ratios of train, valid and test
    by: SplitBy = "auto"  # cut documents, or tokens of each; auto: tokens if documents are too few
    out: str | None = None  # prefix of the files: OUT_train, ...; by default PREFIX
    json: Flag = False  # print what was written as JSON


@command("mtx data split PREFIX", SplitOptions)
def split_action(line: Line[SplitOptions]) -> None:
    """Split a dataset's documents, in order, into train, valid and test.

    Training splits a dataset by itself (--data.split); use this to get the parts as files.
    """
    options, (prefix,) = line.options, line.names
    from mtx.data.indexed import strip_suffix
    from mtx.data.merge import split_dataset

    out = options.out or strip_suffix(prefix)
    parts = split_dataset(prefix, options.ratios, out, by=options.by)
    _print_datasets(list(parts.values()), options.json)


# --- index ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class IndexOptions:
    samples: _Samples | None = None  # for a blend by weights: the run's steps times global_batch
    eval_samples: _Samples | None = None  # likewise: the run's eval_batches times global_batch
    json: Flag = False  # print the number of samples as JSON
    model: object = field(default_factory=part(ModelConfig, "sequence"))
    data: object = field(default_factory=part(DataConfig, "split", "split_by", "seed", "cache"))


@command("mtx data index PREFIX...", IndexOptions)
def index_action(line: Line[IndexOptions]) -> None:
    """Build the sample indices of a run before it starts.

    PREFIX... is the run's data.path: one dataset, several, or alternating weights and datasets;
    --model.sequence and --data... are the run's own. Processes that start with the same values then
    find the indices in the cache.
    """
    options, data = line.options, DataConfig(**line.changes("data"))
    sequence = line.changes("model").get("sequence")
    if sequence is None:
        raise UserError("--model.sequence is missing: the tokens of a sample")
    from mtx.data.blend import read_blend
    from mtx.data.corpus import default_cache
    from mtx.data.gpt import open_part

    prefixes, weights = read_blend(list(line.names))
    cache = data.cache or default_cache(prefixes[0])
    wanted = {"--samples": options.samples, "--eval-samples": options.eval_samples}
    for option, samples in wanted.items():
        if weights is not None and samples is None:
            raise UserError(f"{option} is missing: how far the blend by weights is to reach")
        if weights is None and samples is not None:
            raise UserError(f"{option} is for a blend by weights; here all samples are indexed")
    found = {}
    for name, samples in zip(("train", "valid"), wanted.values(), strict=True):
        dataset = open_part(
            prefixes, weights, samples=samples, part=name, sequence=sequence,
            split=data.split, split_by=data.split_by, seed=data.seed, cache=cache,
        )  # fmt: skip
        found[name] = len(dataset)
    numbers = {"samples": found, "sequence": sequence, "cache": str(cache)}
    said = {name: f"{count:,} samples of {sequence:,} tokens" for name, count in found.items()}
    say(numbers, facts(said | {"cache": cache}), as_json=options.json)


# --- tokenizer ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    out: str = ""  # the tokenizer.json to write
    kind: Literal["bpe", "wordpiece"] = "bpe"  # wordpiece: lower-case, with BERT's special tokens
    vocab: TrainedVocab = 32_000  # number of tokens, including 256 bytes and the end of document
    end: str = "<|endoftext|>"  # bpe: how the end-of-document token is spelled
    field: str = "text"  # field of JSON lines and Parquet that holds the text
    lines: Flag = False  # each line of a text file is a document, instead of the whole file
    max_mb: Annotated[int, Between(1, 2**20)] | None = None  # read at most this many MB of text
    json: Flag = False  # print what was written as JSON


@command("mtx data tokenizer FILE... --out tokenizer.json", TokenizerOptions)
def tokenizer_action(line: Line[TokenizerOptions]) -> None:
    """Train a byte-level BPE or WordPiece tokenizer on text, and write its tokenizer.json.

    FILE... are files and folders as for build. The same text gives the same file.
    """
    options = line.options
    from mtx.data.sources import Reading, read_texts
    from mtx.data.tokenizer import BETWEEN_WORDS, train_bpe, train_wordpiece
    from mtx.data.tokenizer_files import require_new_file, write_tokenizer

    require_new_file(options.out)
    reading = Reading(field=options.field, lines=options.lines)
    start = time.perf_counter()
    most_bytes = options.max_mb and options.max_mb * 10**6

    class Texts:  # read anew by each iteration
        def __iter__(self):
            return read_texts(list(line.names), reading, cuts=BETWEEN_WORDS, most_bytes=most_bytes)

    if not any(text.strip() for text in Texts()):
        raise UserError(f"no text in {', '.join(line.names[:3])}: there is nothing to learn from")
    if options.kind == "wordpiece":
        tokenizer, end = train_wordpiece(Texts(), vocab=options.vocab), "none"
    else:
        tokenizer = train_bpe(Texts(), vocab=options.vocab, end=options.end)
        end = f"{tokenizer.eod} {options.end}"
    path = write_tokenizer(tokenizer, options.out)
    elapsed_s, sha256 = time.perf_counter() - start, tokenizer.identity.sha256
    numbers = {
        "path": str(path), "vocab": tokenizer.vocab, "end": end, "sha256": sha256,
        "elapsed_s": elapsed_s,
    }  # fmt: skip
    said = {
        "wrote": path, "tokens": f"{tokenizer.vocab:,}, end of document {end}",
        "sha256": sha256[:12], "time": f"{elapsed_s:,.1f} s",
    }  # fmt: skip
    say(numbers, facts(said), as_json=options.json)


ACTIONS: dict[str, Command] = {
    "build": build_action,
    "inspect": inspect_action,
    "merge": merge_action,
    "split": split_action,
    "index": index_action,
    "neighbours": neighbours_action,
    "tokenizer": tokenizer_action,
}
