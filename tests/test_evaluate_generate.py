"""Generated text: the reference's choice, token for token, on every layout, and what ends it."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
import reference
import reference_llama
from errors import names
from parameters import params_of

from mtx.config import Layout, ModelConfig, RunConfig
from mtx.data.tokenizer import ByteTokenizer
from mtx.errors import UserError
from mtx.evaluation.decoder import Decoder, programs_of
from mtx.evaluation.generate import Generator, generate
from mtx.evaluation.sampling import Sampling
from mtx.step.trainer import Trainer

GPT = ModelConfig(
    layers=4, hidden=32, heads=4, sequence=16, vocab=300, compute_dtype="float32", init_std=0.3,
    vocab_multiple=8,
)  # fmt: skip
LLAMA = GPT.of_family("llama", kv_heads=2, tied=False)
PROMPTS = ["in the beginning", "", "x"]  # the first fills the sequence
LONG = "before " + PROMPTS[0]
GREEDY = Sampling(temperature=0)

SHARDED = Layout(data=2, pipe=2, tensor=2, virtual=2, microbatch=2)
LAYOUTS = [  # (model, layout, most rows of a microbatch of single tokens)
    (GPT, SHARDED, 256),
    (LLAMA, Layout(pipe=2, tensor=4), 1),  # two devices share a head of keys and values
    (LLAMA, Layout(data=2, pipe=2, virtual=2, zero=3, stage_layers=(0, 1, 2, 1)), 256),
]


class Latin(ByteTokenizer):
    """One character per byte, so that the tokens drawn can be read back."""

    def __init__(self, eod: int | None = 0):
        super().__init__()
        self.identity = replace(self.identity, eod=eod, vocab=256)

    def encode(self, text):
        return np.frombuffer(text.encode("latin-1"), np.uint8).astype(np.int32)

    def decode(self, ids):
        return bytes(ids).decode("latin-1")


class LatinUpTo99(Latin):
    vocab = 100


@functools.cache
def trained(model, layout):
    run = RunConfig(model=model, layout=layout, global_batch=layout.data * layout.microbatch)
    trainer = Trainer(run)
    return trainer, trainer.state_from(params_of(model, seed=3))


def written(*args, **kwargs):
    """`generate` with the model of most tests. Three and four prompts use the same programs."""
    return generate(*trained(GPT, SHARDED), *args, **kwargs)


@functools.cache
def reference_of(model):
    """jitted tokens int [1, S] -> logits float32 [S, V]"""
    turning = reference_llama.frequencies(model.head_size, getattr(model, "rotary_base", 1.0))

    @jax.jit
    def logits(params, tokens):
        if model.family == "gpt":
            return reference.logits(params, tokens)[0]
        return reference_llama.logits(params, {"tokens": tokens}, turning)[0]

    return functools.partial(logits, params_of(model, seed=3))


def next_logits(ids, model=GPT):
    """The reference's logits, float32 [V of Latin], of the token after the last S of `ids`."""
    window = ids[-model.sequence :]
    padded = np.array([window + [0] * (model.sequence - len(window))])
    return np.asarray(reference_of(model)(padded))[len(window) - 1, : Latin().vocab]


@functools.cache
def chosen(model, prompt, tokens):
    """The reference's choice after `prompt`, reading the whole text again for each token."""
    ids = Latin().encode(prompt).tolist() or [Latin().eod]
    for _ in range(tokens):
        ids.append(int(next_logits(ids, model).argmax()))
        if ids[-1] == Latin().eod:
            break
    return Latin().decode(ids)


# --- the cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model, layout, rows", LAYOUTS)
def test_greedy_text_is_the_reference_s_token_for_token(model, layout, rows, monkeypatch):
    """Prompts of all lengths; texts that grow beyond the model's sequence or begin beyond it."""
    monkeypatch.setattr("mtx.evaluation.decoder._ROWS_A_READ", rows)
    prompts = [*PROMPTS, LONG]
    texts = generate(*trained(model, layout), Latin(), prompts, tokens=18, temperature=0)
    assert texts == [chosen(model, prompt, 18) for prompt in prompts]
    assert len(texts[2]) > model.sequence, "no text has grown beyond the sequence"


def test_drawn_text_is_the_same_on_another_layout():
    wanted = written(Latin(), PROMPTS, tokens=5, temperature=1.0, seed=7)
    other = trained(GPT, Layout(data=3, microbatch=2))
    assert generate(*other, Latin(), PROMPTS, tokens=5, temperature=1.0, seed=7) == wanted
    assert wanted[0].startswith(PROMPTS[0]) and len(wanted[0]) == len(PROMPTS[0]) + 5


