"""Whole models of other libraries, as they come: no filter, no conversion."""

import chex
import equinox as eqx
import flax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import close, same_bits

import optimjax as oj


@pytest.fixture(autouse=True)
def usual_promotion():
    """The libraries rely on JAX's own dtype promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


X = jnp.linspace(-1, 1, 12).reshape(4, 3)


def falls(step, state, model, *batch, steps=60, share=0.2):
    values = []
    for _ in range(steps):
        state, model, value = step(state, model, *batch)
        values.append(float(value))
    assert values[-1] < share * values[0]
    return state, model


def test_an_equinox_module_is_trained_whole():
    """Functions, static fields and all, CASES 37; the step is the filtered one's."""
    mlp = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    state = oj.setup(oj.Adam(1e-2), mlp)

    def loss(mlp, x):
        return jnp.mean((jax.vmap(mlp)(x) - 1) ** 2)

    grads = eqx.filter_grad(loss)(mlp, X)
    _, updated = oj.update(state, mlp, grads)
    assert updated.activation is mlp.activation
    arrays = eqx.filter(mlp, eqx.is_array)
    filtered = oj.setup(oj.Adam(1e-2), arrays)
    _, expected = oj.update(filtered, arrays, eqx.filter(grads, eqx.is_array))
    same_bits(eqx.filter(updated, eqx.is_array), expected)
    falls(oj.make_step(loss, donate=True), *fresh(oj.Adam(1e-2), mlp), X)


def fresh(rule, model):
    model = jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, model)
    return oj.setup(rule, model), model


class Tied(eqx.Module):
    """An output layer that is the embedding, in Equinox's own way."""

    shared: eqx.nn.Shared

    def __init__(self, key):
        parts = (
            eqx.nn.Embedding(7, 4, key=key),
            eqx.nn.Linear(4, 7, use_bias=False, key=key),
        )
        self.shared = eqx.nn.Shared(parts, lambda p: p[1].weight, lambda p: p[0].weight)

    def __call__(self, token):
        embed, out = self.shared()
        return out(embed(token))


def test_equinox_shared_has_one_slot():
    model = Tied(jax.random.key(0))
    state = oj.setup(oj.Adam(0.05), model)
    assert len(state.ties.slots) == 1

    def loss(model, tokens):
        return jnp.mean((jax.vmap(model)(tokens) - 1) ** 2)

    falls(oj.make_step(loss), state, model, jnp.arange(7))


def test_equinox_normalisation_statistics_are_no_parameters():
    norm, stats = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    state = oj.setup(oj.SGD(0.1), norm)
    assert list(state.slots) == ["weight", "bias"]

    def loss(norm, stats, x):
        run = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, stats = run(x, stats)
        return jnp.mean((y - 1) ** 2), stats

    step = oj.make_step(loss, has_aux=True)
    for _ in range(3):
        state, norm, (_, stats) = step(state, norm, stats, X)
    assert not np.allclose(norm.bias, 0)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 4, rngs=rngs)
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.again = self.layer  # one module in two places
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, tokens):
        h = self.again(self.layer(self.embed(tokens)))
        return self.embed.attend(self.norm(h))


def test_nnx_split_and_merged_in_the_step():
    model = Net(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    state = oj.setup(oj.Adam(0.02), params)
    assert sum(name.startswith(("layer", "again")) for name in state.slots) == 2

    def loss(params, rest, tokens):
        net = nnx.merge(graph, params, rest, copy=True)
        logits = net(tokens)
        value = jnp.mean((logits - jnp.eye(7)[tokens]) ** 2)
        return value, nnx.split(net, nnx.Param, ...)[2]

    step = oj.make_step(loss, has_aux=True)
    tokens = jnp.arange(7)
    values = []
    for _ in range(60):
        state, params, (value, rest) = step(state, params, rest, tokens)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    nnx.update(model, params, rest)
    assert not np.allclose(model.norm.mean[...], 0)  # it kept its statistics


def test_nnx_arrays_in_two_variables_are_one_slot():
    first, second = (nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2))
    second.kernel = nnx.Param(first.kernel.get_value())
    params = nnx.state([first, second], nnx.Param)
    state = oj.setup(oj.SGD(0.1), params)
    assert str(state.ties) == "1/kernel/value is 0/kernel/value"


def test_nnx_clone_as_a_target_network_is_seen_to_be_the_same_arrays():
    """A clone holds the buffers of the original: a tie, whether one wants it or not."""
    online = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    model = {"online": nnx.state(online), "target": nnx.state(nnx.clone(online))}
    assert "target/kernel/value is online/kernel/value" in str(oj.find_ties(model))
    with pytest.raises(ValueError, match="make one of them a copy"):
        oj.setup(oj.SGD(0.1), model, trainable="online")
    model["target"] = jax.tree.map(jnp.copy, model["target"])
    state = oj.setup(oj.SGD(0.1), model, trainable="online")
    _, new = oj.update(state, model, jax.tree.map(jnp.ones_like, model))
    same_bits(new["target"], model["target"])


def test_linen_params_in_a_frozen_dict():
    params = flax.core.freeze({"dense": {"kernel": jnp.ones((2, 3))}})
    state = oj.setup(oj.SGD(0.1), params)
    # Gradients in other containers with the same paths are as good.
    _, new = oj.update(state, params, {"dense": {"kernel": jnp.ones((2, 3))}})
    assert isinstance(new, flax.core.FrozenDict)
    np.testing.assert_allclose(new["dense"]["kernel"], 0.9)
    by_path = oj.setup(oj.SGD({"dense/*": 0.5, "*": 0.1}), params)
    _, new = oj.update(by_path, params, params)
    np.testing.assert_allclose(new["dense"]["kernel"], 0.5)


def test_haiku_params():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 1])(x)))
    params = net.init(jax.random.key(0), X)
    state = oj.setup(oj.AdamW(1e-2, decay_where="*/w"), params)
    assert "mlp/~/linear_0/w" in state.slots

    def loss(params, x):
        return jnp.mean((net.apply(params, x) - 1) ** 2)

    falls(oj.make_step(loss), state, params, X)


@chex.dataclass
class Weights:
    w: chex.Array
    layers: int = 3


def test_chex_dataclass():
    model = Weights(w=jnp.ones(2))
    state = oj.setup(oj.SGD(0.1), model)
    _, new = oj.update(state, model, Weights(w=jnp.ones(2), layers=None))
    assert isinstance(new, Weights) and new.layers == 3
    close(new.w, 0.9 * np.ones(2, np.float32))
