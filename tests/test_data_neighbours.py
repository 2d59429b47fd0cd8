"""Chunks with neighbours: what is found, what is read, and what is refused."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import reference_bert
from errors import names
from parameters import params_of

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli import main
from mtx.config import DataConfig, Layout, ModelConfig, RunConfig
from mtx.data import load_data
from mtx.data.nearest import HashedEmbedding, blocks_of
from mtx.data.neighbours import ChunkedDataset, paths_of, read_neighbours
from mtx.data.special_tokens import find_special_tokens
from mtx.data.tokenizer import ByteTokenizer, train_wordpiece
from mtx.errors import UserError
from mtx.evaluation.decoder import check_generates
from mtx.step.trainer import Trainer
from mtx.train.chat import check_chat
from mtx.train.embedding import FrozenEmbedding

pytest.importorskip("faiss", reason="an index needs faiss: pip install 'mtx[retro]'")
RETRO = ModelConfig(
    family="retro", layers=4, hidden=16, heads=2, sequence=32, chunk=8, neighbours=2, retrieved=12,
    retrieval_first=1, retrieval_every=1, encoder_layers=1, vocab=256,
)  # fmt: skip
TEXTS, END = 12, 0  # END: the end of a document, for bytes


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """(prefix, the tokens of each document): texts of random letters, each with a passage of 24
    letters, at a chunk's beginning, that it shares with one other."""
    folder = tmp_path_factory.mktemp("corpus")
    random, texts = np.random.default_rng(0), []
    for number in range(TEXTS):
        letters = random.integers(97, 123, 83 + number, dtype=np.uint8)
        if number % 2:
            letters[16:40] = texts[-1][32:56]
        texts.append(letters)
    lines = "".join(json.dumps({"text": bytes(a).decode()}) + "\n" for a in texts)
    (folder / "texts.jsonl").write_text(lines)
    out = str(folder / "c")
    assert main(["data", "build", str(folder / "texts.jsonl"), "--out", out]) == 0
    prefix = f"{out}_text_document"
    command = ["data", "neighbours", prefix, "--chunk", "8", "--split", "3,1"]
    assert main(command) == 0
    return prefix, [np.append(a, END) for a in texts]


def run_of(prefix, model=RETRO, **data):
    config = DataConfig(path=(prefix,), split="3,1", split_by="documents")
    return RunConfig(model=model, data=dataclasses.replace(config, **data), layout=Layout())


def test_neighbours_are_the_nearest_of_other_documents(corpus):
    """Against all inner products at once; none are from the same document or held out."""
    prefix, _ = corpus
    data = ChunkedDataset(prefix, 8)
    found = read_neighbours(data, neighbours=2, split="3,1")
    end, numbers = data.to_train_on("3,1")[1], np.arange(data.chunk_count)
    documents = data.documents_of(numbers)
    assert end == data.first_chunks[9] < len(numbers) == len(found)
    vectors = HashedEmbedding(blocks_of(data, 0, end, END))(data.chunks(numbers, 8, END))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    scores = vectors @ vectors.T
    scores[documents[:, None] == documents[None]] = -2
    scores[:, end:] = -2
    best = -np.sort(-scores, axis=1)[:, :2]
    np.testing.assert_allclose(np.take_along_axis(scores, found, axis=1), best, atol=1e-5)
    # Chunks 4 to 6 of an even text are chunks 2 to 4 of the next one.
    for number in range(0, 8, 2):
        first, next_first = data.first_chunks[number : number + 2]
        assert found[first + 4 : first + 7, 0].tolist() == [next_first + n for n in (2, 3, 4)]


