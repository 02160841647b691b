"""Dtypes: nothing drifts, nothing is computed in 16 bits, nothing is cut off."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, close, numpy_adam, same_bits, signatures

import optimjax as oj

RULES = {
    "sgd": oj.SGD(0.1),
    "momentum": oj.SGD(0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adam": oj.Adam(0.1),
    "adamw": oj.AdamW(lambda count: 0.1, weight_decay=0.2, couple=False),
    "decay": oj.WeightDecay(0.1),
    "clip": oj.ClipByGlobalNorm(1.0),
    "identity": oj.Identity(),
    "chain": oj.Chain(oj.ClipByGlobalNorm(1.0), oj.Adam(0.1), oj.WeightDecay(0.1)),
    "groups": oj.Partition({"x": oj.Adam(0.1), "y": oj.SGD(0.1)}, {"w": "x", "*": "y"}),
}
DTYPES = ["bfloat16", "float16", "float32", "float64", "complex64", "complex128"]


WIDE = ("float64", "complex128")


def model_of(dtype):
    return {
        "w": jnp.asarray([[1.0, -2.0, 0.5]], dtype),
        "scalar": jnp.asarray(0.75, dtype),
        "empty": jnp.zeros((0, 2), dtype),
    }


def gradients(dtype):
    return {
        "w": jnp.asarray([[0.5, 3.0, -0.25]], dtype),
        "scalar": jnp.asarray(-1.5, dtype),
        "empty": jnp.zeros((0, 2), dtype),
    }


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("name", RULES)
def test_state_and_model_are_a_scan_carry_in_every_dtype(name, wide):
    """A dtype that drifts by one update breaks `scan`, `while_loop` and `cond`."""
    with jax.enable_x64(wide):
        model = {d: model_of(d) for d in DTYPES if wide or d not in WIDE}
        grads = {d: gradients(d) for d in model}
        rule = RULES[name]
        if name == "groups":
            rule = oj.Partition(dict(rule.rules), {"*/w": "x", "*": "y"})
        state = oj.setup(rule, model)
        carry = jax.eval_shape(
            lambda *carry: jax.lax.scan(
                lambda carry, _: (oj.update(*carry, grads), None), carry, length=2
            )[0],
            state,
            model,
        )
        assert signatures(carry) == signatures((state, model))
        for leaf in jax.tree.leaves(state):
            assert leaf.dtype not in (jnp.bfloat16, jnp.float16)


@pytest.mark.parametrize("grad_dtype", DTYPES[:4])
@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_gradients_of_another_float_dtype_move_no_dtype(dtype, grad_dtype):
    """f32 gradients of bf16 parameters, and the other way round, are daily life."""
    with jax.enable_x64("float64" in (dtype, grad_dtype)):
        model, grads = model_of(dtype), gradients(grad_dtype)
        for name in ("momentum", "chain"):
            state = oj.setup(RULES[name], model)
            shapes = jax.eval_shape(oj.update, state, model, grads)
            assert signatures(shapes) == signatures((state, model))
        state = oj.setup(RULES["adam"], model)
        after, new = oj.update(state, model, grads)
        assert signatures((after, new)) == signatures((state, model))
        expected = {
            k: numpy_adam(x, [gradients(grad_dtype)[k]], 0.1) for k, x in model.items()
        }
        close(new, expected, rtol=1e-2)
        moments = [
            x.dtype
            for x in jax.tree.leaves(after.inner)
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        assert set(moments) == {
            np.dtype(jnp.float64 if dtype == "float64" else jnp.float32)
        }


def test_precision_of_the_gradient_is_not_rounded_to_the_parameter():
    """An f32 gradient of a bf16 parameter reaches the f32 moments in full."""
    model = {"w": jnp.ones(1, jnp.bfloat16)}
    state = oj.setup(oj.SGD(0.1, momentum=0.9), model)
    state, _ = oj.update(state, model, {"w": jnp.array([1.0001])})
    close(state.slots["w"].v, np.array([1.0001]), rtol=1e-7)


def test_long_bfloat16_run_descends_as_float32_does():
    """Adam at rate 1e-4 for 2,000 steps: rounding may cost little, never the descent.

    Parameters stay below 0.02, where a step of 1e-4 is more than half a unit in the
    last place of bfloat16; above 0.05 it is not, and no rule can store such steps in
    bfloat16. Bound: at each 100th step the loss is within 10% of the first loss of
    where float32 is, and at the end below a thousandth of the first.
    """
    scale = jnp.array([1.0, 3.0, 0.5, 10.0])

    def loss(m):
        return jnp.sum(scale * m["w"].astype(jnp.float32) ** 2) / 2

    curves = []
    for dtype in (jnp.float32, jnp.bfloat16):
        model = {"w": jnp.asarray([0.02, -0.015, 0.01, -0.02], dtype)}
        state = oj.setup(oj.Adam(1e-4), model)
        assert state.slots["w"].m.dtype == state.slots["w"].v.dtype == jnp.float32
        step = oj.make_step(loss)
        state, model, losses = step.scan(state, model, length=2000)
        assert model["w"].dtype == dtype
        assert state.slots["w"].m.dtype == jnp.float32
        curves.append(np.asarray(losses)[::100])
    full, half = curves
    assert full[-1] < 1e-3 * full[0] and half[-1] < 1e-3 * half[0]
    assert np.all(np.abs(full - half) < 0.1 * full[0])
    assert np.all(np.diff(half)[:4] < 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_only_where_it_is_stored(dtype):
    """In f16, eps = 1e-8 is 0 and 300^2 is inf: neither may be computed there."""
    model = {"w": jnp.asarray([1.0, 1.0, 1.0], dtype)}
    grads = {"w": jnp.asarray([0.0, 300.0, 1e-4], dtype)}
    state = oj.setup(oj.Adam(0.125), model)
    for t in range(2):
        state, model = oj.update(state, model, grads)
        expected = [1.0, 1 - 0.125 * (t + 1), 1 - 0.125 * (t + 1)]
        close(model["w"], np.array(expected), rtol=2e-3)
    clip = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD(1.0))
    model = {"w": jnp.zeros(3, dtype)}
    grads = {"w": jnp.asarray([3e4, 4e4, 0.0], dtype)}
    _, new = oj.update(oj.setup(clip, model), model, grads)
    close(new["w"], np.array([-0.6, -0.8, 0]), rtol=1e-2)


def test_float64_is_computed_in_float64(x64):
    """Hyperparameters, counts and moments all keep 64 bits where parameters do."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=5)
    grads = list(rng.normal(size=(12, 5)))
    model = {"wide": jnp.asarray(x), "narrow": jnp.asarray(x, jnp.float32)}
    rule = oj.Adam(0.03, b1=0.87, b2=0.993, eps=1e-9)
    state = oj.setup(rule, model)
    start = signatures((state, model))
    for g in grads:
        tree = {"wide": jnp.asarray(g), "narrow": jnp.asarray(g, jnp.float32)}
        state, model = oj.update(state, model, tree)
        assert signatures((state, model)) == start
    assert state.slots["wide"].m.dtype == jnp.float64
    assert state.slots["narrow"].m.dtype == jnp.float32
    expected = numpy_adam(x, grads, 0.03, 0.87, 0.993, 1e-9)
    close(model["wide"], expected, rtol=1e-12, atol=0)
    close(model["narrow"], expected, rtol=1e-5)


