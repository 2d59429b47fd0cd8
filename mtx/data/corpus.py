"""The corpus of a run: text files or indexed datasets, as one config says."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mtx.config import DataConfig, ModelConfig, RunConfig
from mtx.data.batches import Batch, Corpus, SampleSource
from mtx.data.bert import BertSamples, batch_maker, divide_documents
from mtx.data.blend import BlendedDataset, normalize_weights, read_blend
from mtx.data.build import split_sentences
from mtx.data.cache import CacheError
from mtx.data.documents import hold_out, listed, read_documents, text_files
from mtx.data.gpt import divide_tokens, open_part
from mtx.data.images import load_images
from mtx.data.indexed import IndexedDataset, is_dataset, strip_suffix, token_type
from mtx.data.neighbours import (
    check_neighbours,
    neighbour_batch_maker,
    open_with_neighbours,
)
from mtx.data.pairs import SentenceList
from mtx.data.samples import Samples
from mtx.data.spans import SpanSamples, find_span_vocab, make_span_batch, sample_lengths
from mtx.data.special_tokens import find_bert_vocab, find_special_tokens
from mtx.data.tokenizer import WORDPIECE, ByteTokenizer, Tokenizer, train_bpe, train_wordpiece
from mtx.data.tokenizer_base import Eod, TokenizerIdentity
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError, require_kind

_DOUBTFUL_BYTES = 16  # per token of a sample: with fewer held out, there may be too few tokens
_SIDES = "the training text", "the held-out text"
_CACHE_NAME = "index_cache"  # the folder of indices, beside the first dataset


def load_data(run: RunConfig, *, samples: int | None = None) -> Corpus:
    """The corpus that `run` trains on and is evaluated on, in samples of model.sequence tokens.

    samples: how many the run takes in all, by default those of all its steps; this only decides how
    far a blend by weights reaches, never what a sample holds.
    Raises UserError for data that cannot be read, are too small, are of another tokenizer, or whose
    tokenizer has more tokens than the model.
    """
    require_kind("run", run, RunConfig, "a RunConfig, such as mtx.preset('miniature')")
    corpus = _load(run, samples)
    check_vocab(corpus.tokenizer, run.model)
    return corpus


def _load(run: RunConfig, samples: int | None) -> Corpus:
    if run.model.reads_images:
        return _load_images(run)
    config, (prefixes, weights) = run.data, _datasets_of(run.data)
    if prefixes:
        samples = run.steps * run.global_batch if samples is None else samples
        wanted = {"train": samples, "valid": run.eval_batches * run.global_batch}
        return _of_spans(_open_datasets(run, prefixes, weights, wanted), run)
    _refuse_text(run)
    # If a dataset is missing, it is not found as text either.
    corpus = load_text(config, sequence=_length(run), bert=run.model.family == "bert")
    only = ("split", "split_by", "cache")
    _refuse(config, only, "is for datasets; text is held out by eval_fraction")
    return _of_spans(corpus, run)


def _load_images(run: RunConfig) -> Corpus:
    _refuse(run.data, ("split", "split_by", "cache"), "is for datasets, and these are images")
    return load_images(run, named_tokenizer(run.data, bert=False))


def _length(run: RunConfig) -> int:
    """The tokens of a sample, without the last one."""
    if run.model.objective != "spans":
        return run.model.sequence
    return sample_lengths(run.model, run.data).text - 1


def _of_spans(corpus: Corpus, run: RunConfig) -> Corpus:
    """The corpus with span corruption, if the model is trained on spans; otherwise as it is."""
    if run.model.objective != "spans":
        return corpus
    vocab = find_span_vocab(corpus.tokenizer)
    train, held_out = (
        SpanSamples(source, vocab, model=run.model, config=run.data)
        for source in (corpus.train, corpus.held_out)
    )
    make = functools.partial(make_span_batch, vocab=vocab)
    return replace(corpus, train=train, held_out=held_out, make=make)


def _refuse_text(run: RunConfig) -> None:
    """UserError for a model that reads neighbours, which only datasets have."""
    if run.model.objective == "retrieval":
        raise UserError(
            f"family={run.model.family!r} reads texts with their neighbours, and data path="
            f"{' '.join(run.data.path)!r} names no dataset; make one with mtx data build, and its "
            "neighbours with mtx data neighbours"
        )


def check_data(run: RunConfig) -> None:
    """Raises those UserErrors of `load_data` that can be found at once: before devices are started,
    text is tokenized and indices are built."""
    if run.model.reads_images:
        load_data(run)
        return
    prefixes, _ = _datasets_of(run.data)
    if not prefixes:
        _refuse_text(run)
        sizes = [os.path.getsize(file) for file in text_files(run.data.path)]
        if sizes and sum(sizes) * run.data.eval_fraction < _DOUBTFUL_BYTES * _length(run):
            load_data(run)
        return
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if run.model.family == "bert":
        return
    check_vocab(_tokenizer_of(run, datasets), run.model)
    if run.model.objective == "retrieval":
        return check_neighbours(run, prefixes)
    for part, dataset in itertools.product(("train", "valid"), datasets):
        divide_tokens(
            dataset, part, split=run.data.split, by=run.data.split_by, sequence=_length(run)
        )


def run_tokenizer(run: RunConfig) -> Tokenizer:
    """The tokenizer that `load_data` gives a run. UserError for one to be trained on its text."""
    return _tokenizer_of(run, [IndexedDataset(prefix) for prefix in _datasets_of(run.data)[0]])


def check_vocab(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """UserError if a tokenizer has more tokens than the model."""
    spans = model.objective == "spans"
    tokens = find_span_vocab(tokenizer).size if spans else tokenizer.vocab
    if tokens > model.vocab:
        raise UserError(
            f"the {tokenizer.name} tokenizer has {tokens:,} tokens"
            f"{' with sentinels' if spans else ''}, more than model.vocab={model.vocab:,}; set "
            f"model.vocab to {tokens} or more, or use another tokenizer"
        )


def default_cache(prefix: str) -> Path:
    """The folder of a dataset's sample indices if no other is named."""
    return Path(strip_suffix(prefix)).absolute().parent / _CACHE_NAME


