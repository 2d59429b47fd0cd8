"""What a run is, as frozen dataclasses: the model, the layout, the optimizer, the data, the run.

`ModelConfig` holds what decides the values, `Layout` only how they are computed: the same model,
seed and global batch give the same losses and parameters on every layout, to rounding.
No JAX here; validation happens once, at construction, and every error names a remedy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from mtx import optimizers
from mtx.errors import UserError, shown, unknown_name
from mtx.fields import Between, checked, settle_types
from mtx.paths import check_path
from mtx.schedules.formats import SUFFIXES
from mtx.schedules.makers import check_virtual
from mtx.schedules.partition import place_layers
from mtx.sharding.axes import AXES, BATCH
from mtx.sizes import (
    DataSeed,
    Devices,
    Ffn,
    Interval,
    Layers,
    NotNegative,
    Seed,
    Sequences,
    Slices,
    StageLayers,
    Stages,
    Step,
    Tokens,
    TrainedBytes,
    Vocab,
    Width,
)


def _require_above(config: object, least: float, *names: str) -> None:
    for name in names:
        if not (value := getattr(config, name)) > least:
            raise UserError(f"{name}={value} must be above {least}")


def _require_choice(config: object, name: str, annotation: object) -> None:
    choices, value = annotation.__args__, getattr(config, name)
    if value not in choices:
        raise unknown_name(name, str(value), map(str, choices))


ComputeDtype = Literal["float32", "bfloat16", "float16"]
Family = Literal["gpt", "llama", "bert"]
RotaryScaling = Literal["none", "linear", "llama3"]
NormPlacement = Literal["pre", "post"]
Gelu = Literal["tanh", "erf"]

_FAMILIES_OF = {  # fields that only some families have
    "kv_heads": ("llama",), "rotary_base": ("llama",), "rotary_scaling": ("llama",),
    "rotary_factor": ("llama",), "rotary_low": ("llama",), "rotary_high": ("llama",),
    "rotary_original": ("llama",), "norm_placement": ("bert",), "gelu": ("gpt", "bert"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model of one of three families.

    gpt    as in Megatron-LM and GPT-2: pre-LN blocks, learned positions, GELU
    llama  RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases
    bert   as in Megatron-LM 2019: attention both ways, token types, a masked-token head and a
           binary one for the order of two texts
    """

    family: Family = "gpt"  # GPT-2 and Megatron's GPT, Llama, or BERT
    layers: Layers = 8  # L, transformer blocks
    hidden: Width = 256  # D, size between the blocks
    heads: Width = 8  # H, of attention
    kv_heads: Width | None = None  # G, heads of keys and values; None: as many as heads
    sequence: Tokens = 256  # S, tokens
    vocab: Vocab = 256  # V, tokens, before padding
    ffn_multiple: Annotated[int, Between(1, 2**10)] = 4  # F / D
    ffn: Ffn | None = None  # F, where it is no multiple of D; None: ffn_multiple * hidden
    tied: bool = True  # the output layer shares the embedding's weight
    dropout: float = 0.0  # on the embedding and before each residual addition
    attention_dropout: float = 0.0  # on the attention probabilities
    init_std: float = 0.02  # output projections of a block: init_std / sqrt(2 L)
    norm_epsilon: float = 1e-5  # under the root of a norm
    norm_placement: NormPlacement = "pre"  # before attention and MLP, or after the additions
    gelu: Gelu = "tanh"  # its approximation as in GPT-2, or exact as in the first BERT
    rotary_base: float = 10000.0  # wavelengths of positions go from 2 pi to 2 pi times this
    rotary_scaling: RotaryScaling = "none"  # of a model that was first trained on shorter texts
    rotary_factor: Annotated[float, Between(1, 2**20)] = 1.0  # how much longer they are now
    rotary_low: float = 1.0  # "llama3": wavelengths above rotary_original / this are all scaled,
    rotary_high: float = 4.0  # those below rotary_original / this not at all
    rotary_original: Tokens = 8192  # "llama3": the sequence of the first training
    vocab_multiple: Width = 128  # the vocabulary is padded to a multiple of this times its shards
    compute_dtype: ComputeDtype = "bfloat16"  # matmuls and activations; masters stay float32

    def __post_init__(self):
        settle_types(self)
        for name, annotation in (
            ("family", Family), ("compute_dtype", ComputeDtype), ("gelu", Gelu),
            ("norm_placement", NormPlacement), ("rotary_scaling", RotaryScaling),
        ):  # fmt: skip
            _require_choice(self, name, annotation)
        _require_above(self, 0, "init_std", "norm_epsilon", "rotary_base", "rotary_low")
        _require_above(self, self.rotary_low, "rotary_high")
        for name, default in _defaults(ModelConfig, _FAMILIES_OF).items():
            if self.family not in _FAMILIES_OF[name] and getattr(self, name) != default:
                raise UserError(
                    f"{name}={getattr(self, name)} is not of family={self.family!r}, but of "
                    f"{' and '.join(_FAMILIES_OF[name])}; leave it out"
                )
        if self.family == "bert" and not self.tied:
            raise UserError("family='bert' shares its output layer with the embedding; tied=True")
        if self.hidden % self.heads:
            raise UserError(
                f"hidden={self.hidden} cannot be divided over heads={self.heads}; "
                f"use hidden={_nearest_multiples(self.hidden, self.heads)}"
            )
        if self.family == "llama" and self.head_size % 2:
            raise UserError(
                f"heads of hidden/heads={self.head_size} cannot be turned in pairs by rotary "
                "positions; use an even size"
            )
        if self.heads % self.groups:
            raise UserError(
                f"heads={self.heads} cannot be divided over kv_heads={self.kv_heads}; "
                f"use kv_heads={_nearest_divisors(self.heads, self.groups)}"
            )
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"{name}={getattr(self, name)} must lie in [0, 1)")

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def groups(self) -> int:
        """G, heads of keys and values; each serves heads / groups heads of queries."""
        return self.kv_heads or self.heads

    @property
    def ffn_hidden(self) -> int:
        """F"""
        return self.ffn or self.ffn_multiple * self.hidden

    @property
    def causal(self) -> bool:
        """Whether a position sees none of those after it."""
        return self.family != "bert"

    def padded_vocab(self, shards: int) -> int:
        """V padded so that each of `shards` devices holds a multiple of `vocab_multiple` rows."""
        unit = self.vocab_multiple * shards
        return math.ceil(self.vocab / unit) * unit