def test_a_sample_has_its_chunks_and_their_neighbours(corpus):
    """Compared with samples built again from the documents and the file of neighbours."""
    prefix, texts = corpus
    data, source = ChunkedDataset(prefix, 8), load_data(run_of(prefix)).train
    found = np.load(paths_of(prefix)[0])
    padded = [np.append(a, [END] * (-len(a) % 8)) for a in texts]
    chunks = np.concatenate(padded).reshape(-1, 8)
    assert len(np.unique(chunks, axis=0)) < len(chunks) == data.chunk_count  # some occur twice
    seen = set()
    for index in range(source.distinct):
        sample = source[index]
        of_row = sample.neighbours.reshape(4, 2, 12)
        for u, chunk in enumerate(sample.tokens[:-1].reshape(4, 8)):
            like = [n for n, each in enumerate(chunks) if (each == chunk).all()]
            wanted = [
                [
                    np.append(padded[d][at * 8 : at * 8 + 12], [END] * 12)[:12]
                    for at, d in ((n - data.first_chunks[d], d) for n, d in numbered)
                ]
                for numbered in (
                    [(int(n), int(data.documents_of(n))) for n in found[each]] for each in like
                )
            ]
            assert any((of_row[u] == each).all() for each in np.array(wanted)), (index, u)
            seen |= {*like}
    first, end = data.to_train_on("3,1")
    assert len({*range(first, end)} - seen) <= 4, "all that is trained on, but for a last sample"
    later = source[source.distinct + 3]
    assert any((later.tokens == source[i].tokens).all() for i in range(source.distinct))


def test_a_batch_is_a_function_of_data_seed_and_samples(corpus):
    prefix, _ = corpus
    loaded = load_data(run_of(prefix))
    batch = loaded.batch(4, 4)
    assert {name: a.shape for name, a in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "weights"), (4, 32)), "neighbours": (4, 96),
    }  # fmt: skip
    # The padding of a chunk is not learned: an end of document after another.
    filled = (batch["targets"] == END) & (batch["tokens"] == END)
    assert filled.any() and ((batch["weights"] == 0) == filled).all()
    again = load_data(run_of(prefix))
    parts = [again.batch(4, 4, local=[0, 1]), again.batch(4, 4, local=[2, 3])]
    for name, array in batch.items():
        assert (parts[0][name][:2] == array[:2]).all() and (parts[1][name][2:] == array[2:]).all()
    held_out = next(iter(loaded.eval_batches(1, 4)))
    assert held_out["weights"].sum() > 0


def changed(**fields):
    return lambda prefix: RunConfig(model=dataclasses.replace(RETRO, **fields))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda p: load_data(run_of(p, split="1,1")), ["split=3,1", "split=1,1"]),
        (lambda p: load_data(run_of(p, split_by="tokens")), ["split=3,1", "split_by=documents"]),
        (lambda p: load_data(run_of(p, changed(chunk=16)(p).model)), ["chunks of 8", "not 16"]),
        (lambda p: load_data(run_of(p, changed(neighbours=3)(p).model)), ["2", "--neighbours 3"]),
        (lambda p: load_data(RunConfig(model=RETRO)), ["retro", "mtx data neighbours"]),
        (changed(sequence=36), ["sequence=36", "chunk=8"]),
        (changed(retrieval_first=4), ["retrieval_first=4", "4-1=3"]),
        (changed(encoder_hidden=15), ["encoder_hidden=15", "encoder_heads=2"]),
        (changed(lora_rank=2), ["lora_rank=2", "retro"]),
        (lambda p: Layout(context=2).check(RETRO), ["context=2", "retrieved"]),
        (lambda p: Layout(slices=2, schedule="seq1f1b").check(RETRO), ["slices=2", "retro"]),
        (lambda p: Layout(tensor=64).check(changed(heads=64, hidden=128)(p).model), ["tensor=64"]),
        (lambda p: RunConfig(model=RETRO, data=DataConfig(packed=True)), ["packed=True", "retro"]),
        (lambda p: check_generates(RETRO), ["retro", "generate"]),
        (lambda p: check_chat(RETRO), ["retro"]),
    ],
)
def test_what_a_retro_has_not_is_refused(corpus, make, named):
    with pytest.raises(UserError) as error:
        make(corpus[0])
    names(error, *named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda said, found: said.pop("dataset"), "dataset=None"),
        (lambda said, found: said.update(neighbours="2"), "neighbours='2'"),
        (lambda said, found: found.clear(), "no array"),
        (lambda said, found: found.append(found.pop().astype(np.float32)), "float32"),
        (lambda said, found: found.append(found.pop() - 1000), "chunk -"),
        (lambda said, found: found.append(found.pop() + 1000), "chunk 1"),
    ],
)
def test_damaged_neighbours_are_refused_with_the_command(corpus, change, named):
    array, description = paths_of(corpus[0])
    before = array.read_bytes(), description.read_text()
    said, found = json.loads(before[1]), [np.load(array)]
    change(said, found)
    try:
        description.write_text(json.dumps(said))
        array.write_bytes(b"")
        for each in found:
            np.save(array, each)
        with pytest.raises(UserError) as error:
            load_data(run_of(corpus[0])).batch(0, 4)
    finally:
        array.write_bytes(before[0])
        description.write_text(before[1])
    assert names(error, named, "make it again")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--neighbours", "500"], ["neighbours=500", "document 0"]),
        (["--index", "IVF9999,Flat"], ["IVF9999,Flat"]),
        (["--tokenizer", "bpe"], ["tokenizer=bpe", "embedding"]),
    ],
)
def test_what_an_index_cannot_do_is_said_in_a_line(corpus, capsys, options, named):
    assert main(["data", "neighbours", corpus[0], "--chunk", "8", *options]) != 0
    said = capsys.readouterr().err
    assert all(name in said for name in named) and "Traceback" not in said


