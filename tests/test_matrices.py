"""Matrix rules read an array as the matrices that it is, and leave others to `aux`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import close, compilations
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optimjax as oj
from optimjax.axes import Axes


@pytest.fixture
def normal():
    rng = np.random.default_rng(0)
    return lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)


def run(rule, model, grads):
    """The model after two steps."""
    state = oj.setup(rule, model)
    for g in grads:
        state, model = jax.jit(oj.update)(state, model, g)
    return state, model


RULES = [oj.Muon, oj.NorMuon, oj.AdaMuon, oj.SOAP, oj.Shampoo, oj.SPlus, oj.Dion]
RULES += [oj.GaLore, oj.Fira, oj.APOLLO]


@pytest.mark.parametrize("cls", RULES)
def test_each_matrix_of_an_array_is_for_itself(cls, normal):
    """Stacked layers, merged heads and unequal parts move as they would alone."""
    rule = functools.partial(cls, 0.1)
    parts = [normal(5, 4) for _ in range(3)]
    grads = [[normal(5, 4) for _ in range(3)] for _ in range(2)]
    alone = dict(zip("abc", parts, strict=True))
    _, want = run(rule(), alone, [dict(zip("abc", g, strict=True)) for g in grads])

    def check(axes, join):
        model, gs = {"w": join(parts)}, [{"w": join(g)} for g in grads]
        _, got = run(rule(axes=axes), model, gs)
        close(got["w"], join([want[k] for k in "abc"]), rtol=2e-4)

    check(Axes(batch=0), jnp.stack)
    check(Axes(batch=1), lambda xs: jnp.stack(xs, 1))
    check(Axes(split=(-1, 3)), lambda xs: jnp.concatenate(xs, 1))
    check(Axes(split=(0, 3)), lambda xs: jnp.concatenate(xs, 0))

    def uneven(xs):
        return jnp.concatenate([xs[0], xs[1], xs[2][:, :2]], 1)

    model, gs = {"w": uneven(parts)}, [{"w": uneven(g)} for g in grads]
    _, got = run(rule(axes=Axes(split=(-1, (4, 4, 2)))), model, gs)
    close(got["w"][:, 4:8], want["b"], rtol=2e-4)


@pytest.mark.parametrize("cls", RULES)
def test_slots_in_a_stack_move_as_alone(cls, normal):
    model = {k: normal(5, 4) for k in "abcd"} | {"e": normal(4, 5), "bias": normal(4)}
    grads = [{k: normal(*x.shape) for k, x in model.items()} for _ in range(2)]
    _, together = run(cls(0.1), model, grads)
    for k in model:
        _, alone = run(cls(0.1), {k: model[k]}, [{k: g[k]} for g in grads])
        close(together[k], alone[k], rtol=2e-4)


def test_a_large_stack_is_cut(normal, monkeypatch):
    from optimjax.rules import matrix

    model = {k: normal(5, 4) for k in "abcde"}
    grads = [{k: normal(5, 4) for k in model}]
    _, whole = run(oj.Muon(0.1), model, grads)
    monkeypatch.setattr(matrix, "MOST_STACKED", 45)  # two matrices and a bit
    _, cut = run(oj.Muon(0.1), model, grads)
    close(cut, whole)


def test_others_take_the_steps_of_aux(normal):
    model = {"w": normal(5, 4), "b": normal(4), "lm_head": normal(4, 3)}
    grads = [{k: normal(*x.shape) for k, x in model.items()} for _ in range(2)]
    state, got = run(oj.Muon(0.1, aux=oj.SGD(0.5, momentum=0.9)), model, grads)
    rest = {k: model[k] for k in ("b", "lm_head")}
    sgd = oj.SGD(0.5, momentum=0.9)
    _, want = run(sgd, rest, [{k: g[k] for k in rest} for g in grads])
    close({k: got[k] for k in rest}, want)
    text = str(oj.summary(state))
    assert text.count("Muon") == 1 and text.count("SGD") == 2
    assert sum(x.size for x in jax.tree.leaves(state.slots)) == 20 + 4 + 12


def test_gradients_in_a_stack_may_be_of_several_dtypes(normal):
    model = {k: normal(5, 4) for k in "ab"}
    grads = {"a": normal(5, 4).astype("bfloat16"), "b": normal(5, 4).astype("float16")}
    wide = jax.tree.map(lambda g: g.astype("float32"), grads)
    close(run(oj.Muon(0.1), model, [grads])[1], run(oj.Muon(0.1), model, [wide])[1])


@pytest.mark.parametrize("aux", [oj.Prodigy(), oj.DoG(by_layer=True), oj.MoMo()])
def test_an_aux_for_no_slot_waits(aux, normal):
    model = {"w": normal(5, 4)}
    state = oj.setup(oj.Muon(0.1, aux=aux), model)
    _, new = oj.update(state, model, model, value=1.0)
    close(new, run(oj.Muon(0.1), model, [model])[1])


def test_tied_frozen_and_missing_matrices(normal):
    w = normal(4, 4)
    model = {"a": w, "b": w, "c": normal(4, 4), "d": normal(4, 4)}
    state = oj.setup(oj.Muon(0.1), model)
    assert list(state.slots) == ["a", "c", "d"]
    state = oj.freeze(state, "c")
    g = {k: normal(4, 4) for k in "abc"} | {"d": None}
    new_state, new = oj.update(state, model, g)
    assert new["a"] is new["b"]
    np.testing.assert_array_equal(new["c"], model["c"])
    np.testing.assert_array_equal(new["d"], model["d"])
    np.testing.assert_array_equal(new_state.slots["d"].m, state.slots["d"].m)
    _, alone = run(oj.Muon(0.1), {"a": w}, [{"a": g["a"] + g["b"]}])
    close(new["a"], alone["a"])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_state_lies_where_the_parameter_lies(kind, normal):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    where = NamedSharding(mesh, P("x"))
    model = {k: jax.device_put(normal(8, 4), where) for k in "ab"}
    plain = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), model)
    state = oj.setup(oj.NorMuon(0.1), model)
    assert state.slots["a"].m.sharding.is_equivalent_to(where, 2)
    step = jax.jit(oj.update)
    for _ in range(2):
        state, model = step(state, model, model)
    assert state.slots["a"].m.sharding.is_equivalent_to(where, 2)
    _, want = run(oj.NorMuon(0.1), plain, [plain])
    _, want = run(oj.NorMuon(0.1), plain, [plain, want])
    close(jax.tree.map(np.asarray, model), jax.tree.map(np.asarray, want), rtol=1e-4)


def test_one_compilation_for_all_values(normal):
    model = {"w": normal(5, 4), "b": normal(4)}
    state = oj.setup(oj.Muon(lambda count: 0.1 / (count + 1)), model)
    step = jax.jit(oj.update)
    state, model = step(state, model, model)
    with compilations() as compiled:
        state = oj.adjust(state, **{"Muon.momentum": 0.8, "Adam.learning_rate": 0.3})
        state, model = step(state, model, model)
    assert compiled == []
    assert float(state.rule.aux.learning_rate) == pytest.approx(0.3)


@pytest.mark.parametrize("coefficients", ["quintic", "polar_express", "dion"])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 5)])
def test_orthogonalize_makes_singular_values_one(coefficients, shape, normal):
    o = oj.orthogonalize(normal(*shape), coefficients, 7)
    values = np.linalg.svd(np.asarray(o), compute_uv=False)
    assert np.all((values > 0.6) & (values < 1.25))


def test_orthogonalize_turns_nothing(normal):
    """The singular vectors stay; zeros stay zeros; complex matrices become unitary."""
    x = normal(4, 6)
    u, _, v = np.linalg.svd(np.asarray(x), full_matrices=False)
    o = oj.orthogonalize(x, ((1.875, -1.25, 0.375),), 30)  # converges to 1
    close(o, jnp.asarray(u @ v), rtol=1e-3, atol=1e-4)
    assert not np.any(oj.orthogonalize(jnp.zeros((3, 4))))
    z = jax.lax.complex(normal(4, 4), normal(4, 4))
    with jax.numpy_dtype_promotion("standard"):  # its norm is real
        o = np.asarray(oj.orthogonalize(z, ((1.875, -1.25, 0.375),), 40))
    np.testing.assert_allclose(o @ o.conj().T, np.eye(4), atol=1e-3)


def test_bfloat16_products_are_near(normal):
    model = {"w": normal(8, 8)}
    _, half = run(oj.Muon(0.1, dtype="bfloat16"), model, [model])
    _, full = run(oj.Muon(0.1), model, [model])
    apart = float(jnp.max(jnp.abs(half["w"] - full["w"])))
    assert 0 < apart < 0.02
    assert half["w"].dtype == jnp.float32


@pytest.mark.parametrize("cls", [oj.Fira, oj.APOLLO])
def test_a_layer_without_gradient_at_first_moves_later(cls, normal):
    """As the first factor of LoRA does, whose second one starts with zeros."""
    x, g = {"w": normal(4, 5)}, {"w": normal(4, 5)}
    rule = cls(0.1, rank=2)
    first = rule.apply(rule.init(x), x, g)[1]["w"]
    state, nothing = rule.apply(rule.init(x), x, {"w": jnp.zeros((4, 5))})
    later = rule.apply(state, x, g)[1]["w"]
    assert not np.any(nothing["w"])
    assert np.linalg.norm(later) > 0.1 * np.linalg.norm(first)


UNITS = [
    lambda axes=None: oj.Centralize(axes=axes),
    lambda axes=None: oj.AdaptiveClip(0.1, axes=axes),
    lambda axes=None: oj.TrustRatio(axes=axes),
    lambda axes=None: oj.LAMB(0.1, axes=axes),
    lambda axes=None: oj.LARS(0.1, weight_decay=0.1, axes=axes),
    lambda axes=None: oj.Adafactor(
        0.1, momentum=0.9, min_dim_size_to_factor=2, axes=axes
    ),
    lambda axes=None: oj.CAME(0.1, axes=axes),
    lambda axes=None: oj.AdamMini(0.1, axes=axes),
    lambda axes=None: oj.Scion(0.1, axes=axes),
]


@pytest.mark.parametrize("rule", UNITS, ids=lambda f: repr(f()))
def test_layers_that_are_stacked_move_as_they_would_alone(rule, normal):
    """One description of axes also for rules that are not of matrices alone."""
    names = "abc"
    parts = {k: {"w": normal(5, 4), "b": normal(4)} for k in names}
    grads = [{k: {"w": normal(5, 4), "b": normal(4)} for k in names} for _ in range(2)]
    _, want = run(rule(), parts, grads)

    def check(axes, join):
        def joined(tree, k):
            return join(k, [tree[name][k] for name in names])

        def whole(tree):
            return {k: joined(tree, k) for k in "wb"}

        _, got = run(rule(axes), whole(parts), [whole(g) for g in grads])
        close(got, whole(want), rtol=2e-5, atol=1e-6)

    check(oj.Axes(batch=0), lambda k, xs: jnp.stack(xs))
    merged = {"w": oj.Axes(split=(-1, 3)), "b": oj.Axes(split=(0, 3))}
    check(merged, lambda k, xs: jnp.concatenate(xs, -1))


@pytest.mark.parametrize("cls", [oj.Muon, oj.AdaMuon, oj.SOAP, oj.Scion, oj.GaLore])
def test_matrices_of_an_array_in_a_shard_map(cls, normal):
    """The axis that numbers them may be in parts: no norm is that of several."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    x, g = normal(4, 3, 4), normal(4, 3, 4) * jnp.arange(1.0, 5.0).reshape(4, 1, 1)
    rule = cls(0.02, axes=Axes(batch=0))

    def two_steps(x, g):
        state, _ = rule.apply(rule.init({"w": x}), {"w": x}, {"w": g})
        return rule.apply(state, {"w": x}, {"w": g})[1]["w"]

    apart = jax.shard_map(two_steps, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    close(jax.jit(apart)(x, g), jax.jit(two_steps)(x, g), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (lambda: oj.SOAP(every=1.5), "SOAP: every is 1.5, expected a whole number"),
        (lambda: oj.GaLore(rank=True), "rank is True, expected a whole number"),
        (lambda: oj.Muon(iterations=0), "iterations is 0, expected >= 1"),
        (lambda: oj.Muon(coefficients=()), "expected triples of numbers"),
        (lambda: oj.Muon(coefficients=((1, 2),)), "expected triples of numbers"),
        (lambda: oj.Muon(coefficients="cubic"), "expected one of 'quintic'"),
        (lambda: oj.Muon(scale="width"), "scale is 'width', expected one of 'shape'"),
    ],
)
def test_options_that_make_no_sense(wrong, complaint):
    with pytest.raises((TypeError, ValueError), match=complaint):
        wrong()


