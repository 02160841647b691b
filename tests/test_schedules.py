"""Schedules: edges of the count, and numbers that are data of a rule."""

import dataclasses
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, compilations

import optimjax as oj
from optimjax import schedules as s
from optimjax.schedules.base import Schedule

# --- Edges, over all of them ----------------------------------------------------------

EXAMPLES = [
    s.Constant(0.3),
    s.Linear(0.3, 0.02, 7, 2),
    s.Polynomial(0.3, 0.02, 0.5, 7, 2),
    s.Exponential(0.3, 0.7, 4, 2),
    s.Exponential(0.3, 1.7, 4, staircase=True, end=2.5),
    s.InverseTime(0.3, 0.4, 3),
    s.Step(0.3, 4, 1.5),
    s.Cosine(0.3, 9, 0.02, 0.5),
    s.CosineCycle(0.3, 9, 0.02),
    s.CosineRestarts(0.3, 5, 1.5, 0.02, 0.8),
    s.CosineRestarts(0.3, 5),
    s.Cyclic(0.1, 0.3, 4, 3, "triangular2"),
    s.Cyclic(0.1, 0.3, 4, mode="exp_range", decay=0.9),
    s.OneCycle(0.3, 20, back=0.7),
    s.OneCycle(0.3, 20, shape="linear"),
    s.Piecewise((0.3, 0.2, 0.05), (4, 9)),
    s.Piecewise((0.3, 0.2, 0.05), (4, 9), "cosine"),
    s.InverseSqrt(0.3, 5),
    s.Trapezoid(0.3, 4, 20, 6, 0.1, 0.02, "1-sqrt"),
    s.Warmup(s.Cosine(0.3, 9), 4, 0.1),
    s.WarmupCosine(0.3, 4, 20, 0.1, 0.02, 0.5),
    s.Join((s.Linear(0.3, 0.1, 4), 0.2, s.Exponential(0.2, 0.9, 1)), (4, 9)),
    s.Linear(0.3, 0.02, 7) * s.Step(1.0, 4),
]
LAST = 2**31 - 1
each = pytest.mark.parametrize("schedule", EXAMPLES, ids=lambda x: type(x).__name__)


def test_every_schedule_has_an_example():
    classes = {getattr(s, name) for name in s.__all__} - {Schedule}
    assert classes == {type(x) for x in EXAMPLES}


@each
@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
def test_edges_of_the_count(schedule, wide):
    with jax.enable_x64(wide):
        dtype = np.float64 if wide else np.float32
        edges = np.array([LAST, LAST - 1, 2**24 + 1, 2**24, -1, -LAST - 1], np.int32)
        found = np.asarray(schedule(edges))
        assert np.isfinite(found).all()
        first = float(schedule(0))
        assert found[-2] == found[-1] == np.float32(first) or found[-1] == first
        table = schedule(np.arange(24).reshape(4, 6))
        assert (table.shape, table.dtype) == ((4, 6), dtype)
        for count in (0, 9, 23):
            one = schedule(count)
            assert (one.shape, one.dtype, one.weak_type) == ((), dtype, False)
            np.testing.assert_allclose(one, table.ravel()[count], rtol=1e-6)


def test_any_integer_is_a_count():
    schedule = s.Linear(0.0, 0.8, 16)
    for kind in (np.int8, np.uint8, np.uint16, np.int32, np.uint32, np.int64):
        for count in (kind(3), np.full(2, 3, kind)):
            np.testing.assert_allclose(schedule(count), 0.15, rtol=1e-6)
    assert float(schedule(np.uint32(2**32 - 1))) == np.float32(0.8)
    with jax.enable_x64(True):
        assert float(schedule(2**40)) == 0.8
        assert float(schedule(-(2**40))) == 0


@each
def test_jit_scan_and_vmap_give_the_same(schedule):
    counts = jnp.arange(24)
    table = schedule(counts)
    np.testing.assert_allclose(jax.vmap(schedule)(counts), table, rtol=1e-6)
    _, scanned = jax.lax.scan(lambda _, c: (None, schedule(c)), None, counts)
    np.testing.assert_allclose(scanned, table, rtol=1e-6)
    # Its numbers as data of a jitted function: another value is not another program.
    run = jax.jit(counter := Counter(lambda schedule, count: schedule(count)))
    for factor in (1.0, 0.75):
        other = jax.tree.map(lambda x, f=factor: x * f, schedule)
        np.testing.assert_allclose(run(other, counts), other(counts), rtol=1e-6)
    assert counter.traces == 1


@each
def test_derivatives_with_respect_to_every_number_are_finite(schedule):
    counts = jnp.arange(24)
    grads = jax.jacrev(lambda schedule: schedule(counts))(schedule)
    chex.assert_tree_all_finite(grads)


