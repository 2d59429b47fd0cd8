"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): a Llama whose MLP is a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from mtx.errors import UserError
from mtx.families.llama import DEFAULTS, FIELDS, Llama, names, preset, silu_to_model, to_config
from mtx.fields import Between
from mtx.huggingface import Fields, HuggingFace, Json, Names, Weight
from mtx.sizes import Choices, Ffn, Width

AuxLoss = Literal["none", "batch", "sequence"]
Keeps = Literal["first", "best"]


@dataclass(frozen=True, kw_only=True)
class Mixtral(Llama):
    """Mixtral. Families with other routers derive from its config."""

    family: str = "mixtral"
    experts: Width = 8  # E, experts of a layer
    choices: Choices = 2  # k, experts of a token
    expert_ffn: Ffn | None = None  # F of an expert; None: that of the model
    aux: AuxLoss = "batch"  # loss that keeps experts evenly loaded: see `mtx.layers.router`
    aux_weight: float = 0.001  # weight of the `aux` loss
    z_weight: float = 0.0  # weight of the square of the logits' log-sum-exp
    # None: drop no choices; else drop those beyond this times an expert's even share of a sequence
    capacity: Annotated[float, Between(0.01, 1000)] | None = None
    capacity_keeps: Keeps = "first"  # choices not dropped; "best": those with the highest gates

    def check(self) -> None:
        super().check()
        self.check_experts()

    def check_experts(self) -> None:
        """UserError for values of experts that do not go together."""
        if self.fp8 != "off":
            raise UserError(
                f"fp8={self.fp8!r} is not made for experts={self.experts}; use fp8='off'"
            )
        if self.choices > self.experts:
            raise UserError(
                f"choices={self.choices} must be at most experts={self.experts}; use "
                f"choices={self.experts}"
            )
        if self.capacity is None and self.capacity_keeps != "first":
            raise UserError(
                f"capacity_keeps={self.capacity_keeps!r} says what a capacity drops, and capacity="
                "None drops nothing; use capacity=1.25 or the like with it"
            )
        for name in ("aux_weight", "z_weight"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} must not be below 0; use 0 for none")

    @property
    def routed_experts(self) -> int:
        return self.experts

    @property
    def routed_choices(self) -> int:
        return self.choices

    @property
    def counted_by_sequence(self) -> str:
        if self.capacity is not None:
            return f"capacity={self.capacity}"
        return "aux='sequence'" if self.aux == "sequence" and self.aux_weight else ""

    @property
    def split_widths(self) -> dict[str, int]:
        return super().split_widths | {"expert_ffn": self.expert_width}

    @property
    def expert_width(self) -> int:
        """F of an expert."""
        return self.expert_ffn or self.ffn_hidden

    def router(self, **others: Any):
        """The router; others: further fields of `mtx.layers.router.Router`."""
        from mtx.layers.router import Router

        return Router(
            experts=self.experts, choices=self.choices, aux=self.aux, aux_weight=self.aux_weight,
            z_weight=self.z_weight, capacity=self.capacity, keeps=self.capacity_keeps, **others,
        )  # fmt: skip

    def mixture(self, **others: Any):
        """The experts; others: further fields of `mtx.layers.experts.Experts`."""
        from mtx.layers.experts import Experts

        return Experts(**{"router": self.router(), "ffn": self.expert_width} | others)

    def kind(self, **others: Any):
        from mtx.layers.layer import Kind

        attention = ("attention", self.attention(**others))
        sublayers = (attention, ("mlp", self.mixture()))
        return Kind(sublayers=sublayers, norm=self.norm(), dropout=self.dropout)


CONFIG = Mixtral

# -- Hugging Face ----------------------------------------------------------------------------------


def expert_names(
    *others: Weight, router: str, experts: str, gated: tuple[str, str], down: str,
    float32: bool = False,
) -> Names:  # fmt: skip
    """The table of names of a family whose experts have their own tensors. others: as for
    `llama.names`. router, experts: prefixes of their names. float32: of the router's Weight."""
    up = tuple(f"{experts}.{{}}.{name}.weight" for name in gated)
    return names(
        *others,
        Weight("mlp.router.w", (f"{router}.weight",), "linear", float32=float32),
        Weight("mlp.router.load", ()),
        Weight("mlp.up", up, "linear", stack=1, experts=True),
        Weight("mlp.down", (f"{experts}.{{}}.{down}.weight",), "linear", experts=True),
    )  # fmt: skip


def _to_model(fields: Fields) -> Json:
    fields.require("sliding_window", None)
    return silu_to_model(fields)


HUGGING_FACE = (
    HuggingFace(
        model_type="mixtral", architecture="MixtralForCausalLM",
        defaults=DEFAULTS | {
            "intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096 * 32, "num_local_experts": 8, "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001, "rope_theta": 1e6,
        },
        fields=FIELDS | {
            "experts": "num_local_experts", "choices": "num_experts_per_tok",
            "aux_weight": "router_aux_loss_coef",
        },
        to_model=_to_model, to_config=lambda model: to_config(model) | {"sliding_window": None},
        names=expert_names(
            router="block_sparse_moe.gate", experts="block_sparse_moe.experts", gated=("w1", "w3"),
            down="w2",
        ),
        fixed={"router_jitter_noise": 0.0},
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from the config.json of huggingface.co/mistralai/Mixtral-8x7B-v0.1 and -8x22B-v0.1; rate and
# layout are ours, with a layer's experts in one node.
PRESETS = {
    name: preset(
        {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "ffn": ffn,
         "vocab": vocab, "sequence": 4096, "rotary_base": 1e6, "tied": False},
        lr=lr, global_batch=1024, data=data, pipe=pipe, expert=expert, tensor=8 // expert,
        virtual=virtual,
    )
    for name, layers, hidden, heads, ffn, vocab, lr, data, pipe, expert, virtual in (
        ("mixtral-8x7b", 32, 4096, 32, 14336, 32000, 3e-4, 4, 4, 8, 4),
        ("mixtral-8x22b", 56, 6144, 48, 16384, 32768, 1.5e-4, 8, 8, 4, 7),
    )
}  # fmt: skip
