"""Leaves that are one array have one slot, one summed gradient and one step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Layer, Net, close, numpy_adam

import optimjax as oj

G1 = {
    "W": jnp.array([[0.94506115, 0.57208484], [-0.76053166, -0.46038148]]),
    "b": jnp.array([0.7, -0.3]),
}
G2 = {
    "W": jnp.array([[0.1319, 0.296789], [0.1380123, 0.310542]]),
    "b": jnp.array([0.4, 0.9]),
}


def weights(shape=(2, 3), seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_layer_used_twice_takes_one_adam_step_with_the_sum():
    """Two states and two steps drive a shared layer elsewhere than its gradient."""
    layer = {"W": weights((2, 2)), "b": weights((2,), 1)}
    model, grads = [layer, layer], [G1, G2]
    state = oj.setup(oj.Adam(0.1), model)
    assert list(state.slots) == ["0/W", "0/b"]
    state, tied = oj.update(state, model, grads)

    expected = {k: numpy_adam(layer[k], [G1[k] + G2[k]], 0.1) for k in layer}
    close(tied[0], expected)
    assert tied[0]["W"] is tied[1]["W"] and tied[0]["b"] is tied[1]["b"]

    # All four signs of the sum are those of G1; both rows of G2 are positive.
    by_sum = [[0.1, 0.1], [-0.1, -0.1]]
    close(layer["W"] - tied[0]["W"], np.array(by_sum), rtol=1e-4)
    apart = oj.setup(oj.Adam(0.1), model, ties=None)
    _, two = oj.update(apart, model, grads)
    two_states = 2 * layer["W"] - two[0]["W"] - two[1]["W"]
    close(two_states, np.array([[0.2, 0.2], [0, 0]]), rtol=1e-4, atol=1e-6)

    one, moved = oj.setup(oj.Adam(0.1), layer), layer
    for g in grads:
        one, moved = oj.update(one, moved, g)
    two_steps = numpy_adam(layer["W"], [g["W"] for g in grads], 0.1)
    close(moved["W"], two_steps)
    assert np.abs(two_steps - np.asarray(tied[0]["W"])).min() > 0.01


def test_differentiated_layer_used_twice_equals_the_closed_over_one():
    """The sum over places is the gradient that a user gets who passes it once."""
    x = jnp.array([0.3, -0.8])

    def forward(first, second):
        hidden = jnp.tanh(first["W"] @ x + first["b"])
        return jnp.sum(jnp.tanh(second["W"] @ hidden + second["b"]))

    layer = {"W": weights((2, 2)), "b": weights((2,), 1)}
    once = jax.grad(lambda layer: forward(layer, layer))(layer)
    step = oj.make_step(lambda model: forward(*model))
    state, model = oj.setup(oj.SGD(0.5), [layer, layer]), [layer, layer]
    state, model, _ = step(state, model)
    close(model[0], jax.tree.map(lambda w, g: w - 0.5 * g, layer, once))


@pytest.mark.parametrize("sources", ["first", "second", "both"])
def test_momentum_of_a_tied_array_beside_a_copy_of_it(sources):
    """A gradient from any one place must reach the array; a copy must not move."""
    w = weights()
    model = (w, (w + 0, w))
    g, h = weights(seed=1), weights(seed=2)
    grads = {
        "first": (g, (None, None)),
        "second": (None, (None, h)),
        "both": (g, (None, h)),
    }[sources]
    total = {"first": g, "second": h, "both": g + h}[sources]
    state = oj.setup(oj.SGD(0.1, momentum=0.9), model)
    assert list(state.slots) == ["0", "1/0"]
    assert str(state.ties) == "1/1 is 0"
    v, x = 0, w
    for _ in range(3):
        state, model = oj.update(state, model, grads)
        v = 0.9 * v + total
        x = x - 0.1 * v
        close(model[0], x)
        assert model[0] is model[1][1]
        assert np.array_equal(model[1][0], w)


def test_tie_is_one_object_after_a_hundred_compiled_steps():
    """Plain `jit` returns two buffers for a tie, and loses it without a word."""
    w = weights()
    model = (w, (w + 0, w))
    step = oj.make_step(lambda m: jnp.sum((m[0] * m[1][1] - m[1][0]) ** 2), donate=True)
    state = oj.setup(oj.SGD(0.01, momentum=0.9), model)
    for _ in range(100):
        state, model, _ = step(state, model)
        assert model[0] is model[1][1]
        assert model[1][0] is not model[0]
    assert list(state.slots) == ["0", "1/0"]
    assert str(oj.find_ties(model)) == "1/1 is 0"


def test_three_places_across_containers_beside_leaves_that_are_no_arrays():
    """Ties cross container types, and nothing has to be filtered out by hand."""
    w, mask = weights(), jnp.array([True, False])
    act = jax.nn.relu
    model = {
        "a": w,
        "b": (3, w, "text", None),
        "c": Layer(w, weights((3,)), name="c"),
        "mask": mask,
        "z": act,
    }
    state = oj.setup(oj.Adam(0.1), model)
    assert list(state.slots) == ["a", "c/bias"]
    g = [weights(seed=s) for s in (1, 2, 3)]
    bias = weights((3,), 4)
    grads = {
        "a": g[0],
        "b": (None, g[1], None, None),
        "c": Layer(g[2], bias, name="c"),
        "mask": None,
        "z": None,
    }
    _, new = oj.update(state, model, grads)
    close(new["a"], numpy_adam(w, [sum(g)], 0.1))
    assert new["a"] is new["b"][1] is new["c"].weight
    assert new["mask"] is mask and new["z"] is act
    assert new["b"][0] == 3 and new["b"][2:] == ("text", None)
    close(new["c"].bias, numpy_adam(model["c"].bias, [bias], 0.1))


def test_device_put_of_a_tied_model_is_still_tied_and_can_be_donated():
    """`device_put` makes new objects over one buffer, at which `jit` fails."""
    w = weights()
    model = jax.device_put({"encoder": w, "decoder": w}, jax.devices()[0])
    assert model["encoder"] is not model["decoder"], "else this tests nothing"
    twice = "donate the same buffer twice"
    with pytest.raises(jax.errors.JaxRuntimeError, match=twice):
        jax.jit(lambda m: jax.tree.map(jnp.sin, m), donate_argnums=0)(model)
    model = jax.device_put({"encoder": w, "decoder": w}, jax.devices()[0])
    state = oj.setup(oj.Adam(0.1), model)
    assert list(state.slots) == ["decoder"]
    step = oj.make_step(lambda m: jnp.sum(m["encoder"] * m["decoder"]), donate=True)
    expected = numpy_adam(w, [2 * w], 0.1)
    state, model, _ = step(state, model)
    close(model["encoder"], expected)
    assert model["encoder"] is model["decoder"]


def test_two_biases_of_the_same_zeros_are_tied_shown_and_can_be_untied():
    """A tie nobody meant has to be seen at a glance, and to be switched off."""
    zeros = jnp.zeros(3)
    model = {"l1": {"bias": zeros}, "l2": {"bias": zeros}}
    state = oj.setup(oj.SGD(0.1), model)
    assert list(state.slots) == ["l1/bias"]
    assert "= l2/bias" in oj.summary(state)

    apart = oj.setup(oj.SGD(0.1), model, ties=None)
    assert list(apart.slots) == ["l1/bias", "l2/bias"]
    assert "= l2/bias" not in oj.summary(apart)
    grads = {"l1": {"bias": jnp.ones(3)}, "l2": {"bias": None}}
    _, new = oj.update(apart, model, grads)
    assert np.array_equal(new["l2"]["bias"], zeros)
    close(new["l1"]["bias"], np.full(3, -0.1))


def test_untied_model_can_be_stepped_with_donation():
    """`ties=None` on a shared buffer must not bring 'donated twice' back."""
    zeros = jnp.zeros(3)
    model = {"a": zeros, "b": zeros}
    state = oj.setup(oj.SGD(0.1), model, ties=None)
    step = oj.make_step(lambda m: jnp.sum(m["a"] - 2 * m["b"]), donate=True)
    for _ in range(2):
        state, model, _ = step(state, model)
    close(model, {"a": np.full(3, -0.2), "b": np.full(3, 0.4)})


@pytest.mark.parametrize(
    "make",
    [
        lambda w: (w, w + 0),
        lambda w: (w, jnp.array(w)),
        lambda w: (w, w.T.T.reshape(3, 2)),
        lambda w: (np.asarray(w).copy(), np.asarray(w).copy()),
        lambda w: (jnp.zeros(3), jnp.zeros(3)),
        lambda w: (w, w.astype(jnp.bfloat16)),
    ],
)
def test_equal_values_are_no_tie(make):
    """Two layers that start equal are two layers."""
    state = oj.setup(oj.Adam(), make(weights()))
    assert list(state.slots) == ["0", "1"]
    assert not any(len(slot.places) > 1 for slot in state.ties.slots)


def test_numpy_arrays_are_tied_by_identity():
    """A model loaded as NumPy arrays keeps the ties that its objects show."""
    w = np.asarray(weights()).copy()
    state = oj.setup(oj.SGD(0.1), {"a": w, "b": w})
    assert list(state.slots) == ["a"]
    step = oj.make_step(lambda m: jnp.sum(m["a"] * m["b"]), donate=True)
    state, new, _ = step(state, {"a": w, "b": w})
    close(new["a"], w - 0.1 * 2 * w)
    assert new["a"] is new["b"]


def test_equal_gradient_objects_are_summed_all_the_same():
    """Whether gradients are 'already summed' must not hang on their identity."""
    w, g = weights(), weights(seed=1)
    state = oj.setup(oj.SGD(0.1), {"a": w, "b": w})
    _, new = oj.update(state, {"a": w, "b": w}, {"a": g, "b": g})
    close(new["a"], w - 0.2 * g)


def test_trainables_and_destructure_hold_a_tied_array_once():
    """Line searches and counters of parameters must not count a tie twice."""
    w = weights()
    model = {"a": w, "b": w, "c": jnp.array([7.0]), "f": jnp.tanh, "i": 3}
    assert list(oj.trainables(model)) == ["a", "c"]
    vector, rebuild = oj.destructure(model)
    assert vector.shape == (7,)
    new = rebuild(vector * 2)
    assert new["a"] is new["b"]
    assert new["f"] is jnp.tanh and new["i"] == 3
    close(new["a"], 2 * w)

    def loss(m):
        return jnp.sum(m["a"] * m["b"]) + jnp.sum(m["c"])

    slope = jax.grad(lambda v: loss(rebuild(v)))(vector)
    close(slope, np.concatenate([2 * np.ravel(w), [1.0]]))
    assert list(oj.trainables(model, ties=None)) == ["a", "b", "c"]


def test_paths_that_read_alike_are_told_apart():
    """A dict key with a slash must not merge two parameters into one slot."""
    model = {"a/b": jnp.array([1.0]), "a": {"b": jnp.array([2.0, 3.0])}}
    state = oj.setup(oj.SGD(1.0), model)
    assert len(state.slots) == 2
    grads = {"a/b": jnp.array([0.5]), "a": {"b": jnp.array([0.25, 0.125])}}
    _, new = oj.update(state, model, grads)
    close(new, jax.tree.map(lambda x, g: x - g, model, grads))
    assert len(oj.trainables(model)) == 2


def test_equinox_layer_used_twice_is_one_layer():
    """A shared layer object needs no `eqx.nn.Shared`, filter or partition."""
    net = Net(jax.random.key(0))
    state = oj.setup(oj.Adam(0.1), net)
    assert list(state.slots) == ["first/weight", "first/bias"]
    step = oj.make_step(lambda net, x: jnp.sum(net(x)))
    for _ in range(2):
        state, net, _ = step(state, net, jnp.array([1.0, -0.5, 2.0]))
        assert net.first.weight is net.second.weight
        assert net.first.bias is net.second.bias
    assert net.note == "tied" and net.scale == 0.5 and net.activation is jax.nn.relu
