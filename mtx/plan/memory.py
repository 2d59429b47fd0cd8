"""Memory of one device: what the planner predicts before anything is compiled.

Every device holds the same buffers, since all stages run one program; stages that need fewer still
have them. Memory is counted at the moment that needs the most: the backward pass of one layer, or
the head, while gradients and stash are held. Not counted: the runtime's context, communication
buffers, library workspaces and fragmentation, so leave a tenth of the device free.

What a layer keeps is read off its trace (`mtx.costs.cost`), and how many layers' residuals are kept
off the schedule. `experiments/memory_grid.py` prints how close all this comes to what XLA assigns.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from mtx.config import Layout, ModelConfig, OptimizerConfig, Recompute
from mtx.costs.ask import layer_cost, pattern_of, shared_cost
from mtx.costs.cost import HEAD, ITEM_BYTES, Cost, ExpertShards, module_of, total
from mtx.layers.kernels import head_positions
from mtx.optimizers import optimizer_module
from mtx.plan import moments
from mtx.plan.attention import Backend, kernel_of
from mtx.plan.choose import context_attention, schedule_for, with_zero, zero_unit
from mtx.plan.held import Held, elements_held, parameters_held, parameters_of, places, twice_held
from mtx.plan.slots import slots_of

Zero = Literal[0, 1, 3]  # a layout may have 1 or 3


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device, by what they are for. Predicted."""

    parameters_bytes: int  # in the compute type, gathered at the start of the step
    gradients_bytes: int  # float32, accumulated over the microbatches
    optimizer_bytes: int  # float32 masters and the optimizer's state, for AdamW two moments
    stash_bytes: int  # what waits between F, B and W: ring slots x (residuals or chunk inputs)
    transfer_bytes: int  # x and dx between stages, and what waits for its tick
    activations_bytes: int  # of the layer, or chunk, whose backward pass is running
    logits_bytes: int  # what the head needs beyond that: it runs when no layer does

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def predict_memory(
    model: ModelConfig,
    layout: Layout,
    global_batch: int,
    *,
    backend: Backend = "cuda",
    zero: Zero | None = None,
    optimizer: OptimizerConfig | None = None,
) -> Memory:
    """The memory of one training step. UserError if the batch or the layers do not divide.

    zero: what is sharded over `data` (Rajbhandari et al. 2020), by default the layout's. 1:
    masters and moments; 3: gradients and parameters as well, gathered a chunk or a layer at a time;
    0, which this program does not run: nothing. optimizer: by default AdamW.
    """
    zero, microbatches = layout.zero if zero is None else zero, layout.microbatches(global_batch)
    slots = slots_of(layout, microbatches)
    device = _Device(model, layout, backend)
    held, trained = (parameters_held(model, layout, trained=which) for which in (False, True))
    by_layer = zero == 3 and zero_unit(layout, model, global_batch) == "layer"
    working, head = device.working_bytes(by_layer=by_layer), device.head_bytes()
    offload = layout.offload_fraction
    stash = slots.stash * (device.stash_slot_bytes() - device.offloaded_slot_bytes(offload))
    stash += slots.caches * device.cache_bytes()
    waiting = slots.weight_stash * device.deferred_bytes()
    if _copies(layout, microbatches):
        layers = 4 * trained.layers
        forward = stash if layout.stash == "residuals" else 0
        working = max(working + (waiting or layers), forward, layers)
    parameters, gradients, gathered = _weights_bytes(model, layout, held, trained, zero)
    if not by_layer:
        parameters, gradients = parameters + gathered[0], gradients + gathered[1]
    if with_zero(layout, zero).by_windows(model):  # a chunk's, again, once its parameters are read
        gradients += max(0, 4 - ITEM_BYTES[model.compute_dtype]) * held.chunk
    gradients += 4 * twice_held(model, layout) if zero < 3 else 0
    if layout.pipe == layout.virtual == microbatches * layout.slices == 1:
        if layout.stash == "residuals" and not waiting:
            of_layers = 4 * (trained.layers_shard if zero == 3 else trained.layers)
            gradients -= device.never_together_bytes(of_layers)
        if zero == 3:
            shared, of_head, sums = _unused_by_layers(model, layout)
            parameters, head = parameters - shared, head + of_head
            gradients -= min(sums, stash + working)  # made once the stash is gone
    return Memory(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=_optimizer_bytes(trained, optimizer, sharded=zero != 0),
        stash_bytes=stash + waiting,
        transfer_bytes=(2 + (layout.weave == "on") + slots.rings) * device.stream_bytes(),
        activations_bytes=working + device.underway_bytes(offload),
        logits_bytes=max(0, head - working),
    )


