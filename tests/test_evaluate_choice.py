"""LAMBADA's cloze and RACE's multiple choice against the reference's likelihoods."""

from __future__ import annotations

import json

import likelihoods
import numpy as np
import pytest
from errors import names
from likelihoods import MODEL

from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.evaluation.choice import Question, choice, read_race
from mtx.evaluation.cloze import cloze, read_passages, split_passage

S = MODEL.sequence
PASSAGES = [
    "the cat sat on the mat.",  # longer than S: its beginning is left out
    "a b",
    "word",
    "x",
    'he said "no!"',
    "\u00e9t\u00e9 \u4e2d\u6587",
    "two  blanks  end \n",
    "the the the",
]


@pytest.fixture(scope="module")
def sharded():
    return likelihoods.sharded()


@pytest.fixture(scope="module")
def log_probabilities(sharded):
    return likelihoods.log_probabilities_of(*sharded)


@pytest.fixture(scope="module")
def continuation(log_probabilities):
    """(context, target) -> (ln p of the target, whether each of its tokens is the likeliest)."""

    def score(context, target):
        ids = [*(context or [ByteTokenizer().eod]), *target][-(S + 1) :]
        rows = [log_probabilities(ids[:end]) for end in range(len(ids) - len(target), len(ids))]
        return (
            sum(row[token] for row, token in zip(rows, target, strict=True)),
            all(row.argmax() == token for row, token in zip(rows, target, strict=True)),
        )

    return score


def encode(text):
    return ByteTokenizer().encode(text).tolist()


# --- cloze ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, context, target",
    [
        ("the cat sat.", "the cat", " sat."),
        ("the cat sat \n", "the cat", " sat"),
        ("no no no", "no no", " no"),
        ("banana ana", "banana", " ana"),
        ("word", "", " word"),
        ("\u4e2d \u6587", "\u4e2d", " \u6587"),
        ("tab\tend", "tab", " end"),
    ],
)
def test_the_strict_end_is_the_last_word_with_a_blank(text, context, target):
    got = split_passage(text, ByteTokenizer(), strict=True)
    assert [ids.tolist() for ids in got] == [encode(context), encode(target)]


def test_the_end_that_is_not_strict_is_the_last_token():
    context, target = split_passage("the cat.", ByteTokenizer(), strict=False)
    assert (context.tolist(), target.tolist()) == (encode("the cat"), encode("."))


@pytest.mark.parametrize("strict", [True, False])
def test_cloze_is_that_of_the_reference(sharded, continuation, strict):
    got = cloze(*sharded, ByteTokenizer(), PASSAGES, strict=strict)
    results = []
    for text in PASSAGES:
        *context, word = text.split()
        context, target = encode(" ".join(context)), encode(f" {word}")
        if not strict:
            context, target = encode(text)[:-1], encode(text)[-1:]
        elif "  " in text:
            context = encode("two  blanks")
        results.append(continuation(context, target))
    assert got.correct == sum(right for _, right in results)
    assert got.accuracy == got.correct / len(PASSAGES) and got.texts == len(PASSAGES)
    mean = -np.mean([likelihood for likelihood, _ in results])
    assert got.target_perplexity == pytest.approx(np.exp(mean), rel=1e-4)


class Spelled(ByteTokenizer):
    """Bytes with permuted ids, so that `ids` spell `text`."""

    def __init__(self, text, ids):
        super().__init__()
        left = [value for value in range(256) if value not in ids]
        fixed = dict(zip(text.encode(), ids, strict=True))
        self.ids = np.array([fixed[b] if b in fixed else left.pop() for b in range(256)], np.int32)

    def encode_all(self, texts):
        return [self.ids[ids] for ids in super().encode_all(texts)]


def test_every_token_of_a_strict_end_must_be_found(sharded, log_probabilities):
    """On a text that the model itself would write: "c xy", with ids for its bytes chosen so."""

    def written(start):
        ids = [start]
        while len(ids) < 4:
            ids.append(int(log_probabilities(ids).argmax()))
        return ids

    ids = next(ids for start in range(256) if len(set(ids := written(start))) == 4)
    tokenizer = Spelled("c xy", ids)
    rights = [
        [cloze(*sharded, tokenizer, [text], strict=strict).correct for strict in (True, False)]
        for text in ("c xy", "c zy", "c xz")
    ]
    assert rights[0] == [1, 1] and rights[2] == [0, 0]
    assert rights[1][0] == 0, "the first token of the word is wrong"


def test_passages_are_read_line_by_line(tmp_path):
    file = tmp_path / "lambada.jsonl"
    lines = [json.dumps({"text": text, "more": 1}, ensure_ascii=False) for text in PASSAGES]
    file.write_text("\n\n".join(lines) + "\n \n", encoding="utf-8")
    assert read_passages([str(file)]) == PASSAGES
    assert read_passages([str(tmp_path), str(file)]) == PASSAGES * 2


@pytest.mark.parametrize(
    "content, values",
    [
        (b"", ("record",)),
        (b'{"text": "a"}\n{"text"\n', ("line 2",)),
        (b'{"text": "a"}\n{"words": 1}\n', ("line 2", "'text'")),
        (b'{"text": 3}', ("line 1", "'text'")),
        (b'["text"]', ("line 1",)),
        (b'{"text": "\xff"}', ("line 1", "11", "0xff", "UTF-8")),
        (b'{"text": "\\ud800"}', ("pair",)),
        (b'{"text": " \\n"}', ("line 1",)),
        (b"[" * 100_000, ("line 1",)),
    ],
)
def test_bad_passages_are_named(tmp_path, content, values):
    file = tmp_path / "lambada.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_passages([str(file)])
    names(error, *values)