Idle = Literal["skip", "phases"]
Stash = Literal["residuals", "inputs"]
Zero = Literal[1, 3]
Recompute = Literal["none", "selective", "full"]
Attention = Literal["auto", "blocked", "cudnn"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is laid over a device mesh. Changes speed and memory, never the values."""

    data: Devices = 1  # replicas (d)
    pipe: Stages = 1  # pipeline stages (p)
    tensor: Devices = 1  # tensor-parallel shards (t)
    virtual: Layers = 1  # model chunks per stage (v): above 1, the schedule is interleaved
    microbatch: Sequences = 1  # sequences per microbatch and replica (b)
    slices: Slices = 1  # parts into which the schedule cuts a microbatch's sequences
    sequence_parallel: bool = True  # shard activations between the linear layers over `tensor`
    schedule: str = "1f1b"  # see `mtx schedule --help`; "auto"; or a table's .csv, .txt or .json
    idle: Idle = (
        "skip"  # idle half ticks: a cond each, or computed in scans of phases that need them
    )
    stash: Stash = "residuals"  # what waits between a microbatch's F and its B
    zero: Zero = 1  # sharded over `data`: 1: the optimizer; 3: parameters and gradients as well
    recompute: Recompute = "none"  # within a block, at stash="residuals"
    attention: Attention = "auto"  # "auto": cuDNN's kernel on NVIDIA GPUs where it serves
    # layers of each of the pipe*virtual model pieces, in model order
    stage_layers: StageLayers = "even"

    def __post_init__(self):
        settle_types(self)
        for name, annotation in (
            ("zero", Zero), ("idle", Idle), ("stash", Stash), ("recompute", Recompute),
            ("attention", Attention),
        ):  # fmt: skip
            _require_choice(self, name, annotation)
        if self.schedule != "auto" and not self.schedule_is_file:
            check_virtual(self.schedule, self.virtual, self.slices)
        if isinstance(self.stage_layers, str) and self.stage_layers not in ("even", "balanced"):
            raise unknown_name("stage_layers", self.stage_layers, ("even", "balanced"))
        if self.stash == "inputs" and self.recompute == "full":
            raise UserError(
                "stash='inputs' already recomputes each chunk once; recompute='full' would pay a "
                "third forward pass. Use recompute='none' with it, or stash='residuals'"
            )

        checked("data*pipe*tensor", self.devices, Devices)
        checked("pipe*virtual", self.pipe * self.virtual, Layers)

    @property
    def schedule_is_file(self) -> bool:
        return self.schedule.endswith(SUFFIXES)

    @cached_property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis of the mesh, in the mesh's order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @cached_property
    def replicas(self) -> int:
        """The parts into which the batch is split."""
        return math.prod(self.sizes[axis] for axis in BATCH)

    @property
    def vocab_shards(self) -> int:
        """The vocabulary is sharded over `pipe` x `tensor` together."""
        return self.pipe * self.tensor

    def microbatches(self, global_batch: int) -> int:
        """m, the microbatches of one replica in one step."""
        unit = self.replicas * self.microbatch
        if global_batch < 1 or global_batch % unit:
            parts = "*".join(str(self.sizes[axis]) for axis in BATCH)
            raise UserError(
                f"global_batch={global_batch} cannot be divided into {'*'.join(BATCH)}*microbatch="
                f"{parts}*{self.microbatch}; use global_batch="
                f"{_nearest_multiples(global_batch, unit)}"
            )
        return global_batch // unit

    def check(self, model: ModelConfig) -> None:
        """Raises UserError where `model` cannot be laid out this way."""
        place_layers(
            model.layers, pipe=self.pipe, virtual=self.virtual, stage_layers=self.stage_layers
        )
        groups = model.groups
        common = math.gcd(model.heads, model.ffn_hidden, groups)
        for name, value in (("heads", model.heads), ("ffn_hidden", model.ffn_hidden)):
            if value % self.tensor:
                raise UserError(
                    f"{name}={value} cannot be divided over tensor={self.tensor}; "
                    f"use tensor={_nearest_divisors(common, self.tensor)}"
                )
        if groups % self.tensor and self.tensor % groups:
            raise UserError(
                f"kv_heads={groups} can neither be divided over tensor={self.tensor} nor be "
                f"repeated on it; use tensor={_nearest_divisors(common, self.tensor)}"
            )
        if self.slices > 1 and not model.causal:
            raise UserError(
                f"slices={self.slices} needs a model that sees no later positions, and family="
                f"{model.family!r} does; use slices=1"
            )
        if model.sequence % self.slices:
            raise UserError(
                f"sequence={model.sequence} cannot be cut into slices={self.slices}; "
                f"use slices={_nearest_divisors(model.sequence, self.slices)}"
            )
        if self.slices > 1 and model.attention_dropout:
            raise UserError(
                f"attention_dropout={model.attention_dropout} is not made for slices="
                f"{self.slices}; use attention_dropout=0 or slices=1"
            )
        if self.sequence_parallel and model.sequence % (self.slices * self.tensor):
            raise UserError(
                f"sequence={model.sequence} cannot be divided over tensor={self.tensor}"
                f"{f' in slices={self.slices}' if self.slices > 1 else ''} for sequence "
                "parallelism; use sequence="
                f"{_nearest_multiples(model.sequence, self.slices * self.tensor)} "
                "or sequence_parallel=False"
            )


Rates = Literal["cosine", "linear", "wsd", "constant"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer (`mtx.optimizers`) with warm-up and decay, global-norm clipping and, in float16,
    a dynamic loss scale."""

    name: str = "adamw"  # or lion: a file of mtx/optimizers
    # of embeddings, head, norms and biases, with its own b1, b2, epsilon; None: as of the matrices
    rest: str | None = None
    lr: float = 1.5e-4  # the largest learning rate: after the warm-up
    rest_lr: float | None = None  # with `rest`; rises and decays as lr does. None: lr
    min_lr: float = 1e-5  # the last one, which the decay ends at
    rate: Rates = "cosine"  # how it decays; wsd: warm up, stay, decay
    warmup_steps: Interval = 0  # in which the learning rate rises linearly
    decay_steps: Step | None = None  # the step at which min_lr is reached; None: the run's steps
    wsd_decay_fraction: float = 0.1  # rate="wsd": share of decay_steps spent decaying, at its end
    b1: float | None = None  # decay of the mean of gradients; None: the optimizer's, AdamW's 0.9
    b2: float | None = None  # and of that of their squares; None: the optimizer's, AdamW's 0.95
    epsilon: float | None = None  # beside the root of the second; None: AdamW's 1e-8
    weight_decay: NotNegative = 0.1  # not applied to biases and norms
    clip: float = 1.0  # global gradient norm; 0 turns it off
    loss_scale: Annotated[float, Between(1, 2.0**127)] = 2.0**16  # float16 only: the first scale
    loss_scale_window: Step = 1000  # float16 only: finite steps before the scale doubles

    def __post_init__(self):
        settle_types(self)
        _require_choice(self, "rate", Rates)
        self._check_optimizers()
        _require_above(self, 0, "lr")
        if self.decay_steps is not None and self.rate != "constant":
            if self.warmup_steps >= self.decay_steps:
                raise UserError(
                    f"warmup_steps={self.warmup_steps} leave nothing of decay_steps="
                    f"{self.decay_steps} to decay in; use fewer, or a larger decay_steps"
                )
        if not 0.0 <= self.min_lr <= self.lr:
            raise UserError(f"min_lr={self.min_lr} must lie in [0, lr={self.lr}]")
        if not 0.0 < self.wsd_decay_fraction <= 1.0:
            raise UserError(f"wsd_decay_fraction={self.wsd_decay_fraction} must lie in (0, 1]")
        if not self.clip >= 0:
            raise UserError(f"clip={self.clip} must be at least 0 (0 turns clipping off)")
        for name in ("b1", "b2"):
            if getattr(self, name) is not None and not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"{name}={getattr(self, name)} must lie in [0, 1)")

    def _check_optimizers(self) -> None:
        for name, value in (("optimizer.name", self.name), ("optimizer.rest", self.rest)):
            if value is not None and value not in optimizers.NAMES:
                raise unknown_name(name, value, optimizers.NAMES)
        for name in ("rest_lr", "epsilon"):
            if getattr(self, name) is not None:
                _require_above(self, 0, name)
        if self.rest is None and self.rest_lr is not None:
            raise UserError(f"rest_lr={self.rest_lr} is the rate of rest=None; name one, or use lr")
        defaults = optimizers.optimizer_module(self.name).DEFAULTS
        for name in ("b1", "b2", "epsilon"):
            if getattr(self, name) is not None and name not in defaults:
                raise UserError(
                    f"{name}={getattr(self, name)} is not of optimizer.name={self.name!r}, which "
                    f"has {', '.join(defaults)}; leave it out"
                )

    def hyperparameters(self, name: str) -> dict[str, float]:
        """Those of the optimizer of that name: this config's, where it is `name`, else its own."""
        defaults = optimizers.optimizer_module(name).DEFAULTS
        given = {key: getattr(self, key) for key in defaults} if name == self.name else {}
        return defaults | {key: value for key, value in given.items() if value is not None}


