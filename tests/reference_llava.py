"""The oracle of LLaVA: a vision transformer like CLIP's (Radford et al. 2021), a projector and a
Llama, in plain jnp, unsharded. The decoder is that of `reference_llama`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference_llama

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def batch_of_images(model, rows, seed=0):
    """Texts with 0 to `model.images` images, each at a different place; a tenth of the targets, and
    all targets that are patches, have weight 0."""
    random = np.random.default_rng(seed)
    side, patches, length = model.image_size, model.patches, model.sequence + 1
    ids = random.integers(0, model.vocab - 1, (rows, length), dtype=np.int32)
    which = np.full((rows, length), -1, np.int32)
    for row in range(rows):
        place = 0
        for image in range(row % (model.images + 1)):
            left = (model.images - image) * patches
            place = int(random.integers(place, length - left))
            which[row, place : place + patches] = np.arange(patches) + image * patches
            place += patches
    ids[which >= 0] = model.placeholder
    weights = (random.random((rows, model.sequence)) < 0.9) & (which[:, 1:] < 0)
    pixels = random.integers(0, 256, (rows, model.images, side, side, 3), dtype=np.uint8)
    return {
        "tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights.astype(np.float32),
        "patches": which[:, :-1], "pixels": pixels,
    }  # fmt: skip


def normed(pixels):
    return (pixels.astype(np.float32) / 255 - np.array(MEAN)) / np.array(STD)


def _norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def _layer(x, p):
    h = _norm(x, p["attention_norm"])
    q, k, v = (
        jnp.einsum("bsd,dnhk->nbhsk", h, p["attention"]["qkv"]["w"])
        + p["attention"]["qkv"]["b"][:, None, :, None]
    )
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5, axis=-1)
    out = p["attention"]["out"]
    x = x + jnp.einsum("bhsk,hkd->bsd", weights @ v, out["w"]) + out["b"]
    h = _norm(x, p["mlp_norm"]) @ p["mlp"]["up"]["w"] + p["mlp"]["up"]["b"]
    return x + h / (1 + jnp.exp(-1.702 * h)) @ p["mlp"]["down"]["w"] + p["mlp"]["down"]["b"]


def features(params, pixels, patch):
    """[images, patches, E]: outputs of the last layer that is read"""
    p, images = params["embed"]["vision"], normed(pixels.reshape(-1, *pixels.shape[2:]))
    seen = []
    for top in range(0, images.shape[1], patch):
        for left in range(0, images.shape[2], patch):
            part = images[:, top : top + patch, left : left + patch]
            seen.append(jnp.einsum("bhwc,chwe->be", part, p["patches"]))
    first = jnp.broadcast_to(p["class_token"], seen[0].shape)
    x = _norm(jnp.stack([first, *seen], axis=1) + p["positions"], p["norm"])
    x, _ = jax.lax.scan(lambda x, p: (_layer(x, p), None), x, params["layers"]["vision"])
    return x[:, 1:]


def loss(params, batch, model):
    seen = features(params, batch["pixels"], model.patch_size)
    p = jax.tree.map(lambda a: a[0], params["layers"]["projector"])
    if "linear" in p:
        seen = seen @ p["linear"]["w"]
    else:
        seen = jax.nn.gelu(seen @ p["up"]["w"] + p["up"]["b"], approximate=False)
        seen = seen @ p["down"]["w"] + p["down"]["b"]
    rows, which = len(batch["tokens"]), batch["patches"]
    seen = seen.reshape(rows, -1, seen.shape[-1])
    table = params["embed"]["tokens"]
    x = jnp.stack([
        jnp.where(which[row][:, None] < 0, table[batch["tokens"][row]], seen[row][which[row]])
        for row in range(rows)
    ])  # fmt: skip
    # The combined stream serves as the decoder's embedding table, one row per position.
    ids = np.arange(x[..., 0].size).reshape(x.shape[:2])
    head = {"output": table} | params["head"]
    decoder = {"embed": {"tokens": x.reshape(-1, x.shape[-1])}, "head": head}
    decoder["layers"] = {"block": params["layers"]["block"]}
    frequency = reference_llama.frequencies(model.head_size, model.rotary_base)
    return reference_llama.loss(decoder, batch | {"tokens": ids}, frequency)


@functools.partial(jax.jit, static_argnums=2)
def loss_and_gradients(params, batch, model):
    """(loss, gradients of trained parameters: nested dicts without the leaves that are frozen)"""

    def empty(tree):
        return {key: empty(each) for key, each in tree.items() if isinstance(each, dict)}

    value, found = jax.value_and_grad(loss)(params, batch, model)
    layers = {kind: empty(each) for kind, each in found["layers"].items()}
    layers["projector"] = found["layers"]["projector"]
    if model.projector_only:
        return value, {"embed": empty(found["embed"]), "head": empty(found["head"])} | {
            "layers": layers
        }
    layers["block"] = found["layers"]["block"]
    embed = found["embed"] | {"vision": empty(found["embed"]["vision"])}
    return value, {"embed": embed, "head": found["head"], "layers": layers}
