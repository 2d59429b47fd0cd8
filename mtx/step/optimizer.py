"""The optimizer of each role, its learning rates, its state by name, and float16's loss scale."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey, GetAttrKey

from mtx.config import OptimizerConfig
from mtx.errors import UserError
from mtx.optimizers import optimizer_module
from mtx.sharding.parameter import DECAYED, MATRICES
from mtx.strand import opened

Tree = Any
Path = tuple[Any, ...]  # of a leaf, as in jax.tree_util
_PARTS = "embed", "head", "layers"  # the top-level keys of the parameters


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """step, counted from 0 -> rate: a linear warm-up from lr / warmup_steps in step 0 to lr in step
    warmup_steps - 1, then the decay from lr in step warmup_steps to `min_lr` in step `decay_steps`.

    After the warm-up this is Megatron-LM's OptimizerParamScheduler, except that a "wsd" decay
    longer than the steps after the warm-up is shortened to them: in Megatron it would begin below
    lr. Megatron's warm-up is one step behind ours: its step 0 has rate 0.
    """
    end = config.decay_steps or steps
    warmup, after = config.warmup_steps, max(end - config.warmup_steps, 1)
    floor = config.min_lr / config.lr
    if config.rate == "cosine":
        decay = optax.cosine_decay_schedule(config.lr, after, alpha=floor)
    elif config.rate == "linear":
        decay = optax.linear_schedule(config.lr, config.min_lr, after)
    elif config.rate == "wsd":
        decaying = min(max(round(config.wsd_decay_fraction * end), 1), after)
        decay = optax.linear_schedule(config.lr, config.min_lr, decaying, after - decaying)
    else:
        decay = optax.constant_schedule(config.lr)
    if not warmup:
        return decay
    rise = optax.linear_schedule(config.lr / warmup, config.lr, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def make_optimizer(
    config: OptimizerConfig, steps: int, roles: Tree
) -> optax.GradientTransformation:
    """The optimizer of `mtx.optimizers` that `config` names; if it names another one as `rest`, the
    first is for matrices and `rest` for all else, by role (`mtx.sharding.parameter`). roles: a tree
    like the parameters. UserError if an optimizer looks at more than one element at a time.
    """
    decayed = jax.tree.map(DECAYED.__contains__, roles)

    def make(name: str, rate: optax.Schedule) -> optax.GradientTransformation:
        def mask(params):  # in which another optimizer's parameters are masked nodes
            return jax.tree.map(lambda _, decays: decays, params, decayed, is_leaf=_is_masked)

        check_optimizer(name)
        return optimizer_module(name).make(
            rate, weight_decay=config.weight_decay, mask=mask, **config.hyperparameters(name)
        )

    of_matrices = make(config.name, learning_rate(config, steps))
    if config.rest is None:
        return of_matrices
    rest_lr = config.rest_lr or config.lr
    rate = replace(config, lr=rest_lr, min_lr=config.min_lr * rest_lr / config.lr)
    labels = jax.tree.map(lambda role: "matrix" if role in MATRICES else "rest", roles)
    rest = make(config.rest, learning_rate(rate, steps))
    return optax.partition({"matrix": of_matrices, "rest": rest}, labels)


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


# --- which optimizers are allowed -----------------------------------------------------------------

_ELEMENTWISE = frozenset(
    "abs add and broadcast_in_dim cbrt ceil clamp convert_element_type copy cos div eq erf exp "
    "exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg "
    "nextafter not or pow rem round rsqrt select_n sign sin sqrt square stop_gradient sub tanh "
    "xor".split()
)
_OF_SHAPES = "shape", "broadcast_dimensions", "sharding"  # params of an op that are about shapes


# Two sets of sizes for parameters of one to six dims: an op that differs between them uses sizes.
_SIZES = (2, 3, 5, 7, 11, 13), (17, 19, 23, 29, 31, 37)


@lru_cache
def check_optimizer(name: str) -> None:
    """Raise UserError if an optimizer's update is not elementwise, since it would then differ
    between a shard and a whole matrix, or if its state has arrays that are neither like a parameter
    nor a count of updates, since those could be neither sharded nor saved."""
    module = optimizer_module(name)
    made = module.make(1e-3, weight_decay=0.1, mask=None, **module.DEFAULTS)
    if not hasattr(made, "init") or not hasattr(made, "update"):
        raise UserError(f"optimizer {name!r}: make gave {made!r}, no optax.GradientTransformation")
    for ops in zip_longest(*(_ops(name, made, sizes) for sizes in _SIZES)):
        if ops[0] != ops[1]:
            raise UserError(
                f"optimizer {name!r} looks at the sizes of arrays "
                f"({', of others '.join(op.describe() for op in ops if op)}), and each device has "
                "a shard alone; use one whose update is elementwise"
            )
    _check_said(name)


def _check_said(name: str) -> None:
    """Raise UserError if an optimizer does not keep as many arrays as its file says, ignores its
    weight decay, or decays all parameters."""
    module, params = optimizer_module(name), {"layers": jax.ShapeDtypeStruct((2, 3), "float32")}

    def update(weight_decay: float, decays: bool) -> str:
        def mask(params):
            return jax.tree.map(lambda _: decays, params)

        made = module.make(1e-3, weight_decay=weight_decay, mask=mask, **module.DEFAULTS)
        state = jax.eval_shape(made.init, params)
        if (keeps := len(state_arrays(state))) != module.STATES:
            raise UserError(
                f"optimizer {name!r}: STATES={module.STATES} must be {keeps}, as it keeps"
            )
        return str(jax.make_jaxpr(made.update)(params, state, params))

    for option, others in (("weight_decay", (0.0, True)), ("mask", (0.1, False))):
        if update(*others) == update(0.1, True):
            raise UserError(
                f"optimizer {name!r} does nothing with {option}; give it to optax, or chain "
                "optax.add_decayed_weights(weight_decay, mask)"
            )


class _Op(NamedTuple):
    """What an op does to each element."""

    name: str
    values: tuple[str, ...]  # of those inputs that are constants in the program
    params: str

    def describe(self) -> str:
        return " ".join((self.name, *self.values))


def _ops(name: str, made: optax.GradientTransformation, sizes: tuple[int, ...]) -> Iterator[_Op]:
    """The ops of the first state and of an update, for parameters of these sizes; UserError as in
    `check_optimizer`."""
    params = {"layers": {str(n): jax.ShapeDtypeStruct(sizes[:n], "float32") for n in range(1, 7)}}
    state = jax.eval_shape(made.init, params)
    _check_state(name, state, params)
    programs = jax.make_jaxpr(made.init)(params), jax.make_jaxpr(made.update)(params, state, params)
    constants: dict[Any, Any] = {}
    for equation, inner in (each for one in programs for each in _equations(one, constants)):
        op, variables = equation.primitive.name, (*equation.invars, *equation.outvars)
        shapes = set() if inner else {getattr(each.aval, "shape", ()) for each in variables} - {()}
        written = [
            each.val if isinstance(each, Literal) else constants[each]
            for each in equation.invars
            if isinstance(each, Literal) or each in constants
        ]
        other = shapes and op not in _ELEMENTWISE
        if other or len(shapes) > 1 or any(map(np.ndim, written)):
            raise UserError(
                f"optimizer {name!r} looks at more than an element at a time ({op}), and each "
                "device has a shard alone; use one whose update is elementwise"
            )
        does = {} if inner else {k: v for k, v in equation.params.items() if k not in _OF_SHAPES}
        yield _Op(op, tuple(map(str, written)), str(does))


def _check_state(name: str, state: Tree, params: Tree) -> None:
    shapes: dict[Path, Any] = {
        ("layers", each): leaf.shape for each, leaf in params["layers"].items()
    }
    seen = set()
    for path, leaf in jax.tree.leaves_with_path(state):
        field, parameter = _parts(path)
        if (leaf.shape, leaf.dtype) == ((), jnp.int32):
            continue
        twice = (field, parameter) in seen
        seen.add((field, parameter))
        if twice or leaf.shape != shapes.get(parameter) or leaf.dtype != jnp.float32:
            raise UserError(
                f"optimizer {name!r} keeps {field or 'an array'}: {leaf.dtype} {list(leaf.shape)}, "
                "and can keep only float32 arrays like the parameters, one of each name; use "
                "another"
            )


def _equations(program: Any, constants: dict[Any, Any]) -> Iterator[tuple[JaxprEqn, bool]]:
    """The equations of a program, those of a call right after it, and for each whether it is a
    call; a loop over an array does not count as one. Adds the programs' constants."""
    body, values = opened(program)
    constants.update(zip(body.constvars, values))
    for equation in body.eqns:
        inner = [
            each
            for value in equation.params.values()
            for each in (value if isinstance(value, tuple | list) else (value,))
            if hasattr(each, "eqns")
        ]
        yield equation, bool(inner) and equation.primitive.name != "scan"
        for each in inner:
            yield from _equations(each, constants)


