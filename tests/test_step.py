"""The compiled step: any model, donation, auxiliary results, many steps at once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, Layer, Net, Pair, close, compilations, same_bits

import optimjax as oj

X = jnp.array([[0.4, -1.2, 0.8], [1.5, 0.3, -0.6]])


def weights(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make_dict():
    w = weights(3, 3)
    return {
        "first": w,
        "second": w,
        "act": jnp.tanh,
        "n": 2,
        "bias": weights(3, seed=1),
    }


def make_dataclass():
    shared = weights(3, 3)
    return [
        Layer(shared, weights(3, seed=1), "a"),
        Layer(shared, weights(3, seed=2), "b"),
    ]


def make_tuple():
    w = weights(3, 3)
    return Pair(w, {"w": w, "b": weights(3, seed=1), "text": "text"})


def apply_dict(m, x):
    return m["act"](x @ m["first"]) @ m["second"] * m["n"] + m["bias"][None]


MODELS = {
    "dict": (make_dict, apply_dict),
    "dataclass": (
        make_dataclass,
        lambda m, x: jax.vmap(lambda row: m[1](m[0](row)))(x),
    ),
    "named tuple": (
        make_tuple,
        lambda m, x: jnp.tanh(x @ m.encoder) @ m.decoder["w"] + m.decoder["b"][None],
    ),
    "equinox": (lambda: Net(jax.random.key(3)), lambda m, x: jax.vmap(m)(x)),
}


def loss_of(name):
    return lambda m, x: jnp.mean((MODELS[name][1](m, x) - x) ** 2)


def by_hand(name, rate, count):
    """Gradient descent on the trained arrays, each once, written without optimjax."""
    model, loss = MODELS[name][0](), loss_of(name)
    for _ in range(count):
        arrays = [x for x in jax.tree.leaves(model) if eqx.is_inexact_array(x)]
        unique = {id(x): x for x in arrays}

        def rebuilt(unique, model=model):
            return jax.tree.map(lambda leaf: unique.get(id(leaf), leaf), model)

        grads = jax.grad(lambda u, f=rebuilt: loss(f(u), X))(unique)
        model = rebuilt({k: x - rate * grads[k] for k, x in unique.items()})
    return model


@pytest.mark.parametrize("donate", [False, True], ids=["keep", "donate"])
@pytest.mark.parametrize("name", MODELS)
def test_any_model_trains_as_by_hand_in_one_trace(name, donate):
    """Ties, functions, strings and ints need no filter, and no step compiles twice."""
    loss = Counter(loss_of(name))
    model = MODELS[name][0]()
    step = oj.make_step(loss, donate=donate)
    state = oj.setup(oj.SGD(0.1), model)
    structure = jax.tree.structure(model)
    for t in range(3):
        with compilations() as compiled:
            state, model, value = step(state, model, X)
        assert not (t and compiled), "a later step compiled again"
        assert value.shape == ()
    assert loss.traces == 1
    assert jax.tree.structure(model) == structure
    expected = by_hand(name, 0.1, 3)
    arrays = lambda m: [x for x in jax.tree.leaves(m) if eqx.is_array(x)]  # noqa: E731
    close(arrays(model), arrays(expected))
    rest = lambda m: [x for x in jax.tree.leaves(m) if not eqx.is_array(x)]  # noqa: E731
    assert rest(model) == rest(MODELS[name][0]())


@pytest.mark.parametrize("name", MODELS)
def test_value_is_the_loss_before_the_step(name):
    """As with `value_and_grad`: a log must not show the loss of another model."""
    model = MODELS[name][0]()
    step = oj.make_step(loss_of(name))
    _, _, value = step(oj.setup(oj.Adam(0.1), model), model, X)
    close(value, loss_of(name)(model, X))


@pytest.mark.parametrize("name", ["dict", "equinox"])
def test_auxiliary_result(name):
    """What the loss returns besides comes out as it is, from one step or a scan."""

    def loss(m, x):
        out = MODELS[name][1](m, x)
        return jnp.mean(out**2), {"out": out, "n": jnp.array(3)}

    model = MODELS[name][0]()
    step = oj.make_step(loss, has_aux=True)
    state = oj.setup(oj.SGD(0.1), model)
    after, new, (value, aux) = step(state, model, X)
    close(aux["out"], MODELS[name][1](model, X))
    assert int(aux["n"]) == 3 and value.shape == ()
    after, new, (_, aux) = step(after, new, X)
    _, last, (values, many) = step.scan(state, model, jnp.stack([X, X]))
    assert values.shape == (2,) and many["out"].shape == (2, *aux["out"].shape)
    close(many["out"][1], aux["out"])
    close(jax.tree.leaves(oj.trainables(last)), jax.tree.leaves(oj.trainables(new)))


@pytest.mark.parametrize(
    ("name", "donate"), [("dict", False), *((name, True) for name in MODELS)]
)
def test_scan_equals_the_loop(name, donate):
    """Many steps in one dispatch give the same state, model and losses."""
    batches = jnp.stack([X, -X, X + 1])
    make = MODELS[name][0]
    rule = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.Adam(0.1))
    step = oj.make_step(loss_of(name), donate=donate)
    state, model, values = oj.setup(rule, make()), make(), []
    for x in batches:
        state, model, value = step(state, model, x)
        values.append(value)
    model_ = make()
    state_, model_, losses = step.scan(oj.setup(rule, model_), model_, batches)
    close(losses, np.array(values))
    close(state_, state)
    assert list(oj.trainables(model_)) == list(oj.trainables(model))
    close(dict(oj.trainables(model_)), dict(oj.trainables(model)), 1e-4, 1e-6)
    assert str(oj.find_ties(model_)) == str(oj.find_ties(make()))


def test_scan_by_length_and_over_trees_of_batches():
    """Full-batch training has no batch to scan over; other batches are trees."""
    model = {"w": jnp.array([4.0])}
    state = oj.setup(oj.SGD(0.25), model)
    step = oj.make_step(lambda m, x, y: jnp.sum(m["w"] * x["x"] * y))
    _, new, losses = step.scan(
        state, model, {"x": jnp.array([1.0, 2.0, 3.0])}, jnp.array([2.0, 2.0, -1.0])
    )
    close(new["w"], np.array([4 - 0.25 * (2 + 4 - 3)]))
    assert losses.shape == (3,)
    full = oj.make_step(lambda m: jnp.sum(m["w"] ** 2) / 2)
    _, new, losses = full.scan(state, model, length=4)
    close(new["w"], np.array([4 * 0.75**4]))
    close(losses, 8 * 0.75 ** (2 * np.arange(4)))


def test_donation_is_off_unless_asked_for():
    """Parameters kept for evaluation must not be deleted behind one's back."""
    model = make_dict()
    step = oj.make_step(loss_of("dict"))
    state = oj.setup(oj.Adam(0.1), model)
    step(state, model, X)
    step.scan(state, model, X[None])
    for leaf in jax.tree.leaves((state, model)):
        assert not (isinstance(leaf, jax.Array) and leaf.is_deleted())
    assert "donate" in oj.make_step.__doc__ and "cannot read" in oj.make_step.__doc__


