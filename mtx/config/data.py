"""The data that a run reads. No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mtx.errors import UserError
from mtx.fields import Between, resolve_types
from mtx.paths import check_path
from mtx.sizes import DataSeed, TrainedBytes, Width

Order = Literal["sop", "nsp", "none"]
SplitBy = Literal["auto", "documents", "tokens"]
# Fields that apply only to models with certain objectives.
OF_OBJECTIVES = {
    "order": ("masked tokens",), "mask_fraction": ("masked tokens", "spans"),
    "mask_run": ("masked tokens",), "mean_span": ("spans",), "short_fraction": ("masked tokens",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data of a run: text files or indexed datasets, the tokenizer, and what is held out.

    Datasets are Megatron-LM's .bin and .idx files, as `mtx data build` makes them. `path` lists
    prefixes, of which all samples are read, or alternates weights and prefixes: 0.7 corpus 0.3
    code. BERT reads datasets of sentences.
    """

    path: tuple[str, ...] = ()  # files, folders or datasets; empty: Python's pydoc_data.topics
    tokenizer: str = "bytes"  # bytes, or bpe or wordpiece, trained on the text; or a path
    eod: str = "auto"  # end-of-document token, by name or number; auto: the dataset's own
    bpe_vocab: TrainedBytes = 2048  # "bpe", "wordpiece": size of the vocabulary that is trained
    packed: bool = False  # documents of a sample do not see each other; positions restart
    eval_fraction: float = 0.05  # text files: fraction held out
    split: str = "969,30,1"  # datasets: shares for training, for evaluation, and left out
    split_by: SplitBy = "auto"  # datasets: whole documents, or a share of each; auto: if few
    cache: str | None = None  # datasets: folder for sample indices; None: next to the first dataset
    seed: DataSeed = 0  # seed for the order of documents and samples
    order: Order = "sop"  # BERT's second text: swapped with the first, of another document, or none
    mask_fraction: float = 0.15  # BERT, T5: fraction of the tokens to predict
    mask_run: Width = 3  # BERT: at most this many whole words are masked together
    mean_span: Annotated[float, Between(1, 1000)] = 3.0  # T5: mean length of a span left out
    short_fraction: float = 0.1  # BERT: fraction of samples made shorter than a sequence

    def __post_init__(self):
        resolve_types(self)
        if "" in self.path:
            raise UserError(
                "data path='' must be a file, a folder or a dataset; '.' is this folder"
            )
        for path in self.path:
            check_path("data path", path)
        check_path("data tokenizer", self.tokenizer)
        check_path("data cache", self.cache or "")
        if not self.tokenizer:
            raise UserError(
                "data tokenizer='' must be bytes, bpe, wordpiece, or the path of a tokenizer"
            )
        if not 0.0 < self.mask_fraction < 1.0:
            raise UserError(f"mask_fraction={self.mask_fraction} must lie between 0 and 1")
        if not 0.0 < self.eval_fraction < 1.0:
            raise UserError(f"eval_fraction={self.eval_fraction} must lie between 0 and 1")
