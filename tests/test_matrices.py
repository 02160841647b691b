"""What rules for matrices promise beside what every rule does.

That each takes the right step is tested in test_trajectories.py.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, buffers, close, compilations, same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optimjax as oj

RULES = {
    "muon": oj.Muon(0.1, iterations=2),
    "soap": oj.SOAP(0.1, every=2),
    "shampoo": oj.Shampoo(0.1, every=2, start=1, graft="sgd", eps=0.01),
    "splus": oj.SPlus(0.1, every=2),
    "kron": oj.PSGDKron(0.1),
}


def draw(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def gradients(model, step):
    """Others at each step and for each path."""
    return {
        path: draw(*x.shape, seed=1000 * step + len(path) + ord(path[-1]))
        for path, x in model.items()
    }


def train(rule, model, grads=gradients, steps=3):
    """The model after a few steps."""
    state = oj.setup(rule, model)
    update = jax.jit(oj.update)
    for step in range(steps):
        state, model = update(state, model, grads(model, step))
    return model


# Each matrix alone ------------------------------------------------------------------


def test_the_others_take_the_steps_of_aux():
    aux = oj.SGD(0.5, momentum=0.9)
    model = {"w": draw(4, 6), "head": draw(6, 2), "b": draw(6), "s": draw()}
    got = train(oj.Muon(0.1, aux=aux), model)
    alone = train(aux, model)
    for path in ("head", "b", "s"):
        close(got[path], alone[path], rtol=1e-6)
    assert not np.allclose(got["w"], alone["w"])
    none = train(oj.Muon(0.1, aux=aux, matrices=lambda path, x: False), model)
    close(none, alone, rtol=1e-6)


def alone(rule, parts, grads):
    """Each of several matrices by itself."""
    return [
        train(rule, {"w": x}, lambda model, step, i=i: {"w": grads(step)[i]})["w"]
        for i, x in enumerate(parts)
    ]


@pytest.mark.parametrize("name", RULES)
def test_heads_and_layers_step_as_each_alone(name):
    """A matrix for each index of two axes, in one array."""
    x, rule = draw(2, 4, 3), RULES[name]
    axes = oj.Axes(batch=0)
    got = train(
        rule.with_fields(axes=oj.Muon(axes=axes).axes),
        {"w": x},
        lambda model, step: {"w": draw(2, 4, 3, seed=step + 1)},
    )["w"]
    expected = alone(rule, x, lambda step: draw(2, 4, 3, seed=step + 1))
    close(got, jnp.stack(expected), 1e-4, 1e-5)


@pytest.mark.parametrize("lengths", [2, (1, 3)], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", ["muon", "soap"])
def test_parts_step_as_each_alone(name, lengths):
    x, rule = draw(3, 4), RULES[name]
    axes = oj.Axes(split=(-1, lengths))
    ends = [2] if lengths == 2 else [1]
    got = train(
        rule.with_fields(axes=oj.Muon(axes=axes).axes),
        {"w": x},
        lambda model, step: {"w": draw(3, 4, seed=step + 1)},
    )["w"]
    expected = alone(
        rule,
        jnp.split(x, ends, axis=1),
        lambda step: jnp.split(draw(3, 4, seed=step + 1), ends, axis=1),
    )
    close(got, jnp.concatenate(expected, axis=1), 1e-4, 1e-5)


@pytest.mark.parametrize("name", RULES)
def test_slots_of_one_shape_step_as_each_alone(name):
    """They are stacked for the device, which is nobody's business."""
    model = {path: draw(4, 3, seed=ord(path)) for path in "abc"}
    got = train(RULES[name], model)
    for path in model:
        close(got[path], train(RULES[name], {path: model[path]})[path], 1e-4, 1e-5)


