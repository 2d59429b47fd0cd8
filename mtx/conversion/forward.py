"""The forward pass of Hugging Face's GPT-2, Llama and BERT in NumPy, from their papers' formulas.

It reads tensors by the names that they have there and knows nothing of our arrays: what it gives is
what our model is compared with after a conversion. One layer's tensors are in memory at a time.

Legend: B rows · S sequence · D hidden · H heads · G heads of keys and values · K head size ·
V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mtx.conversion.configs import Fields


class Tensors(Protocol):
    """Where tensors are read from, float32, by their short names."""

    def tensor(self, name: str, rows: slice = slice(None)) -> np.ndarray: ...

    def has(self, name: str) -> bool: ...


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model gives for some tokens."""

    logits: Callable[[slice], np.ndarray]  # [B, S, rows] of some rows of the vocabulary
    order_B2: np.ndarray | None = None  # logits of BERT's binary head, where it has one


def gpt2(tensors: Tensors, config: Fields, tokens_BS, positions_BS) -> Outputs:
    """Logits of the next token."""
    epsilon, heads = config.number("layer_norm_epsilon"), config.whole("n_head")
    act = _GELUS[config.get("activation_function")]
    get = tensors.tensor

    def conv1d(x, name):
        return x @ get(f"{name}.weight") + get(f"{name}.bias")

    def norm(x, name):
        return _layer_norm(x, get(f"{name}.weight"), get(f"{name}.bias"), epsilon)

    x_BSD = _rows(get, "wte.weight", tokens_BS) + _rows(get, "wpe.weight", positions_BS)
    for layer in range(config.whole("n_layer")):
        at = f"h.{layer}"
        q, k, v = np.split(conv1d(norm(x_BSD, f"{at}.ln_1"), f"{at}.attn.c_attn"), 3, axis=-1)
        q, k, v = (_heads(part, heads) for part in (q, k, v))
        x_BSD = x_BSD + conv1d(_attention(q, k, v, causal=True), f"{at}.attn.c_proj")
        h_BSF = act(conv1d(norm(x_BSD, f"{at}.ln_2"), f"{at}.mlp.c_fc"))
        x_BSD = x_BSD + conv1d(h_BSF, f"{at}.mlp.c_proj")
    x_BSD = norm(x_BSD, "ln_f")
    table = "wte.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return Outputs(lambda rows: x_BSD @ get(table, rows).T)