def test_without_faiss_a_line_says_what_to_install(corpus, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    assert main(["data", "neighbours", corpus[0], "--chunk", "8"]) != 0
    assert "mtx[retro]" in capsys.readouterr().err


def test_a_frozen_bert_gives_the_mean_of_what_it_makes(corpus, tmp_path):
    """From a checkpoint as training leaves it, against the reference's last layer; and one command
    finds neighbours by it."""
    tokenizer = train_wordpiece(
        ["abcdefghijklmnopqrstuvwxyz " * 9, " ".join("abcdefgh")], vocab=300
    )
    model = ModelConfig(
        family="bert", layers=2, hidden=16, heads=2, sequence=24, compute_dtype="float32",
        vocab=tokenizer.vocab, vocab_multiple=8, init_std=0.3,
    )  # fmt: skip
    trainer, out = Trainer(RunConfig(model=model, layout=Layout())), tmp_path / "bert"
    params = params_of(model)
    hidden = jax.jit(functools.partial(reference_bert.hidden, post=False, form="tanh"))
    with Checkpoints(out / "checkpoints") as checkpoints:
        checkpoints.save(trainer, trainer.state_from(params), tokenizer=tokenizer)
    data = ChunkedDataset(corpus[0], 8)
    tokens = data.chunks(np.arange(40), 8, END)
    embed = FrozenEmbedding(out, ByteTokenizer())
    special = find_special_tokens(tokenizer)
    for row, got in zip(tokens, embed(tokens), strict=True):
        ids = tokenizer.encode(bytes(row[row != END].astype(np.uint8)).decode())
        ids = np.concatenate([[special.cls], ids, [special.sep]])
        padded = np.append(ids, np.full(24 - len(ids), special.pad))[None].astype(np.int32)
        batch = {"tokens": padded, "types": 0 * padded, "segments": (padded != special.pad) * 1}
        want = jax.device_get(hidden(params, batch))[0, : len(ids)].mean(axis=0)
        np.testing.assert_allclose(got, want / np.linalg.norm(want), atol=1e-5)
    command = ["data", "neighbours", corpus[0], "--chunk", "8", "--embedding", str(out)]
    assert main([*command, "--split", "3,1", "--json"]) == 0
    said = json.loads(paths_of(corpus[0])[1].read_text())["embedding"]
    assert (said["model"], said["step"]) == (str(out), 0)
    with pytest.raises(UserError) as error:
        FrozenEmbedding(out, tokenizer, step=3)
    names(error, "3")