def test_a_bound_of_another_basis_is_refused(normal):
    with pytest.raises(ValueError, match="no second moment"):
        oj.setup(oj.AMSBound(oj.SOAP(0.1, aux=oj.SGD(0.1))), {"w": normal(3, 3)})
    model = {"w": jnp.ones(2)}
    state = oj.setup(oj.AMSBound(oj.Adam(0.1)), model)
    _, new = oj.update(state, model, {"w": jnp.array([1e25, 1.0])})  # v overflows
    close(new["w"], jnp.array([1.0, 0.9]))


@pytest.mark.parametrize("rule", [oj.Muon, oj.NorMuon, oj.Scion])
def test_gradients_whose_squares_are_infinite_have_a_direction(rule, normal):
    """Who looks at the direction alone takes the same step for any length of it."""
    x, g = {"w": normal(4, 3)}, normal(4, 3)
    taken = []
    for scale in (1.0, 2.0**80):
        state, steps = rule(1.0).init(x), None
        for _ in range(2):
            state, steps = rule(1.0).apply(state, x, {"w": scale * g})
        taken.append(steps["w"])
    assert float(jnp.abs(taken[0]).max()) > 0.1
    close(taken[1], taken[0])


def test_shampoo_is_differentiated_where_eigenvalues_are_equal(normal):
    """Those of few examples are, all that are 0; the root is smooth there."""
    rows, columns = normal(5, 2), normal(2, 4)

    def loss(rate):
        x, rule = {"w": jnp.ones((5, 4))}, oj.Shampoo(rate, eps=1e-2, start=0)
        state = rule.init(x)
        for _ in range(3):
            g = rows @ jnp.tanh(columns * x["w"][:2])
            state, steps = rule.apply(state, x, {"w": g})
            x = {"w": x["w"] - steps["w"]}
        return jnp.sum(x["w"] ** 2)

    with jax.enable_x64(True):
        rows, columns = (x.astype(jnp.float64) for x in (rows, columns))
        slope, h = jax.jit(jax.grad(loss))(0.01), 1e-6
        close(slope, (loss(0.01 + h) - loss(0.01 - h)) / (2 * h), rtol=1e-6)


