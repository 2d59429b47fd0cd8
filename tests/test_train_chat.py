"""Fine-tuning on conversations: what is learned from one, rows shared by several, the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from errors import names
from parameters import params_of

from mtx.checkpoint.checkpoints import Checkpoints
from mtx.cli import main
from mtx.config import ModelConfig, RunConfig
from mtx.conversion.convert import to_huggingface
from mtx.data.chat import (
    ChatML,
    ChatRows,
    Jinja,
    Message,
    encode_chat,
    encode_prompt,
    encode_text,
    pack,
)
from mtx.data.subwords import SubwordTokenizer
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.step.trainer import Trainer
from mtx.train.chat import described, make_rows, read_conversations, template_from

ASKED = [
    Message("system", "Be brief."), Message("user", "Two?"), Message("assistant", "2."),
    Message("user", "And three?"), Message("assistant", "3."),
]  # fmt: skip
# Like Llama 3's: a first token, and a header and an end of each turn.
OWN = Jinja(
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}<eot>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    (("bos_token", "<s>"),),
    ("<s>", "<eot>"),
)


def letters() -> SubwordTokenizer:
    """One token per character, plus OWN's special tokens."""
    vocab = {chr(n): n - 31 for n in range(32, 127)} | {"\n": 0}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.add_special_tokens(["<s>", "<eot>"])
    return SubwordTokenizer(json.loads(model.to_str()), name="letters", eod="none")


