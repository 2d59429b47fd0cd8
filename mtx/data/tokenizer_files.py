"""The files in which tokenizers are kept: `tokenizer.json`, `vocab.json` and `merges.txt`,
SentencePiece's `.model`, BERT's `vocab.txt`, and Hugging Face's folders of these."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import tokenizers
from tokenizers import models

from mtx.data.indexed import file_errors
from mtx.data.sentencepiece import SentencePieceTokenizer
from mtx.data.special_tokens import BERT_TOKENS
from mtx.data.subwords import SubwordTokenizer
from mtx.data.tokenizer import END_OF_TEXT, ByteTokenizer, bert_model, byte_level
from mtx.data.tokenizer_base import Eod, Tokenizer
from mtx.errors import UserError
from mtx.files import read_bytes, read_json, read_text, replacing
from mtx.paths import user_path

# What a folder may hold; the first of them that exists is read.
_IN_FOLDERS = (
    "tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "vocab.txt",
)  # fmt: skip
_WHAT = "the tokenizer"  # for messages that it cannot be read


def load_tokenizer(name: str, *, eod: Eod = "auto") -> Tokenizer:
    """The tokenizer called `name`: "bytes", a file, or a folder such as Hugging Face's.

    eod is the end-of-document token; "auto": the end-of-sequence token that the files name, or else
    one of the usual names. Raises UserError for files that cannot be read or hold no tokenizer, and
    for a token that does not exist.
    """
    if name == ByteTokenizer.kind:
        if eod not in ("auto", "0", 0, "none", None):
            raise UserError(f"eod={eod!r} must be 0, the NUL byte, or none with bytes")
        return ByteTokenizer(eod=None if eod in ("none", None) else 0)
    path = _find(user_path(name))
    if path.name.endswith(("vocab.json", "merges.txt")):
        return _read_vocab_and_merges(path, eod)
    if path.suffix == ".model":
        return SentencePieceTokenizer(read_bytes(path, _WHAT), name=str(path), eod=eod)
    if path.suffix == ".txt":
        return _read_wordpiece(path, eod)
    described = read_json(path, _WHAT)
    if not isinstance(described, dict) or "model" not in described:
        raise UserError(f"{path} must be a tokenizer.json with a model")
    return SubwordTokenizer(described, name=path.name, eod=_end(path, eod))


def require_new_file(path: str | os.PathLike) -> Path:
    """The path; UserError if it exists, or has an ending by which it would not be read again."""
    path = user_path(path, "tokenizer")
    if path.suffix not in (".json", ""):
        raise UserError(f"tokenizer={path} must end with .json, as it is a tokenizer.json")
    if os.path.lexists(path):
        raise UserError(f"{path} exists; remove it, or choose another name")
    return path


def write_tokenizer(tokenizer: SubwordTokenizer, path: str | os.PathLike) -> Path:
    """Writes a `tokenizer.json`, which appears only when it is whole; UserError if it cannot be
    written or already exists."""
    path = require_new_file(path)
    text = json.dumps(tokenizer.described, ensure_ascii=False, indent=1)
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as written:
        written.write_text(text, encoding="utf-8")
    return path


def _find(path: Path) -> Path:
    if path.is_dir():
        if found := [path / name for name in _IN_FOLDERS if (path / name).is_file()]:
            return found[0]
        raise UserError(
            f"the folder {path} holds no tokenizer: none of {', '.join(_IN_FOLDERS)} is there"
        )
    if not path.is_file():
        raise UserError(
            f"cannot read the tokenizer {path}: it does not exist; name bytes, a "
            "tokenizer.json, a vocab.json beside its merges.txt, a SentencePiece .model, a "
            "vocab.txt, or a folder that holds one of these"
        )
    return path


def _read_vocab_and_merges(path: Path, eod: Eod) -> Tokenizer:
    """GPT-2's: any names that end like this, such as gpt2-vocab.json and gpt2-merges.txt."""
    stem = path.name.removesuffix("vocab.json").removesuffix("merges.txt")
    vocab_path, merges_path = (path.with_name(stem + end) for end in ("vocab.json", "merges.txt"))
    vocab = read_json(vocab_path, _WHAT)
    numbers = vocab.values() if isinstance(vocab, dict) else [None]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise UserError(f"{vocab_path} must map tokens to their numbers")
    lines = read_text(merges_path, _WHAT).split("\n")
    first = 1 if lines[0].startswith("#version") else 0
    merges = []
    for number, line in enumerate(lines[first:], first + 1):
        pair = tuple(line.rstrip("\r").split(" "))
        if pair == ("",):
            continue
        if len(pair) != 2 or not all(part in vocab for part in (*pair, "".join(pair))):
            raise UserError(
                f"{merges_path}, line {number}: {line[:80]!r} must be a merge of two tokens of "
                f"{vocab_path.name}"
            )
        merges.append(pair)
    config = _config(path)
    prefix = bool(config.get("add_prefix_space", False))
    model = byte_level(models.BPE(vocab=vocab, merges=merges), prefix=prefix)
    model.add_special_tokens([end for end in (END_OF_TEXT, _end_name(config)) if end in vocab])
    return _subwords(model, vocab_path, eod, [vocab, merges, prefix])


def _read_wordpiece(path: Path, eod: Eod) -> Tokenizer:
    """BERT's: one token per line."""
    tokens = read_text(path, _WHAT).removesuffix("\n").split("\n")
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or "[UNK]" not in vocab:
        raise UserError(
            f"{path} must be a vocabulary of BERT's: a line is a token, each of them another, and "
            "[UNK] is one"
        )
    capitals = any(token != token.lower() for token in vocab if not token.startswith("["))
    lower = bool(_config(path).get("do_lower_case", "[CLS]" in vocab and not capitals))
    model = bert_model(models.WordPiece(vocab, unk_token="[UNK]"), lower=lower)
    model.add_special_tokens([token for token in BERT_TOKENS if token in vocab])
    return _subwords(model, path, eod, [vocab, lower])


def _subwords(model: tokenizers.Tokenizer, path: Path, eod: Eod, content: list) -> SubwordTokenizer:
    """content: what the files say, of which the hash is taken."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    described = json.loads(model.to_str())
    return SubwordTokenizer(described, name=path.name, eod=_end(path, eod), sha256=digest)


def _end(path: Path, eod: Eod) -> Eod:
    """`eod`; for "auto", the end-of-sequence token that the files beside `path` name, if any
    does."""
    return (_end_name(_config(path)) or eod) if eod == "auto" else eod


def _end_name(config: dict) -> str | None:
    token = config.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _config(path: Path) -> dict:
    """Hugging Face's settings of a tokenizer, if they are beside it."""
    beside = map(path.with_name, ("special_tokens_map.json", "tokenizer_config.json"))
    read = [read_json(file) for file in beside if file.is_file()]
    return {name: one for said in read if isinstance(said, dict) for name, one in said.items()}