# --- datasets -------------------------------------------------------------------------------------


def _open_datasets(
    run: RunConfig, prefixes: list[str], weights: list[float] | None, wanted: dict[str, int]
) -> Corpus:
    """The train and valid parts of datasets, with the tokenizer that made them. wanted: the samples
    of each part."""
    config, datasets = run.data, [IndexedDataset(prefix) for prefix in prefixes]
    tokenizer = _tokenizer_of(run, datasets)
    if config.packed and tokenizer.eod is None:
        raise UserError(
            f"packed=True needs to know where documents end, and {prefixes[0]} was made without "
            "an end-of-document token; use packed=False, or build it again with one"
        )
    vocab = find_bert_vocab(tokenizer) if run.model.family == "bert" else None
    open_one = functools.partial(
        open_part, datasets, weights, sequence=_length(run), split=config.split,
        split_by=config.split_by, seed=config.seed, vocab=tokenizer.vocab, eod=tokenizer.eod,
    )  # fmt: skip
    if vocab is not None:
        open_one = functools.partial(_open_sentences, run, datasets, weights, vocab)
    if run.model.objective == "retrieval":
        open_one = functools.partial(open_with_neighbours, run, prefixes, weights, tokenizer)
    cache, where = config.cache or default_cache(prefixes[0]), ""

    def open_parts(cache) -> list:
        return [
            open_one(part=part, samples=None if weights is None else samples, cache=cache)
            for part, samples in wanted.items()
        ]

    try:
        train, held_out = open_parts(cache)
    except CacheError:
        if config.cache:
            raise
        where = f", indices in memory since {cache} cannot be written"
        train, held_out = open_parts(None)
    return Corpus(
        tokenizer=tokenizer, train=train, held_out=held_out, packed=config.packed,
        make=_maker(run, tokenizer, vocab),
        source=f"{_described(prefixes, weights)}, {_division(config, train)}{where}",
    )  # fmt: skip


