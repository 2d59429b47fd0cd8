"""`mtx data neighbours`: which chunks of a dataset are alike, for a RETRO."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from mtx.cli.options import Flag, Line, command
from mtx.cli.output import facts, progress, say
from mtx.cli.process import start_devices
from mtx.config import DataConfig
from mtx.errors import UserError
from mtx.fields import Between
from mtx.sizes import Step, Tokens, VirtualDevices

if TYPE_CHECKING:
    from mtx.data.nearest import Embedding
    from mtx.data.neighbours import ChunkedDataset


@dataclass(frozen=True, kw_only=True)
class NeighboursOptions:
    chunk: Tokens = 64  # tokens per chunk
    neighbours: Annotated[int, Between(1, 2**10)] = 2  # per chunk, the most similar first
    split: str = DataConfig.split  # the run's data.split; neighbours are of its training documents
    embedding: str = "hashed"  # hashed: by runs of tokens; or the RUN_DIR of a BERT: by its output
    step: Step | None = None  # the step of the BERT's checkpoint; by default the newest
    tokenizer: str = "bytes"  # the one that made the dataset, to give the BERT its text
    index: str = "Flat"  # Flat is exact; or another index for faiss's index_factory: IVF4096,Flat
    virtual_devices: VirtualDevices = 0  # CPU devices to create; 0: use this machine's own
    json: Flag = False  # print what was found as JSON


@command("mtx data neighbours PREFIX", NeighboursOptions)
def neighbours_action(line: Line[NeighboursOptions]) -> None:
    """Find for each chunk of a dataset the chunks of other documents that are most like it.

    Writes PREFIX.neighbours.npy and .json, which training with --model.family retro reads.
    Documents are cut into chunks from their beginning. Needs faiss: pip install 'mtx[retro]'.
    """
    options, start = line.options, time.perf_counter()
    from mtx.data.nearest import find_neighbours
    from mtx.data.neighbours import ChunkedDataset, paths_of, write_neighbours

    dataset = ChunkedDataset(line.names[0], options.chunk)
    if dataset.identity is not None and dataset.identity.eod is None:
        raise UserError(
            f"{dataset.prefix} was made without an end-of-document token, which chunks are filled "
            "up with; build it again with one"
        )
    fill = 0 if dataset.identity is None else int(dataset.identity.eod or 0)
    embed = _embedding(options, dataset, fill)
    with progress() as bar:
        found = find_neighbours(
            dataset, embed, neighbours=options.neighbours, split=options.split, fill=fill,
            index=options.index, report=lambda what, done, all: bar(done, all, what),
        )  # fmt: skip
    made = {"split": options.split, "embedding": embed.described, "index": options.index}
    write_neighbours(dataset, found, made)
    elapsed_s, (first, end) = time.perf_counter() - start, dataset.to_train_on(options.split)
    wrote = ", ".join(map(str, paths_of(dataset.prefix)))
    numbers = {
        "prefix": dataset.prefix, "chunk": options.chunk, "chunks": dataset.chunk_count,
        "searched": end - first, "neighbours": options.neighbours, **made,
        "elapsed_s": round(elapsed_s, 3),
    }  # fmt: skip
    said = {
        "wrote": wrote,
        "chunks": f"{dataset.chunk_count:,} of {options.chunk} tokens, {len(dataset):,} documents",
        "neighbours": f"{options.neighbours} of each, of {end - first:,} chunks to train on "
        f"(split {options.split}), none of its own document",
        "embedding": embed.described["kind"], "time": f"{elapsed_s:,.1f} s",
    }  # fmt: skip
    say(numbers, facts(said, 12), as_json=options.json)


def _embedding(options: NeighboursOptions, dataset: ChunkedDataset, fill: int) -> Embedding:
    from mtx.data.nearest import HashedEmbedding, blocks_of

    if options.embedding == "hashed":
        for name in ("step", "tokenizer"):
            if getattr(options, name) != getattr(NeighboursOptions, name):
                raise UserError(
                    f"{name}={getattr(options, name)} is for the embedding of a model; leave it out"
                )
        first, end = dataset.to_train_on(options.split)
        return HashedEmbedding(blocks_of(dataset, first, end, fill))
    from mtx.data.tokenizer_files import load_tokenizer

    made = dataset.identity
    tokenizer = load_tokenizer(options.tokenizer, eod=made.eod if made else "auto")
    dataset.require_tokenizer(tokenizer.identity)
    start_devices(options.virtual_devices)
    from mtx.train.embedding import FrozenEmbedding

    return FrozenEmbedding(options.embedding, tokenizer, step=options.step)
