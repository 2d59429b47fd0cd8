"""Hugging Face's config.json to the config of one of our models and back, as the families say."""

from __future__ import annotations

from mtx import families
from mtx.config import ModelConfig
from mtx.errors import UserError, unknown_name
from mtx.families import hugging_face_of
from mtx.huggingface import Fields, HuggingFace, Json

_FOUND = [(name, kind) for name in families.NAMES for kind in hugging_face_of(name)]
KINDS: dict[str, HuggingFace] = {kind.model_type: kind for _, kind in _FOUND}
_FAMILIES = {kind.model_type: name for name, kind in _FOUND}


def kind_of(config: Json, where: str) -> HuggingFace:
    """The model type of a config.json; UserError, beginning with `where`, if it is none of ours."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in KINDS:
        raise UserError(f"{where}: {unknown_name('model_type', str(model_type), KINDS)}")
    return KINDS[model_type]


def read_config(config: Json, where: str) -> tuple[ModelConfig, list[str]]:
    """The model that a config.json describes, for float32, and what is read differently from how it
    is written. UserError, beginning with `where`, for a model that is not ours."""
    kind = kind_of(config, where)
    fields = Fields(config, kind.defaults, where)
    fields.require("quantization_config", None)
    fields.require("add_cross_attention", False)
    for name, value in kind.fixed.items():
        fields.require(name, value, *(() if value else (None,)))
    values = {
        ours: fields.of_kind(type(kind.defaults[theirs]), theirs)
        for ours, theirs in kind.fields.items()
    }
    values |= kind.to_model(fields)
    try:
        family = _FAMILIES[kind.model_type]
        return ModelConfig(family=family, compute_dtype="float32", **values), fields.notes
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def kind_of_model(model: ModelConfig) -> HuggingFace:
    """The model type in transformers of one of our models; UserError if it has none like it."""
    for kind in hugging_face_of(model.family):
        if kind.has(model):
            return kind
    raise UserError(
        f"family={model.family!r} has no HUGGING_FACE for this model in its file, so it cannot be "
        f"written for transformers; use one of {', '.join(dict.fromkeys(_FAMILIES.values()))}"
    )


def config_of(model: ModelConfig) -> Json:
    """The config.json of a whole model, without its dtype."""
    kind = kind_of_model(model)
    return {
        "model_type": kind.model_type, "architectures": [kind.architecture],
        **{theirs: getattr(model, ours) for ours, theirs in kind.fields.items()},
        **kind.fixed, **kind.to_config(model),
    }  # fmt: skip
