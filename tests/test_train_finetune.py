"""Fine-tuning: examples as rows, the head against a reference on every layout, and learning."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_bert
from errors import names
from flax import nnx
from parameters import params_of
from reference import assert_same

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli import main
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.special_tokens import SpecialTokens
from mtx.data.tokenizer import ByteTokenizer, train_wordpiece
from mtx.errors import UserError
from mtx.evaluation.choice import Question
from mtx.layers.bert import Classes, ClassifierHead
from mtx.layers.sublayer import Build
from mtx.sharding.mesh import Axes
from mtx.step.trainer import Trainer
from mtx.train.examples import (
    Example,
    Labelled,
    Row,
    Task,
    classes_of,
    encode_labelled,
    encode_questions,
    make_batch,
    make_row,
    multiple_choice,
    read_labelled,
    training_batch,
)
from mtx.train.finetune import FinetuneTrainer, Finetuning, load_finetuned, with_pretrained

SPECIAL = SpecialTokens(cls=96, sep=97, mask=98, pad=99)
MODEL = ModelConfig(
    family="bert", layers=2, hidden=32, heads=4, sequence=16, vocab=100, compute_dtype="float32",
    vocab_multiple=8, init_std=0.1,
)  # fmt: skip
CLASSES = Task(labels=("no", "yes", "maybe"), special=SPECIAL, sequence=16)
CHOICE = Task(options=4, special=SPECIAL, sequence=16)


def trainer_of(task, layout, *, rows=8, **changes):
    run = RunConfig(model=replace(MODEL, **changes), layout=layout, global_batch=rows)
    return FinetuneTrainer(run, task)


def random_examples(task, count, seed=0):
    """Examples with rows of one or two texts of random lengths."""
    random = np.random.default_rng(seed)

    def row():
        first, second = (random.integers(0, 96, random.integers(1, 9)) for _ in range(2))
        return make_row(task, first, *([second] if random.random() < 0.7 else []))

    return [
        Example(tuple(row() for _ in range(task.options)), int(random.integers(task.answers)))
        for _ in range(count)
    ]


def random_params(trainer, seed=0):
    """In canonical form; quicker to make than initial values, which need a compiled program."""
    shapes = jax.eval_shape(trainer.to_canonical, trainer.states.shapes.params)
    random = np.random.default_rng(seed)

    def values(path, shape):
        mean = float(path[-1].key == "scale")
        return random.normal(mean, 0.25, shape.shape).astype(np.float32)

    return jax.tree.map_with_path(values, shapes)


@functools.partial(jax.jit, static_argnums=2)
def log_probabilities(params, batch, task):
    """float32 [examples, answers] by the reference."""
    x = reference_bert.hidden(params, batch, post=False, form="tanh")
    head = params["head"]
    pooled = jnp.tanh(x[:, 0] @ head["pooler"]["w"] + head["pooler"]["b"])
    logits = pooled @ head["classifier"]["w"] + head["classifier"]["b"]
    return jax.nn.log_softmax(logits.reshape(-1, task.answers))


def reference_loss(params, batch, examples, task):
    log_p = log_probabilities(params, batch, task)[: len(examples)]
    labels = np.array([example.label for example in examples])
    return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()


# --- the head -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task, layout",
    [
        (CLASSES, Layout(data=2, pipe=2, tensor=2, microbatch=4, idle="phases")),
        (CHOICE, Layout(data=2, tensor=2, microbatch=4)),
    ],
    ids=["classes", "choice"],
)
def test_loss_and_gradients_are_those_of_the_reference(task, layout):
    """And a model's answers; the last batch is not full."""
    trainer = trainer_of(task, layout)
    params = random_params(trainer)
    state = trainer.state_from(params)
    assert set(params["embed"]) == {"tokens", "positions", "types"}
    assert set(params["head"]) == {"norm", "pooler", "classifier"}
    examples = random_examples(task, trainer.batch - 1)
    batch = make_batch(task, examples, trainer.batch)
    arrays = {name: batch[name] for name in ("tokens", "types", "segments")}
    want = jax.jit(jax.value_and_grad(lambda p: reference_loss(p, arrays, examples, task)))(params)
    got = trainer.loss_and_gradients(state, batch)
    if task is CHOICE:  # adding the same to all options changes nothing: 0 except for rounding
        assert abs(got[1]["head"]["classifier"].pop("b")) < 1e-7
        want[1]["head"]["classifier"].pop("b")  # a unit in the last place of 1, on some CPUs
    assert_same(got, jax.device_get(want))
    judged = trainer.judge(state, examples * 3)
    wanted = np.asarray(log_probabilities(params, arrays, task))[: len(examples)]
    np.testing.assert_allclose(judged.log_probabilities, np.tile(wanted, (3, 1)), atol=2e-6)
    assert judged.examples == len(examples) * 3
    assert judged.answers == wanted.argmax(1).tolist() * 3
    right = [answer == example.label for answer, example in zip(judged.answers, examples * 3)]
    assert judged.accuracy == np.mean(right)
    assert judged.loss == pytest.approx(float(want[0]), rel=1e-5)


