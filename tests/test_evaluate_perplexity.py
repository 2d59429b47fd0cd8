"""WikiText's detokeniser, rule by rule, windows by hand, and the reference's perplexities."""

from __future__ import annotations

import jax
import likelihoods
import numpy as np
import pytest
from errors import names
from likelihoods import MODEL

from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.evaluation.perplexity import (
    count_words,
    detokenise_wikitext,
    is_wikitext,
    perplexity,
    window_rows,
)

WIKITEXT = (
    " \n = Robert <unk> = \n \n The film 's 1 @,@ 000 twenty @-@ five metres ( 3 @.@ 5 ft ) : a "
    '" great " one ; the actors \' N roles . \n = = Caf\u00e9 = = \n \n It was 40 \u00b0 C ! \n'
)


@pytest.mark.parametrize(
    "there, then",
    [
        ("the dogs ' tails", "the dogs' tails"),
        ("twenty @-@ five", "twenty-five"),
        ("1 @,@ 000", "1,000"),
        ("3 @.@ 5", "3.5"),
        ("one : two", "one: two"),
        ("one ; two", "one; two"),
        ("one . two", "one. two"),
        ("one ! two", "one! two"),
        ("one ? two", "one? two"),
        ("one , two", "one, two"),
        ("a .5 mark", "a .5 mark"),  # no blank after it: not the end of a sentence
        ("a ( b c ) d", "a (b c) d"),
        ("a [ b c ] d", "a [b c] d"),
        ("a { b c } d", "a {b c} d"),
        ('a " b c " d " e "', 'a "b c" d "e"'),
        ("a ' b c ' d", "a 'b c' d"),
        ("a ( b \n", "a ( b\n"),  # never closed
        ("= = = = Head = = = =", "==== Head ===="),
        ("= = = Head = = =", "=== Head ==="),
        ("= = Head = =", "== Head =="),
        ("= Head =", "= Head ="),
        ("40 \u00b0 C", "40\u00b0C"),
        ("end \n next", "end\nnext"),
        ("with N games", "with 1 games"),
        ("Bob 's hat", "Bob's hat"),
        ("Bob 's and Ann 's", "Bob's and Ann's"),
        ("\u4e2d\u6587 , \u00e9t\u00e9", "\u4e2d\u6587, \u00e9t\u00e9"),
        ("", ""),
    ],
)
def test_the_detokeniser_knows_every_rule(there, then):
    assert detokenise_wikitext(there) == then


def test_the_detokeniser_on_a_paragraph():
    assert detokenise_wikitext(WIKITEXT) == (
        '\n= Robert <unk> =\n\nThe film\'s 1,000 twenty-five metres (3.5 ft): a "great" one; '
        "the actors' 1 roles.\n== Caf\u00e9 ==\n\nIt was 40\u00b0C!\n"
    )
    assert is_wikitext(WIKITEXT) and not is_wikitext(detokenise_wikitext(WIKITEXT))


def test_words_are_what_blanks_separate():
    assert count_words(" a b \n c \n") == 4, "a line's end between blanks is a word"
    assert count_words("one") == 1 and count_words("a\nb c") == 2


@pytest.mark.parametrize("sequence, stride", [(8, 3), (8, 8), (8, 1), (5, 4), (1, 1)])
@pytest.mark.parametrize("length", [2, 4, 8, 9, 10, 12, 17, 18, 30])
def test_windows_score_every_target_once(length, sequence, stride):
    ids = np.arange(length, dtype=np.int32)
    rows = window_rows(ids, sequence=sequence, stride=stride)
    scored = np.concatenate([row.tokens[-row.scored :] for row in rows])
    assert scored.tolist() == list(range(1, length))
    for number, row in enumerate(rows):
        assert row.tokens[0] == number * stride and len(row.tokens) <= sequence + 1
        full = sequence if number == 0 else stride
        assert row.scored == full or number == len(rows) - 1


def test_windows_of_the_paper():
    """S = 1,024, stride 32: the first scores 1,024, all others 32 after 992 tokens of context."""
    rows = window_rows(np.arange(1024 + 32 * 3 + 5 + 1), sequence=1024, stride=32)
    assert [row.scored for row in rows] == [1024, 32, 32, 32, 5]
    assert [int(row.tokens[0]) for row in rows] == [0, 32, 64, 96, 128]
    assert len(rows[-1].tokens) == 1025 - 27, "the tail is shorter, its beginning where it was"


@pytest.fixture(scope="module")
def sharded():
    return likelihoods.sharded()


@pytest.fixture(scope="module")
def log_probabilities(sharded):
    return likelihoods.log_probabilities_of(*sharded)