def _maker(run: RunConfig, tokenizer: Tokenizer, vocab) -> Callable[..., Batch]:
    if run.model.objective == "retrieval":
        return neighbour_batch_maker(run.model)
    return batch_maker(tokenizer, vocab, packed=run.data.packed)


def _open_sentences(
    run: RunConfig, datasets: list[IndexedDataset], weights, vocab, *, part: str, samples, cache
) -> BertSamples | BlendedDataset:
    """One part of datasets whose sequences are sentences, split by documents."""
    parts = [
        BertSamples(
            dataset, vocab, sequence=run.model.sequence, config=run.data, cache=cache,
            part=divide_documents(dataset, run.data, part),
            name=f"{dataset.prefix}, part {part!r} of split={run.data.split!r}",
        )
        for dataset in datasets
    ]  # fmt: skip
    if len(parts) == 1:
        return parts[0]
    return BlendedDataset(parts, weights, samples=samples, cache=cache)


def _tokenizer_of(run: RunConfig, datasets: list[IndexedDataset]) -> Tokenizer:
    """The tokenizer that `run` names, with the end-of-document token of the datasets, all of which
    it must have made."""
    config, bert = run.data, run.model.family == "bert"
    known = next((dataset for dataset in datasets if dataset.identity), None)
    try:
        tokenizer = named_tokenizer(config, bert=bert, made=known.identity if known else None)
    except UserError:
        if known and not bert and config.tokenizer != "bpe":
            # If it is another tokenizer, that is the error to report.
            known.require_tokenizer(load_tokenizer(config.tokenizer, eod=None).identity)
        raise
    for dataset in datasets:
        dataset.require_tokenizer(tokenizer.identity)
    return tokenizer


def _division(config: DataConfig, train) -> str:
    """Which part of the datasets is trained on, for people."""
    parts = getattr(train, "datasets", [train])
    cut = [str(part.data) for part in parts if part.cut]
    if not cut:
        return f"split {config.split}"
    where = f" in {', '.join(cut[:3])}" if len(cut) < len(parts) else ""
    return f"split {config.split} of each document's {parts[0].unit}{where}"


def _refuse(config: DataConfig, names: tuple[str, ...], why: str) -> None:
    """UserError if one of these fields has been set, since it would change nothing."""
    for name in names:
        value = getattr(config, name)
        if value != getattr(DataConfig(), name):
            raise UserError(f"data {name}={value!r} {why}; leave it out")


def _datasets_of(config: DataConfig) -> tuple[list[str], list[float] | None]:
    """The prefixes of the named datasets, and their weights; no prefixes if text is named."""
    prefixes, weights = read_blend(config.path)
    found = [is_dataset(prefix) for prefix in prefixes]
    if not any(found):
        if weights is not None:
            raise UserError(
                f"weights are for datasets, and {prefixes[0]}.idx does not exist; name the prefix "
                "of a .bin and .idx (mtx data build --out corpus makes corpus_text_document)"
            )
        return [], None
    if not all(found):
        raise UserError(
            f"{prefixes[found.index(True)]} is a dataset and {prefixes[found.index(False)]} is "
            "not; name datasets alone, or text alone"
        )
    _refuse(config, ("eval_fraction",), "is for text; datasets are divided by split")
    return prefixes, weights


def _described(prefixes: list[str], weights: list[float] | None) -> str:
    if len(prefixes) == 1:
        return f"dataset {prefixes[0]}"
    if weights is None:
        return f"{len(prefixes)} datasets, all samples"
    pairs = zip(normalize_weights(weights), prefixes, strict=True)
    return f"{len(prefixes)} datasets, {listed([f'{a:.1%} {b}' for a, b in pairs])}"


# --- text in memory -------------------------------------------------------------------------------