# --- its state, by name ---------------------------------------------------------------------------


def _parts(path: Path) -> tuple[str, tuple[str, ...]]:
    """The field and the parameter that a leaf of an optimizer's state belongs to; () if there is no
    such parameter, or if the leaf is one of several that a field keeps for it."""
    first = next(
        (n for n, key in enumerate(path) if isinstance(key, DictKey) and key.key in _PARTS),
        len(path),
    )
    fields = [key.name for key in path[:first] if isinstance(key, GetAttrKey)]
    parameter = tuple(key.key for key in path[first:] if isinstance(key, DictKey))
    return (fields[-1] if fields else ""), parameter if len(parameter) == len(path[first:]) else ()


def state_arrays(state: Tree) -> dict[str, Any]:
    """The arrays of an optimizer's state that are like parameters, by name: "mu.embed.tokens".
    Counts of updates, the only other arrays, are left out."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        field, parameter = _parts(path)
        if parameter:
            found[".".join((field, *parameter))] = leaf
    return found


def state_specs(shapes: Tree, specs: Tree) -> Tree:
    """The PartitionSpecs of a state, from those of the parameters; counts are replicated."""

    def spec(path: Path, _):
        _, parameter = _parts(path)
        return reduce(operator.getitem, parameter, specs) if parameter else P()

    return jax.tree.map_with_path(spec, shapes)


def state_with(shapes: Tree, arrays: dict[str, Any], count: Callable[[], Any]) -> Tree:
    """A state of these shapes from what `state_arrays` returned; `count()` makes each count."""

    def value(path: Path, _):
        field, parameter = _parts(path)
        return arrays[".".join((field, *parameter))] if parameter else count()

    return jax.tree.map_with_path(value, shapes)


class LossScale(NamedTuple):
    """The factor on the loss that keeps float16 gradients in range; 1 in other types."""

    scale: jax.Array  # float32 []
    good_steps: jax.Array  # int32 [], finite steps since the scale last changed

    @classmethod
    def start(cls, config: OptimizerConfig, compute_dtype: str):
        """The first scale: `config.loss_scale` in float16, 1 in other types."""
        scale = config.loss_scale if compute_dtype == "float16" else 1.0
        return cls(jnp.float32(scale), jnp.int32(0))

    def after(self, finite, config: OptimizerConfig, compute_dtype: str):
        """The next scale: halved after a step that was not finite, doubled after a window of
        finite ones."""
        if compute_dtype != "float16":
            return self
        good_steps = jnp.where(finite, self.good_steps + 1, 0)
        grow = good_steps >= config.loss_scale_window
        factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
        scale = jnp.maximum(self.scale * factor, 1.0)
        return LossScale(scale, jnp.where(grow, 0, good_steps))