Order = Literal["sop", "nsp", "none"]
SplitBy = Literal["auto", "documents", "tokens"]
_BERT_DATA = "order", "mask_fraction", "mask_run", "short_fraction"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What a run reads, text files or indexed datasets, its tokenizer, and what is held out.

    Datasets are Megatron-LM's .bin and .idx, as `mtx data build` makes them: prefixes, of which
    all samples are read, or weights and prefixes in turns: 0.7 corpus 0.3 code. A BERT reads those
    of sentences.
    """

    path: tuple[str, ...] = ()  # files, folders or datasets; empty: pydoc_data.topics, of Python
    tokenizer: str = "bytes"  # or "bpe" or "wordpiece", trained on the text; or a file or folder
    eod: str = "auto"  # its end-of-document token, by name or number; auto: the dataset's own
    bpe_vocab: TrainedBytes = 2048  # "bpe" and "wordpiece": of the vocabulary trained on the text
    packed: bool = False  # documents of one sample do not see each other; positions restart
    eval_fraction: float = 0.05  # text files: share held out
    split: str = "969,30,1"  # datasets: shares to train on, to evaluate on, and left out
    split_by: SplitBy = "auto"  # datasets; tokens: of each document, as auto where they are few
    cache: str | None = None  # datasets: folder of sample indices; None: beside the first dataset
    seed: DataSeed = 0  # order of documents and samples
    order: Order = "sop"  # BERT's second text: swapped with the first, of another document, or none
    mask_fraction: float = 0.15  # BERT: share of the tokens that are to be predicted
    mask_run: Width = 3  # BERT: whole words that are masked together, at most
    short_fraction: float = 0.1  # BERT: share of samples that are made shorter than a sequence

    def __post_init__(self):
        settle_types(self)
        _require_choice(self, "order", Order)
        _require_choice(self, "split_by", SplitBy)
        if "" in self.path:
            raise UserError(
                "data path='' must be a file, a folder or a dataset; '.' is this folder"
            )
        for path in self.path:
            check_path("data path", path)
        check_path("data tokenizer", self.tokenizer)
        check_path("data cache", self.cache or "")
        if not self.tokenizer:
            raise UserError(
                "data tokenizer='' must be bytes, bpe, wordpiece, or the path of a tokenizer"
            )
        if not 0.0 < self.eval_fraction < 1.0:
            raise UserError(f"eval_fraction={self.eval_fraction} must lie between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What is watched for numbers that go wrong, and how often a run may go back because of it."""

    spike_nats: NotNegative = 0.0  # a loss this far above what is usual goes back; 0: off
    spike_window: Annotated[int, Between(1, 10_000)] = 50  # steps
    compare_every: Interval = 200  # steps between comparisons of what replicas hold; 0: never
    checksums: bool = False  # of masters and moments, from each step to the next
    rollbacks: Interval = 3  # at most, in one session
    most_skipped: Step = 50  # steps in a row whose gradients are not finite: then the run ends

    def __post_init__(self):
        settle_types(self)