def test_dropout_follows_from_the_rng_of_a_row_alone():
    """Thus it is the same on every layout: rows go to devices with their rng."""
    model = replace(MODEL, dropout=0.5)

    @jax.jit
    def log_probabilities(x_BSD, rng_B):
        build = Build(
            hidden=32, init_std=0.02, output_std=0.02, dtype="float32", axes=Axes(),
            kernel="blocked", site=0,
        )  # fmt: skip
        config = Classes.instead_of(model.stack().head, outputs=3, options=1, dropout=0.5)
        head = ClassifierHead(config, build, nnx.Rngs(params=0))
        return head.log_probabilities(x_BSD), head.log_probabilities(x_BSD, rng_B)

    x_BSD = np.random.default_rng(1).normal(size=(6, 16, 32)).astype(np.float32)
    rng_B = np.array([3, 4, 5, 3, 6, 7], np.int32)
    plain, dropped = map(np.asarray, log_probabilities(x_BSD, rng_B))
    assert (abs(dropped - plain).max(axis=1) > 1e-3).all()
    _, backwards = log_probabilities(x_BSD[::-1], rng_B[::-1])
    np.testing.assert_array_equal(backwards[::-1], dropped)
    _, same_row = map(np.asarray, log_probabilities(np.tile(x_BSD[:1], (6, 1, 1)), rng_B))
    assert (same_row[0] == same_row[3]).all() and len(np.unique(same_row[:, 0])) == 5


def test_pretrained_parameters_are_taken_over_and_the_head_is_new():
    trainer = trainer_of(CLASSES, Layout(microbatch=4), layers=1)
    before = Trainer(trainer.run, mesh=trainer.mesh)
    old = random_params(before)
    state = with_pretrained(trainer, before, before.state_from(old).params)
    new = trainer.to_canonical(jax.device_get(state.params))
    assert set(old["head"]) - set(new["head"]) == {"masked", "binary"}
    classifier = new["head"].pop("classifier")
    kept = {name: old["head"][name] for name in new["head"]}
    jax.tree.map(np.testing.assert_array_equal, new, old | {"head": kept})
    assert classifier["w"].shape == (32, 3)
    assert np.std(classifier["w"]) == pytest.approx(MODEL.init_std, rel=0.3)


# --- examples -------------------------------------------------------------------------------------


def test_rows_stand_between_special_tokens():
    ids = np.arange(20, dtype=np.int32)
    alone, pair = make_row(CLASSES, ids[:3]), make_row(CLASSES, ids[:3], ids[5:7])
    assert (alone.tokens.tolist(), alone.second) == ([96, 0, 1, 2, 97], 5)
    assert (pair.tokens.tolist(), pair.second) == ([96, 0, 1, 2, 97, 5, 6, 97], 5)
    assert make_row(CLASSES, ids).tokens.tolist() == [96, *range(14), 97]


@pytest.mark.parametrize(
    "lengths, kept",
    [
        ((20, 20), (7, 6)),
        ((3, 20), (3, 10)),
        ((20, 3), (10, 3)),
        ((6, 7), (6, 7)),
        ((20, 0), (13, 0)),
    ],
)
def test_the_longer_text_loses_its_end(lengths, kept):
    first, second = (np.arange(length, dtype=np.int32) for length in lengths)
    row = make_row(CLASSES, first, second)
    wanted = [96, *range(kept[0]), 97, *range(kept[1]), 97]
    assert row == Row(pytest.approx(wanted), kept[0] + 2) and len(row.tokens) <= 16


def test_batches_say_what_counts():
    examples = random_examples(CHOICE, 2)
    batch = make_batch(CHOICE, examples, 3)
    assert batch["tokens"].shape == (12, 16) and batch["weights"].sum() == 2
    assert np.argwhere(batch["weights"]).tolist() == [[0, 0], [4, 0]]
    assert np.flatnonzero(batch["labels"]).tolist() == [examples[0].label, 4 + examples[1].label]
    assert (batch["tokens"][8:] == 99).all() and not batch["segments"][8:].any()
    row = examples[1].rows[2]
    assert batch["segments"][6].sum() == len(row.tokens)
    assert np.flatnonzero(batch["types"][6]).tolist() == [*range(row.second, len(row.tokens))]


