"""The corpus of a run: text files or indexed datasets, by one config."""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path

from mtx.config import DataConfig, ModelConfig, RunConfig
from mtx.data.batches import Corpus
from mtx.data.bert import BertSamples, batch_maker, divide_documents
from mtx.data.blend import BlendedDataset, normalize_weights, read_blend
from mtx.data.cache import CacheError
from mtx.data.documents import listed, text_files
from mtx.data.gpt import divide_tokens, open_part
from mtx.data.indexed import IndexedDataset, is_dataset, strip_suffix
from mtx.data.special_tokens import find_bert_vocab
from mtx.data.text import load_text, named_tokenizer
from mtx.data.tokenizer import Tokenizer
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError

_DOUBTFUL_BYTES = 16  # a token of a sample: with fewer held out, there may be too few tokens
_CACHE_NAME = "index_cache"  # of the folder of indices, beside the first dataset


def load_data(run: RunConfig, *, samples: int | None = None) -> Corpus:
    """What `run` trains on and is evaluated on, for samples of model.sequence tokens.

    samples: how many a run takes in all, by default those of all its steps; only how far a blend
    by weights reaches depends on it, never what a sample holds.
    Raises UserError for data that cannot be read, are too small, or are of another tokenizer.
    """
    config, (prefixes, weights) = run.data, _datasets_of(run.data)
    if prefixes:
        samples = run.steps * run.global_batch if samples is None else samples
        wanted = {"train": samples, "valid": run.eval_batches * run.global_batch}
        return _open_datasets(run, prefixes, weights, wanted)
    # A dataset that is not there is no text either.
    corpus = load_text(config, sequence=run.model.sequence, bert=run.model.family == "bert")
    only = ("split", "split_by", "cache")
    _refuse(config, only, "is for datasets; text is held out by eval_fraction")
    return corpus


def check_data(run: RunConfig) -> None:
    """Raises the UserErrors of `load_data` that can be seen at once: before devices are started,
    text is tokenized and indices are built."""
    prefixes, _ = _datasets_of(run.data)
    if not prefixes:
        sizes = [os.path.getsize(file) for file in text_files(run.data.path)]
        if sizes and sum(sizes) * run.data.eval_fraction < _DOUBTFUL_BYTES * run.model.sequence:
            load_data(run)
        return
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if run.model.family == "bert":
        return
    check_vocab(_tokenizer_of(run, datasets), run.model)
    for part, dataset in itertools.product(("train", "valid"), datasets):
        divide_tokens(
            dataset, part, split=run.data.split, by=run.data.split_by, sequence=run.model.sequence
        )


def run_tokenizer(run: RunConfig) -> Tokenizer:
    """The tokenizer that `load_data` gives a run. UserError for one that is trained on its text."""
    return _tokenizer_of(run, [IndexedDataset(prefix) for prefix in _datasets_of(run.data)[0]])


def check_vocab(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """UserError for a tokenizer of more tokens than the model has."""
    if tokenizer.vocab > model.vocab:
        raise UserError(
            f"the {tokenizer.name} tokenizer has {tokenizer.vocab:,} tokens, more than model.vocab="
            f"{model.vocab:,}; set model.vocab to {tokenizer.vocab} or more"
        )


def default_cache(prefix: str) -> Path:
    """The folder of a dataset's sample indices, where no other is named."""
    return Path(strip_suffix(prefix)).absolute().parent / _CACHE_NAME


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
        open_part, datasets, weights, sequence=run.model.sequence, split=config.split,
        split_by=config.split_by, seed=config.seed, vocab=tokenizer.vocab, eod=tokenizer.eod,
    )  # fmt: skip
    if vocab is not None:
        open_one = functools.partial(_open_sentences, run, datasets, weights, vocab)
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
        make=batch_maker(tokenizer, vocab, packed=config.packed),
        source=f"{_described(prefixes, weights)}, {_division(config, train)}{where}",
    )  # fmt: skip


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
    """The tokenizer that `run` names, with the end-of-document token of the datasets, which are all
    of it."""
    config, bert = run.data, run.model.family == "bert"
    known = next((dataset for dataset in datasets if dataset.identity), None)
    try:
        tokenizer = named_tokenizer(config, bert=bert, made=known.identity if known else None)
    except UserError:
        if known and not bert and config.tokenizer != "bpe":
            # If it is another tokenizer, that is the matter.
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
    """UserError where one of these fields has been set, which would change nothing."""
    for name in names:
        value = getattr(config, name)
        if value != getattr(DataConfig(), name):
            raise UserError(f"data {name}={value!r} {why}; leave it out")


def _datasets_of(config: DataConfig) -> tuple[list[str], list[float] | None]:
    """The prefixes of datasets that are named, and their weights; none where text is."""
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
