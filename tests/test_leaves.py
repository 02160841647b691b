"""Odd leaves, odd containers and odd uses that a library must survive."""

import copy
import dataclasses
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Counter, Net, Pair, close, same_bits, signatures

import optimjax as oj


@dataclasses.dataclass
class Config:
    """A plain dataclass: compared by value, hence not hashable."""

    size: int = 3


UNHASHABLE = {
    "dataclass": Config(),
    "set": {1, 2},
    "strings": np.array(["a", "b"]),
    "objects": np.array([None, 1], object),
    "bytearray": bytearray(b"ab"),
}


@pytest.mark.parametrize("name", UNHASHABLE)
def test_leaves_that_cannot_be_hashed_are_carried(name):
    """A config object in the model must not stop the compiled step."""
    leaf = UNHASHABLE[name]
    model = {"w": jnp.array([1.0, 2.0]), "leaf": leaf}
    loss = Counter(lambda m: jnp.sum(m["w"] ** 2))
    step = oj.make_step(loss)
    state = oj.setup(oj.SGD(0.25), model)
    for _ in range(3):
        state, model, _ = step(state, model)
        assert model["leaf"] is leaf
    assert loss.traces == 1
    state, model, _ = step.scan(state, model, length=1)
    assert model["leaf"] is leaf
    close(model["w"], np.array([1.0, 2.0]) / 16)


def test_constants_that_compare_equal_are_told_apart():
    """1, 1.0 and True are equal, and so are 0.0 and -0.0; what they compute is not."""

    def loss(m):
        return jnp.sum(m["w"]), jnp.asarray(m["k"])

    step = oj.make_step(loss, has_aux=True)
    state = oj.setup(oj.SGD(0.1), {"w": jnp.ones(1), "k": 1})
    for k, dtype in [(1, "int32"), (1.0, "float32"), (True, "bool"), (1, "int32")]:
        _, new, (_, aux) = step(state, {"w": jnp.ones(1), "k": k})
        assert aux.dtype == dtype
        assert type(new["k"]) is type(k)
    for k in (0.0, -0.0, 0.0):
        _, _, (_, aux) = step(state, {"w": jnp.ones(1), "k": k})
        assert np.signbit(aux) == np.signbit(k)


def test_keys_masks_and_counts_in_a_scan():
    """Arrays that are not trained are no part of the carry, and come out unchanged."""
    model = {
        "w": jnp.array([2.0]),
        "key": jax.random.key(3),
        "mask": jnp.array([True]),
        "n": np.array([2]),
        "none": None,
    }

    def loss(m, x):
        noise = jax.random.normal(m["key"], (1,))
        kept = jnp.where(m["mask"], m["w"] * x + 0 * noise, 0.0)
        return jnp.sum(kept) * m["n"].astype(jnp.float32)[0]

    step = oj.make_step(loss, donate=True)
    state = oj.setup(oj.SGD(0.5), model)
    state, new, _ = step(state, model, jnp.float32(1))
    state, new, _ = step.scan(state, new, jnp.array([1.0, 0.5]))
    close(new["w"], np.array([2 - 2.5]))
    for name in ("key", "mask", "n"):
        assert new[name] is model[name]


@pytest.mark.parametrize(
    "model",
    [
        {0: jnp.array([1.0]), 1: {2: jnp.array([2.0])}},
        {(0, "a"): jnp.array([1.0]), (1, "b"): jnp.array([2.0])},
        {"": jnp.array([1.0]), "a": {"": jnp.array([2.0])}},
        {"a b": jnp.array([1.0]), "ü/é": jnp.array([2.0])},
        [[[jnp.array([1.0])], []], (), {"x": jnp.array([2.0])}],
    ],
    ids=["ints", "tuples", "empty", "text", "empty containers"],
)
def test_keys_of_any_kind_make_paths(model):
    """Each path that is shown is a path that `where=` takes."""
    state = oj.setup(oj.Adam(0.1), model)
    assert len(state.slots) == 2
    for path in state.slots:
        assert oj.freeze(state, path).frozen == (path,)
    repr(state), oj.summary(state)
    _, new = oj.update(state, model, model)
    close(new, jax.tree.map(lambda x: np.asarray(x) - 0.1, model))