def test_out_first_is_the_transpose():
    x, rule = draw(4, 6), oj.NorMuon(0.1)
    got = train(
        oj.NorMuon(0.1, axes=oj.Axes(outputs=0)),
        {"w": x.T},
        lambda model, step: {"w": draw(4, 6, seed=step + 1).T},
    )["w"]
    [expected] = alone(rule, [x], lambda step: [draw(4, 6, seed=step + 1)])
    close(got.T, expected, 1e-4, 1e-6)


def test_a_convolution_steps_as_its_matrix():
    x = draw(2, 2, 3, 5)
    got = train(
        oj.Muon(0.1), {"w": x}, lambda m, step: {"w": draw(2, 2, 3, 5, seed=step + 1)}
    )["w"]
    [expected] = alone(
        oj.Muon(0.1),
        [x.reshape(12, 5)],
        lambda step: [draw(2, 2, 3, 5, seed=step + 1).reshape(12, 5)],
    )
    close(got.reshape(12, 5), expected, 1e-4, 1e-6)


# What is kept -----------------------------------------------------------------------


def test_shapes_of_the_state():
    """As the parameter where it is shaped like it; the rest by matrix."""
    model = {"one": draw(4, 3), "many": draw(2, 4, 3), "cut": draw(4, 5)}
    axes = {"many": oj.Axes(batch=0), "cut": oj.Axes(split=(-1, (2, 3)))}
    slots = oj.setup(oj.SOAP(axes=axes), model).slots
    for path, x in model.items():
        assert slots[path].m.shape == slots[path].v.shape == x.shape
    assert slots["one"].q_left.shape == (4, 4)
    assert slots["many"].q_right.shape == (2, 3, 3)
    assert [q.shape for q in slots["cut"].right] == [(1, 2, 2), (1, 3, 3)]
    slots = oj.setup(oj.SOAP(max_dim=3), {"w": model["one"]}).slots
    assert slots["w"].left is slots["w"].q_left is None
    one_sided = oj.setup(oj.SOAP(one_sided=True), {"w": model["one"]}).slots["w"]
    assert one_sided.left is None and one_sided.right.shape == (3, 3)
    kron = oj.setup(oj.PSGDKron(max_dim=3), {"w": model["one"]}).slots["w"]
    assert kron.q_left.shape == (4,) and kron.q_right.shape == (3, 3)
    blocks = oj.setup(oj.Shampoo(block_size=2), {"w": draw(5, 3)}).slots["w"]
    assert blocks.left.shape == blocks.right.shape == (6, 2, 2)


@pytest.mark.parametrize("name", RULES)
def test_no_buffer_is_shared(name):
    model = {path: draw(3, 3, seed=ord(path)) for path in "ab"}
    state = oj.setup(RULES[name], model)
    kept = buffers((state, model))
    assert len(set(kept)) == len(kept)


def test_tied_matrices_take_one_step():
    w = draw(4, 3)
    grads = draw(2, 4, 3, seed=1)
    tied = {"a": w, "b": (w,)}
    state = oj.setup(oj.SOAP(0.1, every=1), tied)
    single = oj.setup(oj.SOAP(0.1, every=1), {"a": w})
    alone = {"a": w}
    for _ in range(3):
        state, tied = oj.update(state, tied, {"a": grads[0], "b": (grads[1],)})
        single, alone = oj.update(single, alone, {"a": grads[0] + grads[1]})
    assert tied["a"] is tied["b"][0]
    close(tied["a"], alone["a"], 1e-5)


@pytest.mark.parametrize("name", ["muon", "soap", "kron"])
def test_without_a_gradient_or_frozen_a_matrix_stays(name):
    """And what it counts stays with it, so that its first step is still its first."""
    model = {"a": draw(4, 3), "z": draw(4, 3, seed=1)}
    state = oj.setup(RULES[name], model)
    kept = jax.tree.map(np.array, (model["a"], state.slots["a"]))
    for step in range(2):
        grads = gradients(model, step)
        state, model = oj.update(state, model, {**grads, "a": None})
    same_bits(kept, jax.tree.map(np.array, (model["a"], state.slots["a"])))
    state = oj.freeze(state, "a")
    state, model = oj.update(state, model, gradients(model, 2))
    same_bits(kept, jax.tree.map(np.array, (model["a"], state.slots["a"])))
    state = oj.thaw(state, "a")
    fresh, alone = oj.setup(RULES[name], {"a": model["a"]}), {"a": model["a"]}
    for step in range(2):
        state, model = oj.update(state, model, gradients(model, step))
        fresh, alone = oj.update(fresh, alone, gradients(alone, step))
    close(model["a"], alone["a"], 1e-4, 1e-6)


