"""Tokens against SentencePiece's own program, for all kinds of models and many scripts."""

from __future__ import annotations

import random
from pydoc_data.topics import topics

import pytest

from mtx.data.tokenizer_files import load_tokenizer

sentencepiece = pytest.importorskip(
    "sentencepiece", reason="sentencepiece is absent: its models have no peer"
)

SCRIPTS = (
    "Zażółć gęślą jaźń. Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "いろはにほへと ちりぬるを わかよたれそ つねならむ。 今日は世界。 ｱｲｳ ＡＢＣ ㎏",
    "다람쥐 헌 쳇바퀴에 타고파. \u1100\u1161\u11a8 أبجد هوز حطي كلمن ऋषियों को सताने वाले",
    "“naïve” façade … ﬁne ﬂow ① ½ e\u0301 e\u0323\u0302 😀 👩‍👩‍👧‍👦 🇩🇪",
    "def f(x):\n    return x  **  2\t# tab\u00a0nbsp\u3000wide\u200bzero",
)
CORPUS = [line for name in sorted(topics) for line in topics[name].split("\n") if line.strip()]
ALPHABET = [
    *"aábcdeéßœ ABC019.,!?'\"()[]<>/=+-_#@\t\n", "  ", "   ", "\u00a0", "\u3000", "\u2581",
    "\u200b", "e\u0301", "\u0301", "\u0323", "ﬁ", "①", "½", "今", "は", "ア", "ｱ", "한", "Ж",
    "\u1100\u1161", "щ", "ا", "क", "्", "😀", "🇩🇪", "\ufeff", "the", " in ", "</s>", "<s>",
    "<unk>", "<tab>", "<0x41>",
]  # fmt: skip
MODELS = {
    "llama 2": ("bpe", "identity", {
        "byte_fallback": True, "remove_extra_whitespaces": False, "split_digits": True,
        "allow_whitespace_only_pieces": True,
    }),
    "gemma": ("bpe", "identity", {
        "byte_fallback": True, "remove_extra_whitespaces": False, "add_dummy_prefix": False,
        "user_defined_symbols": ["\n", "\u2581\u2581", "\u2581\u2581\u2581", "<tab>"],
    }),
    "bpe": ("bpe", "nmt_nfkc", {}),
    "bpe without a prefix": ("bpe", "nfkc_cf", {"add_dummy_prefix": False}),
    "t5": ("unigram", "nmt_nfkc", {}),
    "unigram with bytes": ("unigram", "identity", {
        "byte_fallback": True, "remove_extra_whitespaces": False,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_text_has_the_same_tokens(tmp_path, name):
    kind, rule, options = MODELS[name]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS[:1500], *SCRIPTS * 5]), model_prefix=str(tmp_path / "m"),
        vocab_size=900, model_type=kind, normalization_rule_name=rule, character_coverage=0.995,
        hard_vocab_limit=False, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    ours = load_tokenizer(str(tmp_path / "m.model"))
    assert (ours.vocab, ours.eod) == (theirs.vocab_size(), theirs.eos_id())
    stream = random.Random(5)
    made = ["".join(stream.choices(ALPHABET, k=stream.randint(0, 40))) for _ in range(1000)]
    texts = [*SCRIPTS, *CORPUS[1500:2000], "\n".join(CORPUS[2000:2050]), "", " ", *made]
    expected, found = theirs.encode(texts), [ids.tolist() for ids in ours.encode_all(texts)]
    assert found == expected
    for ids in expected[: len(texts) - len(made)]:
        assert ours.decode(ids) == theirs.decode(ids)
