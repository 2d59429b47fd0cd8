"""`mtx evaluate` from a checkpoint to a table and JSON, and what it refuses in one line."""

from __future__ import annotations

import json

import likelihoods
import pytest
from errors import names
from likelihoods import MODEL
from parameters import params_of

import mtx
from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli import main
from mtx.config import Layout, RunConfig
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.evaluation.choice import choice, read_race
from mtx.evaluation.cloze import cloze, read_passages
from mtx.evaluation.perplexity import perplexity
from mtx.step.trainer import Trainer

WIKITEXT = "The film 's 1 @,@ 000 dogs ( all of them ) . \n"
LAMBADA = '{"text": "the cat sat"}\n\n{"text": "word"}\n'
RACE = {"article": "A.", "questions": ["Q?"], "options": [["x", "xy", "z"]], "answers": ["B"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's folder with a checkpoint, and a file for each task."""
    folder = tmp_path_factory.mktemp("evaluate")
    run = RunConfig(model=MODEL, layout=Layout(microbatch=4), global_batch=8)
    trainer = Trainer(run)
    with Checkpoints(folder / "run" / "checkpoints") as checkpoints:
        state = trainer.state_from(params_of(MODEL, seed=3))
        checkpoints.save(trainer, state, tokenizer=ByteTokenizer())
    (folder / "wiki.test.tokens").write_text(WIKITEXT)
    (folder / "plain.txt").write_text("one two : three")
    (folder / "lambada.jsonl").write_text(LAMBADA)
    (folder / "race.txt").write_text(json.dumps(RACE))
    return folder


@pytest.fixture
def evaluate(folder, monkeypatch, capsys):
    """(arguments after the run's folder) -> (results as JSON, what was printed)"""
    monkeypatch.chdir(folder)

    def run(*arguments):
        assert main(["evaluate", "run", *arguments, "--out", "out.json"]) == 0
        return json.loads((folder / "out.json").read_text()), capsys.readouterr().out

    return run


def test_perplexity_of_wikitext_on_the_layout_of_the_run(evaluate):
    results, out = evaluate("--path", "wiki.test.tokens", "--stride", "4")
    expected = perplexity(
        *likelihoods.sharded(), ByteTokenizer(), [WIKITEXT], stride=4, wikitext=True
    )
    assert results["task"] == "perplexity" and results["path"] == ["wiki.test.tokens"]
    for name, value in vars(expected).items():
        assert results[name] == pytest.approx(value, rel=1e-6)
    assert results["wikitext"] is True and results["checkpoint"]["step"] == 0
    assert results["model"]["hidden"] == MODEL.hidden and results["layout"]["pipe"] == 1
    assert f"perplexity           {expected.perplexity:,.5g}\n" in out
    assert "adjusted perplexity  " in out
    assert "data 1 x pipe 1 x tensor 1, batches of 16" in out


def test_plain_text_on_another_layout(evaluate):
    results, out = evaluate(
        "--path", "plain.txt", "--stride", "4", "--layout.pipe", "2", "--layout.data", "3",
        "--layout.microbatch", "1",
    )  # fmt: skip
    expected = perplexity(*likelihoods.sharded(), ByteTokenizer(), ["one two : three"], stride=4)
    assert results["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert (results["layout"]["data"], results["global_batch"]) == (3, 15)
    assert results["wikitext"] is False and "adjusted" not in out and "original" not in out
    assert results["adjusted_perplexity"] is None and "bits per byte" in out
    assert "data 3 x pipe 2 x tensor 1, batches of 15" in out


def test_another_dtype_is_computed_in(evaluate):
    plain = "--path", "plain.txt", "--stride", "4"
    results, out = evaluate(*plain, "--model.compute-dtype", "bfloat16")
    expected = perplexity(*likelihoods.sharded(), ByteTokenizer(), ["one two : three"], stride=4)
    assert results["model"]["compute_dtype"] == "bfloat16" and "in bfloat16" in out
    assert 1e-6 < abs(results["loss"] - expected.loss) < 0.05  # rounded to 8 bits on the way
    with Checkpoints("run") as checkpoints:
        assert checkpoints.run().model.compute_dtype == "float32"


def test_a_loaded_model_measures_the_same(folder):
    layout = Layout(data=2, microbatch=2)
    loaded = mtx.load_model(folder / "run", layout=layout)
    assert loaded.trainer.run.layout == layout and loaded.trainer.run.model == MODEL
    texts = ["one two : three"]
    found = mtx.perplexity(*loaded, texts, stride=4)
    expected = perplexity(*likelihoods.sharded(), ByteTokenizer(), texts, stride=4)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    (folder / "short.txt").write_text(texts[0])
    whole = mtx.evaluate(folder / "run", folder / "short.txt", layout=layout)
    assert whole == mtx.perplexity(*loaded, texts, stride=16)
    with pytest.raises(UserError) as error:
        mtx.load_model(folder / "run", step=7)
    names(error, "step 7")


def same(results, expected):
    """Whether the JSON holds these scores."""
    wanted = {name: pytest.approx(value, rel=1e-5) for name, value in vars(expected).items()}
    return {name: results[name] for name in wanted} == wanted


def test_lambada_and_race_read_their_files(evaluate):
    results, out = evaluate("--task", "lambada", "--path", "lambada.jsonl", "--no-strict")
    texts = read_passages(["lambada.jsonl"])
    assert same(results, cloze(*likelihoods.sharded(), ByteTokenizer(), texts, strict=False))
    assert results["strict"] is False and "accuracy" in out and "%" in out
    results, out = evaluate("--task", "race", "--path", "race.txt", "--json")
    assert json.loads(out) == results
    assert same(results, choice(*likelihoods.sharded(), ByteTokenizer(), read_race(["race.txt"])))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run"], "--path is missing"),
        ([], "RUN_DIR"),
        (["nowhere", "--path", "plain.txt"], "nowhere does not exist"),
        (["run", "--path", "none.txt"], "'none.txt' does not exist"),
        (["run", "--path", "plain.txt", "--task", "lambda"], "invalid choice 'lambda'"),
        (["run", "--path", "plain.txt", "--task", "lambada"], "plain.txt, line 1 is not JSON"),
        (["run", "--path", "a.txt", "--task", "race", "--stride", "8"], "stride=8 is for the"),
        (["run", "--path", "plain.txt", "--mask-run", "2"], "mask_run=2 is for the task mlm, not"),
        (["run", "--path", "plain.txt", "--stride", "17"], "stride=17 must be between 1 and"),
        (["run", "--path", "plain.txt", "--step", "7"], "has no checkpoint of step 7"),
        (["run", "--path", "plain.txt", "--model.compute-dtype", "int8"], "'int8'"),
        (["run", "--path", "plain.txt", "--batch", "-1"], "batch=-1 must be at least 0"),
        (["run", "--path", "plain.txt", "--batch", "3"], "global_batch=3 cannot be divided"),
        (["run", "--path", "plain.txt", "--out", "no/out.json"], "out=no/out.json"),
        (["run", "--path", "plain.txt", "--out", "."], "out=. is a folder"),
        (["run", "--path", "plain.txt", "--layout.pipe", "3"], "layers=2 cannot be divided"),
        (["run", "--path", "plain.txt", "--task", "mlm"], "'gpt' has no masked tokens"),
        (["run", "--path", "plain.txt", "--virtual-devices", "x"], "--virtual-devices takes INT"),
        (["run", "--path", "plain.txt", "--layot.pipe", "2"], "did you mean --layout.pipe?"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    assert main(["evaluate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("mtx: ") and len(error.splitlines()) == 1
    assert sorted(folder.iterdir()) == before