def test_a_single_token_is_a_single_position():
    """Logits of `extend`, which sees one token per text, are those of reading the whole text."""
    decoder = Decoder(*trained(GPT, SHARDED), vocab=GPT.vocab)
    random = np.random.default_rng(0)
    texts = [random.integers(0, GPT.vocab, length).tolist() for length in (3, 14, 1)]
    decoder.begin(texts, room=16)
    for token in (5, 299):
        texts = [[*text, token] for text in texts]
        seen = decoder.extend([token] * 3, [len(text) - 1 for text in texts])
        for text, some in zip(texts, seen, strict=True):
            whole = np.asarray(reference_of(GPT)(np.array([text + [0] * (16 - len(text))])))
            np.testing.assert_allclose(some.logits, whole[len(text) - 1], rtol=1e-5, atol=1e-5)


def test_what_is_kept_is_changed_where_it_lies():
    """A token costs no copy of the kept keys and values, which would take most of its time."""
    run = RunConfig(model=replace(GPT, sequence=512), layout=Layout(microbatch=4), global_batch=4)
    trainer = Trainer(run)
    state = trainer.state_from(params_of(run.model))
    decoder = Decoder(trainer, state, vocab=256)
    decoder.begin([[1], [2], [3]], room=512, count=1)
    assert decoder.kept_bytes == 2 * 4 * (4 * 512 * 32) * 4  # k and v, layers, 4 rows, float32
    rows = {name: np.zeros((4, 1), np.int32) for name in ("tokens", "positions")}
    batch = trainer.place(rows | {"last": np.zeros(4, np.int32)})
    lowered = programs_of(trainer).extend.lower(
        1, decoder._params, batch, decoder._vocab, decoder._past
    )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == decoder.kept_bytes
    assert memory.temp_size_in_bytes < 0.5 * decoder.kept_bytes  # a quarter: one layer's


def test_other_prompts_of_like_size_compile_nothing():
    programs = programs_of(trained(GPT, SHARDED)[0])
    settings = {"tokens": 3, "temperature": 0}
    written(Latin(), PROMPTS, **settings)
    compiled = [program._cache_size() for program in (programs.begin, programs.extend)]
    for prompts in (["a"] * 4, ["abc", "", "0123456789"]):
        written(Latin(), prompts, **settings)
    assert [program._cache_size() for program in (programs.begin, programs.extend)] == compiled


def test_a_model_that_sees_later_tokens_does_not_write():
    bert = Trainer(RunConfig(model=GPT.of_family("bert"), global_batch=4, layout=Layout()))
    with pytest.raises(UserError) as error:
        Generator(bert, None, Latin())
    names(error, "family='bert'")


# --- draws ----------------------------------------------------------------------------------------