def test_state_can_be_copied_and_pickled():
    """A checkpoint by `pickle` and a `deepcopy` go on bit for bit."""
    w = jnp.array([[1.0, 2.0]])
    model = Pair(w, w.T)
    ties = {"decoder": ("encoder", jnp.transpose)}
    rule = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.Adam({"*": 0.1}))
    state, model = oj.update(oj.setup(rule, model, ties=ties), model, model)
    run = jax.jit(Counter(oj.update))
    expected = run(state, model, model)
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        same_bits(run(copied, model, model), expected)
    assert run.__wrapped__.traces == 1


def test_states_are_trees_that_hold_anything():
    """Filters, masks and axes put other things than arrays into a state or a rule."""
    model = {"w": jnp.ones(2)}
    rule = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD({"w": 0.1}, momentum=0.5))
    for tree in (rule, oj.setup(rule, model)):
        for make in (lambda x: None, lambda x: object(), lambda x: -1.0, str):
            repr(jax.tree.map(make, tree))
        leaves, structure = jax.tree.flatten(tree)
        assert jax.tree.structure(structure.unflatten(leaves)) == structure
    state = oj.setup(rule, model)
    kept, rest = eqx.partition(state, eqx.is_inexact_array)
    same_bits(eqx.combine(kept, rest), state)


def test_gradient_with_respect_to_a_whole_rule():
    """Its slopes are a rule of negative numbers, which no range check may stop."""
    rule = oj.SGD(0.5, momentum=0.25)
    x = {"w": jnp.array([2.0])}

    def after(rule):
        state, steps = rule.apply(rule.init(x), x, x)
        _, more = rule.apply(state, x, x)
        return jnp.sum(-steps["w"] - more["w"])

    slopes = jax.grad(after)(rule)
    close(slopes.learning_rate, np.array(-2 - 2.5))
    close(slopes.momentum, np.array(-1.0))


def test_rules_cannot_be_changed_in_place():
    """`rule.learning_rate = ...` would change nothing that runs: it is an error."""
    rule = oj.SGD(0.1)
    with pytest.raises(AttributeError, match="learning_rate"):
        rule.learning_rate = 0.2
    state = oj.setup(rule, jnp.ones(2))
    with pytest.raises(AttributeError, match="rule"):
        state.rule = rule


@pytest.mark.parametrize(
    "make",
    [
        lambda c: 1,
        lambda c: 0.5,
        lambda c: np.float64(0.5),
        lambda c: jnp.asarray(0.5, jnp.bfloat16),
        lambda c: jnp.float32(0.5),
        lambda c: c,
        lambda c: 0.5 / (c + 1),
        lambda c: jnp.where(c < 1, 0.25, 0.5),
    ],
)
def test_schedules_may_return_any_kind_of_number(make):
    """What a schedule returns moves no dtype and no trace."""
    model = {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(1)}
    state = oj.setup(oj.SGD(make, momentum=make), model)
    update = Counter(oj.update)
    run = jax.jit(update)
    for _ in range(2):
        after, new = run(state, model, model)
        assert signatures((after, new)) == signatures((state, model))
        state, model = after, new
    assert update.traces == 1


def test_everything_frozen_is_a_step_that_does_nothing():
    """The last part of a model may be frozen too; evaluation goes on."""
    model = {"a": jnp.array([1.0]), "b": jnp.array([2.0])}
    state = oj.freeze(oj.setup(oj.Adam(0.1), model), "*")
    step = oj.make_step(lambda m: jnp.sum(m["a"] * m["b"]), donate=True)
    state, new, value = step(state, model)
    close(value, np.array(2.0))
    same_bits(new, {"a": jnp.array([1.0]), "b": jnp.array([2.0])})