def llama(tensors: Tensors, config: Fields, tokens_BS, positions_BS) -> Outputs:
    """Logits of the next token."""
    epsilon, heads = config.number("rms_norm_eps"), config.whole("num_attention_heads")
    groups = config.get("num_key_value_heads") or heads
    get = tensors.tensor
    frequencies_K = _rotary_frequencies(config).astype(np.float32)
    angles_BSK = positions_BS[..., None].astype(np.float32) * frequencies_K
    cos_BSK, sin_BSK = (np.tile(f(angles_BSK), 2)[:, :, None] for f in (np.cos, np.sin))

    def linear(x, name):
        return x @ get(f"{name}.weight").T

    def norm(x, name):
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon)
        return x * get(f"{name}.weight")

    def turn(x_BSHK):
        first, second = np.split(x_BSHK, 2, axis=-1)
        turned = np.concatenate([-second, first], axis=-1)
        return x_BSHK * cos_BSK + turned * sin_BSK

    x_BSD = _rows(get, "embed_tokens.weight", tokens_BS)
    for layer in range(config.whole("num_hidden_layers")):
        at = f"layers.{layer}"
        h_BSD = norm(x_BSD, f"{at}.input_layernorm")
        q, k, v = (
            _heads(linear(h_BSD, f"{at}.self_attn.{name}_proj"), count)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        )
        k, v = (np.repeat(part, heads // groups, axis=2) for part in (turn(k), v))
        o_BSD = _attention(turn(q), k, v, causal=True)
        x_BSD = x_BSD + linear(o_BSD, f"{at}.self_attn.o_proj")
        h_BSD = norm(x_BSD, f"{at}.post_attention_layernorm")
        gate, up = (linear(h_BSD, f"{at}.mlp.{name}_proj") for name in ("gate", "up"))
        x_BSD = x_BSD + linear(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.down_proj")
    x_BSD = norm(x_BSD, "norm")
    table = "embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return Outputs(lambda rows: x_BSD @ get(table, rows).T)


def bert(tensors: Tensors, config: Fields, tokens_BS, positions_BS) -> Outputs:
    """Logits of the masked tokens, or parts of the last layer's output where the model has no such
    head; of text whose types are all 0."""
    epsilon, heads = config.number("layer_norm_eps"), config.whole("num_attention_heads")
    post, act = config.get("model_type") == "bert", _GELUS[config.get("hidden_act")]
    get = tensors.tensor

    def linear(x, name):
        return x @ get(f"{name}.weight").T + get(f"{name}.bias")

    def norm(x, name):
        return _layer_norm(x, get(f"{name}.weight"), get(f"{name}.bias"), epsilon)

    x_BSD = _rows(get, "embeddings.word_embeddings.weight", tokens_BS)
    x_BSD = x_BSD + _rows(get, "embeddings.position_embeddings.weight", positions_BS)
    x_BSD = x_BSD + get("embeddings.token_type_embeddings.weight")[0]
    x_BSD = norm(x_BSD, "embeddings.LayerNorm") if post else x_BSD
    for layer in range(config.whole("num_hidden_layers")):
        at = f"encoder.layer.{layer}"
        h_BSD = x_BSD if post else norm(x_BSD, f"{at}.attention.ln")
        q, k, v = (
            _heads(linear(h_BSD, f"{at}.attention.self.{name}"), heads)
            for name in ("query", "key", "value")
        )
        o_BSD = linear(_attention(q, k, v, causal=False), f"{at}.attention.output.dense")
        x_BSD = x_BSD + o_BSD
        x_BSD = norm(x_BSD, f"{at}.attention.output.LayerNorm") if post else x_BSD
        h_BSD = x_BSD if post else norm(x_BSD, f"{at}.ln")
        h_BSD = linear(act(linear(h_BSD, f"{at}.intermediate.dense")), f"{at}.output.dense")
        x_BSD = x_BSD + h_BSD
        x_BSD = norm(x_BSD, f"{at}.output.LayerNorm") if post else x_BSD
    x_BSD = x_BSD if post else norm(x_BSD, "encoder.ln")
    order_B2 = None
    if tensors.has("pooler.dense.weight") and tensors.has("cls.seq_relationship.weight"):
        pooled_BD = np.tanh(linear(x_BSD[:, 0], "pooler.dense"))
        order_B2 = linear(pooled_BD, "cls.seq_relationship")
    if not tensors.has("cls.predictions.bias"):
        return Outputs(lambda rows: x_BSD[..., rows], order_B2)
    h_BSD = norm(
        act(linear(x_BSD, "cls.predictions.transform.dense")), "cls.predictions.transform.LayerNorm"
    )
    bias_V, table = get("cls.predictions.bias"), "embeddings.word_embeddings.weight"
    return Outputs(lambda rows: h_BSD @ get(table, rows).T + bias_V[rows], order_B2)


FORWARDS: dict[str, Callable[..., Outputs]] = {
    "gpt2": gpt2, "llama": llama, "bert": bert, "megatron-bert": bert
}  # fmt: skip


def _rows(get: Callable, name: str, ids_BS: np.ndarray) -> np.ndarray:
    """Rows of a table, [B, S, D]."""
    rows = [get(name, slice(row, row + 1)) for row in ids_BS.ravel().tolist()]
    return np.concatenate(rows).reshape(*ids_BS.shape, -1)


def _heads(x_BSD, heads: int):
    return x_BSD.reshape(*x_BSD.shape[:2], heads, -1)


def _attention(q_BSHK, k_BTHK, v_BTHK, *, causal: bool):
    """[B, S, H K]"""
    size = q_BSHK.shape[-1]
    q, k, v = (np.moveaxis(a, 2, 1) for a in (q_BSHK, k_BTHK, v_BTHK))
    scores_BHST = q @ np.swapaxes(k, -1, -2) / np.float32(math.sqrt(size))
    if causal:
        future = np.triu(np.ones(scores_BHST.shape[-2:], bool), 1)
        scores_BHST = np.where(future, np.float32(-np.inf), scores_BHST)
    weights = np.exp(scores_BHST - scores_BHST.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    o_BSHK = np.moveaxis(weights @ v, 1, 2)
    return o_BSHK.reshape(*o_BSHK.shape[:2], -1)


def _layer_norm(x, scale, bias, epsilon: float):
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.float32(epsilon))
    return centred / deviation * scale + bias


def _gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x**3)))


def _gelu_erf(x):
    return (0.5 * x * (1 + _erf(x * math.sqrt(0.5)))).astype(np.float32)


_erf = np.vectorize(math.erf, otypes=[np.float64])
_GELUS = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), _gelu_tanh)
_GELUS["gelu"] = _gelu_erf


def _rotary_frequencies(config: Fields) -> np.ndarray:
    """Radians a position of each pair [K/2], as transformers computes them."""
    size = config.whole("hidden_size") // config.whole("num_attention_heads")
    table = config.table("rope_parameters") or config.table("rope_scaling")
    named = table and table.get("rope_theta")
    base = named or config.number("rope_theta")
    frequencies = 1 / base ** (np.arange(0, size, 2) / size)
    kind = (table and (table.get("rope_type") or table.get("type"))) or "default"
    if kind == "linear":
        return frequencies / table.number("factor")
    if kind == "default":
        return frequencies
    low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
    length, factor = table.number("original_max_position_embeddings"), table.number("factor")
    wavelengths = 2 * math.pi / frequencies
    smooth = (length / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    slow = wavelengths > length / low
    fast = wavelengths < length / high
    return np.where(slow, frequencies / factor, np.where(fast, frequencies, between))
