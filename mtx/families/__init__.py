"""Families of models, one file each, named after the family, and the fields that all configs have.

A file defines

    CONFIG        the family's config: a `ModelConfig` with the fields that only it has

and, if there are any,

    HUGGING_FACE  its models in transformers: config.json and names of tensors, in both directions
    PRESETS       published models, by name: fields of a run, as in a plan's file

A config's `stack` gives the layers that the model is made of. These files import no JAX; layers
are imported when `stack` is called.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mtx.errors import UserError, nearest_divisors, nearest_multiples, shown, unknown_name
from mtx.fields import Between, require_above, resolve_types
from mtx.sizes import Ffn, Layers, Tokens, Vocab, Width

if TYPE_CHECKING:
    from mtx.huggingface import HuggingFace
    from mtx.layers.layer import Stack

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))
ComputeDtype = Literal["float32", "bfloat16", "float16"]
Fp8 = Literal["off", "hybrid", "e4m3"]  # as Megatron-LM's --fp8-format
Fp8Recipe = Literal["tensorwise", "delayed"]
_OF_FP8 = "fp8_recipe", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin"
# "retrieval": the next token, given the text and its neighbours (RETRO)
Objective = Literal["next token", "masked tokens", "spans", "retrieval"]


def family_module(name: str) -> ModuleType:
    """The module of a family; UserError with the nearest name if there is none."""
    if not isinstance(name, str) or name not in NAMES:
        raise unknown_name("family", str(name), NAMES)
    module = importlib.import_module(f"{__name__}.{name}")
    if not hasattr(module, "CONFIG"):
        raise UserError(f"{module.__file__} has no CONFIG; give it the family's config")
    return module


def hugging_face_of(name: str) -> tuple[HuggingFace, ...]:
    """The model types of a family in transformers; () if it has none there."""
    return getattr(family_module(name), "HUGGING_FACE", ())


def presets_of(name: str) -> dict[str, Any]:
    """The published models of a family."""
    return getattr(family_module(name), "PRESETS", {})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields that models of every family have.

    ModelConfig(family="llama", ...) makes a config of that family, which has further fields.
    """

    family: str = "gpt"  # a file of mtx/families
    layers: Layers = 8  # L, number of layers
    hidden: Width = 256  # D, hidden size of the stream between layers
    heads: Width = 8  # H, attention heads
    sequence: Tokens = 256  # S, tokens of a sequence
    vocab: Vocab = 256  # V, size of the vocabulary before padding
    ffn_multiple: Annotated[int, Between(1, 2**10)] = 4  # F / D, MLP size over hidden size
    ffn: Ffn | None = None  # F, MLP size, if not a multiple of D; None: ffn_multiple * hidden
    tied: bool = True  # the output layer shares the embedding's weight
    dropout: float = 0.0  # on the embedding and before each residual addition
    attention_dropout: float = 0.0  # on the attention probabilities
    init_std: float = 0.02  # of initial weights; for output projections, init_std / sqrt(2 L)
    norm_epsilon: float = 1e-5  # added under the root of a norm
    vocab_multiple: Width = 128  # the vocabulary is padded to a multiple of this times its shards
    compute_dtype: ComputeDtype = "bfloat16"  # of matmuls and activations; masters are float32
    # run matmuls of layers' weights in float8: e4m3; "hybrid": with output gradients in e5m2
    fp8: Fp8 = "off"
    # scale tensors by their own largest magnitudes, or by those of earlier steps
    fp8_recipe: Fp8Recipe = "tensorwise"
    fp8_amax_history_len: Annotated[int, Between(1, 2**20)] = 1024  # "delayed": earlier steps used
    # "delayed": the largest magnitude of those steps, or that of the last step alone
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    fp8_margin: Annotated[int, Between(0, 16)] = 0  # "delayed": scales are 2^margin smaller
    # r, rank of LoRA adapters; all other parameters are then frozen; 0: no adapters
    lora_rank: Annotated[int, Between(0, 2**14)] = 0
    lora_alpha: float = 16.0  # what adapters add is scaled by lora_alpha / lora_rank
    lora_on: tuple[str, ...] = ("attention", "mlp")  # sublayers whose matrices have adapters

    def __new__(cls, **values: Any) -> ModelConfig:
        if cls is ModelConfig:
            cls = family_module(values.get("family", "gpt")).CONFIG
        for name in values.keys() - _names(cls):
            others = [each for each in NAMES if name in _names(family_module(each).CONFIG)]
            owners = f"it is a field of {', '.join(others)}" if others else "no family has it"
            raise UserError(
                f"{name}={shown(values[name])} must be left out of family={cls.family!r}; {owners}"
            )
        return object.__new__(cls)

    def __post_init__(self):
        resolve_types(self)
        if self.family != type(self).family:
            raise UserError(
                f"family={self.family!r} must be {type(self).family!r} in a {type(self).__name__}; "
                "a config of its own says its name, family: str = ..., and is its file's CONFIG"
            )
        require_above(self, 0, "init_std", "norm_epsilon")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        self._check_fp8()
        self._check_lora()
        self.check()

    def _check_fp8(self) -> None:
        if self.fp8 != "off" and self.compute_dtype == "float16":
            raise UserError(
                f"fp8={self.fp8!r} is not for compute_dtype='float16', in which products of float8 "
                "overflow; use compute_dtype='bfloat16' or fp8='off'"
            )
        names = _OF_FP8 if self.fp8 == "off" else _OF_FP8[1:] if not self.fp8_steps else ()
        for name in names:
            if (value := getattr(self, name)) != getattr(ModelConfig, name):
                other = "fp8" if self.fp8 == "off" else "fp8_recipe"
                raise UserError(
                    f"{name}={value!r} goes with fp8_recipe='delayed', and {other}="
                    f"{getattr(self, other)!r}; use fp8='hybrid' and fp8_recipe='delayed', or "
                    "leave it out"
                )

    def _check_lora(self) -> None:
        require_above(self, 0, "lora_alpha")
        if self.lora_rank and not self.lora_on:
            raise UserError(f"lora_rank={self.lora_rank} needs a sublayer; use lora_on=attention")
        if self.lora_rank and self.fp8 != "off":
            raise UserError(
                f"lora_rank={self.lora_rank} is not made for fp8={self.fp8!r}; use fp8='off'"
            )
        for name in () if self.lora_rank else ("lora_alpha", "lora_on"):
            if (value := getattr(self, name)) != getattr(ModelConfig, name):
                raise UserError(
                    f"{name}={shown(value)} is of adapters, and lora_rank=0 has none; use a "
                    "lora_rank, or leave it out"
                )

    def check(self) -> None:
        """Raises UserError for values that do not go together."""
        if self.hidden % self.heads:
            raise UserError(
                f"hidden={self.hidden} must be a multiple of heads={self.heads}; "
                f"use hidden={nearest_multiples(self.hidden, self.heads)}"
            )

    # -- what a family defines ---------------------------------------------------------------------

    def stack(self) -> Stack:
        """The layers, the embedding and the head."""
        raise NotImplementedError

    def require_read(self) -> None:
        """UserError for a dropout that no layer of `stack` uses. Loads JAX."""
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if value and self.stack() == dataclasses.replace(self, **{name: 0.0}).stack():
                raise UserError(
                    f"{name}={value} is read by no layer of family={self.family!r}; use {name}=0"
                )

    @property
    def objective(self) -> Objective:
        """What the model is trained to predict."""
        return "next token"

    def trains(self, path: str, role: str) -> bool:
        """Whether a parameter is trained, not frozen. path: as in a checkpoint, without "params.";
        role: as in `mtx.sharding.parameter`."""
        return not self.lora_rank or role == "adapter"

    @property
    def freezes(self) -> bool:
        """Whether any parameters are frozen."""
        return bool(self.lora_rank)

    def merged(self) -> ModelConfig:
        """The model without adapters, to whose weights theirs can be added."""
        names = ("lora_rank", "lora_alpha", "lora_on")
        return dataclasses.replace(self, **{name: getattr(ModelConfig, name) for name in names})

    @property
    def fp8_steps(self) -> int:
        """The number of earlier steps whose largest magnitudes scale a tensor in float8; 0: its own
        largest magnitude does."""
        if self.fp8 == "off" or self.fp8_recipe == "tensorwise":
            return 0
        return 1 if self.fp8_amax_compute_algo == "most_recent" else self.fp8_amax_history_len

    def without_fp8(self) -> ModelConfig:
        names = ("fp8", *_OF_FP8)
        return dataclasses.replace(self, **{name: getattr(ModelConfig, name) for name in names})

    @property
    def reads_images(self) -> bool:
        """Whether samples have images besides tokens."""
        return False

    @property
    def head_size(self) -> int:
        """K"""
        return self.hidden // self.heads

    @property
    def value_size(self) -> int:
        """K of values, which may differ from that of queries and keys."""
        return self.head_size

    @property
    def groups(self) -> int:
        """G, heads of keys and values; each serves H / G heads of queries."""
        return self.heads

    @property
    def routed_experts(self) -> int:
        """E, the experts among which a layer's router chooses; 0: none."""
        return 0

    @property
    def routed_choices(self) -> int:
        """k, experts chosen for a token."""
        return 0

    @property
    def counted_by_sequence(self) -> str:
        """The setting for which routers count whole sequences, "field=value"; "": none."""
        return ""

    @property
    def sequence_is_fixed(self) -> bool:
        """Whether parameters depend on the sequence length, as a table of positions does."""
        return True

    @property
    def longest(self) -> int:
        """The longest sequence that the same parameters are meant for."""
        return self.sequence

    @property
    def sequences(self) -> dict[str, int]:
        """The lengths of a sample's sequences, in tokens, by name."""
        return {"sequence": self.sequence}

    @property
    def split_widths(self) -> dict[str, int]:
        """The sizes that `tensor` has to divide, by name."""
        return {"heads": self.heads, "ffn_hidden": self.ffn_hidden}

    @property
    def repeated_widths(self) -> dict[str, int]:
        """The sizes that `tensor` has to divide or be a multiple of, by name."""
        return {"kv_heads": self.groups}

    # -- what follows from it ----------------------------------------------------------------------

    @property
    def ffn_hidden(self) -> int:
        """F"""
        return self.ffn or self.ffn_multiple * self.hidden

    @property
    def causal(self) -> bool:
        """Whether no position sees those after it."""
        return self.objective in ("next token", "retrieval")

    def padded_vocab(self, shards: int) -> int:
        """V padded so that each of `shards` devices holds a multiple of `vocab_multiple` rows."""
        unit = self.vocab_multiple * shards
        return math.ceil(self.vocab / unit) * unit

    def of_family(self, name: str, **changes: Any) -> ModelConfig:
        """A config of another family: fields that both have are kept, the others take their
        defaults; then `changes` apply."""
        config = family_module(name).CONFIG
        shared = _names(config) & _names(type(self)) - {"family"}
        return config(**{field: getattr(self, field) for field in shared} | changes)


def _names(config: type[ModelConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def check_groups(model: ModelConfig) -> None:
    """UserError if heads of queries cannot share those of keys and values evenly."""
    if model.heads % model.groups:
        raise UserError(
            f"heads={model.heads} must be a multiple of kv_heads={model.groups}; "
            f"use kv_heads={nearest_divisors(model.heads, model.groups)}"
        )