def weights_bytes(
    model: ModelConfig, layout: Layout, zero: Zero, *, optimizer: OptimizerConfig | None = None
) -> int:
    """The least that parameters, gradients, masters and moments take; no layer is traced for it.
    optimizer: by default AdamW."""
    held, trained = (parameters_held(model, layout, trained=which) for which in (False, True))
    parameters, gradients, _ = _weights_bytes(model, layout, held, trained, zero)
    if zero == 3 and layout.pipe == layout.virtual == 1:  # with one microbatch
        shared, _, sums = _unused_by_layers(model, layout)
        parameters, gradients = parameters - shared, gradients - sums
    return parameters + gradients + _optimizer_bytes(trained, optimizer, sharded=zero != 0)


def predict_host_bytes(
    model: ModelConfig, layout: Layout, global_batch: int, *, backend: Backend = "cuda"
) -> int:
    """Bytes of one device's residuals that wait in the host's memory; twice as many if conditionals
    copy."""
    microbatches = layout.microbatches(global_batch)
    slots = slots_of(layout, microbatches).stash * (1 + _copies(layout, microbatches))
    device = _Device(model, layout, backend)
    return slots * device.offloaded_slot_bytes(layout.offload_fraction)


def offloaded_layers(
    model: ModelConfig, layout: Layout, *, backend: Backend = "cuda"
) -> dict[str, tuple[int, int]]:
    """{kind: (layers of a chunk, bytes of one that go to the host)}"""
    return _Device(model, layout, backend).offloaded_layers(layout.offload_fraction)


def stash_slot_bytes(model: ModelConfig, layout: Layout, *, backend: Backend = "cuda") -> int:
    """Bytes that a chunk keeps of one microbatch from F to B, wherever they wait."""
    return _Device(model, layout, backend).stash_slot_bytes()


def conditionals_copy() -> bool:
    """Whether the compiler of the installed JAX keeps a second copy of what a conditional changes.

    With idle="skip", F, B and W are inside conditionals that change rings and gradients. XLA:GPU of
    jax 0.10 copies these for the duration of the op; that of jax 0.12 changes them in place.
    """
    return importlib.metadata.version("jax").startswith("0.10.")


def _copies(layout: Layout, microbatches: int) -> bool:
    """Whether there are such conditionals; an op that is never idle is inside none."""
    if layout.idle != "skip" or not conditionals_copy():
        return False
    alone = layout.pipe == layout.virtual == 1
    return not (alone and all(h.busy.all() for h in schedule_for(layout, microbatches).halves))


# -- parameters ------------------------------------------------------------------------------------


def _weights_bytes(
    model: ModelConfig, layout: Layout, held: Held, trained: Held, zero: Zero
) -> tuple[int, int, tuple[int, int]]:
    """(parameters in the compute type, gradients in float32, the same two for the chunks that
    zero=3 gathers in addition if it gathers by chunk). Frozen parameters have no other master than
    these."""
    item = ITEM_BYTES[model.compute_dtype]
    if zero == 3:
        of_shared, of_trained = (n.total - n.layers for n in (held, trained))
        shard = trained.layers_shard
        # The chunk whose F runs and the one whose B runs are gathered; one chunk's gradients are
        # not yet scattered. Masters in the compute type are the shards themselves.
        parameters = item * of_shared + (0 if item == 4 else item * shard)
        parameters += item * (held.shard - trained.shard)
        gradients = 4 * (of_trained + shard + held.states)
        return parameters, gradients, (2 * item * held.chunk, 4 * trained.chunk)
    # Masters that are neither sharded nor of another type are the parameters themselves.
    same = item == 4 and (layout.token_shards == 1 or zero == 0)
    gradients = 4 * (trained.total + held.states)
    return item * (held.total - same * trained.total), gradients, (0, 0)


def _unused_by_layers(model: ModelConfig, layout: Layout) -> tuple[int, int, int]:
    """If layers run once each way: (bytes of the embedding's and the head's parameters, which
    zero=3 does not hold meanwhile; of the head's alone; of the embedding's gradients, which are
    made later)."""
    item, shared = ITEM_BYTES[model.compute_dtype], parameters_of(model, layout).shared
    sizes = [(each, elements_held(each, model, layout)) for each in shared]
    every = sum(n for _, n in sizes)
    of_head = sum(n for each, n in sizes if module_of(each.path) == "head")
    if 2 * of_head < every:  # its matrix is the embedding's
        return item * every, item * every, 0
    sums = 4 * sum(n for each, n in sizes if module_of(each.path) != "head" and each.trained)
    return item * every, item * of_head, sums