@pytest.mark.parametrize("scan", [False, True], ids=["step", "scan"])
def test_donation_reuses_state_and_trained_arrays_and_nothing_else(scan):
    """The batch, the caller's scalars and what is not trained stay readable."""
    rate = jnp.asarray(0.25)
    model = {"w": weights(64, 64), "n": jnp.arange(3), "kept": jnp.ones(4)}
    state = oj.setup(oj.SGD(rate, momentum=0.5), model, trainable="w")
    step = oj.make_step(lambda m, x: jnp.sum(m["w"] * x) + m["kept"][0], donate=True)
    x = jnp.asarray(1.0)
    for _ in range(2):
        before = state, model
        if scan:
            state, model, _ = step.scan(state, model, x[None])
        else:
            state, model, _ = step(state, model, x)
        assert before[1]["w"].is_deleted()
        assert before[0].slots["w"].v.is_deleted()
    for leaf in (rate, x, model["n"], model["kept"]):
        assert not leaf.is_deleted()
    close(model["w"], weights(64, 64) - 0.25 * (1 + 1.5), atol=1e-6)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda s: oj.freeze(s, "first"),
        lambda s: oj.thaw(oj.freeze(s, "*")),
        lambda s: oj.adjust(s, where="bias", learning_rate=0.2),
        lambda s: oj.adjust(s, learning_rate=jnp.asarray(0.2), eps=jnp.asarray(1e-7)),
        lambda s: oj.align(s, {**dict.fromkeys(make_dict())}),
    ],
)
def test_donation_works_after_every_change_of_the_state(prepare):
    """Freezing or adjusting must not leave one buffer in two leaves."""
    model = make_dict()
    step = oj.make_step(loss_of("dict"), donate=True)
    plain = oj.make_step(loss_of("dict"))
    state = prepare(oj.setup(oj.Adam(0.1), model))
    copy = prepare(oj.setup(oj.Adam(0.1), make_dict()))
    other = make_dict()
    for _ in range(2):
        state, model, _ = step(state, model, X)
        copy, other, _ = plain(copy, other, X)
        same_bits(model, other)


