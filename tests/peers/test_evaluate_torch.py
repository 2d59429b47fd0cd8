"""Perplexity, cloze and choice against a GPT and evaluations written in torch alone.

Same weights, same text; relative 1e-4. Nothing of `mtx.evaluation` is used on torch's side.
"""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from mtx.api import init_params, trainer_for
from mtx.config import Layout, ModelConfig
from mtx.data.tokenizer import ByteTokenizer, train_bpe
from mtx.evaluation.choice import choice, read_race
from mtx.evaluation.cloze import cloze, read_passages
from mtx.evaluation.perplexity import perplexity

torch = pytest.importorskip("torch", reason="torch is absent: evaluations have no peer")

RELATIVE = 1e-4
MODEL = ModelConfig(
    layers=3, hidden=48, heads=4, sequence=64, vocab=320, compute_dtype="float32", init_std=0.25,
    vocab_multiple=8,
)  # fmt: skip
LAYOUTS = [
    Layout(microbatch=4),
    Layout(data=2, pipe=2, tensor=2, microbatch=2, stage_layers="balanced"),
]
TEXT = """
 = Harbour Light =

 The lighthouse 's keeper had 1 @,@ 204 oil @-@ lamps ( most of them " borrowed " ) in 1887 . It was
 4 @.@ 5 \u00b0 C , and the boats ' owners ; \u2014 all N of them : angry \u2014 left ! Who paid ?

 = = Later = =

 A caf\u00e9 , \u4e2d\u6587 [ sic ] .
""".replace("\n", " \n ")
PASSAGES = [
    "the keeper had lamps, and the boats left the harbour",
    "the lighthouse 's keeper " * 9 + "paid.",  # longer than S tokens
    "word",
    "a caf\u00e9 \u4e2d\u6587",
]
RACE = {
    "article": "The keeper lit the lamps before the storm. " * 3,
    "questions": ["When were the lamps lit?", "Who lit them?", "The keeper had _ ."],
    "options": [
        ["before", "before the storm", "after", "never"], ["the keeper", "a boat", "N", "nobody"],
        ["lamps", "oil-lamps", "a lamp", "\u00e9t\u00e9"],
    ],
    "answers": ["B", "A", "C"],
}  # fmt: skip


class TorchGPT(torch.nn.Module):
    """GPT-2's architecture with the weights of a canonical tree."""

    def __init__(self, params):
        super().__init__()
        embed, block = params["embed"], params["layers"]["block"]
        hidden, heads = MODEL.hidden, MODEL.heads
        tensor = torch.tensor
        self.tokens = torch.nn.Embedding.from_pretrained(tensor(embed["tokens"]))
        self.positions = torch.nn.Embedding.from_pretrained(tensor(embed["positions"]))
        self.norm = self._norm(params["head"]["norm"])
        self.layers = torch.nn.ModuleList()
        for i in range(MODEL.layers):
            layer = torch.nn.Module()
            layer.one, layer.two = (
                self._norm({k: v[i] for k, v in block[name].items()})
                for name in ("attention_norm", "mlp_norm")
            )
            attention, mlp = block["attention"], block["mlp"]
            layer.qkv = self._linear(attention["qkv"], i, (hidden, 3 * hidden))
            layer.out = self._linear(attention["out"], i, (hidden, hidden))
            layer.up = self._linear(mlp["up"], i, (hidden, 4 * hidden))
            layer.down = self._linear(mlp["down"], i, (4 * hidden, hidden))
            self.layers.append(layer)
        self.heads = heads

    @staticmethod
    def _norm(p):
        norm = torch.nn.LayerNorm(MODEL.hidden, eps=MODEL.norm_epsilon)
        norm.load_state_dict({"weight": torch.tensor(p["scale"]), "bias": torch.tensor(p["bias"])})
        return norm

    @staticmethod
    def _linear(p, i, shape):
        linear = torch.nn.Linear(*shape)
        weight = torch.tensor(p["w"][i].reshape(shape).T.copy())
        linear.load_state_dict({"weight": weight, "bias": torch.tensor(p["b"][i].reshape(-1))})
        return linear

    def forward(self, ids):
        rows, length = ids.shape
        x = self.tokens(ids) + self.positions(torch.arange(length))
        for layer in self.layers:
            q, k, v = layer.qkv(layer.one(x)).split(MODEL.hidden, dim=-1)
            q, k, v = (a.view(rows, length, self.heads, -1).transpose(1, 2) for a in (q, k, v))
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer.out(o.transpose(1, 2).reshape(rows, length, -1))
            h = torch.nn.functional.gelu(layer.up(layer.two(x)), approximate="tanh")
            x = x + layer.down(h)
        return self.norm(x) @ self.tokens.weight.T


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, seed=5)


@pytest.fixture(scope="module")
def peer(params):
    torch.set_num_threads(1)
    return TorchGPT(params).eval()


@pytest.fixture(scope="module", params=LAYOUTS, ids=["one_device", "eight"])
def ours(request, params):
    trainer = trainer_for(MODEL, request.param, global_batch=8)
    return trainer, trainer.state_from(params)


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([TEXT, *PASSAGES, RACE["article"]], vocab=MODEL.vocab)


