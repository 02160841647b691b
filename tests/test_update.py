"""`update`: missing gradients, leaves that are carried, purity, fixed-point state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, Layer, Net, Pair, close, numpy_adam, same_bits, signatures

import optimjax as oj

RULES = {
    "sgd": oj.SGD(0.1),
    "momentum": oj.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": oj.Adam(0.1),
    "adamw": oj.AdamW(0.1, weight_decay=0.2),
    "chain": oj.Chain(oj.ClipByGlobalNorm(1.5), oj.WeightDecay(0.1), oj.Adam(0.1)),
    "partition": oj.Partition(
        {"x": oj.Adam(0.1), "y": oj.SGD(0.2, momentum=0.8)}, {"a": "x", "*": "y"}
    ),
}


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


def skipped(count):
    """A tree of gradients with a hole, and the paths of the hole."""
    g = arrays((2,), (3,), (2, 2), (1,), seed=10 + count)
    return {"a": g[0], "b": {"c": g[1], "d": g[2]}, "e": g[3]}


HOLES = {
    "leaf": lambda g: {**g, "e": None},
    "branch": lambda g: {**g, "b": None},
    "leaf in branch": lambda g: {**g, "b": {**g["b"], "d": None}},
    "everything": lambda g: None,
    "float0": lambda g: {**g, "e": np.zeros((1,), jax.dtypes.float0)},
    "float0 branch": lambda g: {
        **g,
        "b": jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), g["b"]),
    },
}


def missing(grads, path):
    """Whether `grads` has no gradient at the slash-separated `path`."""
    for key in path.split("/"):
        if grads is None:
            return True
        grads = grads[key]
    return grads is None or grads.dtype == jax.dtypes.float0


def at(tree, path):
    for key in path.split("/"):
        tree = tree[key]
    return tree


@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.parametrize("name", ["momentum", "adam", "chain", "partition"])
def test_missing_gradient_is_no_step_and_not_a_zero_gradient(name, hole):
    """A skipped slot must neither decay, coast on momentum, nor age its counts.

    Its whole trajectory is the one of a run that never had the skipped updates.
    """
    model = skipped(-10)
    paths = ["a", "b/c", "b/d", "e"]
    state = oj.setup(RULES[name], model)
    # The reference sees only the gradients that were there, slot by slot. A global
    # norm would couple the slots: large enough here never to clip.
    rule = RULES[name]
    if name == "chain":
        rule = oj.Chain(oj.ClipByGlobalNorm(1e6), *rule.rules[1:])
        state = oj.setup(rule, model)
    alone = {
        p: (oj.setup(rule_of(rule, p), {p: at(model, p)}), {p: at(model, p)})
        for p in paths
    }
    for t in range(6):
        grads = skipped(t)
        if t in (0, 1, 3):
            grads = HOLES[hole](grads)
        before = model
        state, model = oj.update(state, model, grads)
        for p in paths:
            if missing(grads, p):
                same_bits(at(model, p), at(before, p))
            else:
                s, m = alone[p]
                alone[p] = oj.update(s, m, {p: at(grads, p)})
            same_bits(at(model, p), alone[p][1][p])


def rule_of(rule, path):
    """What acts on the slot at `path`, as a rule for it alone."""
    if isinstance(rule, oj.Partition):
        return rule.rules["x" if path == "a" else "y"]
    return rule


@pytest.mark.parametrize("name", RULES)
def test_skipped_slot_keeps_all_that_the_state_holds_for_it(name):
    """Moments and step count of a slot without gradient stay bit for bit."""
    model = skipped(-10)
    state = oj.setup(RULES[name], model)
    state, model = oj.update(state, model, skipped(0))
    hole = {**skipped(1), "e": None}
    state = oj.align(state, hole)
    after, _ = oj.update(state, model, hole)
    if "e" in state.slots:
        same_bits(after.slots["e"], state.slots["e"])
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(state.inner),
        jax.tree.leaves(after.inner),
        strict=True,
    )
    for (path, x), y in pairs:
        if "'e'" in jax.tree_util.keystr(path):
            same_bits(x, y)


def test_update_without_any_gradient_changes_nothing():
    """All gradients None is no step: not even a count may move."""
    model = skipped(0)
    state = oj.setup(oj.Adam(lambda count: 0.1 / (1 + count)), model)
    state, model = oj.update(state, model, skipped(1))
    after, same = oj.update(state, model, None)
    same_bits(same, model)
    after, new = oj.update(after, model, skipped(2))
    direct = oj.update(state, model, skipped(2))
    same_bits(new, direct[1])


@pytest.mark.parametrize("place", ["encoder", "decoder"])
def test_one_of_two_tied_places_without_gradient(place):
    """The other place's gradient is the whole sum; the array takes its step."""
    w, g = arrays((2, 3), (2, 3))
    state = oj.setup(oj.Adam(0.1), Pair(w, w))
    _, new = oj.update(state, Pair(w, w), Pair(None, None)._replace(**{place: g}))
    close(new.encoder, numpy_adam(w, [g], 0.1))
    assert new.encoder is new.decoder
    _, same = oj.update(state, Pair(w, w), Pair(None, None))
    same_bits(same.encoder, w)