@pytest.mark.parametrize("name", RULES)
def test_zeros_stay_finite_and_nan_is_not_hidden(name):
    """From the first step on, and after a gradient that was one."""
    rule, model = RULES[name], {"w": draw(4, 3)}
    state, new = oj.setup(rule, model), model
    for scale in (0.0, 0.0, 1.0, 0.0, 1e-30):
        state, new = oj.update(state, new, {"w": scale * draw(4, 3, seed=1)})
        assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(state.slots))
        assert bool(jnp.all(jnp.isfinite(new["w"])))
    for _ in range(2):
        state, new = oj.update(state, new, {"w": draw(4, 3).at[0, 0].set(jnp.nan)})
    assert bool(jnp.any(jnp.isnan(new["w"])))


# Hyperparameters --------------------------------------------------------------------


def test_one_compilation_for_many_values():
    model = {"w": draw(4, 3), "b": draw(3)}
    state = oj.setup(oj.Muon(0.1, aux=oj.Adam(0.01)), model)
    update = Counter(oj.update)
    run = jax.jit(update)
    for rate in (0.1, 0.2, 0.0):
        state = oj.adjust(state, **{"Muon.learning_rate": rate})
        before = model
        state, model = run(state, model, gradients(model, 0))
    assert update.traces == 1
    same_bits(before["w"], model["w"])
    assert not np.array_equal(before["b"], model["b"])
    state = oj.adjust(state, **{"Adam.learning_rate": 0.0})
    state = oj.adjust(state, **{"Muon.learning_rate": 0.1})
    state, new = run(state, model, gradients(model, 0))
    assert update.traces == 1
    same_bits(new["b"], model["b"])
    assert not np.array_equal(new["w"], model["w"])


def test_values_by_path():
    rates = {"a": 0.1, "b": 0.3}
    model = {path: draw(4, 3, seed=ord(path)) for path in rates}
    got = train(oj.Muon(rates), model)
    for path, rate in rates.items():
        close(got[path], train(oj.Muon(rate), {path: model[path]})[path], 1e-5)


@pytest.mark.parametrize("name", ["soap", "kron"])
def test_an_ensemble_is_each_alone(name):
    """Mapped from `setup` on, over models and hyperparameters."""
    rates, models = jnp.array([0.1, 0.3]), draw(2, 4, 3)

    def run(rate, x):
        rule = RULES[name].with_fields(learning_rate=rate)
        return train(rule, {"w": x})["w"]

    got = jax.vmap(run)(rates, models)
    each = [run(rate, x) for rate, x in zip(rates, models, strict=True)]
    close(got, jnp.stack(each), 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda: oj.SOAP(every=0), "SOAP: every is 0, expected >= 1"),
        (lambda: oj.Shampoo(block_size=0), "Shampoo: block_size is 0, expected >= 1"),
        (
            lambda: oj.Shampoo(graft="adam"),
            "graft is 'adam', expected one of 'rmsprop'",
        ),
        (lambda: oj.SPlus(b2=1.0), "SPlus: b2 is 1, expected in [0, 1)"),
        (lambda: oj.PSGDKron(init_scale=0.0), "init_scale is 0, expected more"),
        (lambda: oj.Muon(scale="big"), "scale is 'big', expected one of 'shape'"),
        (lambda: oj.Muon(prescale=None), "prescale is None, expected one of"),
        (lambda: oj.Muon(coefficients="new"), "coefficients is 'new', expected one of"),
    ],
)
def test_options_out_of_range(wrong, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        wrong()


def test_only_what_differs_is_shown():
    assert "hidden_matrices" not in repr(oj.Muon())
    assert "matrices={'w': True" in repr(oj.Muon(matrices="w"))


# Orthogonal -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "lowest", "highest"),
    [
        ({}, 0.65, 1.25),
        ({"coefficients": "dion"}, 0.8, 1.25),
        ({"coefficients": "polar_express"}, 0.85, 1.15),
        ({"prescale": "spectral"}, 0.65, 1.25),
        ({"prescale": "schatten"}, 0.65, 1.25),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (4, 4)])
