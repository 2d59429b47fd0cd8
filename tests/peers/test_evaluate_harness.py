"""The adapter for lm-evaluation-harness, run by the harness itself, on tasks next to this file."""

from __future__ import annotations

import json

import likelihoods
import numpy as np
import pytest
from errors import names
from likelihoods import MODEL

from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is absent: its adapter is not tried")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from mtx.evaluation.harness import HarnessModel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # from the harness's imports
TASKS = {
    "mtx_choice": """
task: mtx_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{options}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "mtx_rolling": """
task: mtx_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "mtx_until": """
task: mtx_until
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match}]
""",
}
DOCUMENTS = [
    {"q": "a b", "options": ["c", "cd", "e"], "label": 0, "text": "some text to read"},
    {"q": "x", "options": ["y", "z", "w"], "label": 2, "text": "short"},
]


@pytest.fixture(scope="module")
def model():
    return HarnessModel(*likelihoods.sharded(), ByteTokenizer())


@pytest.fixture(scope="module")
def log_probabilities(model):
    return likelihoods.log_probabilities_of(model._trainer, model._state)


def requests(kind, *arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=some, idx=i)
        for i, some in enumerate(arguments)
    ]


def log_likelihood(log_probabilities, context, target):
    ids = [*context, *target]
    return sum(
        log_probabilities(ids[max(0, end - MODEL.sequence) : end])[ids[end]]
        for end in range(len(context), len(ids))
    )


def test_log_likelihoods_are_those_of_the_reference(model, log_probabilities):
    pairs = [("a b", " c"), ("", "word"), ("the \u00e9t\u00e9", " end"), ("x", "")]
    got = model.loglikelihood(requests("loglikelihood", *pairs))
    assert got[3] == (0.0, True)
    for (context, target), (value, _) in zip(pairs[:3], got):
        context = list(context.encode()) or [0]
        wanted = log_likelihood(log_probabilities, context, list(target.encode()))
        assert value == pytest.approx(wanted, rel=1e-4)


def test_rolling_log_likelihoods_see_as_much_as_they_can(model, log_probabilities):
    """40 tokens in windows of 16: 16, 16 and 8; the last 8 see at least 8 tokens before them."""
    text = "x" * 3 + "the quick brown fox jumps over a lazy"
    ids = [0, *text.encode()]
    assert len(ids) == 41
    wanted = 0.0
    for target in range(1, 41):
        start = {0: 0, 1: 16, 2: 24}[(target - 1) // 16]
        wanted += log_probabilities(ids[start:target])[ids[target]]
    got = model.loglikelihood_rolling(requests("loglikelihood_rolling", (text,), ("",)))
    assert got == pytest.approx([wanted, 0.0], rel=1e-4)


def test_answers_end_before_their_stops(model):
    plain = {"max_gen_toks": 5, "do_sample": False}
    whole, again = model.generate_until(requests("generate_until", ("ab", plain), ("ab", plain)))
    assert whole and whole == again
    stop = whole[1:3]
    (cut,) = model.generate_until(requests("generate_until", ("ab", {**plain, "until": [stop]})))
    assert cut == whole[: whole.index(stop)]
    with pytest.raises(UserError) as error:
        model.generate_until(requests("generate_until", ("ab", {**plain, "beams": 3})))
    names(error, "'beams'", "3")


def test_the_harness_runs_its_tasks(model, log_probabilities, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0
    )["results"]
    right, rolling, words = 0, 0.0, 0
    for document in DOCUMENTS:
        context = list(document["q"].encode())
        scores = [
            log_likelihood(log_probabilities, context, list(f" {option}".encode()))
            for option in document["options"]
        ]
        right += int(np.argmax(scores)) == document["label"]
        text = document["text"]
        (value,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
        rolling, words = rolling + value, words + len(text.split())
    assert results["mtx_choice"]["acc,none"] == right / 2
    perplexity = np.exp(-rolling / words)
    assert results["mtx_rolling"]["word_perplexity,none"] == pytest.approx(perplexity, rel=1e-6)
    assert results["mtx_until"]["exact_match,none"] == 0