def test_float0_of_an_integer_leaf_is_accepted():
    """`jax.grad(..., allow_int=True)` gives float0 where there is nothing to give."""
    model = {"w": jnp.array([2.0, -1.0]), "n": jnp.array([3, 4]), "f": jnp.array(True)}

    def loss(m):
        return jnp.sum(m["w"] ** 2 * m["n"].astype(jnp.float32))

    grads = jax.grad(loss, allow_int=True)(model)
    assert grads["n"].dtype == jax.dtypes.float0
    state = oj.setup(oj.SGD(0.1), model)
    for run in (oj.update, jax.jit(oj.update)):
        _, new = run(state, model, grads)
        close(new["w"], model["w"] - 0.1 * grads["w"])
        same_bits(new["n"], model["n"])
        same_bits(new["f"], model["f"])


def test_leaves_that_are_not_trained_come_through_as_the_same_objects():
    """Nothing is copied, cast or rebuilt that is not trained."""
    leaves = {
        "int": jnp.arange(3),
        "bool": np.array([True, False]),
        "key": jax.random.key(0),
        "text": "text",
        "none": None,
        "function": jnp.tanh,
        "number": 10**20,
        "float": 0.1 + 0.2,
        "uint8": np.arange(3, dtype=np.uint8),
    }
    model = {**leaves, "w": jnp.ones(2)}
    state = oj.setup(oj.Adam(0.1), model)
    assert list(state.slots) == ["w"]
    grads = {**dict.fromkeys(leaves), "w": jnp.ones(2)}
    _, new = oj.update(state, model, grads)
    step = oj.make_step(lambda m: jnp.sum(m["w"]))
    _, stepped, _ = step(state, model)
    for name, leaf in leaves.items():
        assert new[name] is leaf, name
        assert stepped[name] is leaf, name


def test_whole_equinox_model_equals_the_filtered_one():
    """Functions in the tree need no `eqx.filter`, and change no number."""
    import equinox as eqx

    net = eqx.nn.MLP(2, 1, 3, 1, activation=jax.nn.relu, key=jax.random.key(1))
    assert jax.nn.relu in [x for x in jax.tree.leaves(net) if callable(x)]
    x = jnp.array([0.4, -1.2])
    grads = eqx.filter_grad(lambda net: jnp.sum(net(x) ** 2))(net)
    whole = oj.update(oj.setup(oj.Adam(0.1), net), net, grads)[1]
    part = eqx.filter(net, eqx.is_inexact_array)
    filtered = oj.update(oj.setup(oj.Adam(0.1), part), part, grads)[1]
    same_bits(eqx.filter(whole, eqx.is_inexact_array), filtered)
    assert whole.activation is net.activation
    assert whole(x).shape == (1,)


def test_a_rule_gets_the_parameters_without_being_handed_them():
    """A rule that decays must not depend on an optional argument of the user."""
    model = {"w": jnp.array([2.0])}
    state = oj.setup(oj.AdamW(0.1, weight_decay=0.5), model)
    _, new = oj.update(state, model, {"w": jnp.array([0.0])})
    close(new["w"], np.array([2.0 - 0.1 * 0.5 * 2.0]))


def test_update_leaves_its_arguments_readable_and_unchanged():
    """Old parameters kept for evaluation are not 'deleted' by a plain update."""
    model = skipped(0)
    grads = skipped(1)
    state = oj.setup(oj.Adam(0.1), model)
    kept = jax.tree.map(lambda x: np.array(x), (state, model, grads))
    oj.update(state, model, grads)
    jax.jit(oj.update)(state, model, grads)
    step = oj.make_step(lambda m, g: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, m, g))))
    step(state, model, grads)
    same_values = jax.tree.map(np.array_equal, (state, model, grads), kept)
    assert all(jax.tree.leaves(same_values))


@pytest.mark.parametrize("name", RULES)
def test_state_is_a_fixed_point_and_each_step_compiles_once(name):
    """The second step must not recompile: state in and state out are alike."""
    model = skipped(0)
    state = oj.setup(RULES[name], model)
    update = Counter(oj.update)
    run = jax.jit(update)
    for t in range(4):
        after, model = run(state, model, skipped(t))
        assert signatures(after) == signatures(state)
        state = after
    assert update.traces == 1 and run._cache_size() == 1


