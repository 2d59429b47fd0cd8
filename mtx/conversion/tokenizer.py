"""A model's tokenizer, from Hugging Face's files to a checkpoint's document and back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mtx.conversion.huggingface import HuggingFaceModel, write_json
from mtx.data import Tokenizer, tokenizer_from_dict
from mtx.data.sentencepiece import SentencePieceTokenizer
from mtx.data.tokenizer import END_OF_TEXT
from mtx.data.tokenizer_files import load_tokenizer
from mtx.errors import UserError

NONE = {"kind": "none"}  # the document of a model that came without a tokenizer
_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model", "vocab.txt")


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has the files of a tokenizer."""
    return any((directory / name).is_file() for name in _FILES)


def own_tokenizer(
    theirs: HuggingFaceModel, named: str | None = None
) -> tuple[Tokenizer | None, str]:
    """The tokenizer of a directory, or the one that is `named` instead, and its end-of-document
    token as in DataConfig; None if there is no tokenizer.

    That token is the one that the tokenizer's files name, or else config.json. Raises UserError for
    a tokenizer that cannot be read or has too many tokens.
    """
    source, vocab = theirs.directory, theirs.model.vocab
    if named is None and not has_tokenizer(source):
        return None, "auto"
    tokenizer, eod = _load(named or str(source), theirs)
    if tokenizer.vocab > vocab:
        raise UserError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab:,} tokens, more than the model's "
            f"{vocab:,}; name the model's own with --data.tokenizer"
        )
    return tokenizer, eod


def _load(name: str, theirs: HuggingFaceModel) -> tuple[Tokenizer, str]:
    eos = theirs.config.get("eos_token_id")
    numbers = [n for n in (eos if isinstance(eos, list) else [eos]) if type(n) is int]
    ends = theirs.model.objective != "masked tokens"
    for eod in ("auto", *map(str, numbers)) if ends else ():
        with contextlib.suppress(UserError):
            return load_tokenizer(name, eod=eod), eod
    return load_tokenizer(name, eod="none"), "none"


def write_tokenizer(directory: Path, document: Mapping[str, Any]) -> int | None:
    """Writes tokenizer.json and tokenizer_config.json for a checkpoint's tokenizer, if it has one.
    Returns the end-of-document token, if there is one. Files that exist already are left alone.

    An end-of-document token without a spelling gets GPT-2's. For SentencePiece's tokenizers, a
    checkpoint has no more than mtx needs, so nothing is written.
    """
    if document == NONE:
        return None
    ours = tokenizer_from_dict(dict(document))
    if has_tokenizer(directory) or document.get("kind") == SentencePieceTokenizer.kind:
        return ours.eod
    described = document.get("model")
    theirs = tokenizers.Tokenizer.from_str(json.dumps(described)) if described else _bytes()
    if ours.eod is not None and theirs.id_to_token(ours.eod) is None:
        theirs.add_special_tokens([END_OF_TEXT])
    theirs.save(str(directory / "tokenizer.json"))
    end = None if ours.eod is None else theirs.id_to_token(ours.eod)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: end for name in ("bos_token", "eos_token") if end}
    write_json(directory / "tokenizer_config.json", config)
    return ours.eod


def _bytes() -> tokenizers.Tokenizer:
    """The 256 bytes as a byte-level BPE without merges, each spelled as a letter as in GPT-2."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # those above 255 stand for the others
    own = [ord(letter) for letter in letters if ord(letter) < 256]
    vocab = dict(zip(letters, own + [byte for byte in range(256) if byte not in own]))
    model = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return model