def test_each_epoch_sees_every_example_once_in_an_order_of_its_own():
    examples = [Example((make_row(CLASSES, np.array([i])),), 0) for i in range(12)]
    seen = np.concatenate([
        training_batch(CLASSES, examples, step=step, count=8, seed=1)["tokens"][:, 1]
        for step in range(3)
    ])  # fmt: skip
    assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(12))
    assert seen[:12].tolist() != seen[12:].tolist()
    other = training_batch(CLASSES, examples, step=0, count=8, seed=2)
    assert other["tokens"][:, 1].tolist() != seen[:8].tolist()
    rng = training_batch(CLASSES, examples, step=1, count=8, seed=1)["rng"]
    assert len(set(rng.tolist())) == 8 and (rng >= 0).all()


def test_labelled_texts_are_read(tmp_path):
    file = tmp_path / "train.jsonl"
    records = [{"text": "a", "label": 10}, {"text": "b", "text_pair": "c", "label": 2}]
    file.write_text("\n".join(map(json.dumps, records)))
    found = read_labelled([str(file)])
    assert [record[:3] for record in found] == [("a", None, "10"), ("b", "c", "2")]
    assert classes_of(found) == ("2", "10"), "numbers by their value"
    task = Task(labels=("2", "10"), special=SPECIAL, sequence=16)
    one, pair = encode_labelled(task, ByteTokenizer(), found)
    assert (one.label, pair.label) == (1, 0)
    assert pair.rows[0].tokens.tolist() == [96, 98, 97, 99, 97]
    with pytest.raises(UserError) as error:
        encode_labelled(CLASSES, ByteTokenizer(), found)
    names(error, "line 1", "'10'")
    with pytest.raises(UserError) as error:
        classes_of(found[1:])
    names(error, "'2'")


@pytest.mark.parametrize(
    "record, values",
    [
        ({"text": "a"}, ("'label'",)),
        ({"text": "a", "label": True}, ("'label'",)),
        ({"label": 1}, ("'text'",)),
        ({"text": "a", "text_pair": 3, "label": 1}, ("'text_pair'",)),
    ],
)
def test_bad_examples_are_named(tmp_path, record, values):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps(record))
    with pytest.raises(UserError) as error:
        read_labelled([str(file)])
    names(error, *values)


def test_questions_become_a_row_for_each_option():
    def question(text, *options):
        return Question(article="xyz", question=text, options=options, answer=1, where="here")

    task = Task(options=2, special=SPECIAL, sequence=16)
    blank, asked = encode_questions(
        task, ByteTokenizer(), [question("a_c", "B", "D"), question("a?", "B", "D")]
    )
    article = [*b"xyz", 97]
    assert [row.tokens.tolist() for row in blank.rows] == [
        [96, *b"aBc", 97, *article], [96, *b"aDc", 97, *article],
    ]  # fmt: skip
    assert asked.rows[0].tokens.tolist() == [96, *b"a? B", 97, *article] and asked.label == 1
    with pytest.raises(UserError) as error:
        multiple_choice(None, [question("?", "a", "b"), question("?", "a", "b", "c")], sequence=16)
    names(error, "3", "2")
    with pytest.raises(UserError) as error:
        encode_questions(task, ByteTokenizer(), [question("?", "a", "b", "c")])
    names(error, "3", "2")


@pytest.mark.parametrize(
    "make, values",
    [
        (lambda: Finetuning(epochs=0), ("epochs=0", "1")),
        (lambda: Finetuning(warmup_fraction=1.0), ("warmup_fraction=1.0",)),
        (
            lambda: trainer_of(CHOICE, Layout(microbatch=2)),
            ("microbatch=2",),
        ),
        (lambda: FinetuneTrainer(RunConfig(), CLASSES), ("family='gpt'",)),
        (lambda: classes_of([Labelled("", None, "a", "")]), ("'a'",)),
    ],
)
def test_mistakes_are_named(make, values):
    with pytest.raises(UserError) as error:
        make()
    names(error, *values)


# --- the command ----------------------------------------------------------------------------------