def test_numpy_model_can_be_donated():
    """A model fresh from a file is NumPy; donation must neither warn nor touch it."""
    w = np.ones((2, 2), np.float32)
    model = {"a": w, "b": w}
    step = oj.make_step(lambda m: jnp.sum(m["a"] * m["b"]), donate=True)
    state = oj.setup(oj.SGD(0.25), model)
    state, model, _ = step(state, model)
    state, model, _ = step(state, model)
    close(model["a"], np.full((2, 2), 0.25))
    assert np.all(w == 1)


def test_other_values_of_leaves_that_are_not_trained_are_used():
    """A cached constant must not outlive its change: arrays as data, others as keys."""
    loss = Counter(lambda m: jnp.sum(m["w"] * m["n"].astype(jnp.float32)) * m["k"])
    step = oj.make_step(loss)
    model = {"w": jnp.array([1.0]), "n": jnp.array([2]), "k": 1.0}
    state = oj.setup(oj.SGD(0.5), model)
    for n in (2, 3, 4):
        _, new, _ = step(state, {**model, "n": jnp.array([n])})
        close(new["w"], np.array([1 - 0.5 * n]))
    assert loss.traces == 1
    for k in (2.0, 3.0, 2.0):
        _, new, _ = step(state, {**model, "k": k})
        close(new["w"], np.array([1 - 0.5 * 2 * k]))
    assert loss.traces == 3


def test_one_step_serves_many_models():
    """Ensembles and tests share a step; each call must use its own state and model."""
    step = oj.make_step(lambda m: sum(jnp.sum(x**2) for x in jax.tree.leaves(m)) / 2)
    for model, rate in [
        ({"a": jnp.array([2.0])}, 0.5),
        ([jnp.array([2.0]), jnp.array([4.0, 1.0])], 0.25),
        ({"a": jnp.array([2.0])}, 0.125),
        (jnp.array([2.0]), 0.25),
    ]:
        _, new, _ = step(oj.setup(oj.SGD(rate), model), model)
        close(new, jax.tree.map(lambda x, r=rate: np.asarray(x) * (1 - r), model))