def _optimizer_bytes(held: Held, optimizer: OptimizerConfig | None, *, sharded: bool) -> int:
    """Bytes of masters and of the optimizer's other arrays. sharded: over the replicas."""
    optimizer = optimizer or OptimizerConfig()
    states, of_rest = (
        optimizer_module(name).STATES for name in (optimizer.name, optimizer.rest or optimizer.name)
    )
    total, matrices = held.total, held.matrices
    if sharded:
        total, matrices = held.shard, held.matrices_shard
    of_states = (1 + of_rest) * held.states
    return 4 * (total + states * matrices + of_rest * (total - matrices) + of_states)


# -- activations -----------------------------------------------------------------------------------


def layer_residual_bytes(
    model: ModelConfig, layout: Layout, *, recompute: Recompute, backend: Backend = "cuda",
    kind: str | None = None,
) -> int:  # fmt: skip
    """Bytes that a layer of that kind, or the first one, keeps of one microbatch, or slice of one,
    for B.

    If nothing is recomputed, about what Korthikanti et al. 2022 (arXiv 2205.05198, section 4)
    count: s b h (10 + 24/t) bytes in 16 bits with dropout, all of it over t with sequence
    parallelism. With "selective" the matmuls' outputs; with "full" the layer's input.
    """
    device = _Device(model, layout, backend)
    return total(device.cost(kind or pattern_of(model)[0], recompute).kept, layout.microbatch)


