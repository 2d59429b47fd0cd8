"""LLaVA (Liu et al. 2023a, arXiv 2304.08485; 1.5: 2023b, arXiv 2310.03744): a projector puts
the outputs of CLIP's vision transformer among the tokens of a Llama."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from mtx.errors import UserError, nearest_multiples
from mtx.families import llama
from mtx.families.llama import Llama, preset
from mtx.huggingface import Fields, HuggingFace, Json, Names, Weight, layer_of, norm_of
from mtx.sizes import Ffn, Interval, Layers, Sequences, Width

VisionActivation = Literal["quick_gelu", "gelu"]
Projection = Literal["mlp", "linear"]


@dataclass(frozen=True, kw_only=True)
class Llava(Llama):
    """LLaVA 1 and 1.5, whose vision transformer is never trained.

    `layers` counts the vision transformer's layers, the projector, and the decoder's layers.
    """

    family: str = "llava"
    vision_layers: Layers = 4  # layers of the vision transformer
    # how many of those, the last ones, come after the output that is read: kept only for export
    unread_layers: Interval = 1
    vision_hidden: Width = 128  # E, hidden size of the vision transformer
    vision_heads: Width = 4  # heads of the vision transformer
    vision_ffn: Ffn = 512  # F of the vision transformer's MLPs
    vision_activation: VisionActivation = "quick_gelu"  # activation of those MLPs; CLIP: quick_gelu
    vision_norm_epsilon: float = 1e-5  # added under the root of the vision transformer's norms
    image_size: Width = 32  # side in pixels of the square that an image is cut to
    patch_size: Width = 8  # side of a patch in pixels
    images: Sequences = 1  # most images in a sample
    image_token: Interval | None = None  # token in place of patches; None: the vocabulary's last
    projector: Projection = "mlp"  # two linears around a GELU, as in 1.5, or one linear
    projector_only: bool = False  # train only the projector, not the decoder (LLaVA's first stage)

    def check(self) -> None:
        super().check()
        for name, size, part in (
            ("vision_hidden", self.vision_hidden, "vision_heads"),
            ("image_size", self.image_size, "patch_size"),
        ):
            if size % (unit := getattr(self, part)):
                raise UserError(
                    f"{name}={size} must be a multiple of {part}={unit}; use {name}="
                    f"{nearest_multiples(size, unit)}"
                )
        if self.decoders < 1:
            raise UserError(
                f"layers={self.layers} must be vision_layers={self.vision_layers}, a projector and "
                f"the decoder's; use {self.vision_layers + 2} or more"
            )
        if self.unread_layers >= self.vision_layers:
            raise UserError(
                f"unread_layers={self.unread_layers} must leave one of vision_layers="
                f"{self.vision_layers}; use unread_layers=1"
            )
        if self.patches >= self.sequence:
            raise UserError(
                f"sequence={self.sequence} must hold the {self.patches} patches of an image "
                f"(image_size={self.image_size}, patch_size={self.patch_size}) and text; use a "
                "longer sequence, or larger patches"
            )
        if self.fp8 != "off":
            raise UserError(f"fp8={self.fp8!r} is not made for family='llava'; use fp8='off'")

    @property
    def decoders(self) -> int:
        """Layers of the decoder."""
        return self.layers - self.vision_layers - 1

    @property
    def patches(self) -> int:
        """N, patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def placeholder(self) -> int:
        """The token in the place of each patch."""
        return self.vocab - 1 if self.image_token is None else self.image_token

    @property
    def reads_images(self) -> bool:
        return True

    def trains(self, path: str, role: str) -> bool:
        if path.startswith(("embed.vision.", "layers.vision.", "layers.unread.")):
            return False
        if path.startswith("layers.projector."):
            return True
        return not self.projector_only and super().trains(path, role)

    @property
    def freezes(self) -> bool:
        return True

    @property
    def split_widths(self) -> dict[str, int]:
        return super().split_widths | {
            "hidden": self.hidden, "vision_heads": self.vision_heads, "vision_ffn": self.vision_ffn,
        }  # fmt: skip

    # -- what it is made of ------------------------------------------------------------------------

    def _images(self):
        from mtx.layers.vision import Images

        return Images(
            count=self.images, side=self.image_size, patch=self.patch_size, size=self.vision_hidden
        )

    def _vision(self) -> Json:
        """The sublayers of the vision transformer's layers."""
        from mtx.layers.attend import Scores
        from mtx.layers.attention import Attention
        from mtx.layers.mlp import MLP

        attention = Attention(
            heads=self.vision_heads, size=self.vision_hidden // self.vision_heads, bias=True,
            output_bias=True, scores=Scores(causal=False),
        )  # fmt: skip
        mlp = MLP(ffn=self.vision_ffn, activation=self.vision_activation)
        return {"sublayers": (("attention", attention), ("mlp", mlp))}

    def stack(self):
        from mtx.layers.layer import Stack
        from mtx.layers.norm import Norm
        from mtx.layers.vision import (
            ImageEmbedding,
            NextTokenOfImages,
            ProjectorKind,
            UnreadKind,
            VisionKind,
        )

        images, norm = self._images(), Norm(kind="layer", epsilon=self.vision_norm_epsilon)
        common: Json = {"images": images, "norm": norm}
        kinds = {
            "vision": VisionKind(**self._vision(), **common),
            "unread": UnreadKind(**self._vision(), **common),
            "projector": ProjectorKind(sublayers=(), projection=self.projector, **common),
            "block": self.kind(),
        }
        pattern = (
            *("vision",) * (self.vision_layers - self.unread_layers),
            *("unread",) * self.unread_layers, "projector", *("block",) * self.decoders,
        )  # fmt: skip
        return Stack(
            kinds={name: kind for name, kind in kinds.items() if name in pattern},
            pattern=pattern,
            embedding=ImageEmbedding(
                vocab=self.vocab, dropout=self.dropout, images=images, vision_norm=norm
            ),
            head=NextTokenOfImages(
                vocab=self.vocab, norm=self.norm(), tied=self.tied, images=images
            ),
        )  # fmt: skip