@pytest.mark.parametrize("make", [lambda: jnp.asarray(1.5), lambda: jnp.asarray(-2.0)])
@pytest.mark.parametrize("name", RULES)
def test_weakly_typed_parameters_stay_so_and_cost_one_trace(name, make):
    """`jnp.asarray(1.0)` is weakly typed; that must not recompile each step."""
    model = {"a": make(), "b": jnp.array([1.0, 2.0])}
    assert model["a"].weak_type
    state = oj.setup(RULES[name], model)
    update = Counter(oj.update)
    run = jax.jit(update)
    grads = {"a": jnp.float32(0.5), "b": jnp.array([0.1, -0.1])}
    first = signatures((state, model))
    for _ in range(4):
        state, model = run(state, model, grads)
        assert signatures((state, model)) == first
    assert update.traces == 1
    eager, _ = oj.update(state, model, grads)
    assert signatures(eager) == signatures(state)


@pytest.mark.parametrize("name", RULES)
def test_every_value_in_the_state_is_an_array(name):
    """A Python int as step count would compile anew at each step."""
    state = oj.setup(RULES[name], skipped(0))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    state, _ = oj.update(state, skipped(0), {**skipped(1), "e": None})
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    assert not any(x.weak_type for x in jax.tree.leaves(state))


@pytest.mark.parametrize("name", RULES)
def test_counts_at_their_limit_stay_there(name):
    """A run longer than 2^31 updates must not turn round at the overflow."""
    model = skipped(0)
    state = oj.setup(RULES[name], model)
    state, _ = oj.update(state, model, {**skipped(1), "e": None})
    top = np.iinfo(np.int32).max
    state = jax.tree.map(
        lambda x: jnp.full_like(x, top) if jnp.issubdtype(x.dtype, jnp.integer) else x,
        state,
    )
    grads = jax.tree.map(jnp.ones_like, model)
    for _ in range(2):
        state, new = oj.update(state, model, grads)
        counts = [
            x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.integer)
        ]
        assert all(c >= 0 for c in counts)
        assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(new))
    if name in ("sgd", "adam"):
        assert all(
            bool(jnp.all(x < y))
            for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(model), strict=True)
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_gradients_propagate(bad):
    """A blow-up has to be seen, not silently turned into a number."""
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = oj.setup(oj.Adam(0.1), model)
    grads = {"a": jnp.array([bad, 1.0]), "b": jnp.ones(2)}
    _, new = oj.update(state, model, grads)
    assert not np.isfinite(new["a"][0]) and np.isfinite(new["a"][1])
    assert np.isfinite(new["b"]).all()


def test_update_composes_with_transformations():
    """`jit`, `vmap`, `grad`, `scan`, `eval_shape` and `checkpoint` change nothing."""
    model, grads = {"a": skipped(0)["a"]}, {"a": skipped(1)["a"]}
    state = oj.setup(oj.Adam(0.1), model)
    expected = oj.update(state, model, grads)
    shapes = jax.eval_shape(oj.update, state, model, grads)
    assert signatures(shapes) == signatures(expected)
    close(jax.jit(oj.update)(state, model, grads)[1], expected[1])
    close(jax.checkpoint(oj.update)(state, model, grads)[1], expected[1])
    (_, last), _ = jax.lax.scan(
        lambda c, g: (oj.update(*c, g), None),
        (state, model),
        jax.tree.map(lambda g: g[None], grads),
    )
    close(last, expected[1])
    many = jax.tree.map(lambda g: jnp.stack([g, 2 * g, -g]), grads)
    batched = jax.vmap(oj.update, in_axes=(None, None, 0))(state, model, many)[1]
    third = oj.update(state, model, jax.tree.map(lambda g: -g, grads))[1]
    close(jax.tree.map(lambda x: x[2], batched), third)

    def after(grads):
        return jnp.sum(oj.update(oj.setup(oj.SGD(0.5), model), model, grads)[1]["a"])

    close(jax.grad(after)(grads)["a"], np.full(2, -0.5))


@pytest.mark.parametrize(
    "model",
    [jnp.ones(3), [jnp.ones(3)], (jnp.ones(()),), Layer(jnp.ones(3), None)],
    ids=["array", "list", "scalar", "dataclass"],
)
def test_models_of_any_shape(model):
    """One bare array is a model, and so is a scalar in a tuple."""
    state = oj.setup(oj.SGD(0.5), model)
    _, new = oj.update(state, model, model)
    close(new, jax.tree.map(lambda x: np.asarray(x) / 2, model))
    assert len(state.slots) == 1


def test_net_keeps_python_float_that_no_gradient_arrives_for():
    """A Python float is a setting of the model, not a parameter."""
    net = Net(jax.random.key(0))
    assert not any("scale" in path for path in oj.trainables(net))
