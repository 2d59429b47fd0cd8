"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): a Llama whose MLP is a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from mtx.errors import UserError
from mtx.families.llama import Llama
from mtx.fields import Between
from mtx.sizes import Ffn, Width

AuxLoss = Literal["none", "batch", "sequence"]


@dataclass(frozen=True, kw_only=True)
class Mixtral(Llama):
    """Mixtral. Families with other routers derive from its config."""

    family: str = "mixtral"
    experts: Width = 8  # E, of a layer
    choices: Width = 2  # k, experts of a token
    expert_ffn: Ffn | None = None  # F of an expert; None: that of the model
    aux: AuxLoss = "batch"  # keeps experts evenly loaded: see `mtx.layers.router`
    aux_weight: float = 0.001
    z_weight: float = 0.0  # of the square of the logits' log-sum-exp
    # None: no choice is dropped; else of a sequence those beyond this times an expert's even share
    capacity: Annotated[float, Between(0.01, 1000)] | None = None

    def check(self) -> None:
        super().check()
        if self.choices > self.experts:
            raise UserError(
                f"choices={self.choices} must be at most experts={self.experts}; use "
                f"choices={self.experts}"
            )
        for name in ("aux_weight", "z_weight"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} must not be below 0; use 0 for none")

    @property
    def routed_experts(self) -> int:
        return self.experts

    @property
    def split_widths(self) -> dict[str, int]:
        return super().split_widths | {"expert_ffn": self.expert_width}

    @property
    def expert_width(self) -> int:
        """F of an expert."""
        return self.expert_ffn or self.ffn_hidden

    def router(self, **others: Any):
        """others: fields of `mtx.layers.router.Router` that a family sets."""
        from mtx.layers.router import Router

        return Router(
            experts=self.experts, choices=self.choices, aux=self.aux, aux_weight=self.aux_weight,
            z_weight=self.z_weight, capacity=self.capacity, **others,
        )  # fmt: skip

    def mixture(self, **others: Any):
        """others: fields of `mtx.layers.experts.Experts` that a family sets."""
        from mtx.layers.experts import Experts

        return Experts(**{"router": self.router(), "ffn": self.expert_width} | others)

    def kind(self, **others: Any):
        from mtx.layers.layer import Kind

        attention = ("attention", self.attention(**others))
        sublayers = (attention, ("mlp", self.mixture()))
        return Kind(sublayers=sublayers, norm=self.norm(), dropout=self.dropout)


CONFIG = Mixtral