def loss_sum(ids, log_probabilities, stride):
    """The loss target by target, each with the window that scores it."""
    total, sequence = 0.0, MODEL.sequence
    for target in range(1, len(ids)):
        late = max(target - sequence, 0)
        start = -(-late // stride) * stride
        total -= log_probabilities(ids[start:target])[ids[target]]
    return total


@pytest.mark.parametrize("stride", [5, 16])
def test_perplexity_is_that_of_the_reference(sharded, log_probabilities, stride):
    texts = [WIKITEXT[:60], "\u00e9t\u00e9 " * 7, "ab"]
    got = perplexity(*sharded, ByteTokenizer(), texts, stride=stride)
    ids = [ByteTokenizer().encode(text).tolist() for text in texts]
    total = sum(loss_sum(some, log_probabilities, stride) for some in ids)
    targets = sum(len(some) - 1 for some in ids)
    assert (got.tokens, got.targets) == (targets + 3, targets)
    assert got.loss == pytest.approx(total / targets, rel=1e-5)
    assert got.perplexity == pytest.approx(np.exp(total / targets), rel=1e-4)
    assert got.original_tokens is got.token_ratio is got.adjusted_perplexity is None
    assert got.bits_per_byte == pytest.approx(total / targets / np.log(2), rel=1e-5), "a byte each"


def test_bits_per_byte_are_of_as_many_bytes_as_tokens_have(sharded):
    """With tokens of two bytes on average, half of a token's bits. The first tokens count like
    others, though they may be halves of characters."""

    class Pairs(ByteTokenizer):
        def encode_all(self, texts):
            return [ids[1::2] for ids in super().encode_all(texts)]

    got = perplexity(*sharded, Pairs(), ["\u00e9t\u00e9 ", "ab\u00e9d" * 4], stride=5)
    assert (got.tokens, got.targets) == (13, 11)
    assert got.bits_per_byte == pytest.approx(got.loss / np.log(2) / 2, rel=1e-6)


def test_wikitext_counts_its_words_before_it_is_detokenised(sharded):
    reports = []
    got = perplexity(
        *sharded, ByteTokenizer(), [WIKITEXT], wikitext=True, stride=4,
        report=lambda done, total: reports.append((done, total)),
    )  # fmt: skip
    plain = detokenise_wikitext(WIKITEXT)
    assert got.tokens == len(plain.encode()) and got.original_tokens == count_words(WIKITEXT)
    assert got.token_ratio == (got.tokens - 1) / (got.original_tokens - 1)
    adjusted = np.exp(min(20, got.loss * got.token_ratio))
    assert got.adjusted_perplexity == pytest.approx(adjusted, rel=1e-6)
    assert reports[-1] == (got.windows, got.windows) and len(reports) == -(-got.windows // 8)
    same = perplexity(*sharded, ByteTokenizer(), [plain], stride=4)
    assert same.loss == got.loss and same.original_tokens is None


def test_one_word_has_no_adjusted_perplexity(sharded):
    got = perplexity(*sharded, ByteTokenizer(), ["word"], stride=1, wikitext=True)
    assert got.adjusted_perplexity is None and got.perplexity > 1


def test_perplexity_ends_at_e_20(sharded):
    """As in the published code; a word of 40 bytes is that unlikely."""
    text = f"{'x' * 40} {'y' * 40}"
    got = perplexity(*sharded, ByteTokenizer(), [text], stride=16, wikitext=True)
    assert got.adjusted_perplexity == pytest.approx(np.exp(20))


@pytest.mark.parametrize(
    "texts, stride, values",
    [
        (["text"], 17, ("stride=17", "1", "sequence=16")),
        (["text"], 0, ("stride=0", "1", "sequence=16")),
        ([], 1, ("text",)),
        (["text", ""], 1, ("text 2", "2", "0")),
        (["x"], 1, ("text 1", "1", "2")),
    ],
)
def test_mistakes_are_named(sharded, texts, stride, values):
    with pytest.raises(UserError) as error:
        perplexity(*sharded, ByteTokenizer(), texts, stride=stride)
    names(error, *values)


def test_a_token_beyond_the_model_is_refused(sharded):
    class Shifted(ByteTokenizer):
        def encode(self, text):
            return super().encode(text) + 200

    with pytest.raises(UserError) as error:
        perplexity(*sharded, Shifted(), ["add"], stride=1)
    names(error, "token 300", "vocab=256")


def test_a_diverged_model_is_refused(sharded):
    trainer, state = sharded
    broken = state._replace(params=jax.tree.map(lambda a: a * np.nan, state.params))
    with pytest.raises(UserError) as error:
        perplexity(trainer, broken, ByteTokenizer(), ["text"], stride=1)
    names(error, "finite")