CONFIG = Llava

# -- Hugging Face ----------------------------------------------------------------------------------

_VISION_DEFAULTS = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5, "num_channels": 3,
}  # fmt: skip
_VISION_FIELDS = {
    "vision_layers": "num_hidden_layers", "vision_hidden": "hidden_size",
    "vision_heads": "num_attention_heads", "vision_ffn": "intermediate_size",
    "vision_norm_epsilon": "layer_norm_eps", "image_size": "image_size", "patch_size": "patch_size",
}  # fmt: skip
_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu"}


def _read(fields: Fields, names: Json, defaults: Json) -> Json:
    return {ours: fields.of_kind(type(defaults[name]), name) for ours, name in names.items()}


def _to_model(fields: Fields) -> Json:
    text = fields.table("text_config", llama.DEFAULTS)
    vision = fields.table("vision_config", _VISION_DEFAULTS)
    assert text is not None and vision is not None
    text.require("model_type", "llama")
    text.require("attention_bias", False)
    text.require("mlp_bias", False)
    vision.require("model_type", "clip_vision_model")
    vision.require("num_channels", 3)
    model = _read(text, llama.FIELDS, llama.DEFAULTS) | llama.silu_to_model(text)
    model |= _read(vision, _VISION_FIELDS, _VISION_DEFAULTS)
    layers, read = model["vision_layers"], fields.get("vision_feature_layer")
    read = layers + 1 + read if isinstance(read, int) and read < 0 else read
    if not isinstance(read, int) or not 1 <= read <= layers:
        raise fields.refused("vision_feature_layer", f"a number from {-layers} to -1")
    return model | {
        "layers": layers + 1 + model["layers"], "unread_layers": layers - read,
        "vision_activation": vision.choice("hidden_act", _ACTIVATIONS),
        "tied": bool(fields.get("tie_word_embeddings")) or model["tied"],
    }  # fmt: skip


def _to_config(model: Llava) -> Json:
    text = {theirs: getattr(model, ours) for ours, theirs in llama.FIELDS.items()}
    vision = {theirs: getattr(model, ours) for ours, theirs in _VISION_FIELDS.items()}
    return {
        "image_token_index": model.placeholder, "image_seq_length": model.patches,
        "vision_feature_layer": -1 - model.unread_layers, "tie_word_embeddings": model.tied,
        "text_config": text | llama.to_config(model) | {
            "model_type": "llama", "num_hidden_layers": model.decoders,
            "attention_bias": False, "mlp_bias": False,
        },
        "vision_config": vision | {
            "model_type": "clip_vision_model", "hidden_act": model.vision_activation,
            "num_channels": 3,
        },
    }  # fmt: skip


_VISION, _PROJECTOR, _BLOCK = ("vision", "unread"), ("projector",), ("block",)
_TOWER = "vision_tower.vision_model."


def _of_kinds(kinds: tuple[str, ...], *weights: Weight) -> tuple[Weight, ...]:
    return tuple(replace(weight, kinds=kinds) for weight in weights)