def test_numpy_arrays_train_and_keep_their_dtype():
    """A model of NumPy arrays is a model; its dtype is not JAX's choice."""
    for dtype in (np.float32, np.float16):
        model = {"w": np.array([1.0, 2.0], dtype), "n": np.array([100])}
        state = oj.setup(oj.Adam(0.125), model)
        update = Counter(oj.update)
        run = jax.jit(update)
        step = oj.make_step(lambda m: jnp.sum(m["w"]).astype(jnp.float32))
        grads = {"w": np.array([1.0, -1.0], dtype), "n": None}
        eager = oj.update(state, model, grads)
        traced = run(state, model, grads)
        stepped = step(state, model)[:2]
        for (after, new), sign in ((eager, -1), (traced, -1), (stepped, 1)):
            assert new["w"].dtype == dtype
            assert signatures(after) == signatures(state)
            close(new["w"], np.array([0.875, 2 - sign * 0.125]), rtol=1e-3)
            assert new["n"].dtype.kind == "i" and new["n"][0] == 100
        run(*traced, grads)
        assert update.traces == 1


def test_numpy_float64_arrays_train_without_x64():
    """`np.random.randn` gives float64: it must train, warn of nothing, and settle."""
    model = {"w": np.array([1.0, 2.0])}
    state = oj.setup(oj.Adam(0.125), model)
    loss = Counter(lambda m: jnp.sum(m["w"] ** 2))
    step = oj.make_step(loss)
    start = signatures(state)
    for _ in range(4):
        state, model, _ = step(state, model)
        assert signatures(state) == start
    assert loss.traces <= 2
    close(model["w"], np.array([0.5, 1.5]), rtol=0.05)
    eager = {"w": np.array([1.0, 2.0])}
    state, new = oj.update(oj.setup(oj.SGD(0.5), eager), eager, eager)
    close(new["w"], np.array([0.5, 1.0]))


def test_numpy_float64_arrays_stay_float64(x64):
    """With 64 bits enabled nothing is cut off."""
    model = {"w": np.array([1.0, 2.0])}
    state = oj.setup(oj.SGD(0.1), model)
    _, new = oj.update(state, model, {"w": np.array([1e-9, 1.0])})
    assert new["w"].dtype == np.float64
    close(new["w"], np.array([1 - 1e-10, 1.9]), rtol=1e-15)


