"""A vision transformer (Dosovitskiy et al. 2021), as in CLIP (Radford et al. 2021), and the
projector that puts its output among a decoder's tokens (LLaVA: Liu et al. 2023a, 2023b).

Its layers update their own leaf of the stream, before the decoder's first layer, so it runs on the
first stages. It is never trained: it has no gradient, and its layers keep nothing for a backward
pass. The projector is a separate layer after them: it maps images to the decoder's size and puts
them in the places of the tokens that stand for them.

In a batch: pixels uint8 [B, I, height, width, 3]; patches int32 [B, S], which of the row's I * N
patches is at a position, or -1 for a token. Without pixels there is only text.

If `tensor` splits activations over the sequence, an image's positions are padded to a multiple of
it, with positions that no other one sees.

Legend: B rows · I images of a row · N patches of an image · P its positions: a class token, the
patches, and the padding (p: shard) · E size of the vision transformer · D hidden of the decoder ·
S the decoder's sequence (s: shard) · h, w pixels of a patch's side
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from mtx.layers.context import Context
from mtx.layers.embedding import Embedding, EmbeddingModule
from mtx.layers.head import Fields, NextToken
from mtx.layers.layer import Kind, Layer, Stream
from mtx.layers.mlp import activate
from mtx.layers.norm import Norm
from mtx.layers.sublayer import Build, Keep
from mtx.sharding.collectives import gather_sequence, shard_of_sequence
from mtx.sharding.linear import ColumnLinear, RowLinear, WholeLinear
from mtx.sharding.mesh import Axes
from mtx.sharding.parameter import parameter
from mtx.sharding.random import normal

IMAGE = "image"  # the leaf of the stream: [B, p, I, E]
# For red, green and blue in [0, 1], as CLIP's processor norms them.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
Projection = Literal["mlp", "linear"]
Tree = Any


@dataclass(frozen=True, kw_only=True)
class Images:
    """What images a model reads, and in which patches."""

    count: int  # I, of a row
    side: int  # pixels, of the square image
    patch: int  # pixels, of a patch's side
    size: int  # E

    @property
    def patches(self) -> int:
        """N"""
        return (self.side // self.patch) ** 2

    def positions(self, axes: Axes) -> int:
        """P"""
        shards = axes.tensor_shards if axes.sequence_parallel else 1
        return -(-(self.patches + 1) // shards) * shards

    def fields(self, rows: int, sequence: int) -> Fields:
        """The fields of a batch that are about images."""
        pixels = rows, self.count, self.side, self.side, 3
        return {
            "pixels": jax.ShapeDtypeStruct(pixels, jnp.uint8),
            "patches": jax.ShapeDtypeStruct((rows, sequence), jnp.int32),
        }


# -- the vision transformer ------------------------------------------------------------------------


class VisionEmbedding(nnx.Module):
    """patches [3, h, w, E], a convolution whose patches do not overlap, class_token [E], positions
    [N + 1, E] and the norm before the first layer; last_norm, which a decoder does not read."""

    def __init__(self, images: Images, norm: Norm, build: Build, rngs: nnx.Rngs):
        def values(sizes: dict[str, int]):
            drawn = build.init_std * normal(rngs.params, tuple(sizes.values()))
            spec = P(*(None for _ in sizes))
            return parameter(drawn, spec=spec, role="embedding", dims=tuple(sizes))

        self.images, self.axes, self.dtype = images, build.axes, build.dtype
        patch, hidden = images.patch, {"hidden": images.size}
        self.patches = values({"colours": 3, "patch rows": patch, "patch columns": patch} | hidden)
        self.class_token = values(hidden)
        self.positions = values({"positions": images.patches + 1} | hidden)
        self.norm, self.last_norm = norm.module(images.size), norm.module(images.size)

    def __call__(self, pixels):
        """[B, p, I, E] of uint8 [B, I, height, width, 3]"""
        places = jnp.arange(self.images.positions(self.axes))[None]
        split = self.axes.tensor if self.axes.sequence_parallel else None
        places_p11 = shard_of_sequence(places, split)[0, :, None, None]
        patches_BpIk = shard_of_sequence(self._patches(pixels), split)
        x_BpIE = patches_BpIk @ self.patches[...].reshape(-1, self.images.size)
        last = self.images.patches
        x_BpIE += jnp.where(places_p11 == 0, self.class_token[...], 0)
        x_BpIE += self.positions[...][jnp.minimum(places_p11[:, :, 0], last)]
        return jnp.where(places_p11 <= last, self.norm(x_BpIE), 0)

    def _patches(self, pixels):
        """The normed pixels of each place, [B, P, I, 3 h w]; 0 at places other than patches."""
        images, (rows, count) = self.images, pixels.shape[:2]
        across = images.side // images.patch
        cut = normed_pixels(pixels).reshape(
            rows, count, across, images.patch, across, images.patch, 3
        )
        cut = jnp.transpose(cut, (0, 2, 4, 1, 6, 3, 5)).reshape(rows, images.patches, count, -1)
        behind = images.positions(self.axes) - images.patches - 1
        filled = jnp.pad(cut, ((0, 0), (1, behind), (0, 0), (0, 0)))
        return filled.astype(self.dtype)


def normed_pixels(pixels):
    """float32 of uint8 [..., 3], as CLIP's processor norms them."""
    return (pixels.astype(jnp.float32) / 255 - jnp.array(MEAN)) / jnp.array(STD)