@each
def test_is_a_value(schedule):
    leaves, structure = jax.tree.flatten(schedule)
    again = structure.unflatten([jnp.asarray(x, jnp.float32) for x in leaves])
    assert all(isinstance(x, float) for x in leaves)
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert repr(again) == repr(schedule)
    assert eval(repr(schedule), vars(s)) == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    changed = structure.unflatten([x + 1 for x in leaves])
    assert changed != schedule
    with pytest.raises(AttributeError):
        schedule.start = 0.1


def test_values_at_the_ends_are_exact():
    """Not start + (end - start) * 1, which can miss the end by a rounding."""
    for start, end in np.random.default_rng(0).random((20, 2)).astype(np.float32):
        for schedule in (
            s.Linear(start, end, 7),
            s.Polynomial(start, end, 2, 7),
            s.Cosine(start, 7, end),
            s.Piecewise((start, end), (7,), "cosine"),
            s.Trapezoid(start, 0, 7, 7, end=end, shape="1-sqrt"),
        ):
            found = schedule(jnp.array([0, 7, 8, LAST]))
            assert found.tolist() == pytest.approx([start, *[end] * 3], rel=0, abs=0)


def test_float32_keeps_its_digits_near_the_end():
    """(1 + cos(pi x)) / 2 would have lost all of them."""
    n = 100_000
    counts = np.array([n - 1, n - 10, n - 100])
    right = np.sin(np.pi / 2 * (n - counts) / n) ** 2
    np.testing.assert_allclose(s.Cosine(1.0, n)(counts), right, rtol=1e-6)
    right = 1 - np.sqrt(counts / n)
    sqrt = s.Trapezoid(1.0, 0, n, n, shape="1-sqrt")
    np.testing.assert_allclose(sqrt(counts), right, rtol=1e-6)


def test_cycles_are_right_to_the_last_count():
    """In float32, which does not know 2^31 - 1 from 2^31."""
    counts = LAST - np.arange(14)
    for schedule, period in [
        (s.CosineRestarts(0.3, 7), 7),
        (s.CosineCycle(0.3, 7), 14),
        (s.Cyclic(0.1, 0.3, 4, 3), 7),
    ]:
        np.testing.assert_allclose(
            schedule(counts), schedule(counts % period), rtol=1e-6, atol=1e-9
        )
    # Boundaries that float32 can tell stay apart, and what follows counts by one.
    far = s.Join((0.3, s.Linear(0.0, 1.0, 4)), (2**30,))
    assert far(2**30 + np.arange(-1, 4)).tolist() == [
        pytest.approx(0.3),
        *[0, 0.25, 0.5, 0.75],
    ]
    assert float(s.Linear(0.0, 1.0, 4, begin=2**30)(2**30 + 1)) == 0.25


def test_without_warmup():
    counts = jnp.arange(12)
    cosine = s.Cosine(0.3, 9, 0.02)
    same = [
        s.Warmup(cosine, 0, start=0.7),
        s.WarmupCosine(0.3, 0, 9, start=0.7, end=0.02),
        s.OneCycle(0.3, 9, warmup=0, div=1, final_div=15),
        s.Trapezoid(0.3, 0, 9, 9, start=0.7, end=0.02, shape="cosine"),
    ]
    for schedule in same:
        np.testing.assert_allclose(schedule(counts), cosine(counts), rtol=1e-6)
    # Nor without a decay: the last value from the end on.
    assert s.WarmupCosine(0.5, 4, 4)(jnp.arange(3, 6)).tolist() == [0.375, 0, 0]
    assert s.Trapezoid(0.5, 4, 4, 0)(jnp.arange(3, 6)).tolist() == [0.375, 0, 0]


# --- As hyperparameters of a rule -----------------------------------------------------

MODEL = {"w": jnp.array([0.4, -1.3]), "b": jnp.array([0.9])}
GRADS = {"w": jnp.array([0.7, -0.2]), "b": jnp.array([-1.1])}


def test_numbers_become_arrays_and_another_value_compiles_nothing():
    state = oj.setup(oj.SGD(s.WarmupCosine(0.3, 3, 20)), MODEL)
    leaves = jax.tree.leaves(state.rule.learning_rate)
    assert {(x.shape, x.dtype.name) for x in leaves} == {((), "float32")}
    step = jax.jit(counter := Counter(oj.update))
    state, _ = step(state, MODEL, GRADS)
    for schedule in (
        s.WarmupCosine(0.6, 5, 30, 0.01, 0.02, 2),
        s.WarmupCosine(1, 2, 3),
    ):
        state = oj.adjust(state, learning_rate=schedule)
        assert state.rule.learning_rate == schedule
        count = int(state.count)
        with compilations() as compiled:
            state, new = step(state, MODEL, GRADS)
        assert not compiled
        taken = schedule(count) * GRADS["w"]
        np.testing.assert_allclose(MODEL["w"] - new["w"], taken, rtol=1e-5)
    assert counter.traces == 1


