"""What a run reads. No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mtx.errors import UserError
from mtx.fields import Between, resolve_types
from mtx.paths import check_path
from mtx.sizes import DataSeed, TrainedBytes, Width

Order = Literal["sop", "nsp", "none"]
SplitBy = Literal["auto", "documents", "tokens"]
# Fields that are for models of one objective, or of some.
OF_OBJECTIVES = {
    "order": ("masked tokens",), "mask_fraction": ("masked tokens", "spans"),
    "mask_run": ("masked tokens",), "mean_span": ("spans",), "short_fraction": ("masked tokens",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What a run reads, text files or indexed datasets, its tokenizer, and what is held out.

    Datasets are Megatron-LM's .bin and .idx, as `mtx data build` makes them: prefixes, of which
    all samples are read, or weights and prefixes in turns: 0.7 corpus 0.3 code. A BERT reads those
    of sentences.
    """

    path: tuple[str, ...] = ()  # files, folders or datasets; empty: pydoc_data.topics, of Python
    tokenizer: str = "bytes"  # or "bpe" or "wordpiece", trained on the text; or a file or folder
    eod: str = "auto"  # its end-of-document token, by name or number; auto: the dataset's own
    bpe_vocab: TrainedBytes = 2048  # "bpe" and "wordpiece": of the vocabulary trained on the text
    packed: bool = False  # documents of one sample do not see each other; positions restart
    eval_fraction: float = 0.05  # text files: share held out
    split: str = "969,30,1"  # datasets: shares to train on, to evaluate on, and left out
    split_by: SplitBy = "auto"  # datasets; tokens: of each document, as auto where they are few
    cache: str | None = None  # datasets: folder of sample indices; None: beside the first dataset
    seed: DataSeed = 0  # order of documents and samples
    order: Order = "sop"  # BERT's second text: swapped with the first, of another document, or none
    mask_fraction: float = 0.15  # BERT, T5: share of the tokens that are to be predicted
    mask_run: Width = 3  # BERT: whole words that are masked together, at most
    mean_span: Annotated[float, Between(1, 1000)] = 3.0  # T5: tokens that are left out together
    short_fraction: float = 0.1  # BERT: share of samples that are made shorter than a sequence

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