@pytest.mark.parametrize(
    ("tokenizer", "template", "learned", "ends"),
    [
        (ByteTokenizer(), ChatML(), "2.<|im_end|>3.<|im_end|>", "<|im_end|>"),
        (letters(), OWN, "2.<eot>3.<eot>", 97),
    ],
)
def test_the_assistants_words_are_learned_up_to_the_end_of_its_turn(
    tokenizer, template, learned, ends
):
    template = template_from(json.loads(json.dumps(described(template))))
    tokens = encode_chat(tokenizer, template, ASKED)
    want = encode_text(tokenizer, template, learned)
    np.testing.assert_array_equal(tokens.ids[tokens.learned], want)
    prompt, stop = encode_prompt(tokenizer, template, ASKED[:4])
    assert stop == (ends,)
    # An answer follows the same tokens as in training.
    first = np.flatnonzero(tokens.learned)[len(encode_text(tokenizer, template, learned)) // 2]
    assert prompt == tokens.ids[:first].tolist()


def test_a_mark_in_a_message_is_refused():
    with pytest.raises(UserError) as error:
        encode_chat(letters(), OWN, [Message("user", "a<eot>b"), Message("assistant", "c")])
    assert names(error, "message 1", "<eot>")


def test_rows_hold_every_conversation_once_and_are_full():
    lengths = np.random.default_rng(0).integers(1, 33, 500).tolist()
    rows = pack(lengths, 32, seed=3)
    assert sorted(n for row in rows for n in row) == list(range(500))
    filled = [sum(lengths[n] for n in row) for row in rows]
    assert max(filled) <= 32 and len(rows) < 1.06 * sum(lengths) / 32
    assert rows == pack(lengths, 32, seed=3) != pack(lengths, 32, seed=4)


def test_a_row_is_its_conversations_each_by_itself():
    tokenizer, template = ByteTokenizer(), ChatML()
    some = [
        encode_chat(tokenizer, template, [Message("user", "a" * n), Message("assistant", "b" * n)])
        for n in (3, 9)
    ]
    rows = ChatRows(conversations=some, sequence=256, seed=0)
    batch = rows.training_batch(0, 1)
    assert len(rows) == 1 and batch["weights"].sum() == rows.learned
    start = 0
    for segment, n in enumerate(rows.rows[0]):
        end = start + len(some[n].ids) - 1
        np.testing.assert_array_equal(batch["tokens"][0, start:end], some[n].ids[:-1])
        np.testing.assert_array_equal(batch["targets"][0, start:end], some[n].ids[1:])
        np.testing.assert_array_equal(batch["positions"][0, start:end], np.arange(end - start))
        assert (batch["segments"][0, start:end] == segment).all()
        weights = batch["weights"][0, start:end]
        np.testing.assert_array_equal(weights, some[n].learned[1:])
        start = end
    assert (batch["segments"][0, start:] == 2).all() and not batch["weights"][0, start:].any()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": []}', ("line 2", "messages=[]")),
        ('{"messages": [{"role": "bot", "content": "a"}]}', ("line 2, message 1", "'bot'", "user")),
        ('{"messages": [{"role": "user", "content": 3}]}', ("line 2, message 1", "content")),
        ('{"messages": [{"role": "user", "content": "a"}]}', ("line 2", "assistant")),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_line(tmp_path, line, said):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = tmp_path / "chat.jsonl"
    path.write_text(f"{json.dumps(good)}\n{line}\n")
    with pytest.raises(UserError) as error:
        read_conversations([str(path)])
    assert names(error, *said)


def test_a_conversation_that_no_row_can_hold_is_refused_or_skipped(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(_line("a" * n, "b") for n in (2, 200)))
    some, model = read_conversations([str(path)]), ModelConfig(sequence=128)
    with pytest.raises(UserError) as error:
        make_rows(some, ByteTokenizer(), ChatML(), model, seed=0)
    assert names(error, "line 2", "sequence=128", "--long skip")
    rows, left_out = make_rows(some, ByteTokenizer(), ChatML(), model, seed=0, long="skip")
    assert len(rows.conversations) == left_out == 1


def _line(question: str, answer: str) -> str:
    said = (("user", question), ("assistant", answer))
    messages = [{"role": role, "content": content} for role, content in said]
    return json.dumps({"messages": messages}) + "\n"


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An untrained base model, and questions with one answer each."""
    model = ModelConfig(
        family="llama", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, sequence=128, vocab=256,
        compute_dtype="float32", init_std=0.2,
    )  # fmt: skip
    trainer = Trainer(RunConfig(model=model, global_batch=8))
    with Checkpoints(tmp_path / "base/checkpoints") as checkpoints:
        checkpoints.save(trainer, trainer.state_from(params_of(model)), tokenizer=ByteTokenizer())
    lines = [_line("Say " + word, word) for word in ("one", "two", "six", "ten") * 12]
    (tmp_path / "chat.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_teaches_adapters_and_leaves_the_base_alone(folder, capsys):
    layout = ("--layout.data", "2", "--layout.pipe", "2", "--layout.tensor", "2")
    how = ("--epochs", "4", "--batch", "8", "--optimizer.lr", "2e-2", "--model.lora-rank", "4")
    given = ("--task", "chat", "--train", "chat.jsonl", "--out", "out", *how, *layout)
    assert main(["finetune", "base", *given, "--layout.virtual", "2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["valid_loss"] < 0.6 * results["before"]["loss"]
    assert [epoch["epoch"] for epoch in results["epochs"]] == [1, 2, 3, 4]
    with Checkpoints("base").open() as base, Checkpoints("out").open() as tuned:
        paths = [name for name in base.catalog if name.startswith("params.")]
        assert all(np.array_equal(base.read(name), tuned.read(name)) for name in paths)
        assert len(paths) < len([name for name in tuned.catalog if name.startswith("params.")])
    # Merged: `to_huggingface` reads back what it has written, and compares logits.
    made = to_huggingface("out", "merged", check="ours")
    assert made.model.lora_rank == 0 and made.comparison is not None
    assert made.comparison.largest_difference < 1e-5 * made.comparison.largest_logit
    asked = ("--chat", "--prompt", "Say two", "--tokens", "5", "--temperature", "0", "--json")
    assert main(["generate", "out", *asked]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt"].endswith("Say two<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--task", "classes", "--valid", "chat.jsonl", "--model.lora-rank", "4"], "lora_rank=4"),
        (["--task", "chat", "--held-out", "1"], "held_out=1"),
        (["--task", "chat", "--model.lora-on", "mlp"], "lora_on=('mlp',)"),
        (["--task", "chat", "--model.lora-rank", "4", "--model.lora-on", "mpl"], "mlp"),
    ],
)
def test_mistakes_of_the_command_are_one_line(folder, capsys, changes, said):
    assert main(["finetune", "base", "--train", "chat.jsonl", *changes]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
    assert not (folder / "runs").exists()