def test_rules_that_need_the_loss_get_it():
    """A rule that declares `needs = ("value",)` must not fail at run time."""

    @oj.rule
    class ByValue(oj.Rule):
        """Steps as long as the loss."""

        needs = ("value",)
        scale: oj.Hyper = 1.0

        def init(self, params):
            return None

        def apply(self, state, params, grads, *, value, **context):
            return state, jax.tree.map(lambda g: self.scale * value * g, grads)

    model = {"w": jnp.array([3.0])}
    state = oj.setup(oj.Chain(ByValue(0.5), oj.SGD(0.5)), model)
    _, new, value = oj.make_step(lambda m: jnp.sum(m["w"] * 2))(state, model)
    close(new["w"], np.array([3 - 0.5 * 0.5 * 6 * 2]))
    _, same = oj.update(state, model, {"w": jnp.array([2.0])}, value=value)
    close(same, new)
    with pytest.raises(TypeError, match="value"):
        oj.update(state, model, {"w": jnp.array([2.0])})


def test_step_under_debugging_switches():
    """`disable_jit`, `debug_nans` and leak checks are how people find their bugs."""
    model = make_dict()
    state = oj.setup(oj.Adam(0.1), model)
    step = oj.make_step(loss_of("dict"))
    expected = step(state, model, X)[1]["first"]
    with jax.disable_jit():
        eager = oj.make_step(loss_of("dict"))(state, model, X)[1]
    close(eager["first"], expected)
    with jax.debug_nans(True), jax.checking_leaks():
        close(oj.make_step(loss_of("dict"))(state, model, X)[1]["first"], expected)


def test_step_inside_a_transformation():
    """A compiled step inside `jit` or `vmap` is part of a larger program."""
    model = {"a": jnp.array([1.0, 2.0]), "f": jnp.tanh}
    step = oj.make_step(lambda m: jnp.sum(m["f"](m["a"])))
    state = oj.setup(oj.SGD(0.1), model)
    expected = step(state, model)[1]["a"]

    @jax.jit
    def inside(state, a):
        return step(state, {**model, "a": a})[1]["a"]

    close(inside(state, model["a"]), expected)
    rates = jnp.array([0.1, 0.2])
    many = jax.vmap(
        lambda rate: step(oj.adjust(state, learning_rate=rate), model)[1]["a"]
    )(rates)
    close(many[0], expected)
    close(many[1], 2 * expected - model["a"])


def test_frozen_slots_need_no_gradient():
    """What is frozen is not differentiated: its backward pass costs nothing."""

    @jax.custom_vjp
    def forward_only(x):
        return x

    def backward(_, g):
        raise AssertionError("differentiated")

    forward_only.defvjp(lambda x: (x, None), backward)
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    step = oj.make_step(lambda m: jnp.sum(forward_only(m["a"]) * m["b"]))
    state = oj.freeze(oj.setup(oj.SGD(0.1), model), "a")
    _, new, _ = step(state, model)
    close(new["b"], np.full(2, 0.9))
    same_bits(new["a"], model["a"])
    with pytest.raises(AssertionError, match="differentiated"):
        step(oj.thaw(state), model)


def test_a_second_model_with_a_shared_buffer_can_be_donated():
    step = oj.make_step(lambda m: jnp.sum(m["a"] ** 2) + m["b"].sum(), donate=True)

    def run(model):
        return step(oj.setup(oj.SGD(0.1), model, ties=None), model)[1]

    run({"a": jnp.ones(3), "b": jnp.ones(3)})
    a = jnp.ones(3)
    new = run({"a": a, "b": jax.device_put(a, jax.devices()[0])})
    np.testing.assert_allclose(new["a"], 0.8, rtol=1e-6)
    np.testing.assert_allclose(new["b"], 0.9, rtol=1e-6)


def test_sharpness_of_a_model_that_is_all_frozen():
    model = {"a": jnp.ones(3), "b": jnp.ones(2)}
    state = oj.freeze(oj.setup(oj.SGD(0.1), model), "*")
    step = oj.make_step(lambda m: m["a"].sum(), sam=0.1)
    _, new, value = step(state, model)
    assert float(value) == 3.0 and new["a"] is model["a"]