@dataclass(frozen=True, kw_only=True)
class VisionKind(Kind):
    """A layer of the vision transformer, whose sublayers may look at other positions."""

    images: Images

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return VisionLayer(self, self._own(build), rngs)

    def _own(self, build: Build) -> Build:
        """The build without adapters, and whole on each device of `context`."""
        axes = replace(build.axes, context=None, context_shards=1)
        return replace(build, hidden=self.images.size, axes=axes, adapters=None)

    def empty_past(self, build: Build, rows: int, length: int) -> Tree:
        return {}


class VisionLayer(Layer):
    """A `Layer` for images."""

    kind: VisionKind

    def __call__(self, stream: Stream, context: Context | None = None, cache: Tree = None):
        if IMAGE not in stream:
            return stream
        x_BpIE = lax.stop_gradient(stream[IMAGE])
        rows, positions, count, size = x_BpIE.shape
        # Each image is a row of its own.
        x_GpE = jnp.swapaxes(x_BpIE, 1, 2).reshape(-1, positions, size)
        own = self._context(len(x_GpE))
        x_GpE = self._applied({"x": x_GpE}, own, lambda name, module, h: module(h, own))["x"]
        x_BIpE = x_GpE.reshape(rows, count, positions, size)
        return stream | {IMAGE: jnp.swapaxes(x_BIpE, 1, 2)}

    def of_text(self, stream: Stream, context: Context | None, keep: Keep) -> Stream:
        """The first pass has the images; later ones do not, and change nothing."""
        return self(stream, context)

    def _context(self, rows: int) -> Context | None:
        """A context that hides the positions after the patches from all others; None if there are
        none."""
        places, last = np.arange(self.kind.images.positions(self.axes)), self.kind.images.patches
        if places[-1] == last:
            return None
        segments = jnp.broadcast_to((places > last).astype(np.int32), (rows, len(places)))
        nothing = jnp.zeros((), jnp.int32)
        return Context(nothing, None, None, nothing, segments, None)


@dataclass(frozen=True, kw_only=True)
class UnreadKind(VisionKind):
    """A layer after the one whose output is read: it is kept, as part of the model that it came
    with, and computes nothing."""

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return UnreadLayer(self, self._own(build), rngs)


class UnreadLayer(VisionLayer):
    """A `VisionLayer` that is not applied."""

    def __call__(self, stream: Stream, context: Context | None = None, cache: Tree = None):
        return stream