def _names() -> Names:
    decoder = llama.names()
    qkv = tuple(f"self_attn.{each}_proj" for each in "qkv")
    start = "language_model.model."
    shared = {
        "embed.tokens": f"{start}embed_tokens.weight", "head.norm.scale": f"{start}norm.weight",
        "head.output": "language_model.lm_head.weight",
    }  # fmt: skip
    embeddings = f"{_TOWER}embeddings"
    return Names(
        prefix="", layer=f"{start}layers.{{}}.", heads=(),
        stacks=MappingProxyType(
            dict.fromkeys(_VISION, f"{_TOWER}encoder.layers.{{}}.")
            | {"projector": "multi_modal_projector."}
        ),
        shared=(
            *(Weight(each.leaf, (shared[each.leaf],), each.form) for each in decoder.shared),
            Weight(
                "embed.vision.patches", (f"{embeddings}.patch_embedding.weight",), "convolution"
            ),
            Weight("embed.vision.class_token", (f"{embeddings}.class_embedding",)),
            Weight(
                "embed.vision.positions", (f"{embeddings}.position_embedding.weight",), "table"
            ),
            *norm_of("embed.vision.norm", f"{_TOWER}pre_layrnorm"),  # spelled so there
            *norm_of("embed.vision.last_norm", f"{_TOWER}post_layernorm"),
        ),
        layers=(
            *_of_kinds(_BLOCK, *decoder.layers),
            *_of_kinds(
                _VISION,
                *norm_of("attention_norm", "layer_norm1"), *norm_of("mlp_norm", "layer_norm2"),
                Weight(
                    "attention.qkv.w", tuple(f"{each}.weight" for each in qkv), "linear", stack=1
                ),
                Weight("attention.qkv.b", tuple(f"{each}.bias" for each in qkv), stack=0),
                *layer_of("attention.out", "self_attn.out_proj", "linear", inputs=2),
                *layer_of("mlp.up", "mlp.fc1", "linear"),
                *layer_of("mlp.down", "mlp.fc2", "linear"),
            ),
            *_of_kinds(
                _PROJECTOR, *layer_of("up", "linear_1", "linear"),
                *layer_of("down", "linear_2", "linear"),
            ),
        ),
        twins={"language_model.lm_head.weight": f"{start}embed_tokens.weight"},
        # The names that transformers uses in memory, and since its version 5 in files.
        beginnings=MappingProxyType({
            "model.language_model.": start, "lm_head.": "language_model.lm_head.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
            **{f"vision_tower.{each}": f"{_TOWER}{each}"
               for each in ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.")},
        }),
        ignored=r".*\.(position_ids|rotary_emb\.inv_freq)",
    )  # fmt: skip


HUGGING_FACE = (
    HuggingFace(
        model_type="llava", architecture="LlavaForConditionalGeneration",
        defaults={
            "image_token_index": 32000, "vision_feature_layer": -2, "tie_word_embeddings": False,
        },
        fixed={
            "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
        },
        fields={"image_token": "image_token_index"},
        to_model=_to_model, to_config=_to_config, names=_names(),
        has=lambda model: model.projector == "mlp",
    ),
)  # fmt: skip

# -- presets ---------------------------------------------------------------------------------------

# Sizes from config.json of huggingface.co/llava-hf/llava-1.5-{7b,13b}-hf: CLIP's ViT-L/14 of 336
# pixels, and Vicuna. Rate, batch, length and steps are those of the second stage (Liu et al. 2023b,
# table 9: 665,000 samples once, in which the projector and the decoder are trained); layouts are
# ours.
_VIT: Json = {
    "vision_layers": 24, "vision_hidden": 1024, "vision_heads": 16, "vision_ffn": 4096,
    "image_size": 336, "patch_size": 14, "image_token": 32000, "vocab": 32064, "sequence": 2048,
    "tied": False,
}  # fmt: skip


def _preset(layers: int, hidden: int, heads: int, ffn: int, **layout: int) -> Json:
    model: Json = {"layers": 25 + layers, "hidden": hidden, "heads": heads, "ffn": ffn}
    made: Any = preset(model | _VIT, lr=2e-5, global_batch=128, pipe=1, virtual=1, **layout)
    made["optimizer"] |= {"min_lr": 0.0, "warmup_steps": 156, "weight_decay": 0.0}
    return made | {"steps": 5198}


PRESETS = {
    "llava-1.5-7b": _preset(32, 4096, 32, 11008, data=2, tensor=4),
    "llava-1.5-13b": _preset(40, 5120, 40, 13824, data=2, tensor=8),
}
# At laptop size, on the miniature's devices, with pictures that are drawn.
PRESETS["miniature-llava"] = {
    "model": {"layers": 9, "hidden": 96, "heads": 4, "sequence": 48, "vocab": 257,
              "vocab_multiple": 1, "init_std": 0.08, "compute_dtype": "float32"},
    "layout": {"data": 2, "pipe": 2, "tensor": 2, "virtual": 2, "microbatch": 4,
               "stage_layers": "balanced"},
    "optimizer": {"lr": 5e-4, "min_lr": 2e-4, "warmup_steps": 20},
    "global_batch": 32, "steps": 200, "eval_every": 50, "eval_batches": 1,
}  # fmt: skip