@pytest.mark.parametrize("value", [0.0, 1e-30])
def test_clipping_of_nothing_is_nothing(value):
    """A zero gradient has norm 0: dividing by it must not make a NaN."""
    model = {"w": jnp.ones(2)}
    rule = oj.Chain(oj.ClipByGlobalNorm(1.0), oj.SGD(1.0))
    grads = {"w": jnp.full(2, value, jnp.float32)}
    _, new = oj.update(oj.setup(rule, model), model, grads)
    same_bits(new, model)

    def after(g):
        return jnp.sum(oj.update(oj.setup(rule, model), model, {"w": g})[1]["w"])

    assert np.all(np.isfinite(jax.grad(after)(grads["w"])))


def test_a_tree_wide_value_cannot_differ_by_path():
    """One norm has one limit."""
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    for make in (
        lambda: oj.setup(oj.ClipByGlobalNorm({"a": 1.0, "b": 2.0}), model),
        lambda: oj.adjust(
            oj.setup(oj.ClipByGlobalNorm(1.0), model), where="a", max_norm=2.0
        ),
    ):
        with pytest.raises((TypeError, ValueError), match="max_norm"):
            make()


def test_vector_of_mixed_dtypes():
    """`destructure` gives one vector, and each leaf its own dtype back."""
    model = {
        "a": jnp.array([1.0, 2.0], jnp.bfloat16),
        "b": jnp.array([[0.1]]),
        "z": jnp.array([1 + 2j], jnp.complex64),
    }
    for names, dtype in [
        ("ab", jnp.float32),
        ("abz", jnp.complex64),
        ("a", "bfloat16"),
    ]:
        part = {k: model[k] for k in names}
        vector, rebuild = oj.destructure(part)
        assert vector.dtype == dtype
        same_bits(rebuild(vector), part)


def test_other_wrappers_of_jit():
    """`eqx.filter_jit` and `while_loop` take a state as they take any tree."""
    net = Net(jax.random.key(0))
    x = jnp.array([0.5, -1.0, 2.0])
    state = oj.setup(oj.Adam(0.1), net)
    grads = eqx.filter_grad(lambda net: jnp.sum(net(x)))(net)
    after, new = eqx.filter_jit(oj.update)(state, net, grads)
    # A `jit` returns two buffers for a tie: the ties are those of the state.
    arrays = oj.trainables(new, ties=after.ties)
    close(arrays, oj.trainables(oj.update(state, net, grads)[1]))
    model = {"w": jnp.array([1.0])}
    state = oj.setup(oj.SGD(0.5), model)
    carry = jax.lax.while_loop(
        lambda c: c[1]["w"][0] > 0.2, lambda c: oj.update(*c, c[1]), (state, model)
    )
    close(carry[1]["w"], np.array([0.125]))


def test_donation_by_the_users_own_jit():
    """`update` under `jit(..., donate_argnums=(0, 1))` works from the first step on."""
    model = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    state = oj.setup(oj.Adam(0.1), model)
    run = jax.jit(oj.update, donate_argnums=(0, 1))
    for _ in range(2):
        state, model = run(state, model, {"a": jnp.ones(3), "b": -jnp.ones(3)})
    close(model["a"], np.full(3, -0.2), rtol=1e-4)


def test_adam_without_momentum_keeps_no_moment():
    """CASES 47: what is not there takes no memory."""
    x = {"w": jnp.ones((3, 4)), "b": jnp.ones(2, jnp.bfloat16)}
    for rule in (oj.Adam, oj.AdamW):
        state, model = oj.setup(rule(0.1, b1=None), x), x
        assert sum(a.size for a in jax.tree.leaves(state.inner)) == 14 + 1  # v, count
        usual, expected = oj.setup(rule(0.1, b1=0.0), x), x
        for i in range(3):
            grads = jax.tree.map(lambda a, i=i: (i - 1.5) * a, model)
            state, model = oj.update(state, model, grads)
            usual, expected = oj.update(usual, expected, grads)
        close(model, expected, rtol=1e-6)
    with pytest.raises(TypeError, match="NAdam: b1 is None"):
        oj.NAdam(b1=None)