WORDS = "class module value number name list string method object key item line file test".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT's run, and questions whose right option contains "import"."""
    folder = tmp_path_factory.mktemp("finetune")
    tokenizer = train_wordpiece([" ".join([*WORDS, "import"]) * 4], vocab=100)
    model = replace(MODEL, vocab=tokenizer.vocab)
    trainer = Trainer(RunConfig(model=model, layout=Layout(microbatch=2), global_batch=2))
    with Checkpoints(folder / "run" / "checkpoints") as checkpoints:
        checkpoints.save(trainer, trainer.state_from(params_of(model)), tokenizer=tokenizer)
    random = np.random.default_rng(0)
    for name, count in (("train", 320), ("valid", 40)):
        lines = []
        for _ in range(count):
            options, right = random.choice(WORDS, (2, 3)).tolist(), int(random.integers(2))
            options[right][random.integers(3)] = "import"
            lines.append({
                "article": "", "question": "_", "options": [" ".join(option) for option in options],
                "answer": "AB"[right],
            })  # fmt: skip
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_the_command_learns_which_option_is_right(folder, monkeypatch, capsys):
    """And `mtx evaluate` of the resulting run finds the same."""
    monkeypatch.chdir(folder)
    given = ["--task", "race", "--train", "train.jsonl", "--valid", "valid.jsonl", "--out", "out"]
    how = ["--epochs", "3", "--batch", "16", "--optimizer.lr", "3e-3", "--model.dropout", "0"]
    assert main(["finetune", "run", *given, *how, "--json"]) == 0
    results = json.loads((folder / "out/finetune.json").read_text())
    assert json.loads(capsys.readouterr().out) == results
    assert results["accuracy"] > 0.9
    assert [epoch["epoch"] for epoch in results["epochs"]] == [1, 2, 3]
    assert results["epochs"][0]["train_loss"] > results["epochs"][2]["train_loss"]
    asked = ["evaluate", "out", "--task", "race", "--path", "valid.jsonl", "--out", "judged.json"]
    assert main([*asked, "--layout.pipe", "2"]) == 0
    judged = json.loads((folder / "judged.json").read_text())
    assert judged["accuracy"] == results["accuracy"] and judged["examples"] == 40
    assert judged["loss"] == pytest.approx(results["valid_loss"], rel=1e-4)
    trainer, state, _ = load_finetuned(folder / "out")
    assert trainer.task.options == 2 and int(state.step) == 60
    for task in ("mlm", "classes"):
        assert main(["evaluate", "out", "--task", task, "--path", "valid.jsonl"]) == 2
        assert f"fine-tuned for the task race, not {task}" in capsys.readouterr().err
    assert main(["finetune", "run", *given]) == 2
    assert "has a checkpoint already" in capsys.readouterr().err


def test_an_end_in_the_midst_keeps_the_epochs_before_it(folder, monkeypatch, tmp_path):
    judge, judged = FinetuneTrainer.judge, []

    def judge_twice(trainer, state, examples):
        if len(judged) == 2:
            raise KeyboardInterrupt
        judged.append(judge(trainer, state, examples))
        return judged[-1]

    monkeypatch.chdir(folder)
    monkeypatch.setattr(FinetuneTrainer, "judge", judge_twice)
    given = ["--task", "race", "--train", "valid.jsonl", "--valid", "valid.jsonl", "--batch", "8"]
    assert main(["finetune", "run", *given, "--out", str(tmp_path / "out")]) == 130
    monkeypatch.setattr(FinetuneTrainer, "judge", judge)
    trainer, state, _ = load_finetuned(tmp_path / "out")
    assert int(state.step) == 10 and trainer.run.steps == 15
    extra = Checkpoints(tmp_path / "out").extra()
    assert [epoch["epoch"] for epoch in extra["epochs"]] == [1, 2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "RUN_DIR"),
        (["run"], "--train is missing"),
        (["run", "--train", "train.jsonl"], "--valid is missing"),
        (["run", "--train", "train.jsonl", "--valid", "no"], "line 1: 'label' must be a text"),
        (
            ["run", "--task", "race", "--train", "train.jsonl", "--valid", "no"],
            "no must be a file or a folder",
        ),
        (
            ["run", "--task", "race", "--train", "train.jsonl", "--valid", "valid.jsonl",
             "--layout.microbatch", "1"],
            "microbatch=1 cannot hold whole examples",
        ),
        (
            ["run", "--task", "race", "--train", "train.jsonl", "--valid", "valid.jsonl",
             "--epochs", "0"],
            "epochs=0 must be at least 1",
        ),
    ],
)  # fmt: skip
def test_mistakes_of_the_command_are_one_line(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    assert main(["finetune", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert sorted(folder.iterdir()) == before
