"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): layers of one Mamba-2 mixer each, without attention
or MLPs. Hybrids, whose layers are mixers, attention and MLPs, derive from its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from mtx.errors import UserError, nearest_divisors
from mtx.families import ModelConfig
from mtx.families.llama import preset
from mtx.fields import Between, checked
from mtx.huggingface import Fields, Form, HuggingFace, Json, Names, Weight
from mtx.sizes import NotNegative, Tokens, Width


@dataclass(frozen=True, kw_only=True)
class Mamba2(ModelConfig):
    """Mamba-2. `heads` are those of its mixers."""

    family: str = "mamba2"
    ssm_head_dim: Width = 64  # head size of the mixers; hidden * 2 / heads as published
    ssm_state: Width = 128  # size of the state of each number of a head
    ssm_groups: Width = 1  # groups of heads that share what is written to and read from states
    ssm_chunk: Tokens = 256  # positions computed at once, by matmuls
    conv_width: Annotated[int, Between(2, 64)] = 4  # positions that the convolution sees
    least_dt: NotNegative = 0.0  # the least time step of a position

    def check(self) -> None:
        if self.mixer_heads % self.ssm_groups:
            raise UserError(
                f"ssm_groups={self.ssm_groups} must divide the {self.mixer_heads} heads of a "
                f"mixer; use ssm_groups={nearest_divisors(self.mixer_heads, self.ssm_groups)}"
            )
        if self.fp8 != "off":
            raise UserError(
                f"fp8={self.fp8!r} is not made for family={self.family!r}, whose steps of time "
                "would be rounded; use fp8='off'"
            )

    @property
    def mixer_heads(self) -> int:
        """H of a mixer"""
        return self.heads

    @property
    def sequence_is_fixed(self) -> bool:
        return False

    @property
    def split_widths(self) -> dict[str, int]:
        return {"heads": self.heads}

    @property
    def repeated_widths(self) -> dict[str, int]:
        return {"ssm_groups": self.ssm_groups}

    # -- what it is made of ------------------------------------------------------------------------

    def norm(self):
        from mtx.layers.norm import Norm

        return Norm(kind="rms", epsilon=self.norm_epsilon)

    def mixer(self):
        from mtx.layers.mamba import Mamba

        return Mamba(
            heads=self.mixer_heads, size=self.ssm_head_dim, state=self.ssm_state,
            groups=self.ssm_groups, width=self.conv_width, chunk=self.ssm_chunk,
            least_dt=self.least_dt, epsilon=self.norm_epsilon,
        )  # fmt: skip

    def kind(self, **sublayers: Any):
        """A layer with these sublayers."""
        from mtx.layers.layer import Kind

        return Kind(sublayers=tuple(sublayers.items()), norm=self.norm(), dropout=self.dropout)

    def edges(self) -> dict[str, Any]:
        """The embedding and the head."""
        from mtx.layers.embedding import Embedding
        from mtx.layers.head import NextToken

        return {
            "embedding": Embedding(vocab=self.vocab, dropout=self.dropout),
            "head": NextToken(vocab=self.vocab, norm=self.norm(), tied=self.tied),
        }

    def stack(self):
        from mtx.layers.layer import Stack

        return Stack.uniform(self.kind(mamba=self.mixer()), self.layers, **self.edges())


CONFIG = Mamba2

# -- Hugging Face ----------------------------------------------------------------------------------

NO_LIMIT: Json = {"__float__": "Infinity"}  # as transformers writes it


def least_step(fields: Fields) -> float:
    """The lower limit of time_step_limit, whose upper limit must be infinite."""
    limit = fields.get("time_step_limit")
    if limit is None:
        return 0.0
    endless = NO_LIMIT, float("inf"), "inf", "Infinity"
    if not isinstance(limit, list | tuple) or len(limit) != 2 or limit[1] not in endless:
        raise fields.refused("time_step_limit", "two numbers, the second without a limit")
    return float(checked(f"{fields.where}: time_step_limit", limit[0], float))