def test_the_seed_decides_the_text():
    one, again, other = (
        written(Latin(), ["a", "a", "b"], tokens=8, temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    )
    assert one == again != other
    assert one[0] != one[1], "two prompts share a stream"


def test_the_other_prompts_do_not_matter():
    settings = {"tokens": 4, "sampling": Sampling(temperature=1.0), "seed": 5}
    generator = Generator(*trained(GPT, SHARDED), Latin())
    wanted = generator.complete(PROMPTS, **settings)
    beside = generator.complete([PROMPTS[0], "other", "prompts", "here"], **settings)
    in_turn = Generator(*trained(GPT, SHARDED), Latin(), batch=3)
    assert wanted[0] == beside[0]
    assert wanted == in_turn.complete([*PROMPTS, "and", "many", "others"], **settings)[:3]


def test_no_token_is_beyond_the_tokenizer():
    """The model has 300 tokens, and at this temperature all are about as likely."""
    texts = written(LatinUpTo99(), ["a", "b", "c"], tokens=20, temperature=1e6)
    drawn = [ord(character) for text in texts for character in text[1:]]
    assert max(drawn) < 100 and len(set(drawn)) > 10
    wanted = next_logits([ord("a")])[:100].argmax()
    assert written(LatinUpTo99(), ["a"] * 3, tokens=1, temperature=0)[0][1] == chr(wanted)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_by_their_probability(temperature):
    """The first token after "a", 80 times, against softmax(logits / temperature)."""
    scaled = next_logits([ord("a")]).astype(float) / temperature
    wanted = np.exp(scaled - np.logaddexp.reduce(scaled))
    texts = [
        text
        for seed in range(20)
        for text in written(Latin(), ["a"] * 4, tokens=1, temperature=temperature, seed=seed)
    ]
    surprise = -np.log([wanted[ord(text[1])] for text in texts])
    entropy = -(wanted * np.log(wanted)).sum()
    spread = np.sqrt((wanted * np.log(wanted) ** 2).sum() - entropy**2)
    assert abs(surprise.mean() - entropy) < 4 * spread / np.sqrt(80)


def test_the_likeliest_tokens_can_be_looked_for_on_the_devices():
    """With top_k only a few candidates are copied to the host, with top_p alone all logits; draws
    from the best 5 and from a nucleus of 5 are the same."""
    first = next_logits([ord("a")]).astype(float)
    shares = np.sort(np.exp(first - np.logaddexp.reduce(first)))[::-1].cumsum()
    nucleus = (shares[3] + shares[4]) / 2
    for seed in range(4):
        settings = {"tokens": 1, "temperature": 1.0, "seed": seed}
        by_count = written(Latin(), ["a"] * 4, top_k=5, **settings)
        assert by_count == written(Latin(), ["a"] * 4, top_p=nucleus, **settings)
        assert {ord(text[1]) for text in by_count} <= set(np.argsort(first)[-5:])
    assert written(Latin(), PROMPTS, tokens=4, top_k=1, temperature=5.0) == written(
        Latin(), PROMPTS, tokens=4, temperature=0
    )


# --- ends -----------------------------------------------------------------------------------------


def completions(prompts, *, stop=(), tokens=6, tokenizer=None):
    generator = Generator(*trained(GPT, SHARDED), tokenizer or Latin())
    return generator.complete(prompts, tokens=tokens, sampling=GREEDY, stop=stop)


def test_text_ends_at_the_end_of_document():
    first = written(Latin(), ["ab"] * 3, tokens=1, temperature=0)
    ends_there = Latin(eod=ord(first[0][-1]))
    assert written(ends_there, ["ab"] * 3, tokens=50, temperature=0) == first
    assert completions(["ab"] * 3, tokens=50, tokenizer=ends_there)[0].ended == "eod"


def test_text_ends_before_a_stop():
    (whole, other, _) = completions(PROMPTS)
    assert whole.ended == "length" and len(whole.text) == len(whole.tokens) == 6
    for stop in (whole.text[2:4], ord(whole.text[2])):
        found, beside, _ = completions(PROMPTS, stop=(stop, "never written"))
        wanted = whole.text.index(stop if isinstance(stop, str) else chr(stop))
        assert (found.text, found.ended) == (whole.text[:wanted], "stop")
        assert beside.text == other.text or beside.ended == "stop"
    last = completions(PROMPTS, stop=(whole.text[-1:], whole.text[-2:]))[0]
    assert last.text == whole.text[: min(map(whole.text.index, (whole.text[-1:], whole.text[-2:])))]


def test_a_stop_in_the_prompt_is_none():
    plain = completions(["x"] * 3)[0]
    assert plain == completions(["x"] * 3, stop=("x" + plain.text[0],))[0]


class Beyond(Latin):
    """Has ids that the model does not have."""

    vocab = 1000

    def encode(self, text):
        return np.full(len(text), 333 if len(text) > 1 else 1, np.int32)


class Names(Latin):
    """Every token is written as four characters, so a stop may begin and end inside tokens."""

    def decode(self, ids):
        return "".join(f"<{token:02x}>" for token in ids)


def test_a_stop_may_stand_across_tokens():
    whole = completions(["x"] * 3, tokenizer=Names())[0]
    assert len(whole.text) == 24 and whole.prompt == "<78>"
    stop = whole.text[6:13]  # from inside the second token to inside the fourth
    found = completions(["x"] * 3, stop=(stop,), tokenizer=Names())[0]
    assert found.text == whole.text[: whole.text.index(stop)] and found.ended == "stop"
    assert len(found.tokens) <= 4, "it has gone on beyond the stop"


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, values",
    [
        ({"tokens": 0}, ("tokens=0", "1")),
        ({"temperature": -0.1}, ("temperature=-0.1", "0")),
        ({"temperature": float("nan")}, ("temperature=nan", "0")),
        ({"seed": -1}, ("seed=-1", "0")),
        ({"top_k": -1}, ("top_k=-1", "0")),
        ({"top_p": 0.0}, ("top_p=0.0", "0")),
        ({"stop": ("a", "")}, ("stop=''",)),
        ({"stop": (256,)}, ("stop=256", "0", "255")),
    ],
)
def test_mistakes_are_named(wrong, values):
    with pytest.raises(UserError) as error:
        written(Latin(), ["a"], **wrong)
    names(error, *values)


def test_what_cannot_begin_a_text_is_named():
    assert written(Latin(), []) == []
    with pytest.raises(UserError) as error:
        Generator(*trained(GPT, SHARDED), Latin(), batch=0)
    names(error, "batch=0", "1")
    with pytest.raises(UserError) as error:
        written(Latin(eod=None), ["a", ""])
    names(error, "prompt 2")
    with pytest.raises(UserError) as error:
        written(Beyond(), ["a", "ab"])
    names(error, "prompt 2", "token 333")