def load_text(config: DataConfig, *, sequence: int, bert: bool = False) -> Corpus:
    """Reads, splits and tokenizes what `config` names, for samples of `sequence` tokens (S).

    The split comes first: a vocabulary is trained on the training text alone. On both sides, each
    document is followed by the tokenizer's end-of-document token; for a BERT, it is cut into
    sentences instead (see `split_sentences`).
    Raises UserError for text that cannot be read (see `read_documents`) or is too short for a
    sample on either side, and for a tokenizer without an end-of-document token or, for a BERT,
    special tokens.
    """
    documents = read_documents(config.path)
    split = hold_out(documents.texts, fraction=config.eval_fraction, seed=config.seed)
    if config.tokenizer == (WORDPIECE if bert else "bpe"):
        train = train_wordpiece if bert else train_bpe
        tokenizer = train(split.train, vocab=config.bpe_vocab)
    else:
        tokenizer = named_tokenizer(config, bert=bert)
    if tokenizer.eod is None and not bert:
        raise UserError(
            f"eod={config.eod!r} leaves documents of text without an end; use auto, or a token"
        )
    vocab = find_bert_vocab(tokenizer) if bert else None
    parts = split.train, split.held_out
    sides: list[SampleSource]
    if vocab is not None:
        sides = [
            BertSamples(
                _encode(texts, tokenizer), vocab, sequence=sequence, config=config, name=side
            )
            for side, texts in zip(_SIDES, parts)
        ]
    else:
        ids, held_out_ids = (_join(texts, tokenizer) for texts in parts)
        _refuse_short(len(ids), len(held_out_ids), sequence=sequence, config=config)
        sides = [
            Samples(ids, sequence=sequence, seed=config.seed),
            Samples(held_out_ids, sequence=sequence, seed=None),
        ]
    return Corpus(
        tokenizer=tokenizer, packed=config.packed,
        make=batch_maker(tokenizer, vocab, packed=config.packed),
        train=sides[0], held_out=sides[1], source=f"{documents.source}, {split.describe()}",
    )  # fmt: skip


def _refuse_short(train: int, held_out: int, *, sequence: int, config: DataConfig) -> None:
    """UserError if either side has fewer tokens than one sample."""
    longest = min(train, held_out) - 1
    shorter = f" or use sequence={longest} or less" if longest > 0 else ""
    raised = f", raise eval_fraction={config.eval_fraction}"
    for side, tokens, more in zip(_SIDES, (train, held_out), ("", raised)):
        if tokens <= sequence:
            raise UserError(
                f"{side} has {tokens} tokens, but one sample needs sequence+1={sequence + 1}; "
                f"give more text{more}{shorter}"
            )


def named_tokenizer(
    config: DataConfig, *, bert: bool, made: TokenizerIdentity | None = None
) -> Tokenizer:
    """The tokenizer that `config` names. If eod is "auto" and the tokenizer that `made` the
    datasets is given, its end-of-document token is used; without it, a BERT has none. UserError for
    a tokenizer that is trained on the text, and for a BERT's without special tokens."""
    if config.tokenizer == (WORDPIECE if bert else "bpe"):
        raise UserError(
            f"data tokenizer={config.tokenizer!r} is trained on text, and here is none (the data "
            "path names datasets, perhaps); name the tokenizer that made them, or the model's own"
        )
    if bert and config.tokenizer in (ByteTokenizer.kind, "bpe"):
        raise UserError(
            f"tokenizer={config.tokenizer!r} has no [MASK] and the like, which a BERT needs; use "
            "its tokenizer.json or vocab.txt, or wordpiece, trained on the text"
        )
    eod: Eod = config.eod
    if eod == "auto" and (made or bert):
        eod = made.eod if made else None
    tokenizer = load_tokenizer(config.tokenizer, eod=eod)
    if bert:
        find_special_tokens(tokenizer)
    return tokenizer


def _join(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """One flat array, each text followed by end-of-document, in the narrowest type that fits."""
    kind = np.min_scalar_type(tokenizer.vocab - 1)
    parts = [np.empty(0, kind)]
    for text in texts:
        parts += [tokenizer.encode(text).astype(kind), np.array([tokenizer.eod], kind)]
    return np.concatenate(parts)


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> SentenceList:
    sentences = [split_sentences(text) for text in texts]
    ids = iter(tokenizer.encode_all([one for some in sentences for one in some]))
    encoded = [[next(ids) for _ in some] for some in sentences]
    kept = [[one for one in some if len(one)] for some in encoded]
    return SentenceList(kept, token_type(tokenizer.vocab))