@pytest.mark.parametrize("prescale", ["frobenius", "spectral", "schatten", "aol"])
def test_no_prescale_loses_a_huge_gradient(prescale, normal):
    x, g = {"w": normal(4, 3)}, normal(4, 3)
    rule = oj.Muon(1.0, prescale=prescale, eps=1e-30)
    small, huge = (
        rule.apply(rule.init(x), x, {"w": scale * g})[1]["w"]
        for scale in (1.0, 2.0**80)
    )
    assert float(jnp.abs(small).max()) > 0.1
    close(huge, small)


def test_shampoo_is_differentiated_where_a_gradient_is_zero():
    inputs = jnp.array([[1.0, 2.0, 0.0]])

    def loss(rate):
        model = {"w": jnp.ones((3, 2))}
        state = oj.setup(oj.Shampoo(rate), model)
        for _ in range(2):
            grads = jax.grad(lambda m: jnp.sum(jnp.tanh(inputs @ m["w"]) ** 2))(model)
            state, model = oj.update(state, model, grads)
        return jnp.sum(model["w"] ** 2)

    with jax.enable_x64(True):
        inputs, h = inputs.astype(jnp.float64), 1e-6
        slope = jax.jit(jax.grad(loss))(0.01)
        close(slope, (loss(0.01 + h) - loss(0.01 - h)) / (2 * h), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e15])
def test_the_derivative_of_shampoo_knows_no_scale(scale, normal):
    """Its steps are alike for gradients of any size, so are their derivatives."""
    w, rule = normal(4, 3), oj.Shampoo(0.1, start=0, graft="sign")

    def after(factor):
        x = {"w": w}
        state, steps = rule.init(x), None
        for _ in range(2):
            state, steps = rule.apply(state, x, {"w": scale * factor * jnp.tanh(w)})
        return jnp.sum(steps["w"] * w)

    assert abs(float(jax.grad(after)(1.0))) < 1e-4