@dataclass(frozen=True)
class _Device:
    """What the layers of one device need, for one microbatch or slice of one."""

    model: ModelConfig
    layout: Layout
    backend: Backend

    @property
    def places(self) -> Mapping[str, int]:
        return places(self.model, self.layout)

    @property
    def parameters(self) -> Held:
        return parameters_held(self.model, self.layout)

    def cost(self, kind: str, recompute: Recompute | None = None) -> Cost:
        model, layout = self.model, self.layout
        return layer_cost(
            model, kind=kind, tensor=layout.tensor, sequence_parallel=layout.sequence_parallel,
            recompute=recompute or layout.recompute, slices=layout.slices, context=layout.context,
            kernel=kernel_of(model, self.backend, layout.slices),
            context_attention=context_attention(layout, model),
            experts=ExpertShards.of(layout, model),
        )  # fmt: skip

    def _of_chunk(self, field: str, recompute: Recompute | None = None) -> int:
        """Bytes in one field of a cost, over all layers of a chunk."""
        rows = self.layout.microbatch
        return sum(
            places * total(getattr(self.cost(kind, recompute), field), rows)
            for kind, places in self.places.items()
        )

    def stash_slot_bytes(self) -> int:
        """Bytes kept from F to B: the residuals of each layer, or the chunk's input."""
        return self.stream_bytes() if self.layout.stash == "inputs" else self._of_chunk("kept")

    def never_together_bytes(self, gradients: int) -> int:
        """If layers run once each way: bytes of stash and gradients that are never held at the same
        time. A kind's gradients may be made when the stash of other kinds is no longer needed, as
        T5's encoder's are after its decoder's B. The layers of a kind share one array: one of
        gradients from their last layer's B on, one of the stash until their first layer's B."""
        model, layout, pattern = self.model, self.layout, pattern_of(self.model)
        sizes = {
            kind: places * sum(
                elements_held(each, model, layout)
                for each in parameters_of(model, layout).layers[kind]
                if each.trained and each.role != "state"
            )
            for kind, places in self.places.items()
        }  # fmt: skip
        made = {
            kind: gradients * size // max(1, sum(sizes.values())) for kind, size in sizes.items()
        }
        away = self.offloaded_layers(layout.offload_fraction)
        kept = {
            kind: places * (total(self.cost(kind).kept, layout.microbatch) - away[kind][1])
            for kind, places in self.places.items()
        }
        ends = {kind: len(pattern) - pattern[::-1].index(kind) for kind in sizes}
        most = max(
            sum(kept[kind] for kind in sizes if pattern.index(kind) <= layer)
            + sum(made[kind] for kind in sizes if ends[kind] > layer)
            for layer in range(len(pattern))
        )
        return sum(kept.values()) + sum(made.values()) - most

    def offloaded_slot_bytes(self, fraction: float) -> int:
        """Bytes of the residuals of a chunk's layers that go to the host's memory."""
        return sum(places * each for places, each in self.offloaded_layers(fraction).values())

    def offloaded_layers(self, fraction: float) -> dict[str, tuple[int, int]]:
        """{kind: (layers of a chunk, bytes of one that go to the host)}"""
        rows = self.layout.microbatch
        return {
            kind: (places, self.cost(kind).on_host(fraction, rows)[0])
            for kind, places in self.places.items()
        }

    def underway_bytes(self, fraction: float) -> int:
        """Bytes on the device for copies under way. For one layer of each kind: what F has not yet
        copied to the host, what has come back for the next B, and what a layer leaves or fetches
        meanwhile; the array that is put together again; and a whole sequence, which is gathered
        earlier if XLA's scheduler hides copies."""
        if not fraction:
            return 0
        layout, kind = self.layout, next(iter(self.places))
        shards = layout.tensor if layout.sequence_parallel else 1
        rows = layout.microbatch
        whole = shards * total(self.cost(kind).stream, rows) * (shards > 1)
        joined = max(self.cost(kind).on_host(fraction, rows)[1] for kind in self.places)
        layers = sum(layer for _, layer in self.offloaded_layers(fraction).values())
        return whole + joined + 3 * layers

    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one microbatch, all slices together, or of their
        gradients."""
        return self._of_chunk("cache")

    def deferred_bytes(self) -> int:
        """Bytes kept from B to W."""
        return self._of_chunk("deferred")

    def stream_bytes(self) -> int:
        """Bytes passed from one layer to the next, and from stage to stage."""
        kind = next(iter(self.places))
        return total(self.cost(kind).stream, self.layout.microbatch)

    def working_bytes(self, *, by_layer: bool = False) -> int:
        """Bytes that the backward pass of the layer that needs the most takes at its peak.

        One such moment is that of the weights: the gradient of the largest matrix, in the compute
        type and in float32 (in float32 those of all matrices if the chunk is that one layer:
        without a loop XLA adds them up last), or, by_layer, all that zero=3 gathers and scatters of
        the layer; what is recomputed (with stash="inputs", of the whole chunk); four arrays of
        whole sequences, which are gathered or about to be scattered; and scores with their
        gradients, two in float32 and one in the compute type, unless a kernel keeps them to itself.
        A woven tick has as many whole sequences of F's layer, and what waits for the weight
        gradients of B's last layer. The other moments are in `mtx.plan.moments`.
        """
        layout, item, largest = self.layout, ITEM_BYTES[self.model.compute_dtype], 0
        rows, shards = layout.microbatch, layout.tensor if layout.sequence_parallel else 1
        for kind in self.places:
            cost = self.cost(kind)
            whole = shards * total(cost.stream, rows)
            working = self._weights_bytes(kind, by_layer) + 4 * whole
            working += (2 * 4 + item) * cost.scores.at(rows)
            if layout.weave == "on":
                working += 4 * whole + total(cost.deferred, rows)
            every, kept = (total(self.cost(kind, way).kept, rows) for way in ("none", None))
            again = every - kept
            others = (
                moments.of_mlp(cost, rows, again, item),
                moments.of_attention(cost, rows, layout.context, item),
            )
            largest = max(largest, working + again, *others)
        return largest + (self._of_chunk("kept") if layout.stash == "inputs" else 0)

    def _weights_bytes(self, kind: str, by_layer: bool) -> int:
        """Bytes of a layer's matrices and their gradients that are not held all the time."""
        model, layout, item = self.model, self.layout, ITEM_BYTES[self.model.compute_dtype]
        own = [
            (each, elements_held(each, model, layout))
            for each in parameters_of(model, layout).layers[kind]
        ]
        matrices = [n for each, n in own if each.is_matrix and each.trained] or [0]
        if by_layer:
            sets = 2 if layout.weave == "on" else 1  # F's layer and B's
            gathered = sum((sets * item + 4 * each.trained) * n for each, n in own)
            return gathered + item * max(matrices)
        alone = sum(self.places.values()) == 1
        return item * max(matrices) + 4 * (sum if alone else max)(matrices)

    def head_bytes(self) -> int:
        """Bytes of logits in float32 and of their gradient in the compute type, this device's part
        of both, for as many positions as the head takes at once."""
        model, layout = self.model, self.layout
        head = shared_cost(
            model, HEAD, tensor=layout.tensor, sequence_parallel=layout.sequence_parallel,
            context=layout.context,
        )  # fmt: skip
        vocab = model.padded_vocab(layout.vocab_shards) // layout.vocab_shards
        logits = sum(
            each.m.at(layout.microbatch) * each.n.at(1, vocab)
            for each in head.matmuls
            if each.during == "F" and each.n.vocab
        )
        shards = layout.tensor if layout.sequence_parallel else 1
        positions = model.sequence // (layout.slices * layout.context) // shards
        at_once = head_positions(layout.microbatch * shards, positions, vocab)
        item = ITEM_BYTES[model.compute_dtype]
        return (4 + item) * logits // layout.slices * at_once // positions