def test_an_end_longer_than_the_model_is_named(sharded):
    with pytest.raises(UserError) as error:
        cloze(*sharded, ByteTokenizer(), ["a b", "a " + "x" * 19])
    names(error, "text 2", "20", "sequence=16")
    fits = cloze(*sharded, ByteTokenizer(), ["a " + "x" * 15])
    assert fits.target_tokens == 16
    with pytest.raises(UserError) as error:
        cloze(*sharded, ByteTokenizer(), [" "])
    names(error, "text 1")


# --- choice ---------------------------------------------------------------------------------------

RACE = {
    "article": "It rains {a lot}.",
    "questions": ["Why _ ?", "Where?"],
    "options": [["wet", "wet sea", "dry", "\u00e9t\u00e9"], ["here", "there", "here", "no"]],
    "answers": ["B", "A"],
    "id": "high1.txt",
}


def test_race_is_read_in_all_its_forms(tmp_path):
    (tmp_path / "one.txt").write_text(json.dumps(RACE))
    (tmp_path / "pretty.json").write_text(json.dumps(RACE, indent=2))
    single = {
        "article": RACE["article"], "question": "Where?", "options": RACE["options"][1],
        "answer": "A",
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(single) + "\n" + json.dumps(single) + "\n")
    one, pretty, rows = (read_race([str(path)]) for path in sorted(tmp_path.iterdir()))
    assert [(q.question, q.options, q.answer) for q in one] == [
        ("Why _ ?", tuple(RACE["options"][0]), 1), ("Where?", tuple(RACE["options"][1]), 0),
    ]  # fmt: skip
    assert [q.prompt for q in pretty] == [q.prompt for q in one]
    assert one[0].prompt == "Article: It rains {a lot}.\n\nQuestion: Why _ ?\nAnswer:"
    assert [q.prompt for q in rows] == [one[1].prompt] * 2
    assert len(read_race([str(tmp_path)])) == 6


@pytest.mark.parametrize(
    "change, values",
    [
        ({"answers": ["B"]}, ("2", "1")),
        ({"answers": ["B", "E"]}, ("question 2", "'E'")),
        ({"answers": [1, 0]}, ("question 1", "1")),
        ({"options": [["a"], ["b", "c"]]}, ("question 1", "2", "26")),
        ({"options": [["a", " "], ["b", "c"]]}, ("question 1", "option B")),
        ({"options": [["a", 1], ["b", "c"]]}, ("option B",)),
        ({"questions": "Why?"}, ("'questions'",)),
        ({"article": None}, ("'article'",)),
    ],
)
def test_bad_questions_are_named(tmp_path, change, values):
    file = tmp_path / "race.txt"
    file.write_text(json.dumps(RACE | change))
    with pytest.raises(UserError) as error:
        read_race([str(file)])
    names(error, *values)


def question(options, answer, article="A"):
    return Question(article=article, question="?", options=options, answer=answer, where="here")


def test_choice_is_that_of_the_reference(sharded, continuation):
    questions = [
        question(("wet", "wet sea", "dry"), 1),  # one begins as another
        question(("wet sea", "wet", "dry"), 1),
        question(("a", "b", "c", "d"), 2),
        question(("\u00e9t\u00e9", "ete"), 0),
        *(question((letter, letter + "z", "q"), i % 3) for i, letter in enumerate("efghijk")),
    ]
    right, loss = np.zeros(3), 0.0
    for one in questions:
        targets = [encode(f" {option}") for option in one.options]
        context = encode(one.prompt)[-(S + 1 - max(map(len, targets))) :]
        scores = np.array([continuation(context, target)[0] for target in targets])
        sizes = np.array([len(target) for target in targets])
        bytes_ = np.array([len(option.encode()) for option in one.options])
        for way, values in enumerate((scores, scores / sizes, scores / bytes_)):
            right[way] += values.argmax() == one.answer
        loss -= scores[one.answer] / len(questions)
    got = choice(*sharded, ByteTokenizer(), questions)
    accuracies = [got.accuracy, got.accuracy_per_token, got.accuracy_per_byte]
    assert accuracies == pytest.approx(right / len(questions)) and got.questions == len(questions)
    assert got.mean_loss == pytest.approx(loss, rel=1e-4)
    assert got.chance == pytest.approx(np.mean([1 / len(one.options) for one in questions]))


def test_an_option_that_goes_on_is_less_likely_but_may_be_chosen_by_its_mean(sharded):
    ways = [choice(*sharded, ByteTokenizer(), [question(("a", "a" * 9), i)]) for i in (0, 1)]
    assert [way.accuracy for way in ways] == [1, 0]
    assert ways[0].accuracy_per_token + ways[1].accuracy_per_token == 1


def test_of_equal_options_the_first_is_chosen(sharded):
    results = [choice(*sharded, ByteTokenizer(), [question(("a", "a"), i)]) for i in (0, 1)]
    assert [result.accuracy for result in results] == [1, 0]


def test_a_long_article_loses_its_beginning(sharded):
    one = question(("yes", "no"), 0, article="rain " * 50)
    other = question(("yes", "no"), 0, article="snow " * 50)
    same = [choice(*sharded, ByteTokenizer(), [q]).mean_loss for q in (one, other)]
    assert same[0] == same[1]
    with pytest.raises(UserError) as error:
        choice(*sharded, ByteTokenizer(), [question(("a", "b" * 17), 0)])
    names(error, "option B", "18", "sequence=16")
    with pytest.raises(UserError) as error:
        choice(*sharded, ByteTokenizer(), [])
    names(error, "question")