def test_any_hyperparameter_and_by_path():
    rate, b1, decay = s.Cosine(0.3, 3), s.Step(0.9, 2, 0.5), s.Linear(0.4, 0.1, 3)
    rule = oj.AdamW({"w": rate, "*": 0.1}, b1=b1, b2=0.99, weight_decay=decay)
    state, model = oj.setup(rule, MODEL), MODEL
    fixed = oj.setup(oj.AdamW({"w": 0.5, "*": 0.1}, 0.5, 0.99), MODEL)
    for t in range(5):  # the same, with numbers put in before each step
        inner = state.inner
        state, new = oj.update(state, model, GRADS)
        now = {"learning_rate": float(rate(t)), "weight_decay": float(decay(t))}
        fixed = oj.adjust(fixed, b1=float(b1(t)), weight_decay=now["weight_decay"])
        fixed = oj.adjust(fixed, "w", learning_rate=now["learning_rate"])
        _, right = oj.update(dataclasses.replace(fixed, inner=inner), model, GRADS)
        chex.assert_trees_all_close(new, right, rtol=1e-6)
        model = new


def test_sweep_of_a_peak_is_a_loop():
    def run(peak):
        state, model = oj.setup(oj.SGD(s.WarmupCosine(peak, 2, 5)), MODEL), MODEL
        for _ in range(4):
            state, model = oj.update(state, model, GRADS)
        return model

    peaks = jnp.array([0.1, 0.3, 0.7])
    swept = jax.jit(jax.vmap(run))(peaks)
    for i, peak in enumerate(peaks):
        chex.assert_trees_all_close(
            run(peak), jax.tree.map(lambda x, i=i: x[i], swept), rtol=1e-5
        )


def test_derivative_with_respect_to_a_peak():
    def end(peak):
        state, model = oj.setup(oj.SGD(s.WarmupCosine(peak, 2, 5)), MODEL), MODEL
        for _ in range(4):
            state, model = oj.update(state, model, GRADS)
        return model["w"][0]

    unit = s.WarmupCosine(1.0, 2, 5)(np.arange(4)).sum()
    np.testing.assert_allclose(jax.grad(end)(0.3), -0.7 * unit, rtol=1e-5)


# --- Put together ---------------------------------------------------------------------


def test_products():
    counts = jnp.arange(6)
    linear, step = s.Linear(0.3, 0.1, 4), s.Step(1.0, 2)
    plain = linear(counts)
    for product in (
        linear * 2,
        2 * linear,
        linear * np.float64(2),
        np.float64(2) * linear,
    ):
        assert isinstance(product, s.Product)
        np.testing.assert_allclose(product(counts), 2 * plain)
    for product in (jnp.asarray(2.0) * linear, linear * jnp.asarray(2.0)):
        np.testing.assert_allclose(product(counts), 2 * plain)
    np.testing.assert_allclose((linear * step)(counts), plain * step(counts))
    theirs = linear * (lambda count: 0.1 * count)
    right = np.asarray(plain) * 0.1 * np.arange(6)
    np.testing.assert_allclose(theirs(counts), right, rtol=1e-6)
    with pytest.raises(TypeError, match="unsupported operand"):
        linear * None


def test_a_schedule_in_a_join_sees_only_its_own_counts():
    seen = {}

    def spy(name):
        def schedule(count):
            seen[name] = np.asarray(count)
            return 0.1 * count

        return schedule

    with jax.disable_jit():
        join = s.Join([spy("a"), spy("b"), spy("c")], (3, 7))
        found = join(np.arange(-1, 12))
    assert seen["a"].tolist() == [0, 0, 1, 2, *[2] * 9]
    assert seen["b"].tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert seen["c"].tolist() == [*[0] * 9, 1, 2, 3, 4]
    own = [0, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]
    np.testing.assert_allclose(found, 0.1 * np.array(own), rtol=1e-6)


def test_branches_that_are_not_taken_harm_no_derivative():
    def root(count):
        return jnp.sqrt(3.5 - count)

    grad = jax.jacrev(lambda end: s.Join((root, end), (3,))(jnp.arange(6)))(0.2)
    assert grad.tolist() == [0, 0, 0, 1, 1, 1]


def test_nested_ones_and_arrays_of_values():
    counts = jnp.arange(14)
    nested = s.Warmup(s.Join((s.Warmup(0.3, 2), s.Step(0.3, 2)), (4,)), 3, 0.1) * 2
    state = oj.setup(oj.SGD(nested), MODEL)
    assert {x.dtype.name for x in jax.tree.leaves(state.rule)} == {"float32"}
    np.testing.assert_allclose(
        state.rule.learning_rate(counts), nested(counts), rtol=1e-6
    )
    table = np.random.default_rng(0).random(13)
    piecewise = s.Piecewise(table, np.arange(1, 13))
    np.testing.assert_allclose(piecewise(counts), [*table, table[-1]], rtol=1e-6)
    assert len(jax.tree.leaves(piecewise)) == 2
    state = oj.setup(oj.SGD(piecewise), MODEL)
    assert float(state.rule.at_count(12).learning_rate) == np.float32(table[-1])
    assert float(s.Piecewise((0.5,), ())(3)) == 0.5
