"""Updates of many slots in one compiled loop, where there is one."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from optimjax.arrays import varying_axes

__all__ = []

MOST_SLOTS = 16  # in one call: XLA's compile time grows with the square of operands


class Kernel(NamedTuple):
    """What a rule has to say of itself for a compiled loop to do the same.

    Attributes:
        name: of the loop.
        numbers: function of the step count, (), that returns what all elements share,
            in the order of the loop, each ().
        flag: the loop's option.
    """

    name: str
    numbers: Callable[[Array], tuple[Any, ...]]
    flag: bool


def fits(x: Array, g: Array, kept: Any) -> bool:
    """Whether a loop knows arrays of these dtypes, lying as they do."""
    mesh = jax.typeof(x).sharding.mesh
    explicit = not mesh.empty and AxisType.Explicit in mesh.axis_types
    if explicit or varying_axes(x):
        return False
    dtypes = (x.dtype.name, g.dtype.name)
    known = {("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")}
    return dtypes in known and all(
        a.dtype == jnp.float32 and a.shape == x.shape for a in jax.tree.leaves(kept)
    )


Reference = Callable[[Any, Any, Any, Any, Any, Any], tuple[Any, Any]]

update_p = Primitive("optimjax_update")
update_p.multiple_results = True


def fused_update(
    reference: Reference,
    rule: Any,
    t: Array,
    scale: Array | None,
    xs: Sequence[Array],
    gs: Sequence[Array],
    kept: Sequence[Any],
) -> tuple[list[Array], list[Any]]:
    """The new parameters and state of slots that share a rule and a step count.

    The platform decides at lowering: the rule's compiled loop where there is one device
    and it is a CPU, `reference` (rule, t, scale, x, g, state) -> (x, state) elsewhere.
    """
    new_xs, new_kept = [], []
    for start in range(0, len(xs), MOST_SLOTS):
        part = slice(start, start + MOST_SLOTS)
        operands = (rule, t, scale, tuple(xs[part]), tuple(gs[part]), tuple(kept[part]))
        leaves, structure = jax.tree.flatten(operands)
        out = update_p.bind(*leaves, structure=structure, reference=reference)
        n = len(xs[part])
        states = jax.tree.structure(operands[-1]).unflatten(out[n:])
        new_xs += out[:n]
        new_kept += states
    return new_xs, new_kept


def _plain(*leaves: Any, structure: Any, reference: Reference) -> list[Any]:
    rule, t, scale, xs, gs, kept = structure.unflatten(leaves)
    made = [
        reference(rule, t, scale, x, g, state)  # -> (x, state)
        for x, g, state in zip(xs, gs, kept, strict=True)
    ]
    return [*(x for x, _ in made), *jax.tree.leaves([state for _, state in made])]


def _compiled(aliased: bool, *leaves: Any, structure: Any, **_: Any) -> list[Any]:
    rule, t, scale, xs, gs, kept = structure.unflatten(leaves)
    rule = jax.tree.map(lambda x: x.astype(jnp.float32), rule)
    kernel = rule.kernel()
    t = t.astype(jnp.float32)
    shared = kernel.numbers(t + _work(t))
    shared = (*shared, 1.0 if scale is None else scale)
    numbers = [jnp.asarray(number, jnp.float32) for number in shared]
    states = [jax.tree.leaves(state) for state in kept]
    by_field = [array for field in zip(*states, strict=True) for array in field]
    n, first = len(xs), len(numbers)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*xs, *by_field)]
    aliases = {first + i: i for i in range(n)}
    aliases |= {first + 2 * n + i: n + i for i in range(len(by_field))}
    out = jax.ffi.ffi_call(
        f"optimjax_{kernel.name}",
        results,
        input_output_aliases=aliases if aliased else {},
    )(*numbers, *xs, *gs, *by_field, flag=kernel.flag)
    fields = [out[start : start + n] for start in range(n, len(out), n)]
    by_slot = [array for slot in zip(*fields, strict=True) for array in slot]
    return [*out[:n], *by_slot]


def _work(t: Array) -> Array:
    """Zero, in a thousand operations.

    The CPU client takes a program of fewer for so cheap that it runs on the thread that
    calls, which then waits for it; and a loop counts as no operation.
    """
    return 0.0 * jnp.sum(t * jnp.arange(1000, dtype=t.dtype))


@update_p.def_abstract_eval
def _shapes(*avals: Any, structure: Any, reference: Any) -> list[Any]:
    _, _, _, xs, _, kept = structure.unflatten(avals)
    return [*xs, *jax.tree.leaves(kept)]


@functools.lru_cache(maxsize=256)
def _jitted(structure: Any, reference: Any) -> Any:
    return jax.jit(
        lambda *leaves: update_p.bind(*leaves, structure=structure, reference=reference)
    )


@update_p.def_impl
def _eager(*leaves: Any, structure: Any, reference: Any) -> list[Any]:
    if cast(Any, jax.config).jax_disable_jit:
        return _plain(*leaves, structure=structure, reference=reference)
    return _jitted(structure, reference)(*leaves)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(functools.partial(_plain, **params), primals, tuple(tangents))


def _batched(operands: Any, axes: Any, **params: Any) -> Any:
    out = jax.vmap(functools.partial(_plain, **params), axes)(*operands)
    return out, [0] * len(out)


def _on_cpu(ctx: Any, *operands: Any, **params: Any) -> Any:
    one_device = getattr(ctx.module_context.axis_context, "num_devices", None) == 1
    run = functools.partial(_compiled, _in_place(ctx)) if one_device else _plain
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands, **params)


def _in_place(ctx: Any) -> bool:
    """Whether old arrays can be overwritten: they are donated, or the carry of a loop.

    Only a guess, and a matter of speed: XLA copies what must not be overwritten.
    """
    text = ("tf.aliasing_output", "jax.buffer_donor")
    for function in ctx.module_context.module.body.operations:
        name = function.attributes["sym_name"].value
        if name == "closed_call":
            return True
        if name == "main":
            attributes = str(function.attributes["arg_attrs"])
            if any(word in attributes for word in text):
                return True
    return False


ad.primitive_jvps[update_p] = _jvp
batching.primitive_batchers[update_p] = _batched
mlir.register_lowering(
    update_p, mlir.lower_fun(_plain, multiple_results=True), cacheable=False
)
mlir.register_lowering(update_p, _on_cpu, platform="cpu", cacheable=False)