def mixer_names(name: str) -> tuple[Weight, ...]:
    """The weights of a mixer whose tensors have that prefix."""

    def joined(tensor: str, form: Form, *leaves: str) -> tuple[Weight, ...]:
        tensors = (f"{name}.{tensor}",)
        return tuple(Weight(leaf, tensors, form, joined=leaves) for leaf in leaves)

    return (
        *joined("in_proj.weight", "linear", "mamba.zx", "mamba.bc", "mamba.dt"),
        *joined("conv1d.weight", "depthwise", "mamba.x_kernel", "mamba.bc_kernel"),
        *joined("conv1d.bias", "vector", "mamba.x_bias", "mamba.bc_bias"),
        *(Weight(f"mamba.{each}", (f"{name}.{each}",)) for each in ("A_log", "D", "dt_bias")),
        Weight("mamba.norm.scale", (f"{name}.norm.weight",)),
        Weight("mamba.out.w", (f"{name}.out_proj.weight",), "linear", inputs=2),
    )  # fmt: skip


def _to_model(fields: Fields) -> Json:
    fields.require("hidden_act", "silu", "swish")
    if fields.get("residual_in_fp32"):
        fields.notes.append(
            "residual_in_fp32=True is not kept: what goes from layer to layer is of compute_dtype"
        )
    return {"least_dt": least_step(fields)}


def _to_config(model: Mamba2) -> Json:
    return {
        "hidden_act": "silu", "residual_in_fp32": False,
        "expand": model.heads * model.ssm_head_dim // model.hidden,
        "time_step_limit": [model.least_dt, NO_LIMIT],
    }  # fmt: skip


HUGGING_FACE = (
    HuggingFace(
        model_type="mamba2",
        architecture="Mamba2ForCausalLM",
        defaults={
            "num_heads": 128, "head_dim": 64, "vocab_size": 32768, "hidden_size": 4096,
            "state_size": 128, "num_hidden_layers": 64, "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4, "n_groups": 8, "hidden_act": "silu", "initializer_range": 0.1,
            "residual_in_fp32": True, "chunk_size": 256, "tie_word_embeddings": False,
            "max_position_embeddings": 2048,  # not in its config.json: any length will do
        },
        fixed={"use_bias": False, "use_conv_bias": True},
        fields={
            "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_heads",
            "sequence": "max_position_embeddings", "vocab": "vocab_size",
            "tied": "tie_word_embeddings", "init_std": "initializer_range",
            "norm_epsilon": "layer_norm_epsilon", "ssm_head_dim": "head_dim",
            "ssm_state": "state_size", "ssm_groups": "n_groups", "ssm_chunk": "chunk_size",
            "conv_width": "conv_kernel",
        },
        to_model=_to_model,
        to_config=_to_config,
        names=Names(
            prefix="backbone.",
            layer="layers.{}.",
            heads=("lm_head.",),
            shared=(
                Weight("embed.tokens", ("embeddings.weight",), "table"),
                Weight("head.norm.scale", ("norm_f.weight",)),
                Weight("head.output", ("lm_head.weight",), "table"),
            ),
            layers=(Weight("mamba_norm.scale", ("norm.weight",)), *mixer_names("mixer")),
            twins={"lm_head.weight": "embeddings.weight"},
            spellings={"embedding.weight": "embeddings.weight"},
        ),
        has=lambda model: model.heads * model.ssm_head_dim % model.hidden == 0,
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from Dao and Gu 2024 (section 9 and the config.json of huggingface.co/state-spaces/
# mamba2-2.7b), and for the 8B from Waleffe et al. 2024 (arXiv 2406.07887, table 1); the layouts are
# ours.
PRESETS = {
    "mamba2-2.7b": preset(
        {"layers": 64, "hidden": 2560, "heads": 80, "vocab": 50288, "sequence": 2048},
        lr=8e-4, global_batch=512, data=64, pipe=1, tensor=1, virtual=1,
    ),
    "mamba2-8b": preset(
        {"layers": 56, "hidden": 4096, "heads": 128, "ssm_groups": 8, "vocab": 256000,
         "sequence": 4096, "tied": False},
        lr=2.5e-4, global_batch=1024, data=32, pipe=1, tensor=4, virtual=1,
    ),
}  # fmt: skip