def detokenised(text):
    """The published code's rules, in its order."""
    for there, then in [
        ("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" : ", ": "),
        (" ; ", "; "), (" . ", ". "), (" ! ", "! "), (" ? ", "? "), (" , ", ", "),
    ]:  # fmt: skip
        text = text.replace(there, then)
    text = re.sub(r"\(\s*([^\)]*?)\s*\)", r"(\1)", text)
    text = re.sub(r"\[\s*([^\]]*?)\s*\]", r"[\1]", text)
    text = re.sub(r"{\s*([^}]*?)\s*}", r"{\1}", text)
    text = re.sub(r"\"\s*([^\"]*?)\s*\"", r'"\1"', text)
    text = re.sub(r"'\s*([^']*?)\s*'", r"'\1'", text)
    for there, then in [
        ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \u00b0 ", "\u00b0"),
        (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
    ]:  # fmt: skip
        text = text.replace(there, then)
    return text


@torch.no_grad()
def peer_loss_sum(peer, ids, sequence, stride):
    """The loss by windows with a mask over the targets, padded at the tail."""
    count = max(math.ceil(max(len(ids) - 1 - stride, 0) / stride) + 1, 1)
    total = 0.0
    for window in range(count):
        tokens = list(ids[window * stride : window * stride + sequence + 1])
        mask = [1] * (len(tokens) - 1) + [0] * (sequence + 1 - len(tokens))
        tokens += [0] * (sequence + 1 - len(tokens))
        if window and stride < sequence:
            mask[:-stride] = [0] * (sequence - stride)
        tokens = torch.tensor(tokens)
        losses = torch.nn.functional.cross_entropy(
            peer(tokens[None, :-1])[0], tokens[1:], reduction="none"
        )
        total += float((losses.double() * torch.tensor(mask)).sum())
    return total


@torch.no_grad()
def peer_continuation(peer, context, target, eod):
    """(ln p of the target, whether each of its tokens is the argmax)"""
    ids = torch.tensor([*(context or [eod]), *target][-(MODEL.sequence + 1) :])
    logits = peer(ids[None, :-1])[0, -len(target) :]
    target = ids[-len(target) :]
    picked = logits.log_softmax(-1).gather(-1, target[:, None])
    return float(picked.double().sum()), bool((logits.argmax(-1) == target).all())


@pytest.mark.parametrize("stride", [32, 64])
def test_wikitext_perplexity_is_that_of_torch(ours, peer, tokenizer, stride):
    text = TEXT * 3
    got = perplexity(*ours, tokenizer, [text], stride=stride, wikitext=True)
    ids = tokenizer.encode(detokenised(text)).tolist()
    words = len(text.strip().split(" "))
    total = peer_loss_sum(peer, ids, MODEL.sequence, stride)
    assert len(ids) > 2 * MODEL.sequence and (got.tokens, got.original_tokens) == (len(ids), words)
    loss = total / (len(ids) - 1)
    ratio = (len(ids) - 1) / (words - 1)
    assert got.loss == pytest.approx(loss, rel=RELATIVE)
    assert got.perplexity == pytest.approx(math.exp(min(20, loss)), rel=RELATIVE)
    assert got.token_ratio == pytest.approx(ratio)
    adjusted = math.exp(min(20, loss * ratio))
    assert got.adjusted_perplexity == pytest.approx(adjusted, rel=RELATIVE)


def test_a_text_shorter_than_a_window_is_that_of_torch(ours, peer):
    for text in ("short", "x" * MODEL.sequence, "y" * (MODEL.sequence + 1)):
        got = perplexity(*ours, ByteTokenizer(), [text], stride=8)
        total = peer_loss_sum(peer, list(text.encode()), MODEL.sequence, 8)
        assert got.loss == pytest.approx(total / (len(text) - 1), rel=RELATIVE)


@pytest.mark.parametrize("strict", [True, False])
def test_cloze_is_that_of_torch(ours, peer, tokenizer, strict, tmp_path):
    file = tmp_path / "lambada.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in PASSAGES))
    got = cloze(*ours, tokenizer, read_passages([str(file)]), strict=strict)
    results = []
    for text in PASSAGES:
        context, target = tokenizer.encode(text)[:-1], tokenizer.encode(text)[-1:]
        if strict:
            before, _, word = text.rpartition(" ")
            context, target = tokenizer.encode(before.strip()), tokenizer.encode(" " + word)
        results.append(peer_continuation(peer, context.tolist(), target.tolist(), tokenizer.eod))
    assert got.correct == sum(right for _, right in results)
    mean = -np.mean([likelihood for likelihood, _ in results])
    assert got.target_perplexity == pytest.approx(math.exp(mean), rel=RELATIVE)


def test_choice_is_that_of_torch(ours, peer, tokenizer, tmp_path):
    file = tmp_path / "high1.txt"
    file.write_text(json.dumps(RACE))
    got = choice(*ours, tokenizer, read_race([str(file)]))
    right, loss = np.zeros(3), 0.0
    for question, options, answer in zip(RACE["questions"], RACE["options"], RACE["answers"]):
        prompt = f"Article: {RACE['article']}\n\nQuestion: {question}\nAnswer:"
        targets = [tokenizer.encode(f" {option}").tolist() for option in options]
        context = tokenizer.encode(prompt).tolist()
        context = context[-(MODEL.sequence + 1 - max(map(len, targets))) :]
        scores = np.array([
            peer_continuation(peer, context, target, tokenizer.eod)[0] for target in targets
        ])  # fmt: skip
        lengths = [
            [1] * len(options),
            [len(t) for t in targets],
            [len(o.encode()) for o in options],
        ]
        right += [(scores / length).argmax() == "ABCD".index(answer) for length in lengths]
        loss -= scores["ABCD".index(answer)] / len(RACE["answers"])
    assert got.mean_loss == pytest.approx(loss, rel=RELATIVE)
    accuracies = [got.accuracy, got.accuracy_per_token, got.accuracy_per_byte]
    assert accuracies == pytest.approx(right / 3)