def test_python_numbers_are_not_trained_and_never_cut_off():
    """An int of 100 must not become a float, and a float must not cost a trace."""
    model = {"w": jnp.ones(2), "size": 100, "rate": 0.1 + 0.2, "z": 1 + 2j}
    loss = Counter(lambda m: jnp.sum(m["w"]) * m["rate"] * m["size"])
    step = oj.make_step(loss)
    state = oj.setup(oj.SGD(0.01), model)
    for _ in range(3):
        state, model, _ = step(state, model)
    assert loss.traces == 1
    assert model["size"] == 100 and type(model["size"]) is int
    assert model["rate"] == 0.1 + 0.2 and type(model["rate"]) is float
    assert model["z"] == 1 + 2j
    close(model["w"], np.full(2, 1 - 0.9), rtol=1e-4)


def test_complex_adam_follows_the_documented_convention():
    """One scale for real and imaginary part: |g|^2, real second moment."""
    model = {"z": jnp.array([1 + 1j], jnp.complex64)}
    state = oj.setup(oj.Adam(0.1), model)
    assert state.slots["z"].v.dtype == jnp.float32
    assert state.slots["z"].m.dtype == jnp.complex64
    for g, expected in [(3 - 4j, 0.94 + 1.08j), (-1 + 2j, 0.91689 + 1.10175j)]:
        grads = {"z": jnp.array([g], jnp.complex64)}
        state, model = oj.update(state, model, grads)
        close(model["z"], np.array([expected]), rtol=1e-5)


@pytest.mark.parametrize(
    "rule",
    [
        oj.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.3),
        oj.Chain(oj.WeightDecay(0.2), oj.SGD(0.1, momentum=0.5)),
        oj.Chain(oj.ClipByGlobalNorm(2.0), oj.SGD(0.1)),
    ],
)
def test_separable_rules_treat_a_complex_number_as_two_reals(rule):
    """Splitting a complex parameter into parts by hand must change nothing."""
    rng = np.random.default_rng(5)
    z = rng.normal(size=(4, 3)) + 1j * rng.normal(size=(4, 3))
    whole = {"z": jnp.asarray(z[0], jnp.complex64)}
    parts = {"re": whole["z"].real, "im": whole["z"].imag}
    one, two = oj.setup(rule, whole), oj.setup(rule, parts)
    for g in z[1:]:
        g = jnp.asarray(g, jnp.complex64)
        one, whole = oj.update(one, whole, {"z": g})
        two, parts = oj.update(two, parts, {"re": g.real, "im": g.imag})
        close(whole["z"], np.asarray(parts["re"]) + 1j * np.asarray(parts["im"]))


@pytest.mark.parametrize("unit", [1, 1j])
def test_complex_adam_along_one_axis_is_real_adam(unit):
    """Where only one part has gradients, |g|^2 is that part's square."""
    grads = [0.7, -0.2, 1.5]
    model = {"z": jnp.array([1 + 1j], jnp.complex64)}
    state = oj.setup(oj.Adam(0.1), model)
    for g in grads:
        state, model = oj.update(
            state, model, {"z": jnp.array([g * unit], jnp.complex64)}
        )
    moved = numpy_adam(1.0, grads, 0.1)
    other = np.array([moved + 1j if unit == 1 else 1 + 1j * moved])
    close(model["z"], other)


def test_compiled_step_goes_downhill_for_complex_parameters():
    """Raw `jax.grad` is the conjugate: following it, |z|^2 would grow."""
    model = {"z": jnp.array([1 + 1j], jnp.complex64)}
    step = oj.make_step(lambda m: jnp.sum(jnp.abs(m["z"]) ** 2))
    state = oj.setup(oj.SGD(0.1), model)
    for _ in range(3):
        state, model, _ = step(state, model)
    close(np.abs(model["z"]), np.array([np.sqrt(2) * 0.8**3]))
    start = {"z": jnp.array([1 + 1j], jnp.complex64)}
    raw = jax.grad(lambda m: jnp.sum(jnp.abs(m["z"]) ** 2))(start)
    state = oj.setup(oj.SGD(0.1), start)
    _, new = oj.update(state, start, jax.tree.map(jnp.conj, raw))
    close(new["z"], np.array([0.8 + 0.8j]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_restored_state_has_the_saved_dtypes_and_goes_on_bit_for_bit(dtype):
    """A moment of 1e-9 beside an f16 parameter must not come back as 0."""
    model = {"w": jnp.asarray([1.0, 2.0], dtype), "b": jnp.asarray([0.5], dtype)}
    small = {"w": jnp.asarray([1e-9, 3e-9]), "b": jnp.asarray([2.0])}
    state = oj.setup(oj.Chain(oj.ClipByGlobalNorm(9.0), oj.Adam(0.1)), model)
    state, model = oj.update(state, model, small)
    leaves, structure = jax.tree.flatten(state)
    saved = pickle.dumps([np.asarray(x) for x in leaves])
    restored = jax.tree.unflatten(structure, pickle.loads(saved))
    assert signatures(restored) == signatures(state)
    assert np.all(np.asarray(restored.slots["w"].m) > 0)
    run = jax.jit(oj.update)
    same_bits(run(restored, model, small), run(state, model, small))
    same_bits(oj.update(restored, model, small), oj.update(state, model, small))