# -- into the decoder ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProjectorKind(Kind):
    """A layer that puts images into the decoder's sequence. mlp: two linears around a GELU."""

    images: Images
    projection: Projection = "mlp"

    def module(self, build: Build, rngs: nnx.Rngs) -> nnx.Module:
        return Projector(self, build, rngs)

    def empty_past(self, build: Build, rows: int, length: int) -> Tree:
        return {}


class Projector(nnx.Module):
    """up: w [E, D], b [D], and down: w [D, D], b [D]; or linear: w [E, D]"""

    def __init__(self, kind: ProjectorKind, build: Build, rngs: nnx.Rngs):
        self.kind, self.axes = kind, build.axes
        sizes, common = (kind.images.size, build.hidden), {"axes": build.axes, "rngs": rngs}
        if kind.projection == "linear":
            dims = "image", "hidden"
            self.linear = WholeLinear(*sizes, std=build.init_std, dims=dims, **common)
            return
        self.up = ColumnLinear(
            sizes[0], sizes[1:], split=0, std=build.init_std, dims=("image", "columns"), **common
        )
        self.down = RowLinear(
            sizes[1:], sizes[1], std=build.init_std, dims=("rows", "hidden"), **common
        )

    def __call__(self, stream: Stream, context: Context | None = None, cache: Tree = None):
        if IMAGE not in stream:
            return stream
        assert context is not None and context.patches_BS is not None, "pixels without patches"
        split = self.axes.tensor if self.axes.sequence_parallel else None
        patches_Bs1 = shard_of_sequence(context.patches_BS, split)[..., None]
        features_BND = self._features(lax.stop_gradient(stream[IMAGE]), split)
        seen_BsD = jnp.take_along_axis(features_BND, jnp.maximum(patches_Bs1, 0), axis=1)
        return stream | {"x": jnp.where(patches_Bs1 < 0, stream["x"], seen_BsD)}

    def of_text(self, stream: Stream, context: Context | None, keep: Keep) -> Stream:
        """As `VisionLayer.of_text`."""
        return self(stream, context)

    def _features(self, x_BpIE, split: str | None):
        """[B, I N, D]: features of the row's patches, on every device"""
        rows, positions, count, size = x_BpIE.shape
        x_GpE = jnp.swapaxes(x_BpIE, 1, 2).reshape(-1, positions, size)
        if self.kind.projection == "linear":
            y_GpD = self.linear(x_GpE)
        else:
            y_GpD = self.down(activate(self.up(x_GpE), "gelu"))
        y_GPD = gather_sequence(y_GpD, split)[:, 1 : self.kind.images.patches + 1]
        return y_GPD.reshape(rows, -1, y_GPD.shape[-1])


@dataclass(frozen=True, kw_only=True)
class ImageEmbedding(Embedding):
    """The config of an embedding of tokens and of images."""

    images: Images
    vision_norm: Norm

    def module(self, build: Build, rows: int, rngs: nnx.Rngs) -> nnx.Module:
        return ImageEmbeddingModule(self, build, rows, rngs)


class ImageEmbeddingModule(EmbeddingModule):
    """As `EmbeddingModule`, and vision"""

    def __init__(self, config: ImageEmbedding, build: Build, rows: int, rngs: nnx.Rngs):
        super().__init__(config, build, rows, rngs)
        self.vision = VisionEmbedding(config.images, config.vision_norm, build, rngs)

    def leaves(self, batch, context: Context | None = None) -> Stream:
        """The stream's leaves besides the decoder's x."""
        if "pixels" not in batch:
            return {}
        return {IMAGE: lax.stop_gradient(self.vision(batch["pixels"]))}


@dataclass(frozen=True, kw_only=True)
class NextTokenOfImages(NextToken):
    """The config of a head whose batches have images."""

    images: Images

    def batch_fields(self, rows: int, sequence: int) -> Fields:
        return super().batch_fields(rows, sequence) | self.images.fields(rows, sequence)