def test_singular_values_are_about_one(shape, options, lowest, highest):
    """And the singular vectors are those of the matrix."""
    u, _, v = np.linalg.svd(draw(*shape), full_matrices=False)
    values = np.geomspace(1, 0.02, min(shape)).astype(np.float32)
    x = jnp.asarray((u * values) @ v)
    made = np.asarray(oj.orthogonalize(x, **options))
    inside = u.T @ made @ v.T
    close(inside, np.diag(np.diag(inside)), atol=1e-4)
    assert lowest < np.diag(inside).min() and np.diag(inside).max() < highest


def test_orthogonalize_takes_what_there_is():
    same_bits(oj.orthogonalize(jnp.zeros((3, 2))), jnp.zeros((3, 2)))
    assert oj.orthogonalize(jnp.zeros((0, 3))).shape == (0, 3)
    turned = jnp.asarray(np.exp(0.7j), jnp.complex64)
    x = draw(3, 2)
    with jax.numpy_dtype_promotion("standard"):
        close(oj.orthogonalize(turned * x), turned * oj.orthogonalize(x), 1e-4, 1e-5)


def test_muon_in_bfloat16_is_nearly_muon():
    model = {"w": draw(6, 4)}
    low = train(oj.Muon(0.1, dtype=jnp.bfloat16), model)
    high = train(oj.Muon(0.1), model)
    assert low["w"].dtype == jnp.float32
    moved = [np.asarray(new["w"] - model["w"]) for new in (low, high)]
    assert 0 < np.abs(moved[0] - moved[1]).max() < 0.1 * np.abs(moved[1]).max()


# Several devices --------------------------------------------------------------------

SPECS = {"rows": P("x"), "columns": P(None, "y"), "both": P("x", "y")}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ["muon", "soap", "shampoo"])
def test_moments_lie_as_the_matrix_lies(name, kind, spec):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    place = NamedSharding(mesh, SPECS[spec])
    rule, plain = RULES[name], {"w": draw(4, 4)}
    model = {"w": jax.device_put(plain["w"], place)}
    state, other = oj.setup(rule, model), oj.setup(rule, plain)
    update = jax.jit(oj.update)
    for step in range(3):
        for x in jax.tree.leaves(state):
            assert x.sharding.device_set == place.device_set
        for x in (model["w"], state.slots["w"].m):
            assert x.sharding.is_equivalent_to(place, 2)
        g = gradients(plain, step)
        state, model = update(state, model, {"w": jax.device_put(g["w"], place)})
        other, plain = oj.update(other, plain, g)
        close(model, plain, 1e-4, 1e-5)


@pytest.mark.parametrize("name", ["muon", "soap", "shampoo", "kron"])
def test_explicit_axes_compile_once(name):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    place = NamedSharding(mesh, P("x", None))
    model = {"w": jax.device_put(draw(4, 3), place)}
    state = oj.setup(RULES[name], model)
    update = jax.jit(oj.update)
    for step in range(3):
        grads = {"w": jax.device_put(draw(4, 3, seed=step + 1), place)}
        with compilations() as compiled:
            state, model = jax.block_until_ready(update(state, model, grads))
        assert not (step and compiled), "a later step compiled again"
