"""Reads checkpoints of earlier formats as if they were of today's.

1: fingerprints without the factor of their array's name and dtype (see `fingerprint`).
2: parameters are "ends", embedding and head together, and "block", the layers, all of one kind.
3: "embed", "head" and "layers", by kind.
"""

from __future__ import annotations

from dataclasses import replace

from mtx.checkpoint.catalog import ArrayInfo, Catalog
from mtx.checkpoint.fingerprint import MODULUS, factor_of
from mtx.config.run import own_fields

_NAMES = {
    "tokens": "embed.tokens", "positions": "embed.positions", "types": "embed.types",
    "embed_norm": "embed.norm", "norm": "head.norm", "output": "head.output",
    "head": "head.masked", "pooler": "head.pooler", "binary": "head.binary",
    "classifier": "head.classifier",
}  # fmt: skip


def current_catalog(catalog: Catalog, written: int) -> Catalog:
    """The arrays of a checkpoint of format `written`, with the names and fingerprints of
    today's format. Raises ValueError if two have the same name."""
    if written > 2:
        return catalog
    renamed = {_renamed(name): (name, info) for name, info in catalog.items()}
    if len(renamed) < len(catalog):
        raise ValueError(f"arrays of one name are in it twice, in format {written} and in another")
    return {name: _array(name, *old, written) for name, old in renamed.items()}


def current_run(run: dict) -> dict:
    """A run's config, as a checkpoint has it, without values that no longer exist."""
    model, layout = run.get("model"), run.get("layout")
    if isinstance(model, dict):
        run = run | {"model": own_fields(model)}
    if isinstance(layout, dict) and layout.get("idle") == "masked":
        run = run | {"layout": layout | {"idle": "phases"}}
    return run


def _renamed(name: str) -> str:
    match name.split("."):
        case [tree, "block", *path]:
            return ".".join((tree, "layers", "block", *path))
        case [tree, "ends", part, *path] if part in _NAMES:
            return ".".join((tree, _NAMES[part], *path))
    return name


def _array(name: str, old: str, info: ArrayInfo, written: int) -> ArrayInfo:
    factor = factor_of(name, info.dtype)
    if written == 2:
        factor *= pow(factor_of(old, info.dtype), -1, MODULUS)
    blocks = [
        replace(block, name=name, fingerprint=block.fingerprint * factor % MODULUS)
        for block in info.blocks
    ]
    return replace(info, blocks=tuple(blocks))