Track = Literal["tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run; written beside each checkpoint."""

    model: ModelConfig = field(default_factory=ModelConfig)
    layout: Layout = field(default_factory=Layout)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    global_batch: Sequences = 16  # sequences a step, over all replicas
    steps: Step = 100  # of the optimizer, from the run's beginning
    seed: Seed = 0  # initial values and dropout
    out: str = "runs/mtx"  # log, config and checkpoints
    eval_every: Interval = 50  # steps; 0: only at the end
    eval_batches: Step = 4  # global batches of held-out text
    save_every: Interval = 0  # steps; 0: only at the end
    keep: Step = 2  # the newest checkpoints that are kept
    keep_every: Interval = 0  # steps; those saved at a multiple of it are kept as well; 0: none
    resume: bool = True  # go on from the newest checkpoint in `out`, where there is one
    track: tuple[Track, ...] = ()  # beside log.jsonl: whoever else is told of each step
    profile: tuple[Interval, Interval] = (0, 0)  # first and last step of a profile; 0 0: none

    def __post_init__(self):
        settle_types(self)
        if not self.out:
            raise UserError("out='' must be a folder; '.' is this one")
        for name in self.track:
            if name not in Track.__args__:
                raise unknown_name("track", str(name), Track.__args__)
        first, last = self.profile
        if (first, last) != (0, 0) and not 1 <= first <= last:
            raise UserError(
                f"profile={first} {last} must be a first step of at least 1 and a last one from "
                "there on; 0 0 turns it off"
            )
        if first > self.steps:
            raise UserError(f"profile={first} {last} lies beyond steps={self.steps}")
        self.layout.check(self.model)
        self.layout.microbatches(self.global_batch)
        self._check_data()

    def _check_data(self) -> None:
        bert = self.model.family == "bert"
        if bert and self.data.packed:
            raise UserError("data packed=True is not for family='bert', whose samples are pairs")
        if not bert and self.data.tokenizer == "wordpiece":
            raise UserError("data tokenizer='wordpiece' is for family='bert'; use bytes or bpe")
        for name, default in _defaults(DataConfig, _BERT_DATA).items():
            value = getattr(self.data, name)
            if not bert and value != default:
                raise UserError(
                    f"data {name}={value} is for family='bert', not {self.model.family!r}; leave "
                    "it out"
                )

    @property
    def microbatches(self) -> int:
        return self.layout.microbatches(self.global_batch)


def to_dict(config: object) -> dict:
    """A config as plain nested dicts, ready for JSON."""
    return dataclasses.asdict(config)


def from_dict(kind: type, values: dict):
    """The inverse of `to_dict`; an unknown name is a UserError that names the nearest one."""
    known = {f.name: f for f in dataclasses.fields(kind)}
    for name in values:
        if name not in known:
            raise unknown_name(f"{kind.__name__} field", name, known)
    nested = {
        "model": ModelConfig,
        "layout": Layout,
        "optimizer": OptimizerConfig,
        "data": DataConfig,
        "guard": GuardConfig,
    }
    read = {}
    for name, value in values.items():
        if kind is RunConfig and name in nested:
            if not isinstance(value, dict):
                fields = nested[name].__name__
                raise UserError(f"{name}={shown(value)} must be a table of {fields} fields")
            value = from_dict(nested[name], value)
        read[name] = tuple(value) if isinstance(value, list) else value
    return kind(**read)


def _defaults(kind: type, names: Iterable[str]) -> dict[str, object]:
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    return {name: fields[name] for name in names}


def _nearest_multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else f"{above}"


def _nearest_divisors(value: int, wanted: int) -> str:
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    divisors = {1, *small, *(value // n for n in small)}
    below = max((n for n in divisors if n < wanted), default=1)
    above = min((n for n in divisors if n > wanted), default=None)
    return f"{below} or {above}" if above else f"{below}"
