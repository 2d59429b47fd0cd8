"""The corpus of a run: text files or indexed datasets, by one config."""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path

from mtx.config import DataConfig, ModelConfig, RunConfig
from mtx.data.batches import TokenCorpus
from mtx.data.bert import BertCorpus, load_bert_tokenizer, load_sentences, open_sentences
from mtx.data.blend import normalize_weights, read_blend
from mtx.data.cache import CacheError
from mtx.data.documents import text_files
from mtx.data.gpt import BlendedDataset, GPTDataset, divide_tokens
from mtx.data.indexed import IndexedDataset, strip_suffix
from mtx.data.text import load_text
from mtx.data.tokenizer import Tokenizer
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError

_DOUBTFUL_BYTES = 16  # a token of a sample: with fewer held out, there may be too few tokens
_CACHE_NAME = "index_cache"  # of the folder of indices, beside the first dataset


def load_data(run: RunConfig, *, samples: int | None = None) -> TokenCorpus | BertCorpus:
    """What `run` trains on and is evaluated on, for samples of model.sequence tokens.

    samples: how many a run takes in all, by default those of all its steps; only how far a blend
    by weights reaches depends on it, never what a sample holds.
    Raises UserError for data that cannot be read, are too small, or are of another tokenizer.
    """
    config, sequence = run.data, run.model.sequence
    prefixes, weights = _datasets_of(config)
    if not prefixes:
        load = load_sentences if run.model.family == "bert" else load_text
        corpus = load(config, sequence=sequence)  # a dataset that is not there is no text either
        only = ("split", "split_by", "cache")
        _refuse(config, only, "is for datasets; text is held out by eval_fraction")
        return corpus
    wanted = {
        "samples": run.steps * run.global_batch if samples is None else samples,
        "eval_samples": run.eval_batches * run.global_batch,
    }
    if run.model.family == "bert":
        return open_sentences(
            config, prefixes, weights, sequence=sequence, **wanted,
            cache=config.cache or default_cache(prefixes[0]), source=_described(prefixes, weights),
        )  # fmt: skip
    return open_datasets(config, prefixes, weights, sequence=sequence, **wanted)


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
    check_vocab(_common_tokenizer(run.data, datasets), run.model)
    for part, dataset in itertools.product(("train", "valid"), datasets):
        divide_tokens(
            dataset, part, split=run.data.split, by=run.data.split_by, sequence=run.model.sequence
        )


def run_tokenizer(run: RunConfig) -> Tokenizer:
    """The tokenizer that `load_data` gives a run. UserError for one that is trained on its text."""
    config, (prefixes, _) = run.data, _datasets_of(run.data)
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if run.model.family == "bert":
        made = next((dataset.identity for dataset in datasets if dataset.identity), None)
        return load_bert_tokenizer(config, eod=made and made.eod)
    if datasets:
        return _common_tokenizer(config, datasets)
    if config.tokenizer == "bpe":
        raise UserError("data tokenizer='bpe' is trained on the text; name the model's own")
    return load_tokenizer(config.tokenizer, eod=config.eod)


