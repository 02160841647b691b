"""The promises that a rule keeps, one function each; its docstring says which."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optimjax.arrays import buffer, is_inexact
from optimjax.hyper import ByPath, is_schedule
from optimjax.live import adjust, freeze, thaw
from optimjax.nested import every_rule
from optimjax.paths import Slots
from optimjax.rules.matrix import MatrixRule
from optimjax.state import State
from optimjax.testing.subject import STEPS, Subject, close, identical, same_kind
from optimjax.training import align, setup, update
from optimjax.treewide import Count, PyTree

__all__ = []


def is_a_value(s: Subject) -> None:
    """rules compare, hash, flatten and print"""
    leaves, structure = jax.tree.flatten(s.rule)
    again = structure.unflatten(leaves)
    assert again == s.rule, f"flattened and put together again it is {again!r}"
    assert hash(again) == hash(s.rule), "equal rules have two hashes"
    assert type(s.rule).__name__ in repr(setup(s.rule, s.model()))


def goes_downhill(s: Subject) -> None:
    """a step has a positive product with the gradient: steps are SUBTRACTED"""
    model = s.model()
    state, along = setup(s.rule, model), 0.0
    for _ in range(STEPS):
        grads = jax.grad(s.problem)(model)
        state, new = s.step(state, model, s.of_examples(grads))
        along += sum(float(jnp.vdot(grads[k], model[k] - new[k])) for k in model)
        model = new
    uphill = any(getattr(rule, "maximize", False) for rule in every_rule(s.rule))
    assert (along < 0) == uphill, (
        f"the parameters moved {'down' if uphill else 'up'}hill. apply returns "
        "(state, step), and a step is to be subtracted from the parameter."
    )


def is_pure(s: Subject) -> None:
    """the same arguments give the same results, jitted too, and none is changed"""
    model = s.model()
    state, model = s.run(model, steps=1)
    grads = s.grads(model, 1)
    before = jax.tree.map(np.array, (state, model, grads))
    first = s.update(state, model, grads)
    second = s.update(state, model, grads)
    identical(first, second)
    identical(before, (state, model, grads))
    close(first, s.step(state, model, grads))


def works_alone_on_a_nested_tree(s: Subject) -> None:
    """init and apply are functions over any pytree"""
    model = s.model()
    nested = {"a": [model["w"]], "z": (model["b"], {"c": model["w"] + 1})}
    state, grads = s.rule.init(nested), s.grads(nested, 0)
    _, steps = s.rule.apply(state, nested, grads, **s.context(nested))
    same_kind(nested, steps, "the steps")


def keeps_the_state_a_fixed_point(s: Subject) -> None:
    """structure, shapes, dtypes and weak types of state and parameters stay"""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        for other in (jnp.float32, jnp.bfloat16):
            model = s.model(dtype)
            state = setup(s.rule, model)

            def one(state: State, model: PyTree, other: Any = other) -> Any:
                grads = jax.tree.map(lambda g: g.astype(other), s.grads(model, 0))
                return s.update(state, model, grads)

            what = f"with {dtype.__name__} parameters, {other.__name__} gradients, "
            new_state, new_model = jax.eval_shape(one, state, model)
            same_kind(state, new_state, what + "the state")
            same_kind(model, new_model, what + "the model")
    weak = {"w": jnp.asarray(0.7)}
    state = setup(s.rule, weak)
    after = s.run(weak, state, steps=1)
    same_kind((state, weak), after, "with a weakly typed parameter, ")


def gives_the_same_under_scan(s: Subject) -> None:
    """scan = loop"""
    model = s.model()
    each = [s.grads(model, i) for i in range(STEPS)]

    def body(carry: Any, grads: Any) -> Any:
        state, params = carry
        if s.context_needed:
            grads = s.grads(params, 0)
        return s.update(state, params, grads), None

    stacked = jax.tree.map(lambda *g: jnp.stack(g), *each)
    scanned, _ = jax.lax.scan(body, (setup(s.rule, model), model), stacked)
    close(s.run(model), scanned, rtol=s.rtol(2e-5))


def lowered(state: State) -> Iterator[tuple[str, Any]]:
    """Each hyperparameter that is a plain number, a little nearer to its lowest."""
    for rule in every_rule(state.rule):
        for name, hyper in rule.hypers().items():
            if name in rule.settled or is_schedule(hyper):
                continue
            if not isinstance(hyper, ByPath):
                low = (rule.range_of(name) or (0.0,))[0]
                value = low + max(float(hyper) - low, 0) * 0.95
                yield name, np.floor(value) if name in rule.whole else value


def varied(state: State, factor: float) -> State:
    """Every number times a factor below 1, which keeps it in its range."""
    return dataclasses.replace(
        state, rule=jax.tree.map(lambda h: h * jnp.asarray(factor, h.dtype), state.rule)
    )


def sweeps_hyperparameters_under_vmap(s: Subject) -> None:
    """vmap over hyperparameters from setup on = one run each"""
    factors = jnp.array([0.6, 0.9])
    if not jax.tree.leaves(s.rule):
        return
    model = s.model()

    def run(factor: Any) -> PyTree:
        rule = jax.tree.map(lambda h: factor * h, s.rule)
        return s.run(model, setup(rule, model), steps=2)[1]

    swept = jax.jit(jax.vmap(run))(factors)
    run = jax.jit(run)
    for i, factor in enumerate(factors):
        close(run(factor), jax.tree.map(lambda x, i=i: x[i], swept), rtol=1e-4)


def compiles_once_whatever_the_values(s: Subject) -> None:
    """a change of any hyperparameter, or the second call, is no new trace"""
    model = s.model()
    state = setup(s.rule, model)
    traces = []
    step = jax.jit(lambda *args: (traces.append(1), s.update(*args))[1])
    for i in range(3):
        grads = s.grads(model, i)
        state, model = step(state, model, grads)
        state = varied(state, 0.95)
        for name, value in dict(lowered(state)).items():
            state = adjust(state, **{name: value})
    assert len(traces) == 1, f"{len(traces)} traces in 3 steps"


def takes_schedules(s: Subject) -> None:
    """a schedule that is constant does what the constant does"""
    model = s.model()
    holds_rules = s.rule.parts(setup(s.rule, model).inner, [])
    if holds_rules and not isinstance(s.rule, MatrixRule):
        return  # the rules inside are checked by themselves
    constant = {n: h for n, h in s.rule.hypers().items() if isinstance(h, float)}
    scheduled = dataclasses.replace(
        typing.cast(Any, s.rule),
        **{n: (lambda count, h=h: h + 0 * count) for n, h in constant.items()},
    )
    close(s.run(model)[1], s.run(model, setup(scheduled, model))[1], rtol=1e-4)


def sums_the_gradients_of_tied_places(s: Subject) -> None:
    """tied places share one slot, and take one step with the sum"""
    single = s.model()
    w = jnp.array(single["w"], copy=True)
    tied = {"b": single["b"], "w": w, "z": (w,)}
    state_1, state_2 = setup(s.rule, single), setup(s.rule, tied)
    for i in range(STEPS):
        grads = s.grads(single, i)
        part = jax.tree.map(lambda g: g * jnp.asarray(0.25, g.dtype), grads["w"])
        split = {"b": grads["b"], "w": part, "z": (grads["w"] - part,)}
        context = s.context(tied, lambda m: s.problem({"w": m["w"], "b": m["b"]}))
        state_1, single = s.step(state_1, single, grads)
        state_2, tied = update(state_2, tied, split, **context)
    assert tied["w"] is tied["z"][0], "tied places no longer hold one array"
    close(single["w"], tied["w"], rtol=1e-4)
    close(single["b"], tied["b"], rtol=1e-4)
    sizes = [sum(x.size for x in jax.tree.leaves(t.inner)) for t in (state_1, state_2)]
    assert sizes[0] == sizes[1], (
        f"the tied state has {sizes[1]} numbers, not {sizes[0]}"
    )


def leaves_a_skipped_slot_as_it_is(s: Subject) -> None:
    """None or frozen: parameter, state and own count stay bit for bit"""
    model = s.model()
    state, model = s.run(model, steps=2)
    grads = {**s.grads(model, 2), "w": None}
    state = align(state, grads)
    kept = jax.tree.map(np.array, (model["w"], state.slots["w"], own_counts(state)))
    after, new = s.update(state, model, grads)
    same_kind(state, after, "after align, the state")
    identical(kept, (new["w"], after.slots["w"], own_counts(after)))
    frozen = freeze(state, "w")
    after, new = s.update(frozen, model, s.grads(model, 2))
    identical(kept, (new["w"], after.slots["w"], own_counts(after)))
    _, full = s.update(state, model, s.grads(model, 2))
    moves = not jnp.array_equal(full["b"], model["b"])
    assert not (moves and jnp.array_equal(new["b"], model["b"])), (
        "the other slot did not move"
    )
    thawed, new = s.update(thaw(after), new, s.grads(new, 3))
    same_kind(state, thawed, "after thaw, the state")
    nothing, new = s.update(state, model, {"w": None, "b": None})
    identical((state, model), (nothing, new))


def own_counts(state: State) -> list[Any]:
    nodes = jax.tree.leaves(state.inner, is_leaf=lambda x: isinstance(x, Count))
    return [n.own["w"] for n in nodes if "w" in getattr(n, "own", ())]


def can_be_donated(s: Subject) -> None:
    """no two leaves of state and model share a buffer, and all can be given away"""
    model = s.model()
    state = setup(s.rule, model)
    step = jax.jit(s.update, donate_argnums=(0, 1))
    for i in range(2):
        buffers = [buffer(x) for x in jax.tree.leaves((state, model)) if x.size]
        assert len(set(buffers)) == len(buffers), f"shared buffers before step {i + 1}"
        state, model = step(state, model, s.grads(model, i))
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in model.values())


def computes_in_float32_at_least(s: Subject) -> None:
    """16-bit parameters take the float32 step, rounded once; their state is float32"""
    exact = s.model()
    _, exact = s.run(exact, steps=1)
    for dtype in (jnp.bfloat16, jnp.float16):
        low = s.model(dtype)
        state, low = s.run(low, steps=1)
        if all(
            getattr(rule, "state_dtype", None) is None for rule in every_rule(s.rule)
        ):
            small = [
                jax.tree_util.keystr(keys)
                for keys, x in jax.tree_util.tree_leaves_with_path(state.inner)
                if is_inexact(x) and x.dtype.itemsize < 4
            ]
            assert not small, f"kept in 16 bits: {', '.join(small)}"
        eps = float(jnp.finfo(dtype).eps)
        close(
            jax.tree.map(lambda x: x.astype(jnp.float32), low),
            exact,
            rtol=0.51 * eps + 1e-5,
            # Derivatives that the rule takes itself are rounded to 16 bits as well.
            atol=(0.05 if s.derives else 1e-3) * eps,
        )


def computes_in_float64(s: Subject) -> None:
    """under x64 state and parameters are float64, and agree with float32"""
    _, single = s.run(s.model())
    with jax.enable_x64(True):
        model = s.model(jnp.float64)
        state, double = s.run(model)
        same_kind(model, double, "the model")
        wide = [x for x in jax.tree.leaves(state.inner) if is_inexact(x)]
        small = {x.dtype.name for x in wide if x.dtype.itemsize < 8}
        assert s.state_dtype_chosen or not small, f"kept in {sorted(small)}"
        _, mixed = s.run(s.model(jnp.float32))
        double, mixed = jax.tree.map(np.asarray, (double, mixed))
    close(double, single, s.rtol(1e-3), s.rtol(1e-4))
    close(mixed, single, s.rtol(1e-3), s.rtol(1e-4))


def takes_complex_parameters(s: Subject) -> None:
    """complex without imaginary part = real; or a TypeError that names the path"""
    model = s.model()
    complex_model = s.model(jnp.complex64)
    if not all(rule.complex_ok for rule in every_rule(s.rule)):
        try:
            s.run(complex_model, steps=1)
        except TypeError as error:
            assert "'b'" in str(error) or "'w'" in str(error), f"no path in: {error}"
            return
        raise AssertionError("complex_ok is False, but a complex parameter was taken")
    if s.context_needed:
        return  # the problem is real
    state = setup(s.rule, complex_model)
    after, result = s.run(complex_model, state)
    same_kind((state, complex_model), (after, result), "with complex parameters, ")
    _, real = s.run(model)
    close(jax.tree.map(jnp.real, result), real, rtol=s.rtol(1e-4))
    close(jax.tree.map(jnp.imag, result), jax.tree.map(jnp.zeros_like, real))


def takes_empty_and_scalar_arrays(s: Subject) -> None:
    """shapes () and (0, 3) are as good as any, and so is no array at all"""
    model = {"e": jnp.zeros((0, 3)), "s": jnp.asarray(np.float32(0.7))}
    state = setup(s.rule, model)
    after, new = s.run(model, state, steps=2)
    same_kind((state, model), (after, new), "with empty and scalar arrays, ")
    assert bool(jnp.isfinite(new["s"])), f"the scalar became {new['s']}"
    s.rule.init({})  # as of a group, or of an `aux`, to which no slot belongs


def survives_a_full_counter(s: Subject) -> None:
    """at 2^31 - 1 updates the count stays there and the step stays finite"""
    model = s.model()
    state, model = s.run(model, steps=1)
    most = np.iinfo(np.int32).max

    def full(node: Any) -> Any:
        if not isinstance(node, Count):
            return node
        return dataclasses.replace(node, count=jnp.full_like(node.count, most))

    inner = jax.tree.map(full, state.inner, is_leaf=lambda x: isinstance(x, Count))
    state, model = s.run(model, dataclasses.replace(state, inner=inner), steps=1)
    counts = jax.tree.leaves(state.inner, is_leaf=lambda x: isinstance(x, Count))
    for node in counts:
        if isinstance(node, Count):
            assert int(node.count) == most, f"the count became {int(node.count)}"
    finite = Slots({k: bool(jnp.all(jnp.isfinite(x))) for k, x in model.items()})
    assert all(finite.values()), f"not finite: {finite}"


CHECKS = (
    is_a_value,
    goes_downhill,
    is_pure,
    works_alone_on_a_nested_tree,
    keeps_the_state_a_fixed_point,
    gives_the_same_under_scan,
    sweeps_hyperparameters_under_vmap,
    compiles_once_whatever_the_values,
    takes_schedules,
    sums_the_gradients_of_tied_places,
    leaves_a_skipped_slot_as_it_is,
    can_be_donated,
    computes_in_float32_at_least,
    computes_in_float64,
    takes_complex_parameters,
    takes_empty_and_scalar_arrays,
    survives_a_full_counter,
)
