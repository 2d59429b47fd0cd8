"""A tick whose F and B run side by side, layer by layer (see `weave` for what lies beside what).

    {F and B of one layer each, woven}, layer after layer · last y over pipe, embedding over tensor
    | W · x to the next stage, y over tensor | W · logits, losses, dy · dy over tensor, dx to the
    stage before | W of head and embedding, input of the next F · its first gather, dy over pipe | W

F and B work on different microbatches, and the table (`Schedule.woven`) runs the head a tick before
the B that it feeds, so neither waits for the other. The first gather of a layer's F is started
while the layer before it is computed, that of a tick's first layer in the tick before. What is sent
has the weight gradients of B's last layer beside it, in three parts, or all of W if the table
splits W from B. For what embedding and head send see `woven_ends`. Ticks in which no microbatch is
at the head are a branch of their own, which sends nothing for it.

Legend: B rows · S sequence (s: shard) · C chunks · N layers of a kind in a chunk · R ring slots ·
T ticks · P stages
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mtx.pipeline.carry import Carry, Messages
from mtx.pipeline.model import Stream
from mtx.pipeline.parts import Parts
from mtx.pipeline.slots import read, write
from mtx.pipeline.strands import KindStrands
from mtx.pipeline.ticks import Following, Op, Tick
from mtx.pipeline.transfers import Cargo, Traffic
from mtx.pipeline.trees import where
from mtx.pipeline.turns import Kinds
from mtx.pipeline.woven_ends import WovenEnds
from mtx.pipeline.woven_layers import Kept, Side, WovenLayers
from mtx.schedules.schedule import IDLE, Phase
from mtx.vjp import Arrays

Tree = Any


class Pair(NamedTuple):
    """The chunks of F and B in a tick."""

    chunks: tuple[int, int]  # if each has a branch of its own; otherwise 0
    kinds: tuple[Kinds, Kinds]  # of their layers


class _Sends(NamedTuple):
    """What the layers have given, and what was sent beside them (`WovenEnds.beside_layers`)."""

    x: Stream
    dx: Stream
    entered: Arrays | None
    own: Arrays | None
    left: Stream | None


class WovenRun(WovenEnds):
    """One call of a pipeline whose ticks are woven."""

    def __init__(self, pipeline: Parts, params, *arguments):
        self.traffic = None
        if pipeline.chunk_shards is not None:
            self.traffic = Traffic(pipeline.schedule, params["layers"], pipeline.chunk_shards)
            params = params | {"layers": self.traffic.stacked}
        super().__init__(pipeline, params, *arguments)

    @cached_property
    def sides(self) -> dict[str, KindStrands]:
        """F and B of a layer of each kind."""
        split, in_place = self.schedule.split, self.stage.shards is None
        return {
            kind: KindStrands(vjp=vjp, split=split, in_place=in_place, sends=self.sent_beside)
            for kind, vjp in self.stage.vjps.items()
        }

    def layers(self, forward: Kinds, backward: Kinds, cargo: Cargo | None = None) -> WovenLayers:
        """The layers of chunks of those kinds. A cargo needs all that B has beside it."""
        return WovenLayers(
            stage=self.stage, sides=self.sides, forward=forward, backward=backward,
            split=self.schedule.split, cuts=self.leaves_last and cargo is None,
            beside=cargo is None and not self.schedule.split,
        )  # fmt: skip

    @property
    def first_layer(self) -> Kinds:
        """The kind of all chunks' first layers; () if they differ."""
        kind = self.placement.first_kind
        return () if kind is None else (kind,)

    @property
    def leaves_last(self) -> bool:
        """Whether the weight gradients of B's last layer wait for what a tick sends."""
        return bool(self.first_layer) and not self.schedule.split

    def start(self) -> Carry:
        carry = super().start()
        dx = tuple(self.zeros() for _ in self.schedule.gradient_receives)
        messages = carry.messages._replace(dx=dx, dy=self.zeros(), left=self.zeros())
        with jax.named_scope("embed"):
            items = [jnp.asarray(item) for item in self.schedule.embed[:2]]
            each = [self.entering.over_tensor(self.entering.of_device(i), i) for i in items]
            summed = self.entering.over_pipe(each[0], items[0])
            entered = self.stream_of(self.entering.whole(summed, items[0]))
            messages = messages._replace(begun=each[1])
        rows = super().ticks()
        first = jax.tree.map(lambda a: a[0], Following(rows.forward, rows.receives))
        return carry._replace(messages=self.prepared(messages, first, messages.x, entered))

    def ticks(self) -> Tick:
        """The table with what follows each tick; `embed` has the items of the next two ticks,
        [T, 2], `embed_backward` that of the last one."""
        rows = super().ticks()
        following = Following(rows.forward, rows.receives)
        return rows._replace(
            embed=jnp.stack([self.schedule.enters(1), self.schedule.enters(2)], axis=1),
            embed_backward=jnp.asarray(self.schedule.left(1)),
            following=jax.tree.map(lambda a: jnp.roll(a, -1), following),
        )

    def scan(self, carry: Carry, rows: Tick, phase: Phase) -> Carry:
        traffic = self.traffic
        if traffic is not None and traffic.comes_before(phase):  # what is ahead may need it
            op = jax.tree.map(lambda a: a[0], rows.forward)
            ahead = self.ahead(op, carry.messages.input)
            carry = carry._replace(messages=carry.messages._replace(ahead=ahead))
        window = traffic and traffic.window(phase)
        if traffic is None or window is None:
            return super().scan(carry, rows, phase)
        layers = self.placement.layer.shape[-1]
        if phase.start == window.start:
            moved = traffic.begin(window, layers, carry.gradients.of_layers)
            carry = carry._replace(moved=moved)
        firsts = layers * (np.arange(phase.start, phase.stop, dtype=np.int32) - window.start)

        def tick(carry: Carry, row):
            op, first = row
            return self.tick(carry, op, phase=phase, cargo=traffic.cargo(window, first))

        carry, _ = lax.scan(tick, carry, (rows, jnp.asarray(firsts)))
        if phase.stop == window.stop:
            traffic.end(window, carry.moved)
            carry = carry._replace(moved=None)
        return carry

    def of_layers(self, carry: Carry) -> Tree:
        gradients = carry.gradients.of_layers
        return gradients if self.traffic is None else self.traffic.sums_of(gradients)

    def tick(self, carry: Carry, op: Tick, *, phase: Phase, cargo: Cargo | None = None):
        forward, backward = phase.forward, phase.backward
        messages, weights = carry.messages, self.gather(carry, op, forward, backward)
        returns = self.deliver(messages.gradient_receives, messages.dx, op.gradient_receives)
        entered, own, left = self.beside_layers(messages, op, phase)
        x, dx, kept, last, ahead = self.through_layers(carry, op, phase, weights, returns, cargo)
        # After the layers, what is sent beside them has arrived and nothing sent next has begun.
        # What was ahead of F comes out of the branch again: otherwise XLA would copy it, because a
        # loop in the branch writes over it.
        x, dx, entered, own, left, _ = lax.optimization_barrier((x, dx, entered, own, left, ahead))
        messages = messages._replace(gradient_receives=returns)
        if self.schedule.outputs.slots and forward:
            messages = messages._replace(outputs=write(messages.outputs, x, op.output))
        carry = carry._replace(
            messages=messages, weights=weights,
            stash=carry.stash._replace(layers=kept.rings, deferred=kept.deferred),
            gradients=carry.gradients._replace(of_b=kept.gradients), moved=kept.moved,
        )  # fmt: skip
        sends = _Sends(x=x, dx=dx, entered=entered, own=own, left=left)
        beside = partial(self.last_weights, op=op, waits=last)

        def rest(carry: Carry, *, head: bool) -> Carry:
            return self.behind_layers(carry, op, phase, sends, beside, head=head)

        with_head, without = (partial(rest, head=one) for one in (True, False))
        heads = self.schedule.head[phase.start : phase.stop] != IDLE
        if heads.all() or not heads.any():
            return rest(carry, head=heads.all()), None
        with jax.named_scope("ends"):
            return lax.cond(op.head != IDLE, with_head, without, carry), None

    def through_layers(
        self, carry: Carry, op: Tick, phase: Phase, weights, returns, cargo: Cargo | None
    ):
        """What `WovenLayers.run` returns for the tick's chunks; with a cargo nothing waits."""
        messages = carry.messages

        def compute(pair: Pair, op: Tick, kept: Kept):
            f, b, chunks = None, None, pair.chunks
            if phase.forward:
                ahead = messages.ahead if self.is_early else None
                f = self._side(op.forward, chunks[0], weights[0], messages.input, ahead)
            if phase.backward:
                is_output = self.holds_last & (op.backward.chunk == self.last_chunk)
                taken = self.take(returns, messages.dx, op.gradient_receives)
                d = self.nothing_where_idle(op.backward, where(is_output, messages.dy, taken))
                b = self._side(op.backward, chunks[1], weights[1], d)
            *made, ahead = self.layers(*pair.kinds, cargo).run(f, b, kept, cargo)
            return *made, messages.ahead if f is None else ahead

        pairs, number = self.chunks(op, phase)
        kept = Kept(carry.stash.layers, carry.gradients.of_b, carry.stash.deferred, carry.moved)
        with jax.named_scope("woven"):
            branches = [partial(compute, pair) for pair in pairs]
            y, dx, kept, last, ahead = lax.switch(number, branches, op, kept)
        return y, dx, kept, None if cargo or not phase.backward else last, ahead

    def prepared(self, messages: Messages, op: Following, arrived, entered: Stream) -> Messages:
        """The messages with what has arrived for the next tick's F and later ones, and with what
        that F begins with."""
        rings = self.deliver(messages.receives, arrived, op.receives)
        x = self.input(op.forward, entered, rings, arrived, op.receives)
        ahead = self.ahead(op.forward, x)
        return messages._replace(x=(), receives=rings, input=x, ahead=ahead)

    def ahead(self, op: Op, x: Stream) -> Arrays:
        """What is computed of F's first layer in the tick before."""
        if not self.is_early:
            return ()
        params = self.weights.layers
        if self.traffic is not None:
            params, op = self.traffic.any_of(op.chunk), op._replace(held=jnp.zeros((), jnp.int32))
        layers = self.layers(self.first_layer, self.first_layer)
        return layers.ahead(Side(op, params, op.held, x))

    @property
    def is_early(self) -> bool:
        """Whether the parameters of the next tick's F are there already, and something lies beside
        what is gathered for it."""
        return self.weights.shards is None and self.leaves_last

    @property
    def x_beside_head(self) -> bool:
        """Whether the head's matmuls, if a tick has any, lie beside the send of x."""
        return self.leaves_last and self.sides[self.first_layer[0]].division.x_beside_head

    def behind_layers(
        self, carry: Carry, op: Tick, phase: Phase, sends: _Sends, beside: Callable, *, head: bool
    ) -> Carry:
        """The carry after what is sent once the layers are done, and what that is for: the input of
        the next F, the loss of the microbatch at the head if there is one, the embedding and its
        gradient. beside: `last_weights`."""
        x, dx, entered, own, left = sends
        messages, arrived, sent, given = carry.messages, self.no_arrivals(), (), ()
        y: Any = ()
        if head:
            y = read(messages.outputs, op.head_input) if self.schedule.outputs.slots else x
            with jax.named_scope("broadcast"):
                y = self.last_output(y)
        first = (y, x) if head else ()  # x is sent after y
        ends = (first, *self.beside_weights(messages.begun, own, left, op))
        (first, begun, gathered), carry = beside(ends, carry, part=0)
        y, x = first or (y, x)
        carry = carry._replace(messages=carry.messages._replace(begun=begun))
        if phase.forward:
            with jax.named_scope("send_x"):
                arrived = self.send(x, self.schedule.receives)
        if head:
            given = self.head_begins(y, op.head)
        longer = head and self.x_beside_head
        with_head, arrived = (arrived, ()) if longer else ((), arrived)
        (arrived, given), carry = beside((arrived, given), carry, part=1)
        if phase.weight and op.weight is not None:
            carry = self.weight_half(carry, op.weight, op.scatter[1])
        if head:
            carry, given = self.losses(carry, given, op.embed_backward, (left, gathered))
            given, (dx, with_head) = self.own_of_head(given, (dx, with_head))
        arrived = arrived or with_head
        if phase.backward:
            with jax.named_scope("send_dx"):
                sent = self.send(dx, self.schedule.gradient_receives)
        if self.schedule.forward.busy[phase.start + 1 :].any() and op.following:
            whole = self.entered(entered, op.embed[0])
            messages = self.prepared(carry.messages, op.following, arrived, whole)
            carry = carry._replace(messages=messages)
        if not (head and self.embedding_beside_losses):
            carry = self.with_embedding(carry, op.embed_backward, left, gathered)
        if head:
            carry, given, sent = self.through_head(carry, op.head, given, sent)
        ends = carry.messages.ahead, sent, given
        (ahead, sent, given), carry = beside(ends, carry, part=2)
        carry = carry._replace(messages=carry.messages._replace(ahead=ahead))
        if phase.backward:
            with jax.named_scope("B"):
                of_b, reduced = self.weights.reduce_scatter(
                    carry.gradients.of_b, carry.gradients.reduced, op.scatter[0], op.backward.chunk
                )
            gradients = carry.gradients._replace(of_b=of_b, reduced=reduced)
            messages = carry.messages._replace(dx=sent, left=dx)
            carry = carry._replace(gradients=gradients, messages=messages)
        return self.behind_head(carry, given) if head else carry

    def chunks(self, op: Tick, phase: Phase) -> tuple[list[Pair], jax.Array]:
        """(the pairs of chunks that F and B have in a phase, the place of this tick's, int32 []).
        Only one pair if the program needs no branch for each."""
        wanted = np.array([phase.forward, phase.backward])
        table = np.stack([half.chunk for half in self.schedule.halves[:2]], axis=-1) * wanted
        kinds, apart = self.placement.chunk_kinds, int(self.in_branches)
        places = np.zeros((self.schedule.stages, *(self.schedule.virtual,) * 2), np.int32)
        found: dict[Pair, int] = {}
        for stage, pairs in enumerate(table[phase.start : phase.stop].swapaxes(0, 1)):
            for f, b in np.unique(pairs, axis=0):
                pair = Pair((int(f) * apart, int(b) * apart), (kinds[stage][f], kinds[stage][b]))
                places[stage, f, b] = found.setdefault(pair, len(found))
        now = op.forward.chunk * phase.forward, op.backward.chunk * phase.backward
        return list(found), read(jnp.asarray(places), self.index, *now)

    def gather(self, carry: Carry, op: Tick, forward: bool, backward: bool) -> tuple:
        """The parameters of F's chunk and of B's."""
        f, b = carry.weights
        if forward:
            with jax.named_scope("F"):
                f = self.weights.all_gather(f, op.gather, op.forward.chunk)
        if backward:
            with jax.named_scope("B"):
                b = self.weights.all_gather(b, op.gather_back, op.backward.chunk)
        return f, b

    def last_weights(
        self, beside: Tree, carry: Carry, *, op: Tick, waits: Arrays | None, part: int
    ) -> tuple[Tree, Carry]:
        """(`beside`, carry), with a part of the weight gradients of the last layer of this tick's
        B, if W is not split. They are computed before anything else is done with `beside`. waits:
        None without a B, and with a cargo, which has all of them beside it."""
        of_b = carry.gradients.of_b
        made, behind = of_b, self.in_branches or (part and self.stage.shards is not None)
        if waits:
            kind = self.first_layer[0]
            layers = self.layers(self.first_layer, self.first_layer)
            shares, _ = layers.division.part(part)
            leaves, structure = jax.tree.flatten(of_b[kind])
            made = [leaves[share.leaf] for share in shares]
            apart = self.axes.in_place and self.stage.shards is None and layers.has_plain_weights
            behind = behind or apart
            with jax.named_scope("W"):
                run = partial(layers.last_weights, part=part)
                if apart and not self.in_branches:  # in a branch that idle stages do not take
                    idle = lambda op, waits, made: made  # noqa: E731
                    made = lax.cond(op.backward.busy, run, idle, op.backward, waits, made)
                elif layers.has_plain_weights or not self.in_branches:
                    made = self.by_chunk(run)(op.backward, waits, made)
                else:  # no loops in a branch: XLA puts no send beside it, nor counts them as cover
                    begun, finish = layers.weights_with_loops(waits, part=part)
                    beside, begun = lax.optimization_barrier((beside, begun))
                    added = lambda op, more, made: layers.added(made, more, op, shares)  # noqa: E731
                    made, behind = self.by_chunk(added)(op.backward, finish(begun), made), False
        # Nothing may come right after gradients that matmuls add in place, but it may come after
        # their branch.
        if waits is not None and behind:
            beside, made = lax.optimization_barrier((beside, made))
        if waits:
            for share, value in zip(shares, made, strict=True):
                leaves[share.leaf] = value
            made = of_b | {kind: structure.unflatten(leaves)}
        return beside, carry._replace(gradients=carry.gradients._replace(of_b=made))

    @property
    def in_branches(self) -> bool:
        return self.traffic is not None or super().in_branches

    def _side(self, op: Op, chunk: int, gathered: Tree, stream: Tree, ahead=None) -> Side:
        op = op._replace(held=chunk) if self.in_branches else op
        if self.traffic is not None:
            return Side(op, self.traffic.of(chunk), 0, stream, ahead)
        return Side(op, self.weights.gathered(gathered), op.held, stream, ahead)