def check_vocab(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """UserError for a tokenizer of more tokens than the model has."""
    if tokenizer.vocab > model.vocab:
        raise UserError(
            f"the {tokenizer.name} tokenizer has {tokenizer.vocab:,} tokens, more than model.vocab="
            f"{model.vocab:,}; set model.vocab to {tokenizer.vocab} or more"
        )


def open_datasets(
    config: DataConfig,
    prefixes: list[str],
    weights: list[float] | None,
    *,
    sequence: int,
    samples: int,
    eval_samples: int,
) -> TokenCorpus:
    """The train and valid parts of datasets, with the tokenizer that made them."""
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    tokenizer = _common_tokenizer(config, datasets)
    if config.packed and tokenizer.eod is None:
        raise UserError(
            f"packed=True needs to know where documents end, and {prefixes[0]} was made without "
            "an end-of-document token; use packed=False, or build it again with one"
        )
    cache = config.cache or default_cache(prefixes[0])
    open_parts = functools.partial(
        _open_parts, config, datasets, weights, vocab=tokenizer.vocab, eod=tokenizer.eod,
        sequence=sequence,
        samples={"train": samples, "valid": eval_samples},
    )  # fmt: skip
    where = ""
    try:
        train, held_out = open_parts(cache=cache)
    except CacheError:
        if config.cache:
            raise
        where = f", indices in memory since {cache} cannot be written"
        train, held_out = open_parts(cache=None)
    return TokenCorpus(
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        held_out_samples=held_out.distinct,
        train_tokens=train.part_tokens,
        eval_tokens=held_out.part_tokens,
        source=f"{_described(prefixes, weights)}, {_division(config, train)}{where}",
        packed=config.packed,
    )


def open_part(
    prefixes: list[str] | list[IndexedDataset],
    weights: list[float] | None,
    *,
    samples: int | None,
    **options,
) -> GPTDataset | BlendedDataset:
    """One part of a dataset, or of a blend, without an end; options as of `GPTDataset`."""
    if len(prefixes) == 1:
        return GPTDataset(prefixes[0], endless=True, **options)
    samples = None if weights is None else samples
    return BlendedDataset(prefixes, weights=weights, samples=samples, endless=True, **options)


def default_cache(prefix: str) -> Path:
    """The folder of a dataset's sample indices, where no other is named."""
    return Path(strip_suffix(prefix)).absolute().parent / _CACHE_NAME


def _open_parts(config, datasets, weights, *, samples, **options):
    return [
        open_part(
            datasets, weights, samples=samples[part], part=part, split=config.split,
            split_by=config.split_by, seed=config.seed, **options,
        )
        for part in ("train", "valid")
    ]  # fmt: skip


def _refuse(config: DataConfig, names: tuple[str, ...], why: str) -> None:
    """UserError where one of these fields has been set, which would change nothing."""
    for name in names:
        value = getattr(config, name)
        if value != getattr(DataConfig(), name):
            raise UserError(f"data {name}={value!r} {why}; leave it out")


def _names_dataset(name: str) -> bool:
    """Whether one of its files is there; that the other is too, the reader says."""
    prefix = strip_suffix(name)
    return any(os.path.isfile(prefix + suffix) for suffix in (".bin", ".idx"))


def _datasets_of(config: DataConfig) -> tuple[list[str], list[float] | None]:
    """The prefixes of datasets that are named, and their weights; none where text is."""
    prefixes, weights = read_blend(config.path)
    found = [_names_dataset(prefix) for prefix in prefixes]
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


def _common_tokenizer(config: DataConfig, datasets: list[IndexedDataset]) -> Tokenizer:
    """`_tokenizer`, of which all datasets are."""
    tokenizer = _tokenizer(config, datasets)
    for dataset in datasets:
        dataset.require_tokenizer(tokenizer.identity)
    return tokenizer


def _tokenizer(config: DataConfig, datasets: list[IndexedDataset]) -> Tokenizer:
    """The tokenizer that `config` names, with the end-of-document token of the datasets."""
    if config.tokenizer == "bpe":
        raise UserError(
            "tokenizer='bpe' is trained on text, and the data path names datasets; name the "
            "tokenizer that made them"
        )
    known = next((dataset for dataset in datasets if dataset.identity), None)
    eod = known.identity.eod if known and config.eod == "auto" else config.eod
    try:
        return load_tokenizer(config.tokenizer, eod=eod)
    except UserError:
        if known is not None:  # if it is another tokenizer, that is the matter
            known.require_tokenizer(load_tokenizer(config.tokenizer, eod=None).identity)
        raise


def _division(config: DataConfig, train: GPTDataset | BlendedDataset) -> str:
    parts = getattr(train, "datasets", [train])
    cut = [part.data.prefix for part in parts if part.cut]
    if not cut:
        return f"split {config.split}"
    where = f" in {', '.join(cut[:3])}" if len(cut) < len(parts) else ""
    return f"split {config.split} of each document's tokens{where}"


def _described(prefixes: list[str], weights: list[float] | None) -> str:
    if len(prefixes) == 1:
        return f"dataset {prefixes[0]}"
    if weights is None:
        return f"{len(prefixes)} datasets, all samples"
    shares = [
        f"{share:.1%} {prefix}" for share, prefix in zip(normalize_weights(weights), prefixes)
    ]
    more = f" and {len(shares) - 3} more" if len(shares) > 3 else ""
    return f"{len(prefixes)} datasets, {', '.join(shares[:3])}{more}"
