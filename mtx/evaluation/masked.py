"""Perplexity of masked tokens, for a BERT: how well it restores hidden tokens of a text.

Tokens are masked as in training: see `mtx.data.masked`. S sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtx.data import Tokenizer
from mtx.data.bert import BertSample, make_bert_batch
from mtx.data.masked import Masking, mask_words
from mtx.data.samples import Rng
from mtx.data.special_tokens import BertVocab, find_bert_vocab
from mtx.errors import UserError
from mtx.evaluation.score import Report, score_batch
from mtx.fields import checked
from mtx.sizes import Seed
from mtx.step.state import TrainState
from mtx.step.trainer import Trainer

_EVALUATION = 5  # in the key of a row's rng, where training has other numbers
_TRAINING = Masking()


@dataclass(frozen=True, kw_only=True)
class MaskedPerplexity:
    """How well masked tokens were restored; losses in nats."""

    tokens: int  # of all texts, without special tokens
    masked: int  # of these
    rows: int  # [CLS] ... [SEP], of at most S tokens
    mask_fraction: float
    mask_run: int
    seed: int
    loss: float  # mean over the masked tokens
    perplexity: float  # exp(loss)
    accuracy: float  # of masked tokens that the model finds the most likely


def masked_perplexity(
    trainer: Trainer,
    state: TrainState,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    masking: Masking = _TRAINING,
    vocab: BertVocab | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> MaskedPerplexity:
    """Masks words in each row of S - 2 tokens of the texts, and has the model restore them.

    A row is [CLS], tokens of one text, [SEP]. What is masked in it is a pure function of `seed` and
    its number, whatever the layout and the batch. `vocab`: the tokenizer's own by default.
    Raises UserError for a model that is not a BERT, a tokenizer without a BERT's special tokens,
    and a text without tokens.
    """
    model = trainer.run.model
    if model.family != "bert":
        raise UserError(
            f"family={model.family!r} has no masked tokens; evaluate it with the task perplexity"
        )
    if model.sequence < 3:
        raise UserError(
            f"sequence={model.sequence} must hold [CLS], a token and [SEP]; use 3 or more"
        )
    checked("seed", seed, Seed)
    if not texts:
        raise UserError("texts is empty; name at least one text to mask tokens of")
    vocab = vocab or find_bert_vocab(tokenizer)
    rows = _Rows(tokenizer, texts, vocab, model.sequence, masking, seed)
    losses, hits, size = [], [], trainer.run.global_batch
    for first in range(0, len(rows), size):
        filled = min(size, len(rows) - first)
        batch = make_bert_batch(rows, first, size, filled=filled, pad=vocab.special.pad)
        losses_GS, hits_GS = score_batch(trainer, state, batch)
        masked_GS = batch["weights"] > 0
        losses, hits = [*losses, losses_GS[masked_GS]], [*hits, hits_GS[masked_GS]]
        if report is not None:
            report(first + filled, len(rows))
    losses, hits = np.concatenate(losses), np.concatenate(hits)
    loss = float(losses.mean(dtype=np.float64))
    return MaskedPerplexity(
        tokens=rows.part_tokens, masked=len(losses), rows=len(rows),
        mask_fraction=masking.fraction, mask_run=masking.run, seed=seed, loss=loss,
        perplexity=math.exp(loss), accuracy=float(hits.mean(dtype=np.float64)),
    )  # fmt: skip


class _Rows:
    """Texts cut into rows, as `make_bert_batch` reads them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        vocab: BertVocab,
        sequence: int,
        masking: Masking,
        seed: int,
    ):
        self.vocab, self.sequence = vocab, sequence
        self._masking, self._seed = masking, seed
        self.parts: list[np.ndarray] = []
        for place, text in enumerate(texts, start=1):
            ids, room = tokenizer.encode(text), sequence - 2
            if not len(ids):
                raise UserError(f"text {place} of {len(texts)} has no tokens; leave it out")
            self.parts += [ids[start : start + room] for start in range(0, len(ids), room)]
        self.part_tokens, self.distinct = sum(map(len, self.parts)), len(self)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> BertSample:
        special, part = self.vocab.special, self.parts[index]
        targets = np.array([special.cls, *part, special.sep], np.int32)
        rng = Rng(self._seed, index, _EVALUATION)
        tokens, places = mask_words(targets, self.vocab, rng, self._masking)
        return BertSample(tokens, targets, places, second=len(targets), order=-1)
